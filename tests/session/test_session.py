"""A run's loop on a clock that we turn, without Ray: how long it is held (whole runs: tests/e2e)."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.errors import ActuatorError, CommandRefused, JournalUnavailable
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import ComponentRestarted, RunEnded
from rolecall.core.journal.run_end import DONE_FLAG
from rolecall.core.rundir import RunDir
from rolecall.recovery.loop import LEASE_NAME
from rolecall.rl_runtime.cluster.supervisor import JOURNAL_WAIT_SECONDS, Supervisor
from rolecall.session.children import Child
from rolecall.session.demo import FaultSchedule, demo_job
from rolecall.session.session import (
    HOLD_FLAG,
    LATE_CHECKS_MAX,
    LEASE_CHECK_SECONDS,
    TICK_SECONDS,
    WATCH_START_SECONDS,
    WATCH_STUCK_SECONDS,
    Interrupted,
    Session,
    _alone,
)
from rolecall.terminal.run import Screen
from tests.events import filled
from tests.full_disk import small_disk
from tests.support import PATIENCE_SECONDS, eventually

HOLD_SECONDS = 42.0


def _session(root: Path, run_id: str, clock: FakeClock, **more: Any) -> Session:
    job = more.pop("job", None) or demo_job(seed=1, num_steps=1, injection_allowed=False)
    given: dict[str, Any] = {"schedule": FaultSchedule(1, ()), "show": False, "minutes_max": 10, **more}
    return Session(job=job, root=root, run_id=run_id, clock=clock, **given)


class Finishes(Supervisor):
    """Its controller has no steps to do: it is done once nothing holds it."""

    def __init__(self, journal: Journal) -> None:
        self._to_finish = journal

    def tick(self) -> None:
        if self._to_finish.flag(HOLD_FLAG) is None:
            self._to_finish.set_flag(DONE_FLAG, json.dumps({"outcome": "completed", "because": "nothing to do"}))


def test_a_run_without_faults_to_come_is_held_for_as_long_as_was_asked(tmp_path: Path) -> None:
    clock, job = FakeClock(), demo_job(seed=1, num_steps=1, injection_allowed=False)
    session = _session(tmp_path, "held", clock, job=job, hold_seconds=HOLD_SECONDS)
    run, journal = session._create()
    journal.set_flag(HOLD_FLAG, "minutes remain")
    began = clock.monotonic()
    watch, screen = Child([], run.logs / "watch.log", run), Screen(live=False, title="")
    assert session._loop(run, journal, Finishes(journal), watch, screen) == ("completed", "nothing to do")
    journal.close()
    assert HOLD_SECONDS <= clock.monotonic() - began <= HOLD_SECONDS + 2 * TICK_SECONDS


class WithoutJournal(Finishes):
    """Finds the journal unavailable for its first `seconds`."""

    def __init__(self, journal: Journal, clock: FakeClock, seconds: float) -> None:
        super().__init__(journal)
        self._clock, self._until = clock, clock.monotonic() + seconds

    def tick(self) -> None:
        if self._clock.monotonic() < self._until:
            raise JournalUnavailable(where="journal.db", reason="database or disk is full", hint="free space")
        super().tick()


@pytest.mark.parametrize("seconds", [0.9 * JOURNAL_WAIT_SECONDS, 1.1 * JOURNAL_WAIT_SECONDS])
def test_a_run_waits_for_its_journal_for_a_limited_time(tmp_path: Path, seconds: float) -> None:
    clock, job = FakeClock(), demo_job(seed=1, num_steps=1, injection_allowed=False)
    session = _session(tmp_path, "r", clock, job=job)
    run, journal = session._create()
    journal.set_flag(HOLD_FLAG, "minutes remain")
    watch, screen = Child([], run.logs / "watch.log", run), Screen(live=False, title="")
    supervisor = WithoutJournal(journal, clock, seconds)
    began = clock.monotonic()
    if seconds < JOURNAL_WAIT_SECONDS:
        assert session._loop(run, journal, supervisor, watch, screen) == ("completed", "nothing to do")
    else:
        with pytest.raises(JournalUnavailable, match="disk is full"):
            session._loop(run, journal, supervisor, watch, screen)
        assert clock.monotonic() - began <= JOURNAL_WAIT_SECONDS + 2.0
    journal.close()


def test_minutes_of_the_command_line_are_seconds_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def execute(session: Session) -> NoReturn:
        asked.append(session.hold_seconds)
        raise Interrupted

    monkeypatch.setattr(Session, "execute", execute)
    assert main(["demo", "--faults", "none", "--hold-minutes", "1.5", "--runs", str(tmp_path)]) == 130
    assert asked == [90.0]


def test_a_demo_that_would_be_stopped_before_it_may_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--hold-minutes", "10"]) == 2
    assert "--hold-minutes: must be less than --minutes-max (10), got 10" in capsys.readouterr().err


@pytest.mark.parametrize("set_by_seconds", [0.0, -3600.0, 3600.0], ids=["not set", "back", "forward"])
def test_a_watch_that_is_stopped_is_ended_and_another_one_started(tmp_path: Path, set_by_seconds: float) -> None:
    clock = FakeClock()
    session = _session(tmp_path, "stuck", clock)
    run, made = session._create()
    made.close()
    journal = Journal(run.database_url, clock=clock)
    watch = Child([sys.executable, "-c", "import signal; signal.pause()"], run.logs / "watch.log", run)
    watch.start()
    first = watch.process
    assert first is not None
    try:
        assert journal.acquire(LEASE_NAME, f"some:host:{first.pid}:77", 5.0) is not None
        first.send_signal(signal.SIGSTOP)
        session._keep_watch(watch, journal)
        clock.set_wall(set_by_seconds)
        for _ in range(30):  # late, and not late enough
            clock.advance(1.0)
            session._keep_watch(watch, journal)
        clock.advance(3600.0)  # the machine slept: the watch has not had its turn yet
        session._keep_watch(watch, journal)
        assert session._late_checks > 1, "it would begin at 0 again, had the watch been ended"
        for _ in range(10):
            clock.advance(1.0)
            session._keep_watch(watch, journal)
        eventually(lambda: first.poll() is not None, "the stuck one ends")
        session._keep_watch(watch, journal)
        assert watch.starts == 2 and watch.died() is None
        (restarted,) = journal.events(kinds=[EventKind.COMPONENT_RESTARTED])
        assert restarted.payload.what == "watch"
        for _ in range(int(WATCH_STUCK_SECONDS) + 10):
            clock.advance(1.0)
            session._keep_watch(watch, journal)
        second = watch.process
        assert second is not None and second.poll() is None, "it may still be starting: it has had no lease yet"
        for _ in range(int(WATCH_START_SECONDS)):
            clock.advance(1.0)
            session._keep_watch(watch, journal)
        eventually(lambda: second.poll() is not None, "one that hangs before its first lease ends too")
        session._keep_watch(watch, journal)
        lapsed = journal.lease(LEASE_NAME)
        for _ in range(2 * int(WATCH_START_SECONDS)):
            clock.advance(1.0)
            assert journal.acquire(LEASE_NAME, "other:host:1:1", 5.0, lapsed=lapsed) is not None
            session._keep_watch(watch, journal)
        assert watch.starts == 3 and watch.died() is None, "another watch leads: this one waits"
    finally:
        first.kill()
        first.wait(10)
        watch.stop()
        journal.close()


def test_a_watch_that_cannot_be_started_again_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _session(tmp_path, "no-process", FakeClock())
    run, journal = session._create()
    watch = Child([sys.executable, "-c", "import signal; signal.pause()"], run.logs / "watch.log", run)
    watch.start()
    first = watch.process
    assert first is not None
    try:
        first.kill()
        eventually(lambda: first.poll() is not None, "the watch ends")
        with monkeypatch.context() as patched:
            patched.setattr("subprocess.Popen", Mock(side_effect=BlockingIOError("no further process")))
            session._keep_watch(watch, journal)
            session._keep_watch(watch, journal)
        assert (watch.starts, watch.process) == (1, first)
        session._keep_watch(watch, journal)
        assert watch.starts == 2 and watch.died() is None
        assert len(journal.events(kinds=[EventKind.COMPONENT_RESTARTED])) == 1
    finally:
        watch.stop()
        journal.close()


def test_a_watch_whose_lease_runs_out_because_the_journals_disk_is_full_is_not_ended(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        clock, job = FakeClock(), demo_job(seed=1, num_steps=1, injection_allowed=False)
        session = _session(disk.path, "full", clock, job=job)
        run, made = session._create()
        made.close()
        journal = Journal(run.database_url, clock=clock)
        watch = Child([sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "watch.log", run)
        watch.start()
        assert watch.process is not None
        try:
            assert journal.acquire(LEASE_NAME, f"some:host:{watch.process.pid}:77", 5.0) is not None
            session._keep_watch(watch, journal)
            disk.fill()
            clock.advance(6.0)
            for _ in range(2 * LATE_CHECKS_MAX):
                clock.advance(LEASE_CHECK_SECONDS)
                with pytest.raises(JournalUnavailable):
                    session._keep_watch(watch, journal)
            disk.free()
            clock.advance(LEASE_CHECK_SECONDS)
            session._keep_watch(watch, journal)
            assert watch.died() is None and session._late_checks == 1
        finally:
            watch.stop()
            journal.close()


@pytest.mark.parametrize(
    ("code", "seconds", "told"), [("pass", 30.0, []), ("import time; time.sleep(60)", 0.2, ["not all"])]
)
def test_metrics_that_are_not_written_in_time_are_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, told: list[str]
) -> None:
    monkeypatch.setattr("rolecall.session.session.LOGGERS_SECONDS", seconds)
    job = demo_job(seed=1, num_steps=1, injection_allowed=False)
    session = Session(job=job, root=tmp_path, run_id="slow", schedule=FaultSchedule(1, ()), show=False, minutes_max=1)
    run, journal = session._create()
    journal.close()
    session.loggers = Child([sys.executable, "-c", code], run.logs / "loggers.log", run)
    session.loggers.start()
    screen = Screen(live=False, title="")
    lines: list[str] = []
    monkeypatch.setattr(screen, "add_line", lines.append)
    session._finish_loggers(screen)
    assert session.loggers.died() is not None
    assert [line.removeprefix("metrics: ")[:7] for line in lines] == told


def test_only_a_run_that_was_not_done_can_continue(tmp_path: Path) -> None:
    job = demo_job(seed=1, num_steps=1, injection_allowed=False)

    def session(*, again: bool) -> Session:
        schedule = FaultSchedule(1, ())
        return Session(job=job, root=tmp_path, run_id="cut", schedule=schedule, show=False, minutes_max=1, again=again)

    run, journal = session(again=False)._create()
    run.write({"run_id": "cut"})
    journal.append(filled(EventKind.STEP_COMMITTED, {"step": 3}))
    journal.close()
    reopened, journal = session(again=True)._reopen()
    assert reopened.path == run.path and journal.last(EventKind.STEP_COMMITTED) is not None
    left = Child([sys.executable, "-c", "import signal; signal.pause()"], run.logs / "left.log", run)
    left.start()
    with pytest.raises(CommandRefused, match="1 process of it left"):
        session(again=True)._reopen()
    left.stop()
    for outcome in ("interrupted", "failed"):  # by a signal, or by --minutes-max or a journal that was away
        journal.append(filled(EventKind.RUN_ENDED, {"outcome": outcome, "because": "not done"}))
        session(again=True)._reopen()[1].close()
    journal.append(ComponentRestarted(what="supervisor", node="", because="started again"))
    journal.set_flag(DONE_FLAG, json.dumps({"outcome": "completed", "because": "12 steps"}))
    with pytest.raises(CommandRefused, match=r"cut has ended \(12 steps\).*its end was not recorded, and is now"):
        session(again=True)._reopen()
    with pytest.raises(CommandRefused, match=r"cut has ended \(12 steps\): only a run .* can continue$"):
        session(again=True)._reopen()
    last = journal.last(EventKind.RUN_ENDED)
    assert last is not None and last.as_(RunEnded) == RunEnded(outcome="completed", because="12 steps")
    journal.close()


def test_an_end_that_was_cut_off_is_recorded_by_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, journal = _session(tmp_path, "cut", FakeClock())._create()
    run.write({"run_id": "cut"})
    journal.set_flag(DONE_FLAG, json.dumps({"outcome": "completed", "because": "12 steps"}))
    for recorded in (True, False):
        assert main(["down", str(run.path)]) == 0
        assert ("is now: completed, 12 steps" in capsys.readouterr().out) is recorded
    assert len(journal.events(kinds=[EventKind.RUN_ENDED])) == 1
    journal.close()


def test_a_run_has_one_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.session.session.Supervisor", NotToStart)
    run, journal = _session(tmp_path, "one", FakeClock())._create()
    run.write({"run_id": "one"})
    again = _session(tmp_path, "one", FakeClock(), again=True)
    with _alone(run), pytest.raises(CommandRefused, match=rf"one is supervised by process {os.getpid()} on "):
        again.execute()
    assert not journal.head().position, "the one that was refused changed something"
    with pytest.raises(ActuatorError, match="no start"):
        again.execute()
    journal.close()


@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_hangup_of_the_terminal_ends_a_run_in_order(under_nohup: bool) -> None:
    code = (
        "import os, signal\n"
        "from rolecall.session.session import Interrupted, _interrupt, _signals_to\n"
        f"signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if under_nohup else 'DFL'})\n"
        "try:\n"
        "    with _signals_to(_interrupt):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        print('goes on')\n"
        "except Interrupted:\n"
        "    print('interrupted')\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=PATIENCE_SECONDS)
    assert said.strip() == ("goes on" if under_nohup else "interrupted")


class NotToStart(Supervisor):
    """Its start fails."""

    def start(self, progress: Any = None, *, again: bool = False) -> None:
        if again:
            self._continue_run()
        raise ActuatorError("no start")


def test_each_end_of_a_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.session.session.Supervisor", NotToStart)
    for again in (False, True, True):
        with pytest.raises(ActuatorError, match="no start"):
            _session(tmp_path, "ends", FakeClock(), again=again).execute()
        if not again:
            RunDir(tmp_path / "ends").write({"run_id": "ends"})
    with closing(Journal(RunDir(tmp_path / "ends").database_url)) as journal:
        assert [e.kind for e in journal.events() if e.kind is not EventKind.REPLICA_STARTING] == [
            EventKind.RUN_ENDED,
            *(EventKind.COMPONENT_RESTARTED, EventKind.RUN_ENDED) * 2,
        ]
