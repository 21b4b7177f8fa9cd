"""One run from start to report: supervisor, watch, and (for a demo) the injector and the live display.

The supervisor ticks in this process; `rolecall watch` and every `rolecall inject` are child processes. However the run
ends (done, unresolved fault, Ctrl-C, error), everything started is stopped before this returns.
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import CommandRefused, ConfigError, RolecallError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import OncallPaged
from rolecall.core.journal.payloads.run import ComponentRestarted, RunEnded, StepCommitted
from rolecall.core.journal.run_end import DONE_FLAG, record_missed_end
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.rundir import RunDir, create_run_dir, open_run_dir
from rolecall.core.text import counted
from rolecall.recovery.incidents import NO_CHANNEL
from rolecall.recovery.loop import LEASE_NAME, holder_pid
from rolecall.recovery.notifications.target import target_of
from rolecall.reports.report import write_report
from rolecall.rl_runtime.cluster.gpus import gpus_of_nodes
from rolecall.rl_runtime.cluster.ray_commands import check_ray
from rolecall.rl_runtime.cluster.reconcile import place
from rolecall.rl_runtime.cluster.supervisor import Supervisor, through_outages
from rolecall.rl_runtime.device import found_hardware
from rolecall.rl_runtime.processes import find_processes
from rolecall.rl_runtime.tasks.check import checked
from rolecall.session.children import (
    LOGGERS_SECONDS,
    LOGGERS_STARTS_MAX,
    Child,
    DashboardBeside,
    loggers_command,
    rolecall_command,
)
from rolecall.session.demo import DemoStage, FaultSchedule, ScheduledFault, View
from rolecall.terminal.run import Screen
from rolecall.watch.addresses import withdraw

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
VIEW_SECONDS = 0.3
"""Interval of the fault schedule."""
DRAW_SECONDS = 0.5
LINE_SECONDS = 3.0
"""Interval of progress lines without a terminal."""
WATCH_STUCK_SECONDS = 30.0
"""A watch whose lease has been over for this long is stopped or stuck: it is killed and restarted."""
WATCH_START_SECONDS = 120.0
"""The same for one that has had no lease since its start, which takes longer on a busy machine."""
LEASE_CHECK_SECONDS = 2.0
LATE_CHECKS_MAX = int(WATCH_STUCK_SECONDS / LEASE_CHECK_SECONDS)
START_CHECKS_MAX = int(WATCH_START_SECONDS / LEASE_CHECK_SECONDS)
"""In checks, not by the clock: after an unavailable database or a suspended machine the watch is not at fault."""
WATCH_RESTARTS_MAX = 20
"""Restarts of `watch`, as by a service manager; more indicate a defect."""
HOLD_FLAG = "hold"
LOCK_FILE = "supervisor.lock"
TRIED_FLAG = "writable_at"
"""Written to try whether the journal takes writes."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM, or SIGHUP: its terminal is gone. Not an Exception, so that no broad `except` swallows it."""


