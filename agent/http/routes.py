"""What each path of the agent answers, from the parts that hold it."""

import math
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.gpu.samples import GpuSamples
from rolecall.agent.collectors.runner import NoSuchCollector, Probes
from rolecall.agent.events import EventLog
from rolecall.agent.evidence import EvidenceUnavailable, FlightRecorders, Stacks
from rolecall.agent.http.exposition import agent_value, all_values, build_info, render
from rolecall.agent.http.server import WAIT_SECONDS_MAX, HttpRequest, HttpRequestError, HttpResponse, Route
from rolecall.agent.registry import Registry
from rolecall.agent.sampler import Sampler
from rolecall.agent.samples import SampleRing
from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import EventBatch

LOOK_SECONDS = 0.05
"""So long after a look was due it has ended: it takes 5 ms."""
NEAR_ENOUGH = 0.5
"""Part of an interval by which an answer may come before its reader wanted it: the nearest look."""
FRESH_SECONDS_MAX = 1.0
"""A reader waits no longer than so much more than it wanted, however rarely this agent looks."""
STALE_ROUNDS = 25
"""Healthy while the newest round is younger than so many intervals (5 s at five rounds a second)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    node: NodeId
    clock: Clock
    started_wall: float
    interval_seconds: float
    ring: SampleRing
    events: EventLog
    registry: Registry
    sampler: Sampler
    stacks: Stacks
    flight: FlightRecorders
    bearer: str
    probes: Probes
    gpus: GpuSamples
    num_malformed: Callable[[], int]
    """Messages of processes that were none."""

    def table(self) -> dict[str, Route]:
        return {
            "/healthz": self.healthz,
            "/metrics": self.metrics,
            "/metrics/dcgm": self.metrics_dcgm,
            "/v1/samples": self.samples,
            "/v1/events": self.event_batch,
            "/v1/news": self.news,
            "/v1/evidence/stacks": self.evidence_stacks,
            "/v1/evidence/flight_recorder": self.evidence_flight_recorder,
            "/v1/evidence/kernel_log": self.evidence_of("kernel_log"),
            "/v1/evidence/nccl_ras": self.evidence_of("nccl_ras"),
        }

    def for_strangers(self) -> dict[str, Route]:
        """Without a user, where the agent wants one: a probe of Kubernetes or a load balancer has none."""
        return {"/healthz": self.alive}

    def alive(self, request: HttpRequest) -> HttpResponse:
        """Whether, and nothing else."""
        request.only()
        fresh, _ = self._freshness()
        return HttpResponse.json({"ok": fresh}, HTTPStatus.OK if fresh else HTTPStatus.SERVICE_UNAVAILABLE)

    def _freshness(self) -> tuple[bool, float]:
        """And how old the newest round is, seconds."""
        age = self.clock.monotonic() - self.sampler.stats.last_at
        return age < STALE_ROUNDS * self.interval_seconds, age

    def healthz(self, request: HttpRequest) -> HttpResponse:
        request.only()
        fresh, age = self._freshness()
        said = {
            "ok": fresh,
            "node": self.node,
            "pid": os.getpid(),
            "rounds": self.sampler.stats.num_rounds,
            "newest_round_age_seconds": round(age, 3),
            "wall_at": self.clock.wall(),
            "processes": self.registry.num_live(),
        }
        return HttpResponse.json(said, HTTPStatus.OK if fresh else HTTPStatus.SERVICE_UNAVAILABLE)

    def samples(self, request: HttpRequest) -> HttpResponse:
        request.only("since")
        return HttpResponse(self.ring.since_json(request.number("since", 0)))

    def event_batch(self, request: HttpRequest) -> HttpResponse:
        request.only("after", "wait")
        return HttpResponse.json(self._events(request, request.seconds("wait", WAIT_SECONDS_MAX)).to_dict())

    def news(self, request: HttpRequest) -> HttpResponse:
        """What both would say, in one answer: as soon as there is an event, else soon after the look that ends nearest
        to `wait` from now, so that what it says is fresh. `rounds`: so many of the newest looks."""
        request.only("after", "since", "wait", "rounds")
        rounds = request.number("rounds", 0)
        seconds = request.seconds("wait", WAIT_SECONDS_MAX)
        events = self._events(request, self._until_a_look(seconds)).to_dict()
        return HttpResponse.json({**events, **self.ring.news(request.number("since", 0), rounds)})

    def _until_a_look(self, seconds: float) -> float:
        """Seconds until just after a look ends: `seconds`, up to half an interval more or less."""
        if not seconds:
            return 0.0
        since = self.clock.monotonic() - self.sampler.stats.last_at + seconds
        looks = math.ceil(since / self.interval_seconds - NEAR_ENOUGH)
        until = seconds - since + looks * self.interval_seconds + LOOK_SECONDS
        return until if 0.0 < until <= seconds + FRESH_SECONDS_MAX else seconds

    def _events(self, request: HttpRequest, seconds: float) -> EventBatch:
        after = request.number("after", 0)
        found = self.events.wait(after, seconds) if seconds else self.events.after(after)
        return EventBatch(
            node=self.node,
            agent_pid=os.getpid(),
            newest=found.newest,
            lost=found.lost,
            at=self.clock.monotonic(),
            wall_at=self.clock.wall(),
            events=found.events,
        )

    def evidence_stacks(self, request: HttpRequest) -> HttpResponse:
        request.authorize(self.bearer)
        request.only("pid")
        pid = request.number("pid", 0)
        registration = self.registry.live_process(pid)
        if registration is None:
            raise HttpRequestError(HTTPStatus.NOT_FOUND, f"pid: no live registered process {pid}")
        try:
            threads = self.stacks.dump(pid)
        except EvidenceUnavailable as e:
            status = HTTPStatus.TOO_MANY_REQUESTS if e.busy else HTTPStatus.SERVICE_UNAVAILABLE
            raise HttpRequestError(status, str(e)) from None
        said = {"replica": registration.replica, "rank": registration.rank, "incarnation": registration.incarnation}
        return HttpResponse.json(
            {"node": self.node, "pid": pid, **said, "at": self.clock.monotonic(), "threads": threads}
        )

    def evidence_flight_recorder(self, request: HttpRequest) -> HttpResponse:
        """PyTorch's own dump, as a file for `rolecall diagnose`; the process makes it while its main thread hangs."""
        request.authorize(self.bearer)
        request.only("pid")
        pid = request.number("pid", 0)
        registration = self.registry.live_process(pid)
        if registration is None:
            raise HttpRequestError(HTTPStatus.NOT_FOUND, f"pid: no live registered process {pid}")
        process = registration.process
        try:
            told = self.flight.dump(pid, process.start_ticks, lambda: self.registry.live_process(pid) is not None)
        except EvidenceUnavailable as e:
            status = HTTPStatus.TOO_MANY_REQUESTS if e.busy else HTTPStatus.SERVICE_UNAVAILABLE
            raise HttpRequestError(status, str(e)) from None
        return HttpResponse(told, "application/octet-stream")

    def evidence_of(self, collector: str) -> Route:
        """What this collector gives when it is asked: its newest lines, or an answer of now."""

        def answer(request: HttpRequest) -> HttpResponse:
            request.authorize(self.bearer)
            request.only()
            try:
                return HttpResponse(self.probes.evidence(collector), "application/octet-stream")
            except NoSuchCollector as e:
                raise HttpRequestError(HTTPStatus.NOT_FOUND, str(e)) from None
            except CollectorUnavailable as e:
                raise HttpRequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(e)) from None

        return answer

    def metrics(self, request: HttpRequest) -> HttpResponse:
        request.only()
        processes, hosts = self.ring.newest()
        values = all_values(processes, hosts, self._read_values())
        return HttpResponse(*render(values, request.headers.get("accept", "")))

    def metrics_dcgm(self, request: HttpRequest) -> HttpResponse:
        """The GPU collector's values once more, in dcgm-exporter's names and labels; empty without a GPU."""
        request.only()
        return HttpResponse("".join(r.dcgm() for r in self.probes.readings()).encode(), CONTENT_TYPE_PLAIN_0_0_4)

    def _read_values(self) -> Iterator[MetricValue]:
        for reading in self.probes.readings():
            yield from reading.values
        yield from self.gpus.values
        yield from self._own_values()

    def _own_values(self) -> Iterator[MetricValue]:
        usage, stats = resource.getrusage(resource.RUSAGE_SELF), self.sampler.stats
        yield build_info(self.node)
        plain: dict[str, float] = {
            "agent_start_timestamp_seconds": self.started_wall,
            "agent_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
            "agent_resident_memory_bytes": resident_bytes(),
            "agent_processes": self.registry.num_live(),
            "agent_rounds_total": stats.num_rounds,
            "agent_round_seconds": stats.round_seconds,
            "agent_samples_total": self.ring.num_taken,
            "agent_samples_lost_total": self.ring.num_lost,
            "agent_events_lost_total": self.events.num_unwritten,
            "agent_registrations_refused_total": self.registry.num_refused,
            "agent_messages_malformed_total": self.num_malformed(),
            "agent_pages_torn_total": self.registry.num_torn,
        }
        for name, value in plain.items():
            yield agent_value(name, value, self.node)
        for kind, number in sorted(self.events.num_by_kind.items()):
            yield agent_value("agent_events_total", number, self.node, kind)
        for (*place, cause), number in sorted(self.registry.num_exits.copy().items()):
            yield agent_value("process_exits_total", number, self.node, *place, cause)
        looks = (("host", stats.host_ok, stats.host_seconds), ("process", stats.processes_ok, stats.process_seconds))
        for probe, up, seconds in looks:
            yield agent_value("probe_up", up, self.node, probe)
            yield agent_value("probe_seconds", seconds, self.node, probe)
        for state in self.probes.states():
            yield agent_value("probe_up", state.up, self.node, state.name)
            yield agent_value("probe_seconds", state.read_seconds, self.node, state.name)
            yield agent_value("probe_cpu_seconds_total", state.cpu_seconds, self.node, state.name)
            yield agent_value("probe_facts_dropped_total", state.facts_dropped, self.node, state.name)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Resident memory of this process; 0 where it cannot be read."""
    try:
        return int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
