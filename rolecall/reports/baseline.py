"""The failure-free run that a run is compared with: the newest report of the same configuration beside it."""

import json
from pathlib import Path
from typing import Any

from rolecall.core.errors import RunNotFound

SCHEMA_VERSION = 1
"""Of report.json. Reports of another schema are not compared."""
REPORT_JSON = "report.json"


def find_baseline(run: Path, digest: str) -> dict[str, Any] | None:
    """The newest report beside `run` of a failure-free run of the same configuration."""
    best: dict[str, Any] | None = None
    for path in run.parent.glob(f"*/{REPORT_JSON}"):
        if path.parent == run:
            continue
        report = read_report(path)
        same = digest and report.get("config_digest") == digest and report.get("schema") == SCHEMA_VERSION
        fit = same and report.get("failure_free") and report.get("ok") and report.get("steps")
        if fit and (best is None or report["ended_at"] > best["ended_at"]):
            best = report
    return best


def named_baseline(path: Path) -> dict[str, Any]:
    """The report at `path`, a run directory or the file itself.

    Raises:
        RunNotFound: it holds no report of a run with steps.
    """
    report = read_report(path / REPORT_JSON if path.is_dir() else path)
    if not report.get("steps"):
        raise RunNotFound(f"{path}: holds no report of a run with steps to compare with")
    return report


def read_report(path: Path) -> dict[str, Any]:
    """A report that is there and readable, else nothing: it can always be written again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
