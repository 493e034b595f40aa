"""What servers say of themselves: records in the DHT, rpc_info."""
import time

from checks import Mismatch, check


@check("discovery")
def _(env):
    manager = env.h.sequence_manager
    manager.rpc_info  # makes the manager look up the swarm
    infos = manager.state.sequence_info.block_infos
    empty = [i for i, info in enumerate(infos) if info is None or not info.servers]
    if empty:
        raise Mismatch(f"no server announces blocks {empty}")
    servers = {}
    for info in infos:
        for peer, server in info.servers.items():
            servers[str(peer)] = server
    for peer, s in servers.items():
        if s.state.name != "ONLINE":
            raise Mismatch(f"{peer} is {s.state}")
        if not (isinstance(s.start_block, int) and isinstance(s.end_block, int) and s.start_block < s.end_block):
            raise Mismatch(f"{peer} announces start_block={s.start_block} end_block={s.end_block}")
    s = next(iter(servers.values()))
    return (f"{len(servers)} server(s), blocks {s.start_block}:{s.end_block}, version {s.version}, {s.torch_dtype}, "
            f"throughput {s.throughput}, adapters {list(s.adapters)}")


@check("rpc_info.block")
def _(env):
    info = env.h.sequence_manager.rpc_info
    need = {"version", "dht_client_mode", "cache_tokens_available", "forward_schema", "inference_schema",
            "outputs_schema", "keyword_names"}
    missing = need - set(info)
    if missing:
        raise Mismatch(f"lacks {sorted(missing)}")
    args_schema, kwargs_schema = info["forward_schema"]
    inference_args, _ = info["inference_schema"]
    if len(inference_args) < 3:
        raise Mismatch(f"inference_schema has {len(inference_args)} tensors instead of >= 3")
    dtypes = [str(t.dtype).replace("torch.", "") for t in inference_args]
    return (f"keys {','.join(sorted(info))}; inference dtypes {dtypes}; "
            f"compression {args_schema[0].compression}; cache_tokens_available {info['cache_tokens_available']}")


def ask_info(env, uid=""):
    from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
    from hivemind.proto import runtime_pb2
    from hivemind.utils.serializer import MSGPackSerializer

    manager = env.h.sequence_manager
    peers = {p for info in manager.state.sequence_info.block_infos for p in info.servers}
    out = {}
    for peer in peers:
        stub = server_stub(env, peer)

        async def call():
            return await stub.rpc_info(runtime_pb2.ExpertUID(uid=uid), timeout=300)

        answer = RemoteExpertWorker.run_coroutine(call())
        out[peer] = MSGPackSerializer.loads(answer.serialized_info)
    return out


def server_stub(env, peer):
    from petals.server.handler import TransformerConnectionHandler

    return TransformerConnectionHandler.get_stub(env.h.sequence_manager.state.p2p, peer)


@check("rpc_info.server")
def _(env):
    infos = ask_info(env, "")
    for info in infos.values():
        missing = {"version", "dht_client_mode", "cache_tokens_available"} - set(info)
        if missing:
            raise Mismatch(f"lacks {sorted(missing)}")
    return "; ".join(f"{str(p)[-6:]} {dict(i)}" for p, i in infos.items())


@check("rpc_info.many_in_a_row")
def _(env):
    calls = 300
    for _ in range(calls):
        ask_info(env, "")
    return f"{calls} calls of each server, none lost"


@check("rpc_info.cache_accounting")
def _(env):
    before = {p: i["cache_tokens_available"] for p, i in ask_info(env).items()}
    reserve = 400
    with env.torch.inference_mode(), env.h.inference_session(max_length=reserve) as session:
        session.step(env.noise(2, 3, env.hidden))
        used = {s.span.peer_id: s.span.end - s.span.start for s in session._server_sessions}
        during = {p: i["cache_tokens_available"] for p, i in ask_info(env).items()}
    deadline = time.monotonic() + 120
    while True:
        after = {p: i["cache_tokens_available"] for p, i in ask_info(env).items()}
        if after == before or time.monotonic() > deadline:
            break
        time.sleep(0.25)
    for peer, blocks in used.items():  # the unit is one token in one block
        if before[peer] - during[peer] != 2 * reserve * blocks:
            raise Mismatch(f"2x{reserve} tokens reserved in {blocks} blocks but {before[peer]} -> {during[peer]}")
    if after != before:
        raise Mismatch(f"not given back: {before} -> {after}")
    peer = next(iter(used))
    return f"{before[peer]} -> {during[peer]} (2x{reserve} tokens x {used[peer]} blocks) -> {after[peer]}"
