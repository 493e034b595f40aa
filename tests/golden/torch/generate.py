#!/usr/bin/env python3
"""Make the files of this folder: checkpoints as torch.save writes them.

    python tests/golden/torch/generate.py

Made with torch 2.0.1 (CPU) on Python 3.11.

  state-dict.bin      state dict of a module (an OrderedDict with versions in an attribute), every element type
  protocol-N.bin      a dict of two tensors, pickle protocol N
  views.bin           tensors that share a storage, one of them transposed ("transposed", which cannot be served in place)
  parameters.bin      torch.nn.Parameter
  before-1.6.bin      the format without an archive
  hostile.bin         a pickle that calls os.system
  whole-module.bin    a module instead of its state dict
  llama/              the blocks of tests/golden/blocks/llama in two checkpoint files with an index
  expected.json       {file: {tensor: [type in the words of safetensors, shape, bytes in hex]}}
"""
import collections
import json
import os
import shutil

import torch
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
WORDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/a-pickle-was-executed",)


def described(tensor):
    tensor = tensor.detach().contiguous()
    flat = tensor.reshape(-1)
    raw = (flat if flat.dtype == torch.bool else flat.view(torch.uint8) if flat.numel() else flat)
    return [WORDS[tensor.dtype], list(tensor.shape), bytes(raw.to(torch.uint8).tolist()).hex()]


def main():
    torch.manual_seed(0)
    expected = {}

    def save(name, value, **kwargs):
        torch.save(value, os.path.join(HERE, name), **kwargs)
        if isinstance(value, dict):
            expected[name] = {k: described(v) for k, v in value.items() if isinstance(v, torch.Tensor)}

    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    for dtype in WORDS:
        state[f"of.{WORDS[dtype]}"] = (torch.randn(2, 3) * 3).to(dtype)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 4)
    save("state-dict.bin", state)
    for protocol in range(2, 6):
        pair = {"a.weight": torch.randn(4, 2), "b": torch.arange(5).half(), "step": 7, "name": "x", "list": [1, (2.5, None)]}
        save(f"protocol-{protocol}.bin", pair, pickle_protocol=protocol)
    base = torch.randn(6, 4)
    save("views.bin", {"all": base, "rows": base[2:5], "flat": base.view(-1)[3:11], "column": base[:, :1][1:2]})
    save("transposed.bin", {"whole": base, "transposed": base.t()})
    save("parameters.bin", {"p": torch.nn.Parameter(torch.randn(3, 3))})
    save("before-1.6.bin", {"a": torch.randn(2)}, _use_new_zipfile_serialization=False)
    save("hostile.bin", {"a": torch.randn(2), "b": Hostile()})
    save("whole-module.bin", module)
    del expected["before-1.6.bin"], expected["hostile.bin"], expected["transposed.bin"]
    source = os.path.join(HERE, "..", "blocks", "llama")
    target = os.path.join(HERE, "llama")
    os.makedirs(target, exist_ok=True)
    shutil.copy(os.path.join(source, "config.json"), target)
    tensors = load_file(os.path.join(source, "model.safetensors"))
    files = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    weight_map = {name: files[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in files:
        part = collections.OrderedDict((n, tensors[n]) for n in sorted(tensors) if weight_map[n] == file)
        torch.save(part, os.path.join(target, file))
    with open(os.path.join(target, "pytorch_model.bin.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f, indent=1)
    with open(os.path.join(HERE, "expected.json"), "w") as f:
        json.dump(expected, f, indent=1)


if __name__ == "__main__":
    main()
