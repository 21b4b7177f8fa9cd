"""Evidence that is pulled when something looks wrong: the Python stacks of a registered process, by py-spy.

`--nonblocking`: a process that is stopped can be looked at too, and a healthy one is not stopped for it; the price is
that a stack may be torn while the process runs. Local variables are never read. One dump at a time, within a deadline.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

DUMP_SECONDS_MAX = 10.0
"""Idle machine: 20-70 ms; two cores shared by a whole run: seconds."""
ANSWER_BYTES_MAX = 4 << 20


class EvidenceFailed(Exception):
    """No stacks could be had: why. `busy`: another dump is going on, try again."""

    def __init__(self, reason: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(reason)


def find_py_spy() -> str | None:
    """The py-spy of this Python's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


class Stacks:
    """Dumps stacks, one process at a time."""

    def __init__(self, py_spy: str | None = None) -> None:
        self._py_spy = py_spy or find_py_spy()
        self._busy = threading.Lock()

    def dump(self, pid: int) -> list[dict[str, Any]]:
        """Threads of `pid` as py-spy writes them: `thread_id, thread_name, active, owns_gil, frames[]`.

        Raises:
            EvidenceFailed: no py-spy, no permission, no such process, too slow, or busy.
        """
        if self._py_spy is None:
            raise EvidenceFailed("py-spy is not installed")
        if not self._busy.acquire(blocking=False):
            raise EvidenceFailed("another dump is going on", busy=True)
        try:
            return self._dump([self._py_spy, "dump", "--pid", str(pid), "--nonblocking", "--json"])
        finally:
            self._busy.release()

    def _dump(self, command: list[str]) -> list[dict[str, Any]]:
        environment = {k: os.environ[k] for k in ("PATH", "HOME", "LANG") if k in os.environ}
        try:
            done = subprocess.run(command, capture_output=True, timeout=DUMP_SECONDS_MAX, env=environment, check=False)
        except subprocess.TimeoutExpired:
            raise EvidenceFailed(f"py-spy took longer than {DUMP_SECONDS_MAX:.0f} s") from None
        except OSError as e:
            raise EvidenceFailed(f"py-spy could not be started: {e}") from None
        if done.returncode != 0:
            words = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise EvidenceFailed(f"py-spy: {words[:500] or f'exit code {done.returncode}'}")
        if len(done.stdout) > ANSWER_BYTES_MAX:
            raise EvidenceFailed(f"more than {ANSWER_BYTES_MAX} bytes of stacks")
        try:
            threads = json.loads(done.stdout)
        except ValueError as e:
            raise EvidenceFailed(f"py-spy's answer is not JSON: {e}") from None
        if not isinstance(threads, list):
            raise EvidenceFailed("py-spy's answer is not a list of threads")
        return threads
