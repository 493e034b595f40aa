"""Gradients through rpc_backward and rpc_backward_stream, prompt tuning, LoRA adapters."""
import json
import os

from checks import Mismatch, check, fmt
from checks.env import Local
from checks.forward import small_unary_limit
from checks.generate import generate_kwargs


def grads(env, x, prompts=None, h=None, blocks=None):
    torch = env.torch
    weight = env.noise(*x.shape, seed=99)
    xr = x.clone().requires_grad_(True)
    xl = x.clone().requires_grad_(True)
    pr = prompts.clone().requires_grad_(True) if prompts is not None else None
    pl = prompts.clone().requires_grad_(True) if prompts is not None else None
    with torch.enable_grad():
        out = (h or env.h)(xr, prompts=pr) if prompts is not None else (h or env.h)(xr)
        (out * weight).sum().backward()
        want = (blocks or env.local.blocks)(xl, layer_prompts=pl)
        (want * weight).sum().backward()
    pairs = [env.close_enough(out, want, "output"), env.close_enough(xr.grad, xl.grad, "grad of inputs", env.tol * 10)]
    if prompts is not None:
        pairs.append(env.close_enough(pr.grad, pl.grad, "grad of prompts", env.tol * 10))
    return pairs


@check("backward.inputs")
def _(env):
    return fmt(grads(env, env.noise(2, 13, env.hidden, seed=81)))


@check("backward.deep_prompts")
def _(env):
    prompts = env.noise(env.n_layers, 2, 3, env.hidden, seed=82, scale=0.5)
    return fmt(grads(env, env.noise(2, 13, env.hidden, seed=83), prompts))


@check("backward.split_over_1024_tokens")
def _(env):
    prompts = env.noise(env.n_layers, 5, 3, env.hidden, seed=84, scale=0.5)
    return fmt(grads(env, env.noise(5, 300, env.hidden, seed=85), prompts))


@check("backward.stream")
def _(env):
    with small_unary_limit() as calls:
        pairs = grads(env, env.noise(1, 300, env.hidden, seed=86))
    if "_backward_stream" not in calls:
        raise Mismatch("the client did not use rpc_backward_stream")
    return fmt(pairs)


@check("backward.logits_wrt_embeddings")
def _(env):
    torch = env.torch
    ids = env.ids(2, 10, seed=87)
    base = env.local.embed(ids).detach()
    er, el = base.clone().requires_grad_(True), base.clone().requires_grad_(True)
    losses = []
    with torch.enable_grad():
        for model, e in ((env.remote, er), (env.local.model, el)):
            logits = model(inputs_embeds=e).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, env.vocab), ids[:, 1:].reshape(-1))
            loss.backward()
            losses.append(loss.item())
    out = fmt(env.close_enough(er.grad, el.grad, "grad of embeddings", env.tol * 10))
    return out + f", loss {losses[0]:.5f} / {losses[1]:.5f}"


