"""Many samples of one class as columns: a list for each field, one value where all agree, nothing where all have the
default.

A node's sixteen ranks agree in half of their fields, and a list of numbers is read and checked by a few calls into C
where sixteen mappings take hundreds: a watch of a thousand nodes lives on the difference (docs/decisions/0021).
JSON has no NaN: it is null here.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from itertools import repeat
from math import isnan
from operator import attrgetter, call
from typing import Any, Generic, TypeVar

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import GpuSample, HostSample, ProcessSample

S = TypeVar("S", ProcessSample, HostSample, GpuSample)

NAN = float("nan")
PROCESS_IDS_KEPT = 1 << 17


@dataclass(frozen=True, slots=True)
class Column:
    """A field as it is sent. `kind`: int, float, str, bool; tuple: a list of whole numbers in each row."""

    name: str
    kind: type
    default: Any
    may_be_nan: bool  # and is then null


class Layout(Generic[S]):
    """How samples of one class become columns, and columns samples. The sender identifies the node."""

    def __init__(self, cls: type[S]) -> None:
        self.cls: type[S] = cls
        self.columns: dict[str, Column] = {}
        paths = []
        for field in fields(cls):
            if field.name == "process":
                self.columns |= {n: Column(n, int, MISSING, False) for n in ("pid", "start_ticks")}
                paths += ["process.pid", "process.start_ticks"]
            elif field.name != "node":
                kind = field.type if field.type in (int, float, str, bool) else tuple
                assert isinstance(kind, type)
                self.columns[field.name] = Column(
                    field.name,
                    kind,
                    field.default,
                    kind is float and field.default is not MISSING and isnan(field.default),
                )
                paths.append(field.name)
        self._values = attrgetter(*paths)
        self._setters = {f.name: getattr(cls, f.name).__set__ for f in fields(cls)}

    def sample(self, values: Sequence[Any]) -> S:
        """One sample from the values of all fields in order: half the cost of the constructor of a frozen class."""
        made = self.cls.__new__(self.cls)
        deque(map(call, self._setters.values(), repeat(made), values), maxlen=0)
        return made

    def encode(self, samples: Sequence[S]) -> dict[str, Any]:
        """`{"rows": number, "columns": {name: list or value}}`."""
        sent_columns: dict[str, Any] = {}
        for column, values in zip(self.columns.values(), zip(*map(self._values, samples), strict=True), strict=False):
            sent = tuple(None if isnan(v) else v for v in values) if column.may_be_nan else values
            if sent.count(sent[0]) < len(sent):
                sent_columns[column.name] = list(sent)  # JSON makes lists of tuples
            elif sent[0] != (None if column.may_be_nan else column.default):
                sent_columns[column.name] = list(sent) if column.kind is tuple else sent[0]
        return {"rows": len(samples), "columns": sent_columns}

    def build(self, node: NodeId, num_rows: int, columns: Mapping[str, Any]) -> tuple[S, ...]:
        """The samples from validated columns (wire.py): lists of `num_rows` values, or one common value.

        Fields are set one column at a time, without the constructor: 5.2 us a sample, with the constructor 6.7 (sixteen
        ranks).
        """
        made = [self.cls.__new__(self.cls) for _ in range(num_rows)]
        for name, column in self.columns.items():
            if name in self._setters:
                values = _each(columns.get(name, column.default), num_rows)
                _set_all(self._setters[name], made, map(tuple, values) if column.kind is tuple else values)
        if "process" in self._setters:
            pids, starts = (_each(columns[n], num_rows) for n in ("pid", "start_ticks"))
            _set_all(self._setters["process"], made, map(_process_id, repeat(node), pids, starts))
        else:
            _set_all(self._setters["node"], made, repeat(node, num_rows))
        return tuple(made)

    def rows(self, node: NodeId, num_rows: int, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same as mappings, in the form of `to_dict`, without validation."""
        made: list[dict[str, Any]] = [{} for _ in range(num_rows)]
        for name in self.columns.keys() & columns.keys():
            for row, value in zip(made, _each(columns[name], num_rows), strict=False):
                row[name] = value
        for row in made:
            if "process" in self._setters:
                row["process"] = {"node": node, **{n: row.pop(n) for n in ("pid", "start_ticks") if n in row}}
            else:
                row["node"] = node
        return made


def _each(value: Any, num_rows: int) -> Iterator[Any]:
    """One value a row."""
    if not isinstance(value, list):
        return repeat(NAN if value is None else value, num_rows)
    return (NAN if v is None else v for v in value) if None in value else iter(value)


def _set_all(setter: Any, made: list[Any], values: Iterator[Any]) -> None:
    deque(map(setter, made, values), maxlen=0)


@lru_cache(PROCESS_IDS_KEPT)
def _process_id(node: NodeId, pid: int, start_ticks: int) -> ProcessId:
    return ProcessId(node=node, pid=pid, start_ticks=start_ticks)


PROCESSES, HOSTS, GPUS = Layout(ProcessSample), Layout(HostSample), Layout(GpuSample)
