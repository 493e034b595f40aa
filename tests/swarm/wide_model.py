"""A model folder with states as wide as those of Llama 70B and next to no weights, for servers that compute for a stated time."""
import json
import os
import struct

from profiles import BLOCKS, DEVICES, HIDDEN

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 8, 1, 8, 64, 64


def tensors():
    """Names and shapes."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for block in range(BLOCKS):
        name = f"model.layers.{block}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", (HIDDEN,)
        for projection, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{name}self_attn.{projection}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{name}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        for projection in ("gate", "up"):
            yield f"{name}mlp.{projection}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{name}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def make(folder, device):
    """Writes it, with the times of `device`. The weights are zeros, which take no room on a file system with sparse files."""
    os.makedirs(folder, exist_ok=True)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=HIDDEN, head_dim=HEAD_DIM,
                  num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=BLOCKS, intermediate_size=INTERMEDIATE,
                  vocab_size=VOCABULARY, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
                  tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, bos_token_id=0, eos_token_id=1, pretraining_tp=1,
                  stated_times=DEVICES[device])
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    header, at = {}, 0
    for name, shape in tensors():
        count = 2
        for dimension in shape:
            count *= dimension
        header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + count])
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder
