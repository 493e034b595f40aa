"""Requests that a server must refuse, and go on serving."""
import contextlib
import re
import socket

from checks import Mismatch, check
from checks.discovery import server_stub


def expect_error(env, fn, what):
    try:
        fn()
    except Exception as e:
        text = re.sub(r"Failed to call handler `[^`]*` at [^:\s]*:?\s*", "", " ".join(str(e).split()))
        return f"{type(e).__name__}: {text[:200]}"
    raise Mismatch(f"{what} was accepted")


def still_alive(env):
    x = env.noise(1, 3, env.hidden, seed=97)
    with env.torch.inference_mode():
        env.close_enough(env.h(x), env.local.blocks(x), "after the refusal")


def raw_forward(env, uid, tensors, metadata=b""):
    from hivemind.compression.serialization import serialize_torch_tensor
    from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
    from hivemind.proto import runtime_pb2

    peer = next(iter(env.h.sequence_manager.state.sequence_info.block_infos[0].servers))
    stub = server_stub(env, peer)
    request = runtime_pb2.ExpertRequest(uid=uid, tensors=[serialize_torch_tensor(t) for t in tensors], metadata=metadata)

    async def call():
        return await stub.rpc_forward(request, timeout=300)

    return RemoteExpertWorker.run_coroutine(call())


@check("refuse.unknown_block")
def _(env):
    x, dummy = env.noise(1, 2, env.hidden), env.torch.empty(0)
    out = expect_error(env, lambda: raw_forward(env, "no-such-model.0", [x, dummy]), "an unknown block")
    still_alive(env)
    return out


@check("refuse.wrong_hidden_size")
def _(env):
    x, dummy = env.noise(1, 2, env.hidden + 3), env.torch.empty(0)
    uid = env.h.sequence_manager.block_uids[0]
    out = expect_error(env, lambda: raw_forward(env, uid, [x, dummy]), "a tensor of the wrong width")
    still_alive(env)
    return out


@check("refuse.session_overflow")
def _(env):
    x = env.noise(1, 9, env.hidden, seed=98)

    config = env.h.sequence_manager.config
    saved, config.max_retries = config.max_retries, 1  # see the server's own answer, not that of a retry

    def overflow():
        with env.torch.inference_mode(), env.h.inference_session(max_length=8) as session:
            session.step(x[:, :4])
            session._max_length = 10 ** 6  # lie to the client; the server must refuse
            session.step(x[:, 4:])

    try:
        out = expect_error(env, overflow, "a step over the allocated length")
    finally:
        config.max_retries = saved
    env.h.sequence_manager.state.banned_peers.clear()  # the client's ban of the peer, which would lapse after a while
    still_alive(env)
    return out


@check("refuse.session_too_long")
def _(env):
    config = env.h.sequence_manager.config
    saved, config.max_retries = config.max_retries, 1

    def open_session():
        with env.torch.inference_mode(), env.h.inference_session(max_length=10 ** 6) as session:
            session.step(env.noise(1, 2, env.hidden))

    try:
        out = expect_error(env, open_session, "a session of a million tokens")
    finally:
        config.max_retries = saved
    still_alive(env)
    return out


@check("refuse.not_finite")
def _(env):
    x, dummy = env.noise(1, 4, env.hidden), env.torch.empty(0)
    uid = env.h.sequence_manager.block_uids[0]
    out = []
    for value in (float("nan"), float("inf")):
        x[0, 2, 1] = value
        out.append(expect_error(env, lambda: raw_forward(env, uid, [x, dummy]), f"a {value} in the input"))
    still_alive(env)
    return out[0]


@check("refuse.garbage_on_the_port")
def _(env):
    """Bytes that are no libp2p, and connections that say nothing, while the server goes on."""
    silent = []
    for address in env.args.initial_peers:
        _, _, host, _, port = address.split("/")[:5]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\x13/multistream/1.0.0\n\xff\xff\xff\x7f"):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=300) as connection:
                connection.sendall(garbage)
        silent += [socket.create_connection((host, int(port)), timeout=300) for _ in range(4)]
    try:
        still_alive(env)
    finally:
        [connection.close() for connection in silent]
    return f"3 kinds of garbage and {len(silent)} silent connections"
