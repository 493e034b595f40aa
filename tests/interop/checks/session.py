"""rpc_inference at the level of hidden states: steps, batches, reordering, roll-back, deep prompts."""
import contextlib
import inspect
import threading

from checks import Mismatch, Skip, check, fmt


@check("session.steps_vs_forward")
def _(env):
    sizes = [7, 1, 1, 3, 1, 20, 1, 1, 1, 2]
    x = env.noise(1, sum(sizes), env.hidden, seed=11)
    with env.torch.inference_mode(), env.h.inference_session(max_length=sum(sizes)) as session:
        outs, pos = [], 0
        for n in sizes:
            outs.append(session.step(x[:, pos: pos + n]))
            pos += n
        got = env.torch.cat(outs, 1)
        if session.position != pos:
            raise Mismatch(f"position {session.position} after {pos} tokens")
    with env.torch.inference_mode():
        pairs = [env.close_enough(got, env.local.blocks(x), "session vs local")]
        pairs.append(env.close_enough(got, env.h(x), "session vs rpc_forward"))
    return fmt(pairs)


@check("session.batch")
def _(env):
    sizes = [5, 1, 1, 40, 1, 1]
    x = env.noise(4, sum(sizes), env.hidden, seed=12)
    with env.torch.inference_mode(), env.h.inference_session(max_length=sum(sizes)) as session:
        outs, pos = [], 0
        for n in sizes:
            outs.append(session.step(x[:, pos: pos + n]))
            pos += n
        return fmt(env.close_enough(env.torch.cat(outs, 1), env.local.blocks(x), "4xN"))


@check("session.long_prefill")
def _(env):
    length = min(1500, env.max_pos - 40)
    x = env.noise(1, length + 6, env.hidden, seed=13)
    with env.torch.inference_mode(), env.h.inference_session(max_length=length + 6) as session:
        outs = [session.step(x[:, :length])]
        outs += [session.step(x[:, i: i + 1]) for i in range(length, length + 6)]
        return f"{length}+6 " + fmt(env.close_enough(env.torch.cat(outs, 1), env.local.blocks(x), "long prefill"))


@check("session.slices")
def _(env):
    n = env.n_layers
    if n < 3:
        raise Skip("needs 3 blocks")
    ids = env.ids(1, 9, seed=14)
    with env.torch.inference_mode():
        hs, _ = env.local.run(ids)
        part = env.h[1: n - 1]
        with part.inference_session(max_length=9) as session:
            outs = [session.step(hs[1][:, :5]), session.step(hs[1][:, 5:6]), session.step(hs[1][:, 6:])]
        return fmt(env.close_enough(env.torch.cat(outs, 1), hs[n - 1], f"blocks 1:{n - 1}"))


@check("session.zero_tokens")
def _(env):
    x = env.noise(1, 4, env.hidden, seed=15)
    with env.torch.inference_mode(), env.h.inference_session(max_length=8) as session:
        out = session.step(env.torch.empty(1, 0, env.hidden))
        if tuple(out.shape) != (1, 0, env.hidden):
            raise Mismatch(f"shape {tuple(out.shape)}")
        return fmt(env.close_enough(session.step(x), env.local.blocks(x), "after 0 tokens"))


@contextlib.contextmanager
def extra_metadata(env, **fields):
    """Adds fields to the metadata of every inference step that the client sends meanwhile."""
    module = env.petals.client.inference_session
    original = module.MSGPackSerializer

    class Patched(original):
        @classmethod
        def dumps(cls, value):
            return original.dumps(dict(value, **fields))

    module.MSGPackSerializer = Patched
    try:
        yield
    finally:
        module.MSGPackSerializer = original


def step_from(env, session, position, x):
    """One step that first goes back to `position`; in clients without that, the metadata is written for them."""
    prop = inspect.getattr_static(env.petals.client.inference_session.InferenceSession, "position")
    if getattr(prop, "fset", None) is not None:
        session.position = position
        return session.step(x)
    session._position = position
    for server_session in session._server_sessions:
        server_session._position = position
        server_session.history = server_session.history[:, :position]
    with extra_metadata(env, start_from_position=position):
        return session.step(x)


@check("session.rollback")
def _(env):
    servers = {peer: server for info in env.h.sequence_manager.state.sequence_info.block_infos
               for peer, server in info.servers.items()}
    old = sorted({s.version for s in servers.values() if tuple(map(int, s.version.split(".")[:2])) < (2, 3)})
    if old:
        raise Skip(f"servers of version {', '.join(old)} ignore start_from_position")
    x = env.noise(1, 40, env.hidden, seed=16)
    y = env.noise(1, 6, env.hidden, seed=17)
    z = env.noise(1, 3, env.hidden, seed=18)
    cat, blocks = env.torch.cat, env.local.blocks
    with env.torch.inference_mode(), env.h.inference_session(max_length=40) as session:
        session.step(x[:, :9])
        session.step(x[:, 9:37])
        pairs = [env.close_enough(step_from(env, session, 5, y), blocks(cat([x[:, :5], y], 1))[:, 5:], "at 5")]
        want = blocks(cat([x[:, :5], y[:, :5], z], 1))[:, 10:]
        pairs.append(env.close_enough(step_from(env, session, 10, z), want, "at 10"))
        pairs.append(env.close_enough(step_from(env, session, 0, x), blocks(x), "at 0"))
        pairs.append(env.close_enough(step_from(env, session, 39, x[:, 39:]), blocks(x)[:, 39:], "at 39"))
    return fmt(pairs)


