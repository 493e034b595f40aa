"""Tensors in every compression of hivemind, in requests and, as they ask for it, in answers, in all three RPCs.

The client of Petals compresses every tensor of a request alike, those without elements that stand for absent prompts
and hypo ids, too, and hivemind's encoders of the 8-bit compressions fail on these (a standard deviation and quantiles of
nothing). So these requests are made one level lower, by hivemind's own serialization and stubs. What is expected
is computed from what hivemind decodes of the request, and compared with what hivemind makes of it in the answer's compression.
"""
from checks import Mismatch, check, fmt
from checks.discovery import server_stub

BUCKETS = 2e-3  # of the norm of a tensor: one value of hundreds in a neighbouring bucket
LOSSY = ["FLOAT16", "MEANSTD_16BIT", "UNIFORM_8BIT", "QUANTILE_8BIT"]  # hivemind has BLOCKWISE_8BIT with a GPU's library only


class Raw:
    """Requests for all blocks of the one server that there is."""

    def __init__(self, env):
        from hivemind.proto import runtime_pb2

        self.env, self.pb = env, runtime_pb2
        manager = env.h.sequence_manager
        span, *more = manager.make_sequence(0, env.n_layers, mode="max_throughput")
        if more:
            raise Mismatch(f"one server was expected, not {1 + len(more)}")
        self.peer = span.peer_id
        self.uids = " ".join(manager.block_uids)

    def tensor(self, tensor, kind="NONE"):
        """The message of a tensor, and what it is decoded to."""
        from hivemind import deserialize_torch_tensor, serialize_torch_tensor

        message = serialize_torch_tensor(tensor, self.pb.CompressionType.Value(kind))
        return message, deserialize_torch_tensor(message)

    def request(self, tensors, kinds, **metadata):
        from hivemind import MSGPackSerializer
        from petals.utils.packaging import pack_args_kwargs

        _, structure = pack_args_kwargs(*[self.env.torch.empty(1) for _ in tensors])
        codes = [self.pb.CompressionType.Value(kind) for kind in kinds]
        metadata = dict(metadata, args_structure=structure, output_compression=codes)
        return self.pb.ExpertRequest(uid=self.uids, tensors=tensors, metadata=MSGPackSerializer.dumps(metadata))

    def call(self, rpc, tensors, kinds, **metadata):
        """The tensors that `rpc` answers with, which must come in the compressions that were asked for."""
        from hivemind import deserialize_torch_tensor
        from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker

        request = self.request(tensors, kinds, **metadata)

        async def unary():
            return await getattr(server_stub(self.env, self.peer), rpc)(request, timeout=300)

        async def stream():
            async def inputs():
                yield request
                yield self.pb.ExpertRequest()

            outputs = await server_stub(self.env, self.peer).rpc_inference(inputs())
            async for response in outputs:
                return response

        response = RemoteExpertWorker.run_coroutine(stream() if rpc == "rpc_inference" else unary())
        got = [self.pb.CompressionType.Name(tensor.compression) for tensor in response.tensors]
        if got != list(kinds):
            raise Mismatch(f"{rpc} answered in {got} instead of {kinds}")
        return [deserialize_torch_tensor(tensor) for tensor in response.tensors]

    def compare(self, got, want, kind, what, tolerance):
        """Against what hivemind itself makes of the expected values in `kind`, all but a few of which fall into the same buckets."""
        want = want.detach()
        if kind == "NONE":
            return self.env.close_enough(got, want, what, tolerance)
        coded = self.tensor(want, kind)[1].float()
        error = (got.float() - coded).norm().item()
        relative = error / want.norm().item()
        if tuple(got.shape) != tuple(want.shape) or not relative < BUCKETS:
            raise Mismatch(f"{what}: {relative:.3g} > {BUCKETS} of the norm besides the loss of {kind}")
        return (got.float() - coded).abs().max().item(), relative


@check("compression.forward")
def _(env):
    raw, pairs = Raw(env), []
    absent, _ = raw.tensor(env.torch.empty(0))
    for sent, asked in [(kind, "NONE") for kind in LOSSY] + [("NONE", kind) for kind in LOSSY]:
        message, x = raw.tensor(env.noise(2, 7, env.hidden, seed=61), sent)
        got, = raw.call("rpc_forward", [message, absent], [asked])
        with env.torch.inference_mode():
            pairs.append(raw.compare(got, env.local.blocks(x), asked, f"{sent} to {asked}", env.tol))
    return fmt(pairs)


@check("compression.backward")
def _(env):
    """Prompts and gradients are compressed, too; the answer's two tensors are asked for in different compressions."""
    raw, pairs, torch = Raw(env), [], env.torch
    for i, kind in enumerate(LOSSY):
        other = LOSSY[i - 1]
        messages, values = zip(*(raw.tensor(tensor, kind) for tensor in (
            env.noise(2, 7, env.hidden, seed=62), env.noise(2, 7, env.hidden, seed=63),
            env.noise(env.n_layers, 2, 3, env.hidden, seed=64, scale=0.5))))
        x, gradient, prompts = (value.clone() for value in values)
        x.requires_grad_(True), prompts.requires_grad_(True)
        with torch.enable_grad():
            (env.local.blocks(x, layer_prompts=prompts) * gradient).sum().backward()
        for asked in ([other, kind], ["NONE", "NONE"]):
            of_inputs, of_prompts = raw.call("rpc_backward", list(messages), asked)
            pairs += [raw.compare(of_inputs, x.grad, asked[0], f"{kind}: grad of inputs", 10 * env.tol),
                      raw.compare(of_prompts, prompts.grad, asked[1], f"{kind}: grad of prompts", 10 * env.tol)]
    return fmt(pairs)


@check("compression.inference")
def _(env):
    """A first step with hidden states and deep prompts in each compression; hypo ids are whole numbers and never are."""
    raw, pairs = Raw(env), []
    absent, _ = raw.tensor(env.torch.empty(0, dtype=env.torch.int64))
    for i, kind in enumerate(LOSSY):
        states, x = raw.tensor(env.noise(2, 5, env.hidden, seed=65), kind)
        deep, prompts = raw.tensor(env.noise(env.n_layers, 2, 3, env.hidden, seed=66, scale=0.5), kind)
        got, = raw.call("rpc_inference", [states, deep, absent], ["NONE"], max_length=16, session_id=f"compressed-{i}",
                        step_id=f"step-{i}")
        with env.torch.inference_mode():
            want = env.local.blocks(x, layer_prompts=prompts)
        pairs.append(raw.compare(got, want, "NONE", kind, env.tol))
    return fmt(pairs)
