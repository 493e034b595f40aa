#!/usr/bin/env python3
"""Write tiny random models of several families, and how transformers continues a prompt with each.

    python make.py OUT_DIR [NAME ...]    needs torch, transformers, safetensors, numpy

Made with transformers 4.34.1; qwen2, qwen3 and mixtral, which that does not know, with 4.51.3.

Each folder holds config.json, model.safetensors (bfloat16 would hide errors: float32) and golden.json
with the tokens of a prompt, of the greedy continuation, and of one with a repetition penalty. Weights come
from one NumPy generator per model, in the order of sorted names; all norms and biases are random too.
"""
import json
import os
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SMALL = dict(hidden_size=32, vocab_size=96, bos_token_id=1, eos_token_id=2)
MODELS = {
    "mistral": dict(
        seed=11, config="MistralConfig", model="MistralForCausalLM", prefix="",
        cfg=dict(SMALL, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, rms_norm_eps=1e-5, sliding_window=256, tie_word_embeddings=False),
    ),
    "bloom": dict(
        seed=22, config="BloomConfig", model="BloomForCausalLM", prefix="transformer.",
        cfg=dict(SMALL, n_layer=2, n_head=4, layer_norm_epsilon=1e-5, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "falcon": dict(
        seed=13, config="FalconConfig", model="FalconForCausalLM", prefix="",
        cfg=dict(SMALL, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True,
                 multi_query=True, parallel_attn=True, bias=False, alibi=False, hidden_dropout=0.0,
                 attention_dropout=0.0),
    ),
    "qwen2": dict(
        seed=24, config="Qwen2Config", model="Qwen2ForCausalLM", prefix="",
        cfg=dict(SMALL, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True),
    ),
    "qwen3": dict(
        seed=35, config="Qwen3Config", model="Qwen3ForCausalLM", prefix="",
        cfg=dict(SMALL, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False),
    ),
    "mixtral": dict(
        seed=46, config="MixtralConfig", model="MixtralForCausalLM", prefix="",
        cfg=dict(SMALL, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e6, num_local_experts=4,
                 num_experts_per_tok=2, tie_word_embeddings=False),
    ),
}
PROMPT = [1, 17, 42, 5, 80, 17, 42]
NEW_TOKENS = 32


def fill(model, seed):
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            shape = tuple(parameter.shape)
            values = rng.standard_normal(shape).astype(np.float32)
            if parameter.dim() == 2:
                values *= 1.6 / np.sqrt(shape[1])
            elif "bias" in name:
                values *= 0.2
            else:
                values = 1.0 + 0.2 * values
            if "word_embeddings_layernorm" in name:
                # Else a head that shares the embeddings' matrix repeats its input.
                values *= 0.2
            parameter.copy_(torch.from_numpy(values))


def main(out, names):
    for name in names or MODELS:
        spec = MODELS[name]
        config = getattr(transformers, spec["config"])(**spec["cfg"])
        model = getattr(transformers, spec["model"])(config).eval()
        fill(model, spec["seed"])
        folder = os.path.join(out, name)
        os.makedirs(folder, exist_ok=True)
        # As BigScience publishes it, BLOOM has no `transformer.` in front.
        tensors = {}
        tied = config.tie_word_embeddings
        for key, value in model.state_dict().items():
            if key == "lm_head.weight" and tied or key.endswith(("inv_freq", ".masked_bias")):
                continue
            if spec["prefix"] and key.startswith(spec["prefix"]):
                key = key[len(spec["prefix"]):]
            tensors[key] = value.contiguous().clone()
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        fields = {key: value for key, value in config.to_diff_dict().items()}
        fields.update(model_type=config.model_type, torch_dtype="float32", dht_prefix=f"tiny-{name}")
        fields.pop("transformers_version", None)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(fields, file, indent=1, sort_keys=True)
            file.write("\n")
        golden = {"prompt": PROMPT}
        for key, more in [("greedy", {}), ("penalized", dict(repetition_penalty=1.5))]:
            with torch.no_grad():
                ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False,
                                     pad_token_id=0, eos_token_id=None, **more)
            ids = ids[0, len(PROMPT):].tolist()
            # Newer versions go on behind the token that ends a text.
            golden[key] = ids[:ids.index(2) + 1] if 2 in ids else ids
        with open(os.path.join(folder, "golden.json"), "w") as file:
            json.dump(golden, file)
            file.write("\n")
        print(name, golden["greedy"], golden["penalized"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