@check("session.hypo_ids")
def _(env):
    pairs = []
    for width in (1, 50):  # 50 x 3 tokens is over the limit for merged short steps
        prefix = env.noise(3, 6, env.hidden, seed=20)
        new1, new2 = env.noise(3, width, env.hidden, seed=21), env.noise(3, 1, env.hidden, seed=22)
        order1, order2 = env.torch.tensor([2, 0, 0]), env.torch.tensor([1, 2, 0])
        with env.torch.inference_mode(), env.h.inference_session(max_length=8 + width) as session:
            session.step(prefix)
            got1 = session.step(new1, hypo_ids=order1)
            got2 = session.step(new2, hypo_ids=order2)
        with env.torch.inference_mode():
            seq1 = env.torch.cat([prefix[order1], new1], 1)
            seq2 = env.torch.cat([seq1[order2], new2], 1)
            pairs.append(env.close_enough(got1, env.local.blocks(seq1)[:, 6:], f"reorder 1, width {width}"))
            pairs.append(env.close_enough(got2, env.local.blocks(seq2)[:, 6 + width:], f"reorder 2, width {width}"))
    return fmt(pairs)


@check("session.deep_prompts")
def _(env):
    pairs = []
    for batch, length in ((2, 9), (2, 90)):  # merged and separate steps
        x = env.noise(batch, length + 1, env.hidden, seed=23)
        prompts = env.noise(env.n_layers, batch, 4, env.hidden, seed=24, scale=0.5)
        with env.torch.inference_mode(), env.h.inference_session(max_length=length + 1) as session:
            got = env.torch.cat([session.step(x[:, :length], prompts=prompts), session.step(x[:, length:])], 1)
            pairs.append(env.close_enough(got, env.local.blocks(x, layer_prompts=prompts), f"{batch}x{length}"))
    return fmt(pairs)


@check("session.interleaved")
def _(env):
    a, b = env.noise(1, 12, env.hidden, seed=25), env.noise(2, 12, env.hidden, seed=26)
    with env.torch.inference_mode():
        sa = env.petals.client.inference_session.InferenceSession(env.h.sequence_manager, max_length=12)
        sb = env.petals.client.inference_session.InferenceSession(env.h.sequence_manager, max_length=12)
        with sa, sb:
            oa, ob = [], []
            for i in range(0, 12, 3):
                oa.append(sa.step(a[:, i: i + 3]))
                ob.append(sb.step(b[:, i: i + 3]))
        pairs = [env.close_enough(env.torch.cat(oa, 1), env.local.blocks(a), "a"),
                 env.close_enough(env.torch.cat(ob, 1), env.local.blocks(b), "b")]
    return fmt(pairs)


@check("session.same_bits_in_company")
def _(env):
    """The bits of a session depend neither on other sessions at the same time nor on their sizes."""
    x = env.noise(1, 30, env.hidden, seed=27)
    Session = env.petals.client.inference_session.InferenceSession

    def run(tokens):
        with env.torch.inference_mode(), Session(env.h.sequence_manager, max_length=tokens.shape[1]) as session:
            outs = [session.step(tokens[:, :6])]
            outs += [session.step(tokens[:, i: i + 1]) for i in range(6, tokens.shape[1])]
            return env.torch.cat(outs, 1)

    alone, errors = run(x), []
    stop = threading.Event()

    def company(i):
        try:
            while not stop.is_set():
                run(env.noise(1 + i, 12 + i, env.hidden, seed=28 + i))
        except Exception as e:
            errors.append(f"{type(e).__name__}: {e}")

    others = [threading.Thread(target=company, args=(i,), daemon=True) for i in range(4)]
    [t.start() for t in others]
    try:
        together = [run(x) for _ in range(3)]
    finally:
        stop.set()
        [t.join(env.args.check_timeout) for t in others]
    if errors:
        raise Mismatch("; ".join(errors))
    env.close_enough(alone, env.local.blocks(x), "alone")
    for got in together:
        if not env.torch.equal(got, alone):
            raise Mismatch(f"differs by {(got - alone).abs().max().item():.3g} with four other sessions")
    return "3 runs beside 4 sessions equal the run alone"
