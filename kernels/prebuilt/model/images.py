"""Reads the images of the parent folder and disassembles them.

The disassembler and zstandard are pinned packages from PyPI (no compiler). Kernels that were read
are kept beside the tools, by the hash of their cubin, so that a second run takes a second.
"""

import hashlib
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import tempfile

from . import sass

HERE = pathlib.Path(__file__).resolve().parent
PREBUILT = HERE.parent
PACKAGES = PREBUILT / "requirements.txt"
NEEDED = ("nvidia-cuda-nvdisasm==", "zstandard==")


def tools_folder():
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", PREBUILT.parents[1] / "target"))
    return (target / "cuda-disassembler").resolve()


def install(tools):
    """Installs the disassembler."""
    lines = PACKAGES.read_text().splitlines(keepends=True)
    install_packages(tools, "".join(line for line in lines if line.startswith(NEEDED)))
    site = next((tools / "lib").glob("python3.*")) / "site-packages"
    if str(site) not in sys.path:
        sys.path.append(str(site))
    return site / "nvidia/cu13/bin/nvdisasm"


def install_packages(tools, requirements):
    """Installs packages of PyPI unless exactly these are there."""
    stamp, path = tools / "installed", tools / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", tools], check=True)
    path.write_text(requirements)
    pip = [tools / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "-r", path], check=True)
    path.rename(stamp)


def manifest():
    return json.loads((PREBUILT / "manifest.json").read_text())["images"]


def sections(op):
    """{name: bytes} of an image (build.py, packed)."""
    import zstandard

    data = zstandard.ZstdDecompressor().decompress(
        (PREBUILT / f"{op}.zst").read_bytes(), max_output_size=1 << 30
    )
    (count,), at, found = struct.unpack_from("<I", data), 4, {}
    for _ in range(count):
        name, size = struct.unpack_from("<II", data, at)
        at += 8
        found[data[at : at + name].decode()] = data[at + name : at + name + size]
        at += name + size
    return found


def constants(cubin, kernel):
    """{bank: bytes}: the constants that the compiler keeps beside a kernel; bank 0 has parameters.

    Source of the layout: the ELF-64 object file format; sections `.nv.constantBANK.KERNEL`.
    """
    offset, size, count, names = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    heads = [struct.unpack_from("<IIQQQQ", cubin, offset + size * at) for at in range(count)]
    strings, found = heads[names][4], {}
    for name, _, _, _, at, length in heads:
        end = cubin.index(b"\0", strings + name)
        text = cubin[strings + name : end].decode()
        if match := re.fullmatch(rf"\.nv\.constant(\d+)\.{kernel}", text):
            found[int(match[1])] = cubin[at : at + length]
    return found


class Images:
    """Kernels by image, architecture and name."""

    def __init__(self, tools=None):
        self.tools = tools or tools_folder()
        self.nvdisasm = install(self.tools)
        self.cubins, self.texts, self.found = {}, {}, {}

    def kernel(self, op, architecture, name):
        """A kernel of an image."""
        key = (op, architecture, name)
        if key not in self.found:
            self.found[key] = self.kept(op, architecture, name)
        return self.found[key]

    def kept(self, op, architecture, name):
        if op not in self.cubins:
            self.cubins[op] = sections(op)
        cubin = self.cubins[op][f"sm_{architecture}"]
        programs = [(HERE / program).read_bytes() for program in ("sass.py", "images.py")]
        source = cubin + name.encode() + b"".join(programs)
        path = self.tools / "kernels" / hashlib.sha256(source).hexdigest()[:24]
        if path.exists():
            return pickle.loads(path.read_bytes())
        kernel = self.read(op, architecture, name, cubin)
        store(path, kernel)
        return kernel

    def read(self, op, architecture, name, cubin):
        """Disassembles the image, once, and parses a kernel."""
        if (op, architecture) not in self.texts:
            self.texts[op, architecture] = sass.parts(self.disassembly(cubin))
        parts = self.texts[op, architecture]
        if name not in parts:
            raise KeyError(f"{op}.zst for sm_{architecture} has no kernel {name}")
        return sass.Kernel(name, *sass.read(parts[name]), constants(cubin, name))

    def disassembly(self, cubin):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            # Without control-flow analysis, as in build.py.
            command = [self.nvdisasm, "-c", "-ndf", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout


def store(path, value):
    """Writes a file that another process may write at the same time."""
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(pickle.dumps(value))
    fresh.replace(path)
