"""Converts values to and from rows of the journal, and validates them, because a file may be damaged.

An invalid row raises a `JournalCorrupt` that names file and row.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolecall.core.errors import JournalCorrupt
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import PAYLOADS
from rolecall.core.membership import Actual, Epoch, ReplicaState

Row = Mapping[str, Any] | sa.RowMapping

WALL_MAX = 253_402_300_799.0
"""End of the year 9999, the largest date. Later times, and those before 1970, are invalid."""


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped surrogate; most are halves of a valid pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedLine:
    """A line of the chain that cannot be read."""

    seq: int
    incident_id: str | None
    error: JournalCorrupt


@contextmanager
def reading(file: str, what: str) -> Iterator[None]:
    """Reports errors of reading in the block as damage of `what` in `file`.

    Raises:
        JournalCorrupt: names both, and the reason.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as e:
        raise JournalCorrupt(where=f"{file}: {what}", reason=f"cannot be read: {e}") from e


def event_of(row: Row, file: str) -> Event:
    """Raises JournalCorrupt: the row is not what `append` writes, or its body does not fit its kind."""
    with reading(file, f"events line {row['seq']}"):
        wall_at = float(row["wall_at"])
        if not 0.0 <= wall_at <= WALL_MAX:
            raise ValueError(f"invalid time {wall_at:g}")
        return Event(
            seq=row["seq"],
            wall_at=wall_at,
            payload=PAYLOADS[EventKind(row["kind"])].read(_body(row["body"])),
            incident_id=row["incident_id"],
            caused_by=row["caused_by"],
            key=row["key"],
            hash=row["hash"],
        )


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each unpaired surrogate, which cannot be encoded: a byte of an argument, name or log line
    that is not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _body(text: str) -> dict[str, Any]:
    """As written by `append`: no NaN. An unpaired surrogate can be written there, but not encoded."""
    body = _JSON.decode(text)
    if _SURROGATES.search(text):
        body = json.loads(whole_characters(json.dumps(body, ensure_ascii=False)))
    if not isinstance(body, dict):
        raise TypeError(f"its body is {type(body).__name__}, not a mapping")
    return body


def actual_of(row: Row, file: str) -> Actual:
    """Raises JournalCorrupt: the row is not what `set_actual` writes."""
    with reading(file, f"actual record of {row['replica']}#{row['incarnation']}"):
        return Actual(**{**row, "state": ReplicaState(row["state"]), "node": NodeId(row["node"])})


def epoch_of(row: Row, file: str) -> Epoch:
    """Raises JournalCorrupt: the row is not what `grow_epoch` writes."""
    with reading(file, f"epoch {row['number']}"):
        members = tuple((ReplicaId(r), int(i)) for r, i in json.loads(row["members"]))
        return Epoch(number=row["number"], members=members, because=row["because"], wall_at=row["wall_at"])


def packed(value: Any) -> bytes:
    """A window as it is stored: JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def unpacked(blob: bytes, file: str, what: str) -> Any:
    """The inverse of `packed`. Raises JournalCorrupt."""
    with reading(file, what):
        return json.loads(zlib.decompress(blob))
