#!/usr/bin/env python3
"""Remove what processes of the real Petals that were killed left in folders that belong to all.

    tests/interop/sweep.py

They are p2pd's sockets in /tmp, whose folder hivemind does not let us choose, and torch's shared memory in /dev/shm. Only files of
this user are removed, and only those that no living process can use: a socket that is bound by none, memory whose maker has ended.
"""
import contextlib
import glob
import os
import re


def sweep():
    # A process sees the sockets of its own network namespace alone; servers of tests may be in others.
    bound = set()
    for table in glob.glob("/proc/[0-9]*/net/unix"):
        with contextlib.suppress(OSError), open(table) as lines:
            bound |= {line.split()[-1] for line in lines}
    for path in glob.glob("/tmp/hivemind-p2p*.sock"):
        if path not in bound:
            remove(path)
    for path in glob.glob("/dev/shm/torch_*"):
        maker = re.match(r"torch_(\d+)_", os.path.basename(path))
        if maker and not os.path.exists(f"/proc/{maker[1]}"):
            remove(path)


def remove(path):
    try:
        if os.lstat(path).st_uid == os.getuid():
            os.unlink(path)
    except OSError:
        pass  # it went by itself


if __name__ == "__main__":
    sweep()
