"""Makes the golden data of the quantization formats with bitsandbytes.

    BITSANDBYTES=SITE:NEW python generate.py       (see tests/golden/bitsandbytes_cpu.py)

All files are little-endian.

    map.f32                             the signed dynamic map
    nf4.{weights.bf16,codes.u8,absmax.f32,absmax.u8,absmax2.f32,offset.f32,decoded.f32}
    int8.{weights.bf16,codes.i8,absmax.f32}   [24, 100]
"""

import pathlib
import sys

here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here / "../../../../tests/golden"))
import bitsandbytes_cpu
import torch


def save(name, tensor):
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    tensor.contiguous().numpy().tofile(here / name)


save("map.f32", bitsandbytes_cpu.DYNAMIC)
torch.manual_seed(7)
# More than 256 groups, the last one short; groups of different sizes, one of zeros.
n = 64 * 260 + 38
weights = (torch.randn(n) * 0.02 * (1 + torch.arange(n) // 64 % 7)).bfloat16()
weights[64 * 11 : 64 * 12] = 1e-30
for name, tensor in {"weights.bf16": weights, **bitsandbytes_cpu.nf4(weights)}.items():
    save(f"nf4.{name}", tensor)

weights = (torch.randn(24, 100) * 0.05).bfloat16()
for name, tensor in {"weights.bf16": weights, **bitsandbytes_cpu.int8(weights)[0]}.items():
    save(f"int8.{name}", tensor)
