#!/usr/bin/env python3
"""What still works after the server in use is killed, when another one serves the same blocks?

    python petals_failover_check.py --initial-peers MADDR... --model DIR [--dht-prefix NAME] \\
        --server PEER_ID=PID --server PEER_ID=PID [--skip backward]

--initial-peers names both servers. The real Petals client runs a forward pass and a session; the server that the
session uses is killed (SIGKILL, with its process group); then forward, backward and a new session must work and
agree with local transformers. The old session is tried, too, but only reported: Petals 2.2.0.post1 ("Broken input
cache") and main (assertion on positions) cannot continue it on another server.
"""
import argparse
import os
import signal
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

from checks import fmt, leave
from checks.backward import grads
from checks.env import Env


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--initial-peers", nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dht-prefix")
    parser.add_argument("--server", action="append", required=True, metavar="PEER_ID=PID")
    parser.add_argument("--skip", action="extend", nargs="+", default=[], choices=["backward"])
    parser.add_argument("--online-timeout", type=float, default=600)
    args = parser.parse_args()
    args.model = os.path.abspath(args.model)
    args.dht_prefix = args.dht_prefix or os.path.basename(args.model.rstrip("/")).replace(".", "-")
    for name, value in dict(dtype="float32", tolerance=None, seed=0, max_retries=12, request_timeout=300,
                            ban_timeout=30.0, update_period=3.0).items():
        setattr(args, name, value)
    return args


class Report:
    def __init__(self):
        self.passed = self.failed = 0

    def point(self, name, fn, judged=True):
        began = time.time()
        try:
            text, word = fmt(fn()), "ok"
        except Exception as e:
            text, word = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}", "FAIL"
        self.passed += judged and word == "ok"
        self.failed += judged and word == "FAIL"
        print(f"{word if judged else f'info {word}'} {name} {text} [{time.time() - began:.1f} s]", flush=True)


def kill_server_of(session, servers):
    victim = str(session._server_sessions[0].span.peer_id)
    if victim not in servers:
        print(f"FAIL the client chose {victim}, which --server does not name\n0 passed, 1 failed")
        leave(1)
    os.killpg(os.getpgid(servers[victim]), signal.SIGKILL)
    print(f"# killed {victim}", flush=True)


def main():
    args = parse_args()
    env, report = Env(args), Report()
    torch = env.torch
    x = env.noise(1, 20, env.hidden, seed=5)

    def new_session():
        with torch.inference_mode(), env.h.inference_session(max_length=20) as s:
            outs = [s.step(x[:, :8])] + [s.step(x[:, i: i + 1]) for i in range(8, 20)]
            return env.close_enough(torch.cat(outs, 1), env.local.blocks(x), "new session")

    def forward():
        with torch.inference_mode():
            return env.close_enough(env.h(x), env.local.blocks(x), "forward")

    report.point("before.forward", forward)
    with torch.inference_mode():
        session = env.petals.client.inference_session.InferenceSession(env.h.sequence_manager, max_length=20)
        outs = [session.step(x[:, :8])] + [session.step(x[:, i: i + 1]) for i in range(8, 12)]
    kill_server_of(session, {peer: int(pid) for peer, pid in (item.split("=") for item in args.server)})
    report.point("after.forward", forward)
    if "backward" not in args.skip:
        report.point("after.backward", lambda: grads(env, x))
    report.point("after.new_session", new_session)

    def old_session():
        with torch.inference_mode():
            rest = [session.step(x[:, i: i + 1]) for i in range(12, 20)]
            return env.close_enough(torch.cat(outs + rest, 1), env.local.blocks(x), "old session")

    env.h.sequence_manager.config.max_retries = 4
    report.point("after.old_session", old_session, judged=False)
    print(f"{report.passed} passed, {report.failed} failed", flush=True)
    leave(1 if report.failed else 0)


if __name__ == "__main__":
    sys.exit(main())
