"""Type-checks exported dashboards against Grafana's published schema with TypeScript's compiler.

Both are npm packages pinned in tools/grafana-schema; they are installed there once (git ignores the folder).
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.grafana.viewing import all_panels

HOME = Path(__file__).parents[3] / "tools" / "grafana-schema"
INSTALL_SECONDS = 120
CHECK_SECONDS = 120
AWAY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ETIMEDOUT", "ERR_SOCKET_TIMEOUT")
"""What npm says where no registry can be reached. Whatever else it says is a mistake of ours."""

KINDS = {
    "timeseries": "TimeSeries",
    "stat": "Stat",
    "bargauge": "BarGauge",
    "table": "Table",
    "state-timeline": "StateTimeline",
    "row": "Row",
}


def packages() -> Path:
    """`node_modules` with what the lock names. Skips the test where node, npm or a registry is missing."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node and npm here: the Debian packages `nodejs` and `npm` have them")
    home = os.open(HOME, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(home, fcntl.LOCK_EX)  # tests run in several processes: one installs, the others find it
        _install()
    finally:
        os.close(home)
    return HOME / "node_modules"


def _install() -> None:
    installed, lock = HOME / "node_modules" / ".package-lock.json", HOME / "package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    argv = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=60000"]
    try:
        done = subprocess.run(argv, cwd=HOME, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm ci did not end within {INSTALL_SECONDS} s")
    said = done.stdout + done.stderr
    if done.returncode != 0 and any(word in said for word in AWAY):
        pytest.skip("npm reaches no registry")
    assert done.returncode == 0, said[-2000:]
    os.utime(installed)


def source(document: Mapping[str, Any]) -> str:
    """A dashboard as TypeScript: each part says which type it satisfies."""
    kinds = sorted(set(KINDS.values()))
    head = {k: v for k, v in document.items() if k not in ("panels", "annotations")}
    parts = [f'import type {{ Annotation, Board, {", ".join(kinds)} }} from "./shapes";']
    parts.append(f"export const board = {_text(head)} satisfies Board;")
    parts.append(f"export const annotations = {_text(document['annotations']['list'])} satisfies Annotation[];")
    rows = [{**p, "panels": []} for p in document["panels"] if p["type"] == "row"]
    for panel in (*rows, *all_panels(document)):
        parts.append(f"export const panel{panel['id']} = {_text(panel)} satisfies {KINDS[panel['type']]};")
    return "\n".join(parts) + "\n"


def complaints(folder: Path, documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the compiler finds wrong, as `FILE: error TS...: ...`."""
    (folder / "node_modules").symlink_to(packages())
    for name in ("shapes.ts", "tsconfig.json"):
        shutil.copy(HOME / name, folder)
    for document in documents:
        (folder / f"{document['uid']}.ts").write_text(source(document))
    tsc = folder / "node_modules" / "typescript" / "bin" / "tsc"
    argv = ["node", str(tsc), "--project", str(folder), "--pretty", "false"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=CHECK_SECONDS)
    found = [line for line in done.stdout.splitlines() if re.search(r"error TS\d+", line)]
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


def _text(value: Any) -> str:
    return json.dumps(value, indent=1)
