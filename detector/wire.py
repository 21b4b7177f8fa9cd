"""Checks what an agent sent before it becomes a value: types, finite numbers, ids, and that it speaks for its own node.

A detector subtracts, compares and formats these fields; a text where a number is meant must stop here, with a reason.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from rolecall.core.errors import BadId
from rolecall.core.ids import ID_PATTERN, ProcessId, split_replica
from rolecall.core.telemetry import WIRE_VERSION, AgentEvent, EventBatch, HostSample, ProcessSample, SampleBatch

logger = logging.getLogger(__name__)

MAY_BE_UNFINITE = frozenset({"loss", "grad_norm", "reward"})
"""What a diverged training reports as it is."""
TEXT_MAX = 4096
"""Characters in one text field."""
DETAIL_MAX = 32
"""Entries in an event's detail."""
KIND_MAX = 64
"""Characters in the kind of an event."""
NUMBER_MAX = float(1 << 62)


T = TypeVar("T")


class BadAnswer(ValueError):
    """Which field of an agent's answer is wrong, and how."""


def checked_batch(value: object, node: str) -> SampleBatch:
    """Raises BadAnswer."""
    d = _mapping(value, "batch")
    _check_version(d)
    processes = _good(_list(d, "processes"), lambda p: _check_sample(_mapping(p, "sample"), node))
    hosts = _good(_list(d, "hosts"), lambda h: _check_fields(_mapping(h, "host"), _HOST, "host"))
    _check_fields(d, _BATCH, "batch")
    _own(d["node"], node)
    return _built(SampleBatch.from_dict, {**d, "processes": processes, "hosts": hosts})


def checked_events(value: object, node: str) -> EventBatch:
    """Raises BadAnswer."""
    d = _mapping(value, "events")
    _check_version(d)
    events = _good(_list(d, "events"), lambda e: _check_event(_mapping(e, "event"), node))
    _check_fields(d, _EVENTS, "events")
    _own(d["node"], node)
    return _built(EventBatch.from_dict, {**d, "events": events})


def checked_event(value: object) -> AgentEvent:
    """One event as it lies in a file, of whichever node it says. Raises BadAnswer."""
    d = _mapping(value, "event")
    _check_event(d, str(d.get("node", "")))
    return _built(AgentEvent.from_dict, d)


def _check_version(d: Mapping[str, Any]) -> None:
    version = d.get("version", 1)
    if not isinstance(version, int) or abs(version - WIRE_VERSION) > 1:
        raise BadAnswer(f"version: it speaks {repr(version)[:20]}, this watcher {WIRE_VERSION}")


def _good(rows: list[Any], check: Callable[[Any], None]) -> list[Any]:
    """The rows that pass: one process that writes nonsense must not hide its neighbours. When none passes, the agent
    itself is at fault, and the first reason is raised."""
    passed, first = [], None
    for row in rows:
        try:
            check(row)
        except BadAnswer as e:
            first = first or e
        else:
            passed.append(row)
    if first is not None and not passed:
        raise first
    if first is not None:
        logger.warning("%d of %d rows left out: %s", len(rows) - len(passed), len(rows), first)
    return passed


def _check_sample(d: Mapping[str, Any], node: str) -> None:
    _check_process(d.get("process"), node)
    _check_fields(d, _SAMPLE, "sample")
    _check_ids(d["role"], d["replica"])


def _check_event(d: Mapping[str, Any], node: str) -> None:
    if d.get("process") is not None:
        _check_process(d["process"], node)
    _check_fields(d, _EVENT, "event")
    _own(d["node"], node)
    kind = d.get("kind")  # one that is not known here is of a later agent, and becomes `other`
    if not isinstance(kind, str) or not 0 < len(kind) <= KIND_MAX:
        raise BadAnswer(f"event.kind: expected a name, got {repr(kind)[:60]}")
    if d.get("replica"):
        _check_ids(d.get("role", ""), d["replica"])
    detail = d.get("detail", {})
    if not isinstance(detail, dict) or len(detail) > DETAIL_MAX:
        raise BadAnswer(f"event.detail: expected at most {DETAIL_MAX} texts")
    for k, v in detail.items():
        if not isinstance(v, str) or len(k) > TEXT_MAX or len(v) > TEXT_MAX:
            raise BadAnswer(f"event.detail.{k[:40]}: expected a text of at most {TEXT_MAX} characters")


