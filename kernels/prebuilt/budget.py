#!/usr/bin/env python3
"""Computes from the images what the kernels of a decode step cost on each device.

    kernels/prebuilt/budget.py [--device NAME]... [--json]
    kernels/prebuilt/budget.py --check | --write
    kernels/prebuilt/budget.py --loops [--device NAME] [--format nf4|int8|bf16] [--rows N]

Nothing is measured: it disassembles the cubins, runs the branches and addresses of every kernel for
the shapes of a Llama-70B block, counts instructions per pipe, wavefronts and sectors, and compares
the busiest pipe with the time that memory takes. The terms of the model and their sources are in
../cuda/README.md ("The budget") and at the head of each file of model/.

--check fails when a pipe exceeds its limit (model/limits.py), or when the tables of the README or
budget.json are not those of the images. --write writes them.
--loops prints the instructions of the hottest loops per 8,192 weights.

Needs Python 3.11 and, at its first run, PyPI: it installs a pinned disassembler, no compiler.
"""

import argparse
import json
import sys

from model import blocks, cost, devices, images, limits, report


def main():
    arguments = argparse.ArgumentParser(description="Computes what the kernels cost.")
    arguments.add_argument("--device", action="append", choices=devices.DEVICES)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--loops", action="store_true")
    arguments.add_argument("--format", choices=["nf4", "int8", "bf16"], default="nf4")
    arguments.add_argument("--rows", type=int, choices=[1, 8, 32], default=1)
    options = arguments.parse_args()
    if options.loops:
        return loops(options)
    if options.check or options.write:
        results = blocks.compute(list(devices.DEVICES))
        return write(results) if options.write else check(results)
    results = blocks.compute(options.device or list(devices.DEVICES))
    if options.json:
        print(json.dumps({"devices": results}, indent=1))
    else:
        tables = [report.times(results), report.steps(results), report.shares(results)]
        print("\n\n".join("\n".join(lines) for lines in tables))
    return 0


def loops(options):
    held = images.Images()
    meter = cost.Meter(held, images.manifest(), held.tools / "traces")
    for name in options.device or ["H200"]:
        print(blocks.loops(meter, devices.DEVICES[name], options.format, options.rows))
    return 0


def check(results):
    wrong = limits.violations(results)
    if not report.is_current(results):
        wrong.append("kernels/cuda/README.md or budget.json is old: run budget.py --write")
    print("\n".join(wrong) or "every pipe is within its limit", file=sys.stderr)
    return 1 if wrong else 0


def write(results):
    report.write(results)
    wrong = limits.violations(results)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
