"""Composition of `rolecall watch`: agents as source, detectors, recovery loop, actuator of the runtime.

The default panel detector also reads the metrics of the run's processes and passes its findings to the engine.

The detectors' state is stored beside the journal every few seconds, so that a restarted watch knows the deadlines and
rates of this run and does not start learning during a fault.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from rolecall.agent.data_dir import data_dirs_of_jobs
from rolecall.agent.http.web_config import WebConfig
from rolecall.agent.local_access import local_authorization
from rolecall.core.clock import Clock, SteadyTime, SystemClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import Diagnosis, Finding, moved
from rolecall.core.errors import ConfigError, RunNotFound, UnreadableInput
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import LeaseAcquired
from rolecall.core.journal.rows import reading
from rolecall.core.rundir import RunDir, bearer_token, write_atomically
from rolecall.core.text import plain
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.run_panels import RunPanels
from rolecall.detector.live.stages.stage import stalls_others
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.profile import Profile
from rolecall.detector.panels.sequential.profile import read as read_profile
from rolecall.detector.sources.agents import AgentsSource
from rolecall.recovery.actuators.base import Actuator, NoopActuator
from rolecall.recovery.actuators.external import ExternalActuator
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.actuators.targets.choice import target_of as target_of_config
from rolecall.recovery.actuators.targets.reaper import Reaper
from rolecall.recovery.actuators.targets.target import Target
from rolecall.recovery.incidents import Incident, IncidentState
from rolecall.recovery.interfaces import Notifier, ObservationSource
from rolecall.recovery.loop import LEASE_NAME, holder_name
from rolecall.recovery.notifications.delivery import HttpNotifier, LogNotifier
from rolecall.recovery.notifications.target import target_of
from rolecall.recovery.operators import queries
from rolecall.recovery.policy import busy_replicas
from rolecall.recovery.projection import IncidentProjection
from rolecall.views.observed_ranks import RecordedRanks
from rolecall.watch.addresses import LOOPBACK, ListenAddress
from rolecall.watch.agents import AgentsFile, UniqueReplicaSource
from rolecall.watch.evidence.node_health import NvSentinelHealth
from rolecall.watch.evidence.pull import EvidencePull
from rolecall.watch.job import ALL_JOBS, FirstJobSource, JobObserver, OneJobSource, WatchedJob
from rolecall.watch.job_facts import getter
from rolecall.watch.meter import Meter, MeteredDetector, MeteredSource, MeteredWatch
from rolecall.watch.observed_fleet import EveryProcess, ObservedFleet
from rolecall.watch.server import WatchServer
from rolecall.watch.visibility import RecordedCapabilities

logger = logging.getLogger(__name__)

KEEP_SECONDS = 10.0
"""Interval of writing the detectors' state."""
KEEP_STALLED_SECONDS = 600.0
"""The same while a fault stalls others: the state from before it is better to start from, unless it gets old."""
SUBJECTS_KEPT_PER_POLL = 32
"""Subjects serialized per poll: takes 3 ms."""
COLLECT_AFTER = (50_000, 20, 100)
"""Thresholds of Python's garbage collector. A window of a large fleet is half a million samples without cycles: with
the default thresholds collection took about a fifth of the detection time of 16,000 ranks (measured once, busy
machine)."""
SWITCH_SECONDS = 0.0005
"""How long the thread that reads agents waits for the detector thread after each of its short system calls. With
Python's 5 ms, samples of a thousand agents were 3.1 s old (P99) at detection, with this 2.4 s (measured once each, busy
machine)."""
CLOSE_SECONDS = 5.0
PROFILES_FOLDER = "profiles"
"""In the folder of the runs: a file for each job."""
PROFILE_SECONDS = 600.0
LEARNED_FILE = "detector.json"


def agent_urls(run: RunDir) -> dict[str, str]:
    """node -> URL of its agent, as written by the agents; a restarting one is missing."""
    found: dict[str, str] = {}
    for path in (run.path / "nodes").glob("*/agent.json"):
        try:
            value = json.loads(path.read_text())
            found[str(value["node"])] = str(value["url"])
        except (OSError, ValueError, KeyError):
            continue  # being replaced or incomplete: the source notices that this agent does not answer
    return found


