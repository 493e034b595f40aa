"""Steps of the real Petals client through a chain of servers; runs in the virtual environment of tests/interop. Prints one JSON object.

    python petals_steps.py --model DIR --dht-prefix NAME --initial-peers MADDR... [--prefix 128] [--steps 30] [--forward 1x128 ...]
                           [--training 1x128 ...]

Hidden states only, through petals' InferenceSession and RemoteSequential: no embeddings and no head. They are bfloat16, as those of a client that
loads the model in its own type: a client in float32 sends twice as much to the first server.
"""
import argparse
import json
import logging
import os
import sys
import threading
import time

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")

import petals
import torch
from petals.client.inference_session import InferenceSession, _ServerInferenceSession
from petals.client.remote_sequential import RemoteSequential


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dht-prefix", required=True)
    parser.add_argument("--initial-peers", nargs="+", required=True)
    parser.add_argument("--prefix", type=int, default=128, help="tokens before the steps that are measured")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clients", type=int, default=1, help="sessions at once")
    parser.add_argument("--names-no-next-servers", action="store_true", help="as the client of Petals 2.3.0.dev2")
    parser.add_argument("--forward", nargs="*", default=[], metavar="BATCHxTOKENS", help="parallel forward passes to measure")
    parser.add_argument("--training", nargs="*", default=[], metavar="BATCHxTOKENS", help="forward passes with gradients to measure")
    parser.add_argument("--passes", type=int, default=3, help="measured passes of each shape, after one that warms up")
    return parser.parse_args()


def median(values):
    return sorted(values)[len(values) // 2]


def states(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


def steps(remote, hidden, args):
    """Milliseconds of each measured step, of all sessions."""
    found, failed = [], []
    barrier = threading.Barrier(args.clients)

    def one():
        try:
            with torch.inference_mode(), InferenceSession(remote.sequence_manager, max_length=args.prefix + args.steps + 8) as session:
                session.step(states(1, args.prefix, hidden))
                for _ in range(3):  # the first steps introduce servers to each other
                    session.step(states(1, 1, hidden))
                barrier.wait(300)
                for _ in range(args.steps):
                    began = time.perf_counter()
                    session.step(states(1, 1, hidden))
                    found.append(1e3 * (time.perf_counter() - began))
        except Exception as error:
            failed.append(repr(error))
            barrier.abort()

    threads = [threading.Thread(target=one) for _ in range(args.clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if failed:
        raise SystemExit(failed[0])
    return found


def passes(remote, hidden, shape, args, is_training):
    """Milliseconds of passes of a batch, after one that warms up; with gradients as a step of fine-tuning has them."""
    batch, tokens = map(int, shape.split("x"))
    inputs, found = states(batch, tokens, hidden).requires_grad_(is_training), []
    with torch.set_grad_enabled(is_training):
        for _ in range(args.passes + 1):
            began = time.perf_counter()
            out = remote(inputs)
            if is_training:
                out.backward(torch.ones_like(out))
            found.append(1e3 * (time.perf_counter() - began))
    return found[1:]


def main():
    args = parse_args()
    _ServerInferenceSession.__del__ = lambda session: None  # else the client can wait for itself forever
    if args.names_no_next_servers:
        _ServerInferenceSession._collect_next_servers = lambda session: []
    for name in ("petals", "hivemind"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = petals.AutoDistributedConfig.from_pretrained(args.model, initial_peers=args.initial_peers, dht_prefix=args.dht_prefix)
    config.initial_peers = list(args.initial_peers)
    config.max_retries, config.show_route = 2, False
    remote = RemoteSequential(config)
    torch.manual_seed(1)
    began = time.perf_counter()
    measured = steps(remote, config.hidden_size, args)
    out = dict(version=petals.__version__, step_ms=round(median(measured), 1), fastest_ms=round(min(measured), 1),
               slowest_ms=round(max(measured), 1), steps=len(measured), sessions_s=round(time.perf_counter() - began, 1))
    for name, shapes in (("forward", args.forward), ("training", args.training)):
        for shape in shapes:
            found = passes(remote, config.hidden_size, shape, args, is_training=name == "training")
            out[f"{name}_{shape}_ms"] = round(median(found), 1)
    print(json.dumps(out), flush=True)
    os._exit(0)  # the client's background threads and its p2pd have no end of their own


main()
