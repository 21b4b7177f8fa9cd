"""What Prometheus says of nodes and GPUs now, asked in a thread of its own: a page never waits for a server that is away."""

import threading
from dataclasses import dataclass, field, replace

from rolecall.core.clock import Clock
from rolecall.core.errors import RolecallError
from rolecall.dashboards.data.hardware import FleetMetrics, Sample, live_of, of_run, samples
from rolecall.detector.sources.prometheus_api import (
    Client,
    PrometheusClientLimits,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
)

ASK_SECONDS = 10.0
"""Between two rounds of questions. Counters of hardware move slowly, and the server has other readers."""
FIRST_SECONDS = 0.7
"""How long the first page waits for the first answer."""
LIMITS = PrometheusClientLimits(answer_bytes_max=8 << 20, connect_seconds=2.0, answer_seconds=5.0, patience_seconds=0.0)
COUNTS = "sum by (node, instance, gpu, xid) (rolecall_xid_events_total)"
LAST_SEEN = "max by (node, instance, gpu, xid) (rolecall_xid_last_timestamp_seconds)"
LOST_GPUS = "min by (node, instance, gpu) (rolecall_gpu_up) == 0"
AGENTS = (
    "up * on (job, instance) group_left (node) "
    "group by (job, instance, node) (last_over_time(rolecall_agent_build_info[1d]))"
)
"""An agent that is away tells its node no more: the last that it told counts."""
DCGM = "max by (hostname, Hostname, instance, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMetricsSnapshot:
    """The newest answers. `away`: why there are none newer, empty when all is well; `at`: wall seconds of the answers."""

    live: FleetMetrics = field(default_factory=FleetMetrics)
    at: float | None = None
    away: str = ""


class FleetMetricsPoller:
    """Thread-safe; one a process and server."""

    def __init__(self, url: str, authorization: str, clock: Clock, run_id: str = "") -> None:
        self._url, self._authorization, self._clock, self._run_id = url, authorization, clock, run_id
        self._lock = threading.Lock()
        self._seen = FleetMetricsSnapshot()
        self._asked_at: float | None = None
        self._answered = threading.Event()

    def look(self) -> FleetMetricsSnapshot:
        """The newest answers; asks anew when they are old. Waits for the very first ones, and not for long."""
        with self._lock:
            now = self._clock.monotonic()
            first = self._asked_at is None
            if self._asked_at is None or now - self._asked_at >= ASK_SECONDS:
                self._asked_at = now
                self._answered.clear()
                threading.Thread(target=self._ask, name="fleet-prometheus", daemon=True).start()
        if first:
            self._answered.wait(FIRST_SECONDS)
        return self._seen

    def wait(self, seconds: float) -> bool:
        """Whether the round of questions under way was answered within so long."""
        return self._answered.wait(seconds)

    def _ask(self) -> None:
        try:
            live = self._live()
            self._seen = FleetMetricsSnapshot(live=live, at=self._clock.wall())
        except (PrometheusUnavailable, PrometheusResponseTooLarge, RolecallError) as e:
            self._seen = replace(self._seen, away=str(e))
        finally:
            self._answered.set()

    def _live(self) -> FleetMetrics:
        client = Client(self._url, self._clock, authorization=self._authorization, limits=LIMITS)
        try:

            def asked(expression: str) -> list[Sample]:
                return samples(client.ask("query", {"query": expression}, lambda: False))

            answers = [asked(e) for e in (COUNTS, LAST_SEEN, LOST_GPUS, AGENTS, DCGM)]
            return live_of(*(of_run(found, self._run_id) for found in answers))
        finally:
            client.close()
