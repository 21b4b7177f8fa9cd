"""Validates an agent's responses: types, finite numbers, ids, and that it reports only its own node.

Detectors subtract, compare and format these fields, so a wrong type must be rejected here, with a reason.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, TypeVar

from rolecall.core.columns import GPUS, HOSTS, PROCESSES, Column, Layout, S
from rolecall.core.errors import InvalidId
from rolecall.core.ids import ID_PATTERN, NodeId, ProcessId, split_replica
from rolecall.core.telemetry import (
    HEALTH_SIGNS,
    WIRE_VERSION,
    AgentEvent,
    AgentEventKind,
    EventBatch,
    GpuSample,
    HostSample,
    ProcessSample,
    SampleBatch,
)

logger = logging.getLogger(__name__)

MAY_BE_UNFINITE = frozenset({"loss", "grad_norm", "reward", *HEALTH_SIGNS})
"""Values that may be NaN or infinite when training diverges."""
TEXT_MAX = 4096
"""Characters in one text field."""
DETAIL_MAX = 32
"""Entries in an event's detail."""
PIDS_MAX = 256
"""Processes that share one GPU."""
KIND_MAX = 64
"""Characters in the kind of an event."""
ROWS_MAX = 1 << 16
"""Per block of columns: an agent holds no more samples (`agent.samples.NUM_SAMPLES_KEPT`)."""
NUMBER_MAX = float(1 << 62)

T = TypeVar("T")


class InvalidAgentResponse(ValueError):
    """An invalid response of an agent; the message gives the field and the reason."""


class OtherNode(InvalidAgentResponse):
    """The agent is that of another node."""


def checked_events(value: object, node: str) -> EventBatch:
    """Raises InvalidAgentResponse."""
    response = _mapping(value, "events")
    version = response.get("version", 1)
    if not isinstance(version, int) or abs(version - WIRE_VERSION) > 1:
        raise InvalidAgentResponse(f"version: the agent has {repr(version)[:20]}, this watcher {WIRE_VERSION}")
    events = response.get("events")
    if not isinstance(events, list):
        raise InvalidAgentResponse(f"events: expected a list, got {type(events).__name__}")
    _check_fields(response, _EVENTS, "events")
    _own(response["node"], node)
    events = _good(events, lambda e: _check_event(_mapping(e, "event"), node), lambda e: _number_of(e, node))
    return _built(EventBatch.from_dict, {**response, "events": events})


def checked_news(value: object, node: str) -> tuple[SampleBatch, EventBatch]:
    """Response of `/v1/news`: samples as columns (rolecall.core.columns), and events. Raises InvalidAgentResponse."""
    response = _mapping(value, "news")
    events = checked_events(response, node)
    _check_fields(response, _NEWS, "news")
    batch = SampleBatch(
        node=events.node,
        agent_pid=events.agent_pid,
        cursor=response["cursor"],
        lost=response["samples_lost"],
        at=events.at,
        wall_at=events.wall_at,
        processes=checked_columns(PROCESSES, response.get("processes"), events.node, "processes"),
        hosts=checked_columns(HOSTS, response.get("hosts"), events.node, "hosts"),
        gpus=checked_columns(GPUS, response.get("gpus"), events.node, "gpus"),
    )
    return batch, events


def checked_columns(layout: Layout[S], value: object, node: NodeId, what: str) -> tuple[S, ...]:
    """Decodes one block of `Layout.encode`; None has no rows. Invalid rows are dropped as in `_good`. Raises
    InvalidAgentResponse."""
    if value is None:
        return ()
    block = _mapping(value, what)
    num_rows, columns = block.get("rows"), _mapping(block.get("columns"), f"{what}.columns")
    if type(num_rows) is not int or not 0 < num_rows <= ROWS_MAX:
        raise InvalidAgentResponse(f"{what}.rows: expected a number from 1 to {ROWS_MAX}, got {repr(num_rows)[:60]}")
    for name, column in layout.columns.items():
        if name not in columns and column.default is MISSING:
            raise InvalidAgentResponse(f"{what}.{name}: missing")
        if isinstance(columns.get(name), list) and len(columns[name]) != num_rows:
            raise InvalidAgentResponse(f"{what}.{name}: expected {num_rows} values, got {len(columns[name])}")
    known = [(column, columns[name]) for name, column in layout.columns.items() if name in columns]
    if all(_column_is(column, value) for column, value in known) and _ids_are(columns, num_rows):
        return layout.build(node, num_rows, columns)
    check = _CHECKS[layout.cls]
    good = _good(layout.rows(node, num_rows, columns), lambda row: check(row, node))
    return tuple(_built(layout.cls.from_dict, row) for row in good)


