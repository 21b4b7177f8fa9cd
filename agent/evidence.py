"""Evidence on demand: Python stacks and the Flight Recorder of a registered process.

Stacks come from py-spy, with those of the engine processes below the process (agent/collectors/process/engines.py). The
Flight Recorder dump comes from the process itself (agent/reporter/flight_recorder_request.py).

py-spy runs with `--nonblocking`: it works on stopped processes and does not pause healthy ones; the price is that the
stack of a running process may be inconsistent. Local variables are never read. One dump at a time, within a deadline.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from rolecall.agent.collectors.process.engines import engine_processes
from rolecall.agent.data_dir import open_owned, remove
from rolecall.agent.file_owners import owners_of_files
from rolecall.agent.reporter.flight_recorder_request import (
    DUMP_BYTES_MAX,
    REASON_CHARS_MAX,
    answer_paths,
    request_path,
)
from rolecall.agent.reporter.page_layout import page_name
from rolecall.core.clock import Clock

DUMP_SECONDS_MAX = 10.0
"""Of a process and its engines: 20-70 ms each on an idle machine; seconds when a whole run shares two cores."""
ANSWER_BYTES_MAX = 4 << 20
ENGINES_BYTES_MAX = 4 << 20
"""Of all engine processes of one process: 0.3 MB each."""
FLIGHT_SECONDS_MAX = 10.0
"""The process polls for requests every 0.2 s and writes a dump within milliseconds; a busy one takes longer."""
FLIGHT_POLL_SECONDS = 0.05


class EvidenceUnavailable(Exception):
    """No evidence; the text says why. `busy`: another dump is in progress, retry."""

    def __init__(self, reason: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(reason)


@contextlib.contextmanager
def _only_one(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise EvidenceUnavailable("another dump is in progress", busy=True)
    try:
        yield
    finally:
        lock.release()


def find_py_spy() -> str | None:
    """The py-spy of this Python's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


class Stacks:
    """Dumps stacks, one process at a time."""

    def __init__(self, clock: Clock, proc: Path = Path("/proc")) -> None:
        self._clock, self._proc = clock, proc
        self._py_spy = find_py_spy()
        self._busy = threading.Lock()

    def dump(self, pid: int) -> dict[str, Any]:
        """`threads` of `pid` in py-spy's format: `thread_id, thread_name, active, owns_gil, frames[]`, and the same of
        its `engines`: `pid, parent, title, is_stopped, threads`, or `missing`, why there are none.

        Raises:
            EvidenceUnavailable: no py-spy, no permission, no such process, too slow, or busy.
        """
        with _only_one(self._busy):
            until = self._clock.monotonic() + DUMP_SECONDS_MAX
            threads = self._threads(pid, DUMP_SECONDS_MAX)
            return {"threads": threads, "engines": list(self._engines(pid, until))}

    def _engines(self, pid: int, until: float) -> Iterator[dict[str, Any]]:
        room = ENGINES_BYTES_MAX
        for engine in engine_processes(pid, self._proc):
            about = asdict(engine)
            try:
                threads = self._threads(engine.pid, until - self._clock.monotonic())
                room -= len(json.dumps(threads))
                if room < 0:
                    raise EvidenceUnavailable(f"more than {ENGINES_BYTES_MAX} bytes of stacks of engines")
            except EvidenceUnavailable as e:
                yield {**about, "threads": [], "missing": str(e)}
            else:
                yield {**about, "threads": threads}

    def _threads(self, pid: int, seconds: float) -> list[dict[str, Any]]:
        """Raises EvidenceUnavailable."""
        if seconds <= 0:
            raise EvidenceUnavailable("no time was left")
        if self._py_spy is None:
            raise EvidenceUnavailable("py-spy is not installed")
        command = [self._py_spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]
        environment = {k: os.environ[k] for k in ("PATH", "HOME", "LANG") if k in os.environ}
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, check=False)
        except subprocess.TimeoutExpired:
            raise EvidenceUnavailable(f"py-spy took longer than {seconds:.0f} s") from None
        except OSError as e:
            raise EvidenceUnavailable(f"py-spy could not be started: {e}") from None
        if done.returncode != 0:
            reason = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise EvidenceUnavailable(f"py-spy: {reason[:500] or f'exit code {done.returncode}'}")
        if len(done.stdout) > ANSWER_BYTES_MAX:
            raise EvidenceUnavailable(f"more than {ANSWER_BYTES_MAX} bytes of stacks")
        try:
            threads = json.loads(done.stdout)
        except ValueError as e:
            raise EvidenceUnavailable(f"py-spy's answer is not JSON: {e}") from None
        if not isinstance(threads, list):
            raise EvidenceUnavailable("py-spy's answer is not a list of threads")
        return threads


