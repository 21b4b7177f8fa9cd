"""What was said and found of each node: quarantines, drains, burn-ins, in the order of the journal. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.events import Event, EventKind

_K = EventKind
_WHAT: Mapping[EventKind, str] = {
    _K.NODE_QUARANTINED: "quarantined",
    _K.NODE_DRAINED: "drained",
    _K.NODE_RETURNED: "returned",
    _K.NODE_BURNED_IN: "burned in",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a burn-in."""

    name: str
    passed: bool
    because: str
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnIn:
    at: float  # wall seconds, when it was written down
    passed: bool
    seconds: float
    by: str
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One thing that a person (or a program under a name) said of the node."""

    at: float
    what: str
    by: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Newest last, in all that is a list."""

    node: str
    quarantine: Said | None = None  # what it is in quarantine by; None: it is not
    said: tuple[Said, ...] = ()
    burn_ins: tuple[BurnIn, ...] = ()


def pasts(events: Iterable[Event]) -> dict[str, Past]:
    """Node -> what its events tell. A drain is a quarantine, too."""
    found: dict[str, Past] = {}
    for event in events:
        node = event.body.get("node")
        if event.kind not in _WHAT or not isinstance(node, str):
            continue
        past = found.get(node) or Past(node=node)
        said = Said(
            at=event.wall_at,
            what=_WHAT[event.kind],
            by=str(event.body.get("by", "")),
            because=str(event.body.get("because", "")),
        )
        if event.kind is _K.NODE_BURNED_IN:
            burn_in = _burn_in(event)
            past = replace(past, burn_ins=(*past.burn_ins, burn_in))
            said = replace(said, because="passed" if burn_in.passed else "failed")
        elif event.kind is _K.NODE_RETURNED:
            past = replace(past, quarantine=None)
        else:
            past = replace(past, quarantine=past.quarantine or said)
        found[node] = replace(past, said=(*past.said, said))
    return found


def quarantined(events: Iterable[Event]) -> dict[str, Said]:
    """Node -> who put it into quarantine, and why."""
    return {node: past.quarantine for node, past in pasts(events).items() if past.quarantine is not None}


def _burn_in(event: Event) -> BurnIn:
    body = event.body
    checks = body.get("checks")
    return BurnIn(
        at=event.wall_at,
        passed=body.get("passed") is True,
        seconds=_number(body.get("seconds")),
        by=str(body.get("by", "")),
        checks=tuple(_check(c) for c in checks if isinstance(c, Mapping)) if isinstance(checks, list) else (),
    )


def _check(c: Mapping[str, Any]) -> Check:
    values = c.get("values")
    told = ", ".join(f"{k} {v}" for k, v in sorted(values.items())) if isinstance(values, Mapping) else ""
    return Check(
        name=str(c.get("name", "")), passed=c.get("passed") is True, because=str(c.get("because", "")), values=told
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
