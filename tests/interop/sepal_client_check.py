#!/usr/bin/env python3
"""Generate texts with `sepal generate` and `sepal gateway` through any servers and compare them with those of transformers.

    python sepal_client_check.py --sepal BIN --model DIR --dht-prefix NAME --initial-peers MADDR

DIR/golden.json holds prompts with the greedy continuations of transformers. One line per prompt, `ok NAME figure` or
`FAIL NAME why`.
"""
import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request

DEADLINE_S = 1800


@contextlib.contextmanager
def gateway(args):
    """The address of a gateway while it runs."""
    command = [args.sepal, "gateway", f"demo={args.model}", "--dht_prefix", args.dht_prefix, "--torch_dtype", "float32",
               "--initial_peers", *args.initial_peers, "--listen", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:
        try:
            log = ""
            for line in process.stdout:
                log += line
                if found := re.search(r"answers at (http://\S+/v1)", line):
                    yield found[1]
                    return
            raise RuntimeError(f"the gateway did not start: {log}")
        finally:
            process.terminate()


def complete(address, prompt, tokens):
    """The greedy continuation by the gateway."""
    body = json.dumps(dict(model="demo", prompt=prompt, max_tokens=tokens, temperature=0)).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)["choices"][0]["text"]


def take_back(args, text):
    """A session of the gateway that goes back to a sentence which another text left; what is wrong, if anything."""
    start = text[:text.index(". ", len(text) // 3) + 1]
    with gateway(args) as address:
        complete(address, start + " Then the sea rose", 24)
        got = start + complete(address, start, 16)
    return None if len(got) > len(start) and text.startswith(got) else f"{got!r} instead of {text!r}"


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
    for i, case in enumerate(cases):
        wrong = take_back(args, case["text"])
        failed += wrong is not None
        print(f"FAIL take_back.{i} {wrong}" if wrong else f"ok take_back.{i}", flush=True)
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
