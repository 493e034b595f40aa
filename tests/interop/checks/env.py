"""The two sides that a point compares: Local (plain transformers) and Env.remote (the Petals client)."""
import contextlib
import json
import logging
import math
import os
import threading
import time

from checks import Mismatch
from checks.quantized import quantize


def knows_llama3_rope(transformers):
    """Whether this transformers computes Llama 3.1's rope_scaling itself (4.43 and later do)."""
    try:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return "llama3" in ROPE_INIT_FUNCTIONS
    except ImportError:
        return False


def loadable_folder(path, transformers):
    """A folder that this transformers can load, and the rope_scaling that was left out of it (or None).

    Old versions refuse the config of a Llama 3.1. The client half of a model knows nothing of positions, so
    the client works with the scaling taken out, and Local puts it back into the tables of its own copy.
    """
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    scaling = config.get("rope_scaling")
    if not scaling or scaling.get("rope_type", scaling.get("type")) != "llama3" or knows_llama3_rope(transformers):
        return path, None
    folder = path.rstrip("/") + "-without-rope-scaling"
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(path):
        if name != "config.json" and not os.path.lexists(os.path.join(folder, name)):
            os.symlink(os.path.join(path, name), os.path.join(folder, name))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(dict(config, rope_scaling=None), f)
    return folder, scaling


