#!/usr/bin/env python3
"""Measures the shapes of `sepal selftest` in PyTorch and bitsandbytes on the same GPU.

    kernels/benches/cuda_torch.py
        measures PyTorch, and bitsandbytes where it is installed
    kernels/benches/cuda_torch.py target/release/sepal
        runs `sepal selftest --device cuda:0` first and prints both side by side

Needs PyTorch with CUDA. CUDA events time many enqueued operations; each row is the best of three
series after a warm-up. The weights come from a ring larger than the L2 cache. Rows have the names
of selftest's rows.
"""

import subprocess
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("PyTorch is not installed")
if not torch.cuda.is_available():
    sys.exit("ignored: no device")

try:
    import bitsandbytes as bnb
    import bitsandbytes.functional as bf
except ImportError:
    bnb = None

HIDDEN, MIDDLE, KV, HEAD = 8192, 28672, 1024, 128
ROWS = (1, 8, 32, 1024)
CONTEXT, PREFILL = 2048, 1024
RING_BYTES = 512 << 20
REPEATS = 50
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda:0")


def seconds(run):
    """The best of three series, each of many runs between two events."""
    run()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPEATS):
            run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / REPEATS)
    return best


class Ring:
    """Copies of a matrix, used in turn."""

    def __init__(self, make, bytes_each):
        self.items = [make() for _ in range(max(1, min(64, RING_BYTES // bytes_each)))]
        self.at = 0

    def next(self):
        self.at = (self.at + 1) % len(self.items)
        return self.items[self.at]


def matrix(quant, outputs, inputs):
    """A function of an input [rows, inputs], and the bytes of its weights."""

    def plain():
        return torch.randn(outputs, inputs, dtype=DTYPE, device=DEVICE) * 0.01

    if quant == "none":
        ring = Ring(plain, 2 * outputs * inputs)
        return (lambda x: F.linear(x, ring.next())), 2 * outputs * inputs
    if bnb is None:
        return None, 0
    if quant == "nf4":
        ring = Ring(
            lambda: bf.quantize_4bit(plain(), quant_type="nf4", compress_statistics=True),
            outputs * inputs // 2,
        )

        def run(x):
            codes, state = ring.next()
            return bnb.matmul_4bit(x, codes.t(), quant_state=state)

        return run, outputs * inputs // 2

    def int8():
        layer = bnb.nn.Linear8bitLt(
            inputs, outputs, bias=False, has_fp16_weights=False, threshold=6.0
        )
        layer.weight = bnb.nn.Int8Params(
            plain().half().cpu(), requires_grad=False, has_fp16_weights=False
        )
        return layer.to(DEVICE).eval()

    ring = Ring(int8, outputs * inputs)
    return (lambda x: ring.next()(x.half())), outputs * inputs


def row(name, time, nbytes, flops):
    print(
        f"{name:44} {time * 1e6:10.1f} µs {nbytes / time / 1e9:9.1f} GB/s"
        f" {flops / time / 1e12:9.2f} TFLOP/s",
        flush=True,
    )
    return name, time


def measured():
    rows = []
    for quant in ("nf4", "int8", "none"):
        for count in ROWS:
            for outputs, inputs in (
                (HIDDEN, HIDDEN),
                (KV, HIDDEN),
                (MIDDLE, HIDDEN),
                (HIDDEN, MIDDLE),
            ):
                run, nbytes = matrix(quant, outputs, inputs)
                if run is None:
                    break
                x = torch.randn(count, inputs, dtype=DTYPE, device=DEVICE)
                with torch.no_grad():
                    time = seconds(lambda: run(x))
                rows.append(
                    row(
                        f"linear bfloat16 {quant} {outputs}x{inputs} rows {count}",
                        time,
                        nbytes,
                        2 * count * inputs * outputs,
                    )
                )
                del run
                torch.cuda.empty_cache()
    heads, kv_heads = HIDDEN // HEAD, KV // HEAD
    shape = f"bfloat16 {heads}/{kv_heads}x{HEAD}"
    for sessions in (1, 8, 32):
        q = torch.randn(sessions, heads, 1, HEAD, dtype=DTYPE, device=DEVICE)
        k, v = (
            torch.randn(sessions, kv_heads, CONTEXT, HEAD, dtype=DTYPE, device=DEVICE)
            for _ in range(2)
        )
        time = seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        nbytes = 2 * k.numel() * 2
        rows.append(
            row(
                f"attention {shape} {CONTEXT - 1}+1" + (f" x {sessions}" if sessions > 1 else ""),
                time,
                nbytes,
                4 * sessions * CONTEXT * HIDDEN,
            )
        )
    q = torch.randn(1, heads, PREFILL, HEAD, dtype=DTYPE, device=DEVICE)
    k, v = (torch.randn(1, kv_heads, PREFILL, HEAD, dtype=DTYPE, device=DEVICE) for _ in range(2))
    time = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    rows.append(
        row(
            f"attention {shape} 0+{PREFILL}",
            time,
            4 * k.numel(),
            2 * PREFILL * (PREFILL + 1) * HIDDEN,
        )
    )
    x = torch.randn(PREFILL, HIDDEN, dtype=DTYPE, device=DEVICE)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)
    time = seconds(lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-5))
    rows.append(row(f"rmsnorm bfloat16 {PREFILL}x{HIDDEN}", time, 4 * x.numel(), 0))
    return rows


def ours(sepal):
    """Rows of selftest by name, in seconds."""
    text = subprocess.run(
        [sepal, "selftest", "--device", "cuda:0"], check=True, capture_output=True, text=True
    ).stdout
    print(text)
    found = {}
    for line in text.splitlines():
        if " µs" in line:
            left = line.split(" µs")[0].rsplit(None, 1)
            found[left[0].strip()] = float(left[1]) / 1e6
    return found


def main():
    found = ours(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, "
        f"bitsandbytes {getattr(bnb, '__version__', 'not installed')}"
    )
    rows = measured()
    if found:
        print(f"\n{'row':44} {'sepal µs':>10} {'torch µs':>10} {'ratio':>6}")
        for name, time in rows:
            if name in found:
                ratio = time / found[name]
                print(f"{name:44} {found[name] * 1e6:10.1f} {time * 1e6:10.1f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
