"""A small job that rolecall did not start, with an agent and a watch beside it: real processes, restarted by a shell.

Each replica is one process that counts steps; a loop of the shell starts it again when it ends, as launchers of
rollouts do.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from rolecall.core.errors import JournalError
from rolecall.core.ids import role_of
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir

T = TypeVar("T")
STEPS = """
import signal, threading, time
from rolecall import reporter
lock = threading.Lock()
lock.acquire()
stuck = []
signal.signal(signal.SIGUSR1, lambda *_: stuck.append(True))
reporter.start()
for n in range(10**9):
    with reporter.step(n):
        time.sleep(0.02)
        if stuck:
            lock.acquire()
"""
"""A worker; SIGUSR1 makes it wait at a lock for ever."""
AGAIN = 'while :; do "$0" -c "$1"; done'
END_SECONDS = 30.0


class WatchedJob:
    """`folder`: everything that it writes. `code`: of each replica. `environment`: beside that of this process.
    `agent_settings`: further lines of the agent's file."""

    def __init__(
        self,
        folder: Path,
        replicas: tuple[str, ...],
        code: str = STEPS,
        environment: Mapping[str, str] | None = None,
        agent_settings: str = "",
    ) -> None:
        self.folder, self.replicas, self._code = folder, replicas, code
        self._agent_settings = agent_settings
        self.data_dir = folder / "agent"
        self.data_dir.mkdir(parents=True)
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, **(environment or {}), "ROLECALL_AGENT_DIR": str(self.data_dir)}

    def start_agent(self) -> None:
        """It sees only what registers: other jobs of this machine are not part of this one."""
        config = self.folder / "agent.yaml"
        config.write_text(f"jobs: {{enabled: false}}\n{self._agent_settings}")
        options = ["--config", str(config), "--node", "node-1", "--data-dir", str(self.data_dir), "--port", "0"]
        self.start([sys.executable, "-m", "rolecall.agent", *options])

    @property
    def agent_url(self) -> str:
        """Empty: it does not serve yet."""
        try:
            return str(json.loads((self.data_dir / "agent.json").read_text())["url"])
        except (OSError, ValueError, KeyError):
            return ""

    def start_replicas(self) -> None:
        for replica in self.replicas:
            argv = ["/bin/sh", "-c", AGAIN, sys.executable, self._code]
            role = role_of(replica)
            self.start(argv, ROLECALL_REPLICA=replica, ROLECALL_ROLE=role, ROLECALL_RANK="0")

    def start_watch(self, config: str) -> None:
        path = self.folder / "watch.yaml"
        path.write_text(config)
        runs = str(self.folder / "runs")
        argv = ["watch", "agents", self.agent_url, "--id", "job", "--runs", runs, "--config", str(path), "--json"]
        self.start([sys.executable, "-m", "rolecall", *argv])

    def start(self, argv: list[str], **environ: str) -> None:
        log = (self.folder / "log").open("ab")
        with log:
            self._started.append(
                subprocess.Popen(
                    argv, env={**self._environment, **environ}, stdout=log, stderr=log, start_new_session=True
                )
            )

    def exit_code(self, number: int) -> int | None:
        """Of the process that was started as this one, from 0; None: it runs."""
        return self._started[number].poll()

    def close(self) -> None:
        for process in reversed(self._started):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_SECONDS)

    # --- what the watch has written -----------------------------------------------------------------------------------

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / "job")

    def read(self, ask: Callable[[Journal], T], otherwise: T) -> T:
        try:
            with closing(Journal(self.run.database_url, create=False)) as journal:
                return ask(journal)
        except JournalError:  # the watch has not created it
            return otherwise

    def events(self, kind: EventKind) -> list[Event]:
        return self.read(lambda journal: journal.events(kinds=[kind]), [])

    def pids(self) -> dict[str, tuple[int, int]]:
        """replica -> (incarnation, PID), as the journal has it."""
        return self.read(lambda j: {str(a.replica): (a.incarnation, a.pid) for a in j.current().values()}, {})

    @property
    def has_learned(self) -> bool:
        """Whether the detectors have been at work long enough to write what they learned."""
        return (self.run.path / "detector.json").exists()
