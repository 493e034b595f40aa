"""Makes the golden data of the quantization formats with bitsandbytes.

    python generate.py SITE NEW

SITE has bitsandbytes 0.45.5 (its C library for the CPU quantizes the scales, its functional.py makes the dynamic map), NEW
has the sources of bitsandbytes 0.48.2, whose CPU implementations of quantize_4bit and int8_vectorwise_quant
(backends/default/ops.py) are pure PyTorch. Run with torch 2.0.1, numpy 1.26.4. All files are little-endian.

    map.f32                             the signed dynamic map
    nf4.{weights.bf16,codes.u8,absmax.f32,absmax.u8,absmax2.f32,offset.f32,decoded.f32}
    int8.{weights.bf16,codes.i8,absmax.f32}   [24, 100]
"""
import ctypes, pathlib, sys
from math import prod
from typing import Optional

site, new = sys.argv[1:3]
sys.path.insert(0, site)
import numpy as np
import torch
import bitsandbytes.functional as F

here = pathlib.Path(__file__).parent
kernels = {}


def register_kernel(name, device):
    def keep(function):
        kernels[name.split("::")[1]] = function
        return function
    return keep


source = pathlib.Path(new, "bitsandbytes/backends/default/ops.py").read_text()
start = source.index('@register_kernel("bitsandbytes::int8_vectorwise_quant"')
end = source.index('@register_kernel("bitsandbytes::dequantize_4bit"')
torch._check_is_size = torch._check = lambda *_: None
scope = {"register_kernel": register_kernel, "torch": torch, "prod": prod, "Optional": Optional,
         "CODE": {"nf4": F.get_4bit_type("nf4", device="cpu")}}
exec(source[start:end], scope)


def save(name, tensor):
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    tensor.contiguous().numpy().tofile(here / name)


def blockwise(values, code, blocksize):
    lib = ctypes.CDLL(str(pathlib.Path(site, "bitsandbytes/libbitsandbytes_cpu.so")))
    absmax, out = torch.empty(-(-values.numel() // blocksize)), torch.empty(values.numel(), dtype=torch.uint8)
    pointer = lambda t: ctypes.c_void_p(t.data_ptr())
    lib.cquantize_blockwise_cpu_fp32(pointer(code), pointer(values), pointer(absmax), pointer(out),
                                     ctypes.c_longlong(blocksize), ctypes.c_longlong(values.numel()))
    return out, absmax


dynamic = F.create_dynamic_map()
save("map.f32", dynamic)
torch.manual_seed(7)
# More than 256 groups, the last one short; groups of different sizes, one of zeros.
n = 64 * 260 + 38
weights = (torch.randn(n) * 0.02 * (1 + torch.arange(n) // 64 % 7)).bfloat16()
weights[64 * 11:64 * 12] = 1e-30
codes, absmax = kernels["quantize_4bit"](weights.float(), 64, "nf4", torch.uint8)
offset = absmax.mean()
absmax_codes, absmax2 = blockwise(absmax - offset, dynamic, 256)
scales = dynamic[absmax_codes.long()] * absmax2.repeat_interleave(256)[:absmax.numel()] + offset
level = F.get_4bit_type("nf4", device="cpu")
nibbles = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], 1).view(-1)[:n]
for name, tensor in {"weights.bf16": weights, "codes.u8": codes, "absmax.f32": absmax, "absmax.u8": absmax_codes,
                     "absmax2.f32": absmax2, "offset.f32": offset,
                     "decoded.f32": level[nibbles.long()] * scales.repeat_interleave(64)[:n]}.items():
    save(f"nf4.{name}", tensor)

weights = (torch.randn(24, 100) * 0.05).bfloat16()
codes, absmax, _ = kernels["int8_vectorwise_quant"](weights.float())
for name, tensor in {"weights.bf16": weights, "codes.i8": codes, "absmax.f32": absmax}.items():
    save(f"int8.{name}", tensor)
