"""Made-up metrics of a cluster to which everything has happened: each metric of the catalogue has a series, each
counter has moved, and nodes with our agent, with a dcgm-exporter of today and with one of before May 2026 stand side by
side.

What is rightly empty in a healthy run has data here, so that an expression can be proven to see it.
"""

from collections.abc import Iterator
from pathlib import Path

from rolecall.core.metrics.catalogue import CATALOGUE
from rolecall.core.metrics.metric import Metric, MetricScope, MetricType
from rolecall.dashboards.grafana.promql import DCGM_NAMES, OF_WATCH, RECORDED
from tests.dashboards.openmetrics import Recording

START, STEP, ROUNDS = 1_700_000_000.0, 15.0, 41
RUN = "made-up"
OURS, EXPORTED, EXPORTED_OLD = "gpu-1", "gpu-2", "gpu-3"
REPLICAS = ("rollout/0", "rollout/1", "rollout/2")

VALUES = {
    "node": (OURS,),
    "role": ("rollout",),
    "rank": ("0",),
    "gpu": ("0", "1"),
    "run": (RUN,),
    "action": ("replace",),
    "error": ("corrected", "uncorrected", "crc_flit", "crc_data", "replay", "recovery"),
    "phase": ("compute",),
    "xid": ("79",),
    "fault": ("slow",),
    "priority": ("3",),
    "mode": ("act", "observe"),
}
"""Values of labels; others have one that says which label it is."""
STATES = {
    "rolecall_replica_state": ("serving",),
    "rolecall_replicas": ("serving", "starting"),
    "rolecall_watch_agents": ("reached", "unreachable"),
    "rolecall_process_state": ("R",),
    "rolecall_incidents_open": ("open", "acting"),
}
EVENTS = ("symbol_error", "port_xmit_wait", "port_rcv_errors", "link_downed", "packet_seq_err")


def write(path: Path) -> Path:
    """As prometheus_of_demo reads it."""
    recording = Recording()
    for n in range(ROUNDS):
        at = START + n * STEP
        watch = "".join(line for m in CATALOGUE if m.subject in OF_WATCH for line in _lines(m, n, at))
        agent = "".join(line for m in CATALOGUE if m.subject not in OF_WATCH for line in _lines(m, n, at))
        recording.scraped(at, "rolecall-watch", "control:9478", (watch + _recorded()).encode())
        recording.scraped(at, "rolecall", f"{OURS}:9477", agent.encode())
        recording.scraped(at, "rolecall-dcgm", f"{OURS}:9477", _exported("hostname", OURS, n).encode())
        recording.scraped(at, "dcgm", f"{EXPORTED}:9400", _exported("hostname", EXPORTED, n).encode())
        recording.scraped(at, "dcgm", f"{EXPORTED_OLD}:9400", _exported("Hostname", EXPORTED_OLD, n).encode())
    recording.write(path)
    return path


def _recorded() -> str:
    """What the recording rules make."""
    names = list(RECORDED)
    of_role = 'role="rollout"'
    of_rank = ",".join(f'{k}="{v}"' for k, v in {"role": "rollout", "replica": REPLICAS[1], "rank": "0"}.items())
    return "".join(f"{n}{{{of_rank if n.startswith('rank:') else of_role}}} 1.5\n" for n in names)


def _lines(metric: Metric, n: int, at: float) -> Iterator[str]:
    for number, labels in enumerate(_labels(metric)):
        text = ",".join(f'{k}="{v}"' for k, v in labels.items())
        yield f"{metric.name}{{{text}}} {_value(metric, n, at, number)}\n"


def _value(metric: Metric, n: int, at: float, number: int) -> float:
    if metric.type is MetricType.COUNTER:
        return float((n + 1) * (number + 1))
    if "timestamp" in metric.name:
        return at - 5.0
    if metric.name == "rolecall_probe_up":
        return float(number == 0 and n < ROUNDS // 2)
    if metric.unit == "ratio":
        return 0.5
    return {"bytes": 2.0**30, "celsius": 60.0, "watts": 400.0, "hertz": 1.5e9}.get(metric.unit, 1.0)


def _labels(metric: Metric) -> Iterator[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for label in metric.labels:
        if label == "state":
            values = STATES.get(metric.name, ("active",))
        elif label == "replica":
            values = REPLICAS
        elif label == "name" and metric.name == "rolecall_infiniband_events_total":
            values = EVENTS
        elif label == "action" and metric.subject is MetricScope.GPU:
            values = ("gpu_reset",)
        else:
            values = VALUES.get(label, (f"some-{label}",))
        found = [{**labels, label: value} for labels in found for value in values]
    yield from found


def _exported(label: str, node: str, n: int) -> str:
    """What a dcgm-exporter says: counters and gauges alike grow a little, XID 79 has happened."""
    lines = []
    for name in sorted(DCGM_NAMES):
        for gpu in ("0", "1"):
            value = 79 if name == "DCGM_FI_DEV_XID_ERRORS" else 0.5 if "_PROF_" in name else 40 + n
            lines.append(f'{name}{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="H100",{label}="{node}"}} {value}\n')
    return "".join(lines)
