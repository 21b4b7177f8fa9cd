"""`rolecall watch agents` without an actuator: real processes, two of which its agent takes for orphans of engines."""

import sys
from pathlib import Path

import pytest

from rolecall.core.ids import process_start_ticks
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted, IncidentClosed, LeaseAcquired, OncallPaged
from rolecall.testing.watched_job import WatchedJob
from tests.agent.collectors.test_orphans import adopted
from tests.support import eventually

K = EventKind
START_TICKS = 19
"""Number of field 22 of /proc/PID/stat among those after the name of the program."""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_an_orphan_is_ended_by_pid_and_start_time(mode: str, tmp_path: Path) -> None:
    """The agent's /proc has an orphan, and an older process that had the PID of another one. There is no rank."""
    proc = tmp_path / "proc"
    for folder in (proc, tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    job = WatchedJob(tmp_path / "job", (), agent_settings=f"proc: {proc}\norphans: {{interval_seconds: 0.25}}\n")
    with adopted(tmp_path / "a") as (init, orphan), adopted(tmp_path / "b") as (other_init, recycled):
        ticks = process_start_ticks(orphan)
        for pid in (init, orphan, other_init):
            (proc / str(pid)).symlink_to(f"/proc/{pid}")
        older = proc / str(recycled)
        older.mkdir()
        (older / "cmdline").symlink_to(f"/proc/{recycled}/cmdline")
        name, parenthesis, rest = Path(f"/proc/{recycled}/stat").read_text().rpartition(")")
        fields = rest.split()
        fields[START_TICKS] = str(int(fields[START_TICKS]) - 1)
        (older / "stat").write_text(f"{name}{parenthesis} {' '.join(fields)}\n")
        try:
            job.start_agent()
            eventually(lambda: job.agent_url, "the agent serves")
            program = f"{sys.executable}, -m, rolecall"
            job.start_watch(f"orphans: {{mode: {mode}, grace_seconds: 0, program: [{program}]}}\n")
            if mode == "act":
                eventually(lambda: len(job.events(K.ACTION_DONE)) == 2, "both were looked for on their node")
                eventually(lambda: job.events(K.INCIDENT_CLOSED), "the agent no longer sees the orphan")
            else:
                eventually(lambda: len(job.events(K.ONCALL_PAGED)) == 2, "on-call is told of both")
            (acquired,) = (e.as_(LeaseAcquired) for e in job.events(K.LEASE_ACQUIRED))
            assert (acquired.mode, acquired.orphans_mode) == ("observe", mode)
            assert state(recycled) in "SR", "another process has the PID by now"
            calls = [e.as_(CallStarted).call for e in job.events(K.CALL_STARTED)]
            if mode == "observe":
                assert calls == [] and state(orphan) in "SR"
                pages = [e.as_(OncallPaged).because for e in job.events(K.ONCALL_PAGED)]
                assert any(f"rolecall node end {orphan} --start-ticks {ticks}" in because for because in pages)
                return
            assert state(orphan) == "Z"
            assert any(call.endswith(f" node end {orphan} --start-ticks {ticks} --orphan") for call in calls)
            assert any(f"{recycled} with start time" in e.as_(CallEnded).text for e in job.events(K.CALL_ENDED))
            (closed,) = job.events(K.INCIDENT_CLOSED)
            assert closed.as_(IncidentClosed).outcome == "resolved"
        finally:
            job.close()
