"""One question to an agent for evidence, with one deadline for all of it.

http.client alone limits each wait, and an agent that sends a byte now and then would hold its asker up for hours: at the
deadline the connection is shut down under it.
"""

import http.client
import json
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlsplit

from rolecall.core.text import plain

CONNECT_SECONDS = 2.0
REASON_BYTES_MAX = 4096
REASON_CHARS_MAX = 300


class EvidenceRequestFailed(Exception):
    """There is no such evidence: why, in words. `status`: of the agent's answer, 0 without one."""

    def __init__(self, reason: str, status: int = 0) -> None:
        self.status = status
        super().__init__(reason)


def request_evidence(url: str, path: str, authorization: str, *, seconds: float, bytes_max: int) -> bytes:
    """What the agent at `url` answers to `path`, within `seconds`.

    Raises:
        NotHad: it does not answer in time, refuses, or sends more than `bytes_max`.
    """
    parts = urlsplit(url)
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = made(parts.hostname or "", parts.port, timeout=min(seconds, CONNECT_SECONDS))
        connection.connect()
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise EvidenceRequestFailed(f"its agent does not answer ({_short(e)})") from None
    late = threading.Event()
    sock = connection.sock

    def give_up() -> None:
        late.set()
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # wakes the reader; TLS says no farewell

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        sock.settimeout(seconds)
        connection.request("GET", path, headers={"Authorization": authorization})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise EvidenceRequestFailed(_reason(answer), answer.status)
        body = answer.read(bytes_max + 1)
        whole = not answer.length  # what is still to come; None where nobody said how much
    except (OSError, ValueError, http.client.HTTPException) as e:
        in_time = f"no complete answer of its agent within {seconds:.0f} s"
        raise EvidenceRequestFailed(
            in_time if late.is_set() else f"the connection to its agent broke ({_short(e)})"
        ) from None
    finally:
        timer.cancel()
        connection.close()
    if len(body) > bytes_max:
        raise EvidenceRequestFailed(f"more than {bytes_max:,} bytes", answer.status)
    if late.is_set() or not whole:
        raise EvidenceRequestFailed(f"no complete answer of its agent within {seconds:.0f} s")
    return body


def _reason(answer: http.client.HTTPResponse) -> str:
    """The agent's own words, else the status."""
    try:
        value = json.loads(answer.read(REASON_BYTES_MAX))
        return f"its agent says: {plain(str(value['error']), REASON_CHARS_MAX)}"
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"its agent answers with status {answer.status}"


def _short(e: BaseException) -> str:
    return plain(str(e) or type(e).__name__, REASON_CHARS_MAX)
