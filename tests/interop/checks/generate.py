"""Text generation through the client, against the same call of transformers."""
import threading

from checks import Mismatch, Skip, check


def generate_kwargs(env, n, **extra):
    return dict(max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0, **extra)


@check("generate.greedy")
def _(env):
    ids, n = env.ids(1, 6, seed=31), env.args.tokens
    with env.torch.inference_mode():
        got = env.remote.generate(ids, **generate_kwargs(env, n))
        want = env.local.model.generate(ids, **generate_kwargs(env, n))
    distinct = len(set(want[0, 6:].tolist()))
    return env.same_tokens(got, want, 6) + f" ({distinct} distinct)"


@check("generate.greedy_batch")
def _(env):
    ids, n = env.ids(3, 8, seed=32), env.args.tokens
    with env.torch.inference_mode():
        got = env.remote.generate(ids, **generate_kwargs(env, n))
        want = env.local.model.generate(ids, **generate_kwargs(env, n))
    return env.same_tokens(got, want, 8)


@check("generate.long_prompt")
def _(env):
    length = min(1500, env.max_pos - 40)
    ids = env.ids(1, length, seed=33)
    with env.torch.inference_mode():
        got = env.remote.generate(ids, **generate_kwargs(env, 12))
        want = env.local.model.generate(ids, **generate_kwargs(env, 12))
    return f"prompt {length}, " + env.same_tokens(got, want, length)


@check("generate.resumed_session")
def _(env):
    ids = env.ids(1, 5, seed=34)
    with env.torch.inference_mode():
        want = env.local.model.generate(ids, **generate_kwargs(env, 12))
        with env.remote.inference_session(max_length=5 + 12):
            got = env.remote.generate(ids, **generate_kwargs(env, 4))
            parts = [got] + [env.remote.generate(None, **generate_kwargs(env, 4)) for _ in range(2)]
    return env.same_tokens(env.torch.cat(parts, 1), want, 5)


@check("generate.beam_search")
def _(env):
    ids = env.ids(1, 6, seed=35)
    kwargs = generate_kwargs(env, 16, num_beams=3)
    with env.torch.inference_mode():
        want = env.local.model.generate(ids, **kwargs)
        try:
            got = env.remote.generate(ids, **kwargs)
        except (NotImplementedError, TypeError, AttributeError) as e:
            raise Skip(f"client of petals {env.petals.__version__}: {type(e).__name__}: {e}")
    if env.args.dtype != "float32":
        return f"{(got == want).float().mean().item() * 100:.0f}% of tokens equal (not judged in {env.args.dtype})"
    return env.same_tokens(got, want, 6)


@check("generate.concurrent_sessions")
def _(env):
    n_threads, n_tokens = env.args.concurrency, 24
    prompts = [env.ids(1 + i % 2, 4 + 3 * i, seed=40 + i) for i in range(n_threads)]
    got, errors = [None] * n_threads, []

    def work(i):
        try:
            with env.torch.inference_mode():
                got[i] = env.remote.generate(prompts[i], **generate_kwargs(env, n_tokens))
        except Exception as e:
            errors.append(f"session {i}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(n_threads)]
    [t.start() for t in threads]
    [t.join(env.args.check_timeout) for t in threads]
    if errors or any(g is None for g in got):
        raise Mismatch("; ".join(errors) or "a session did not finish")
    with env.torch.inference_mode():
        for prompt, g in zip(prompts, got):
            want = env.local.model.generate(prompt, **generate_kwargs(env, n_tokens))
            env.same_tokens(g, want, prompt.shape[1])
    return f"{n_threads} sessions x {n_tokens} tokens equal"
