"""`aichat`, the chat program in Rust, as it is, against a gateway. Prints one line per point; exit status 1 if one fails.

    python aichat.py http://127.0.0.1:8080/v1 PATH_OF_AICHAT

Needs the `openai` package, whose answers are what `aichat` has to show.
"""
import json
import os
import subprocess
import sys
import tempfile

import openai

import points

BASE, AICHAT = sys.argv[1:]
TOKENS = 12
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
point = points.of("aichat")


def expected(messages):
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=TOKENS, temperature=0)
    return answer.choices[0].message.content.strip()


def config(folder, models):
    """Writes the configuration of `aichat`, which is YAML and reads JSON too."""
    models = [dict(name=name, max_output_tokens=TOKENS, require_max_tokens=True) for name in models]
    of_sepal = {"type": "openai-compatible", "name": "sepal", "api_base": BASE, "api_key": "none", "models": models}
    with open(os.path.join(folder, "config.yaml"), "w") as f:
        json.dump(dict(model="sepal:demo", temperature=0, save_session=True, save=False, clients=[of_sepal]), f)


def ask(folder, *args):
    environment = {**os.environ, "AICHAT_CONFIG_DIR": folder}
    return subprocess.run([AICHAT, *args], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)


def said(folder, *args):
    done = ask(folder, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


with tempfile.TemporaryDirectory() as folder:
    config(folder, ["demo", "absent"])
    user = dict(role="user", content="Tell me of a fox.")

    @point("models")
    def _():
        assert "sepal:demo" in said(folder, "--list-models").split()

    @point("stream")
    def _():
        assert said(folder, user["content"]) == expected([user])

    @point("whole")
    def _():
        assert said(folder, "--no-stream", user["content"]) == expected([user])

    @point("system")
    def _():
        os.mkdir(os.path.join(folder, "roles"))
        with open(os.path.join(folder, "roles", "birds.md"), "w") as f:
            f.write("---\ntemperature: 0\n---\nSpeak of birds.")
        system = dict(role="system", content="Speak of birds.")
        assert said(folder, "--role", "birds", user["content"]) == expected([system, user])

    @point("session")
    def _():
        first = said(folder, "--session", "fox", user["content"])
        more = dict(role="user", content="Go on.")
        got = said(folder, "--session", "fox", more["content"])
        assert got == expected([user, dict(role="assistant", content=first), more]), got

    @point("unknown")
    def _():
        done = ask(folder, "--model", "sepal:absent", user["content"])
        assert done.returncode != 0 and "not offered" in done.stderr, (done.returncode, done.stderr)

sys.exit(points.failed > 0)
