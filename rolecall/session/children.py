"""Child processes of a session: `rolecall` commands that stop with it."""

import logging
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolecall.core.errors import RolecallError
from rolecall.core.rundir import RUN_ENV, RunDir, write_atomically
from rolecall.core.text import plain

logger = logging.getLogger(__name__)

USER = "demo"
USERS_FILE, TOKEN_FILE = "users.yaml", "dashboard-token"
NICENESS = 10
LOG_BYTES_MAX = 64 * 1024
"""Read from its output while waiting for its address."""
_ADDRESS = re.compile(r"https?://\S+")


def rolecall_command(*args: str) -> list[str]:
    """`rolecall` with `args`, from this installation."""
    return [sys.executable, "-m", "rolecall", *args]


LOGGERS_SECONDS = 60.0
"""How long the end of a run waits for its last metrics to be written."""
LOGGERS_STARTS_MAX = 3


def loggers_command(run: RunDir) -> list[str]:
    """Writes the run's metrics for other tools (section `logging` of the job file)."""
    return [sys.executable, "-m", "rolecall.reports.metric_loggers", str(run.path)]


@dataclass
class Child:
    """A helper process of the run, restarted when it dies if `restarts` allows."""

    argv: list[str]
    log: Path
    run: RunDir
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    complained: bool = False

    def start(self) -> None:
        """Raises OSError: no further process, or no log file, can be made now."""
        env = {**os.environ, RUN_ENV: str(self.run.path)}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )
        self.starts += 1

    def start_again(self) -> None:
        """As soon as that is possible: call it until it has started."""
        try:
            self.start()
        except OSError as e:
            if not self.complained:
                logger.error("%s cannot be started again: %s", " ".join(self.argv[:4]), e)
        self.complained = self.died() is not None

    def died(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def finish(self, seconds: float) -> bool:
        """Waits until it ends by itself, and stops it if it does not. Returns whether it ended by itself."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        ended = self.died() is not None
        self.stop()
        return ended

    def stop(self, seconds: float = 5.0) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(seconds)


class DashboardBeside:
    """The dashboard of a run: a separate process that may fail without affecting the run, and ends with it. `start`,
    then `news` now and then, then `stop`.

    It runs at low priority so that viewing does not slow the run. One user, `demo`, may issue commands; the access
    token is in the run's directory, readable by its owner only.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._child: Child | None = None
        self._reported = False

    def start(self) -> None:
        """Returns at once; `news` reports the result."""
        users_path = self._run.path / USERS_FILE
        try:
            from rolecall.dashboards.users import add

            token = add(users_path, USER)
            write_atomically(self._run.path / TOKEN_FILE, f"{token}\n", private=True)
        except (RolecallError, OSError) as e:
            logger.warning("no dashboard: %s", e)
            return
        argv = rolecall_command("dashboard", str(self._run.path), "--port", "0", "--users", str(users_path))
        nice = shutil.which("nice")
        argv = [nice, "-n", str(NICENESS), *argv] if nice else argv
        self._child = Child(argv, self._run.logs / "dashboard.log", self._run)
        self._child.start()

    def news(self) -> str:
        """One line for the terminal: its address, or why it ended; empty before and afterwards."""
        if self._child is None or self._reported:
            return ""
        try:
            output = self._child.log.read_bytes()[:LOG_BYTES_MAX].decode(errors="replace")
        except OSError:
            output = ""
        found = _ADDRESS.search(output)
        if found is None and self._child.died() is None:
            return ""
        self._reported = True
        if found is None:
            first = next((line for line in output.splitlines() if line.strip()), "it ended at once")
            return f"no dashboard: {plain(first, 200)}"
        return (
            f"dashboard: {found.group()} (to issue commands, sign in with the token in {self._run.path / TOKEN_FILE})"
        )

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
