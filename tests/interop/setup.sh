#!/usr/bin/env bash
# Install a real Petals (client and server, CPU) from PyPI alone into a virtual environment.
#
#   tests/interop/setup.sh [DIR]          default: $INTEROP_VENV, else target/interop/venv
#
# Needs: Python 3.11 with venv (PYTHON=... to name it), cc, nm and readelf (binutils), Linux x86_64,
# about 0.8 GB of downloads and 2 GB of disk. Safe to run again: a finished folder is left alone.
#
# TORCH_INDEX_URL  an index with CPU-only torch wheels (say a mirror of PyTorch's /whl/cpu); torch then comes
#                  from there and no CUDA stubs are made. Default: PyPI.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${INTEROP_VENV:-$here/../../target/interop/venv}}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
log="$dir/setup.log"
began=$(date +%s)
say() { printf '%s [%4ds] %s\n' "$(date -u +%H:%M:%S)" "$(($(date +%s) - began))" "$*" | tee -a "$log"; }

stamp=$(cat "$here/requirements.txt" "$here/petals_compat.py" "$here/cuda_stubs.py" "$0" | sha256sum | cut -c1-16)
if [ -f "$dir/ready" ] && [ "$(cat "$dir/ready")" = "$stamp" ]; then
    say "already set up ($stamp): $dir/bin/python"
    exit 0
fi
rm -f "$dir/ready"

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { say "Python 3.11 not found; set PYTHON=/path/to/python3.11"; exit 1; }
for tool in cc nm readelf; do
    command -v "$tool" >/dev/null || { say "$tool not found"; exit 1; }
done

say "venv in $dir with $("$python" --version)"
[ -x "$dir/bin/python" ] || "$python" -m venv "$dir" >>"$log" 2>&1
pip=("$dir/bin/python" -m pip --disable-pip-version-check --no-input)

say "installing the packages (about 0.8 GB the first time)"
install() { "${pip[@]}" install --no-deps "$@" >>"$log" 2>&1 || { say "pip failed:"; tail -20 "$log"; exit 1; }; }
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    # Another wheel than the one of PyPI, so another hash.
    install --index-url "$TORCH_INDEX_URL" "$(grep -oE '^torch==[0-9.]+' "$here/requirements.txt")"
    grep -vE '^(torch==|nvidia-)' "$here/requirements.txt" >"$dir/requirements.txt"
else
    cp "$here/requirements.txt" "$dir/requirements.txt"
fi
# First what builds the few that have no wheel: pip would fetch the newest of its own accord.
grep -E '^(setuptools|wheel)==' "$here/requirements.txt" >"$dir/build-requirements.txt"
install --require-hashes -r "$dir/build-requirements.txt"
install --require-hashes --no-build-isolation -r "$dir/requirements.txt"

site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
say "CUDA stubs: $("$dir/bin/python" "$here/cuda_stubs.py" "$site" 2>>"$log")"
cp "$here/petals_compat.py" "$site/"
echo "import petals_compat" >"$site/petals_compat.pth"

say "import check"
"$dir/bin/python" - >>"$log" 2>&1 <<'PY' || { say "import failed:"; tail -20 "$log"; exit 1; }
import torch

a = torch.randn(64, 64)
assert torch.isfinite(a @ a).all() and not torch.cuda.is_available()
import petals
import petals.server.server
import petals.utils.peft
print("petals", petals.__version__, "torch", torch.__version__)
PY
tail -1 "$log"
echo "$stamp" >"$dir/ready"
say "ready: $dir/bin/python, $(du -sm "$dir" | cut -f1) MB"
