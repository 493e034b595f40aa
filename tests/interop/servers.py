"""Servers under test: how `sepal serve` and the real Petals server are started, waited for and stopped.

This module alone knows their command lines and what their logs say. Every server runs in a session and
process group of its own, and nothing outside those groups is ever signalled.
"""
import contextlib
import os
import re
import signal
import subprocess
import time

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ADDRESS = re.compile(r"/ip4/[0-9.]+/tcp/[1-9][0-9]*/p2p/[1-9A-HJ-NP-Za-km-z]+")


class ServerFailed(Exception):
    """A server ended, or did not do in time what was waited for."""


class Sepal:
    """`sepal serve`; logs on stderr as text or as JSON."""

    name = "sepal"
    stops_cleanly = True
    keeps_its_processes = True
    adapters = True
    online_timeout = 600
    # text: `state=ONLINE`; JSON: `"state":"ONLINE"`
    online = re.compile(r'\bstate"?\s*[=:]\s*"?ONLINE\b')
    skip = []

    def __init__(self, binary):
        self.binary = binary

    def command(self, spec):
        swarm = ["--initial_peers", *spec.peers] if spec.peers else ["--new_swarm"]
        return [self.binary, "serve", spec.model, "--dht_prefix", spec.prefix, *swarm,
                "--host_maddrs", f"/ip4/{spec.host}/tcp/{spec.port}", "--identity_path", spec.identity,
                "--block_indices", f"{spec.start}:{spec.end}", "--torch_dtype", spec.dtype, "--throughput", "1",
                *(["--adapters", *spec.adapters] if spec.adapters else []),
                *(["--tensor_parallel_devices", *spec.devices] if spec.devices else []), *spec.flags]


class Emulating(Sepal):
    """A build with emulated CUDA devices; their kernels take seconds for what a device does in milliseconds."""

    name = "sepal-emu"
    online_timeout = 1800


class RealPetals:
    """The reference: `python -m petals.cli.run_server` of the virtual environment."""

    name = "real"
    stops_cleanly = False  # what it does on SIGTERM is not ours to judge
    keeps_its_processes = False
    adapters = True
    online_timeout = 1800
    online = re.compile(r"\] Started$", re.MULTILINE)
    # it computes with NaN and answers NaN; its answers in UNIFORM_8BIT lose their mean, which hivemind's encoder subtracts in place
    # (allow_inplace) before it averages the buckets
    skip = ["refuse.not_finite", "compression.forward", "compression.backward"]

    def __init__(self, python, handlers=2):
        """`handlers`: processes that answer requests; Petals' own default is 8."""
        self.python, self.handlers = python, handlers

    def command(self, spec):
        swarm = ["--initial_peers", *spec.peers] if spec.peers else ["--new_swarm"]
        adapters = ["--adapters", *spec.adapters] if spec.adapters else []
        return [self.python, "-m", "petals.cli.run_server", spec.model, "--dht_prefix", spec.prefix, *swarm,
                "--host_maddrs", f"/ip4/{spec.host}/tcp/{spec.port}", "--identity_path", spec.identity,
                "--block_indices", f"{spec.start}:{spec.end}", "--torch_dtype", spec.dtype, "--throughput", "1",
                "--num_handlers", str(self.handlers), "--skip_reachability_check", *adapters, *spec.flags]


class Spec:
    """What one server shall serve: blocks start..end of a model folder. Ours shares them among `devices`, if there are any. A `port` of
    0 is any that is free on the address `host`."""

    def __init__(self, model, prefix, start, end, dtype, identity, peers=(), adapters=(), flags=(), devices=(), port=0, host="127.0.0.1"):
        self.model, self.prefix, self.start, self.end, self.dtype = model, prefix, start, end, dtype
        self.identity, self.peers, self.adapters, self.flags = identity, list(peers), list(adapters), list(flags)
        self.devices, self.port, self.host = list(devices), port, host


class Running:
    """One started server; `enter` is called in its first process, which may go to another network namespace."""

    def __init__(self, kind, spec, log, environment, enter=None):
        self.kind, self.spec, self.log = kind, spec, log
        self.address, self.processes_at_start = None, set()
        with open(log, "wb") as out:
            self.process = subprocess.Popen(kind.command(spec), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                            start_new_session=True, env=environment, preexec_fn=enter)

    @property
    def pid(self):
        return self.process.pid

    @property
    def peer_id(self):
        return self.address.rsplit("/", 1)[1]

    def log_text(self):
        with open(self.log, errors="replace") as f:
            return ANSI.sub("", f.read())

    def failure(self, what):
        tail = "\n".join(self.log_text().splitlines()[-12:])
        return ServerFailed(f"{what}; its log {self.log} ends:\n{tail}")

    def wait_online(self):
        """Until the log names an address with a PeerID (not that of a peer it was given) and says ONLINE."""
        deadline = time.monotonic() + self.kind.online_timeout
        while time.monotonic() < deadline:
            text = self.log_text()
            addresses = [a for a in ADDRESS.findall(text) if a not in self.spec.peers]
            if addresses and self.kind.online.search(text):
                self.address = addresses[0]
                self.processes_at_start = processes_of_session(self.pid)
                return self
            if self.process.poll() is not None:
                raise self.failure(f"server ended with status {self.process.returncode} before it was ONLINE")
            time.sleep(0.05)
        raise self.failure(f"server not ONLINE within {self.kind.online_timeout} s")

    def new_processes(self):
        """Processes that were not there when the server became ONLINE: something was restarted."""
        return processes_of_session(self.pid) - self.processes_at_start

    def terminate(self, timeout=600):
        """SIGTERM to the first process alone; returns its exit status, or None if it does not end in time."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def left_over(self, timeout=60):
        """Processes of this server that stay after its end."""
        deadline = time.monotonic() + timeout
        while (left := processes_of_session(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def kill(self):
        """SIGKILL to all that is left of it."""
        for pid in processes_of_session(self.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def processes_of_session(session):
    """Pids of the living processes whose session this is."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat") as f:
                    state, _, _, owner = f.read().rsplit(")", 1)[1].split()[:4]
                if int(owner) == session and state != "Z":
                    found.add(int(entry))
    return found
