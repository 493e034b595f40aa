#!/usr/bin/env python3
"""Writes client/golden/tokenizers.json: small tokenizers of every kind, and the tokens that transformers makes of texts with them.

    generate_tokenizers.py          with transformers 5.24.0, which needs no torch for this
"""
import json
import os
import tempfile

from transformers import AutoTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TEXTS = ["a b", " a", "", "<s> a</s>b", "▁a", "a<|end|>\na", "é", "aa  a"]
VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "<|end|>": 7, "▁▁": 8}


def added(index, content):
    return {"id": index, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer(**changes):
    prepend = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": True, "byte_fallback": False, "ignore_merges": False, "vocab": VOCAB, "merges": [["▁", "a"], ["▁", "▁"]]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
            "normalizer": prepend, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **changes}


def template(*parts):
    single = [{"Sequence": {"id": "A", "type_id": 0}} if part == "$A" else {"SpecialToken": {"id": part, "type_id": 0}} for part in parts]
    special = {part: {"id": part, "ids": [VOCAB[part]], "tokens": [part]} for part in parts if part != "$A"}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def kinds():
    """Name, type of the model, tokenizer.json, tokenizer_config.json."""
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    llama = {**fast, "tokenizer_class": "LlamaTokenizer"}
    both = {"add_bos_token": True, "add_eos_token": True}
    begin = template("<s>", "$A")
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    yield "a bos_token that no post-processor adds", "falcon", tokenizer(), fast
    yield "a file that adds the first token", "falcon", tokenizer(post_processor=begin), fast
    yield "a file that adds both", "bloom", tokenizer(post_processor=template("<s>", "$A", "</s>")), fast
    yield "another first token than bos_token", "falcon", tokenizer(post_processor=template("<|end|>", "$A")), fast
    yield "flags beside tokenizer.json", "falcon", tokenizer(post_processor=begin), {**fast, **both, "add_bos_token": False}
    yield "flags alone", "mistral", tokenizer(), {**llama, **both}
    yield "lengths of training", "falcon", tokenizer(post_processor=begin, truncation=cut, padding=fill), fast
    yield "tokens of tokenizer_config.json", "falcon", tokenizer(), {
        **fast, "eos_token": "<|end|>", "added_tokens_decoder": {"7": {k: v for k, v in added(7, "<|end|>").items() if k != "id"}}}
    yield "Llama 2", "llama", tokenizer(post_processor=begin), {**llama, **both, "legacy": True}
    yield "Llama 2 with LlamaTokenizerFast", "llama", tokenizer(post_processor=begin), {**llama, "tokenizer_class": "LlamaTokenizerFast"}
    yield "Llama 2 without a first space", "llama", tokenizer(post_processor=begin), {**llama, "add_prefix_space": False}
    yield "Mistral with LlamaTokenizer", "mistral", tokenizer(post_processor=begin), {**llama, "legacy": True}


def main():
    table = []
    for kind, model_type, file, config in kinds():
        with tempfile.TemporaryDirectory() as folder:
            files = {"tokenizer.json": file, "tokenizer_config.json": config, "config.json": {"model_type": model_type}}
            for name, content in files.items():
                with open(os.path.join(folder, name), "w") as f:
                    json.dump(content, f)
            read = AutoTokenizer.from_pretrained(folder)
            # What a file says of lengths is for training: `__call__` without arguments cuts nothing.
            plain = {"padding": False, "truncation": False}
            cases = [{"text": text, "ids": read(text, **plain)["input_ids"],
                      "rendered": read(text, add_special_tokens=False, **plain)["input_ids"]} for text in TEXTS]
            table.append({"kind": kind, "files": files, "eos": read.eos_token_id, "cases": cases})
    with open(os.path.join(ROOT, "client", "golden", "tokenizers.json"), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in table) + "\n]\n")


main()
