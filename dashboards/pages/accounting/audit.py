"""Audits a long journal in a child process: the audit holds every event in memory, and pages must stay responsive.

    python -m rolecall.dashboards.pages.accounting.audit < {"url", "run_id", "path"} > the audit, pickled

The journal's URL may contain a password, so it is sent through the pipe, not as an argument or in the environment.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from rolecall.core.errors import JournalUnavailable
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.views.audit import RunAudit, audit_journal

APART_EVENTS = 20_000
"""Journals with fewer events are audited in-process, which is faster than starting a process."""
SECONDS_MAX = 1_800.0
"""Enough for about 20 million events; a longer audit is stuck."""
NICENESS = 10


def audited(journal: Journal, url: str, run_id: str, run: RunDir | None, *, apart: bool) -> RunAudit:
    """`apart`: in a child process. Raises JournalError: the audit is not possible now."""
    if not apart:
        return audit_journal(journal, run_id, run)
    request = json.dumps({"url": url, "run_id": run_id, "path": None if run is None else str(run.path)})
    argv = [sys.executable, "-m", __name__]
    try:
        child = subprocess.run(
            argv,
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = (
            f"not finished after {SECONDS_MAX:.0f} s" if isinstance(e, subprocess.TimeoutExpired) else str(e.strerror)
        )
        raise JournalUnavailable(where="the audit", reason=reason, hint="run `rolecall audit RUN`") from None
    if child.returncode != 0:
        reason = f"its process exited with {child.returncode}"
        raise JournalUnavailable(where="the audit", reason=reason, hint="run `rolecall audit RUN` to see why")
    found = pickle.loads(child.stdout)  # written by our own child process
    if isinstance(found, Exception):
        raise found
    if not isinstance(found, RunAudit):
        raise TypeError(f"the audit's process returned {type(found).__name__}")
    return found


def main() -> int:
    """Entry point of the child process."""
    request = json.load(sys.stdin)
    os.nice(NICENESS)
    run = None if request["path"] is None else RunDir(Path(request["path"]))
    result: RunAudit | Exception
    try:
        journal = Journal(request["url"], create=False)
        try:
            result = audit_journal(journal, request["run_id"], run)
        finally:
            journal.close()
    except Exception as e:  # noqa: BLE001 - raised in the parent
        result = e
    sys.stdout.buffer.write(pickle.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
