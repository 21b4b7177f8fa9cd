"""What a watch can see, name, replace and end in a job as it runs now, and why not the rest. Pure (`rolecall doctor
--job`).

    samples and registrations of a minute, state of the agents, dry runs of the actuator  ->  capabilities of each rank

`yes`: it works. `partly`: in some cases, which the reason names. `no`: it does not, with what the user can do. `none`:
there is nothing, as no GPU on the node. The conditions are those of the live detector's stages, by their own constants.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rolecall.core.config.watched import WatchedConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import ProcessId
from rolecall.core.metrics.collectors import SGLANG, VLLM
from rolecall.core.telemetry import (
    PHASES_WITHOUT_DUE_PROGRESS,
    UNCOUNTED,
    GpuSample,
    Phase,
    ProcessSample,
    is_instrumented,
)
from rolecall.core.text import counted
from rolecall.detector.live.monitored_process import TRAINING_VALUES
from rolecall.detector.live.run_panels import PEERS_MIN
from rolecall.detector.live.stages.exits.uninstrumented import STARVED_SECONDS, STOPPED_SECONDS, STUCK_SECONDS
from rolecall.detector.live.stages.progress.skipped import RANKS_MIN as RANKS_THAT_COUNT_MIN
from rolecall.detector.live.stages.progress.wait import RANKS_MIN
from rolecall.recovery.guards import SERVING_ROLE

RECORDER_OFF = ("0", "false", "off", "no")
SET_RECORDER = "set TORCH_FR_BUFFER_SIZE=2000 before torch is imported; `rolecall exec` does"
TWO_LINES = "two lines in the training loop (docs/howto/instrument.md)"
INTEGRATIONS = "docs/howto/frameworks.md"
OPTIMIZES = ("slime-trainer", "openrlhf-trainer", "openrlhf-critic", "nemo-rl-trainer", "nemo-rl-critic")
"""Rules whose actors report by `rolecall env` alone: their rank is known by their first optimizer step."""
ENGINES = ("verl-rollout", "slime-rollout", "openrlhf-rollout", "nemo-rl-rollout")
TORCHRUN, SLURM, SRUN = "torchrun", "slurm", "srun"


class Can(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"
    NONE = "none"


class About(StrEnum):
    SEEN = "seen"
    NAMED = "named"
    REPLACED = "replaced"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """`because`: by what, or why not. `fix`: what the user can do; empty: nothing, or nothing is missing."""

    about: About
    name: str
    can: Can
    because: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One process as its agent tells it. `samples`: of the last minute, oldest first, at least one. The other fields
    are those of its newest registration (`core.telemetry.AgentEvent`), empty where it does not tell them."""

    process: ProcessId
    role: str
    replica: str
    rank: int
    samples: tuple[ProcessSample, ...]
    job: str = ""
    rendezvous: str = ""
    registered_at: float = 0.0  # wall seconds of its node; 0: the agent's log has no registration of it
    found_by: str = ""  # rule of the agent; empty: it registered itself
    launcher: str = ""  # torchrun, srun, ray
    source: str = ""  # hooks, integration; empty: the job's own calls
    flight_recorder: str = ""  # variable of its environment; empty: not set
    pod_uid: str = ""
    slurm_step: str = ""

    @property
    def newest(self) -> ProcessSample:
        return self.samples[-1]

    @property
    def reports(self) -> bool:
        """It has a state page."""
        return is_instrumented(self.newest) and not self.found_by

    @property
    def lacks_page(self) -> bool:
        """It has registered itself, and its agent cannot read its state page."""
        return self.registered_at > 0 and not self.found_by and not self.reports

    @property
    def phases(self) -> frozenset[str]:
        return frozenset(s.phase for s in self.samples if is_instrumented(s))

    @property
    def is_of_torchrun(self) -> bool:
        return TORCHRUN in (self.found_by, self.launcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One agent. `unreachable`: why it does not answer; empty: it does. `probes`: whether each collector can read;
    `reasons`: why not. `stacks`: why the stack of a rank cannot be read; empty: it can; None: not asked, for want of
    the agent's token. `engines`: those whose own metrics the agent reads: (replica, rank) -> kind of server."""

    node: str
    url: str = ""
    unreachable: str = ""
    probes: Mapping[str, bool] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] = ()
    stacks: str | None = None
    engines: Mapping[tuple[str, int], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Dry run for a replica (`dry_run.py`). `refused`: why the target refuses; then nothing else is known. `calls`:
    that would be made; `also`: other replicas that would end; `beyond`: those of them that the watch file excludes."""

    calls: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """`watched`: of the watch file; None: none was given. `replacements`: by replica, of the roles that it names.
    `supports`: what its actuator can do."""

    ranks: tuple[RankFacts, ...] = ()
    nodes: tuple[NodeState, ...] = ()
    watched: WatchedConfig | None = None
    replacements: Mapping[str, Replacement] = field(default_factory=dict)
    supports: frozenset[ActionKind] = frozenset()
    other_jobs: tuple[str, ...] = ()
    unknown_job: int = 0  # processes whose registration the agents no longer have


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapabilities:
    facts: RankFacts
    capabilities: tuple[Capability, ...]

    def to_dict(self) -> dict[str, Any]:
        it = self.facts
        return {
            "replica": it.replica,
            "role": it.role,
            "rank": it.rank,
            "node": it.process.node,
            "pid": it.process.pid,
            "job": it.job,
            "found_by": it.found_by or "reporter",
            "step": it.newest.step if it.reports else None,
            "capabilities": [asdict(c) for c in self.capabilities],
        }


def capabilities(facts: JobFacts) -> tuple[RankCapabilities, ...]:
    """Of each rank, by replica and rank."""
    nodes = {n.node: n for n in facts.nodes}
    phases: dict[str, set[str]] = {}
    for r in facts.ranks:
        phases.setdefault(r.replica, set()).update(r.phases)
    replicas, roles = Counter(r.replica for r in facts.ranks), Counter((r.role, r.job) for r in facts.ranks)
    num_nodes = len({r.process.node for r in facts.ranks})
    sizes = _Sizes(replicas, roles, phases, num_nodes)  # once: a job has thousands of ranks
    found = []
    for rank in sorted(facts.ranks, key=lambda r: (r.replica, r.rank, r.process)):
        at = _At(rank, nodes.get(rank.process.node, NodeState(node=rank.process.node)), facts, sizes)
        found.append(RankCapabilities(facts=rank, capabilities=(*_seen(at), *_named(at), *_replaced(at), _ended(at))))
    return tuple(found)


class _Sizes(NamedTuple):
    """Ranks of each replica, and of each (role, job); the phases in which those of each replica were seen; and how many
    nodes the job has."""

    replicas: Mapping[str, int]
    roles: Mapping[tuple[str, str], int]
    phases: Mapping[str, Collection[str]]
    nodes: int


class _At(NamedTuple):
    """A rank, its node and its job."""

    rank: RankFacts
    node: NodeState
    job: JobFacts
    sizes: _Sizes

    @property
    def engine(self) -> str:
        """Kind of server whose metrics the agent reads for this process, which reports nothing itself; else empty."""
        return "" if self.rank.reports else self.node.engines.get((self.rank.replica, self.rank.rank), "")

    @property
    def of_replica(self) -> int:
        """Ranks of its replica."""
        return self.sizes.replicas[self.rank.replica]

    @property
    def of_role(self) -> int:
        """Ranks of its role in its job."""
        return self.sizes.roles[self.rank.role, self.rank.job]

    @property
    def due_phases(self) -> list[str]:
        """Phases of the last minute in which silence is a fault."""
        return sorted(self.rank.phases - PHASES_WITHOUT_DUE_PROGRESS - {Phase.START})

    @property
    def only_waits(self) -> bool:
        """It works, and enters no phase in which progress is due. Such a phase may be too short to be sampled: of one
        that is entered, each unit of work has two entries at least, into it and out of it."""
        newest = self.rank.newest
        return not self.due_phases and newest.phase_entries <= ENTRIES_PER_UNIT * newest.progress

    @property
    def has_worked(self) -> bool:
        return self.rank.newest.progress > 0 or bool(self.due_phases)

    @property
    def recorder(self) -> Can:
        """Whether a Flight Recorder dump can be had of it."""
        if not self.rank.reports or self.rank.flight_recorder.strip().lower() in RECORDER_OFF:
            return Can.NO
        return Can.YES if self.rank.flight_recorder else Can.PARTLY

    @property
    def how_to_report(self) -> str:
        """How steps of this process become known."""
        rule, code = self.rank.found_by, TWO_LINES
        if self.engine:
            return ""
        if self.rank.lacks_page:
            return NO_STATE_PAGE[1]
        if rule in ENGINES:
            return (
                "if it is vLLM, or SGLang with --enable-metrics, name its metrics page in agent.yaml: "
                f"engines: {{servers: [{{url: ..., replica: {self.rank.replica}}}]}}"
            )
        if rule.startswith("verl"):
            return (
                f'`pip install` rolecall on each node, and `eval "$(rolecall env)"` before `ray start` ({INTEGRATIONS})'
            )
        if rule in OPTIMIZES:
            return f'`eval "$(rolecall env)"` before `ray start` ({INTEGRATIONS})'
        if rule.startswith(("slime", "openrlhf", "nemo-rl")):
            return f"no integration knows this process: {code}"
        if rule == "ray-train":
            return f"TorchTrainer(reported(train_func), ...) ({INTEGRATIONS})"
        if rule == SLURM:
            return f"start it with `srun rolecall exec -- COMMAND`, or {code}"
        return f"start it with `rolecall exec -- COMMAND`, or {code}"


# --- seen -------------------------------------------------------------------------------------------------------------

ENTRIES_PER_UNIT = 1.5
"""Between the one of a process that only tells its units, and the two of one that enters a phase for each."""
NO_STATE_PAGE = "its state page cannot be read", "`rolecall doctor` on that node checks the agent"
HOOKS = "hooks"
"""`source` of agent/autostart/training.py."""
_BY = {HOOKS: "torch's hooks (`rolecall exec`)", "integration": "the integration of its framework"}


def _seen(at: _At) -> Iterable[Capability]:
    yield Capability(
        about=About.SEEN,
        name="process",
        can=Can.YES,
        because="CPU, memory, state and end, from the kernel",
    )
    yield _as_seen("steps", _steps(at))
    yield _as_seen("phases", _phases(at))
    yield _as_seen("own time of a step", _own_time(at))
    yield _as_seen("collectives", _collectives(at))
    yield _as_seen("loss, reward", _values(at))
    yield _as_seen("stacks", _stacks(at))
    yield _as_seen("GPU", _gpu(at))
    yield _as_seen("kernel log", _kernel_log(at))


class _Answer(NamedTuple):
    can: Can
    because: str
    fix: str = ""


def _as_seen(name: str, answer: _Answer) -> Capability:
    return Capability(about=About.SEEN, name=name, **answer._asdict())


def _steps(at: _At) -> _Answer:
    rank = at.rank
    if not rank.reports:
        if at.engine:
            return _Answer(Can.PARTLY, "requests and tokens, from the metrics of its engine; an engine has no steps")
        if rank.lacks_page:
            return _Answer(Can.NO, *NO_STATE_PAGE)
        by = f"rule {rank.found_by}" if rank.found_by else "a rule"
        return _Answer(Can.NO, f"found by {by}, it reports nothing: only its process is seen", at.how_to_report)
    by = _BY.get(rank.source, "the job's own calls of the reporter")
    if not rank.newest.page_ok:
        return _Answer(Can.NO, *NO_STATE_PAGE)
    if rank.newest.step < 0 and not rank.newest.progress:
        return _Answer(Can.PARTLY, f"none yet, from {by}", "ask again after its first step")
    return _Answer(Can.YES, f"from {by}")


def _phases(at: _At) -> _Answer:
    rank = at.rank
    if at.engine:
        return _Answer(Can.PARTLY, "whether it runs requests, from the metrics of its engine")
    if not rank.reports:
        return _Answer(Can.NO, "it reports nothing", at.how_to_report)
    if not at.has_worked:
        return _Answer(Can.PARTLY, "it has only started", "ask again after its first steps")
    if rank.source == HOOKS and at.only_waits:
        return _Answer(
            Can.NO,
            "only `wait`: its model is compiled, and hooks would compile it again",
            f"an integration ({INTEGRATIONS}), or {TWO_LINES}",
        )
    # Of its whole replica: which rank is sampled in a short phase is chance, and what its peers do it does, too.
    phases = at.sizes.phases[rank.replica]
    due = {*phases} - PHASES_WITHOUT_DUE_PROGRESS - {Phase.START}
    short = "" if due or at.only_waits else ", and others that are too short to be sampled"
    return _Answer(Can.YES, f"in the last minute: {', '.join(sorted(phases))}{short}")


def _own_time(at: _At) -> _Answer:
    rank = at.rank
    if not rank.reports:
        return _Answer(Can.NO, "it reports nothing", at.how_to_report)
    if rank.newest.busy_seconds > 0 and _may_include_waits(at):
        return _Answer(
            Can.PARTLY,
            "the time of its units of work; that of a `reporter.step` includes what it waits for the other ranks in it",
            "reporter.collective() around these waits, or reporter.progress(busy_seconds=...) "
            "(docs/howto/instrument.md)",
        )
    if rank.newest.busy_seconds > 0:
        return _Answer(Can.YES, "its own time, without what it waits for others")
    return _Answer(
        Can.NO,
        "its units of work tell no time of their own",
        "reporter.progress(busy_seconds=...) or reporter.collective() in the loop (docs/howto/instrument.md)",
    )


def _may_include_waits(at: _At) -> bool:
    """Of a job that calls the reporter itself, and tells no wait for other ranks."""
    newest = at.rank.newest
    tells_waits = newest.collectives_entered or newest.exchanges
    return newest.incarnation == UNCOUNTED and not at.rank.source and not tells_waits and at.of_role > 1


def _collectives(at: _At) -> _Answer:
    rank = at.rank
    if at.of_replica < 2 and at.of_role < 2:
        return _Answer(Can.NONE, "one rank: it waits for no other")
    if rank.newest.collectives_entered:
        return _Answer(Can.YES, "it counts those that it enters")
    if rank.newest.exchanges:
        return _Answer(Can.YES, "it counts its waits for the other ranks")
    if rank.newest.collectives_issued >= 0:
        return _Answer(Can.YES, "torch's count of those of its default process group")
    return _dumps(at)


def _dumps(at: _At) -> _Answer:
    """Of its Flight Recorder."""
    match at.recorder:
        case Can.YES:
            return _answer_with_token(at, "Flight Recorder dumps, during an incident")
        case Can.PARTLY:
            return _Answer(Can.PARTLY, "TORCH_FR_BUFFER_SIZE is not set: torch's own default decides", SET_RECORDER)
    if at.rank.reports:
        return _Answer(Can.NO, "PyTorch's Flight Recorder is off", SET_RECORDER)
    return _Answer(Can.NO, "no Flight Recorder dump without the reporter", at.how_to_report)


GIVE_TOKEN = (
    "`umask 077; rolecall agent token --bearer > credentials` on a node, and --credentials credentials here and for "
    "the watch"
)


def _answer_with_token(at: _At, what: str) -> _Answer:
    """Evidence needs the agent's token."""
    if at.node.stacks is None:
        return _Answer(Can.NO, f"{what}: the agent's token is not given", GIVE_TOKEN)
    return _Answer(Can.YES, what)


def _values(at: _At) -> _Answer:
    if not at.rank.reports:
        return _Answer(Can.NO, "it reports nothing", at.how_to_report)
    newest = at.rank.newest
    known = [n for n in TRAINING_VALUES if getattr(newest, n) == getattr(newest, n)]
    if known:
        return _Answer(Can.YES, f"it reports {', '.join(known)}")
    if newest.unfinite:
        return _Answer(Can.YES, "it reported values that are not finite")
    return _Answer(
        Can.NO, "it reports none", f"reporter.update(loss=...) in the loop, or an integration ({INTEGRATIONS})"
    )


def _stacks(at: _At) -> _Answer:
    if at.node.stacks is None:
        return _Answer(Can.NO, "the agent's token is not given", GIVE_TOKEN)
    if at.node.stacks:
        return _Answer(Can.NO, at.node.stacks, "`rolecall doctor` on that node names what is missing")
    return _Answer(Can.YES, "py-spy, asked by the agent of its node")


def _gpu(at: _At) -> _Answer:
    node, mine = at.node, [g for g in at.node.gpus if at.rank.process.pid in g.pids]
    if mine:
        return _Answer(Can.YES, f"{counted(len(mine), 'GPU')} of this process")
    if node.gpus:
        return _Answer(
            Can.PARTLY,
            f"{counted(len(node.gpus), 'GPU')} of its node, none of them known to be used by this process",
            "the agent needs the node's PIDs (hostPID) or CUDA_VISIBLE_DEVICES of the process",
        )
    if node.probes.get("gpu"):
        return _Answer(Can.NONE, "its agent sees no GPU")
    reason = node.reasons.get("gpu", "")
    text = f"its agent reads no GPU{f': {reason}' if reason else ''}"
    return _Answer(Can.NONE, text, "if the node has GPUs, `rolecall doctor` there says what is missing")


def _kernel_log(at: _At) -> _Answer:
    if at.node.probes.get("kernel_log"):
        return _Answer(Can.YES, "XIDs, OOM kills, links")
    reason = at.node.reasons.get("kernel_log", "") or "its agent does not read it"
    return _Answer(Can.NO, reason, "`rolecall doctor` on that node says which permission is missing")


# --- named ------------------------------------------------------------------------------------------------------------


def _named(at: _At) -> Iterable[Capability]:
    for name, answer in (
        ("exit", _exit(at)),
        ("hang in a step", _hang_in_step(at)),
        ("hang between steps", _hang_between(at)),
        ("hang at a lock", _hang_at_lock(at)),
        ("rank that holds up a collective", _holds_up(at)),
        ("slow", _slow(at)),
        ("values that are not finite", _not_finite(at)),
        ("GPU fault", _gpu_fault(at)),
    ):
        yield Capability(about=About.NAMED, name=name, **answer._asdict())


def _exit(at: _At) -> _Answer:
    oom = "" if at.node.probes.get("kernel_log") else "; an OOM kill is guessed from the host's counter"
    if at.rank.reports:
        return _Answer(Can.YES, f"signal or exit code, and the exception with its line{oom}")
    return _Answer(Can.PARTLY, f"signal or exit code, without the exception{oom}", at.how_to_report)


KERNEL_ONLY = (
    f"only one that the kernel shows as stopped ({STOPPED_SECONDS:.0f} s) or waiting for a disk or driver "
    f"({STUCK_SECONDS:.0f} s): without steps, a silent rank is not blamed"
)


def _hang_in_step(at: _At) -> _Answer:
    if at.engine == VLLM:
        return _Answer(Can.YES, "open requests and no new token, by the metrics of its engine")
    if at.engine == SGLANG:
        return _Answer(Can.PARTLY, f"{KERNEL_ONLY}, and SGLang's metrics stand still in healthy engines, too")
    if not at.rank.reports:
        return _Answer(Can.PARTLY, KERNEL_ONLY, at.how_to_report)
    if not at.has_worked:
        return _Answer(Can.PARTLY, "it has only started: its first step has a deadline of its own", _phases(at).fix)
    if at.only_waits:
        return _hang_between(at)  # its steps look like the time between them
    return _Answer(Can.YES, "by its deadline, which is learned from its steps")


def _hang_between(at: _At) -> _Answer:
    if at.rank.newest.incarnation != UNCOUNTED:
        return _Answer(Can.YES, "its runtime names what it waits for")
    if not at.rank.reports:
        return _Answer(Can.PARTLY, KERNEL_ONLY, at.how_to_report)
    if at.due_phases and not at.rank.phases & PHASES_WITHOUT_DUE_PROGRESS and not at.rank.source:
        return _Answer(Can.YES, "by its deadline: its phase is the same between steps")
    if at.of_replica < RANKS_MIN:
        return _Answer(
            Can.PARTLY,
            "only a stopped process: no progress is due in `wait`, and no other rank waits for this one",
            f"{TWO_LINES}: with them silence between steps counts, too",
        )
    stacks = _stacks(at)
    if stacks.can is Can.YES:
        return _Answer(Can.YES, "by the stacks of the ranks, once all of them stand still")
    return _Answer(Can.PARTLY, f"only a stopped process; stacks would tell: {stacks.because}", stacks.fix)


def _hang_at_lock(at: _At) -> _Answer:
    in_step = _hang_in_step(at)
    if at.engine == VLLM:
        return _Answer(Can.PARTLY, "as a hang with open requests, not at which lock")
    if in_step.can is not Can.YES:
        return _Answer(Can.NO, "a process at a lock looks like one that waits", in_step.fix)
    stacks = _stacks(at)
    if stacks.can is Can.YES:
        return _Answer(Can.YES, "in a step, by heartbeat and CPU use; its line by its stack")
    return _Answer(Can.PARTLY, f"in a step, by heartbeat and CPU use; not its line: {stacks.because}", stacks.fix)


def _holds_up(at: _At) -> _Answer:
    seen, newest, dumps = _collectives(at), at.rank.newest, _dumps(at)
    if seen.can is Can.NONE or newest.collectives_entered or newest.exchanges:
        return seen
    if dumps.can is Can.YES:
        return dumps
    by = ["where stacks show it"] if at.rank.reports and _stacks(at).can is Can.YES else []
    if newest.collectives_issued >= 0 and at.of_replica >= RANKS_THAT_COUNT_MIN:
        by.append("where it has left one out")
    return _Answer(Can.PARTLY if by else Can.NO, "; ".join([*by, dumps.because]), dumps.fix)


def _slow(at: _At) -> _Answer:
    own = _own_time(at)
    peers = at.of_role - 1
    against = f"against {counted(peers, 'peer')}" if peers else "against its own past only: it has no peer"
    if own.can is Can.YES:
        return _Answer(Can.YES if peers else Can.PARTLY, f"by its time in each unit of work, {against}")
    if at.of_role >= PEERS_MIN:
        return _Answer(
            Can.PARTLY, f"where its CPU, memory or GPU differs from its {peers} peers; {own.because}", own.fix
        )
    few = f"{PEERS_MIN} ranks of a role are compared by CPU, memory and GPU, and there {'are' if peers else 'is'}"
    return _Answer(Can.PARTLY, f"only if starved of CPU for {STARVED_SECONDS:.0f} s: {few} {at.of_role}", own.fix)


def _not_finite(at: _At) -> _Answer:
    seen = _values(at)
    return _Answer(Can.YES, "NaN and infinities in what it reports") if seen.can is Can.YES else seen


def _gpu_fault(at: _At) -> _Answer:
    probes = at.node.probes
    by = [words for probe, words in (("gpu_events", "NVML"), ("kernel_log", "the kernel log")) if probes.get(probe)]
    if not at.node.gpus:
        gpu = _gpu(at)
        return _Answer(Can.NONE, gpu.because, gpu.fix)
    if not by:
        return _Answer(Can.NO, "neither NVML's events nor the kernel log can be read", _kernel_log(at).fix)
    return _Answer(Can.YES, f"XIDs and lost GPUs, from {' and '.join(by)}")


# --- replaced ---------------------------------------------------------------------------------------------------------


def _replaced(at: _At) -> Iterable[Capability]:
    replica = _replace_replica(at)
    yield Capability(about=About.REPLACED, name="replica", **replica._asdict())
    yield Capability(about=About.REPLACED, name="replica, on another node", **_leave_node(at, replica)._asdict())


def _replace_replica(at: _At) -> _Answer:
    rank, watched = at.rank, at.job.watched
    if rank.newest.incarnation != UNCOUNTED:
        return _Answer(Can.YES, "by its own runtime, as its job file says (recovery.mode)")
    if watched is None:
        return _Answer(Can.NO, "no watch file is given (--config)", _actuator_for(at))
    if watched.actuator is None:
        return _Answer(Can.NO, "the watch file names no actuator", _actuator_for(at))
    kind = watched.actuator.kind
    if rank.role not in watched.roles:
        return _Answer(
            Can.NO,
            f"role {rank.role} is not in `roles` of the watch file",
            f"name the role there: roles: [{rank.role}]",
        )
    tried = at.job.replacements.get(rank.replica)
    if tried is None:
        return _Answer(Can.PARTLY, f"by actuator {kind}; not tried here", "rolecall replace REPLICA --dry-run")
    if tried.refused:
        return _Answer(Can.NO, f"actuator {kind} refuses: {tried.refused}", "docs/howto/replace.md has what it needs")
    if tried.beyond:
        others = ", ".join(tried.beyond)
        return _Answer(
            Can.NO,
            f"{others} would end with it, of a role that is not in `roles`",
            "name that role, too, or run the replica in a unit of its own",
        )
    what = f"by {counted(len(tried.calls), 'call')} of actuator {kind}"
    if tried.also:
        what += f"; with it ends {', '.join(tried.also)}"
    if rank.is_of_torchrun and at.of_replica == at.of_role and at.of_replica > 1:
        return _Answer(
            Can.PARTLY,
            f"{what}: all ranks of its torchrun job, which starts them again only as a whole",
            "torchrun --max-restarts 3, or one torchrun and one ROLECALL_REPLICA for each replica (torchft)",
        )
    if watched.recovery.mode == "observe":
        return _Answer(
            Can.PARTLY, f"{what}; mode observe calls nothing", "recovery: {mode: approve}, then act, in the watch file"
        )
    return _Answer(Can.YES, f"{what}, in mode {watched.recovery.mode}")


def _leave_node(at: _At, replica: _Answer) -> _Answer:
    """For a fault that stays with the node."""
    if at.rank.newest.incarnation != UNCOUNTED or replica.can is Can.NO:
        return replica
    if ActionKind.REPLACE_NODE not in at.job.supports:
        return _Answer(Can.NO, "this actuator does not move a replica to another node: on-call is paged", "")
    return replica


def _actuator_for(at: _At) -> str:
    """The actuator that fits what is known of the process."""
    rank = at.rank
    role = f"roles: [{rank.role}]"
    where = "docs/howto/replace.md"
    if rank.found_by == "slime-rollout":
        return f"actuator: {{kind: processes}}; older versions need --use-fault-tolerance in the job ({where})"
    if rank.found_by == "nemo-rl-rollout":
        return f"actuator: {{kind: processes}}, with generation_fleet_health in the job ({where})"
    if rank.found_by == "verl-rollout":
        return f"standalone replicas: actuator: {{kind: verl}}, with rolecall's plugin in the job ({where})"
    if rank.found_by.startswith("verl"):
        return "none: verl's colocated workers are not replaced alone"
    if rank.pod_uid:
        return f"{role} and actuator: {{kind: kubernetes}}, or kuberay for a RayCluster ({where})"
    if rank.is_of_torchrun and at.of_replica == at.of_role and at.of_replica > 1:
        return f"none for one rank: those of a torchrun job start again together. torchft replaces one ({where})"
    if rank.slurm_step or SRUN in (rank.launcher,) or rank.found_by == SLURM:
        return f"{role} and actuator: {{kind: slurm}}, where the replica is a job or step of its own ({where})"
    if rank.found_by.startswith(("openrlhf", "ray", "slime", "nemo-rl")) or rank.launcher == "ray":
        return f"{role} and actuator: {{kind: processes}}, for actors with max_restarts ({where})"
    return f"{role} and actuator: {{kind: processes}} where something starts it again, or command ({where})"


# --- ended ------------------------------------------------------------------------------------------------------------


def _ended(at: _At) -> Capability:
    return Capability(about=About.ENDED, name="orphaned processes of engines on its node", **_orphans(at)._asdict())


def _orphans(at: _At) -> _Answer:
    rank, watched = at.rank, at.job.watched
    reaper = watched.orphans if watched is not None else None
    if reaper is None and not at.engine and rank.role != SERVING_ROLE and rank.found_by not in ENGINES:
        return _Answer(Can.NONE, "it is not known as an engine")
    if rank.newest.incarnation != UNCOUNTED:
        return _Answer(Can.NO, "in a run of rolecall on-call gets the command")
    if watched is None or reaper is None:
        lacking = "no watch file is given (--config)" if watched is None else "the watch file has no `orphans`"
        fix = "orphans: {mode: act} in the watch file (docs/howto/replace.md)"
        return _Answer(Can.NO, f"{lacking}: on-call gets the command", fix)
    if not at.node.probes.get("orphans"):
        reason = at.node.reasons.get("orphans", "") or "its agent does not look for them"
        return _Answer(Can.NO, reason, "`orphans: {enabled: true}` in agent.yaml")
    if at.sizes.nodes > 1 and not reaper.run_on_node:
        nodes = counted(at.sizes.nodes, "node")
        return _Answer(
            Can.NO,
            f"the job runs on {nodes}, and the watch file does not say how to reach one",
            'orphans: {run_on_node: [ssh, "{node}"]}',
        )
    what = "processes of vLLM and SGLang, by PID and start time, with rolecall on their node"
    if watched.orphans_mode == "observe":
        return _Answer(
            Can.PARTLY, f"{what}; mode observe ends none", "orphans: {mode: approve}, then act, in the watch file"
        )
    return _Answer(Can.YES, f"{what}, in mode {watched.orphans_mode}; not tried here")
