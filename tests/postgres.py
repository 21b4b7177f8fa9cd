"""A real PostgreSQL server for tests: its own data directory, a Unix socket, no network, killed and started at will."""

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import RunId
from rolecall.core.journal.database import run_url
from tests.support import eventually

START_SECONDS = 60.0
_PORT = 5432  # names the socket's file only: nothing listens on a network


def binaries() -> Path | None:
    """The newest PostgreSQL's folder of programs (Debian keeps them out of PATH), or None."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3].split(".")[0]))
    if debian:
        return debian[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class Server:
    """One server. PostgreSQL refuses to run as root, so that root runs it as another user."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder, self._schemas = programs, folder, itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = pwd.getpwnam("nobody")
            self._as = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        argv = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", "rolecall", "-A", "trust", "--no-sync"]
        argv += ["-E", "UTF8", "--locale=C"]
        subprocess.run(argv, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=START_SECONDS, **self._as)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://rolecall@/postgres?host={self._folder}"

    def fresh_url(self) -> str:
        """A run's URL that nobody has used yet."""
        return run_url(self.url, RunId(f"t{next(self._schemas)}"))

    def start(self) -> None:
        """Returns once it answers."""
        argv = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-k", str(self._folder)]
        argv += ["-c", "listen_addresses=", "-c", f"port={_PORT}", "-c", "shared_buffers=16MB"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as
            )
        eventually(self._answers, "the server answers")

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        argv = [str(self._programs / "pg_isready"), "-q", "-h", str(self._folder), "-p", str(_PORT)]
        return subprocess.run(argv, check=False, timeout=START_SECONDS).returncode == 0

    def kill(self) -> None:
        """What a machine's end looks like: no checkpoint, no goodbye, recovery at the next start."""
        if self._process is None:
            return
        argv = [str(self._programs / "pg_ctl"), "-D", str(self._folder / "data"), "-m", "immediate", "-W", "stop"]
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(
                argv, check=False, cwd=self._folder, stdout=subprocess.DEVNULL, timeout=START_SECONDS, **self._as
            )
        try:
            self._process.wait(START_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server that answers; skips the test where PostgreSQL or its driver is missing."""
    pytest.importorskip("psycopg", reason="the driver psycopg is not installed")
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL here: initdb is neither in PATH nor under /usr/lib/postgresql")
    # Not below pytest's folders: those are closed to the user that the server runs as. Short: a socket's path is.
    folder = Path(tempfile.mkdtemp(prefix="rolecall-pg-"))
    try:
        made = Server(programs, folder)
        try:
            made.start()
            yield made
        finally:
            made.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
