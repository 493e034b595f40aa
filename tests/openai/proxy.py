"""The official `openai` package of PyPI through an nginx with its defaults. Prints one line per point; exit status 1 if one fails.

    python proxy.py http://127.0.0.1:8080/v1 NGINX FOLDER SERVER_PID

SERVER_PID is the server of the swarm, which stands still for a while.
"""
import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import openai

import points

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "interop"))
from servers import processes_of_session

BASE, NGINX, FOLDER, SERVER = sys.argv[1], sys.argv[2], os.path.abspath(sys.argv[3]), int(sys.argv[4])
GATEWAY = urllib.parse.urlparse(BASE).netloc
CONFIG = """
{user}
daemon off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://{gateway}; }}
        location /below/ {{ proxy_pass http://{gateway}/; }}
    }}
}}
"""
ASK = dict(model="demo", messages=[{"role": "user", "content": "Tell me of a fox."}], max_tokens=16, temperature=0)
START_DEADLINE_S, READ_DEADLINE_S = 60, 600
point = points.of("proxy")


def start():
    """The process of nginx, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = os.path.join(FOLDER, "nginx-run")
    os.makedirs(folder, exist_ok=True)
    config = os.path.join(folder, "nginx.conf")
    with open(config, "w") as f:
        f.write(CONFIG.format(user="user root;" if os.getuid() == 0 else "", port=port, gateway=GATEWAY))
    with open(os.path.join(folder, "nginx.log"), "wb") as log:
        process = subprocess.Popen([NGINX, "-p", folder, "-c", config, "-e", "stderr"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return process, f"http://127.0.0.1:{port}"
        time.sleep(0.05)
    process.kill()
    raise SystemExit(f"nginx did not start, see {folder}/nginx.log")


nginx, address = start()
atexit.register(lambda: (nginx.terminate(), nginx.wait(30)))
direct, through, below = (openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=READ_DEADLINE_S)
                          for base in (BASE, f"{address}/v1", f"{address}/below/v1"))


def whole(client):
    return client.chat.completions.create(**ASK).choices[0].message.content


def streamed(client):
    return "".join(choice.delta.content or "" for chunk in client.chat.completions.create(**ASK, stream=True)
                   for choice in chunk.choices)


@contextlib.contextmanager
def silent_server():
    """The server of the swarm does nothing; calling what this gives lets it go on."""
    processes = processes_of_session(SERVER)

    def tell(what):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, what)

    tell(signal.SIGSTOP)
    try:
        yield lambda: tell(signal.SIGCONT)
    finally:
        tell(signal.SIGCONT)


@point("chat")
def _():
    assert whole(through) == whole(direct) == streamed(through)


@point("below_a_path")
def _():
    assert whole(below) == whole(direct) == streamed(below)
    with urllib.request.urlopen(f"{address}/below/", timeout=READ_DEADLINE_S) as page:
        text = page.read().decode()
    absolute = re.findall(r"""(?:fetch\(|src=|href=|url\()\s*["'`]?(/[^"'`)\s]*)""", text)
    assert "<title>" in text and not absolute, absolute


@point("errors")
def _():
    try:
        through.chat.completions.create(**{**ASK, "model": "gpt-4"})
    except openai.NotFoundError as error:
        assert "not offered" in error.message
    else:
        raise AssertionError("a model that is not offered was served")


@point("a_stream_opens_while_its_server_is_silent")
def _():
    with silent_server() as go_on:
        with through.chat.completions.with_streaming_response.create(**ASK, stream=True) as response:
            lines = response.iter_lines()
            assert response.status_code == 200 and "text/event-stream" in response.headers["content-type"]
            # A proxy that held it back would give nothing before the text is there.
            first = next(lines)
            assert first.startswith(":"), first
            go_on()
            rest = [line for line in lines if line.startswith("data: ")]
            assert rest[-1] == "data: [DONE]" and len(rest) > 2, rest


sys.exit(points.failed > 0)
