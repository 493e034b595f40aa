#!/usr/bin/env python3
"""Turns of one conversation through a gateway: the first byte of an answer, and how much of it is the step that carries the new tokens.
Prints one JSON object.

    tests/openai/turns.py http://127.0.0.1:8080/v1 MODEL [--turns 20] [--tokens 12]

The first turn opens the session, and is left out. How long the servers took for the steps, the gateway's /metrics say; nobody else may
use it meanwhile. Measure on a quiet machine; nothing is asserted about time. Uses the standard library alone.
"""
import argparse
import http.client
import json
import statistics
import time
import urllib.parse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("base")
parser.add_argument("model")
parser.add_argument("--turns", type=int, default=20)
parser.add_argument("--tokens", type=int, default=12)
args = parser.parse_args()
url = urllib.parse.urlparse(args.base)
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)


def turn(messages):
    """The answer, the seconds to its first byte, those between its tokens, and the tokens that were not sent again."""
    body = dict(model=args.model, messages=messages, max_tokens=args.tokens, temperature=0, stream=True,
                stream_options=dict(include_usage=True), logit_bias={"1": -100})
    began, times, said, cached = time.monotonic(), [], "", 0
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:300]}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                times.append(time.monotonic())
                said += text
        if usage := chunk.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return said, times[0] - began, [b - a for a, b in zip(times, times[1:])], cached


def first_steps():
    """Seconds of all first steps of texts so far, and how many there were; `None` if the gateway does not tell."""
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    of = lambda name: next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"sepal_gateway_first_step_seconds_{name} ")), None)
    return of("sum"), of("count")


messages, first, steps, cached, before = [], [], [], 0, (None, None)
for number in range(args.turns + 1):
    if number == 1:
        before = first_steps()
    messages.append(dict(role="user", content="Go on." if messages else "Tell me of a fox."))
    said, to_first, between, cached = turn(messages)
    messages.append(dict(role="assistant", content=said))
    if number > 0:
        first.append(to_first)
        steps += between
ms = lambda seconds: round(1e3 * seconds, 2)
step = statistics.median(steps)
found = dict(turns=args.turns, cached_tokens_of_last=cached, first_ms_p50=ms(statistics.median(first)), first_ms_mean=ms(statistics.mean(first)),
             first_ms_most=ms(max(first)), step_of_one_token_ms_p50=ms(step))
after = first_steps()
if None not in before:
    of_step = (after[0] - before[0]) / (after[1] - before[1])
    found.update(first_step_ms_mean=ms(of_step), first_less_first_step_ms_mean=ms(statistics.mean(first) - of_step))
print(json.dumps(found))
