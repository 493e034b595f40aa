#!/usr/bin/env python3
"""Check a Petals-compatible server with the real Petals client against local transformers.

    python petals_client_check.py --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/Qm... --model MODEL_DIR
           [--dht-prefix NAME] [--adapter DIR ...] [--dtype float32|bfloat16] [--skip NAME ...] [--json FILE]

The client half of the model (embeddings, final norm, LM head) comes from MODEL_DIR and the whole
model is also loaded locally as the expected answer. One line per check:

    ok NAME figure          FAIL NAME why          skip NAME why

and 'N passed, N failed' at the end, then ', N skipped' if so; exit status 1 if anything failed. Errors are
printed as max-abs (abs) and max-abs over max-abs of the expected tensor (rel).
"""
import argparse
import faulthandler
import json
import os
import sys
import threading
import time
import traceback

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from checks import CHECKS, Mismatch, Skip, leave
from checks import discovery, forward, session, generate, load, backward, compression, refuse  # noqa: F401 (in the order they run)
from checks.env import Env


class Watchdog:
    """Ends the whole run if one check takes too long."""

    def __init__(self):
        self.deadline, self.name = None, ""
        threading.Thread(target=self._run, daemon=True).start()

    def arm(self, name, seconds):
        self.name, self.deadline = name, time.time() + seconds

    def _run(self):
        while True:
            time.sleep(1)
            if self.deadline is not None and time.time() > self.deadline:
                faulthandler.dump_traceback()
                print(f"FAIL {self.name} did not finish in time; giving up", flush=True)
                leave(1)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--initial-peers", nargs="+", required="--list" not in sys.argv, metavar="MADDR")
    parser.add_argument("--model", required="--list" not in sys.argv, default=".", metavar="DIR")
    parser.add_argument("--dht-prefix", help="default: the folder's name with dots replaced by '-'")
    parser.add_argument("--adapter", action="append", default=[], metavar="DIR[=NAME]",
                        help="LoRA adapter that the servers offer; NAME is how they call it (default: DIR as given)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="what the server computes in")
    parser.add_argument("--quant-type", choices=["int8", "nf4"], help="how the servers store the weights of the blocks")
    parser.add_argument("--tolerance", type=float, help="largest relative error allowed (gradients: ten times this)")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens for greedy generation")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-retries", type=int, default=2)
    parser.add_argument("--request-timeout", type=float, default=300)
    parser.add_argument("--online-timeout", type=float, default=600, help="seconds until every block is ONLINE")
    parser.add_argument("--check-timeout", type=float, default=1800, help="seconds after which a check counts as hanging")
    parser.add_argument("--only", action="extend", nargs="+", help="only checks whose name starts with one of these")
    parser.add_argument("--skip", action="extend", nargs="+", default=[],
                        help="not the checks whose name starts with one of these")
    parser.add_argument("--list", action="store_true", help="print the names of all checks and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--traceback", action="store_true")
    args = parser.parse_args()
    args.model = os.path.abspath(args.model)
    if args.dht_prefix is None:
        args.dht_prefix = os.path.basename(args.model.rstrip("/")).replace(".", "-")
    return args


def chosen_checks(args):
    checks = list(CHECKS)
    for item in args.adapter:
        path, _, name = item.partition("=")
        checks.append((f"adapter.{os.path.basename(path.rstrip('/'))}",
                       lambda env, path=path, name=name or path: backward.adapter_check(env, path, name)))
    wanted = [c for c in checks if not args.only or any(c[0].startswith(p) for p in args.only)]
    return [c for c in wanted if not any(c[0].startswith(p) for p in args.skip)]


def connect(args):
    began = time.time()
    try:
        env = Env(args)
    except Exception as e:
        traceback.print_exc()
        print(f"FAIL connect {type(e).__name__}: {e}")
        print("0 passed, 1 failed", flush=True)
        leave(1)
    print(f"# petals {env.petals.__version__}, torch {env.torch.__version__}, transformers "
          f"{env.transformers.__version__}, model {os.path.basename(args.model)}, connected in "
          f"{time.time() - began:.1f} s", flush=True)
    return env


def run_check(env, name, fn):
    start = time.time()
    try:
        status, text = "ok", fn(env)
    except Skip as e:
        status, text = "skip", str(e)
    except Exception as e:
        status, text = "FAIL", str(e) if isinstance(e, Mismatch) else f"{type(e).__name__}: {e}"
        text = " ".join(text.split())[:300]
        if env.args.traceback:
            traceback.print_exc()
    seconds = time.time() - start
    print(f"{status} {name} {text} [{seconds:.1f} s]", flush=True)
    return dict(name=name, status=status, text=text, seconds=round(seconds, 3))


def main():
    args = parse_args()
    checks = chosen_checks(args)
    if args.list:
        print("\n".join(name for name, _ in checks))
        return
    watchdog = Watchdog()
    watchdog.arm("connect", args.online_timeout + args.check_timeout)
    env = connect(args)
    results = []
    for name, fn in checks:
        watchdog.arm(name, args.check_timeout)
        results.append(run_check(env, name, fn))

    passed, failed, skipped = (sum(r["status"] == s for r in results) for s in ("ok", "FAIL", "skip"))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(passed=passed, failed=failed, skipped=skipped, results=results,
                           petals=env.petals.__version__, model=os.path.basename(args.model)), f, indent=1)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""), flush=True)
    leave(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