class _AgentList:
    """The list of agents as last read by the source, for other threads: reading it again may be slow and is not
    thread-safe."""

    def __init__(self, ask: Callable[[], Mapping[str, str]]) -> None:
        self._ask = ask
        self.newest: Mapping[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        self.newest = dict(self._ask())
        return self.newest


class _PersistentDetector:
    """The detectors, with what they learned on disk for the next watch: the engine's state in the run's folder, and
    what is usual among the machines of this job (by the digest of its configuration) beside the runs.

    Their time goes on where this machine's wall clock is set: they see it as it was at the start, or no earlier than
    the stored state. Diagnoses have the time of the clock as it is."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        clock: Clock,
        roles: Mapping[str, int] | None = None,
        pulled: Callable[[], tuple[Finding, ...]] = tuple,
        probe: Callable[[Sequence[Diagnosis]], None] = lambda _: None,
    ) -> None:
        """`roles`: desired number of replicas of a job that rolecall runs; None: as in the job file; empty: it did not
        start the job. `pulled`: findings from evidence since its
        last call. `probe`: is called with the suspicions that stand, after each observation.
        """
        roles = job.roles.counts() if roles is None else roles
        self._path, self._clock, self._kept_at = run.path / LEARNED_FILE, clock, clock.monotonic()
        self._time = SteadyTime(clock)
        self._clock_set = 0.0  # how far the wall clock is ahead of the detectors' time
        self._parts: Iterator[str | None] | None = None
        self._pulled, self._probe = pulled, probe
        self._profile_path = run.path.parent / PROFILES_FOLDER / f"{job.digest()}.json"
        self._profile_kept_at = clock.monotonic()
        self._profile: Profile | None = None
        try:
            if self._profile_path.exists():  # not the first watch of this job
                self._profile = read_profile(self._profile_path)
        except UnreadableInput as e:
            logger.warning("%s: starting without learned state", e)
        self._foreign = not roles
        self._panels = RunPanels(Sequential(profile=self._profile), foreign=self._foreign)
        self._detector = LiveDetector(job.detector, roles, foreign=self._foreign)
        try:
            state = json.loads(self._path.read_text())
            # Negative: the clock was set back, or the former watch had another machine's.
            self._clock_set = min(0.0, clock.wall() - state["now"])
            self._detector = LiveDetector.resumed(job.detector, roles, state, foreign=self._foreign)
        except FileNotFoundError:
            pass  # the first watch of this run
        except (ValueError, KeyError, TypeError) as e:
            logger.warning("%s is damaged (%s): starting without learned state", self._path, e)
        passed_on = self._detector
        self.processes, self.progressing = passed_on.processes, passed_on.progressing
        self.waits, self.has_worked = passed_on.waits, passed_on.has_worked
        self.fate, self.forget, self.unforget = passed_on.fate, passed_on.forget, passed_on.unforget
        self.window, self.loads = passed_on.window, passed_on.loads

    def survives(self, role: str, since: float) -> bool:
        return self._detector.survives(role, since - self._clock_set)

    def observe(self, observation: Observation) -> Sequence[Diagnosis]:
        set_by = self._time.follow()
        if set_by:
            logger.warning("the clock of this machine was set by %+.1f s", set_by)
            self._clock_set += set_by
        silent = tuple((node, since - self._clock_set, reason) for node, since, reason in observation.unreachable)
        observation = replace(observation, wall_at=observation.wall_at - self._clock_set, unreachable=silent)
        of_panels: tuple[Finding, ...] = ()
        try:
            of_panels = self._panels.findings(observation)
            self._keep_profile()
        except Exception:
            # Deliberate: the engine finds the faults that end a run and must not fail because of the weakest evidence.
            logger.exception("panel detector failed, restarting it")
            self._panels = RunPanels(Sequential(profile=self._profile), foreign=self._foreign)
        of_evidence = tuple(moved(f, -self._clock_set) for f in self._pulled())
        standing = self._detector.observe(replace(observation, panel_findings=of_panels, pulled_findings=of_evidence))
        self._probe([moved(d, self._clock_set) for d in self._detector.suspicions])
        self._keep(standing)
        return [moved(d, self._clock_set) for d in standing]

    def _keep(self, standing: Sequence[Diagnosis]) -> None:
        """Writes the state when it is due, some subjects per poll: a whole large fleet would block a poll for seconds.
        A write in progress is abandoned when a fault appears that stalls others."""
        now = self._clock.monotonic()
        interval_seconds = KEEP_STALLED_SECONDS if any(map(stalls_others, standing)) else KEEP_SECONDS
        if now - self._kept_at < interval_seconds:
            self._parts = None
            return
        self._parts = self._parts or self._detector.state_in_parts(SUBJECTS_KEPT_PER_POLL)
        text = next(self._parts)
        if text is not None:
            self._kept_at, self._parts = now, None
            try:
                write_atomically(self._path, text)
            except OSError as e:  # a full disk must not end detection, least of all that of the full disk
                logger.warning("%s cannot be written (%s): tried again in %g s", self._path, e.strerror, KEEP_SECONDS)

    def _keep_profile(self) -> None:
        if self._clock.monotonic() - self._profile_kept_at < PROFILE_SECONDS:
            return
        self._profile_kept_at = self._clock.monotonic()
        profile = self._panels.profile
        if profile is None or profile == self._profile:
            return
        self._profile = profile
        try:
            self._profile_path.parent.mkdir(exist_ok=True)
            write_atomically(self._profile_path, profile.to_json())
        except OSError as e:
            logger.warning(
                "%s cannot be written (%s): the next watch starts without it", self._profile_path, e.strerror
            )


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """Address of `/metrics`, with its TLS settings and users."""

    address: ListenAddress
    web: WebConfig | None = None


def watch_run(
    run: RunDir,
    seconds: float | None = None,
    authorization: str = "",
    living: AgentsFile | None = None,
    metrics: MetricsEndpoint | None = None,
    approve: bool = False,
    *,
    stop: threading.Event | None = None,
    show: Callable[[WatchedJob], None] | None = None,
    only_job: str = "",
) -> int:
    """Watches until the run ends, `seconds` have passed, or SIGTERM; with `stop`, until that is set. Returns the
    exit code. `authorization`: value of the header, for agents that require a user. `living`: the current agents,
    instead of run.json's. `metrics`: where `/metrics` is served; None: for our own run on a free loopback
    port, else nowhere. `approve`: each plan requires approval, even if the job file says `act`. `show`: is called with
    what is watched, about once a second. `only_job`: run id or rendezvous of the job to watch, or
    `all`; empty: the first that is seen.

    A run with `agents` in run.json is an external job (agents.py): it is only observed, its end is unknown, and exit
    code 1 means that incidents were opened.
    """
    if stop is None:
        # What `show` tells is not told twice.
        stop = _stop_event(seconds, logging.INFO if show is None else logging.WARNING)
    clock = SystemClock()
    value = run.read()
    if not isinstance(value.get("config"), dict):
        raise RunNotFound(f"{run.path / 'run.json'}: damaged: it has no config")
    job = parse_job(value["config"], str(run.path / "run.json"))
    agents = value.get("agents")
    ours = agents is None
    watched = parse_watched(value.get("watched") or {}, str(run.path / "run.json"))
    if not isinstance(agents, dict | None):
        raise RunNotFound(f"{run.path / 'run.json'}: damaged: agents is not a mapping")
    if approve:
        with closing(Journal(run.database_url, create=False)) as asked:
            job = with_required_approval(job, asked)
    if not ours:
        watched = watched.model_copy(update={"recovery": job.recovery})
    orphans_mode = watched.orphans_mode
    if approve and orphans_mode == "act":
        orphans_mode = "approve"
    target = target_of(job.recovery, os.environ)
    journal = Journal(run.database_url, create=False)
    known = _num_incidents(journal)
    lease = journal.lease(LEASE_NAME)
    if lease is not None and lease.holder and lease.expires_at > clock.wall():
        logger.warning(
            "watch %s leads %s already: this one stands by, and takes over when it ends", lease.holder, run.run_id
        )
    listed = _AgentList(living.urls if living is not None else lambda: agents or agent_urls(run))
    poll_seconds = job.detector.poll_seconds
    source = AgentsSource(
        listed,
        clock,
        poll_seconds,
        authorization=authorization,
        forgets=living is not None,
        doubt=living.doubt if living is not None else lambda _: None,
    )
    notifier: Notifier = LogNotifier()
    if target is not None:
        deadman_seconds = job.recovery.deadman_seconds
        notifier = HttpNotifier(target, run_id=run.run_id, deadman_seconds=deadman_seconds, clock=clock)
    given = authorization if authorization.startswith("Bearer ") else ""
    if ours:
        try:
            given = f"Bearer {bearer_token(run.token())}"
        except OSError as e:
            logger.warning("no evidence of incidents: %s", e)

    def evidence_authorization(url: str) -> str:
        local = data_dirs_of_jobs(os.geteuid(), os.environ)
        return given if given or ours else local_authorization(url, local)

    pull = EvidencePull(
        run,
        lambda: listed.newest,
        evidence_authorization,
        lambda: detector.processes(),
        clock,
        node_health=NvSentinelHealth(watched.nvsentinel) if watched.nvsentinel is not None else None,
    )
    detector = _PersistentDetector(run, job, clock, None if ours else {}, pull.findings, pull.probe)
    meter, server, external = Meter(clock), None, list[ExternalActuator]()
    source.start()
    try:
        server = _serve(run, job, metrics, meter, notifier, (lambda: listed.newest) if ours else None)
        acts = watched.actuator is not None or watched.orphans is not None
        every = EveryProcess(source) if acts else None
        chosen: ObservationSource = every or source
        other_jobs: Callable[[], tuple[str, ...]] = tuple
        if only_job and only_job != ALL_JOBS:
            chosen = OneJobSource(chosen, only_job, clock)
            if watched.orphans is not None:
                logger.warning("orphans belong to no job: with --job %s none is seen, and none is ended", only_job)
        elif not ours and not only_job:
            chosen = first = FirstJobSource(chosen)
            other_jobs = lambda: first.others
        polled: ObservationSource = source
        if not ours:
            unique = UniqueReplicaSource(chosen, lambda: {p for one in external for p in one.ended})
            polled = RecordedCapabilities(
                RecordedRanks(unique, journal, clock),
                journal,
                clock,
                urls=lambda: listed.newest,
                get=getter(lambda url: authorization or evidence_authorization(url)),
                may_read_stacks=lambda url: evidence_authorization(url).startswith("Bearer "),
                watched=watched if value.get("watched") is not None else None,
            )
        actuator: Actuator = RayRuntime(journal) if ours else NoopActuator()
        reaper: Actuator | None = None
        if acts:
            # Without an actuator no replica is counted. The processes that run are known: none of them is an orphan.
            roles = frozenset(watched.roles if watched.actuator is not None else ())
            polled = fleet = ObservedFleet(
                polled, journal, clock, roles, lambda: watch.lease, every, lambda: _needed(watch.incidents)
            )

            def making_calls(target: Target) -> ExternalActuator:
                seconds = watched.deadline_seconds
                external.append(ExternalActuator(target, journal, fleet.members, clock, deadline_seconds=seconds))
                return external[-1]

            actuator = making_calls(target_of_config(watched.actuator)) if watched.actuator is not None else actuator
            reaper = making_calls(Reaper(watched.orphans)) if watched.orphans is not None else None
        observer = JobObserver(polled, show, clock, other_jobs) if show is not None else None
        watch = MeteredWatch(
            journal,
            MeteredSource(observer or polled, meter, lambda: len(listed.newest)),
            MeteredDetector(detector, meter, lambda: len(detector.processes())),
            actuator,
            job.recovery,
            notifier,
            clock,
            holder_name(),
            run_id=run.run_id,
            poll_seconds=poll_seconds,
            evidence_collector=pull,
            reaper=reaper,
            orphans_mode=orphans_mode,
            meter=meter,
        )
        if observer is not None:
            watch.after_tick = lambda: observer.show(listed.newest, detector.processes, watch.incidents)
        watch.run(stop)
        return 0 if ours or _num_incidents(journal) == known else 1
    finally:
        if server is not None:
            server.close()
        for made in external:
            made.close()
        pull.close()
        source.close()
        notifier.close(CLOSE_SECONDS)
        journal.close()


def _stop_event(seconds: float | None, level: int) -> threading.Event:
    """Is set by SIGTERM and SIGINT, and after `seconds`. Prepares this process for being a watch."""
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_SECONDS)
    stop = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    return stop


def with_required_approval(job: JobConfig, journal: Journal) -> JobConfig:
    """The job, with mode approve: while this watch is the recovery leader, each plan requires approval.

    It only restricts: mode `act` becomes `approve`, `observe` stays. It is refused while another watch acts without
    approval, because it would have no effect.

    Raises ConfigError: the job is only observed, or another watch acts without approval.
    """
    if job.recovery.mode == "observe":
        because = "recovery.mode is observe in the job file or watch file; set it, or orphans.mode, to approve there"
        raise ConfigError([f"--require-approval: {because}"])
    lease, taken = journal.lease(LEASE_NAME), journal.last(EventKind.LEASE_ACQUIRED)
    held = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    of_lease = taken.as_(LeaseAcquired) if taken is not None else None
    mode = of_lease.mode if of_lease is not None else "unknown"
    ends_orphans = of_lease is not None and of_lease.orphans_mode == "act"
    if lease is not None and held and (mode != "approve" or ends_orphans):
        of_orphans = " (act for orphans)" if ends_orphans and mode != "act" else ""
        because = f"watch {lease.holder} holds the lease in mode {mode}{of_orphans} and acts without approval"
        because += "; stop it first, or start the job with recovery.mode: approve"
        raise ConfigError([f"--require-approval: {because}"])
    return job.model_copy(update={"recovery": job.recovery.model_copy(update={"mode": "approve"})})


def _serve(
    run: RunDir,
    job: JobConfig,
    wanted: MetricsEndpoint | None,
    meter: Meter,
    notifier: Notifier,
    agents: Callable[[], Mapping[str, str]] | None,
) -> WatchServer | None:
    """`agents`: as for `WatchServer`. Raises ConfigError: the requested address is not available."""
    if wanted is None and agents is None:
        return None
    asked = wanted or MetricsEndpoint(ListenAddress(LOOPBACK, 0))
    try:
        server = WatchServer(
            run,
            job,
            asked.address,
            meter,
            meter.clock,
            agents=agents,
            calls_failed=lambda: int(getattr(notifier, "num_failed", 0)),
            web=asked.web,
        )
    except ConfigError as e:
        if wanted is not None:
            raise
        logger.warning("no /metrics: %s", e)
        return None
    logger.info("/metrics is served at %s", server.url)
    return server


def _needed(incidents: Iterable[Incident]) -> set[str]:
    """Replicas that open incidents, or their plans, are about."""
    still_open = [i for i in incidents if i.state is not IncidentState.CLOSED]
    return {*busy_replicas(still_open)} | {r for i in still_open for a in i.attempts for r in a.plan.ends}


def _num_incidents(journal: Journal) -> int:
    projection = IncidentProjection()
    projection.refresh(journal)
    return len(projection.incidents)


def replay_incident(run: RunDir, incident: str) -> dict[str, Any]:
    """Recomputes an incident: diagnosis from the stored window, plan from its stored input.

    Returns `same`, the parts, and `text`.
    """
    value: dict[str, Any] = queries.replay(run, incident)
    with closing(Journal(run.database_url, create=False)) as journal:
        where, window = journal.store.where, journal.windows(incident).get("observations")
    if window is None:
        return value
    with reading(where, f"window of {incident}"):
        opened = Diagnosis.from_dict(value["diagnosis"])
        standing = {d.key: d for poll in LiveDetector.replay_window(window) for d in poll}
    again = standing.get(opened.key)
    value["diagnosed_again"] = again is not None
    value["same"] = bool(value["same"]) and again is not None
    verdict = (
        f"diagnosis reproduced: {again.because}" if again else "the stored window does not reproduce the diagnosis"
    )
    value["text"] = f"{value['text']}\n{plain(verdict)}"
    return value
