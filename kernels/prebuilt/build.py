#!/usr/bin/env python3
"""Compiles kernels/cuda/*.cu into the images of this folder. Needs no GPU and no CUDA toolkit.

    kernels/prebuilt/build.py [--check [--since REF]] [--tools DIR] [--jobs N] [OP...]
    kernels/prebuilt/build.py --format

The compilers are packages of PyPI, pinned by hash (requirements.txt), installed into --tools
(default: target/cuda-tools).
Each OP.cu becomes OP.zst, which holds

- PTX for compute_80, with the lowest version that ptxas accepts, so that old drivers take it
- a cubin for each of ARCHITECTURES, which runs on drivers from 525 on

A source whose head says "// Architectures: 90a" has cubins for these architectures only and no PTX.
manifest.json records per image the hash of its sources, the constants that the source exports to
Rust (EXPORT in ptx.h), and registers, shared memory and stack of every kernel.

A build fails when a kernel spills registers, when ptxas serializes wgmma, when the instructions of
a kernel differ from those that its source expects (expects.py), or when nvcc 13.0.88, the second
front end, refuses a source. manifest.json also says which kernels wait for earlier launches
(pdl_wait in pdl.cuh) on the architectures that have such a wait.

--check builds anew and compares byte for byte. Images that are not named are compared by the hash
of their sources. --check --since REF builds only the images whose sources or bytes differ from the
git commit REF; it builds all of them when REF is unknown or when this folder's programs differ.
--check without names also refuses sources that --format would change.
Without OP, all images are built, and images without a source are removed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time

import expects
from model.images import PACKAGES, install_packages

HERE = pathlib.Path(__file__).resolve().parent
CUDA = HERE.parent / "cuda"
# The architectures of cubins, by the virtual architecture whose PTX they are assembled from.
VIRTUAL = {"80": ["80", "86", "89"], "90a": ["90a"], "100": ["100", "120"]}
ARCHITECTURES = [real for reals in VIRTUAL.values() for real in reals]
PTX_VERSIONS = ["7.0", "7.1", "7.4", "7.8", "8.0"]
COMPILERS = "nvrtc 12.9.86, ptxas 12.9.86"
LEVEL = 19


def main():
    arguments = argparse.ArgumentParser(description="Compiles the CUDA kernels.")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--since", metavar="REF")
    arguments.add_argument("--format", action="store_true")
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
    if options.format:
        return run_formatters(tools, check=False)
    if options.check and not options.op and run_formatters(tools, check=True) != 0:
        print("run kernels/prebuilt/build.py --format", file=sys.stderr)
        return 1
    return build(options, tools)


def install(tools):
    """Installs the compilers unless exactly these are there."""
    install_packages(tools, PACKAGES.read_text())


def run_formatters(tools, check):
    """Formats the sources of kernels/, or says which ones are not formatted."""
    sources = [path for end in ("cu", "cuh", "h", "cpp") for path in sorted(CUDA.rglob(f"*.{end}"))]
    clang = ["--dry-run", "-Werror"] if check else ["-i"]
    ruff = ["--check"] if check else []
    commands = [
        [tools / "bin/clang-format", *clang, *sources],
        [tools / "bin/ruff", "format", "--quiet", *ruff, HERE.parent],
        [tools / "bin/ruff", "check", "--quiet", "--select", "E501", HERE.parent],
    ]
    done = [subprocess.run(command).returncode for command in commands]
    long = [
        f"{path}:{number}: longer than 100 columns"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    print("\n".join(long), end="\n" if long else "", file=sys.stderr)
    return 1 if any(done) or long else 0


def build(options, tools):
    """Builds the images that `options` asks for, and writes them or compares them."""
    every = sorted(path.stem for path in CUDA.glob("*.cu"))
    manifest_path = HERE / "manifest.json"
    old = json.loads(manifest_path.read_text())["images"] if manifest_path.exists() else {}
    ops = options.op or every
    if options.since:
        ops = changed_since(options.since, ops, old)
        print(f"{len(ops)} of {len(every)} images changed since {options.since}", flush=True)
    images = {op: image for op, image in old.items() if op in every and op not in ops}
    wrong, failed = [], []
    # The largest images take longest; they come first, so that the workers finish together.
    ops = sorted(ops, key=lambda op: -size_of(HERE / f"{op}.zst"))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for op, built in zip(ops, pool.map(lambda op: run_worker(tools, op), ops)):
            if built is None:
                failed.append(op)
                continue
            image, pack, seconds = built
            images[op] = image
            path = HERE / f"{op}.zst"
            if not options.check:
                path.write_bytes(pack)
            elif not path.exists() or path.read_bytes() != pack:
                wrong.append(path.name)
            kernels = len(image["kernels"])
            print(f"{op}: {kernels} kernels, {len(pack)} bytes, {seconds:.0f} s", flush=True)
    if failed:
        print("failed: " + " ".join(failed), file=sys.stderr)
        return 1
    text = manifest_text(images)
    if options.check:
        if manifest_path.read_text() != text:
            wrong.append(manifest_path.name)
        return report(wrong + stale(every, images))
    manifest_path.write_text(text)
    for path in HERE.glob("*.zst"):
        if path.stem not in every:
            path.unlink()
    return 0


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def stale(every, images):
    """Images that are missing, older than their sources, or without a source."""
    is_stale = lambda op: op not in images or images[op]["source"] != source_hash(op)  # noqa: E731
    lost = [path.name for path in HERE.glob("*.zst") if path.stem not in every]
    return [f"{op}.zst" for op in every if is_stale(op)] + lost


def report(wrong):
    if not wrong:
        return 0
    names = " ".join(sorted(set(wrong)))
    print(f"differ from the sources: {names}; run kernels/prebuilt/build.py", file=sys.stderr)
    return 1


def changed_since(ref, ops, images):
    """The images of `ops` whose sources or bytes differ from those of the commit `ref`."""

    def at_ref(name):
        command = ["git", "show", f"{ref}:./{name}"]
        done = subprocess.run(command, cwd=HERE, capture_output=True)
        return done.stdout if done.returncode == 0 else None

    programs = ["build.py", "nvrtc.c", "expects.py", PACKAGES.name]
    manifest = at_ref("manifest.json")
    if manifest is None or any(at_ref(name) != (HERE / name).read_bytes() for name in programs):
        return ops
    before = json.loads(manifest)["images"]

    def is_same(op):
        path = HERE / f"{op}.zst"
        if op not in images or images[op] != before.get(op) or not path.exists():
            return False
        return images[op]["source"] == source_hash(op) and at_ref(path.name) == path.read_bytes()

    return [op for op in ops if not is_same(op)]


def manifest_text(images):
    """JSON with a line per kernel, so that changes read well and merge."""
    lines = [f'{{"compilers": {json.dumps(COMPILERS)},', '"images": {']
    for number, (op, image) in enumerate(sorted(images.items())):
        lines.append(f'"{op}": {{"source": "{image["source"]}", "ptx": {json.dumps(image["ptx"])},')
        lines.append(f'"exports": {json.dumps(image["exports"])},')
        lines.append('"kernels": {')
        kernels = sorted(image["kernels"].items())
        for index, (name, use) in enumerate(kernels):
            comma = "," if index + 1 < len(kernels) else ""
            lines.append(f'  "{name}": {json.dumps(use)}{comma}')
        lines.append("}}" + ("," if number + 1 < len(images) else ""))
    return "\n".join(lines + ["}}"]) + "\n"


def run_worker(tools, op):
    """Builds one image with the interpreter of the tools, where zstandard is installed."""
    start = time.monotonic()
    command = [tools / "bin/python", __file__, "--tools", tools, "--worker", op]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode != 0:
        return None
    head, pack = done.stdout.split(b"\n", 1)
    return json.loads(head), pack, time.monotonic() - start


def worker(tools, op):
    """Builds one image and writes its entry of the manifest, a line end and its bytes to stdout."""
    import zstandard

    site = next((tools / "lib").glob("python3.*")) / "site-packages/nvidia"
    source = (CUDA / f"{op}.cu").read_text()
    ptxas = site / "cuda_nvcc/bin/ptxas"
    only = re.search(r"^// Architectures: ([0-9a ]+)$", source, re.M)
    only = only.group(1).split() if only else None
    version, kernels, sections = None, {}, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        nvrtc = Nvrtc(site, folder)
        for virtual, reals in VIRTUAL.items():
            reals = [real for real in reals if only is None or real in only]
            if not reals:
                continue
            ptx = nvrtc.ptx(op, virtual)
            if virtual == "80" and only is None:
                version, base = lowered(ptxas, ptx, folder)
                sections.append(("ptx", base.encode()))
            for real in reals:
                cubin, uses = assemble(ptxas, ptx, real, folder, op)
                sections.append((f"sm_{real}", cubin))
                disassemble(site, source, op, real, folder, uses)
                for name, use in uses.items():
                    kernels.setdefault(name, {})[real] = use
        second_gate(site, op, folder)
        exports = nvrtc.exports(op, only[0] if only else "80")
    pack = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(packed(sections))
    image = {"source": source_hash(op), "ptx": version, "exports": exports, "kernels": kernels}
    sys.stdout.buffer.write(json.dumps(image).encode() + b"\n" + pack)
    return 0


def packed(sections):
    """The number of sections, then of each the lengths of name and data, the name, the data.

    Numbers are 32 bits, little-endian.
    """
    out = struct.pack("<I", len(sections))
    for name, data in sections:
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
    """The runtime compiler, used ahead of time; nvrtc.c gives the same bytes each time."""

    def __init__(self, site, folder):
        self.folder = folder
        # The compiler meets these names only: its bytes follow the lengths of what it is given.
        (folder / "cuda").symlink_to(CUDA)
        (folder / "include").symlink_to(site / "cuda_runtime/include")
        (folder / "lib").symlink_to(site / "cuda_nvrtc/lib")
        command = ["cc", "-O1", "-rdynamic", HERE / "nvrtc.c", "-o", folder / "nvrtc", "-ldl"]
        subprocess.run(command, check=True)

    def ptx(self, op, architecture, *more):
        flags = [
            f"--gpu-architecture=compute_{architecture}",
            "--std=c++17",
            "-Icuda",
            "-Iinclude",
            "-default-device",
            *more,
        ]
        command = ["./nvrtc", "lib/libnvrtc.so.12", f"cuda/{op}.cu", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        if done.returncode != 0:
            sys.exit(f"{op}.cu for compute_{architecture}: NVRTC ends with {done.returncode}")
        return done.stdout

    def exports(self, op, architecture):
        """The constants that a source exports to Rust: {name: value}."""
        # The image itself does not contain them. Kernels become inline functions that nothing
        # calls, so this takes only the front end.
        ptx = self.ptx(op, architecture, "-DEXPORTS", "-w")
        found = re.findall(r"\.global \.align 4 \.u32 exported_(\w+)(?: = (\d+))?;", ptx)
        return {name: int(value or 0) for name, value in found}


def lowered(ptxas, ptx, folder):
    """The PTX with the lowest version that ptxas accepts."""
    # Comments name the compiler's build, which does not concern the code.
    ptx = re.sub(r"^//.*\n", "", ptx, flags=re.M)
    # A hint about loads that only newer versions know.
    ptx = re.sub(r'^\s*\.pragma "used_bytes_mask[^"]*";\n', "", ptx, flags=re.M)
    for version in PTX_VERSIONS:
        text = re.sub(r"^\.version .*$", f".version {version}", ptx, count=1, flags=re.M)
        (folder / "low.ptx").write_text(text)
        command = [ptxas, "-arch=sm_80", "-O1", folder / "low.ptx", "-o", folder / "low.cubin"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return version, text
    sys.exit("ptxas accepts no lower version of the PTX")


ENTRY = (
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
)


def assemble(ptxas, ptx, architecture, folder, op):
    """The cubin of an architecture, and what its kernels use. Ends when one spills."""
    ptx = re.sub(r"^\.target \w+$", f".target sm_{architecture}", ptx, count=1, flags=re.M)
    (folder / f"{op}.ptx").write_text(ptx)
    output = folder / f"{op}.cubin"
    flags = [f"-arch=sm_{architecture}", "-v", "-warn-spills", "-Werror"]
    command = [ptxas, *flags, f"{op}.ptx", "-o", output]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    # Serialized products wait for each other; ptxas only warns of it.
    if done.returncode != 0 or "wgmma.mma_async instructions are serialized" in done.stderr:
        sys.exit(f"{op}.cu for sm_{architecture}:\n{done.stderr}")
    uses = {}
    for name, stack, stores, loads, registers, rest in re.findall(ENTRY, done.stderr, re.S):
        if int(stores) or int(loads):
            sys.exit(f"{name} for sm_{architecture} spills {stores} + {loads} bytes")
        shared = re.search(r"(\d+) bytes smem", rest)
        uses[name] = {
            "registers": int(registers),
            "stack": int(stack),
            "shared": int(shared.group(1)) if shared else 0,
        }
    return output.read_bytes(), uses


def disassemble(site, source, op, architecture, folder, uses):
    """Ends unless the cubin in `folder` has the instructions that the source expects."""
    # Without control-flow analysis: it takes time, and this disassembler, which is newer than the
    # compiler, cannot analyse some architectures.
    command = [site / "cu13/bin/nvdisasm", "-c", "-ndf", folder / f"{op}.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"disassemble {op} for sm_{architecture}:\n{done.stderr}")
    stacks = {name: use["stack"] for name, use in uses.items()}
    for name in expects.waiting(done.stdout):
        uses[name]["waits"] = True
    if wrong := expects.violations(source, done.stdout, stacks):
        lines = "\n  ".join(sorted(wrong))
        sys.exit(f"{op}.cu for sm_{architecture} differs from its expectations:\n  {lines}")


def second_gate(site, op, folder):
    """Ends unless nvcc 13 compiles the source, too, without spills."""
    flags = ["-std=c++17", "-cubin", "-arch=sm_90a", "-Xptxas", "-warn-spills,-Werror", f"-I{CUDA}"]
    command = [site / "cu13/bin/nvcc", *flags, "-o", folder / "gate.cubin", CUDA / f"{op}.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{op}.cu, nvcc 13:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
