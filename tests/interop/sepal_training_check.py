#!/usr/bin/env python3
"""Train through any servers with Sepal's own client, and compare the gradients with those of PyTorch.

    python sepal_training_check.py --gradients BIN --model DIR --dht-prefix NAME --initial-peers MADDR

BIN is the example `gradients` of the client crate. One line per point, `ok NAME figure` or `FAIL NAME why`.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

from checks import Mismatch, fmt
from checks.env import Env, Local

DEADLINE_S, TOLERANCE = 1800, 1e-4


class Client:
    """The example, and what it shares with Env: comparing."""

    close_enough = Env.close_enough

    def __init__(self, args):
        self.args, self.torch, self.tol = args, torch, TOLERANCE
        self.local = Local(args.model, torch, transformers, torch.float32)
        self.blocks = len(self.local.layers)
        self.hidden = self.local.model.config.hidden_size

    def noise(self, *shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def run(self, tensors):
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("in.safetensors", "out.safetensors")]
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, paths[0])
            command = [self.args.gradients, self.args.initial_peers, self.args.dht_prefix, str(self.blocks), *paths]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S)
            if done.returncode != 0:
                raise Mismatch(f"status {done.returncode}: {done.stderr[-500:]}")
            return load_file(paths[1]), done.stdout.split("\n")[:-1]

    def point(self, rows, tokens, prompt_tokens, seed):
        x = self.noise(rows, tokens, self.hidden, seed=seed)
        gradient = self.noise(rows, tokens, self.hidden, seed=seed + 1)
        asked = {"input": x, "output_gradient": gradient}
        if prompt_tokens:
            asked["prompts"] = 0.5 * self.noise(self.blocks, rows, prompt_tokens, self.hidden, seed=seed + 2)
        got, legs = self.run(asked)
        leaf = x.clone().requires_grad_(True)
        prompts = asked["prompts"].clone().requires_grad_(True) if prompt_tokens else None
        want = self.local.blocks(leaf, layer_prompts=prompts)
        (want * gradient).sum().backward()
        pairs = [self.close_enough(got["output"], want, "output"),
                 self.close_enough(got["input_gradient"], leaf.grad, "grad of inputs", 10 * self.tol)]
        if prompt_tokens:
            pairs.append(self.close_enough(got["prompt_gradient"], prompts.grad, "grad of prompts", 10 * self.tol))
        if len(legs) < 2:
            raise Mismatch(f"one server alone answered: {legs}")
        return f"{fmt(pairs)} over {len(legs)} servers"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--gradients", "--model", "--dht-prefix", "--initial-peers"):
        parser.add_argument(name, required=True)
    client = Client(parser.parse_args())
    failed = 0
    for i, (name, rows, tokens, prompts) in enumerate([("inputs", 2, 13, 0), ("deep_prompts", 3, 17, 3),
                                                       ("split_over_1024_tokens", 5, 300, 2)]):
        try:
            print(f"ok training.{name} {client.point(rows, tokens, prompts, 10 * i)}", flush=True)
        except (Mismatch, subprocess.TimeoutExpired) as e:
            failed += 1
            print(f"FAIL training.{name} {e}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
