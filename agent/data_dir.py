"""The agent's data directory: where it is, its token, and who may use it.

A job registers over the socket in this directory, with a secret that it derives from the token there. Both belong to
the agent's user and are open to its group, so that a job of the same user or group can register. Whoever reads the
token can also ask the agent for evidence (stacks, dumps).
Standard library only: training processes import this.
"""

import errno
import grp
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Final

from rolecall.core.errors import ConfigError

DATA_DIR_ENV: Final = "ROLECALL_AGENT_DIR"
"""Overrides the default directory, for the agent and for the jobs of its node."""
SYSTEM_DIR: Final = Path("/var/lib/rolecall")
DIR_MODE, TOKEN_MODE, SOCKET_MODE = 0o750, 0o640, 0o660
PAGES_MODE: Final = 0o1770
"""A process creates its own page, and cannot remove those of others."""
SOCKET_NAME, TOKEN_NAME = "agent.sock", "token"


def default_data_dir(euid: int, environ: Mapping[str, str]) -> Path:
    """$ROLECALL_AGENT_DIR, else /var/lib/rolecall for root, else `rolecall` in the XDG state directory (XDG Base
    Directory Specification 0.8)."""
    if given := environ.get(DATA_DIR_ENV):
        return Path(given).absolute()
    if euid == 0:
        return SYSTEM_DIR
    state = environ.get("XDG_STATE_HOME", "")
    # The specification: a relative path is invalid and is ignored.
    base = Path(state) if state.startswith("/") else Path(environ.get("HOME") or "/tmp") / ".local" / "state"
    return base / "rolecall"


def data_dirs_of_jobs(euid: int, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a job looks for its agent, in this order: the directory of its user's agent, then of the system's."""
    own = default_data_dir(euid, environ)
    return (own,) if environ.get(DATA_DIR_ENV) or own == SYSTEM_DIR else (own, SYSTEM_DIR)


def token_of(data_dir: Path) -> str:
    """The token, created with its directory at the first call.

    Raises:
        ConfigError: the file is empty: every request would be authorised.
        OSError: it can be neither read nor created.
    """
    path = data_dir / TOKEN_NAME
    if not path.exists():
        whole = _new_file(data_dir, secrets.token_hex(32))
        # A crash leaves the whole file or none; if two agents start at once, both use the first one's token.
        try:
            os.link(whole, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            whole.replace(path)
        whole.unlink(missing_ok=True)
    token = path.read_text().strip()
    if not token:
        raise ConfigError([f"{path}: empty; remove it, and the agent creates a new one"])
    return token


def provide_token(data_dir: Path, token: str) -> None:
    """Puts the token of another file where jobs look for it: without it none can register. Raises OSError."""
    path = data_dir / TOKEN_NAME
    if not path.exists() or path.read_text().strip() != token:
        _new_file(data_dir, token).replace(path)


def create_data_dir(data_dir: Path) -> None:
    """Raises OSError."""
    if not data_dir.is_dir():
        data_dir.mkdir(parents=True, exist_ok=True, mode=DIR_MODE)
        data_dir.chmod(DIR_MODE)  # whatever the umask


def _new_file(data_dir: Path, token: str) -> Path:
    create_data_dir(data_dir)
    descriptor, name = mkstemp(prefix=".token.", dir=data_dir)
    with os.fdopen(descriptor, "w") as f:
        f.write(token + "\n")
    whole = Path(name)
    whole.chmod(TOKEN_MODE)
    return whole


def remove(path: Path) -> None:
    """Removes a file if it can. A file system with errors becomes read-only, and the agent of that node must go on."""
    with suppress(OSError):
        path.unlink()


def open_owned(path: str | Path, owners: Collection[int] | None) -> int:
    """Descriptor for reading a file where others may create one: follows no symlink and waits for no pipe.

    `owners`: the users whose file is accepted; None: any.

    Raises:
        OSError: it is not there, not a regular file, or another user's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(descriptor)
    is_regular = stat.S_ISREG(about.st_mode)
    if is_regular and (owners is None or about.st_uid in owners):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, f"it is user {about.st_uid}'s" if is_regular else "it is not a regular file", str(path))


def refuse_foreign(data_dir: Path, euid: int) -> None:
    """Raises ConfigError: another user owns it, who could exchange the token (a known name in /tmp)."""
    try:
        owner = data_dir.stat().st_uid
    except FileNotFoundError:
        return  # the agent creates it
    if owner not in (0, euid) and euid != 0:
        raise ConfigError([f"{data_dir}: belongs to user {owner}; choose another directory (--data-dir)"])


def access_of(path: Path) -> str:
    """`PATH (mode 0640, group ml)`. Raises OSError."""
    about = path.stat()
    try:
        group = grp.getgrgid(about.st_gid).gr_name
    except KeyError:
        group = str(about.st_gid)
    return f"{path} (mode {about.st_mode & 0o7777:04o}, group {group})"