def _check_process(value: object, node: str) -> None:
    d = _mapping(value, "process")
    if set(d) != {"node", "pid", "start_ticks"}:
        raise BadAnswer("process: expected node, pid and start_ticks")
    _check_fields(d, _PROCESS, "process")
    _own(d["node"], node)


def _check_ids(role: str, replica: str) -> None:
    try:
        named, _ = split_replica(replica)
    except BadId as e:
        raise BadAnswer(str(e)) from None
    if named != role:
        raise BadAnswer(f"replica: {replica!r} is not of role {role!r}")


def _own(said: str, node: str) -> None:
    if said != node:
        raise BadAnswer(f"node: the agent of {node} speaks for {said[:64]!r}")
    if not ID_PATTERN.match(said):
        raise BadAnswer(f"node: {said[:64]!r} is no id")


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadAnswer(f"{what}: expected a mapping, got {type(value).__name__}")
    return value


def _list(d: Mapping[str, Any], name: str) -> list[Any]:
    value = d.get(name)
    if not isinstance(value, list):
        raise BadAnswer(f"{name}: expected a list, got {type(value).__name__}")
    return value


_Fields = dict[str, tuple[type, bool]]
"""name -> (type, whether it must be there)"""


def _plain_fields(cls: type) -> _Fields:
    """The fields of a dataclass that are numbers, texts and truths, with their types."""
    types: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "NodeId": str}
    found: _Fields = {}
    for f in fields(cls):
        kind = f.type if isinstance(f.type, type) else types.get(str(f.type))
        named = kind.__name__ if kind else getattr(f.type, "__name__", "")
        if named in types:
            found[f.name] = (types[named], f.default is MISSING and f.default_factory is MISSING)
    return found


_SAMPLE, _HOST, _EVENT = _plain_fields(ProcessSample), _plain_fields(HostSample), _plain_fields(AgentEvent)
_PROCESS, _BATCH, _EVENTS = _plain_fields(ProcessId), _plain_fields(SampleBatch), _plain_fields(EventBatch)


_ABSENT: Any = object()


def _check_fields(d: Mapping[str, Any], wanted: _Fields, what: str) -> None:
    for name, (kind, required) in wanted.items():
        value = d.get(name, _ABSENT)
        if value is _ABSENT:
            if required:
                raise BadAnswer(f"{what}.{name}: missing")
            continue
        of: type = type(value)
        if of is kind:  # nearly always: a thousand agents are read by one thread
            if kind is str:
                if len(value) <= TEXT_MAX:
                    continue
            elif kind is bool or -NUMBER_MAX <= value <= NUMBER_MAX:  # NaN is not
                continue
        if not _is(value, kind, name):
            raise BadAnswer(f"{what}.{name}: expected {kind.__name__}, got {repr(value)[:60]}")


def _is(value: object, kind: type, name: str) -> bool:
    if kind is str:
        return isinstance(value, str) and len(value) <= TEXT_MAX
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    if kind is int:
        return isinstance(value, int) and abs(value) <= NUMBER_MAX
    if not isinstance(value, (int, float)):
        return False
    return name in MAY_BE_UNFINITE or (math.isfinite(value) and abs(value) <= NUMBER_MAX)


def _built(build: Callable[[dict[str, Any]], T], d: dict[str, Any]) -> T:
    try:
        return build(d)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadAnswer(f"{type(e).__name__}: {e}") from None
