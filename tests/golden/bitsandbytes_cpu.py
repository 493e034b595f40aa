"""What bitsandbytes makes of weights, on a machine without a GPU. Reads BITSANDBYTES=SITE:NEW from the environment.

SITE has bitsandbytes 0.45.5 (its C library for the CPU quantizes the scales, its functional.py makes the dynamic map), NEW
has the sources of bitsandbytes 0.48.2, whose CPU implementations of quantize_4bit and int8_vectorwise_quant
(backends/default/ops.py) are pure PyTorch. Run with torch 2.0.1, numpy 1.26.4.
"""
import ctypes
import os
import pathlib
import sys
from math import prod
from typing import Optional

SITE, NEW = os.environ["BITSANDBYTES"].split(":")
sys.path.insert(0, SITE)
import torch
import bitsandbytes.functional as F

KERNELS = {}
LEVEL = F.get_4bit_type("nf4", device="cpu")
DYNAMIC = F.create_dynamic_map()


def register_kernel(name, device):
    def keep(function):
        KERNELS[name.split("::")[1]] = function
        return function
    return keep


def load():
    source = pathlib.Path(NEW, "bitsandbytes/backends/default/ops.py").read_text()
    start = source.index('@register_kernel("bitsandbytes::int8_vectorwise_quant"')
    end = source.index('@register_kernel("bitsandbytes::dequantize_4bit"')
    torch._check_is_size = torch._check = lambda *_: None
    exec(source[start:end], {"register_kernel": register_kernel, "torch": torch, "prod": prod, "Optional": Optional,
                             "CODE": {"nf4": LEVEL}})


load()


def blockwise(values, code, blocksize):
    lib = ctypes.CDLL(str(pathlib.Path(SITE, "bitsandbytes/libbitsandbytes_cpu.so")))
    absmax, out = torch.empty(-(-values.numel() // blocksize)), torch.empty(values.numel(), dtype=torch.uint8)
    pointer = lambda t: ctypes.c_void_p(t.data_ptr())
    lib.cquantize_blockwise_cpu_fp32(pointer(code), pointer(values), pointer(absmax), pointer(out),
                                     ctypes.c_longlong(blocksize), ctypes.c_longlong(values.numel()))
    return out, absmax


def nf4(weights):
    """All parts of NF4 with double quantization, and the weights they stand for."""
    n = weights.numel()
    codes, absmax = KERNELS["quantize_4bit"](weights.float(), 64, "nf4", torch.uint8)
    offset = absmax.mean()
    absmax_codes, absmax2 = blockwise(absmax - offset, DYNAMIC, 256)
    scales = DYNAMIC[absmax_codes.long()] * absmax2.repeat_interleave(256)[:absmax.numel()] + offset
    nibbles = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], 1).view(-1)[:n]
    decoded = LEVEL[nibbles.long()] * scales.repeat_interleave(64)[:n]
    return {"codes.u8": codes, "absmax.f32": absmax, "absmax.u8": absmax_codes, "absmax2.f32": absmax2,
            "offset.f32": offset, "decoded.f32": decoded.view(weights.shape)}


def int8(weights):
    """Codes and largest magnitudes of the rows, and the weights they stand for."""
    codes, absmax, _ = KERNELS["int8_vectorwise_quant"](weights.float())
    return {"codes.i8": codes, "absmax.f32": absmax}, codes.float() * (absmax[:, None] / 127)


DECODED = {"int8": lambda w: int8(w)[1], "nf4": lambda w: nf4(w)["decoded.f32"]}
