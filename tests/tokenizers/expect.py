"""Writes cases and the tokens that transformers makes of them: `expect.py CASES FOLDER...`, see `run`.

CASES gets a line of JSON for each case, CASES.expected the tokens.
"""
import itertools
import json
import sys

from transformers import AutoTokenizer

SPECIAL = ["<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>",
           "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|return|>", "<|channel|>", "<｜begin▁of▁sentence｜>",
           "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>", "</think>", "<tool_call>", "<pad>", "[INST]", "<0x0A>"]
TEXTS = [
    "Once upon a time", "", " ", "  ", "   leading", "trailing   ", "a  b   c    d", "\n", "\n\n\nlines\r\n\r\n\ttabs\t\t", " \n \n ",
    "def f(x):\n    if x:\n        return {'a': [1, 2.5e-3]}  # é\n", "#include <stdio.h>\nint main(){return 0x1F;}\n", "SELECT * FROM t WHERE a<>'b';",
    "🦊", "🏳️‍🌈 👩‍👩‍👧‍👦 👍🏽", "漢字かな交じり文、です。", "中文字符，测试。", "한국어 문장", "Ελληνικά", "Русский текст", "עברית", "العربية ١٢٣", "हिन्दी",
    "ไทย", "e\u0301 é ﬁ ﬂ Å Å ｆｕｌｌ", "\u00a0nbsp\u2003em\u200bzero\ufeffbom", "it's I'LL we've don't CAN'T ’twas", "1234567890 1,234.56 ٣٤ ½",
    "!!!???...———", "a_b-c/d\\e@f#g$h%i^j&k*l", "CamelCaseHTTPServer2Go", "https://example.org/a?b=c&d=%20#e", "▁▁x ▁ y", "Ġx Ċ", "\x00\x01\x7f",
    "<", "<|", "<|im_", "</", "<s", "\ud7ff\ue000", "x" * 300, "ab " * 200,
]
USER, BYE = {"role": "user", "content": "Hi there! 🦊\n  What is it?"}, {"role": "user", "content": "Bye"}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "It is a fox. "}
DEVELOPER = {"role": "developer", "content": "Speak <plainly> & 'well'."}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells \"the\" weather <é>.", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer", "default": 1}}, "required": ["town"]}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm", "days": 2}}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "{\"sun\": true}"}
CHATS = {
    "chat": [[USER], [USER, ANSWER, BYE], [USER, ANSWER, BYE, ANSWER, USER]],
    "chat with system": [[SYSTEM, USER], [SYSTEM, USER, ANSWER, BYE]],
    "chat with developer": [[DEVELOPER, USER], [DEVELOPER, USER, ANSWER, BYE]],
    "chat that goes on": [[USER, ANSWER], [SYSTEM, USER, {"role": "assistant", "content": "Once\n upon  a"}]],
    "chat with tools": [[USER], [SYSTEM, USER], [USER, CALL, RESULT], [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER, BYE]],
}


def texts():
    yield from (("text", text) for text in TEXTS)
    yield from (("special tokens", token) for token in SPECIAL)
    for (a, b), form in itertools.product(itertools.pairwise(SPECIAL), ["{}x {}y", " {} {} ", "{}{}\n"]):
        yield "special tokens", form.format(a, b)
    for a, b in itertools.pairwise(TEXTS):
        yield "pairs of texts", a + " " + b
        yield "pairs of texts", a + b + "<s>" + a


def of_chat(tokenizer, kind, messages):
    """The tokens of a chat; `None` where the template refuses it."""
    known = "developer" in tokenizer.chat_template
    read = [{**m, "role": "system"} if m["role"] == "developer" and not known else m for m in messages]
    tools, goes_on = [TOOL] if kind == "chat with tools" else None, kind == "chat that goes on"
    try:
        return tokenizer.apply_chat_template(read, tools=tools, add_generation_prompt=not goes_on, continue_final_message=goes_on,
                                             tokenize=True, return_dict=False)
    except Exception as error:  # whatever a template raises
        print(f"# {kind}: refused by {tokenizer.name_or_path}: {str(error)[:80]}", flush=True)
        return None


def body(kind, messages):
    """The request for the chat, in which arguments of calls are texts."""
    request = {"model": "m", "messages": json.loads(json.dumps(messages))}
    for call in itertools.chain.from_iterable(m.get("tool_calls", []) for m in request["messages"]):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    if kind == "chat with tools":
        request["tools"] = [TOOL]
    if kind == "chat that goes on":
        request.update(continue_final_message=True, add_generation_prompt=False)
    return json.dumps(request)


def cases(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for kind, text in texts():
        yield {"kind": kind, "folder": folder, "text": text}, tokenizer(text)["input_ids"]
    if not tokenizer.chat_template:
        return
    for kind, chats in CHATS.items():
        for messages in chats:
            ids = of_chat(tokenizer, kind, messages)
            yield {"kind": kind, "folder": folder, "body": body(kind, messages)}, ids


def main():
    path, *folders = sys.argv[1:]
    with open(path, "w") as out, open(path + ".expected", "w") as expected:
        for folder in folders:
            for case, ids in cases(folder):
                out.write(json.dumps(case) + "\n")
                expected.write(json.dumps(ids) + "\n")


main()
