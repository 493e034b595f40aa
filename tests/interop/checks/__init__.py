"""The points that a server is held to, by the real Petals client against local transformers.

Every module registers its points with @check(name); the first part of a name is its group
(forward, session, generate, ...). A point gets the Env, returns one line of figures, and raises
Mismatch (the server is wrong) or Skip (this client cannot ask). Anything else it raises fails, too.
"""
import contextlib
import os
import signal

CHECKS = []


class Skip(Exception):
    """The client's version cannot do what the point needs."""


class Mismatch(Exception):
    """The server answered something else than local transformers."""


def check(name):
    def add(fn):
        CHECKS.append((name, fn))
        return fn

    return add


def fmt(pairs):
    """Errors as one text: max-abs (abs) and max-abs over max-abs of the expected tensor (rel)."""
    if isinstance(pairs, tuple):
        pairs = [pairs]
    return f"abs {max(p[0] for p in pairs):.2e} rel {max(p[1] for p in pairs):.2e}"


def children_of_all():
    """Parent pid -> pids of its children, of everything that runs."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat") as f:
                    stat = f.read().rsplit(")", 1)[1].split()
                children.setdefault(int(stat[1]), []).append(int(entry))
    return children


def process_tree(pid):
    """`pid` and all its descendants."""
    children, todo, found = children_of_all(), [pid], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def leave(code):
    """End at once: hivemind's threads make a normal exit slow and noisy.

    os._exit() alone would leave hivemind's DHT process and p2pd behind, holding our stdout open.
    """
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    for pid in process_tree(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)