def ptune(env, mode):
    torch, p = env.torch, 4
    model = env.client(tuning_mode=mode, pre_seq_len=p)
    try:
        with torch.no_grad():
            model.transformer.prompt_embeddings.weight.copy_(env.noise(p, env.hidden, seed=91, scale=0.5))
            if mode == "deep_ptune":
                w = model.transformer.intermediate_prompt_embeddings.weight
                w.copy_(env.noise(*w.shape, seed=92, scale=0.3))
        ids = env.ids(2, 9, seed=93)
        with torch.enable_grad():
            logits = model(ids).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, env.vocab), ids[:, 1:].reshape(-1))
            loss.backward()
        prompt = model.transformer.prompt_embeddings.weight.detach().clone().requires_grad_(True)
        deep = None
        if mode == "deep_ptune":
            deep = model.transformer.intermediate_prompt_embeddings.weight.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            embeds = torch.cat([prompt[None].expand(2, -1, -1), env.local.embed(ids)], 1)
            layer_prompts = None
            if deep is not None:
                layer_prompts = deep[None].expand(2, -1, -1).reshape(2, p, env.n_layers, env.hidden).permute(2, 0, 1, 3)
            want = env.local.run(embeds=embeds, layer_prompts=layer_prompts)[1][:, p:]
            wloss = torch.nn.functional.cross_entropy(want[:, :-1].reshape(-1, env.vocab), ids[:, 1:].reshape(-1))
            wloss.backward()
        pairs = [env.close_enough(logits, want, "logits")]
        pairs.append(env.close_enough(model.transformer.prompt_embeddings.weight.grad, prompt.grad, "grad of prompts",
                                      env.tol * 10))
        if deep is not None:
            pairs.append(env.close_enough(model.transformer.intermediate_prompt_embeddings.weight.grad, deep.grad,
                                          "grad of deep prompts", env.tol * 10))
        text = fmt(pairs) + f", loss {loss.item():.5f} / {wloss.item():.5f}"
        # generation with prompts goes through an inference session
        prefix = ids[:1]
        with torch.inference_mode():
            try:
                got = model.generate(prefix, **generate_kwargs(env, 8))
            except (ValueError, NotImplementedError, AttributeError, AssertionError, RuntimeError) as e:
                return text + f", generate() not supported by this client ({type(e).__name__})"
            want_ids = prefix
            for _ in range(8):
                embeds = torch.cat([prompt[None], env.local.embed(want_ids)], 1)
                lp = layer_prompts[:, :1] if layer_prompts is not None else None
                nxt = env.local.run(embeds=embeds, layer_prompts=lp)[1][:, -1].argmax(-1, keepdim=True)
                want_ids = torch.cat([want_ids, nxt], 1)
        if env.args.dtype == "float32" and not torch.equal(got, want_ids):
            raise Mismatch(f"generate() with prompts: {got[0].tolist()} instead of {want_ids[0].tolist()}")
        return text + ", 8 tokens equal"
    finally:
        env.close(model)


@check("ptune.shallow")
def _(env):
    return ptune(env, "ptune")


@check("ptune.deep")
def _(env):
    return ptune(env, "deep_ptune")


def apply_lora(env, model, path):
    from safetensors.torch import load_file

    cfg = json.load(open(os.path.join(path, "adapter_config.json")))
    tensors = load_file(os.path.join(path, "adapter_model.safetensors"))
    scale = cfg["lora_alpha"] / (cfg["r"] ** 0.5 if cfg.get("use_rslora") else cfg["r"])
    modules = dict(model.named_modules())
    count = 0
    with env.torch.no_grad():
        for key, a in tensors.items():
            if not key.endswith(".lora_A.weight"):
                continue
            name = key[len("base_model.model."): -len(".lora_A.weight")]
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            modules[name].weight += scale * (b.float() @ a.float())
            count += 1
    return count


def adapter_check(env, path, name):
    local = Local(env.args.model, env.torch, env.transformers, env.torch.float32)
    count = apply_lora(env, local.model, path)
    model = env.client(active_adapter=name)
    try:
        ids = env.ids(2, 12, seed=95)
        with env.torch.inference_mode():
            want = local.model(ids).logits
            pairs = [env.close_enough(model(ids).logits, want, "logits")]
            shift = (want - env.local.model(ids).logits).abs().max().item()
            got_ids = model.generate(ids, **generate_kwargs(env, env.args.tokens))
            want_ids = local.model.generate(ids, **generate_kwargs(env, env.args.tokens))
            tokens = env.same_tokens(got_ids, want_ids, 12, model=local.model)
            pairs.append(env.close_enough(env.remote(ids).logits, env.local.model(ids).logits, "base after adapter"))
        pairs += grads(env, env.noise(2, 7, env.hidden, seed=96), h=model.transformer.h, blocks=local.blocks)
        return f"{count} matrices, {fmt(pairs)}, {tokens}, adapter moves logits by {shift:.2f}"
    finally:
        env.close(model)
