"""The dashboard beside a run of ours: a process of its own that may fail without harm to the run, and ends with it.

It runs at low priority, so that whoever looks takes no time from what is looked at. One person, `demo`, may act on it; the
token lies in the run's directory, for its owner alone.
"""

import logging
import re
import shutil

from rolecall.core.errors import RolecallError
from rolecall.core.private_file import write_private
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain
from rolecall.session.children import Child, rolecall_command

logger = logging.getLogger(__name__)

PERSON = "demo"
PEOPLE_FILE, TOKEN_FILE = "users.yaml", "dashboard-token"
NICENESS = 10
LOG_BYTES_MAX = 64 * 1024
"""Read of its output while its address is waited for."""
_ADDRESS = re.compile(r"https?://\S+")


class DashboardBeside:
    """`start`, then `news` now and then, then `stop`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._child: Child | None = None
        self._told = False

    def start(self) -> None:
        """Returns at once; `news` says what became of it."""
        people = self._run.path / PEOPLE_FILE
        try:
            from rolecall.dashboards.users import add

            token = add(people, PERSON)
            write_private(self._run.path / TOKEN_FILE, f"{token}\n".encode())
        except (RolecallError, OSError) as e:
            logger.warning("no dashboard: %s", e)
            return
        argv = rolecall_command("dashboard", str(self._run.path), "--port", "0", "--users", str(people))
        nice = shutil.which("nice")
        argv = [nice, "-n", str(NICENESS), *argv] if nice else argv
        self._child = Child(argv, self._run.logs / "dashboard.log", self._run)
        self._child.start()

    def news(self) -> str:
        """A line for the terminal, once: where it is, or that it has ended; else empty."""
        if self._child is None or self._told:
            return ""
        try:
            said = self._child.log.read_bytes()[:LOG_BYTES_MAX].decode(errors="replace")
        except OSError:
            said = ""
        found = _ADDRESS.search(said)
        if found is None and self._child.died() is None:
            return ""
        self._told = True
        if found is None:
            first = next((line for line in said.splitlines() if line.strip()), "it ended at once")
            return f"no dashboard: {plain(first, 200)}"
        return f"dashboard: {found.group()} (to act, sign in with the token in {self._run.path / TOKEN_FILE})"

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
