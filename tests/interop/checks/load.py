"""Different kinds of requests at the same time."""
import threading

from checks import Mismatch, check, fmt
from checks.backward import grads


def decode(env, i):
    x = env.noise(1, 20, env.hidden, seed=50 + i)
    with env.torch.inference_mode(), env.h.inference_session(max_length=20) as s:
        got = env.torch.cat([s.step(x[:, :4])] + [s.step(x[:, j: j + 1]) for j in range(4, 20)], 1)
        return [env.close_enough(got, env.local.blocks(x), f"decode {i}")]


def forward(env, i):
    x = env.noise(2, 150, env.hidden, seed=60 + i)
    with env.torch.inference_mode():
        return [env.close_enough(env.h(x), env.local.blocks(x), f"forward {i}")]


def backward(env, i):
    return grads(env, env.noise(2, 40, env.hidden, seed=70 + i))


def at_once(env, kinds, each=3):
    """`each` threads of every kind."""
    errors, done = [], []

    def run(kind, i):
        try:
            done.append(kind(env, i))
        except Exception as e:
            errors.append(f"{kind.__name__} {i}: {type(e).__name__}: {e}")

    jobs = [threading.Thread(target=run, args=(kind, i), daemon=True) for i in range(each) for kind in kinds]
    [t.start() for t in jobs]
    [t.join(env.args.check_timeout) for t in jobs]
    if errors or len(done) < len(jobs):
        raise Mismatch("; ".join(errors) or "some job did not finish")
    return f"{len(jobs)} at once, {fmt([pair for pairs in done for pair in pairs])}"


@check("load.decode_and_forward")
def _(env):
    return at_once(env, [decode, forward], each=4)


@check("backward.beside_decode_and_forward")
def _(env):
    return at_once(env, [decode, forward, backward])
