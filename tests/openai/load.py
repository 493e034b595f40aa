#!/usr/bin/env python3
"""Streams at once through a gateway: tokens per second, processor time of the gateway per token, its memory. Prints one JSON object.

    tests/openai/load.py http://127.0.0.1:8080/v1 MODEL GATEWAY_PID [--streams 64] [--tokens 200]

Measure on a quiet machine; nothing is asserted about time. Uses the standard library alone.
"""
import argparse
import http.client
import json
import os
import threading
import time
import urllib.parse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("base")
parser.add_argument("model")
parser.add_argument("pid", type=int)
parser.add_argument("--streams", type=int, default=64)
parser.add_argument("--tokens", type=int, default=200)
args = parser.parse_args()


def cpu_seconds():
    fields = open(f"/proc/{args.pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb():
    return next(int(line.split()[1]) // 1024 for line in open(f"/proc/{args.pid}/status") if line.startswith("VmRSS"))


counts, first, failed = [0] * args.streams, [None] * args.streams, []


def stream(index):
    url = urllib.parse.urlparse(args.base)
    try:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
        body = dict(model=args.model, prompt=f"Once upon a time {index}", max_tokens=args.tokens, temperature=0, stream=True,
                    logit_bias={"1": -100})
        began = time.monotonic()
        connection.request("POST", url.path + "/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read()[:200])
        for line in response:
            if line.startswith(b"data: {"):
                counts[index] += 1
                first[index] = first[index] or time.monotonic() - began
    except Exception as error:
        failed.append(repr(error))


before, cpu, began = resident_mb(), cpu_seconds(), time.monotonic()
threads = [threading.Thread(target=stream, args=(i,)) for i in range(args.streams)]
[thread.start() for thread in threads]
most = before
while any(thread.is_alive() for thread in threads):
    most = max(most, resident_mb())
    time.sleep(0.1)
elapsed, spent = time.monotonic() - began, cpu_seconds() - cpu
tokens = (args.streams - len(failed)) * args.tokens
times = sorted(t for t in first if t is not None)
print(json.dumps(dict(streams=args.streams, failed=failed[:3], tokens_per_s=round(tokens / elapsed, 1),
                      cpu_us_per_token=round(1e6 * spent / max(tokens, 1), 1), first_ms_p50=round(1e3 * times[len(times) // 2], 1) if times else None,
                      rss_mb_before=before, rss_mb_most=most)))
