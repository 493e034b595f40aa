#!/usr/bin/env python3
"""Make the golden data of tests/golden/blocks: the blocks of tiny models of every family and what transformers computes with them.

    python tests/golden/generate_blocks.py [NAME ...]       # rewrites tests/golden/blocks/NAME, all without names
    BITSANDBYTES=SITE:NEW python ...                        # and NAME/quantized.safetensors (see bitsandbytes_cpu.py)

Made with transformers 4.43.1 (qwen3-*, llama-longrope, qwen2-yarn: 4.51.3, the first of them that knows it), torch 2.0.1 (CPU) on Python 3.11; the
versions of a run are in each expected.safetensors' metadata. Weights come from fixed seeds.

Per folder:
  config.json, model.safetensors (the tensors of the blocks alone, named as in published checkpoints)
  expected.safetensors, in float32 (computed in float32, from float16 values, for *-f16):
    input            [batch, tokens, hidden]            into the first block
    forward          [blocks, batch, tokens, hidden]    out of each block, all tokens at once
    cached           the same, the first PROMPT tokens first and then token by token with the cache
    output_gradient  [batch, tokens, hidden]
    input_gradient   [batch, tokens, hidden]
    prompts          [blocks, batch, PREFIX, hidden]    added to the first tokens before each block
    prompted, prompted_input_gradient, prompt_gradient  output, gradient of the input and of the prompts with them
  quantized.safetensors: for QUANT int8 and nf4, QUANT.forward and so on as above, from the same inputs, where each matrix but the
    router of experts holds what bitsandbytes makes of its weights
"""
import json
import os
import shutil
import sys
import types

import torch

if not hasattr(torch, "compiler"):  # torch 2.0 under transformers 4.51, which decorates with it and needs no more of it
    torch.compiler = types.SimpleNamespace(disable=lambda *a, **k: lambda f: f, is_compiling=lambda: False)
    torch.float8_e4m3fn = torch.float8_e5m2 = torch.int8
import transformers
from safetensors.torch import save_file

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "blocks")
BATCH, TOKENS, PROMPT, PREFIX = 2, 21, 16, 3
STEERED, MARGIN = (14.0, 12.0), 0.02  # a router's logits before the norm, and the least distance of weights: see `steer`
LLAMA = dict(hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5)
BLOOM = dict(hidden_size=48, n_layer=2, n_head=3, vocab_size=64)
FALCON = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, vocab_size=64)
CASES = {
    "llama": ("Llama", LLAMA, {}),
    "mistral-window": ("Mistral", dict(LLAMA, sliding_window=5), {}),
    "qwen2": ("Qwen2", dict(LLAMA, rms_norm_eps=1e-6, rope_theta=1e6), {}),
    "qwen3": ("Qwen3", dict(LLAMA, head_dim=16, rope_theta=1e6), {}),
    "qwen3-bf16": ("Qwen3", dict(LLAMA, hidden_size=64, head_dim=32), dict(dtype="bfloat16")),
    "bloom": ("Bloom", BLOOM, {}),
    "bloom-post-ln": ("Bloom", dict(BLOOM, apply_residual_connection_post_layernorm=True), {}),
    "bloom-bf16": ("Bloom", dict(BLOOM, hidden_size=64, n_head=4), dict(dtype="bfloat16")),
    "falcon-7b": ("Falcon", FALCON, {}),
    "falcon-40b": ("Falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2), {}),
    "falcon-11b": ("Falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
                                  rope_theta=500042.0, ffn_hidden_size=100), {}),
    "falcon-rw": ("Falcon", dict(FALCON, alibi=True, bias=True, multi_query=False, parallel_attn=False), {}),
    "falcon-40b-bf16": ("Falcon", dict(FALCON, hidden_size=64, num_attention_heads=4, new_decoder_architecture=True,
                                       num_kv_heads=2), dict(dtype="bfloat16")),
    "mixtral": ("Mixtral", dict(LLAMA, num_local_experts=5, num_experts_per_tok=2, sliding_window=None), {}),
    # Rotations that depend on the length: the sequences pass the length of the training.
    "llama-dynamic-rope": ("Llama", dict(LLAMA, max_position_embeddings=12,
                                         rope_scaling=dict(rope_type="dynamic", factor=2.0)), {}),
    "llama-longrope": ("Llama", dict(LLAMA, max_position_embeddings=48, original_max_position_embeddings=18, rope_scaling=dict(
        rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.4, 1.5, 1.6], long_factor=[1, 1.5, 2.5, 4.0, 5.0, 6.5])), {}),
    "qwen2-yarn": ("Qwen2", dict(LLAMA, max_position_embeddings=32, rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0)), {}),
}
CASES |= {name + "-bf16": (*CASES[name][:2], dict(dtype="bfloat16"))
          for name in ["llama", "mistral-window", "qwen2", "falcon-7b", "falcon-11b", "falcon-rw"]}
