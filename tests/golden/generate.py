#!/usr/bin/env python3
"""Make the golden data of tests/golden: tiny Llama checkpoints and what transformers computes with them.

    python tests/golden/generate.py            # rewrites tests/golden/llama-*/

Made with transformers 4.43.1, torch 2.0.1 (CPU), numpy 1.26.4, safetensors 0.4.5 on Python 3.11; the versions of the last
run are in each expected.safetensors' metadata. Weights come from fixed seeds (one NumPy generator per checkpoint, drawn in sorted order of
names). transformers older than 4.43 does not know the llama3 rope scaling.

Per checkpoint:
  config.json, model.safetensors (or two files and model.safetensors.index.json)
  expected.safetensors, all in float32:
    inverse_frequencies [head_dim / 2]    of layer 0's rotary embedding
    forward             [layers, batch, prompt + new - 1, hidden]    output of each block for the prompt and the greedy
                        tokens, all at once, no cache
    cached              the same, but the prompt first and then token by token with the cache
    prompt_tokens       [batch, prompt], greedy_tokens [batch, new]    int64
"""
import json
import os
import shutil

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, PROMPT, NEW = 3, 26, 9
BASE = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
# torch 2.0.1 computes two things of bfloat16 in a way that no real model meets, and the sizes here avoid both: it sums in
# bfloat16 where a product is very small (under 400 terms in attention: hence 26 tokens of prompt with heads of 16; up to 4096 in
# a linear: hence a batch of 3), and it rounds the divisor of the scores (exact here: 4).
CASES = {
    "llama-mha": dict(config=dict(BASE, hidden_size=48)),
    "llama-gqa-sharded": dict(config=dict(BASE, num_key_value_heads=2), shard="50KB"),
    "llama-mqa-llama3-rope": dict(config=dict(BASE, hidden_size=64, num_key_value_heads=1, rope_theta=500000.0,
                                              rope_scaling=LLAMA3)),
    "llama-linear-rope": dict(config=dict(BASE, num_key_value_heads=2, rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama-biases": dict(config=dict(BASE, attention_bias=True, mlp_bias=True)),
    "llama-gqa-bf16": dict(config=dict(BASE, hidden_size=64, num_key_value_heads=2), dtype="bfloat16"),
    "llama-everything-bf16": dict(config=dict(BASE, hidden_size=64, num_key_value_heads=2, attention_bias=True,
                                              mlp_bias=True, rope_theta=500000.0, rope_scaling=LLAMA3),
                                  dtype="bfloat16", shard="40KB"),
}


def randomize(model, seed):
    """Every parameter random, biases and norms too: a wrong one shows in the output."""
    rng = np.random.default_rng(seed)
    seen = set()
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.data_ptr() in seen:
                continue
            seen.add(p.data_ptr())
            draw = rng.standard_normal(tuple(p.shape), dtype=np.float32)
            if name.endswith("bias"):
                draw *= 0.1
            elif draw.ndim == 1:
                draw = 1.0 + 0.1 * draw
            elif "embed" not in name:
                draw *= 1.2 / np.sqrt(draw.shape[-1])
            p.copy_(torch.from_numpy(draw))
    return rng


def run(model, prompt):
    """Greedy tokens, the blocks' outputs with and without cache, and the smallest lead of a greedy token over the next."""
    layers = model.model.layers
    outputs = [[] for _ in layers]
    hooks = [layer.register_forward_hook(lambda m, a, out, k=k: outputs[k].append(out[0].float()))
             for k, layer in enumerate(layers)]
    tokens, cache, lead = prompt, None, 1e9
    fed, greedy = [prompt], []
    for _ in range(NEW):
        out = model(tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        top = logits.topk(2).values
        lead = min(lead, ((top[:, 0] - top[:, 1]) / logits.std(-1)).min().item())
        tokens = logits.argmax(-1, keepdim=True)
        greedy.append(tokens)
        fed.append(tokens)
    cached = torch.stack([torch.cat(o, 1) for o in outputs])
    every = torch.cat(fed[:-1], 1)
    for o in outputs:
        o.clear()
    model(every, use_cache=False)
    forward = torch.stack([o[0] for o in outputs])
    for hook in hooks:
        hook.remove()
    return torch.cat(greedy, 1), every, forward, cached, lead


def edit_config(path, **fields):
    path = os.path.join(path, "config.json")
    with open(path) as f:
        config = json.load(f)
    with open(path, "w") as f:
        json.dump(dict(config, **fields), f, indent=2, sort_keys=True)


def make(name, case):
    path = os.path.join(HERE, name)
    shutil.rmtree(path, ignore_errors=True)
    dtype = getattr(torch, case.get("dtype", "float32"))
    # Greedy tokens must not hang on a rounding: take the first seed where they lead clearly.
    for seed in range(1000):
        config = LlamaConfig(**case["config"])
        config._attn_implementation = "eager"
        model = LlamaForCausalLM(config).float().eval()
        rng = randomize(model, seed)
        for p in model.parameters():  # the buffers (frequencies) stay in float32, as after from_pretrained
            p.data = p.data.to(dtype)
        model.config.torch_dtype = dtype
        prompt = torch.from_numpy(rng.integers(3, config.vocab_size, (BATCH, PROMPT)))
        with torch.no_grad():
            greedy, every, forward, cached, lead = run(model, prompt)
        distinct = min(len(set(row)) for row in greedy.tolist())
        if lead > 0.05 and distinct > NEW // 2:
            break
    else:
        raise SystemExit(f"{name}: no seed with clear greedy tokens")
    model.save_pretrained(path, max_shard_size=case.get("shard", "5GB"))
    os.remove(os.path.join(path, "generation_config.json"))
    if name == "llama-linear-rope":  # the spelling of older checkpoints
        edit_config(path, rope_scaling=dict(type="linear", factor=4.0))
    save_file(
        dict(
            inverse_frequencies=model.model.layers[0].self_attn.rotary_emb.inv_freq.float().contiguous(),
            forward=forward.contiguous(), cached=cached.contiguous(),
            prompt_tokens=prompt.contiguous(), greedy_tokens=greedy.contiguous(),
        ),
        os.path.join(path, "expected.safetensors"),
        metadata=dict(transformers=transformers.__version__, torch=torch.__version__, numpy=np.__version__, seed=str(seed)),
    )
    size = sum(os.path.getsize(os.path.join(path, f)) for f in os.listdir(path))
    print(f"{name}: seed {seed}, lead {lead:.3f}, {size / 1024:.0f} KiB, {sorted(os.listdir(path))}")
    return size


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"{sum(make(name, case) for name, case in CASES.items()) / 1024:.0f} KiB in all")
