"""`/metrics` of a watch: an HTTP server, and a thread that polls the journal every two seconds.

A scrape renders stored values only. The thread has its own connection to the journal, so that a stuck tick, a locked
journal and a hanging Prometheus do not block each other.
"""

import logging
import resource
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from itertools import islice

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rolecall.agent.http.exposition import render
from rolecall.agent.http.parameters import only
from rolecall.agent.http.routes import resident_bytes
from rolecall.agent.http.server import Endpoint, HttpServer, handlers, json_response
from rolecall.agent.http.web_config import WebConfig
from rolecall.core.clock import Clock
from rolecall.core.config.job import JobConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import ConfigError
from rolecall.core.faults import Remedy
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal, JournalPage
from rolecall.core.journal.payloads.run import RunStarted
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.nodes import QUARANTINE_KINDS, nodes_quarantined_by
from rolecall.core.rundir import RunDir
from rolecall.core.text import os_reason, plain
from rolecall.recovery.fleet_view import RunPlaces, fleet_view
from rolecall.recovery.incidents import Incident, IncidentState
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.projection import IncidentProjection
from rolecall.views.journal_reader import JournalReader
from rolecall.views.run_totals import run_account
from rolecall.watch.addresses import EndpointAnnouncement, ListenAddress, own
from rolecall.watch.meter import Meter
from rolecall.watch.metrics import JournalView, TickView, journal_values, run_values, tick_values

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Interval of journal polls: less than any scrape interval in use."""
PAGES_PER_POLL = 20
"""The next poll continues, so that a poll is short even with millions of lines."""
CLOSE_SECONDS = 5.0
TICK_AGE_SECONDS_MAX = 30.0
"""`/healthz` fails if no tick ended for this long; a tick takes about a second, three with a thousand agents."""

ENDPOINTS = (
    Endpoint(
        "/metrics",
        "metrics",
        "the watch itself, incidents and the run ([metrics](metrics.md)); the newest values, never waiting for a tick",
    ),
    Endpoint(
        "/v1/unfit",
        "unfit",
        'JSON: reasons why nothing should start on node N: `{"node": N, "unfit": [reason, ...], "acting": true}`; open '
        "incidents whose fault stays with the node, and its quarantine. An agent asks for it where it answers [NVRx's "
        "node health check](../howto/slurm.md#nvrx)",
        "node=N",
    ),
    Endpoint("/healthz", "healthz", "200 while the watch's ticks continue, else 503"),
)


class JournalMetricsPoller:
    """What the last journal poll has read, and its values. `poll` is for one thread, `values` for all."""

    def __init__(self, journal: Journal, job: JobConfig, run_id: str, clock: Clock, *, ours: bool) -> None:
        self._journal, self._job, self._run_id, self._clock, self._ours = journal, job, run_id, clock, ours
        self._reader, self._account, self._projection = JournalReader(), run_account(job), IncidentProjection()
        self._places = RunPlaces()
        self._quarantines: list[Event] = []
        self._view: JournalView | None = None
        self._lock = threading.Lock()  # of view and account
        self.unfit: Mapping[str, tuple[str, ...]] | None = None
        """Node -> reasons why nothing should start there. None: not known yet."""

    def poll(self) -> bool:
        """Reads the journal; False until a long journal is read to its end: until then the previous values remain.
        Raises JournalError: it cannot be read; the previous values remain as well."""
        with self._journal.view():
            for page in islice(self._reader.pages(self._journal), PAGES_PER_POLL):
                with self._lock:
                    self._take(page)
            if not self._reader.at_end:
                return False
            lease, paused = self._journal.lease(LEASE_NAME), self._journal.flag(PAUSED_FLAG) is not None
            fleet = fleet_view(self._journal.desired(), self._journal.current(), self._places)
        self._projection.to_notify.clear()  # no notifications are sent from here
        self.unfit = unfit_nodes(self._projection.incidents.values(), nodes_quarantined_by(self._quarantines))
        with self._lock:
            self._view = JournalView(
                read_at=self._clock.wall(),
                lease=lease,
                paused=paused,
                incidents=self._projection.incidents,
                num_broken=len(self._projection.broken),
                fleet=fleet,
            )
        return True

    def _take(self, page: JournalPage) -> None:
        for event in page.events:
            # Deliberate: an invalid event from a foreign writer must not hide the others.
            with suppress(Exception):
                if isinstance(event.payload, RunStarted):
                    self._places = RunPlaces.told(event.payload)
                self._account.take(event)
            if event.kind in QUARANTINE_KINDS:
                self._quarantines.append(event)
        self._projection.take(page.events, page.damaged)

    @property
    def values(self) -> tuple[MetricValue, ...]:
        """As of the last poll: hundreds, which only a scrape needs. Empty before the first poll."""
        with self._lock:
            view, account = self._view, self._account
            if view is None:
                return ()
            return (
                *journal_values(view, account, self._job, view.read_at),
                *run_values(view, account, self._job, self._run_id, view.read_at, ours=self._ours),
            )


def unfit_nodes(incidents: Iterable[Incident], quarantined: Iterable[NodeId]) -> dict[str, tuple[str, ...]]:
    """Node -> reasons why nothing should start there: open incidents whose newest diagnosis is a fault that stays with
    the node, and its quarantine. A crash or hang there is none."""
    found = {str(node): ["it is quarantined"] for node in quarantined}
    for incident in incidents:
        if incident.state is not IncidentState.CLOSED:
            for node in culprit_nodes(incident.diagnosis):
                because = f"incident {incident.incident_id}: {plain(incident.diagnosis.because, 300)}"
                found.setdefault(node, []).append(because)
    return {node: tuple(reasons) for node, reasons in found.items()}


def culprit_nodes(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Nodes with which the fault stays. None if suspects are on several nodes, unless these are lost: of a link, a
    switch or a collective that does not advance, the diagnosis does not say at which end it is."""
    spec = diagnosis.fault_class.spec
    nodes = tuple(dict.fromkeys(str(s.node) for s in diagnosis.suspects if s.node))
    is_known = spec.remedy is Remedy.MOVE and (len(nodes) == 1 or spec.loses_node)
    return nodes if is_known else ()


