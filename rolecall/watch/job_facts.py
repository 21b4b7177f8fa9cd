"""Facts of the job at hand for `rolecall doctor --job`, from one look at its agents. Nothing of the job is changed.

Each agent is asked for the samples that it holds (a minute), its events, and the state of its collectors; with its
token also for the stack of one rank, which shows whether stacks can be read. Requests to an agent are sequential,
agents are asked concurrently. The actuator of the watch file makes its dry run, as `rolecall replace --dry-run`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from rolecall.core.config.watched import WatchedConfig
from rolecall.core.diagnosis import PlanTarget
from rolecall.core.errors import ActuatorError
from rolecall.core.http import HttpFailed, request
from rolecall.core.ids import NodeId, ProcessId, ReplicaId
from rolecall.core.telemetry import (
    UNCOUNTED,
    AgentEvent,
    AgentEventKind,
    GpuSample,
    ProcessSample,
    SampleBatch,
    job_names,
)
from rolecall.core.text import plain
from rolecall.detector.base.observation import Observation
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, checked_news
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.recovery.actuators.targets.target import Member, Target
from rolecall.watch.agents import UniqueReplicaSource, resolve_names, url_of
from rolecall.watch.capabilities import JobFacts, NodeState, RankFacts, Replacement
from rolecall.watch.dry_run import dry_run
from rolecall.watch.job import ALL_JOBS

ASK_SECONDS: Final = 5.0
STACKS_SECONDS: Final = 15.0
"""An agent gives a stack up after 10 s."""
ANSWER_BYTES_MAX: Final = 16 << 20
PAGES_MAX: Final = 64
"""Of an agent's events, 1,000 each."""
ASKED_AT_ONCE: Final = 32
DRY_RUNS_MAX: Final = 64
DRY_RUNS_AT_ONCE: Final = 8
REASON_CHARACTERS: Final = 300
_STATE = re.compile(r"^rolecall_(probe_up|engine_info)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoAnswer(Exception):
    """An agent does not answer; the text says why."""


Get = Callable[[str, str, float], bytes]
"""Body of the answer of the agent at a URL to a path, within seconds. Raises NoAnswer."""


def getter(authorization: Callable[[str], str]) -> Get:
    """`authorization`: URL -> value of that header; empty: none is sent."""

    def get(url: str, path: str, seconds: float) -> bytes:
        header = authorization(url)
        try:
            answer = request(
                "GET",
                url.rstrip("/") + path,
                headers={"Authorization": header} if header else {},
                deadline_seconds=seconds,
                bytes_max=ANSWER_BYTES_MAX,
            )
        except HttpFailed as e:
            raise NoAnswer(plain(str(e), REASON_CHARACTERS)) from None
        if answer.status != HTTPStatus.OK:
            raise NoAnswer(_refusal(answer.status, answer.body))
        return answer.body

    return get


def _refusal(status: int, body: bytes) -> str:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"it wants a user or its token (status {status}): --credentials"
    try:
        return plain(str(json.loads(body)["error"]), REASON_CHARACTERS)
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


@dataclass(slots=True)
class _Told:
    """What one agent tells."""

    state: NodeState
    batches: list[SampleBatch] = field(default_factory=list)
    events: list[AgentEvent] = field(default_factory=list)


def read_job(
    entries: Sequence[str],
    job: str,
    watched: WatchedConfig | None,
    *,
    wall_at: float,
    ask_node: Callable[[str], str],
    get: Get,
    may_read_stacks: Callable[[str], bool],
) -> JobFacts:
    """`entries`: agents, as `watch.agents.checked_entries` takes them. `job`: run id or rendezvous, or `all`.
    `ask_node`: node of an agent, as `watch.agents.node_of`. `may_read_stacks`: whether the token of the agent at a URL
    is known."""
    names, problems = resolve_names(list(entries), ask_node)
    lost = [NodeState(node=e, url=url_of(e), unreachable=_problem_of(e, problems)) for e in entries if e not in names]
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE) as pool:
        told = list(pool.map(lambda item: _ask(item[1], url_of(item[0]), get, may_read_stacks), names.items()))
    found = assemble([t.batches for t in told], [e for t in told for e in t.events], job, wall_at)
    facts = replace(found, nodes=(*(t.state for t in told), *lost), watched=watched)
    if watched is None or watched.actuator is None:
        return facts
    target = target_of(watched.actuator)
    return replace(facts, supports=target.supports, replacements=replacements(facts.ranks, watched.roles, target))


