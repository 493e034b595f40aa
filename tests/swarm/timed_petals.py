"""The real Petals server with blocks that compute nothing and take the times that config.json states (`stated_times`, as timed/times.rs).

    python timed_petals.py MODEL [arguments of petals.cli.run_server]

Everything but the blocks is Petals' own: its handlers, its queue of tasks for one device, its protocols. Petals computes steps of different
sessions one after the other; here, too.
"""
import runpy
import sys
import time

import torch
from petals.server import server as petals_server
from petals.server.backend import TransformerBackend


class TimedBlock(torch.nn.Module):
    """Has what Petals asks of a block: one attention with its number of heads, and a forward pass."""

    def __init__(self, config):
        super().__init__()
        attention = config.attn_class.__new__(config.attn_class)
        torch.nn.Module.__init__(attention)
        attention.num_heads = config.num_attention_heads
        self.self_attn = attention

    def forward(self, hidden_states, *args, **kwargs):
        return (hidden_states,)


def spend(backend, tokens, passes=1):
    times = backend.config.stated_times
    step_us = times["step_us"]
    time.sleep((step_us if tokens <= 32 else passes * max(tokens * times["token_us"], step_us)) / 1e6)


def inference_step(backend, hidden_states, hypo_ids, inference_info):
    spend(backend, hidden_states.shape[0] * hidden_states.shape[1])
    return (hidden_states,)


def forward(backend, hidden_states, *_):
    spend(backend, max(33, hidden_states.shape[0] * hidden_states.shape[1]))
    return (hidden_states,)


def backward(backend, hidden_states, grad_outputs, *_):
    spend(backend, max(33, hidden_states.shape[0] * hidden_states.shape[1]), passes=3)
    return (grad_outputs,)


if __name__ == "__main__":
    petals_server.load_pretrained_block = lambda name, index, *, config, **_: TimedBlock(config)
    TransformerBackend.inference_step, TransformerBackend.forward, TransformerBackend.backward = inference_step, forward, backward
    sys.argv[0] = "run_server"
    runpy.run_module("petals.cli.run_server", run_name="__main__")
