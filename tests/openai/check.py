"""The official `openai` package of PyPI, and `llm`, against a gateway. Prints one line per point; exit status 1 if one fails.

    python check.py http://127.0.0.1:8080/v1
"""
import os
import subprocess
import sys
import tempfile
from typing import Literal

import openai
import pydantic

import points

BASE = sys.argv[1]
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
ASK = dict(model="demo", messages=[{"role": "user", "content": "Tell me of a fox."}], max_tokens=16, temperature=0)
point = points.of("python")


def whole():
    return client.chat.completions.create(**ASK)


@point("models")
def _():
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@point("chat")
def _():
    answer = whole()
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@point("chat.stream")
def _():
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole().choices[0].message.content
    assert chunks[-1].usage.completion_tokens > 0


@point("chat.choices")
def _():
    answers = [client.chat.completions.create(**{**ASK, "temperature": 1.2}, n=3, seed=5) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert len(texts[0]) == 3 and texts[0] == texts[1]


@point("chat.logprobs")
def _():
    content = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) > 0 and all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)


@point("chat.stream_helper")
def _():
    with client.chat.completions.stream(**ASK) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole().choices[0].message.content


@point("completions")
def _():
    ask = dict(model="demo", prompt="Once upon a time", max_tokens=12, temperature=0)
    text = client.completions.create(**ask).choices[0].text
    assert text and "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices) == text


class Animal(pydantic.BaseModel):
    name: Literal["fox", "hare"]
    legs: Literal[2, 4]


@point("chat.json_schema")
def _():
    ask = {**ASK, "max_tokens": 300, "temperature": 1.0}
    answer = client.chat.completions.parse(**ask, seed=3, response_format=Animal).choices[0]
    assert answer.finish_reason == "stop" and answer.message.parsed.legs in (2, 4), answer


@point("chat.json_object")
def _():
    text = client.chat.completions.create(**ASK, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{"), text


@point("errors")
def _():
    for change, kind, part in [({"model": "gpt-4"}, openai.NotFoundError, "not offered"),
                               ({"temperature": 9}, openai.BadRequestError, "temperature"),
                               ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "elephant"}}}},
                                openai.BadRequestError, "elephant"),
                               ({"max_tokens": 10**6}, openai.BadRequestError, "together")]:
        try:
            client.chat.completions.create(**{**ASK, **change})
        except kind as error:
            assert part in error.message, error.message
            assert error.type == "invalid_request_error", error.type
        else:
            raise AssertionError(f"{change} was served")


@point("cancel")
def _():
    stream = client.chat.completions.create(**{**ASK, "max_tokens": 1000}, stream=True)
    next(iter(stream))
    stream.close()
    whole()


@point("llm")
def _():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "extra-openai-models.yaml"), "w") as f:
            f.write(f"- model_id: demo\n  model_name: demo\n  api_base: {BASE}\n  api_key_name: none\n")
        command = [os.path.join(os.path.dirname(sys.executable), "llm"), "-m", "demo", "--key", "none", "-o", "max_tokens", "8",
                   "-o", "temperature", "0", "Tell me of a fox."]
        done = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=1200)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


sys.exit(points.failed > 0)
