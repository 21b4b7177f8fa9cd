"""A terminal in a folder that looks like a clone, for tests that enter the commands of a page."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rolecall.agent.processes.state_pages import PageReader
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.views import observed_course, observed_ranks
from tests.docs.pages import ROOT
from tests.docs.test_first_minutes import like_a_clone
from tests.support import eventually

T = TypeVar("T")
MACHINE = (
    'hostname node-1 && printf "127.0.0.1 localhost node-1\\n" > "$0/hosts" && mount --bind "$0/hosts" /etc/hosts '
    '&& ip link set lo up && exec "$@"'
)
NAMESPACES = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", MACHINE]
"""A machine of its own: default ports are free, and its agent finds no other job's processes."""
ENTER_SECONDS = 120.0


class Shell:
    """`folder`: where it is; everything is written there. PIDs are those of its own machine, `node-1`."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        paths = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HOME": str(folder)}
        environ = {**like_a_clone(folder), **paths, **(environment or {})}
        (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / "bin" / "python").chmod(0o755)
        if subprocess.run([*NAMESPACES, folder, "true"], check=False, capture_output=True, timeout=30).returncode:
            pytest.skip("no namespaces here: the tests run as root on Linux")
        self._shell = subprocess.Popen(
            [*NAMESPACES, str(folder), "bash"], cwd=folder, env=environ, stdin=subprocess.PIPE, text=True
        )
        self._num_entered = 0

    def _write(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{line}\n")
        self._shell.stdin.flush()

    def start(self, command: str, log: str) -> None:
        """In the background; what it says is in the file `log`."""
        self._write(f"{command} > {log} 2>&1 &")

    def enter(self, command: str) -> str:
        """Waits for its end. What it said."""
        self._num_entered += 1
        log, done = f"entered-{self._num_entered}.log", self.folder / f"entered-{self._num_entered}.done"
        self._write(f"({command}) > {log} 2>&1; touch {done.name}")
        eventually(done.exists, f"{command} ends", seconds=ENTER_SECONDS)
        return self.read(log)

    def read(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Whatever runs on its machine ends with it."""
        self._shell.kill()
        self._shell.communicate()

    # --- what agent and watch have written ----------------------------------------------------------------------------

    def page(self, replica: str = "trainer/0", rank: int = 0) -> Any:
        """The newest state page of a rank; None before it registered."""
        for event in reversed([json.loads(line) for line in self.read("agent/events.jsonl").splitlines()]):
            if event["kind"] == "registered" and (event["replica"], event["rank"]) == (replica, rank):
                with suppress(OSError, ValueError):
                    [path] = (self.folder / "agent" / "pages").glob(f"{event['process']['pid']}-*.page")
                    reader = PageReader(path)
                    try:
                        return reader.read()
                    finally:
                        reader.close()
        return None

    def _ask(self, run: str, ask: Callable[[Journal], T], otherwise: T) -> T:
        try:
            with closing(Journal(RunDir(self.folder / "runs" / run).database_url, create=False)) as journal:
                return ask(journal)
        except JournalError:  # the watch has not created it
            return otherwise

    def events(self, *kinds: EventKind, run: str = "my-job") -> list[Event]:
        return self._ask(run, lambda journal: journal.events(kinds=list(kinds)), [])

    def ranks(self, run: str = "my-job") -> dict[tuple[str, int], observed_ranks.ObservedRank]:
        """Those that live, as pages show them."""
        flag = self._ask(run, lambda journal: journal.flag(observed_ranks.FLAG), None)
        shown = observed_ranks.from_json(flag)
        return {(r.replica, r.rank): r for r in shown if r.alive_at(time.time())}

    def course(self, run: str = "my-job") -> tuple[observed_course.CoursePoint, ...]:
        return observed_course.from_json(self._ask(run, lambda journal: journal.flag(observed_course.FLAG), None))