def _problem_of(entry: str, problems: Sequence[str]) -> str:
    start = f"agents: {entry}: "
    return next((p.removeprefix("agents: ") for p in problems if p.startswith(start)), f"{entry}: no answer")


def _ask(node: str, url: str, get: Get, may_read_stacks: Callable[[str], bool]) -> _Told:
    told = _Told(NodeState(node=node, url=url))
    try:
        after = since = 0
        for _ in range(PAGES_MAX):
            answer = get(url, f"/v1/news?after={after}&since={since}&wait=0", ASK_SECONDS)
            batch, events = checked_news(json.loads(answer), node)
            told.batches.append(batch)
            told.events += events.events
            since = batch.cursor
            if not events.events or events.events[-1].seq >= events.newest:
                break
            after = events.events[-1].seq
        page = get(url, "/metrics", ASK_SECONDS).decode("utf-8", "replace")
    except (NoAnswer, InvalidAgentResponse, ValueError) as e:
        told.state = replace(told.state, unreachable=plain(str(e), REASON_CHARACTERS))
        return told
    told.state = _state(told, page)
    alive = next((s.process.pid for b in reversed(told.batches) for s in reversed(b.processes) if s.alive), 0)
    if alive and may_read_stacks(url):
        try:
            get(url, f"/v1/evidence/stacks?pid={alive}", STACKS_SECONDS)
            told.state = replace(told.state, stacks="")
        except NoAnswer as e:
            told.state = replace(told.state, stacks=str(e))
    return told


def node_state(node: str, url: str, page: str) -> NodeState:
    """The collectors and engines of a node, by the page `/metrics` of its agent."""
    probes, engines = dict[str, bool](), dict[tuple[str, int], str]()
    for kind, text, value in _STATE.findall(page):
        labels = dict(_LABEL.findall(text))
        if kind == "probe_up":
            probes[labels.get("probe", "")] = float(value) > 0
        elif labels.get("rank", "").isdecimal():
            engines[labels.get("replica", ""), int(labels["rank"])] = labels.get("server", "")
    return NodeState(node=node, url=url, probes=probes, engines=engines)


def _state(told: _Told, page: str) -> NodeState:
    """`page`: of `/metrics`."""
    state = node_state(told.state.node, told.state.url, page)
    reasons = {
        e.detail.get("probe", ""): plain(e.detail.get("reason", ""), REASON_CHARACTERS)
        for e in told.events
        if e.kind is AgentEventKind.PROBE_DOWN
    }
    gpus: dict[int, GpuSample] = {g.gpu: g for b in told.batches for g in b.gpus}
    return replace(
        state,
        reasons={probe: reason for probe, reason in reasons.items() if not state.probes.get(probe, False)},
        gpus=tuple(gpus[n] for n in sorted(gpus)),
    )


