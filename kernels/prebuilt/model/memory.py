"""What requests of warps cost in the first-level cache, shared memory and the second-level cache.

A request of W bytes per lane is served in groups of 128 / W lanes. A group takes a wavefront per
128-byte line of global memory that it touches, and in shared memory as many as the most words that
fall into one bank (32 banks of 4 bytes). So 16 bytes per lane take at least 4 wavefronts. A copy
from global to shared memory (LDGSTS) takes those of both.
Source: NVIDIA, "Nsight Compute Profiling Guide", Memory Tables (wavefronts, tags); "CUDA C++
Programming Guide", Shared Memory of compute capabilities 5.x to 12.0.
"""

import collections
import dataclasses
import functools

from . import lanes

BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
SECTOR = 32
SHARED = {"LDS", "STS", "LDSM", "ATOMS"}
# Fake addresses of buffers are this far apart (launch.py).
BUFFER_SHIFT = 36


def bytes_per_lane(one):
    if one.op == "LDSM":
        return 16
    return next((BYTES[m] for m in one.mods if m in BYTES), 4)


@dataclasses.dataclass
class Requests:
    """Requests of a warp, summed."""

    # {instruction: wavefronts}, and how often it was issued with active lanes.
    wavefronts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    issued: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # Instructions whose addresses were unknown: taken as free of conflicts.
    unknown: set = dataclasses.field(default_factory=set)
    # {(buffer, is a store): sectors of 32 bytes between this warp and the second-level cache}.
    sectors: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # {instruction of a load: for each execution the buffer whose bytes it waits for; 0: none, -1:
    # the first-level cache has them}.
    waits: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _seen: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(set))

    def add(self, at, one, addresses, active):
        """One request of the lanes `active`."""
        size = bytes_per_lane(one)
        if not active:
            self.waits[at].append(0)
            return
        self.issued[at] += 1
        count = 0
        for number, address in enumerate(addresses):
            is_shared = one.op in SHARED or one.op == "LDGSTS" and number == 0
            if one.op == "LDSM":
                active = matrices(one)
            if address is None:
                self.unknown.add(at)
                count += max(1, size * active.bit_count() // 128)
                continue
            if is_shared:
                count += in_shared(size, active, pattern(address, 128))
            else:
                count += in_lines(size, active, pattern(address, 128))
                is_store = one.op in ("STG", "ST", "RED", "REDG")
                is_new = self.touch(address, size, active, is_store)
                past_cache = "BYPASS" in one.mods or "NA" in one.mods
                buffer = lanes.lane(address, 0) >> BUFFER_SHIFT
                self.waits[at].append(buffer if is_new or past_cache else -1)
        self.wavefronts[at] += count

    def touch(self, address, size, active, is_store):
        """Adds the sectors of a request; whether the first-level cache lacked one of them."""
        if type(address) is int:
            address = [address]
            active &= -active
            active = 1 if active else 0
        key = (address[0] >> BUFFER_SHIFT, is_store)
        seen = self._seen[key]
        before = len(seen)
        if active == lanes.ALL:
            seen.update([a >> 5 for a in address])
        else:
            seen.update([a >> 5 for at, a in enumerate(address) if active >> at & 1])
        if size > SECTOR:
            seen.update([(a + SECTOR) >> 5 for a in address])
        return len(seen) > before

    def end(self):
        """Ends a warp: what it has read, other warps read again."""
        for key, seen in self._seen.items():
            self.sectors[key] += len(seen)
        self._seen.clear()


def matrices(one):
    """Lanes that name rows in an ldmatrix of 1, 2 or 4 matrices."""
    count = next((int(m[-1]) for m in one.mods if m[-2:] in (".4", ".2") or m in "124"), 4)
    return (1 << 8 * count) - 1


def pattern(address, modulus):
    """Addresses without what changes neither lines nor banks."""
    if type(address) is int:
        return (address % modulus,) * lanes.LANES
    base = min(address)
    base -= base % modulus
    return tuple([a - base for a in address])


@functools.lru_cache(maxsize=200_000)
def in_shared(size, active, addresses):
    """Wavefronts of a request to shared memory."""
    total = 0
    for group in groups(size, active, addresses):
        banks = collections.defaultdict(set)
        for address in group:
            for word in range(address >> 2, (address + size + 3) >> 2):
                banks[word % 32].add(word)
        total += max((len(words) for words in banks.values()), default=0)
    return total


@functools.lru_cache(maxsize=200_000)
def in_lines(size, active, addresses):
    """Wavefronts of a request to global memory."""
    return sum(
        len({address >> 7 for address in group}) for group in groups(size, active, addresses)
    )


def groups(size, active, addresses):
    """The addresses of active lanes in groups that together take at most 128 bytes."""
    each = min(lanes.LANES, max(1, 128 // size))
    for first in range(0, lanes.LANES, each):
        group = [addresses[at] for at in range(first, first + each) if active >> at & 1]
        if group:
            yield group
