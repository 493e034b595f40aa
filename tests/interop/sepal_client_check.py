#!/usr/bin/env python3
"""Generate texts with `sepal generate` through any servers and compare them with those of transformers.

    python sepal_client_check.py --sepal BIN --model DIR --dht-prefix NAME --initial-peers MADDR

DIR/golden.json holds prompts with the greedy continuations of transformers. One line per prompt, `ok NAME figure` or
`FAIL NAME why`.
"""
import argparse
import json
import os
import subprocess
import sys

DEADLINE_S = 1800


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sepal", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dht-prefix", required=True)
    parser.add_argument("--initial-peers", nargs="+", required=True)
    args = parser.parse_args()
    with open(os.path.join(args.model, "golden.json")) as f:
        cases = [case for case in json.load(f)["cases"] if case["dtype"] == "float32"]
    failed = 0
    for i, case in enumerate(cases):
        command = [args.sepal, "generate", args.model, "--dht_prefix", args.dht_prefix, "--torch_dtype", "float32",
                   "--initial_peers", *args.initial_peers, "--prompt", case["prompt"], "--max_new_tokens", "60"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S)
        got = done.stdout.rstrip("\n")
        # The golden text may end before or after 60 tokens.
        equal = done.returncode == 0 and len(got) > len(case["prompt"]) and (
            case["text"].startswith(got) or got.startswith(case["text"]))
        failed += not equal
        print(f"ok generate.{i} {len(got)} characters equal" if equal else
              f"FAIL generate.{i} status {done.returncode}: {got!r} instead of {case['text']!r} {done.stderr[-500:]}", flush=True)
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
