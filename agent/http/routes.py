"""The agent's HTTP API (`ENDPOINTS`): read-only, JSON and Prometheus text, on loopback by default.

With users (agent/http/web_config.py) each request needs a user name and password or the bearer token, except for
`/healthz`, which then returns only whether the agent is healthy: a kubelet's probe has no password. Refusals are
`{"error": reason}` with 400, 401, 404, 405, 429, 500 or 503.
"""

import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from pathlib import Path

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.gpu.samples import GpuSamples
from rolecall.agent.collectors.runner import NoSuchCollector, Probes
from rolecall.agent.events import EventLog, EventPage
from rolecall.agent.evidence import EvidenceUnavailable, FlightRecorders, Stacks
from rolecall.agent.http import parameters
from rolecall.agent.http.exposition import agent_value, all_values, build_info, render
from rolecall.agent.http.server import Endpoint, Handler, attachment, handlers, json_response
from rolecall.agent.identity import Registration
from rolecall.agent.registry import Registry
from rolecall.agent.samples import Sampler, SampleRing
from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import EventBatch

WAIT_SECONDS_MAX = 30.0
"""Of a long poll."""
SAMPLE_SECONDS = 0.05
"""A sample is complete this long after it was due: it takes 5 ms."""
EARLY_INTERVALS = 0.5
"""A response may be this part of an interval earlier than requested: at the nearest sample."""
EXTRA_WAIT_SECONDS_MAX = 1.0
"""A reader waits at most this much longer than requested, however rarely this agent samples."""
STALE_ROUNDS = 25
"""Healthy while the newest sample is younger than this many intervals (5 s at five samples a second)."""


