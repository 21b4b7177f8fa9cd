"""The dashboard of a run: a separate process that may fail without affecting the run, and ends with it.

It runs at low priority so that viewing does not slow the run. One user, `demo`, may issue commands; the access token is
in the run's directory, readable by its owner only.
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

USER = "demo"
USERS_FILE, TOKEN_FILE = "users.yaml", "dashboard-token"
NICENESS = 10
LOG_BYTES_MAX = 64 * 1024
"""Read from its output while waiting for its address."""
_ADDRESS = re.compile(r"https?://\S+")


class DashboardBeside:
    """`start`, then `news` now and then, then `stop`."""

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
            write_private(self._run.path / TOKEN_FILE, f"{token}\n".encode())
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
