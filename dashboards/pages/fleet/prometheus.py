"""Node and GPU status from Prometheus, polled in a background thread, so a page never waits for the server."""

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
"""Poll interval. Hardware counters change slowly, and the server has other clients."""
FIRST_SECONDS = 0.7
"""How long the first page waits for the first response."""
LIMITS = PrometheusClientLimits(answer_bytes_max=8 << 20, connect_seconds=2.0, answer_seconds=5.0, patience_seconds=0.0)
COUNTS = "sum by (node, instance, gpu, xid) (rolecall_xid_events_total)"
LAST_SEEN = "max by (node, instance, gpu, xid) (rolecall_xid_last_timestamp_seconds)"
LOST_GPUS = "min by (node, instance, gpu) (rolecall_gpu_up) == 0"
AGENTS = (
    "up * on (job, instance) group_left (node) "
    "group by (job, instance, node) (last_over_time(rolecall_agent_build_info[1d]))"
)
"""An agent that is down no longer reports its node, so the last reported one is used."""
DCGM = "max by (hostname, Hostname, instance, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMetricsSnapshot:
    """The latest response. `error`: why there is no newer one, empty if there is; `at`: wall seconds of the
    response."""

    live: FleetMetrics = field(default_factory=FleetMetrics)
    at: float | None = None
    error: str = ""


class FleetMetricsPoller:
    """Thread-safe; one per process and server."""

    def __init__(self, url: str, authorization: str, clock: Clock, run_id: str = "") -> None:
        self._url, self._authorization, self._clock, self._run_id = url, authorization, clock, run_id
        self._lock = threading.Lock()
        self._seen = FleetMetricsSnapshot()
        self._asked_at: float | None = None
        self._answered = threading.Event()

    def latest(self) -> FleetMetricsSnapshot:
        """The latest response; starts a new poll when it is old. Waits briefly for the very first one."""
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
        """Whether the current poll finishes within `seconds`."""
        return self._answered.wait(seconds)

    def _ask(self) -> None:
        try:
            live = self._live()
            self._seen = FleetMetricsSnapshot(live=live, at=self._clock.wall())
        except (PrometheusUnavailable, PrometheusResponseTooLarge, RolecallError) as e:
            self._seen = replace(self._seen, error=str(e))
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
