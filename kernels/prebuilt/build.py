#!/usr/bin/env python3
"""Compiles kernels/cuda/*.cu into the images of this folder, with pinned compilers from PyPI; no GPU and no CUDA toolkit needed.

    kernels/prebuilt/build.py [--check] [--tools DIR] [--jobs N] [OP...]

Each OP.cu becomes OP.zst: PTX (compute_80, its version lowered as far as ptxas accepts it, so that old drivers take it) and a cubin for
each architecture below, made by NVRTC and ptxas 12.9.86, whose cubins run on drivers from 525 on. A file whose head says
"// Architectures: 90a" has cubins for those and no PTX: other devices do without its kernels. manifest.json says for each what it
was made from, and registers, shared memory and stack of every kernel. A kernel that spills registers fails the run, and so do one whose
wgmma ptxas serializes, one whose instructions are not those that its source expects (expects.py), and one that nvcc 13.0.88, the second front
end, refuses.

--check builds anew and compares byte for byte; of images that are not named it compares the hash of their sources. --tools is where
the compilers are installed (made when missing; default: target/cuda-tools). Without OP all are built, and images whose source is gone
are removed.
"""

import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import expects

HERE = pathlib.Path(__file__).resolve().parent
CUDA = HERE.parent / "cuda"
ARCHITECTURES = ["80", "86", "89", "90a", "100", "120"]
PTX_VERSIONS = ["7.0", "7.1", "7.4", "7.8", "8.0"]
PACKAGES = [
    "nvidia-cuda-nvrtc-cu12==12.9.86",
    "nvidia-cuda-nvcc-cu12==12.9.86",
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvdisasm==13.5.37",
    "zstandard==0.25.0",
]
COMPILERS = "nvrtc 12.9.86, ptxas 12.9.86"
LEVEL = 19


def main():
    arguments = argparse.ArgumentParser(description="Compiles the CUDA kernels.")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--tools", type=pathlib.Path)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    arguments.add_argument("op", nargs="*")
    options = arguments.parse_args()
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
    tools = (options.tools or target / "cuda-tools").resolve()
    if options.worker:
        return worker(tools, options.worker)
    install(tools)
    return build(options, tools)


def install(tools):
    """Installs the compilers unless exactly these are there."""
    stamp = tools / "packages"
    if stamp.exists() and stamp.read_text() == "\n".join(PACKAGES):
        return
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
    stamp.write_text("\n".join(PACKAGES))


def build(options, tools):
    every = sorted(path.stem for path in CUDA.glob("*.cu"))
    ops = options.op or every
    manifest_path = HERE / "manifest.json"
    kept = json.loads(manifest_path.read_text())["images"] if manifest_path.exists() else {}
    images = {op: image for op, image in kept.items() if op in every and op not in ops}
    wrong, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for op, built in zip(ops, pool.map(lambda op: run_worker(tools, op), ops)):
            if built is None:
                failed.append(op)
                continue
            image, pack = built
            images[op] = image
            path = HERE / f"{op}.zst"
            if not options.check:
                path.write_bytes(pack)
            elif not path.exists() or path.read_bytes() != pack:
                wrong.append(path.name)
            print(f"{op}: {len(image['kernels'])} kernels, {len(pack)} bytes", flush=True)
    if failed:
        print("failed: " + " ".join(failed), file=sys.stderr)
        return 1
    text = manifest_text(images)
    if options.check:
        if manifest_path.read_text() != text:
            wrong.append(manifest_path.name)
        wrong += [f"{op}.zst" for op in every if op not in images or images[op]["source"] != source_hash(op)]
        wrong += [path.name for path in HERE.glob("*.zst") if path.stem not in every]
        if wrong:
            print("not what the sources give: " + " ".join(sorted(set(wrong))) + "; run kernels/prebuilt/build.py", file=sys.stderr)
            return 1
        return 0
    manifest_path.write_text(text)
    for path in HERE.glob("*.zst"):
        if path.stem not in every:
            path.unlink()
    return 0


def manifest_text(images):
    """JSON with a line per kernel, so that changes read well and merge."""
    lines = [f'{{"compilers": {json.dumps(COMPILERS)},', '"images": {']
    for number, (op, image) in enumerate(sorted(images.items())):
        lines.append(f'"{op}": {{"source": "{image["source"]}", "ptx": {json.dumps(image["ptx"])}, "kernels": {{')
        kernels = sorted(image["kernels"].items())
        for index, (name, use) in enumerate(kernels):
            lines.append(f'  "{name}": {json.dumps(use)}' + ("," if index + 1 < len(kernels) else ""))
        lines.append("}}" + ("," if number + 1 < len(images) else ""))
    return "\n".join(lines + ["}}"]) + "\n"


def run_worker(tools, op):
    # A process of its own with the interpreter of the tools: NVRTC keeps memory, and zstandard is installed there.
    done = subprocess.run([tools / "bin/python", __file__, "--tools", tools, "--worker", op], stdout=subprocess.PIPE)
    if done.returncode != 0:
        return None
    head, pack = done.stdout.split(b"\n", 1)
    return json.loads(head), pack


