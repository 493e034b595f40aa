"""What the programs of this folder share: running commands with a deadline, the virtual environment, the executable."""
import contextlib
import os
import signal
import subprocess
import tempfile
import time

from servers import ServerFailed, processes_of_session
from sweep import sweep

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SETUP_DEADLINE_S = 7200
BEGAN = time.monotonic()


def say(text):
    print(f"# [{time.monotonic() - BEGAN:4.0f} s] {text}", flush=True)


def run_to_end(command, log, deadline_s, environment, on_line=None, enter=None):
    """Runs a command in a session of its own, shows its lines as they come, and ends what it leaves behind. `enter` is called in its process
    first, which may go to another network namespace.

    The output goes to a file: processes that outlive the command would keep a pipe open.
    """
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=environment, preexec_fn=enter)
    deadline, partial = time.monotonic() + deadline_s, ""
    try:
        with open(log, errors="replace") as lines:
            while True:
                ended = process.poll() is not None or time.monotonic() > deadline
                *whole, partial = (partial + lines.read()).split("\n")
                for line in whole:
                    if on_line:
                        on_line(line)
                if ended:
                    return process.poll()
                time.sleep(0.1)
    finally:
        for pid in processes_of_session(process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def own_folders():
    """Temporary files and sockets of all processes go to a folder of this run, which is removed at the end.

    What is killed leaves files: those of Petals wherever it made them, those of Sepal in the runtime folder until the next start.
    """
    with tempfile.TemporaryDirectory(prefix="sepal-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        os.environ["XDG_RUNTIME_DIR"] = os.path.join(folder, "run")
        os.mkdir(os.environ["XDG_RUNTIME_DIR"], 0o700)
        try:
            yield
        finally:
            sweep()


def environment_for(out):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PETALS_", "TRANSFORMERS_"))}
    environment.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                       HF_HOME=os.path.join(out, "hf"), PETALS_CACHE=os.path.join(out, "petals-cache"), PYTHONDONTWRITEBYTECODE="1",
                       PYTHONUNBUFFERED="1")
    return environment


def set_up_venv(out):
    """The Python of the virtual environment with the real Petals, made if it is not there."""
    venv = os.environ.get("INTEROP_VENV") or os.path.join(out, "venv")
    say(f"virtual environment {venv}")
    log = os.path.join(out, "setup.log")
    if run_to_end([os.path.join(HERE, "setup.sh"), venv], log, SETUP_DEADLINE_S, dict(os.environ), print) != 0:
        raise ServerFailed(f"the virtual environment could not be set up, see {log}")
    return os.path.join(venv, "bin", "python")


def find_sepal():
    candidates = [os.environ["SEPAL"]] if os.environ.get("SEPAL") else [
        os.path.join(ROOT, "target", profile, "sepal") for profile in ("release", "debug")]
    for path in candidates:
        if os.access(path, os.X_OK):
            return os.path.abspath(path)
    raise ServerFailed(f"no executable at {' or '.join(candidates)}: build it, or name it in $SEPAL")


def find_emulator():
    """An executable with emulated CUDA devices."""
    path = os.environ.get("SEPAL_EMU") or os.path.join(ROOT, "target", "debug", "sepal")
    if not os.access(path, os.X_OK):
        raise ServerFailed(f"no executable at {path}: cargo test --no-run, or name a build with emulated devices in $SEPAL_EMU")
    return os.path.abspath(path)


def find_example(name, sepal):
    """An example of the Rust client, built beside `sepal`, or with the tests: beside the executable with emulated devices."""
    tests = os.environ.get("SEPAL_EMU") or os.path.join(ROOT, "target", "debug", "sepal")
    candidates = [os.path.join(os.path.dirname(path), "examples", name) for path in (sepal, tests)]
    for path in candidates:
        if os.access(path, os.X_OK):
            return os.path.abspath(path)
    raise ServerFailed(f"no executable at {' or '.join(candidates)}: cargo build -p client --examples")
