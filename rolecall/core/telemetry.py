"""Samples of processes, host and GPUs, and agent events: the detector's only input.

Times: `at` is the node's CLOCK_MONOTONIC in seconds, `wall_at` the same moment in seconds since 1970. Counters are
cumulative since the process started; a consumer takes differences. Frozen, and they round-trip through `to_dict` and
`from_dict` (JSON), so that a detector's input can be stored with its diagnosis and replayed.
"""

import math
import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from rolecall.core.ids import NodeId, ProcessId


class Phase(StrEnum):
    """Current activity of a process. Peers are compared only within one phase.

    `idle`, `wait`, `paused` and `sleep` are phases in which no progress is due; `reduce` is a wait for peers in a
    collective.
    """

    START = "start"  # before the first unit of work: import, compile, load
    IDLE = "idle"  # no work assigned
    WAIT = "wait"  # legitimately waits for another role
    PAUSED = "paused"
    SLEEP = "sleep"  # rollout: its engine rests while the trainer on its machine works
    STEP = "step"  # a step of a job that names no phases: work and collectives, which may wait for peers
    COMPUTE = "compute"  # trainer: forward and backward of microbatches
    REDUCE = "reduce"  # trainer: inside the collective with its peers
    OPTIMIZER = "optimizer"
    PUBLISH = "publish"  # trainer: snapshot and manifest of a version
    COPY = "copy"  # copies state from a survivor
    CHECKPOINT = "checkpoint"  # trainer: copies its state, to be written to disk
    GENERATE = "generate"  # rollout: the engine has requests
    UPDATE = "update"  # rollout: pulls, proves and applies weights
    SCORE = "score"  # reward
    CONTROL = "control"  # controller: its loop turns


