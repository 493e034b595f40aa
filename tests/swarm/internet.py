"""An internet of one machine: hosts in network namespaces, a TUN device each, and `delay_line` of tests/lab, which carries packets
between them with the rates, queues and delays of long lines. TCP is the kernel's.

Needs root or user namespaces, TUN and iproute2, and nft for hosts behind a NAT.
"""
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MTU, SEGMENT = 1500, 1448
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x2
# What home routers do: translate what goes out, let answers in, say nothing to anybody else.
NAT = """
table ip nat {
 chain post {
  type nat hook postrouting priority 100
  oifname "line" masquerade
 }
}
table ip filter {
 chain through {
  type filter hook forward priority 0; policy drop
  iifname "inside" accept
  ct state established,related accept
 }
 chain own {
  type filter hook input priority 0; policy drop
  ct state established,related accept
 }
}
"""


class NotHere(Exception):
    """The machine does not let us."""


def call(function, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Namespace:
    """A network namespace. The machine's own is left alone."""

    def __init__(self, stack):
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            call("unshare", CLONE_NEWNET)
        except OSError as error:
            raise NotHere(f"no network namespace: {error}") from error
        try:
            self.fd = os.open("/proc/self/ns/net", os.O_RDONLY)
            stack.callback(os.close, self.fd)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        finally:
            call("setns", own, CLONE_NEWNET)
            os.close(own)

    def enter(self):
        """For `preexec_fn` of a process that is to run here."""
        call("setns", self.fd, CLONE_NEWNET)

    def start(self, command, **options):
        return subprocess.Popen(command, preexec_fn=self.enter, **options)

    def run(self, *command, **options):
        subprocess.run(command, preexec_fn=self.enter, check=True, **options)

    def set(self, name, value):
        self.run("sh", "-c", f'echo "{value}" >/proc/sys/net/ipv4/{name}')


class Host:
    """A host with a line of its own; `space` is where its programs run. With `nft` (the path of that program) it is behind a NAT router,
    whose address is the public one."""

    def __init__(self, stack, address, mbps, queue_ms, nft=None):
        self.address, self.mbps = address, mbps
        self.queue_bytes = max(int(mbps * 1e6 / 8 * queue_ms / 1e3), 64 << 10)
        outside = Namespace(stack)
        self.device = self._make_device(stack, outside)
        self.space = outside if nft is None else self._behind(stack, outside, nft)

    def _make_device(self, stack, space):
        try:
            with entered(space):  # the device belongs to the namespace in which it is opened
                device = os.open("/dev/net/tun", os.O_RDWR)
                stack.callback(os.close, device)
                fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"line", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
            fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        except OSError as error:
            raise NotHere(f"no TUN device: {error}") from error
        space.run("ip", "address", "add", f"{self.address}/24", "dev", "line")
        space.run(*f"ip link set line mtu {MTU} txqueuelen 20000 up".split())
        return device

    def _behind(self, stack, router, nft):
        inside = Namespace(stack)
        # A process names the namespace until the device is there.
        holder = inside.start(["sleep", "60"])
        try:
            router.run(*f"ip link add inside type veth peer name eth0 netns {holder.pid}".split())
        finally:
            holder.kill()
            holder.wait()
        net = f"10.0.{self.address.rsplit('.', 1)[1]}"
        router.run(*f"ip address add {net}.1/24 dev inside".split())
        router.run(*"ip link set inside up".split())
        router.set("ip_forward", 1)
        router.run(nft, "-f", "-", input=NAT, text=True)
        inside.run(*f"ip address add {net}.2/24 dev eth0".split())
        inside.run(*"ip link set eth0 up".split())
        inside.run(*f"ip route add default via {net}.1".split())
        return inside


@contextlib.contextmanager
def entered(space):
    """This process is in the namespace meanwhile."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    space.enter()
    try:
        yield
    finally:
        call("setns", own, CLONE_NEWNET)
        os.close(own)


def carry(stack, tool, hosts, delay_ms, log):
    """Starts what carries packets between hosts; `delay_ms` is a table of their one-way delays, the counts go to `log`."""
    plan = {"ports": [{"address": host.address, "mbps": host.mbps, "queue_bytes": host.queue_bytes} for host in hosts],
            "delay_us": [[int(1000 * delay) for delay in row] for row in delay_ms]}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(log, "wb") as out:
        carrier = subprocess.Popen([tool, json.dumps(plan)], stdin=theirs, stderr=out)
        socket.send_fds(ours, [bytes(8)], [host.device for host in hosts])
    stack.callback(carrier.wait)
    stack.callback(carrier.kill)


def built(*names, is_release=True):
    """Paths of programs of the package lab, built."""
    # Dependencies have the features that they have in other builds: of a release build with `sepal`, of a debug build those of the tests.
    if is_release:
        chosen = ["build", "--release", "-p", "lab", "-p", "sepal", "--bin", "sepal", *(word for name in names for word in ("--bin", name))]
    else:
        chosen = ["test", "--workspace", "--test", "usage", "--no-run"]
    subprocess.run(["cargo", *chosen, "--locked"], cwd=ROOT, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
    folder = os.path.join(target, "release" if is_release else "debug")
    return [os.path.join(folder, name) for name in names]


def enter_user_namespace():
    """Without root, the program runs again as root of a user namespace."""
    if os.geteuid() != 0:
        if os.environ.get("SEPAL_LINE_LAB") or not shutil.which("unshare"):
            raise NotHere("neither root nor user namespaces")
        spaces = ["unshare", "--user", "--map-root-user"]
        if subprocess.run([*spaces, "true"], stderr=subprocess.DEVNULL).returncode:
            raise NotHere("no user namespaces")
        os.execvpe("unshare", [*spaces, sys.executable, *sys.argv], {**os.environ, "SEPAL_LINE_LAB": "1"})