def _column_is(column: Column, value: object) -> bool:
    """Whether every value of a column is valid for its field: a few calls into C for any number of rows."""
    if column.kind is tuple:
        return isinstance(value, list) and all(isinstance(v, list) and _are_pids(v) for v in value)
    values = value if isinstance(value, list) else [value]
    kinds = set(map(type, values))
    if column.kind is float:
        if type(None) in kinds:
            if not column.may_be_nan:
                return False
            values = [v for v in values if v is not None]
        return kinds <= {float, int, type(None)} and (not values or _bounded(values, column.name))
    if kinds != {column.kind}:
        return False
    if column.kind is str:
        return max(map(len, values)) <= TEXT_MAX
    return column.kind is bool or _bounded(values, column.name)


def _bounded(numbers: list[Any], name: str) -> bool:
    if name in MAY_BE_UNFINITE:
        return all(_is(n, float, name) for n in numbers)
    # A sum of bounded numbers cannot overflow: it is finite exactly when all of them are. NaN would pass min and max.
    return min(numbers) >= -NUMBER_MAX and max(numbers) <= NUMBER_MAX and math.isfinite(sum(numbers))


def _are_pids(pids: list[Any]) -> bool:
    return len(pids) <= PIDS_MAX and all(_is(pid, int, "pid") and pid > 0 for pid in pids)


def _ids_are(columns: Mapping[str, Any], num_rows: int) -> bool:
    """Whether every row names a replica of its role; True for columns without roles."""
    if "role" not in columns:
        return True
    role, replica = columns["role"], columns["replica"]
    if isinstance(role, str) and isinstance(replica, str):
        return _is_replica_of(replica, role)
    roles, replicas = ([v] * num_rows if isinstance(v, str) else v for v in (role, replica))
    return all(itertools.starmap(_is_replica_of, set(zip(replicas, roles, strict=True))))


@lru_cache(1 << 16)
def _is_replica_of(replica: str, role: str) -> bool:
    try:
        _check_ids(role, replica)
    except InvalidAgentResponse:
        return False
    return True


def checked_event(value: object) -> AgentEvent:
    """One event from a file, of any node. Raises InvalidAgentResponse."""
    event = _mapping(value, "event")
    _check_event(event, str(event.get("node", "")))
    return _built(AgentEvent.from_dict, event)


def _good(
    rows: list[Any], check: Callable[[Any], None], instead: Callable[[Any], list[Any]] = lambda _: []
) -> list[Any]:
    """The valid rows, and what is read `instead` of each invalid one: one process with invalid values must hide neither
    the others nor, where it is the only one, its node."""
    found, num_invalid, first = [], 0, None
    for row in rows:
        try:
            check(row)
        except InvalidAgentResponse as e:
            num_invalid, first = num_invalid + 1, first or e
            found += instead(row)
        else:
            found.append(row)
    if num_invalid:
        logger.warning("%d of %d rows left out: %s", num_invalid, len(rows), first)
    return found


def _number_of(event: object, node: str) -> list[dict[str, Any]]:
    """Of an invalid event, an event of kind `other` with its number and time, so that a reader gets past it; empty: it
    has none."""
    known = event if isinstance(event, dict) else {}
    bare = {"node": node, "kind": AgentEventKind.OTHER, **{k: known[k] for k in ("seq", "at", "wall_at") if k in known}}
    try:
        _check_event(bare, node)
    except InvalidAgentResponse:
        return []
    return [bare]


def _check_sample(sample: Mapping[str, Any], node: str) -> None:
    _check_process(sample.get("process"), node)
    _check_fields(sample, _SAMPLE, "sample")
    _check_ids(sample["role"], sample["replica"])


def _check_gpu(gpu: Mapping[str, Any], node: str) -> None:
    _check_fields(gpu, _GPU, "gpu")
    pids = gpu.get("pids", [])
    if not isinstance(pids, list) or not _are_pids(pids):
        raise InvalidAgentResponse(f"gpu.pids: expected at most {PIDS_MAX} numbers of processes, got {repr(pids)[:60]}")


