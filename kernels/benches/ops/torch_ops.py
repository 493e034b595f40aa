#!/usr/bin/env python3
"""Runs operations in PyTorch: reads lines `OP DTYPE NUMBERS...`, answers `NANOSECONDS DTYPE`.

Each operation runs in the type that is named and in float32; the answer is that of the faster. A
type that took more than three times as long as the other is not tried again.

The bench starts this program with the number of threads. With one thread, the clock is the CPU time
of the thread, as in the bench, so that other processes do not count. Weights are slices of a ring
larger than the caches.
"""

import sys
import time

import torch
import torch.nn.functional as F

RING_BYTES = 512 << 20
REPEATS = 3

threads = int(sys.argv[1])
torch.set_num_threads(threads)
clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
ring = torch.randn(1 << 20).to(torch.bfloat16).view(torch.uint8).repeat(RING_BYTES // (2 << 20))
place = 0


def weight(dtype, outputs, inputs):
    """The next matrix of the ring."""
    global place
    count = outputs * inputs * torch.empty((), dtype=dtype).element_size()
    if place + count > RING_BYTES:
        place = 0
    place += count
    return ring[place - count : place].view(dtype).view(outputs, inputs)


def best(run):
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def linear(dtype, outputs, inputs, rows):
    x = torch.randn(rows, inputs).to(dtype)
    return best(lambda: F.linear(x, weight(dtype, outputs, inputs)))


def linear_grad(dtype, outputs, inputs, rows):
    grad = torch.randn(rows, outputs).to(dtype)
    return best(lambda: torch.matmul(grad, weight(dtype, outputs, inputs)))


def heads(dtype, kv_heads, group, dim, prefix, tokens):
    q = torch.randn(1, kv_heads * group, tokens, dim).to(dtype)
    k, v = (torch.randn(1, kv_heads, prefix + tokens, dim).to(dtype) for _ in range(2))
    mask = torch.ones(tokens, prefix + tokens, dtype=torch.bool).tril(prefix)
    return q, k, v, mask


def attend(q, k, v, mask, group):
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention(dtype, kv_heads, group, dim, prefix, tokens):
    q, k, v, mask = heads(dtype, kv_heads, group, dim, prefix, tokens)
    return best(lambda: attend(q, k, v, mask, group))


def attention_grad(dtype, kv_heads, group, dim, prefix, tokens):
    q, k, v, mask = heads(dtype, kv_heads, group, dim, prefix, tokens)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape).to(dtype)

    # Autograd needs the forward pass; the operation of the bench computes the scores again, too.
    def run():
        torch.autograd.grad(attend(q, k, v, mask, group), inputs, grad)

    return best(run)


OPERATIONS = dict(
    linear=linear, linear_grad=linear_grad, attention=attention, attention_grad=attention_grad
)
types_of = {}


def fastest(line):
    """Time and type of the faster type for a request."""
    name, dtype, *numbers = line.split()
    types = types_of.setdefault(line, sorted({dtype, "float32"}))
    times = sorted((OPERATIONS[name](getattr(torch, t), *map(int, numbers)), t) for t in types)
    types_of[line] = [t for time, t in times if time <= 3 * times[0][0]]
    return times[0]


def main():
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", flush=True)
    with torch.inference_mode(False):
        for line in sys.stdin:
            print(*fastest(line), flush=True)


if __name__ == "__main__":
    main()