CASES |= {name + "-f16": (*CASES[name][:2], dict(dtype="float16"))
          for name in ["llama", "mistral-window", "qwen2", "qwen3", "bloom", "falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw"]}
# Rounding would send a token of random values to other experts now and then: see `steer`.
CASES |= {"mixtral-" + short: (*CASES["mixtral"][:2], dict(dtype=dtype, steered=True))
          for short, dtype in [("bf16", "bfloat16"), ("f16", "float16")]}


def randomize(layers, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(layers.named_parameters()):
            draw = torch.randn(p.shape)
            if name.endswith("bias"):
                draw *= 0.1
            elif p.dim() == 1:
                draw = 1 + 0.1 * draw
            else:
                draw *= 1.2 / p.shape[-1] ** 0.5
            p.copy_(draw)


def steer(layers, x):
    """The input changed as little as gives each token, in each block, a router's first and second expert drawn for it.

    Of random values some token has a second and a third expert of nearly the same weight, however large the router's weights are
    (its rounding errors grow with them). `assert_clear` checks the distance in everything that is computed from this input.
    """
    routers = torch.cat([layer.block_sparse_moe.gate.weight.float() for layer in layers])
    experts = len(routers) // len(layers)
    wanted = torch.zeros(*x.shape[:2], len(routers))
    for token in wanted.view(-1, len(routers)):
        for k in range(len(layers)):
            first, second = torch.randperm(experts)[:2]
            token[k * experts + first], token[k * experts + second] = STEERED
    return x + (wanted - x @ routers.T) @ torch.linalg.pinv(routers).T


def assert_clear(gate, args, logits):
    """Of each token the second expert weighs more than the third by MARGIN, among all experts."""
    weights = logits.detach().float().softmax(-1).sort(-1, descending=True).values
    margin = (weights[:, 1] - weights[:, 2]).min().item()
    assert margin > MARGIN, f"a token's experts are {margin:.3f} apart"


class Tap:
    """Replaces the input of the first block, adds prompts, and keeps the output of every block."""

    def __init__(self, layers):
        self.first, self.prompts, self.outputs = None, None, [None] * len(layers)
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda m, args, k=k: self.enter(k, args))
            layer.register_forward_hook(lambda m, args, out, k=k: self.leave(k, out))

    def enter(self, k, args):
        x = self.first if k == 0 else args[0]
        if self.prompts is not None:
            added = x[:, :PREFIX] + self.prompts[k]
            x = torch.cat([added, x[:, PREFIX:]], 1)
        return (x,) + args[1:]

    def leave(self, k, out):
        self.outputs[k] = out[0]


def run(model, tap, x, cache=None, **kwargs):
    tap.first = x
    model(inputs_embeds=torch.zeros_like(x), past_key_values=cache, **kwargs)
    return torch.stack([o.detach().float() for o in tap.outputs])


def gradients(model, tap, x, prompts, g):
    tap.prompts = None if prompts is None else prompts.clone().requires_grad_()
    x = x.clone().requires_grad_()
    outputs = run(model, tap, x, use_cache=False)
    tap.outputs[-1].backward(g)
    return outputs, x.grad.float(), None if prompts is None else tap.prompts.grad.float()


