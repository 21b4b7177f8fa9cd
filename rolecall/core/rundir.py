"""The files of a run, in `runs/<id>/`, and the marker in the environment of all its processes.

run.json           what started, and when: config, seed, database URL, nodes, who supervises (pid, start time)
                   (mode 0600: the URL of a webhook may be a secret)
journal.db         journal and ledger, unless the job names another place
database           URL of that other place (mode 0600: it may hold a password)
token              secret of this run (mode 0600): Ray token, HMAC key of weight port and registration
nodes/<node>/      agent.json (url, pid), agent.sock, pages/, events.jsonl: one agent's data directory
checkpoints/       step-<n>/
injections.jsonl   the injector's own log: rolecall's detectors never read it
inject/            requests to processes that agreed to be injected (hangs and delays from inside)
logs/              output of agents, watch and Ray
report.json, report.html
"""

import hmac
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.core.errors import JournalError, RunNotFound
from rolecall.core.ids import RunId
from rolecall.core.journal.database import DRIVERS, run_url

RUN_ENV = "ROLECALL_RUN"
"""Set to the run directory in every process of a run, so that all of them can be found."""
NODE_ENV = "ROLECALL_NODE"
"""Set to the node id in every process of a node."""
RUNS_ENV = "ROLECALL_RUNS"
DEFAULT_ROOT = Path("runs")
"""Directory of the runs, where neither `--runs` nor the environment names one."""
NAMES_SHOWN_MAX = 5
"""Runs listed when an unknown one is asked for."""


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def run_id(self) -> RunId:
        return RunId(self.path.name)

    @property
    def shell_name(self) -> str:
        """Names this run in a command line, from here: its id in the default directory of runs, else its path."""
        default = Path(os.environ.get(RUNS_ENV) or DEFAULT_ROOT) / self.path.name
        return shlex.quote(self.path.name if default.resolve() == self.path else str(self.path))

    @property
    def database_url(self) -> str:
        """URL of the journal. May contain a password: apply `core.database.redacted` before showing it.

        Raises:
            JournalError: the file that names it is damaged.
        """
        try:
            url = self.database_path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return f"sqlite:///{self.path / 'journal.db'}"
        except UnicodeDecodeError:
            url = ""
        driver, found, _ = url.partition("://")
        if driver not in DRIVERS or not found:
            raise JournalError(f"{self.database_path}: damaged: not the URL of a journal")
        return url

    @property
    def database_path(self) -> Path:
        return self.path / "database"

    @property
    def token_path(self) -> Path:
        return self.path / "token"

    @property
    def injections_path(self) -> Path:
        return self.path / "injections.jsonl"

    @property
    def inject_dir(self) -> Path:
        return self.path / "inject"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def node_dir(self, node: str) -> Path:
        return self.path / "nodes" / node

    def token(self) -> str:
        return self.token_path.read_text().strip()

    def read(self) -> dict[str, Any]:
        """`run.json`. Raises RunNotFound: there is none, or it is damaged."""
        try:
            value = json.loads((self.path / "run.json").read_text())
        except FileNotFoundError:
            raise RunNotFound(f"{self.path}: no run here (run.json is missing)") from None
        except ValueError as e:
            raise RunNotFound(f"{self.path / 'run.json'}: damaged: {e}") from e
        if not isinstance(value, dict):
            raise RunNotFound(f"{self.path / 'run.json'}: damaged: not a mapping")
        if "agents" in value:
            self._check_mapping(value, "agents")
        return value

    def config(self) -> dict[str, Any]:
        """The job file in `run.json`. Raises RunNotFound, as `read`; or it is not there."""
        value = self.read()
        self._check_mapping(value, "config")
        return dict(value["config"])

    def _check_mapping(self, value: dict[str, Any], name: str) -> None:
        if not isinstance(value.get(name), dict):
            raise RunNotFound(f"{self.path / 'run.json'}: damaged: {name} is not a mapping")

    @property
    def is_watched(self) -> bool:
        """Whether this is a job that rolecall watches and did not start. Raises RunNotFound, as `read`."""
        return "agents" in self.read()

    @property
    def created_at(self) -> float:
        """Wall seconds. If `run.json` does not tell, the time at which it was written."""
        try:
            found = self.read().get("created_at")
        except (RunNotFound, OSError):  # damaged, or another user's
            found = None
        return found if isinstance(found, (int, float)) else (self.path / "run.json").stat().st_mtime

    def write(self, value: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", json.dumps(value, indent=2) + "\n", private=True)


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replaces a file atomically. `private`: only its owner can read it (mode 0600).

    Raises:
        OSError: it cannot be written; no temporary file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600 if private else 0o666)
    except OSError as e:
        e.filename = str(path)  # the caller knows no temporary file
        raise
    try:
        with os.fdopen(descriptor, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        if e.filename is not None:
            e.filename = str(path)
        raise


def create_run_dir(root: Path, run_id: str, journal: str | None = None) -> RunDir:
    """A fresh run directory with its token, and the URL of the journal if it is elsewhere (`journal`).

    Only the owner can read these two files.

    Raises:
        FileExistsError: a run of this id exists. OSError: it cannot be created; nothing of it remains.
    """
    run = RunDir((root / run_id).resolve())
    run.path.mkdir(parents=True, exist_ok=False)
    try:
        for sub in (run.logs, run.inject_dir, run.checkpoints, run.path / "nodes"):
            sub.mkdir()
        write_atomically(run.token_path, secrets.token_hex(32), private=True)
        if journal is not None:
            write_atomically(run.database_path, run_url(journal, run.run_id), private=True)
    except OSError:  # a full disk: an incomplete directory would block the next attempt
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def open_run_dir(root: Path, which: str) -> RunDir:
    """A run by its id, its path, or `latest`. Raises RunNotFound: with the runs that there are."""
    if which != "latest" and (named := find_run_dir(root, which)):
        return named
    newest = newest_runs(root)
    if newest and which == "latest":
        return RunDir((root / newest[0]).resolve())
    unknown = "" if which == "latest" else f"{_why_no_run(root, which)}; "
    searched = root.absolute()  # the default is below the working directory, which may be another one than the run's
    if not newest:
        raise RunNotFound(f"{unknown}no runs in {searched}; try `rolecall demo` or --runs DIR")
    raise RunNotFound(f"{unknown}{searched} holds, newest first: {_some(newest)}")


def find_run_dir(root: Path, which: str) -> RunDir | None:
    """A run by its id or its path; None if there is none."""
    found = (path for path in (Path(which), root / which) if (path / "run.json").is_file())
    return next((RunDir(path.resolve()) for path in found), None)


def newest_runs(root: Path) -> list[str]:
    """Names of the runs in `root`, those created last first."""
    found = [RunDir(path.parent) for path in root.glob("*/run.json")]
    return [run.path.name for run in sorted(found, key=lambda run: run.created_at, reverse=True)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more


def _why_no_run(root: Path, which: str) -> str:
    path = next((path for path in (Path(which), root / which) if path.exists()), None)
    if path is None:
        return f"{which}: no run of this name"
    if not path.is_dir():
        return f"{path}: a file, not the folder of a run"
    if runs := newest_runs(path):
        return f"{path}: holds runs and is none itself ({_some(runs)}): give --runs {shlex.quote(str(path))}"
    return f"{path}: a folder, but not that of a run: run.json is missing"


def registration_secret(token: str, replica: str, rank: int, incarnation: int) -> str:
    """Given to a process at its spawn, to prove that the supervisor started it as this rank of this incarnation."""
    return hmac.new(token.encode(), f"{replica}:{rank}#{incarnation}".encode(), "sha256").hexdigest()


def bearer_token(token: str) -> str:
    """`Authorization: Bearer ...` for an agent's `/v1/evidence`: derived, so that the run's token is never sent."""
    return hmac.new(token.encode(), b"agent:evidence", "sha256").hexdigest()
