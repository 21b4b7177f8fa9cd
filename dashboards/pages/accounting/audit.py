"""The audit of a long journal, in a process of its own: it reads every line and holds them all, while here pages are drawn.

    python -m rolecall.dashboards.pages.accounting.audit < {"url", "run_id", "path"} > the audit, pickled

The journal's URL, which may hold a password, goes through the pipe and stands in no argument and no environment.
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
"""From so many lines on: fewer are audited in the second or two that a process needs to start."""
SECONDS_MAX = 1_800.0
"""Some 20 million lines; an audit that takes longer is stuck."""
NICENESS = 10


def audited(journal: Journal, url: str, run_id: str, run: RunDir | None, *, apart: bool) -> RunAudit:
    """Raises JournalError: it cannot be audited now."""
    if not apart:
        return audit_journal(journal, run_id, run)
    asked = json.dumps({"url": url, "run_id": run_id, "path": None if run is None else str(run.path)})
    argv = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            argv,
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = (
            f"no answer within {SECONDS_MAX:.0f} s" if isinstance(e, subprocess.TimeoutExpired) else str(e.strerror)
        )
        raise JournalUnavailable(where="the audit", reason=reason, hint="`rolecall audit RUN` does the same") from None
    if done.returncode != 0:
        reason = f"its process ended with {done.returncode}"
        raise JournalUnavailable(
            where="the audit", reason=reason, hint="`rolecall audit RUN` does the same, and says why"
        )
    found = pickle.loads(done.stdout)  # what our own child wrote into our pipe
    if isinstance(found, Exception):
        raise found
    if not isinstance(found, RunAudit):
        raise TypeError(f"the audit's process answered with {type(found).__name__}")
    return found


def main() -> int:
    """In the child."""
    asked = json.load(sys.stdin)
    os.nice(NICENESS)
    run = None if asked["path"] is None else RunDir(Path(asked["path"]))
    result: RunAudit | Exception
    try:
        journal = Journal(asked["url"], create=False)
        try:
            result = audit_journal(journal, asked["run_id"], run)
        finally:
            journal.close()
    except Exception as e:  # noqa: BLE001 - raised where it was asked for
        result = e
    sys.stdout.buffer.write(pickle.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