class _Once:
    """A source that has one observation."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen

    def poll(self, timeout_seconds: float) -> Observation:
        del timeout_seconds
        return self._seen


def assemble(
    batches: Sequence[Sequence[SampleBatch]], events: Sequence[AgentEvent], job: str, wall_at: float
) -> JobFacts:
    """The ranks that run, named as a watch names them. `batches`: of each agent."""
    flat = tuple(b for of_agent in batches for b in of_agent)
    named = UniqueReplicaSource(_Once(Observation(wall_at=wall_at, batches=flat, events=tuple(events)))).poll(0.0)
    registered: dict[ProcessId, list[AgentEvent]] = {}
    for event in named.events:
        if event.kind is AgentEventKind.REGISTERED and event.process is not None:
            registered.setdefault(event.process, []).append(event)
    samples: dict[ProcessId, list[ProcessSample]] = {}
    for batch in named.batches:
        for sample in batch.processes:
            samples.setdefault(sample.process, []).append(sample)
    ranks, others, unknown = [], set[str](), 0
    for process, seen in samples.items():
        if not seen[-1].alive:
            continue
        of_it = registered.get(process, [])
        jobs = {name for event in of_it for name in job_names(event)}
        if job in (ALL_JOBS, *jobs):
            ranks.append(rank_facts(process, tuple(seen), of_it))
        elif jobs:
            others.add(next(name for event in reversed(of_it) for name in job_names(event)))
        else:
            unknown += 1
    return JobFacts(ranks=tuple(ranks), other_jobs=tuple(sorted(others)), unknown_job=unknown)


def rank_facts(process: ProcessId, samples: tuple[ProcessSample, ...], registered: Sequence[AgentEvent]) -> RankFacts:
    """`samples`: at least one. `registered`: its registrations. Both oldest first."""
    newest, detail = samples[-1], dict[str, str]()
    for event in registered:  # a process that a rule found, and that registers itself later, tells more
        detail |= event.detail
    if registered and "found_by" not in registered[-1].detail:
        detail.pop("found_by", None)
    # Samples before a promotion or its own registration have another name.
    own = tuple(s for s in samples if (s.replica, s.rank) == (newest.replica, newest.rank))
    return RankFacts(
        process=process,
        role=newest.role,
        replica=newest.replica,
        rank=newest.rank,
        samples=own,
        job=next((name for event in reversed(registered) for name in job_names(event)), ""),
        rendezvous=detail.get("rendezvous", ""),
        registered_at=min((e.wall_at for e in registered), default=0.0),
        found_by=detail.get("found_by", ""),
        launcher=detail.get("launcher", ""),
        source=detail.get("source", ""),
        flight_recorder=detail.get("flight_recorder", ""),
        pod_uid=detail.get("pod_uid", ""),
        slurm_step=detail.get("slurm_step", ""),
    )


def replacements(ranks: Sequence[RankFacts], roles: Sequence[str], target: Target) -> Mapping[str, Replacement]:
    """By replica, of these roles. A watch that begins now would count each as incarnation 1. The first `DRY_RUNS_MAX`
    replicas are tried."""
    known = [(1 if r.role in roles else UNCOUNTED, _member(r)) for r in ranks if r.newest.incarnation == UNCOUNTED]
    counted = sorted({member.replica for n, member in known if n})

    def tried(replica: str) -> Replacement:
        node = next(member.node for _, member in known if member.replica == replica)
        who = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId(node))
        try:
            found = dry_run(target, who, known)
        except ActuatorError as e:
            return Replacement(refused=plain(str(e), REASON_CHARACTERS))
        return Replacement(
            calls=tuple(call.shown for call in found.calls), also=found.also, beyond=tuple(found.beyond(counted))
        )

    some = counted[:DRY_RUNS_MAX]
    with ThreadPoolExecutor(max_workers=DRY_RUNS_AT_ONCE) as pool:
        return dict(zip(some, pool.map(tried, some), strict=True))


def _member(rank: RankFacts) -> Member:
    return Member(
        replica=rank.replica,
        rank=rank.rank,
        node=rank.process.node,
        pid=rank.process.pid,
        start_ticks=rank.process.start_ticks,
        job=rank.job,
        rendezvous=rank.rendezvous,
        registered_at=rank.registered_at,
        pod_uid=rank.pod_uid,
        slurm_step=rank.slurm_step,
    )