class FlightRecorders:
    """Requests Flight Recorder dumps from processes, one at a time."""

    def __init__(self, pages: Path, clock: Clock, proc: Path = Path("/proc")) -> None:
        """`pages`: directory of the state pages."""
        self._pages, self._clock, self._proc = pages, clock, proc
        self._busy = threading.Lock()

    def dump(self, pid: int, start_ticks: int, lives: Callable[[], bool]) -> bytes:
        """The dump as PyTorch writes it, a pickle that is not parsed here.

        Raises:
            EvidenceUnavailable: the process does not respond, has no recorder, or ended; or busy.
        """
        page = self._pages / page_name(pid, start_ticks)
        with _only_one(self._busy):
            try:
                self._clean(page)
                return self._ask(page, owners_of_files(self._proc, pid, self._pages), lives)
            except OSError as e:
                reason = f"the request cannot be written or its answer read: {e.strerror or e}"
                raise EvidenceUnavailable(reason) from None
            finally:
                self._clean(page)

    def _ask(self, page: Path, owners: Collection[int] | None, lives: Callable[[], bool]) -> bytes:
        if not page.exists():
            raise EvidenceUnavailable("the process has no state page, and therefore receives no requests")
        number = secrets.token_hex(8)
        request = request_path(page)
        # Others of the group may create files here: the name is random, and an existing file is never opened.
        descriptor, unfinished = mkstemp(prefix=f"{request.name}.", dir=self._pages)
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o644)  # the process may run as another user
            file.write(number)
        os.rename(unfinished, request)
        whole, failed = answer_paths(page, number)
        deadline = self._clock.monotonic() + FLIGHT_SECONDS_MAX
        while True:
            with contextlib.suppress(FileNotFoundError):
                return _read_answer(whole, owners, DUMP_BYTES_MAX)
            with contextlib.suppress(FileNotFoundError):
                reason = _read_answer(failed, owners, 4 * REASON_CHARS_MAX).decode("utf-8", "replace")
                raise EvidenceUnavailable(f"the process says: {reason[:REASON_CHARS_MAX]}")
            if not lives():
                raise EvidenceUnavailable("the process ended")
            if self._clock.monotonic() > deadline:
                because = "the process is stopped, its GIL is held, or its reporter is too old"
                raise EvidenceUnavailable(f"no response in {FLIGHT_SECONDS_MAX:.0f} s: {because}")
            self._clock.sleep(FLIGHT_POLL_SECONDS)

    def _clean(self, page: Path) -> None:
        """Removes request and responses, including late responses to earlier requests."""
        for path in self._pages.glob(f"{page.stem}.*flight*"):
            remove(path)


def _read_answer(path: Path, owners: Collection[int] | None, num_bytes_max: int) -> bytes:
    """Raises FileNotFoundError: not there yet; EvidenceUnavailable: too large; OSError: no file of `owners`."""
    with open(open_owned(path, owners), "rb") as file:
        data = file.read(num_bytes_max + 1)
    if len(data) > num_bytes_max:
        raise EvidenceUnavailable(f"the answer exceeds {num_bytes_max:,} bytes")
    return data