def worker(tools, op):
    import zstandard

    site = next((tools / "lib").glob("python3.*")) / "site-packages/nvidia"
    source = (CUDA / f"{op}.cu").read_text()
    nvrtc = Nvrtc(site)
    ptxas = site / "cuda_nvcc/bin/ptxas"
    kernels, parts = {}, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        version, only = None, re.search(r"^// Architectures: ([0-9a ]+)$", source, re.M)
        if not only:
            version, base = lowered(ptxas, nvrtc.ptx(source, op, "80"), folder)
            parts.append(("ptx", base.encode()))
        for architecture in only.group(1).split() if only else ARCHITECTURES:
            cubin, uses = assemble(ptxas, nvrtc.ptx(source, op, architecture), architecture, folder, op)
            parts.append((f"sm_{architecture}", cubin))
            disassemble(site, source, op, architecture, folder, uses)
            for name, use in uses.items():
                kernels.setdefault(name, {})[architecture] = use
        second_gate(site, op, folder)
    pack = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(packed(parts))
    image = {"source": source_hash(op), "ptx": version, "kernels": kernels}
    sys.stdout.buffer.write(json.dumps(image).encode() + b"\n" + pack)
    return 0


def packed(parts):
    """Count, then for each part the lengths of name and bytes, the name, the bytes; numbers are 32 bits, little-endian."""
    out = struct.pack("<I", len(parts))
    for name, data in parts:
        out += struct.pack("<II", len(name), len(data)) + name.encode() + data
    return out


def closure(path, seen):
    """The file and all files of ours that it includes, each once, in the order of inclusion."""
    path = path.resolve()
    if path in seen or not path.exists():
        return
    seen.append(path)
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
        if not name.startswith("emu/"):
            closure(path.parent / name, seen)


def source_hash(op):
    """FNV-1a of all files of an image; kernels/build.rs computes the same."""
    seen = []
    closure(CUDA / f"{op}.cu", seen)
    value = 0xCBF29CE484222325
    for path in seen:
        for byte in path.read_bytes():
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


class Nvrtc:
    """The runtime compiler, used ahead of time."""

    def __init__(self, site):
        self.site = site
        self.library = ctypes.CDLL(str(site / "cuda_nvrtc/lib/libnvrtc.so.12"))

    def ptx(self, source, op, architecture):
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), f"{op}.cu".encode(), 0, None, None)
        flags = [f"--gpu-architecture=compute_{architecture}", "--std=c++17", f"-I{CUDA}", f"-I{self.site}/cuda_runtime/include", "-default-device"]
        array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        if self.library.nvrtcCompileProgram(program, len(flags), array) != 0:
            sys.stderr.write(self.text("nvrtcGetProgramLog", program))
            sys.exit(1)
        return self.text("nvrtcGetPTX", program)

    def text(self, what, program):
        size = ctypes.c_size_t()
        self.call(what + "Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(what, program, buffer)
        return buffer.value.decode()

    def call(self, name, *arguments):
        if status := getattr(self.library, name)(*arguments):
            sys.exit(f"{name} returned {status}")


def lowered(ptxas, ptx, folder):
    """The PTX with the lowest version that ptxas accepts."""
    # Comments name the compiler's build, which says nothing about the code.
    ptx = re.sub(r"^//.*\n", "", ptx, flags=re.M)
    # A hint about loads, which only newer versions know.
    ptx = re.sub(r'^\s*\.pragma "used_bytes_mask[^"]*";\n', "", ptx, flags=re.M)
    for version in PTX_VERSIONS:
        text = re.sub(r"^\.version .*$", f".version {version}", ptx, count=1, flags=re.M)
        (folder / "low.ptx").write_text(text)
        command = [ptxas, "-arch=sm_80", "-O1", folder / "low.ptx", "-o", folder / "low.cubin"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return version, text
    sys.exit("ptxas accepts no lower version of the PTX")


def assemble(ptxas, ptx, architecture, folder, op):
    """The cubin of an architecture, and what its kernels use. Ends when one spills."""
    (folder / f"{op}.ptx").write_text(ptx)
    output = folder / f"{op}.cubin"
    command = [ptxas, f"-arch=sm_{architecture}", "-v", "-warn-spills", "-Werror", f"{op}.ptx", "-o", output]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    # Tensor cores then wait after every product; ptxas only says so.
    if done.returncode != 0 or "wgmma.mma_async instructions are serialized" in done.stderr:
        sys.exit(f"{op}.cu for sm_{architecture}:\n{done.stderr}")
    uses = {}
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
    for name, stack, stores, loads, registers, rest in re.findall(entry, done.stderr, re.S):
        if int(stores) or int(loads):
            sys.exit(f"{name} for sm_{architecture} spills {stores} + {loads} bytes")
        shared = re.search(r"(\d+) bytes smem", rest)
        uses[name] = {"registers": int(registers), "stack": int(stack), "shared": int(shared.group(1)) if shared else 0}
    return output.read_bytes(), uses


def disassemble(site, source, op, architecture, folder, uses):
    """Ends unless the instructions of the cubin in `folder` are those that the source expects."""
    # No control flow analysis: it takes time, and the disassembler, newer than the compiler, has none for some architectures.
    command = [site / "cu13/bin/nvdisasm", "-c", "-ndf", folder / f"{op}.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"disassemble {op} for sm_{architecture}:\n{done.stderr}")
    if wrong := expects.violations(source, done.stdout, {name: use["stack"] for name, use in uses.items()}):
        sys.exit(f"{op}.cu for sm_{architecture} is not as expected:\n  " + "\n  ".join(sorted(wrong)))


def second_gate(site, op, folder):
    """nvcc 13 takes it too, without spills."""
    nvcc = site / "cu13/bin/nvcc"
    flags = ["-std=c++17", "-cubin", "-arch=sm_90a", "-Xptxas", "-warn-spills,-Werror", f"-I{CUDA}", "-o", folder / "gate.cubin"]
    done = subprocess.run([nvcc, *flags, CUDA / f"{op}.cu"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{op}.cu, nvcc 13:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