def build(name):
    family, fields, options = CASES[name]
    stored = getattr(torch, options.get("dtype", "float32"))
    # torch 2.0 has no products of float16 on the CPU: the float16 values go through float32.
    dtype = torch.float32 if stored == torch.float16 else stored
    config = getattr(transformers, family + "Config")(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, family + "Model")(config).float().eval()
    model._use_sdpa = False  # Falcon chooses for itself
    layers = model.h if hasattr(model, "h") else model.layers
    randomize(layers, len(name))
    model.requires_grad_(False)
    for p in model.parameters():
        p.data = p.data.to(stored).to(dtype)
    for layer in layers if options.get("steered") else []:
        layer.block_sparse_moe.gate.register_forward_hook(assert_clear)
    return model, layers, stored, dtype


def cached(model, tap, x):
    """Outputs of the first PROMPT tokens and then of one token at a time."""
    tap.prompts, parts, cache = None, [], None
    with torch.no_grad():
        # A dynamic encoding remembers the longest sequence until it sees a short one.
        run(model, tap, x[:, :4], use_cache=False)
        for start, end in [(0, PROMPT)] + [(t, t + 1) for t in range(PROMPT, TOKENS)]:
            tap.first = x[:, start:end]
            # Without a mask Falcon has none to add for a single token.
            mask = dict(attention_mask=torch.ones(BATCH, end)) if type(model).__name__ == "FalconModel" else {}
            out = model(inputs_embeds=torch.zeros_like(tap.first), past_key_values=cache, use_cache=True, **mask)
            cache = out.past_key_values
            parts.append(torch.stack([o.float() for o in tap.outputs]))
    return torch.cat(parts, 2)


def measure(model, tap, x, g, prompts):
    forward, dx, _ = gradients(model, tap, x, None, g)
    prompted, prompted_dx, dprompts = gradients(model, tap, x, prompts, g)
    return dict(forward=forward, cached=cached(model, tap, x), input_gradient=dx, prompted=prompted[-1],
                prompted_input_gradient=prompted_dx, prompt_gradient=dprompts)


def quantize(layers, decode, stored):
    for name, p in layers.named_parameters():
        if p.dim() == 2 and not name.endswith("block_sparse_moe.gate.weight"):
            p.data = decode(p.data.to(stored)).to(stored).to(p.dtype)


def save(path, tensors):
    save_file({k: v.float().contiguous() for k, v in tensors.items()}, path,
              metadata=dict(transformers=transformers.__version__, torch=torch.__version__))


def make(name):
    path = os.path.join(HERE, name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    model, layers, stored, dtype = build(name)
    x, g = torch.randn(2, BATCH, TOKENS, model.config.hidden_size)
    if CASES[name][2].get("steered"):
        x = steer(layers, x)
    x, g = x.to(stored).to(dtype), g.to(stored).to(dtype)
    prompts = torch.randn(len(layers), BATCH, PREFIX, model.config.hidden_size).to(stored).to(dtype)
    # In the files of bigscience the blocks of BLOOM are `h.<i>`, in all others they are below the model.
    below = {"Bloom": "h.", "Falcon": "transformer.h."}.get(CASES[name][0], "model.layers.")
    save_file({below + k: p.detach().to(stored).contiguous() for k, p in layers.named_parameters()},
              os.path.join(path, "model.safetensors"))
    fields = dict(CASES[name][1], model_type=model.config.model_type, torch_dtype=str(stored).split(".")[1])
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(fields, f, indent=2, sort_keys=True)
    tap = Tap(layers)
    expected = measure(model, tap, x, g, prompts)
    spread = (expected["forward"] - expected["cached"]).norm() / expected["forward"].norm()
    save(os.path.join(path, "expected.safetensors"), dict(expected, input=x, output_gradient=g, prompts=prompts))
    if "BITSANDBYTES" in os.environ:
        make_quantized(name, x, g, prompts)
    size = sum(os.path.getsize(os.path.join(path, f)) for f in os.listdir(path))
    print(f"{name}: cached differs by {spread:.1e}, {size / 1024:.0f} KiB")


def make_quantized(name, x, g, prompts):
    from bitsandbytes_cpu import DECODED
    tensors = {}
    for quant, decode in DECODED.items():
        model, layers, stored, _ = build(name)
        quantize(layers, decode, stored)
        expected = measure(model, Tap(layers), x, g, prompts)
        tensors |= {f"{quant}.{key}": value for key, value in expected.items()}
    save(os.path.join(HERE, name, "quantized.safetensors"), tensors)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name)
