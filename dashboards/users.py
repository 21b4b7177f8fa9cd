"""Dashboard users: a file of names and token hashes that only its owner can read.

    anna: sha256:9f86d081884c7d65...

An access token is 32 random bytes, so an unsalted SHA-256 cannot be reversed; it is shown once and stored nowhere. The
file is checked on every request, so removing a user takes effect at once. The name beside the hash identifies the user;
no user input changes it.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.core.rundir import write_atomically
from rolecall.recovery.operators.run_location import checked_name

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
HASH_PATTERN = re.compile(r"^sha256:[0-9a-f]{64}$")
FILE_BYTES_MAX = 256 * 1024
"""A few thousand users; a larger file is a mistake."""
TOKEN_CHARS_MAX = 256
"""Longer input is not a token and is not hashed."""
FAILURES_MAX = 20
"""Wrong tokens within `FAILURE_SECONDS`, over all clients, after which a warning is logged. 32 random bytes cannot be
guessed, so valid tokens are still accepted: an attacker must not be able to lock out on-call."""
FAILURE_SECONDS = 60.0
IDLE_SECONDS = 1800.0
"""A user without a click for this long is signed out, because pages are often left open."""
HEAD = (
    "# Users of rolecall's dashboard. `rolecall users add NAME --file THIS` adds a line and shows the access "
    "token once.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedInUser:
    """A signed-in user. Contains the fingerprint instead of the token, to check that the file still has it."""

    name: str
    fingerprint: str = field(repr=False)
    seen_at: float  # latest click, wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInRefused:
    """Why sign-in failed; the text does not contain the presented token."""

    because: str


def fingerprint(token: str) -> str:
    """The hash of a token, as stored in the file."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def read_users(path: Path) -> dict[str, str]:
    """Name -> fingerprint.

    Raises:
        UnreadableInput: the file is missing, readable by others, owned by another user, or malformed.
    """
    return _parsed(_private_bytes(path), path)


@contextmanager
def adding(path: Path, name: str) -> Iterator[str]:
    """Yields a token, which is stored nowhere, and after the block adds `name` to the file, creating it if needed. A
    block that raises, since the token cannot be shown, adds nobody.

    Raises:
        CommandRefused: the name is taken or invalid. UnreadableInput: the file cannot be read or written.
    """
    users = read_users(path) if path.exists() else {}
    if checked_name(name) in users:
        raise CommandRefused(f"{name} is already in {path}; `rolecall users remove` revokes the old token")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    yield token
    _write(path, {**users, name: fingerprint(token)})


def add(path: Path, name: str) -> str:
    """As `adding`, and returns the token."""
    with adding(path, name) as token:
        pass
    return token


def remove(path: Path, name: str) -> None:
    """Removes `name`; sessions of that user end at their next request.

    Raises:
        CommandRefused: no such user. UnreadableInput: the file cannot be read.
    """
    users = read_users(path)
    if name not in users:
        raise CommandRefused(f"no user {name!r} in {path}; users: {', '.join(users) or 'none'}")
    _write(path, {n: f for n, f in users.items() if n != name})


class Authenticator:
    """Verifies tokens and sessions. One per process; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._read: tuple[tuple[int, ...], dict[str, str]] | None = None

    def sign_in(self, token: str, now: float) -> SignedInUser | SignInRefused:
        """`now`: wall seconds."""
        with self._lock:
            try:
                users = self._users()
            except UnreadableInput as e:
                return SignInRefused(because=str(e))
            presented = fingerprint(token[:TOKEN_CHARS_MAX])
            # Constant-time comparison with every hash, so that timing reveals nothing.
            matches = [n for n, kept in users.items() if hmac.compare_digest(kept, presented)]
            if not matches:
                self._count_failure(now)
                return SignInRefused(because="no user has this access token")
            return SignedInUser(name=matches[0], fingerprint=presented, seen_at=now)

    def rejection(self, held: SignedInUser, now: float) -> str:
        """Why the session `held` has ended; empty while it is valid."""
        if now - held.seen_at > IDLE_SECONDS:
            return f"{held.name} was signed out after {IDLE_SECONDS / 60:.0f} minutes without activity"
        try:
            with self._lock:
                kept = self._users().get(held.name, "")
        except UnreadableInput as e:
            return str(e)
        return "" if hmac.compare_digest(kept, held.fingerprint) else f"{held.name} is no longer a user"

    def _count_failure(self, now: float) -> None:
        self._failures.append(now)
        if len(self._failures) == FAILURES_MAX and abs(now - self._failures[0]) < FAILURE_SECONDS:
            logger.warning("%d wrong access tokens within %.0f s: possible attack", FAILURES_MAX, FAILURE_SECONDS)
            self._failures.clear()

    def _users(self) -> dict[str, str]:
        # ctime changes with every write, even if mtime and size are restored.
        try:
            now = self.path.stat()
        except OSError as e:
            raise UnreadableInput(where=str(self.path), reason=e.strerror or repr(e)) from None
        stamp = (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if self._read is None or self._read[0] != stamp:
            self._read = (stamp, read_users(self.path))
        return self._read[1]


def _write(path: Path, users: Mapping[str, str]) -> None:
    text = HEAD + yaml.safe_dump(dict(sorted(users.items())), allow_unicode=True) if users else HEAD
    try:
        write_atomically(path, text, private=True)
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or repr(e)) from None


def _private_bytes(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableInput(where=str(path), reason="is not a regular file")
            if found.st_mode & 0o077:
                raise UnreadableInput(
                    where=str(path),
                    reason=f"is accessible by others (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}",
                )
            if found.st_uid not in (0, os.geteuid()):
                raise UnreadableInput(
                    where=str(path), reason=f"is owned by user {found.st_uid}, not by the dashboard's user"
                )
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or repr(e)) from None
    if len(raw) > FILE_BYTES_MAX:
        raise UnreadableInput(where=str(path), reason=f"is larger than {FILE_BYTES_MAX} bytes")
    return raw


def _parsed(raw: bytes, path: Path) -> dict[str, str]:
    try:
        value = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        # The parser's message quotes the file.
        raise UnreadableInput(where=str(path), reason="is not valid YAML") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableInput(where=str(path), reason="must map names to sha256:...")
    for name, kept in value.items():
        if not isinstance(name, str):
            raise UnreadableInput(where=str(path), reason=f"{name!r} is not a name")
        try:
            checked_name(name)
        except CommandRefused as e:
            raise UnreadableInput(where=str(path), reason=str(e)) from None
        if not isinstance(kept, str) or not HASH_PATTERN.fullmatch(kept):
            # Not quoted, because the value may be the token itself.
            raise UnreadableInput(where=f"{path}: {name}", reason="must be sha256: and 64 hexadecimal digits")
    if len(set(value.values())) < len(value):
        raise UnreadableInput(where=str(path), reason="two users have the same token")
    return dict(value)