ENDPOINTS = (
    Endpoint(
        "/metrics",
        "metrics",
        "Prometheus text or OpenMetrics, as `Accept` asks, with the names of [metrics](metrics.md). A scrape copies "
        "what is there: no GPU is queried, nothing can block it",
    ),
    Endpoint(
        "/metrics/dcgm",
        "metrics_dcgm",
        "the GPUs with dcgm-exporter's names and labels; empty without a GPU or with `gpu.dcgm: false`",
    ),
    Endpoint(
        "/v1/samples",
        "samples",
        "JSON: samples of processes, node and GPUs newer than cursor N, and how many were dropped before they could be "
        "read",
        "since=N",
    ),
    Endpoint(
        "/v1/events",
        "event_batch",
        "JSON: [events](agent.md#events) numbered above N, oldest first, at most 1,000; waits up to S ≤ 30 s for the "
        "first. `after_wall_at` is the `wall_at` of event N, 0 if it is not kept: where it is not that of the event N "
        "which you have, as in a new data directory, numbers have restarted, and you continue with N = 0",
        "after=N&wait=S",
    ),
    Endpoint(
        "/v1/news",
        "news",
        "JSON: samples (as columns) and events in one answer, for `rolecall watch`. Returned as soon as there is an "
        "event, else after S seconds; R limits it to the newest polls",
        "after=N&since=M&wait=S&rounds=R",
    ),
    Endpoint(
        "/v1/evidence/stacks",
        "evidence_stacks",
        "JSON: Python stacks of a registered process and of the engine processes below it, by py-spy, without local "
        "variables",
        "pid=P",
        bearer=True,
    ),
    Endpoint(
        "/v1/evidence/flight_recorder",
        "evidence_flight_recorder",
        "PyTorch's Flight Recorder dump, written by the process itself, even while its main thread hangs",
        "pid=P",
        bearer=True,
    ),
    Endpoint(
        "/v1/evidence/kernel_log",
        "evidence_kernel_log",
        "the newest 200 lines of the kernel log in dmesg's format; where `kernel_log` runs",
        bearer=True,
    ),
    Endpoint(
        "/v1/evidence/nccl_ras",
        "evidence_nccl_ras",
        "the current answer of NCCL RAS (JSON or text); where `nccl_ras` runs",
        bearer=True,
    ),
    Endpoint(
        "/healthz",
        "healthz",
        "200 while the agent's own rounds continue, else 503. A collector that is down is no reason: see "
        '`rolecall_probe_up`. Where users are configured, a request without one gets `{"ok": true}` or '
        '`{"ok": false}` and nothing else',
    ),
)


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
    """Malformed messages from processes."""

    def table(self) -> dict[str, Handler]:
        return handlers(ENDPOINTS, self, self.bearer)

    def public(self) -> dict[str, Handler]:
        """Served without a user name and password, too: a probe of Kubernetes or a load balancer has none."""
        return {"/healthz": self.alive}

    def alive(self, request: Request) -> Response:
        """Whether the agent is healthy, and nothing else."""
        parameters.only(request)
        fresh, _ = self._freshness()
        return json_response({"ok": fresh}, HTTPStatus.OK if fresh else HTTPStatus.SERVICE_UNAVAILABLE)

    def _freshness(self) -> tuple[bool, float]:
        """Whether the newest sample is fresh, and its age in seconds."""
        age = self.clock.monotonic() - self.sampler.stats.last_at
        return age < STALE_ROUNDS * self.interval_seconds, age

    def healthz(self, _request: Request) -> Response:
        fresh, age = self._freshness()
        health = {
            "ok": fresh,
            "node": self.node,
            "pid": os.getpid(),
            "rounds": self.sampler.stats.num_rounds,
            "newest_round_age_seconds": round(age, 3),
            "wall_at": self.clock.wall(),
            "processes": self.registry.num_live(),
        }
        return json_response(health, HTTPStatus.OK if fresh else HTTPStatus.SERVICE_UNAVAILABLE)

    def samples(self, request: Request) -> Response:
        body = self.ring.since_json(parameters.number(request, "since", 0))
        return Response(body, media_type="application/json")

    def event_batch(self, request: Request) -> Response:
        after, seconds = parameters.number(request, "after", 0), parameters.seconds(request, "wait", WAIT_SECONDS_MAX)
        return json_response(self._events(self.events.wait(after, seconds)).to_dict())

    async def news(self, request: Request) -> Response:
        """Events and samples in one response: at the first event, else just after the sample nearest to `wait` from
        now, so that the samples are fresh. `rounds`: how many of the newest samples."""
        after, since = parameters.number(request, "after", 0), parameters.number(request, "since", 0)
        rounds = parameters.number(request, "rounds", 0)
        seconds = parameters.seconds(request, "wait", WAIT_SECONDS_MAX)
        await self.events.arrival(after, self._until_a_sample(seconds))
        if since and (page := self.events.nothing_after(after)):  # of a regular poll: too little for a thread
            return self._news(page, since, rounds)
        return await run_in_threadpool(lambda: self._news(self.events.after(after), since, rounds))

    def _news(self, found: EventPage, since: int, rounds: int) -> Response:
        return json_response({**self._events(found).to_dict(), **self.ring.news(since, rounds)})

    def _until_a_sample(self, seconds: float) -> float:
        """Seconds until just after a sample: `seconds`, up to half an interval more or less."""
        if not seconds:
            return 0.0
        since = self.clock.monotonic() - self.sampler.stats.last_at + seconds
        intervals = math.ceil(since / self.interval_seconds - EARLY_INTERVALS)
        until = seconds - since + intervals * self.interval_seconds + SAMPLE_SECONDS
        return until if 0.0 < until <= seconds + EXTRA_WAIT_SECONDS_MAX else seconds

    def _events(self, found: EventPage) -> EventBatch:
        return EventBatch(
            node=self.node,
            agent_pid=os.getpid(),
            newest=found.newest,
            lost=found.lost,
            after_wall_at=found.after_wall_at,
            at=self.clock.monotonic(),
            wall_at=self.clock.wall(),
            events=found.events,
        )

    def evidence_stacks(self, request: Request) -> Response:
        registration = self._registered(request)
        pid = registration.process.pid
        with _unavailable():
            stacks = self.stacks.dump(pid)
        identity = {"replica": registration.replica, "rank": registration.rank, "incarnation": registration.incarnation}
        return json_response({"node": self.node, "pid": pid, **identity, "at": self.clock.monotonic(), **stacks})

    def evidence_flight_recorder(self, request: Request) -> Response:
        """PyTorch's own dump, as a file for `rolecall diagnose`; works while the main thread hangs."""
        process = self._registered(request).process
        with _unavailable():
            dump = self.flight.dump(
                process.pid, process.start_ticks, lambda: self.registry.live_process(process.pid) is not None
            )
        return attachment(dump)

    def _registered(self, request: Request) -> Registration:
        """The live process that the parameter `pid` names; 404 if there is none."""
        pid = parameters.number(request, "pid", 0)
        registration = self.registry.live_process(pid)
        if registration is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"pid: no live registered process {pid}")
        return registration

    def evidence_kernel_log(self, _request: Request) -> Response:
        return self._evidence_of("kernel_log")

    def evidence_nccl_ras(self, _request: Request) -> Response:
        return self._evidence_of("nccl_ras")

    def _evidence_of(self, collector: str) -> Response:
        """Evidence that a collector holds, such as the newest kernel log lines, or collects on request."""
        with _unavailable():
            return attachment(self.probes.evidence(collector))

    def metrics(self, request: Request) -> Response:
        processes, hosts = self.ring.newest()
        read = (value for reading in self.probes.readings() for value in reading.values)
        values = all_values(processes, hosts, chain(read, self.gpus.values, self._own_values()))
        body, content_type = render(values, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    def metrics_dcgm(self, _request: Request) -> Response:
        """The GPU collector's values under dcgm-exporter's names and labels; empty without a GPU."""
        page = "".join(r.dcgm() for r in self.probes.readings())
        return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)

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
        polls = (("host", stats.host_ok, stats.host_seconds), ("process", stats.processes_ok, stats.process_seconds))
        for probe, up, seconds in polls:
            yield agent_value("probe_up", up, self.node, probe)
            yield agent_value("probe_seconds", seconds, self.node, probe)
        for state in self.probes.states():
            yield agent_value("probe_up", state.up, self.node, state.name)
            yield agent_value("probe_seconds", state.read_seconds, self.node, state.name)
            yield agent_value("probe_cpu_seconds_total", state.cpu_seconds, self.node, state.name)
            yield agent_value("probe_facts_dropped_total", state.facts_dropped, self.node, state.name)


@contextmanager
def _unavailable() -> Iterator[None]:
    """404 where no such collector runs, 429 while another dump is running, 503 for any other reason."""
    try:
        yield
    except NoSuchCollector as e:
        raise HTTPException(HTTPStatus.NOT_FOUND, str(e)) from None
    except CollectorUnavailable as e:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(e)) from None
    except EvidenceUnavailable as e:
        status = HTTPStatus.TOO_MANY_REQUESTS if e.busy else HTTPStatus.SERVICE_UNAVAILABLE
        raise HTTPException(status, str(e)) from None


def resident_bytes() -> int:
    """Resident memory of this process; 0 where it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
