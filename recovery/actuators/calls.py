"""Calls to another system: what a target (targets/) asks for, and how one call is made.

A target replaces a unit by a *procedure*, a generator that yields calls and gets their replies:

    def replace(self, order: Order) -> Procedure:
        reply = yield HttpCall(key="pod", words="read the pod", changes=False, method="GET", url=...)
        ...
        return "the pod was evicted"

so that a target decides without effects, a dry run is the same code, and a test is a list of replies.
"""

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from rolecall.core.http import HttpFailed, request
from rolecall.core.journal.payloads.recovery import NO_ANSWER_STATUS, NOT_SENT_STATUS, status_text
from rolecall.core.text import os_reason

NO_STATUS, NOT_SENT = NO_ANSWER_STATUS, NOT_SENT_STATUS
CALL_SECONDS = 10.0
REPLY_BYTES_MAX = 4 << 20
SHOWN_CHARACTERS = 2000
"""Of a reply, in the journal."""
READ_SECONDS = 2.0
NOT_STARTED = 127
"""Exit code of a command that could not be started, as in shells."""
TOO_MANY, SERVER_ERROR = 429, 500
WITHOUT_EFFECT = (NOT_SENT, TOO_MANY)
"""Statuses of calls that certainly changed nothing, and that may be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`status`: exit code or HTTP status; `NO_STATUS`: there is none, and the call may have had its effect or not;
    `NOT_SENT`: nothing was sent over HTTP, so that it had none and may be made again. `text`: output or body, or why
    there is no status."""

    status: int
    text: str = ""

    @property
    def known(self) -> bool:
        return self.status != NO_STATUS

    @property
    def unavailable(self) -> bool:
        """Over HTTP: there is no answer, or one that says nothing about what was asked for."""
        return not self.known or self.status in (NOT_SENT, TOO_MANY) or self.status >= SERVER_ERROR

    @property
    def json(self) -> Any:
        """The body. None: it is not JSON, or nested too deeply."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @property
    def short(self) -> str:
        """The text on one line, shortened."""
        return " ".join(self.text.split())[:SHOWN_CHARACTERS]

    @property
    def shown(self) -> str:
        """`status 409: ...`, for people."""
        status = status_text(self.status)
        return f"{status}: {self.short}" if self.text else status


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`key`: unique within a procedure, and the same when the procedure is run again. `changes`: it has an effect.
    `prepares`: it changes something, and ends no process. `repeatable`: a second time does no harm. `assumed`: what a
    dry run takes for the reply of a call that it does not make; None: it is made in a dry run too, if it changes
    nothing."""

    key: str
    words: str
    changes: bool = True
    prepares: bool = False
    repeatable: bool = False
    assumed: Reply | None = None
    deadline_seconds: float = CALL_SECONDS
    after_seconds: float = 0.0

    @property
    def shown(self) -> str:
        """The exact call, without secrets."""
        raise NotImplementedError

    @property
    def success(self) -> Reply:
        """What a dry run takes for the reply of a change."""
        return Reply(status=0)

    def make(self) -> Reply:
        """Makes the call; returns within its deadline. Never raises."""
        raise NotImplementedError


Procedure = Generator[Call, Reply, str]
"""Returns what was done. Raises ActuatorError: it cannot be done, or failed, with what was done before. One that is
given up, at its deadline for example, gets an ActuatorError at its last call and adds that; no further call is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCall(Call):
    """A program, without a shell, with its own session: at the deadline it is ended with its children."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return shlex.join(self.argv)

    def make(self) -> Reply:
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            return Reply(status=NOT_STARTED, text=f"{self.argv[0]}: {os_reason(e)}")
        output = bytearray()
        assert process.stdout is not None
        # A thread, since a child that outlives the command may keep the pipe open.
        reader = threading.Thread(target=_read, args=(process.stdout, output), daemon=True)
        reader.start()
        try:
            status = process.wait(self.deadline_seconds)
            reader.join(READ_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call it does not end
                process.wait(READ_SECONDS)
            return Reply(status=NO_STATUS, text=f"not done within {self.deadline_seconds:g} s, and ended")
        return Reply(status=status, text=bytes(output).decode(errors="replace"))


def _read(stream: IO[bytes], output: bytearray) -> None:
    with stream:
        while part := stream.read1(65536):  # type: ignore[attr-defined]  # of a buffered reader
            output += part[: max(0, REPLY_BYTES_MAX - len(output))]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall(Call):
    """`token_path`: file with a bearer token, read for each call (it may be renewed). `ca_path`: certificates of the
    authority that signs the server's."""

    method: str
    url: str
    body: Any = None
    content_type: str = "application/json"
    token_path: str = ""
    ca_path: str = ""

    @property
    def shown(self) -> str:
        body = "" if self.body is None else " " + json.dumps(self.body, sort_keys=True)
        return f"{self.method} {self.url}{body}"

    @property
    def success(self) -> Reply:
        return Reply(status=200)

    def make(self) -> Reply:
        headers = {"Accept": "application/json"}
        if self.body is not None:
            headers["Content-Type"] = self.content_type
        try:
            if self.token_path:
                headers["Authorization"] = "Bearer " + Path(self.token_path).read_text(encoding="utf-8").strip()
            if self.ca_path:
                Path(self.ca_path).read_bytes()  # before anything is sent
            answer = request(
                self.method,
                self.url,
                headers=headers,
                content=None if self.body is None else json.dumps(self.body).encode(),
                deadline_seconds=self.deadline_seconds,
                bytes_max=REPLY_BYTES_MAX,
                ca_path=self.ca_path,
            )
        except HttpFailed as e:
            server = urlsplit(self.url).netloc.rpartition("@")[2]
            return Reply(status=NOT_SENT if e.unsent else NO_STATUS, text=f"{server}: {e}")
        except (OSError, ValueError) as e:
            return Reply(status=NOT_SENT, text=f"{getattr(e, 'filename', None) or self.url}: {os_reason(e)}")
        return Reply(status=answer.status, text=answer.body.decode(errors="replace"))
