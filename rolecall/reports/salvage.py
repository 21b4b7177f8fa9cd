"""What is left of a run whose journal does not hold: its newest whole checkpoint and its last report, offered beside
the complaint.

Every byte of a checkpoint is compared with the sums that were written with it, without torch. Nothing here writes.
"""

import hashlib
import json
from pathlib import Path

from rolecall.core.errors import JournalCorrupt
from rolecall.reports.baseline import REPORT_JSON


def offer(error: JournalCorrupt) -> str:
    """A sentence for people; empty where the journal is none of a run directory's."""
    run = Path(error.where.partition(": ")[0]).parent
    checkpoints, report = run / "checkpoints", run / REPORT_JSON
    if not checkpoints.is_dir():
        return ""
    found = newest_whole(checkpoints)
    offered = [f"its newest whole checkpoint {found}"] if found is not None else []
    if report.is_file():
        offered.append(f"the report that was written before, {report}")
    if not offered:
        return f"nothing else of this run can be used: {checkpoints} holds no whole checkpoint"
    return f"what can still be used of this run: {'; '.join(offered)}"


def newest_whole(folder: Path) -> Path | None:
    """The newest `step-*` of which every file is what was written."""
    return next((p for p in sorted(folder.glob("step-*"), reverse=True) if _whole(p)), None)


def _whole(path: Path) -> bool:
    try:
        files = json.loads((path / "meta.json").read_text(encoding="utf-8"))["files"]
        sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in files}
        return bool(sums) and all(sums[name] == files[name]["sha256"] for name in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