PHASES_WITHOUT_DUE_PROGRESS = frozenset({Phase.IDLE, Phase.WAIT, Phase.PAUSED, Phase.SLEEP})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One sample of a registered process: its state page joined with kernel data."""

    process: ProcessId
    role: str
    replica: str  # role/index; a standby is `standby/<index>`
    rank: int
    incarnation: int
    at: float
    wall_at: float
    alive: bool
    page_ok: bool  # False: the page could not be read consistently; page fields hold the last good values

    # From the state page, written by the process itself
    epoch: int = 0
    phase: str = Phase.START
    phase_since: float = 0.0  # node monotonic
    phase_entries: int = 0  # how often any phase was entered
    step: int = -1  # optimizer step it works on
    policy_version: int = -1  # version it holds
    progress: int = 0  # units of work finished: microbatches, engine steps, scored samples, loop turns
    progress_at: float = 0.0  # node monotonic, when `progress` last grew
    beats: int = 0  # ticks of a Python side thread: grows while the interpreter can run bytecode
    collectives_entered: int = 0
    collectives_done: int = 0
    collectives_issued: int = -1  # by torch's count, of the default process group; -1: unknown
    collectives_at_step: int = -1  # the same at the end of the last step of a job that names no phases
    collectives_at_begin: int = -1  # the same at the beginning of the next step; -1: not begun
    exchanges: int = 0  # begun with other ranks of its replica; of two that stand still, the lower is waited for
    busy_seconds: float = 0.0  # wall time spent in work units (engine steps, microbatches), without the next
    exchange_seconds: float = 0.0  # waited in work units for the other ranks of its replica
    loading_seconds: float = 0.0  # of the busy seconds, those in which a job that names no phases loaded data
    work_units: int = 0  # number of finished work units in busy_seconds
    tokens: int = 0
    requests_active: int = 0
    tokens_held: int = 0  # rollout: of the requests that it holds, generated here or elsewhere
    loss: float = float("nan")
    grad_norm: float = float("nan")
    reward: float = float("nan")
    unfinite: int = 0  # how often one of these three was NaN or infinite
    jumps: int = 0  # how often one of them left its own recent range (agent/reporter/jumps.py)
    healths: int = 0  # policy-health reports of a trainer; the following fields are of the newest, NaN: unknown
    entropy: float = float("nan")  # nats a token
    clip_fraction_low: float = float("nan")  # of the trained tokens, by the side of the clip
    clip_fraction_high: float = float("nan")
    ratio_mean: float = float("nan")  # policy over sampler
    ratio_max: float = float("nan")
    kl_sampler: float = float("nan")  # nats a token
    response_length: float = float("nan")  # mean tokens of finished answers
    truncated_fraction: float = float("nan")  # of these answers, truncated at max_response_tokens
    filtered_fraction: float = float("nan")  # uninformative share of the groups generated for the step
    log_ratio_max: float = float("nan")  # |log ratio| of tokens under the weights that generated them

    # From /proc
    proc_state: str = "?"  # R S D T Z X, or ? when masked or unknown
    cpu_seconds: float = 0.0  # user + system of all threads
    run_delay_seconds: float = 0.0  # runnable but waiting for a CPU, all threads (schedstat)
    main_run_delay_seconds: float = 0.0  # the same of the busiest (working) thread
    throttled_seconds: float = 0.0  # stopped by its cgroup's CPU quota
    rss_bytes: int = 0
    num_threads: int = 0
    major_faults: int = 0

    def to_dict(self) -> dict[str, Any]:
        # Not `asdict`, whose deep copy dominated the cost of a response. JSON has no NaN: absent means NaN.
        found = {k: v for k in self.__dataclass_fields__ if (v := getattr(self, k)) == v}
        who = self.process
        return {**found, "process": {"node": who.node, "pid": who.pid, "start_ticks": who.start_ticks}}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "process": ProcessId(**record["process"])})


NO_PAGE: Final = ""
"""Phase in a sample of a process whose state page was never read, as in an uninstrumented job: it has kernel data only.
Fields of the page are absent, because a progress of 0 would look like a hang."""
UNCOUNTED: Final = 0
"""Incarnation of a process that rolecall did not start: the number of its starts is unknown."""


def is_instrumented(sample: ProcessSample) -> bool:
    """Whether the page fields of this sample are valid."""
    return sample.phase != NO_PAGE


HEALTH_SIGNS = (
    *("entropy", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "ratio_max", "kl_sampler", "response_length"),
    *("truncated_fraction", "filtered_fraction", "log_ratio_max"),
)
"""Policy-health fields of ProcessSample (rl_runtime/protocol/policy_health.py), all of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One sample of the node."""

    node: NodeId
    at: float
    wall_at: float
    cpu_count: int
    cpu_busy_seconds: float  # cumulative over all CPUs
    load_1m: float
    memory_total_bytes: int
    memory_available_bytes: int
    cpu_some_stall_seconds: float = 0.0  # PSI, cumulative; 0 where the kernel has none
    memory_some_stall_seconds: float = 0.0
    oom_kills: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        return cls(**{k: v for k, v in record.items() if k in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One sample of a GPU, joined with the registered processes that use it; peers are compared by it. NaN: unknown."""

    node: NodeId
    gpu: int  # index, as NVML counts
    at: float
    wall_at: float
    uuid: str = ""
    pids: tuple[int, ...] = ()  # registered processes that use it, directly or through children
    joined_by: str = ""  # source of `pids`: `nvml` or `environment`

    utilization_ratio: float = float("nan")  # time in which any kernel ran; a spinning collective counts
    sm_active_ratio: float = float("nan")
    tensor_active_ratio: float = float("nan")
    dram_active_ratio: float = float("nan")
    memory_used_bytes: float = float("nan")
    power_watts: float = float("nan")
    temperature_celsius: float = float("nan")
    memory_temperature_celsius: float = float("nan")
    sm_clock_hertz: float = float("nan")
    thermal_throttle_seconds: float = float("nan")  # cumulative since the driver was loaded, as the next
    power_throttle_seconds: float = float("nan")
    pcie_transmit_bytes_per_second: float = float("nan")
    pcie_receive_bytes_per_second: float = float("nan")
    nvlink_transmit_bytes_per_second: float = float("nan")
    nvlink_receive_bytes_per_second: float = float("nan")

    def to_dict(self) -> dict[str, Any]:
        every = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        found = {k: v for k, v in every if not (isinstance(v, float) and math.isnan(v))}  # as above
        return {**found, "pids": list(self.pids)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "pids": tuple(record.get("pids", ()))})


