"""Who may act: a file of names and hashes of tokens, that only its owner can read.

    anna: sha256:9f86d081884c7d65...

A token is 32 random bytes, so its plain SHA-256 cannot be guessed back; it is shown once and kept nowhere. The file is
looked at on every question: who was removed from it is out at once. Whoever presents a token is the name beside its
hash, and nothing that anybody types changes that name.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.core.private_file import write_private
from rolecall.recovery.operators.run_location import checked_name

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
HASH_PATTERN = re.compile(r"^sha256:[0-9a-f]{64}$")
FILE_BYTES_MAX = 256 * 1024
"""Some thousand people; more is another file by mistake."""
TOKEN_CHARS_MAX = 256
"""Longer texts are no tokens, and are not worth hashing."""
FAILURES_MAX = 20
"""Wrong tokens within `FAILURE_SECONDS`, of all who try, after which the log says that somebody tries. 32 random bytes
cannot be guessed at any rate, so a right token is let in even then: whoever guesses must not keep out who is on call."""
FAILURE_SECONDS = 60.0
IDLE_SECONDS = 1800.0
"""Without a click for so long, a person is signed out: a page is left open on a wall screen sooner than it is closed."""
HEAD = "# Who may act on rolecall's dashboard. `rolecall users add NAME --file THIS` makes a line and shows its token once.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedInUser:
    """A person who signed in. Holds no token: only what the file holds, to see that it still does."""

    name: str
    fingerprint: str = field(repr=False)
    seen_at: float  # the newest click, wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInRefused:
    """Why somebody is not let in, in a sentence that says nothing of what they presented."""

    because: str


def fingerprint(token: str) -> str:
    """What the file keeps of a token."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def read_users(path: Path) -> dict[str, str]:
    """Name -> fingerprint.

    Raises:
        UnreadableInput: the file is missing, others can read it, it belongs to somebody else, or is not what it should be.
    """
    return _people(_private_bytes(path), path)


def add(path: Path, name: str) -> str:
    """Writes `name` into the file, which is made if there is none, and returns the token: it is kept nowhere else.

    Raises:
        CommandRefused: the name is taken, or is none. UnreadableInput: the file cannot be read.
    """
    people = read_users(path) if path.exists() else {}
    if checked_name(name) in people:
        raise CommandRefused(f"{name} stands in {path} already; `rolecall users remove` ends the old token")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    _write(path, {**people, name: fingerprint(token)})
    return token


def remove(path: Path, name: str) -> None:
    """Takes `name` out: whoever is signed in under it is out at the next look.

    Raises:
        CommandRefused: nobody has this name. UnreadableInput: the file cannot be read.
    """
    people = read_users(path)
    if name not in people:
        raise CommandRefused(f"nobody in {path} is called {name!r}; there are: {', '.join(people) or 'none'}")
    _write(path, {n: f for n, f in people.items() if n != name})


class Authenticator:
    """Lets people in and knows whom it has let in. One a process; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._read: tuple[tuple[int, ...], dict[str, str]] | None = None

    def enter(self, token: str, now: float) -> SignedInUser | SignInRefused:
        """`now`: wall seconds."""
        with self._lock:
            try:
                people = self._people()
            except UnreadableInput as e:
                return SignInRefused(because=str(e))
            presented = fingerprint(token[:TOKEN_CHARS_MAX])
            # All are compared, and none of them in a time that tells how much of it fits.
            fits = [n for n, kept in people.items() if hmac.compare_digest(kept, presented)]
            if not fits:
                self._count_failure(now)
                return SignInRefused(because="nobody in the people file has this token")
            return SignedInUser(name=fits[0], fingerprint=presented, seen_at=now)

    def refusal(self, held: SignedInUser, now: float) -> str:
        """Why `held` is over; empty while it is good."""
        if now - held.seen_at > IDLE_SECONDS:
            return f"{held.name} was signed out after {IDLE_SECONDS / 60:.0f} minutes without a click"
        try:
            with self._lock:
                kept = self._people().get(held.name, "")
        except UnreadableInput as e:
            return str(e)
        return "" if hmac.compare_digest(kept, held.fingerprint) else f"{held.name} may not act any more"

    def _count_failure(self, now: float) -> None:
        self._failures.append(now)
        if len(self._failures) == FAILURES_MAX and abs(now - self._failures[0]) < FAILURE_SECONDS:
            logger.warning("%d wrong tokens within %.0f s: somebody guesses", FAILURES_MAX, FAILURE_SECONDS)
            self._failures.clear()

    def _people(self) -> dict[str, str]:
        # The change time moves with every write, also one that puts back the old modification time and size.
        try:
            now = self.path.stat()
        except OSError as e:
            raise UnreadableInput(where=str(self.path), reason=e.strerror or repr(e)) from None
        stamp = (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if self._read is None or self._read[0] != stamp:
            self._read = (stamp, read_users(self.path))
        return self._read[1]


def _write(path: Path, people: Mapping[str, str]) -> None:
    text = HEAD + yaml.safe_dump(dict(sorted(people.items())), allow_unicode=True) if people else HEAD
    try:
        write_private(path, text.encode())
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or repr(e)) from None


def _private_bytes(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as f:
            found = os.fstat(f.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableInput(where=str(path), reason="is no regular file")
            if found.st_mode & 0o077:
                raise UnreadableInput(
                    where=str(path),
                    reason=f"others may read or write it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}",
                )
            if found.st_uid not in (0, os.geteuid()):
                raise UnreadableInput(where=str(path), reason=f"belongs to user {found.st_uid}, not to the dashboard's")
            raw = f.read(FILE_BYTES_MAX + 1)
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or repr(e)) from None
    if len(raw) > FILE_BYTES_MAX:
        raise UnreadableInput(where=str(path), reason=f"is larger than {FILE_BYTES_MAX} bytes")
    return raw


def _people(raw: bytes, path: Path) -> dict[str, str]:
    try:
        value = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        # The parser's own words quote the file.
        raise UnreadableInput(where=str(path), reason="is no YAML") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableInput(where=str(path), reason="must be a mapping of names to sha256:...")
    for name, kept in value.items():
        if not isinstance(name, str):
            raise UnreadableInput(where=str(path), reason=f"{name!r} is no name")
        try:
            checked_name(name)
        except CommandRefused as e:
            raise UnreadableInput(where=str(path), reason=str(e)) from None
        if not isinstance(kept, str) or not HASH_PATTERN.fullmatch(kept):
            # Never quoted: somebody may have written the token itself.
            raise UnreadableInput(where=f"{path}: {name}", reason="must be sha256: and 64 hexadecimal digits")
    if len(set(value.values())) < len(value):
        raise UnreadableInput(where=str(path), reason="two people have the same token: nobody could tell who acts")
    return dict(value)
