"""Child processes of a session: `rolecall` commands that stop with it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rolecall.core.rundir import RUN_ENV, RunDir


def rolecall_command(*args: str) -> list[str]:
    """`rolecall` with `args`, from this installation."""
    return [sys.executable, "-m", "rolecall", *args]


@dataclass
class Child:
    """A helper process of the run, restarted when it dies if `restarts` allows."""

    argv: list[str]
    log: Path
    run: RunDir
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        env = {**os.environ, RUN_ENV: str(self.run.path)}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def died(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def stop(self, seconds: float = 5.0) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(seconds)
