"""XIDs and lost GPUs of nodes, from incidents and from Prometheus, with the meaning of each code. Pure."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.errors import UnreadableInput
from rolecall.detector.sources.prometheus_api import PrometheusResponseTooLarge
from rolecall.formats.xid.xid import sxid, xid
from rolecall.recovery.incidents import Incident

XID = re.compile(r"\bXID (\d{1,5})\b")
SXID = re.compile(r"\bSXid (\d{1,6})\b")
GPU = re.compile(r"\bGPU (\w{1,16}(?:[:.]\w{1,16}){0,4})")
PROMETHEUS = "Prometheus"
TEXTS_MAX = 64
"""Pieces of evidence searched per incident."""

COUNTS = "sum by (node, instance, gpu, xid) (rolecall_xid_events_total)"
LAST_SEEN = "max by (node, instance, gpu, xid) (rolecall_xid_last_timestamp_seconds)"
GPUS = "min by (node, instance, gpu) (rolecall_gpu_up)"
AGENTS = (
    "up * on (job, instance) group_left (node) group by (job, instance, node) (topk by (job, instance) "
    "(1, max by (job, instance, node) (last_over_time(rolecall_agent_start_timestamp_seconds[1d]))))"
)
"""An agent that is down no longer reports its node, so the last reported one is used; of a node that was renamed, the
name that the agent started with last."""
DCGM = "max by (hostname, Hostname, instance, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidOccurrence:
    """An XID (or a switch's SXid) of one GPU of one node. `at`: wall seconds of the latest; None: unknown."""

    node: str
    gpu: str
    code: int
    switch: bool
    count: int
    at: float | None
    source: str  # an incident's id, or "Prometheus"

    @property
    def name(self) -> str:
        return f"{'SXid' if self.switch else 'XID'} {self.code}"

    @property
    def meaning(self) -> str:
        return sxid(self.code).meaning if self.switch else xid(self.code).meaning

    @property
    def fault_class(self) -> str:
        return sxid(self.code).group if self.switch else str(xid(self.code).fault_class)

    @property
    def fatal(self) -> bool:
        return sxid(self.code).fatal if self.switch else xid(self.code).fatal

    @property
    def advice(self) -> str:
        return sxid(self.code).advice if self.switch else xid(self.code).advice


def codes_of(incidents: Iterable[Incident]) -> tuple[XidOccurrence, ...]:
    """Every code in an incident's diagnosis or evidence, once per incident, for its first suspected node."""
    found = []
    for incident in incidents:
        diagnosis = incident.diagnosis
        nodes = [s.node for s in diagnosis.suspects if s.node]
        if not nodes:
            continue
        texts = [diagnosis.because, *(e.text for e in diagnosis.evidence[:TEXTS_MAX])]
        for (switch, code), (gpu, count) in _named(texts).items():
            found.append(
                XidOccurrence(
                    node=nodes[0],
                    gpu=gpu,
                    code=code,
                    switch=switch,
                    count=count,
                    at=diagnosis.detected_at,
                    source=incident.incident_id,
                )
            )
    return tuple(found)


def _named(texts: Iterable[str]) -> dict[tuple[bool, int], tuple[str, int]]:
    found: dict[tuple[bool, int], tuple[str, int]] = {}
    for text in texts:
        for pattern, switch in ((XID, False), (SXID, True)):
            for match in pattern.finditer(text):
                gpu = GPU.search(text)
                before = found.get((switch, int(match[1])), ("", 0))
                # Diagnosis and evidence quote the same event, so it is counted once.
                found[switch, int(match[1])] = (before[0] or (gpu[1] if gpu else ""), 1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMetrics:
    codes: tuple[XidOccurrence, ...] = ()
    lost_gpus: Mapping[str, tuple[str, ...]] | None = None  # node -> GPUs on which all NVML calls fail
    gpus: Mapping[str, Mapping[str, bool]] | None = None  # node -> GPU -> whether NVML answers for it
    agents: Mapping[str, bool] | None = None  # node -> whether its agent was scraped
    errors: tuple[str, ...] = ()  # of queries that failed; what they ask for is missing


def merged(codes: Iterable[XidOccurrence]) -> tuple[XidOccurrence, ...]:
    """One row per code, GPU and source type, newest first; counts from incidents are summed."""
    found: dict[tuple[bool, int, str, bool], list[XidOccurrence]] = {}
    for c in codes:
        found.setdefault((c.switch, c.code, c.gpu, c.source == PROMETHEUS), []).append(c)
    lines = []
    for same in found.values():
        newest = max(same, key=lambda c: c.at or 0.0)
        source = newest.source if len(same) == 1 else f"{len(same)} incidents, latest {newest.source}"
        lines.append(replace(newest, count=sum(c.count for c in same), source=source))
    return tuple(sorted(lines, key=lambda c: -(c.at or 0.0)))


Sample = tuple[Mapping[str, str], float]
"""Labels and value of one series of an instant query."""
Query = Callable[[str], list[Sample]]
"""Runs an instant query."""


def samples(data: Any) -> list[Sample]:
    """Samples of a Prometheus `query` response; malformed series are skipped."""
    found: list[Sample] = []
    result = data.get("result") if isinstance(data, Mapping) else None
    for series in result if isinstance(result, list) else []:
        try:
            labels = {str(k): str(v) for k, v in series["metric"].items()}
            value = float(series["value"][1])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue  # untrusted: one malformed series must not discard the others
        if math.isfinite(value):
            found.append((labels, value))
    return found


def is_of_run(labels: Mapping[str, str], run_id: str) -> bool:
    """False for series of other runs on this machine: same node names, but an `instance` of `RUN/NODE`."""
    instance = labels.get("instance", "")
    return "/" not in instance or instance.startswith(f"{run_id}/")


def of_run(found: Iterable[Sample], run_id: str) -> list[Sample]:
    return [(labels, value) for labels, value in found if is_of_run(labels, run_id)]


def fleet_metrics(ask: Query, run_id: str) -> FleetMetrics:
    """A query that the server refuses costs only its own answer. Raises UnreadableInput, PrometheusResponseTooLarge: it
    refuses all."""
    found, errors = [], []
    for expression in (COUNTS, LAST_SEEN, GPUS, AGENTS, DCGM):
        try:
            found.append(of_run(ask(expression), run_id))
        except (UnreadableInput, PrometheusResponseTooLarge) as e:
            found.append([])
            errors.append(e)
    if len(errors) == len(found):
        raise errors[0]
    return replace(live_of(*found), errors=tuple(map(str, errors)))


def live_of(
    counts: Iterable[Sample],
    last_seen: Iterable[Sample],
    gpus: Iterable[Sample],
    agents: Iterable[Sample],
    dcgm: Iterable[Sample],
) -> FleetMetrics:
    """Prefers the agent's series; uses dcgm-exporter's latest XID for nodes without XIDs from an agent."""
    at = {_key(labels): value for labels, value in last_seen}
    codes = {
        _key(labels): _code(labels, labels.get("xid", ""), int(value), at.get(_key(labels)))
        for labels, value in counts
        if value > 0
    }
    ours = {node for node, _, _ in codes}
    for labels, value in dcgm:
        theirs = {
            "node": labels.get("hostname") or labels.get("Hostname") or labels.get("node") or _host(labels),
            "gpu": labels.get("gpu", ""),
            "xid": str(int(value)),
        }
        if value > 0 and theirs["node"] not in ours:
            codes[_key(theirs)] = _code(theirs, theirs["xid"], 1, None)
    lost: dict[str, list[str]] = {}
    every: dict[str, dict[str, bool]] = {}
    for labels, value in gpus:
        every.setdefault(_node(labels), {})[labels.get("gpu", "?")] = value > 0
        if value == 0:
            lost.setdefault(_node(labels), []).append(labels.get("gpu", "?"))
    return FleetMetrics(
        codes=tuple(c for c in codes.values() if c is not None),
        lost_gpus={node: tuple(sorted(found)) for node, found in lost.items()},
        gpus=every,
        agents={_node(labels): value > 0 for labels, value in agents if _node(labels)},
    )


def _key(labels: Mapping[str, str]) -> tuple[str, str, str]:
    return _node(labels), labels.get("gpu", ""), labels.get("xid", "")


def _code(labels: Mapping[str, str], text: str, count: int, at: float | None) -> XidOccurrence | None:
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        return None
    return XidOccurrence(
        node=_node(labels),
        gpu=labels.get("gpu", ""),
        code=int(text),
        switch=False,
        count=count,
        at=at,
        source=PROMETHEUS,
    )


def _node(labels: Mapping[str, str]) -> str:
    return labels.get("node") or _host(labels)


def _host(labels: Mapping[str, str]) -> str:
    return labels.get("instance", "").rpartition(":")[0] or labels.get("instance", "")
