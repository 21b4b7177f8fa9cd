"""Detector state to plain JSON and back, so that a stored window replays from its initial state.

Only the classes listed here are encoded or constructed; nothing is unpickled. A dataclass becomes {"@": name, ...},
a mapping [["k", "v"], ...] under "@map", a tuple, set or deque a tagged list.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEvent, ProcessSample
from rolecall.detector.live.deadlines import ProgressGaps
from rolecall.detector.live.fleet import MonitoredProcesses, ReceivedException
from rolecall.detector.live.stages.collapse import CollapseWatch
from rolecall.detector.live.stages.nccl_ras import StalledCommunicator, StalledCommunicators
from rolecall.detector.live.stages.node_faults import NodeFault, NodeFaults
from rolecall.detector.live.stages.panels import PanelFault
from rolecall.detector.live.stages.slow import LoadBaseline, SlowState
from rolecall.detector.live.subject import MonitoredProcess, ProgressClocks, SlowMeter

PLAIN: dict[str, type] = {
    c.__name__: c
    for c in (
        LoadBaseline,
        ProgressClocks,
        MonitoredProcesses,
        ProgressGaps,
        StalledCommunicators,
        NodeFault,
        NodeFaults,
        PanelFault,
        ProcessId,
        ReceivedException,
        SlowMeter,
        SlowState,
        StalledCommunicator,
        MonitoredProcess,
    )
}
"""Encoded field by field; derived fields (`init=False`) are recomputed."""
OWN: dict[str, tuple[type, Callable[[dict[str, Any]], Any]]] = {
    "AgentEvent": (AgentEvent, AgentEvent.from_dict),
    "CollapseWatch": (CollapseWatch, CollapseWatch.from_dict),
    "Diagnosis": (Diagnosis, Diagnosis.from_dict),
    "Finding": (Finding, Finding.from_dict),
    "ProcessSample": (ProcessSample, ProcessSample.from_dict),
}
"""Classes with their own `to_dict` and `from_dict`."""


def encode(value: Any) -> Any:
    if value is None or (isinstance(value, (str, bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"@": "float", "v": repr(value)}
    if isinstance(value, Enum):
        return str(value)
    name = type(value).__name__
    if name in OWN:
        return {"@": name, "v": value.to_dict()}
    if name in PLAIN and is_dataclass(value):
        return {"@": name, **{f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init}}
    if isinstance(value, dict):
        return {"@": "map", "v": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, deque):
        return {"@": "deque", "n": value.maxlen, "v": [encode(v) for v in value]}
    if isinstance(value, (set, frozenset)):
        return {"@": "set", "v": [encode(v) for v in sorted(value)]}
    if isinstance(value, tuple):
        return {"@": "tuple", "v": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    raise TypeError(f"detector state holds a {name}, which has no stored form")


def decode(value: Any) -> Any:
    """Raises ValueError on an unknown tag."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("@")
    if tag == "map":
        return {decode(k): decode(v) for k, v in value["v"]}
    if tag == "deque":
        return deque((decode(v) for v in value["v"]), maxlen=value["n"])
    if tag == "set":
        return {decode(v) for v in value["v"]}
    if tag == "tuple":
        return tuple(decode(v) for v in value["v"])
    if tag == "float":
        return float(value["v"])
    if tag in OWN:
        return OWN[tag][1](value["v"])
    if tag in PLAIN:
        wanted = {f.name for f in fields(PLAIN[tag]) if f.init}
        return PLAIN[tag](**{k: decode(v) for k, v in value.items() if k in wanted})
    raise ValueError(f"unknown tag {tag!r} in stored detector state")