def check_available(address: ListenAddress) -> None:
    """Raises ConfigError: nothing can listen there now."""
    try:
        HttpServer(address.host, address.port, {}).stop()
    except (OSError, OverflowError) as e:
        raise _unavailable(address, e) from None


def _unavailable(address: ListenAddress, error: OSError | OverflowError) -> ConfigError:
    return ConfigError([f"--metrics: {address.host}:{address.port}: {os_reason(error)}"])


class WatchServer:
    """Serves from construction until `close`."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        address: ListenAddress,
        meter: Meter,
        clock: Clock,
        *,
        agents: Callable[[], Mapping[str, str]] | None,
        calls_failed: Callable[[], int] = int,
        web: WebConfig | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`agents`: node -> URL for our own run; they and this watch are announced in its directory. Raises
        ConfigError: `address` is not available; JournalError: there is no journal."""
        self._meter, self._clock, self._calls_failed = meter, clock, calls_failed
        self._agents, self._poll_seconds = agents, poll_seconds
        self._journal = Journal(run.database_url, create=False)
        self._poller = JournalMetricsPoller(self._journal, job, run.run_id, clock, ours=agents is not None)
        tls = web.tls.context if web and web.tls else None
        allows = web.auth.allows if web and web.auth else None
        try:
            self._server = HttpServer(
                address.host,
                address.port,
                handlers(ENDPOINTS, self),
                tls=tls,
                allows=allows,
                public={"/healthz": self.alive},
            )
        except (OSError, OverflowError) as e:
            self._journal.close()
            raise _unavailable(address, e) from None
        self.url = self._server.url
        self._announced = EndpointAnnouncement(run, own(self.url)) if agents is not None else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll_journal, name="watch metrics", daemon=True)
        self._server.start()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._announced is not None:
            with suppress(OSError):
                self._announced.close()
        self._server.stop()
        self._journal.close()

    def _poll_journal(self) -> None:
        while not self._stop.is_set():
            # Deliberate, twice: the next poll retries, and the time of the last one shows the age of the values.
            try:
                if self._announced is not None and self._agents is not None:
                    self._announced.announce(self._agents())
            except Exception as e:  # noqa: BLE001
                logger.warning("scrape targets cannot be written: %s", e)
            try:
                if not self._poller.poll():
                    continue
            except Exception as e:  # noqa: BLE001
                logger.warning("the journal cannot be read for /metrics: %s: %s", type(e).__name__, e)
            self._stop.wait(self._poll_seconds)

    def metrics(self, request: Request) -> Response:
        try:
            of_journal = self._poller.values
        except Exception as e:  # noqa: BLE001
            # Deliberate: what the journal holds must not hide the state of the watch.
            logger.warning("no values of the journal for /metrics: %s: %s", type(e).__name__, e)
            of_journal = ()
        values = (*tick_values(self._tick()), *of_journal)
        body, content_type = render(values, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    def _tick(self) -> TickView:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return replace(
            self._meter.view,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            resident_bytes=resident_bytes(),
            num_notifications_failed=self._calls_failed(),
        )

    def _tick_age(self) -> float:
        view = self._meter.view
        return max(0.0, self._clock.wall() - (view.ended_at or view.started_at))

    def unfit(self, request: Request) -> Response:
        node = request.query_params.get("node", "")
        if not node:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "node: expected the name of a node")
        unfit = self._poller.unfit
        if unfit is None:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the journal is not read yet")
        return json_response({"node": node, "unfit": unfit.get(node, ()), "acting": self._meter.view.acting})

    def healthz(self, _request: Request) -> Response:
        age = self._tick_age()
        said = {"ok": age < TICK_AGE_SECONDS_MAX, "tick_age_seconds": round(age, 3), "acting": self._meter.view.acting}
        return json_response(said, HTTPStatus.OK if said["ok"] else HTTPStatus.SERVICE_UNAVAILABLE)

    def alive(self, request: Request) -> Response:
        """Without credentials: only whether the watch is healthy."""
        only(request)
        fresh = self._tick_age() < TICK_AGE_SECONDS_MAX
        return json_response({"ok": fresh}, HTTPStatus.OK if fresh else HTTPStatus.SERVICE_UNAVAILABLE)
