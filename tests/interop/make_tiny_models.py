#!/usr/bin/env python3
"""Write tiny random-weight checkpoints in Hugging Face layout for interop tests.

    python make_tiny_models.py OUT_DIR [--only NAME ...] [--list] [--force]

Weights come from fixed seeds (one NumPy generator per model, drawn in sorted parameter order),
so the same names give the same weights whatever the transformers version (checked: 4.34.1 and 4.43.1). Every norm weight and
bias is random as well, and the matrices are scaled so that greedy text is not degenerate: a
wrong bias, norm or head order shows in the output.

Formats on disk, on purpose not all the same:
  llama-gqa        model.safetensors
  llama31-rope     sharded safetensors + model.safetensors.index.json, Llama-3.1 rope_scaling
  llama-bf16       model.safetensors in bfloat16, tied embeddings
  bloom            names without `transformer.` in front, as in BigScience's repositories
  falcon-new       the new decoder architecture, grouped keys and values
  llama-gqa-lora-qv, llama-gqa-lora-all     LoRA adapters in peft layout for llama-gqa
"""
import argparse
import hashlib
import json
import os
import shutil
import sys

import numpy as np


def model_specs():
    llama = dict(
        hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    return {
        "llama-gqa": dict(seed=101, cfg=llama),
        "llama31-rope": dict(
            seed=102, shard="4MB",
            cfg=dict(llama, hidden_size=256, num_attention_heads=4, num_key_value_heads=1, intermediate_size=512,
                     num_hidden_layers=4, rope_theta=500000.0, max_position_embeddings=8192,
                     rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=256)),
        ),
        "bloom": dict(
            seed=105, family="bloom",
            cfg=dict(hidden_size=128, n_layer=4, n_head=4, vocab_size=512, layer_norm_epsilon=1e-5, seq_length=4096,
                     hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=3),
        ),
        "falcon-new": dict(
            seed=106, family="falcon",
            cfg=dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_kv_heads=2, vocab_size=512,
                     new_decoder_architecture=True, multi_query=True, parallel_attn=True, bias=False, alibi=False,
                     hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2),
        ),
        "llama-bf16": dict(
            seed=104, dtype="bfloat16",
            cfg=dict(llama, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4,
                     tie_word_embeddings=True),
        ),
    }


