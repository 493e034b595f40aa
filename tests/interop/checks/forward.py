"""rpc_forward and rpc_forward_stream: whole model, slices, batches, long inputs, dtypes on the wire."""
import contextlib

from checks import Mismatch, Skip, check, fmt


@check("forward.logits")
def _(env):
    with env.torch.inference_mode():
        pairs = []
        for batch, length in ((1, 1), (1, 9), (1, 64)):
            ids = env.ids(batch, length, seed=length)
            pairs.append(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, f"{batch}x{length}"))
    return fmt(pairs)


@check("forward.batch")
def _(env):
    ids = env.ids(5, 37, seed=2)
    with env.torch.inference_mode():
        return fmt(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, "5x37"))


@check("forward.slices")
def _(env):
    ids = env.ids(2, 11, seed=3)
    n = env.n_layers
    with env.torch.inference_mode():
        hs, _ = env.local.run(ids)
        pairs = []
        for start, end in {(0, 1), (1, n), (n // 2, n // 2 + 1), (0, n)}:
            pairs.append(env.close_enough(env.h[start:end](hs[start]), hs[end], f"blocks {start}:{end}"))
    return fmt(pairs)


@check("forward.split_over_1024_tokens")
def _(env):
    ids = env.ids(5, 400, seed=4)  # the client sends this as 2 + 2 + 1
    with env.torch.inference_mode():
        return fmt(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, "5x400"))


@check("forward.long_1500")
def _(env):
    length = min(1500, env.max_pos - 8)
    ids = env.ids(1, length, seed=5)
    with env.torch.inference_mode():
        return f"1x{length} " + fmt(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, "long"))


@contextlib.contextmanager
def small_unary_limit(limit=32768):
    from petals.client import remote_forward_backward as rfb

    saved = rfb.MAX_UNARY_PAYLOAD_SIZE
    rfb.MAX_UNARY_PAYLOAD_SIZE = limit
    calls = []
    originals = {}
    for name in ("_forward_stream", "_backward_stream"):
        originals[name] = getattr(rfb, name)

        def spy(*args, _name=name, **kwargs):
            calls.append(_name)
            return originals[_name](*args, **kwargs)

        setattr(rfb, name, spy)
    try:
        yield calls
    finally:
        rfb.MAX_UNARY_PAYLOAD_SIZE = saved
        for name, fn in originals.items():
            setattr(rfb, name, fn)


@check("forward.stream")
def _(env):
    """rpc_forward_stream; the payload is larger than one 64 KiB part of a stream where possible"""
    ids = env.ids(2, 300, seed=6)
    with env.torch.inference_mode(), small_unary_limit() as calls:
        out = fmt(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, "2x300"))
    if "_forward_stream" not in calls:
        raise Mismatch("the client did not use rpc_forward_stream")
    return out


@check("forward.stream_natural_size")
def _(env):
    from petals.client import remote_forward_backward as rfb

    length = rfb.MAX_UNARY_PAYLOAD_SIZE // 2 // (4 * env.hidden) + 40
    if length > env.max_pos - 8:
        raise Skip(f"needs {length} tokens, the model has {env.max_pos} positions")
    if length > 2048 and getattr(env.remote.config, "num_key_value_groups", 1) == 1:
        raise Skip(f"needs {length} tokens, Petals takes 2048 in a batch by default without grouped-query attention")
    x = env.noise(1, length, env.hidden, seed=7)
    with env.torch.inference_mode(), small_unary_limit(rfb.MAX_UNARY_PAYLOAD_SIZE) as calls:
        out = fmt(env.close_enough(env.h(x), env.local.blocks(x), f"1x{length}"))
    if "_forward_stream" not in calls:
        raise Mismatch("the client did not use rpc_forward_stream")
    return f"1x{length} {out}"


@check("forward.client_dtypes")
def _(env):
    """bfloat16 and float16 tensors on the wire"""
    x = env.noise(2, 9, env.hidden, seed=8)
    with env.torch.inference_mode():
        out = []
        for dtype, tol in ((env.torch.bfloat16, 3e-2), (env.torch.float16, 5e-3)):
            tol = max(tol, env.tol)
            x_low = x.to(dtype)
            got = env.h(x_low)
            if got.dtype != dtype:
                raise Mismatch(f"client gave {got.dtype} for {dtype}")
            out.append(f"{str(dtype)[6:]} rel {env.close_enough(got, env.local.blocks(x_low.float()), str(dtype), tol)[1]:.1e}")
    return ", ".join(out)