def set_llama3_rope(torch, model, scaling):
    """Scale the rotary frequencies as Llama 3.1 does (transformers: _compute_llama3_parameters)."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    original = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    frequencies = []
    for i in range(0, head_dim, 2):
        frequency = 1.0 / config.rope_theta ** (i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency /= factor
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    for layer in model.model.layers:
        rope = layer.self_attn.rotary_emb
        rope.inv_freq = torch.tensor(frequencies, dtype=torch.float32)
        rope._set_cos_sin_cache(rope.max_seq_len_cached, rope.inv_freq.device, torch.float32)


class Local:
    """The same weights in plain transformers, with access to the input of every block."""

    def __init__(self, path, torch, transformers, dtype, quant_type=None):
        self.torch = torch
        path, scaling = loadable_folder(path, transformers)
        kwargs = dict(torch_dtype=dtype)
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **kwargs)
        except (TypeError, ValueError):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
        self.model.eval().requires_grad_(False)
        if scaling is not None:
            set_llama3_rope(torch, self.model, scaling)
        body = getattr(self.model, "model", None) or self.model.transformer
        self.body = body
        self.layers = body.layers if hasattr(body, "layers") else body.h
        if quant_type:
            quantize(torch, self.layers, quant_type)
        self.norm = body.norm if hasattr(body, "norm") else body.ln_f
        self.head = self.model.lm_head
        self.embed = self.model.get_input_embeddings()
        self.lock = threading.RLock()  # run() hangs hooks on the model

    def run(self, ids=None, embeds=None, layer_prompts=None, first_hidden=None):
        """Returns (list of block inputs plus the last block's output, logits)."""
        torch, seen, handles = self.torch, {}, []

        def pre_hook(index):
            def hook(module, args, kwargs):
                hidden = args[0] if args else kwargs["hidden_states"]
                if index == 0 and first_hidden is not None:
                    hidden = first_hidden
                if layer_prompts is not None and index < len(layer_prompts):
                    p = layer_prompts[index]
                    hidden = torch.cat([hidden[:, : p.shape[1]] + p, hidden[:, p.shape[1]:]], dim=1)
                seen[index] = hidden
                if args:
                    return (hidden,) + tuple(args[1:]), kwargs
                return args, dict(kwargs, hidden_states=hidden)

            return hook

        if first_hidden is not None and ids is None and embeds is None:
            embeds = first_hidden
        with self.lock:
            for i, layer in enumerate(self.layers):
                handles.append(layer.register_forward_pre_hook(pre_hook(i), with_kwargs=True))
            handles.append(self.norm.register_forward_pre_hook(lambda m, args: seen.__setitem__("out", args[0])))
            try:
                out = self.model(input_ids=ids, inputs_embeds=embeds, use_cache=False)
            finally:
                for h in handles:
                    h.remove()
        return [seen[i] for i in range(len(self.layers))] + [seen["out"]], out.logits

    def blocks(self, hidden, layer_prompts=None):
        """Run only the transformer blocks on the given hidden states."""
        return self.run(first_hidden=hidden, layer_prompts=layer_prompts)[0][-1]

    def logits(self, hidden):
        return self.head(self.norm(hidden))


class Env:
    def __init__(self, args):
        import torch

        import transformers

        self.args, self.torch, self.transformers = args, torch, transformers
        torch.manual_seed(args.seed)
        torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))
        transformers.logging.set_verbosity_error()
        import petals
        from hivemind.utils.logging import use_hivemind_log_handler  # noqa: F401 (proves that hivemind imports)

        # Petals bug: a session whose close() failed is closed again by the garbage collector; if that happens
        # in the event loop's own thread, the client waits for itself forever.
        petals.client.inference_session._ServerInferenceSession.__del__ = lambda session: None
        for name in ("petals", "hivemind"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.petals = petals
        self.dtype = getattr(torch, args.dtype)
        self.tol = args.tolerance if args.tolerance is not None else {"float32": 1e-4, "bfloat16": 6e-2}[args.dtype]
        self.client_folder, _ = loadable_folder(args.model, transformers)
        self.local = Local(args.model, torch, transformers, torch.float32, getattr(args, "quant_type", None))
        self.config = self.local.model.config
        self.hidden = self.config.hidden_size
        self.n_layers = self.config.num_hidden_layers
        self.vocab = self.config.vocab_size
        self.max_pos = min(getattr(self.config, "max_position_embeddings", None) or 4096, 4096)
        self.remote = self.client()
        self.wait_online(args.online_timeout)

    def wait_online(self, timeout):
        """Until every block is announced as ONLINE by somebody."""
        from petals.data_structures import ServerState
        from petals.utils.dht import get_remote_module_infos

        manager, missing = self.h.sequence_manager, "all"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            infos = get_remote_module_infos(manager.dht, manager.block_uids, latest=True)
            missing = [i for i, info in enumerate(infos) if info is None or not any(
                server.state == ServerState.ONLINE for server in info.servers.values())]
            if not missing:
                return
            time.sleep(0.2)
        raise Mismatch(f"blocks {missing} not announced as ONLINE within {timeout} s")

    def client(self, **extra):
        args = self.args
        kwargs = dict(
            initial_peers=args.initial_peers, dht_prefix=args.dht_prefix, torch_dtype=self.torch.float32,
            max_retries=args.max_retries, request_timeout=args.request_timeout,
            connect_timeout=args.request_timeout, daemon_startup_timeout=600, show_route=False, min_backoff=0.2,
            ban_timeout=getattr(args, "ban_timeout", 2.0), update_period=getattr(args, "update_period", 60),
        )
        kwargs.update(extra)
        model = self.petals.AutoDistributedModelForCausalLM.from_pretrained(self.client_folder, **kwargs)
        model.eval()
        return model

    @staticmethod
    def close(model):
        manager = model.transformer.h.sequence_manager
        with contextlib.suppress(Exception):
            manager.shutdown()
        with contextlib.suppress(Exception):
            manager.dht.shutdown()

    @property
    def h(self):
        return self.remote.transformer.h

    def ids(self, batch, length, seed=0):
        g = self.torch.Generator().manual_seed(1000 + seed)
        return self.torch.randint(4, self.vocab, (batch, length), generator=g)

    def noise(self, *shape, seed=0, scale=1.0):
        g = self.torch.Generator().manual_seed(2000 + seed)
        return self.torch.randn(*shape, generator=g) * scale

    def close_enough(self, got, want, what="", tol=None):
        tol = self.tol if tol is None else tol
        if tuple(got.shape) != tuple(want.shape):
            raise Mismatch(f"{what} shape {tuple(got.shape)} instead of {tuple(want.shape)}")
        got, want = got.detach().float(), want.detach().float()
        if not self.torch.isfinite(got).all():
            raise Mismatch(f"{what} has non-finite values")
        err = (got - want).abs().max().item()
        rel = err / max(want.abs().max().item(), 1e-12)
        if rel > tol:
            raise Mismatch(f"{what} abs {err:.3g} rel {rel:.3g} > {tol:g}")
        return err, rel

    def same_tokens(self, got, want, prompt_len, model=None):
        """float32: equal token for token. bfloat16: every token near-greedy for the local model."""
        got, want = got.cpu(), want.cpu()
        if self.args.dtype == "float32":
            if got.shape != want.shape:
                raise Mismatch(f"shape {tuple(got.shape)} instead of {tuple(want.shape)}")
            if not self.torch.equal(got, want):
                col = (got != want).any(0).nonzero()[0].item()
                raise Mismatch(f"differs from new token {col - prompt_len}: {got[:, col].tolist()} instead of "
                               f"{want[:, col].tolist()}")
            return f"{got.shape[0]}x{got.shape[1] - prompt_len} tokens equal"
        with self.torch.inference_mode():
            logits = (model or self.local.model)(got).logits[:, prompt_len - 1: -1]
        chosen = logits.gather(-1, got[:, prompt_len:, None]).squeeze(-1)
        gaps = (logits.max(-1).values - chosen) / logits.abs().amax(-1)
        # A row of a batch that has ended is filled up with padding, which nobody chose.
        ends = got[:, prompt_len:] == (model or self.local.model).config.eos_token_id
        gap = gaps.masked_fill(ends.cumsum(1) - ends.int() > 0, 0.0).max().item()
        if gap > self.tol:
            raise Mismatch(f"a chosen token is {gap:.3g} below the local best")
        agree = (got == want).float().mean().item()
        return f"{got.shape[0]}x{got.shape[1] - prompt_len} tokens, worst gap {gap:.3g}, {100 * agree:.0f}% equal"
