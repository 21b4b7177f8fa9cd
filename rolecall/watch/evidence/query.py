"""One request to an agent for evidence, with one deadline for all of it."""

import json
from http import HTTPStatus

from rolecall.core.http import HttpFailed, request
from rolecall.core.text import plain

REASON_CHARS_MAX = 300


class EvidenceRequestFailed(Exception):
    """The evidence is unavailable; the message says why. `status`: HTTP status of the agent's response, 0 without
    one.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        self.status = status
        super().__init__(reason)


def request_evidence(url: str, path: str, authorization: str, *, seconds: float, bytes_max: int) -> bytes:
    """The response of the agent at `url` to `path`, within `seconds`.

    Raises:
        EvidenceRequestFailed: it does not respond in time, rejects the request, or sends more than `bytes_max`.
    """
    headers = {"Authorization": authorization}
    try:
        answer = request("GET", url.rstrip("/") + path, headers=headers, deadline_seconds=seconds, bytes_max=bytes_max)
    except HttpFailed as e:
        if e.late:
            raise EvidenceRequestFailed(f"no complete answer of its agent within {seconds:.0f} s") from None
        if e.too_large:
            raise EvidenceRequestFailed(str(e), HTTPStatus.OK) from None
        raise EvidenceRequestFailed(f"its agent does not answer ({plain(str(e), REASON_CHARS_MAX)})") from None
    if answer.status != HTTPStatus.OK:
        raise EvidenceRequestFailed(_reason(answer.status, answer.body), answer.status)
    return answer.body


def _reason(status: int, body: bytes) -> str:
    """The agent's error message, or else the status."""
    try:
        return f"its agent says: {plain(str(json.loads(body)['error']), REASON_CHARS_MAX)}"
    except (ValueError, KeyError, TypeError):
        return f"its agent answers with status {status}"
