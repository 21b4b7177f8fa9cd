"""Payloads and events for tests that care about some of their fields."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import PAYLOADS, Payload

DIAGNOSIS = Diagnosis(
    suspects=(), fault_class=FaultClass.CANNOT_TELL, onset=0.0, detected_at=0.0, confidence=0.5, because="for a test"
)
PLAN = Plan(incident_id=IncidentId("inc-1"), action=ActionKind.TOLERATE, targets=(), because="for a test")


def filled(kind: EventKind, body: Mapping[str, Any] | None = None) -> Payload:
    """The payload of `kind` with the fields of `body`, as they are stored, and blanks for the others that it needs.

    Raises:
        ValueError, TypeError, KeyError: `body` does not fit.
    """
    body, blank = dict(body or {}), dict(_blank_body(kind))
    if isinstance(body.get("plan"), Mapping) and "digest" in blank:
        blank["digest"] = Plan.from_dict(body["plan"]).digest
    return PAYLOADS[kind].read(_merged(blank, body))


def made_event(*, kind: EventKind, body: Mapping[str, Any] | None = None, **more: Any) -> Event:
    """An event of `filled(kind, body)`; `more`: the event's other fields."""
    return Event(payload=filled(kind, body), **{"seq": 1, "wall_at": 0.0, **more})


def _merged(blank: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    parts = {k: _merged(blank[k], v) for k, v in body.items() if isinstance(v, dict) and isinstance(blank.get(k), dict)}
    return {**blank, **body, **parts}


@cache
def _blank_body(kind: EventKind) -> dict[str, Any]:
    return _blank(PAYLOADS[kind].payload)


def _blank(of: Any) -> dict[str, Any]:
    hints = get_type_hints(of)
    return {f.name: _blank_value(hints[f.name]) for f in fields(of) if f.default is MISSING}


def _blank_value(hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _blank_value(args[0])
    if origin is UnionType:
        return None
    if origin in (tuple, Mapping):
        return () if origin is tuple else {}
    if hint in (Diagnosis, Plan):
        return DIAGNOSIS if hint is Diagnosis else PLAN
    return _blank(hint) if is_dataclass(hint) else hint()