ADAPTERS = {
    "llama-gqa-lora-qv": dict(seed=201, base="llama-gqa", r=4, alpha=16, target_modules=["q_proj", "v_proj"]),
    "llama-gqa-lora-all": dict(
        seed=202, base="llama-gqa", r=8, alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
}


CLASSES = {family: (f"{family.capitalize()}Config", f"{family.capitalize()}ForCausalLM")
           for family in ("llama", "bloom", "falcon")}


def build_config(transformers, cfg, family):
    cfg = dict(cfg)
    rope_scaling = cfg.pop("rope_scaling", None)
    config = getattr(transformers, CLASSES[family][0])(**cfg)
    if rope_scaling is not None:
        config.rope_scaling = rope_scaling  # set late: old versions reject types that they do not know
    return config


def randomize(torch, model, seed):
    rng = np.random.default_rng(seed)
    seen = set()
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.data_ptr() in seen:
                continue
            seen.add(p.data_ptr())
            shape = tuple(p.shape)
            draw = rng.standard_normal(shape, dtype=np.float32)
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "bias":
                draw *= 0.1
            elif len(shape) == 1:
                draw = 1.0 + 0.1 * draw  # norm weights
            elif "embed" in name:
                draw *= 0.7
            else:
                gain = 1.4 if "lm_head" in name else 1.0
                draw *= gain / np.sqrt(shape[-1])
            p.copy_(torch.from_numpy(draw))


def write_model(torch, transformers, path, spec):
    """Writes a model folder; returns the number of parameters."""
    family = spec.get("family", "llama")
    config = build_config(transformers, spec["cfg"], family)
    saved_scaling = getattr(config, "rope_scaling", None)
    if saved_scaling and not _knows_llama3(transformers):
        config.rope_scaling = None  # weights do not depend on it; written to config.json below
    model = getattr(transformers, CLASSES[family][1])(config).float()
    randomize(torch, model, spec["seed"])
    model = model.to(getattr(torch, spec.get("dtype", "float32")))
    shards = dict(max_shard_size=spec["shard"]) if "shard" in spec else {}
    if family == "bloom":
        # The head is tied to the embeddings and not stored.
        state = {name.removeprefix("transformer."): p for name, p in model.state_dict().items() if "lm_head" not in name}
        shards["state_dict"] = state
    model.save_pretrained(path, safe_serialization=True, **shards)
    config_path = os.path.join(path, "config.json")
    written = json.load(open(config_path))
    if saved_scaling:
        written["rope_scaling"] = saved_scaling
    written.pop("_name_or_path", None)
    written["architectures"] = [CLASSES[family][1]]
    json.dump(written, open(config_path, "w"), indent=2, sort_keys=True)
    write_tokenizer(path)
    return sum(p.numel() for p in model.parameters())


def write_adapter(path, spec, base):
    from safetensors.numpy import save_file

    hidden, inter = base["hidden_size"], base["intermediate_size"]
    kv = hidden // base["num_attention_heads"] * base["num_key_value_heads"]
    shapes = dict(q_proj=(hidden, hidden), k_proj=(kv, hidden), v_proj=(kv, hidden), o_proj=(hidden, hidden),
                  gate_proj=(inter, hidden), up_proj=(inter, hidden), down_proj=(hidden, inter))
    rng = np.random.default_rng(spec["seed"])
    tensors = {}
    for layer in range(base["num_hidden_layers"]):
        for module in sorted(spec["target_modules"]):
            parent = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            out_features, in_features = shapes[module]
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            a = rng.standard_normal((spec["r"], in_features), dtype=np.float32) / np.sqrt(in_features)
            b = rng.standard_normal((out_features, spec["r"]), dtype=np.float32) * 0.3 / np.sqrt(spec["r"])
            tensors[prefix + ".lora_A.weight"] = np.ascontiguousarray(a, dtype=np.float32)
            tensors[prefix + ".lora_B.weight"] = np.ascontiguousarray(b, dtype=np.float32)
    os.makedirs(path, exist_ok=True)
    save_file(tensors, os.path.join(path, "adapter_model.safetensors"), metadata={"format": "pt"})
    config = dict(
        base_model_name_or_path=spec["base"], bias="none", fan_in_fan_out=False, inference_mode=True,
        init_lora_weights=True, layers_pattern=None, layers_to_transform=None, lora_alpha=spec["alpha"],
        lora_dropout=0.05, modules_to_save=None, peft_type="LORA", r=spec["r"], revision=None,
        target_modules=spec["target_modules"], task_type="CAUSAL_LM",
    )
    with open(os.path.join(path, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)


TEXT = """the cat sat on a mat and a dog ran to the log while test strings were written in simple words
once upon a time there was a small model that knew only numbers and letters 0 1 2 3 4 5 6 7 8 9
A quick brown fox jumps over the lazy dog. Hello, world! Is this a test? Yes - it is: (a b c); "d" 'e'."""


def write_tokenizer(path):
    """A small byte-level tokenizer, so that programs which want text can run."""
    import sentencepiece

    with open(os.path.join(path, "tokenizer.model"), "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.split("\n")), model_writer=f, vocab_size=390, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, character_coverage=1.0, pad_id=-1, unk_id=0, bos_id=1,
            eos_id=2, minloglevel=2, num_threads=1)
    config = dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                  add_bos_token=True, add_eos_token=False, model_max_length=4096, legacy=True)
    with open(os.path.join(path, "tokenizer_config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)


def describe(path):
    out = {}
    for name in sorted(os.listdir(path)):
        full = os.path.join(path, name)
        if os.path.isfile(full):
            digest = hashlib.sha256(open(full, "rb").read()).hexdigest()
            out[name] = {"bytes": os.path.getsize(full), "sha256": digest}
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", nargs="?")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--force", action="store_true", help="rewrite what is already there")
    args = parser.parse_args()
    specs = model_specs()
    if args.list or not args.out_dir:
        print("\n".join(list(specs) + list(ADAPTERS)))
        return 0

    import torch
    import transformers

    wanted = args.only or list(specs) + list(ADAPTERS)
    unknown = set(wanted) - set(specs) - set(ADAPTERS)
    if unknown:
        parser.error(f"unknown: {sorted(unknown)}")
    manifest_path = os.path.join(args.out_dir, "manifest.json")
    os.makedirs(args.out_dir, exist_ok=True)
    manifest = json.load(open(manifest_path)) if os.path.exists(manifest_path) else {}

    for name in wanted:
        path = os.path.join(args.out_dir, name)
        if os.path.exists(os.path.join(path, "done")) and not args.force:
            print(f"{name}: already there")
            continue
        if os.path.isdir(path):
            shutil.rmtree(path)
        if name in specs:
            n_params = write_model(torch, transformers, path, specs[name])
        else:
            write_adapter(path, ADAPTERS[name], specs[ADAPTERS[name]["base"]]["cfg"])
            n_params = None
        manifest[name] = {"files": describe(path), "parameters": n_params, "transformers": transformers.__version__}
        open(os.path.join(path, "done"), "w").close()
        size = sum(f["bytes"] for f in manifest[name]["files"].values())
        print(f"{name}: {size / 1e6:.2f} MB, files {', '.join(manifest[name]['files'])}")
        json.dump(manifest, open(manifest_path, "w"), indent=1, sort_keys=True)
    return 0


def _knows_llama3(transformers):
    try:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return "llama3" in ROPE_INIT_FUNCTIONS
    except ImportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