@dataclass
class Session:
    job: JobConfig
    root: Path
    run_id: str
    schedule: FaultSchedule
    show: bool
    minutes_max: float
    hold_seconds: float = 0.0
    dashboard: bool = False
    again: bool = False  # continue a run that was interrupted or cut off
    clock: Clock = field(default_factory=SystemClock)
    injectors: list[Child] = field(default_factory=list)
    loggers: Child | None = None
    injected: int = 0  # faults that the schedule asked for
    _lease_checked_at: float = float("-inf")
    _lease: Lease | None = None  # as last read
    _renewed_at: float = 0.0  # when it was first read so, or the newest watch was seen to start, monotonic seconds
    _starts: int = 0  # of the watch, as last seen
    _late_checks: int = 0  # in a row

    def execute(self) -> dict[str, Any]:
        """Runs the job and returns its report.

        Raises:
            ConfigError, NotEnoughNodes: before anything is started.
            CommandRefused, RunNotFound: the run to continue is done, still runs, or is not there.
            Interrupted: Ctrl-C; everything has been stopped.
        """
        check_ray()  # these five raise before a directory exists
        place(self.job)
        gpus_of_nodes(self.job, found_hardware())
        target_of(self.job.recovery, os.environ)
        self.job = checked(self.job)
        if self.again:
            with _alone(open_run_dir(self.root, self.run_id)):
                return self._run(*self._reopen())
        run, journal = self._create()
        with _alone(run):
            return self._run(run, journal)

    def _run(self, run: RunDir, journal: Journal) -> dict[str, Any]:
        screen = Screen(
            live=self.show,
            title=f"{self.job.name} · {self.job.learns} · run {run.run_id} · seed {self.job.seed}",
            num_steps=self.job.num_steps,
            shell_name=run.shell_name,
        )
        supervisor = Supervisor(run, self.job, self.clock)
        watch = Child(rolecall_command("watch", "run", str(run.path)), run.logs / "watch.log", run)
        beside = DashboardBeside(run) if self.dashboard else None
        if self.job.logging.names:
            self.loggers = Child(loggers_command(run), run.logs / "loggers.log", run)
        outcome, because = "failed", "ended before it was done"
        with _signals_to(_interrupt):
            try:
                with screen:
                    journal.set_flag(HOLD_FLAG, "faults or minutes remain")
                    if beside is not None:
                        beside.start()
                    supervisor.start(screen.note, again=self.again)
                    watch.start()
                    if self.loggers is not None:
                        self.loggers.start()
                    outcome, because = self._loop(run, journal, supervisor, watch, screen, beside)
            except Interrupted:
                outcome, because = "interrupted", "Ctrl-C, SIGTERM or SIGHUP"
                raise
            except Exception as e:
                because = f"{type(e).__name__}: {e}"
                raise
            finally:
                # The shutdown completes, and each callback runs, whatever the previous one raised.
                with _signals_to(signal.SIG_IGN), ExitStack() as last:
                    last.callback(journal.close)
                    last.callback(withdraw, run)
                    if self.loggers is not None:
                        last.callback(self._finish_loggers, screen)
                    ended = RunEnded(outcome=outcome, because=because, faults_wanted=self.injected)
                    last.callback(journal.append, ended)
                    last.callback(supervisor.stop, because)
                    for child in [watch, *self.injectors]:
                        last.callback(child.stop)
                    if beside is not None:
                        last.callback(beside.stop)
        return write_report(run, None)

    def _create(self) -> tuple[RunDir, Journal]:
        """Creates the run's directory and journal: both, or neither."""
        run = create_run_dir(self.root, self.run_id, self.job.journal)
        try:
            journal = Journal(run.database_url)
            if journal.head().position:
                journal.close()
                raise ConfigError([f"journal: {journal.store.where} holds the journal of another run {run.run_id!r}"])
        except (RolecallError, OSError):
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return run, journal

    def _reopen(self) -> tuple[RunDir, Journal]:
        """The directory and journal of a run that was interrupted or cut off: its controller was not done, and no
        process is left."""
        run = open_run_dir(self.root, self.run_id)
        if left := find_processes(run.path, exclude=(os.getpid(),)):
            many = counted(len(left), "process", "processes")
            raise CommandRefused(f"{run.run_id}: {many} of it left: `rolecall down {run.shell_name}` first")
        journal = Journal(run.database_url, create=False)
        if (done := journal.flag(DONE_FLAG)) is not None:
            also = "; its end was not recorded, and is now" if record_missed_end(journal) is not None else ""
            journal.close()
            because = json.loads(done)["because"]
            raise CommandRefused(
                f"{run.run_id} has ended ({because}): only a run that was interrupted or cut off can continue{also}"
            )
        return run, journal

    def _loop(
        self,
        run: RunDir,
        journal: Journal,
        supervisor: Supervisor,
        watch: Child,
        screen: Screen,
        beside: DashboardBeside | None = None,
    ) -> tuple[str, str]:
        """Runs until the controller reports done: (outcome, because)."""
        started_at = self.clock.monotonic()
        drawn_at = viewed_at = 0.0
        holds = True

        def turn() -> str | None:
            nonlocal viewed_at, holds
            now = self.clock.monotonic()
            supervisor.tick()
            self._keep_watch(watch, journal)
            self._keep_loggers(screen)
            if self.schedule.stage is not DemoStage.DONE and now - viewed_at >= VIEW_SECONDS:
                viewed_at = now
                fault = self.schedule.tick(self._view(run, journal, now))
                if fault is not None:
                    self._inject(run, fault)
            if holds and self.schedule.stage is DemoStage.DONE and now - started_at >= self.hold_seconds:
                journal.set_flag(HOLD_FLAG, None)
                holds = False
            return journal.flag(DONE_FLAG)

        while True:
            now = self.clock.monotonic()
            done = through_outages(turn, self.clock, screen.note)
            if beside is not None and (news := beside.news()):
                screen.add_line(news)
            if done is not None or now - drawn_at >= (DRAW_SECONDS if self.show else LINE_SECONDS):
                screen.draw(journal, now, last=done is not None)
                drawn_at = now
            if done is not None:
                value = json.loads(done)
                return str(value["outcome"]), str(value["because"])
            if now - started_at > self.minutes_max * 60:
                return "failed", f"not done within {self.minutes_max:.0f} minutes"
            self.clock.sleep(max(0.0, TICK_SECONDS - (self.clock.monotonic() - now)))

    def _keep_watch(self, watch: Child, journal: Journal) -> None:
        code = watch.died()
        if code is None:
            self._kill_stuck(watch, journal)
            return
        if watch.starts > WATCH_RESTARTS_MAX:
            because = (
                f"watch exited {watch.starts} times, last with code {code}, and is not restarted: this run has "
                f"no recovery leader"
            )
            journal.append(OncallPaged(topic="watch", because=because, channel=NO_CHANNEL), key="watch-gave-up")
            return
        pid = watch.process.pid if watch.process is not None else 0
        because = f"exited with code {code}"
        journal.append(ComponentRestarted(what="watch", node="", because=because), key=f"watch-ended:{pid}")
        watch.start_again()

    def _keep_loggers(self, screen: Screen) -> None:
        """Starts the process that writes metrics again, where it stopped; it ends by itself with code 0."""
        loggers = self.loggers
        if loggers is None or not loggers.died() or loggers.starts >= LOGGERS_STARTS_MAX:
            return
        if loggers.starts == 1 and not loggers.complained:
            screen.add_line(f"metrics are not written: {loggers.log} has the reason; trying again")
        loggers.start_again()

    def _finish_loggers(self, screen: Screen) -> None:
        if self.loggers is not None and not self.loggers.finish(LOGGERS_SECONDS):
            command = " ".join(["python", *loggers_command(self.loggers.run)[1:]])
            screen.add_line(f"metrics: not all were written within {LOGGERS_SECONDS:g} s; `{command}` writes the rest")

    def _kill_stuck(self, watch: Child, journal: Journal) -> None:
        """Kills a watch that does not renew its lease, or does not take one that is over; `_keep_watch` restarts it."""
        now = self.clock.monotonic()
        if watch.process is None or now < self._lease_checked_at + LEASE_CHECK_SECONDS:
            return
        self._lease_checked_at = now
        lease = journal.lease(LEASE_NAME)
        if lease != self._lease or watch.starts != self._starts:
            self._lease, self._starts, self._renewed_at = lease, watch.starts, now
        own = lease is not None and holder_pid(lease.holder) == watch.process.pid
        late_seconds = now - self._renewed_at - self.job.recovery.lease_seconds
        if late_seconds > 0:
            # A journal on a full disk can be read and not written: then the watch is not at fault, and this raises.
            journal.set_flag(TRIED_FLAG, str(self.clock.wall()))
        self._late_checks = self._late_checks + 1 if late_seconds > 0 else 0
        if self._late_checks > (LATE_CHECKS_MAX if own else START_CHECKS_MAX):
            logger.warning("watch has not renewed its lease for %.0f s: killing it", late_seconds)
            watch.process.kill()
            self._late_checks = 0

    def _inject(self, run: RunDir, fault: ScheduledFault) -> None:
        argv = rolecall_command("inject", str(run.path), "--kind", fault.kind, "--seed", str(fault.seed))
        if fault.how:
            argv += ["--how", fault.how]
        child = Child(argv, run.logs / "inject.log", run)
        child.start()
        self.injectors.append(child)
        self.injected += 1

    def _view(self, run: RunDir, journal: Journal, now: float) -> View:
        current, desired = journal.current(), journal.desired()
        serving = {
            r
            for r, record in current.items()
            if record.state is ReplicaState.SERVING and r in desired and record.incarnation == desired[r].incarnation
        }
        running = [r for r, record in desired.items() if not record.lent]
        wanted = {r for r in running if not is_standby(r)}
        standbys = [r for r in running if is_standby(r)]
        opened = journal.events(kinds=[EventKind.INCIDENT_OPENED])
        closed = journal.events(kinds=[EventKind.INCIDENT_CLOSED])
        restarted = journal.events(kinds=[EventKind.COMPONENT_RESTARTED])
        step = journal.last(EventKind.STEP_COMMITTED)
        injections = read_injections(run)
        return View(
            now=now,
            step=step.as_(StepCommitted).step if step else -1,
            whole=serving >= wanted and len(opened) == len(closed),
            standbys_ready=all(s in current and current[s].state is ReplicaState.READY for s in standbys),
            injected=len(injections),
            injecting=any(injector.died() is None for injector in self.injectors),
            incident_closed_at=closed[-1].wall_at if closed else 0.0,
            injected_at=float(injections[-1]["injected_at"]) if injections else 0.0,
            restarted_at=restarted[-1].wall_at if restarted else 0.0,
        )


def read_injections(run: RunDir) -> list[dict[str, Any]]:
    """Lines of the injector's log, oldest first, without an incomplete last line."""
    try:
        text = run.injections_path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the shutdown
    raise Interrupted


@contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """Excludes a second supervisor of the run on this host; the kernel releases the lock of one that is killed.

    Raises:
        CommandRefused: another one supervises it.
    """
    with (run.path / LOCK_FILE).open("a+", encoding="utf-8") as file:  # not inherited by child processes
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            stop = f"`rolecall down {run.shell_name}` first"
            raise CommandRefused(f"{run.run_id} is supervised by process {file.read().strip()}: {stop}") from None
        except OSError as e:  # a network file system without locks: a run must not fail for it
            logger.warning("%s cannot be locked against a second supervisor: %s", file.name, e)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Within: `SIGNALS` go to `handler`, but for a SIGHUP that is ignored, as by `nohup`."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, handler) for number in SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