def _check_event(event: Mapping[str, Any], node: str) -> None:
    if event.get("process") is not None:
        _check_process(event["process"], node)
    _check_fields(event, _EVENT, "event")
    _own(event["node"], node)
    kind = event.get("kind")  # an unknown kind comes from a newer agent, and becomes `other`
    if not isinstance(kind, str) or not 0 < len(kind) <= KIND_MAX:
        raise InvalidAgentResponse(f"event.kind: expected a name, got {repr(kind)[:60]}")
    if event.get("replica"):
        _check_ids(event.get("role", ""), event["replica"])
    detail = event.get("detail", {})
    if not isinstance(detail, dict) or len(detail) > DETAIL_MAX:
        raise InvalidAgentResponse(f"event.detail: expected at most {DETAIL_MAX} texts")
    for k, v in detail.items():
        if not isinstance(v, str) or len(k) > TEXT_MAX or len(v) > TEXT_MAX:
            raise InvalidAgentResponse(f"event.detail.{k[:40]}: expected a text of at most {TEXT_MAX} characters")


def _check_process(value: object, node: str) -> None:
    process = _mapping(value, "process")
    if set(process) != {"node", "pid", "start_ticks"}:
        raise InvalidAgentResponse("process: expected node, pid and start_ticks")
    _check_fields(process, _PROCESS, "process")
    _own(process["node"], node)


def _check_ids(role: str, replica: str) -> None:
    try:
        named, _ = split_replica(replica)
    except InvalidId as e:
        raise InvalidAgentResponse(str(e)) from None
    if named != role:
        raise InvalidAgentResponse(f"replica: {replica!r} is not of role {role!r}")


def _own(said: str, node: str) -> None:
    if said != node:
        raise OtherNode(f"node: the agent of {node} answers for {said[:64]!r}")
    if not ID_PATTERN.match(said):
        raise InvalidAgentResponse(f"node: {said[:64]!r} is not an id")


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidAgentResponse(f"{what}: expected a mapping, got {type(value).__name__}")
    return value


_Fields = dict[str, tuple[type, bool]]
"""name -> (type, whether it is required)"""


def _plain_fields(cls: type) -> _Fields:
    """The int, float, str and bool fields of a dataclass, with their types."""
    types: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "NodeId": str}
    found: _Fields = {}
    for field in fields(cls):
        kind = field.type if isinstance(field.type, type) else types.get(str(field.type))
        named = kind.__name__ if kind else getattr(field.type, "__name__", "")
        if named in types:
            found[field.name] = (types[named], field.default is MISSING and field.default_factory is MISSING)
    return found


_SAMPLE, _HOST, _EVENT = _plain_fields(ProcessSample), _plain_fields(HostSample), _plain_fields(AgentEvent)
_GPU = _plain_fields(GpuSample)
_NEWS: _Fields = {"cursor": (int, True), "samples_lost": (int, True)}
_PROCESS, _EVENTS = _plain_fields(ProcessId), _plain_fields(EventBatch)

_CHECKS: dict[type, Callable[[dict[str, Any], str], None]] = {
    ProcessSample: _check_sample,
    HostSample: lambda d, node: _check_fields(d, _HOST, "host"),
    GpuSample: _check_gpu,
}
"""Per row."""
_ABSENT: Any = object()


def _check_fields(values: Mapping[str, Any], wanted: _Fields, what: str) -> None:
    for name, (kind, required) in wanted.items():
        value = values.get(name, _ABSENT)
        if value is _ABSENT:
            if required:
                raise InvalidAgentResponse(f"{what}.{name}: missing")
            continue
        of: type = type(value)
        if of is kind:  # fast path: one thread reads a thousand agents
            if kind is str:
                if len(value) <= TEXT_MAX:
                    continue
            elif kind is bool or -NUMBER_MAX <= value <= NUMBER_MAX:  # false for NaN
                continue
        if not _is(value, kind, name):
            raise InvalidAgentResponse(f"{what}.{name}: expected {kind.__name__}, got {repr(value)[:60]}")


def _is(value: object, kind: type, name: str) -> bool:
    if kind is str:
        return isinstance(value, str) and len(value) <= TEXT_MAX
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    if isinstance(value, int):  # JSON integers have any length: math cannot convert every one
        return abs(value) <= NUMBER_MAX
    if kind is int or not isinstance(value, float):
        return False
    return name in MAY_BE_UNFINITE or (math.isfinite(value) and abs(value) <= NUMBER_MAX)


def _built(build: Callable[[dict[str, Any]], T], values: dict[str, Any]) -> T:
    try:
        return build(values)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InvalidAgentResponse(f"{type(e).__name__}: {e}") from None