class AgentEventKind(StrEnum):
    REGISTERED = "registered"  # a process registered its role, replica, rank and incarnation
    EXITED = "exited"  # pidfd became readable: the process has ended
    EXCEPTION = "exception"  # an uncaught exception, reported by the process before it died
    FINISHED = "finished"  # the process announced an intended exit
    RAYLET_EXITED = "raylet_exited"
    RAY_WORKER_ENDED = "ray_worker_ended"  # after `exited`, from Ray's logs: `reason`, `text`, `line`, `log_file`
    ORPHANED_ENGINE = "orphaned_engine"  # an engine's process without its server: `title`, `adopted_by`, `command`
    ORPHAN_GONE = "orphan_gone"  # it has ended
    AGENT_STARTED = "agent_started"
    XID = "xid"  # `xid`, `gpu` (index) or `pci`, `mnemonic`, `action`, `line`; SXid: `sxid`
    GPU_LOST = "gpu_lost"  # `gpu`, `uuid`: no NVML call on it succeeds
    GPU_FAULT = "gpu_fault"  # `gpu`, `what` (recovery_action, remapped_rows, ecc, nvlink, fabric), and details
    GPU_RECOVERED = "gpu_recovered"
    OOM_KILL = "oom_kill"  # from the kernel log: `pid`, `name`; the process, if registered
    MACHINE_CHECK = "machine_check"
    LINK_DOWN = "link_down"  # `nic` and `port`, or `interface`
    LINK_UP = "link_up"
    KERNEL = "kernel"  # another fault in the kernel log: `what`, `line`
    NCCL = "nccl"  # RAS state of a communicator: `what`, `communicator`
    DISK_FULL = "disk_full"  # of the data directory: `path`, `device`, `available_bytes`, `size_bytes`, `files_free`
    DISK_FREE = "disk_free"  # it has room again: the same
    PROBE_DOWN = "probe_down"  # a collector cannot read, or hangs: `probe`, `reason`
    PROBE_UP = "probe_up"  # it can again: `probe`
    REFUSED = "refused"  # a process claimed a wrong or taken identity: `reason`, `pid`
    OTHER = "other"  # from an agent of a later version

    @classmethod
    def _missing_(cls, value: object) -> "AgentEventKind":
        return cls.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvent:
    """A rare fact. `seq` grows by one per agent data directory and survives the agent's restart."""

    seq: int
    kind: AgentEventKind
    node: NodeId
    at: float
    wall_at: float
    process: ProcessId | None = None
    role: str = ""
    replica: str = ""
    rank: int = 0
    incarnation: int = 0
    detail: dict[str, str] = field(default_factory=dict)
    """EXITED: `last_phase`, `signal` or `code` if known. EXCEPTION: `type`, `message` (first 500 characters),
    `where` (innermost frame `file:line function`), `fingerprint` (type and frames, without line values), `step`,
    `uncaught` if it ends the process."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        process = ProcessId(**record["process"]) if record.get("process") else None
        return cls(**{**known, "kind": AgentEventKind(record["kind"]), "process": process})


def job_names(registered: AgentEvent) -> tuple[str, ...]:
    """Of the job of a process that registers: run id, and rendezvous (`host:port` of torchrun, `job.step` of Slurm)."""
    return tuple(name for key in ("job", "rendezvous") if (name := registered.detail.get(key, "")))


_LOOPBACK = re.compile(r"(?:^|/)(?:127\.|localhost\b)")
"""An address that is another machine on each node."""


def job_of(registered: AgentEvent) -> str:
    """What tells the job of a process that registers from the others of the run; empty: not known. Replicas that are
    launched one by one have a rendezvous each, and the run id, or the job of Slurm or Ray, in common."""
    job = next((name for key in ("lighthouse", "job", "rendezvous") if (name := registered.detail.get(key, ""))), "")
    return f"{registered.node} {job}" if _LOOPBACK.search(job) else job


def launcher_pid(registered: AgentEvent) -> int:
    """Of the launcher (torchrun, srun) of a process that registers; 0: not known."""
    text = registered.detail.get("launcher_pid", "")
    return int(text) if text.isdecimal() and len(text) <= 9 else 0


WIRE_VERSION = 2
"""Version of the agent API. 1 had no number, and fewer kinds of events. A watch and an agent one version apart are
compatible: unknown fields are ignored, missing ones have defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Answer of `/v1/samples?since=N`: everything newer than cursor N that the agent still holds."""

    node: NodeId
    agent_pid: int
    cursor: int  # pass it as `since` to continue
    lost: int  # samples dropped before they could be read (ring full)
    at: float
    wall_at: float
    processes: tuple[ProcessSample, ...]
    hosts: tuple[HostSample, ...]
    gpus: tuple[GpuSample, ...] = ()  # absent from older agents

    def to_dict(self) -> dict[str, Any]:
        head = {k: getattr(self, k) for k in ("node", "agent_pid", "cursor", "lost", "at", "wall_at")}
        return {
            "version": WIRE_VERSION,
            **head,
            "processes": [p.to_dict() for p in self.processes],
            "hosts": [h.to_dict() for h in self.hosts],
            "gpus": [g.to_dict() for g in self.gpus],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        return cls(
            node=record["node"],
            agent_pid=record["agent_pid"],
            cursor=record["cursor"],
            lost=record["lost"],
            at=record["at"],
            wall_at=record["wall_at"],
            processes=tuple(ProcessSample.from_dict(p) for p in record["processes"]),
            hosts=tuple(HostSample.from_dict(h) for h in record["hosts"]),
            gpus=tuple(GpuSample.from_dict(g) for g in record.get("gpus", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Answer of `/v1/events?after=N&wait=S`: events numbered above N, oldest first, at most 1000."""

    node: NodeId
    agent_pid: int
    newest: int  # last seq given to any event; give the last seq received back as `after`
    lost: int  # events above N that retention dropped
    at: float
    wall_at: float
    events: tuple[AgentEvent, ...]
    after_wall_at: float = 0.0  # of event N; 0: it is not kept, or an older agent answers

    def to_dict(self) -> dict[str, Any]:
        head = {k: getattr(self, k) for k in ("node", "agent_pid", "newest", "lost", "at", "wall_at", "after_wall_at")}
        return {"version": WIRE_VERSION, **head, "events": [e.to_dict() for e in self.events]}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "events": tuple(AgentEvent.from_dict(e) for e in record["events"])})
