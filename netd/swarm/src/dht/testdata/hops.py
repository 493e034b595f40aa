#!/usr/bin/env python3
"""What lookups cost in hivemind: its own routing tables and its own beam search over a simulated network.

    python hops.py > hops.json          # needs hivemind (written with 1.1.12)

200 nodes with the ids SHA-1("node N"); node N joins through node N * 7919 % N with a lookup of its own id, as DHTNode.create
does. Every call takes one unit of time and always succeeds. Then every 9th node looks 24 keys up, one at a time, and all 24
at once. Printed: mean calls, and mean and largest time in units (rounds of calls that wait for each other).
"""
import asyncio
import hashlib
import json

import hivemind
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.traverse import traverse_dht
from hivemind.utils import MSGPackSerializer

NODES, BEAM, WORKERS, KEYS = 200, 20, 8, 24


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing else is to do."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        select = self._selector.select
        def jump(timeout=None):
            if timeout:
                self.now += timeout
            return select(0)
        self._selector.select = jump

    def time(self):
        return self.now


def dht_id(data):
    return DHTID(int.from_bytes(hashlib.sha1(data).digest(), "big"))


class Node:
    def __init__(self, number):
        self.id = dht_id(f"node {number}".encode())
        self.table = RoutingTable(self.id, bucket_size=BEAM, depth_modulo=5)

    def met(self, other):
        self.table.add_or_update_node(other.id, other.id)


async def look_up(node, nodes, queries):
    """Calls made, and units of time until the search ended."""
    calls = 0

    async def get_neighbors(peer, chosen):
        nonlocal calls
        calls += 1
        await asyncio.sleep(1)
        callee = nodes[peer]
        answer = {q: ([found for found, _ in callee.table.get_nearest_neighbors(q, BEAM, exclude=node.id)], False)
                  for q in chosen}
        callee.met(node)
        node.met(callee)
        return answer

    loop = asyncio.get_running_loop()
    start = loop.time()
    seeds = {found for q in queries for found, _ in node.table.get_nearest_neighbors(q, BEAM)}
    await traverse_dht(
        queries=queries, initial_nodes=list(seeds) + [node.id], beam_size=BEAM, num_workers=WORKERS,
        queries_per_call=max(1, int(len(queries) ** 0.5)), get_neighbors=get_neighbors,
        visited_nodes={q: {node.id} for q in queries}, await_all_tasks=False)
    return calls, loop.time() - start


async def main():
    nodes, order = {}, []
    for number in range(NODES):
        node = Node(number)
        nodes[node.id] = node
        if number:
            first = order[number * 7919 % number]
            first.met(node)
            node.met(first)
            await look_up(node, nodes, [node.id])
        order.append(node)
    keys = [dht_id(MSGPackSerializer.dumps(f"model.{n}")) for n in range(KEYS)]
    readers = order[::9]
    single = [await look_up(node, nodes, [key]) for node in readers for key in keys]
    together = [await look_up(node, nodes, keys) for node in readers]

    def summary(results):
        calls, rounds = zip(*results)
        return dict(mean_calls=round(sum(calls) / len(calls), 3), mean_rounds=round(sum(rounds) / len(rounds), 3),
                    max_rounds=round(max(rounds), 3))

    print(json.dumps(dict(hivemind=hivemind.__version__, nodes=NODES, workers=WORKERS, keys=KEYS, one_key=summary(single),
                          all_keys=summary(together)), indent=1))


loop = VirtualTime()
loop.run_until_complete(main())
