"""What `rolecall doctor` reads from agents: failed probes of this node's agent, clock offsets of others.

An offset is the other agent's wall time minus the midpoint of request and response; its error is at most half the round
trip.
"""

import http.client
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.rundir import bearer_token
from rolecall.node.doctor import ClockOffset

ASK_SECONDS: Final = 3.0
BYTES_MAX: Final = 4 << 20
PAGES_MAX: Final = 8
ASKED_AT_ONCE: Final = 32
FAILURES: Final = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError)
"""Raised when the agent does not answer, or another server does."""
_DOWN = re.compile(r'^rolecall_probe_up\{[^}]*probe="(\w+)"[^}]*\} 0(?:\.0)?$', re.MULTILINE)


def own_authorization(data_dir: Path, token_file: Path | None) -> str:
    """Authorization header from this node's agent token; empty if this user cannot read it."""
    try:
        return f"Bearer {bearer_token((token_file or data_dir / 'token').read_text(encoding='utf-8').strip())}"
    except (OSError, UnicodeDecodeError):
        return ""


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=ASK_SECONDS)


def _get(connection: http.client.HTTPConnection, path: str, authorization: str) -> str:
    """Raises one of FAILURES: no answer, or not 200."""
    connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
    answer = connection.getresponse()
    body = answer.read(BYTES_MAX).decode("utf-8", "replace")
    if answer.status != http.client.OK:
        raise ValueError(f"status {answer.status}")
    return body


def down_probes(url: str, authorization: str) -> dict[str, str]:
    """probe -> reason for each failed probe of the agent at `url`; empty if it does not answer."""
    try:
        connection = _connect(url)
        try:
            down = dict.fromkeys(_DOWN.findall(_get(connection, "/metrics", authorization)), "")
            after = 0
            for _ in range(PAGES_MAX if down else 0):
                events = json.loads(_get(connection, f"/v1/events?after={after}", authorization))["events"]
                if not events:
                    break
                after = int(events[-1]["seq"])
                details = [e["detail"] for e in events if e["kind"] == "probe_down"]
                down |= {d["probe"]: str(d["reason"]) for d in details if d["probe"] in down}
            return down
        finally:
            connection.close()
    except FAILURES:
        return {}  # reported by another check


def clock_offsets(
    agents: Mapping[str, str], authorization: str = "", clock: Clock | None = None
) -> tuple[ClockOffset, ...]:
    """`agents`: name -> URL; requested concurrently."""
    wall: Callable[[], float] = (clock or SystemClock()).wall
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE) as pool:
        return tuple(pool.map(lambda item: _offset(item[0], item[1], authorization, wall), agents.items()))


def _offset(name: str, url: str, authorization: str, wall: Callable[[], float]) -> ClockOffset:
    try:
        connection = _connect(url)
        try:
            _get(connection, "/healthz", authorization)  # connect first: its duration must not count
            asked_at = wall()
            response: Any = json.loads(_get(connection, "/healthz", authorization))
            answered_at = wall()
        finally:
            connection.close()
        if response.keys() == {"ok"}:
            raise ValueError("it requires a user or a token: --credentials")
        offset_seconds = float(response["wall_at"]) - (asked_at + answered_at) / 2
    except FAILURES as e:
        return ClockOffset(agent=name, reason=str(e) or type(e).__name__)
    return ClockOffset(agent=name, seconds=offset_seconds, error_seconds=abs(answered_at - asked_at) / 2)
