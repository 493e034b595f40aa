#!/usr/bin/env python3
"""Make the golden data of tests/golden/adapters: LoRA adapters of PEFT for the blocks of tests/golden/blocks, and what PEFT computes.

    python tests/golden/generate_adapters.py [NAME ...]       # rewrites tests/golden/adapters/NAME, all without names

Made with peft 0.12.0, transformers 4.43.1 (qwen3.*: 4.51.3), torch 2.0.1 (CPU) on Python 3.11; the versions of a run are in each
expected.safetensors' metadata. Weights come from fixed seeds.

Per folder, BASE.NAME for the blocks of tests/golden/blocks/BASE:
  adapter_config.json, adapter_model.safetensors or .bin as PEFT saves them
  expected.safetensors, in float32, for the input and the output gradient in expected.safetensors of the base:
    forward          [blocks, batch, tokens, hidden]    out of each block, all tokens at once
    cached           the same, the first PROMPT tokens first and then token by token with the cache
    input_gradient   [batch, tokens, hidden]
"""
import json
import os
import shutil
import sys

import torch
from generate_blocks import PROMPT, TOKENS, Tap, run  # first: it lets transformers 4.51 find what torch 2.0 lacks
from safetensors.torch import load_file, save_file
import peft
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA_REGEX = r".*\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.(up|down)_proj)"
CASES = {
    "llama.all": dict(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                         "down_proj"]),
    "llama.regex": dict(r=6, lora_alpha=9, use_rslora=True, target_modules=LLAMA_REGEX, rank_pattern={"up_proj": 3},
                        alpha_pattern={"o_proj": 5}),
    "llama.some": dict(r=2, lora_alpha=4, target_modules=["v_proj"], layers_to_transform=[1], layers_pattern="layers"),
    # Petals matches `dense` by substring, and so reads the values of the other two for it.
    "bloom.dense": dict(r=4, lora_alpha=8, target_modules=["dense", "dense_4h_to_h", "dense_h_to_4h"]),
    "bloom.qkv": dict(r=4, lora_alpha=8, target_modules=["query_key_value"], bin=True),
    "falcon-7b.all": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "falcon-40b.all": dict(r=4, lora_alpha=8, target_modules=["query_key_value", "dense", "dense_h_to_4h",
                                                              "dense_4h_to_h"], bin=True),
    "falcon-rw.all": dict(r=3, lora_alpha=8, target_modules=["query_key_value", "dense"]),
    "mixtral.all": dict(r=2, lora_alpha=3, target_modules="all-linear"),
    "mixtral.experts": dict(r=3, lora_alpha=3, target_modules=["w1", "w2", "w3"]),
    "qwen2.all": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "qwen3.all": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "mistral-window.all": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
    "falcon-40b-bf16.all": dict(r=4, lora_alpha=2, target_modules="all-linear"),
    "bloom-bf16.all": dict(r=4, lora_alpha=2, target_modules="all-linear"),
}


def base_model(base):
    folder = os.path.join(HERE, "blocks", base)
    with open(os.path.join(folder, "config.json")) as f:
        fields = json.load(f)
    config = transformers.AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    inner = getattr(model, model.base_model_prefix)
    inner._use_sdpa = False  # Falcon chooses for itself
    layers = inner.h if hasattr(inner, "h") else inner.layers
    weights = {name.split("h." if hasattr(inner, "h") else "layers.", 1)[1]: value
               for name, value in load_file(os.path.join(folder, "model.safetensors")).items()}
    dtype = getattr(torch, fields["torch_dtype"])
    for p in model.parameters():
        p.data = p.data.to(dtype)
    layers.load_state_dict(weights)
    model.requires_grad_(False)
    given = load_file(os.path.join(folder, "expected.safetensors"))
    return model, inner, layers, dtype, given["input"].to(dtype), given["output_gradient"].to(dtype)


def make(name):
    fields = dict(CASES[name])
    is_bin = fields.pop("bin", False)
    base = name.split(".")[0]
    path = os.path.join(HERE, "adapters", name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    model, inner, layers, dtype, x, g = base_model(base)
    tap = Tap(layers)
    # bfloat16 stays: Petals computes an adapter in the dtype of its base.
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields), autocast_adapter_dtype=False)
    torch.manual_seed(len(name))
    for _, p in sorted(p for p in adapted.named_parameters() if "lora_" in p[0]):
        p.data = (torch.randn(p.shape) / p.shape[-1] ** 0.5).to(dtype)
    adapted.eval()
    x = x.clone().requires_grad_()
    forward = run(inner, tap, x, use_cache=False)
    tap.outputs[-1].backward(g)
    parts = []
    with torch.no_grad():
        cache = None
        for start, end in [(0, PROMPT)] + [(t, t + 1) for t in range(PROMPT, TOKENS)]:
            tap.first = x[:, start:end]
            mask = dict(attention_mask=torch.ones(len(x), end)) if base.startswith("falcon") else {}
            out = inner(inputs_embeds=torch.zeros_like(tap.first), past_key_values=cache, use_cache=True, **mask)
            cache = out.past_key_values
            parts.append(torch.stack([o.float() for o in tap.outputs]))
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(path, safe_serialization=not is_bin, save_embedding_layers=False)
    os.remove(os.path.join(path, "README.md"))
    expected = dict(forward=forward, cached=torch.cat(parts, 2), input_gradient=x.grad)
    save_file({k: v.float().contiguous() for k, v in expected.items()}, os.path.join(path, "expected.safetensors"),
              metadata=dict(peft=peft.__version__, transformers=transformers.__version__, torch=torch.__version__))
    plain = load_file(os.path.join(HERE, "blocks", base, "expected.safetensors"))["forward"]
    spread = (forward - expected["cached"]).norm() / forward.norm()
    effect = (forward - plain).norm() / plain.norm()
    size = sum(os.path.getsize(os.path.join(path, f)) for f in os.listdir(path))
    print(f"{name}: changes {effect:.2f}, cached differs by {spread:.1e}, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name)
