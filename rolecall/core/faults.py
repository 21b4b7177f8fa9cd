"""The fault classes, one row each: everything that depends on the class of a fault alone.

To add a class: a name in `FaultClass`, a row in `FAULTS`, a stage of the detector that detects it
(`detector/live/stages/`) and its place in `STAGES` (`detector/live/engine.py`). Detection, recovery, evidence
collection, the dashboard and the report use the row; none of them has its own list of classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FaultClass(StrEnum):
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    SILENT_CORRUPTION = "silent_corruption"
    WRONG_WEIGHTS = "wrong_weights"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    NETWORK = "network"
    GPU = "gpu"
    NODE_LOST = "node_lost"
    USER_CODE = "user_code"
    DATA = "data"
    CONTROL_PLANE = "control_plane"
    CANNOT_TELL = "cannot_tell"

    @property
    def spec(self) -> "FaultSpec":
        return FAULTS[self]

    @classmethod
    def _missing_(cls, value: object) -> "FaultClass | None":
        # Tests add classes (rolecall.testing.faults).
        return next((c for c in FAULTS if c.value == value), None)


class Remedy(StrEnum):
    """Recovery's response to a class of fault."""

    REPLACE = "replace"
    """A new process of the same replica resolves it, or at least narrows it down."""
    MOVE = "move"
    """It stays with the node: the replica must move to another one, and the node may be quarantined."""
    WEIGH = "weigh"
    """Replace the replica if that gains more work than it costs."""
    STOP = "stop"
    """The job itself is at fault and would fail again anywhere. Stop the job, evict nothing."""
    PAGE = "page"
    """No action is known to help: page on-call."""


class SuppressionScope(StrEnum):
    """Findings of another class that a finding explains."""

    ANY = "any"
    """Those that share a suspect (replica and incarnation) with it."""
    ALL = "all"
    """Those whose suspects are all named by findings of its class."""
    ANY_OR_NODES = "any_or_nodes"
    """As ANY, and those that name only nodes, all of which are named by findings of its class."""
    ROLE = "role"
    """Those whose suspects all belong to the roles whose code fails."""


class EvidenceKind(StrEnum):
    """Evidence that an agent collects for an incident, by its path: `/v1/evidence/<kind>`."""

    STACKS = "stacks"
    FLIGHT = "flight_recorder"
    NCCL = "nccl_ras"
    KERNEL = "kernel_log"


class DetectionChannel(StrEnum):
    """Detection methods, fastest first."""

    EXIT = "process exit"
    HARDWARE = "XID, GPU, link"
    STALL = "no progress"
    COLLECTIVE = "collective stalls"
    SLOW = "slow"
    WRONG = "wrong values"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorThreshold:
    """The field of `DetectorConfig` that enables a fault's detection, and a phrase for its value."""

    setting: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    description: str
    advice: str
    """The next step for on-call."""
    remedy: Remedy = Remedy.PAGE
    suppresses: Mapping[FaultClass, SuppressionScope] = field(default_factory=dict)
    """Findings of these classes are its consequences and are dropped while it is open."""
    absorbs: frozenset[FaultClass] = frozenset()
    """A finding of one of these classes about the same suspects continues the open diagnosis."""
    stalls_others: bool = False
    """While it is open, ranks that wait for others are not suspected, and nothing is learned from them."""
    causes_slowness: bool = False
    """It explains all slowness on its nodes."""
    settles_ties: bool = False
    """Its evidence settles a `cannot_tell` among several ranks."""
    loses_node: bool = False
    """No replica may be placed on its nodes any more."""
    compares_peers: bool = False
    """Its only evidence may be a comparison with peers: then the guards for peer evidence apply."""
    evidence: frozenset[EvidenceKind] = frozenset()
    signals: tuple[str, ...] = ("work", "standing", "cpu")
    """Series that the incident page draws, by key (dashboards/pages/incidents/signals.py)."""
    channel: DetectionChannel = DetectionChannel.OTHER
    threshold: DetectorThreshold | None = None

    @property
    def is_hardware(self) -> bool:
        """It affects a part of a node that otherwise works."""
        return self.remedy is Remedy.MOVE and not self.loses_node

    @property
    def is_repairable(self) -> bool:
        """A replica that has it is replaced, here or elsewhere, whatever the gain."""
        return self.remedy in (Remedy.REPLACE, Remedy.MOVE)


_KERNEL = frozenset({EvidenceKind.KERNEL})
_STACKS = _KERNEL | {EvidenceKind.STACKS}
_EVERYTHING = frozenset(EvidenceKind)

FAULTS: dict[FaultClass, FaultSpec] = {
    FaultClass.CRASH: FaultSpec(
        description="a process exited without announcing it, or lost its work to an exception",
        advice="replace the replica",
        remedy=Remedy.REPLACE,
        suppresses={
            FaultClass.HANG: SuppressionScope.ALL,
            FaultClass.SLOW: SuppressionScope.ANY,
            FaultClass.CANNOT_TELL: SuppressionScope.ANY,
        },
        stalls_others=True,
        causes_slowness=True,
        evidence=_KERNEL,
        signals=("work", "requests", "cpu"),
        channel=DetectionChannel.EXIT,
    ),
    FaultClass.HANG: FaultSpec(
        description="a process makes no progress where progress is due",
        advice="replace the replica; the ranks that wait for it need no action",
        remedy=Remedy.REPLACE,
        suppresses={FaultClass.SLOW: SuppressionScope.ANY, FaultClass.CANNOT_TELL: SuppressionScope.ANY},
        absorbs=frozenset({FaultClass.CRASH}),  # it was killed after it hung: not a second fault
        stalls_others=True,
        causes_slowness=True,
        settles_ties=True,
        evidence=_EVERYTHING,
        signals=("standing", "work", "cpu"),
        channel=DetectionChannel.STALL,
        threshold=DetectorThreshold(setting="hang_floor_seconds", words="a minimum hang deadline of {:.3g} s"),
    ),
    FaultClass.SLOW: FaultSpec(
        description="a process needs more seconds per unit of work than its peers and its own past",
        advice="replace the replica if the gain over the horizon exceeds the cost",
        remedy=Remedy.WEIGH,
        compares_peers=True,
        evidence=_STACKS,
        signals=("per_unit", "tokens", "cpu", "delay"),
        channel=DetectionChannel.SLOW,
        threshold=DetectorThreshold(setting="slow_ratio", words="a slowness threshold of {:.3g} times"),
    ),
    FaultClass.SILENT_CORRUPTION: FaultSpec(
        description="numbers are wrong and nothing reports an error",
        advice="find and replace the replica whose numbers differ; check what was trained on them",
        remedy=Remedy.REPLACE,
        compares_peers=True,
        signals=("loss", "work"),
        channel=DetectionChannel.WRONG,
    ),
    FaultClass.WRONG_WEIGHTS: FaultSpec(
        description="a replica serves weights that no trainer committed",
        advice="replace the replica; check what was trained on its tokens",
        remedy=Remedy.REPLACE,
        channel=DetectionChannel.WRONG,
    ),
    FaultClass.RESOURCE_EXHAUSTED: FaultSpec(
        description="memory or another resource of the host or the GPU ran out",
        advice="replace the replica; if it happens again, lower its memory use",
        remedy=Remedy.REPLACE,
        signals=("memory", "work", "cpu"),
        channel=DetectionChannel.EXIT,
    ),
    FaultClass.NETWORK: FaultSpec(
        description="a node, a link or a switch does not carry traffic",
        advice="replace the replica on another node",
        remedy=Remedy.MOVE,
        suppresses={FaultClass.SLOW: SuppressionScope.ANY, FaultClass.CANNOT_TELL: SuppressionScope.ANY_OR_NODES},
        stalls_others=True,
        causes_slowness=True,
        settles_ties=True,
        evidence=_EVERYTHING,
        channel=DetectionChannel.COLLECTIVE,
    ),
    FaultClass.GPU: FaultSpec(
        description="a GPU failed: XID, uncorrectable ECC error, lost from the bus",
        advice="schedule nothing on this GPU until it is repaired",
        remedy=Remedy.MOVE,
        causes_slowness=True,
        evidence=_KERNEL,
        channel=DetectionChannel.HARDWARE,
    ),
    FaultClass.NODE_LOST: FaultSpec(
        description="a node is gone or must not be used",
        advice="schedule nothing on this node",
        remedy=Remedy.MOVE,
        causes_slowness=True,
        loses_node=True,
        evidence=_KERNEL,
    ),
    FaultClass.USER_CODE: FaultSpec(
        description="the job's own code or its input fails the same way on several ranks",
        advice="stop the job and fix the code or its input; replacing machines does not help",
        remedy=Remedy.STOP,
        suppresses={FaultClass.CRASH: SuppressionScope.ROLE, FaultClass.HANG: SuppressionScope.ROLE},
        stalls_others=True,
        causes_slowness=True,
        signals=("work", "cpu"),
        channel=DetectionChannel.EXIT,
    ),
    FaultClass.DATA: FaultSpec(
        description="the input data are damaged or missing",
        advice="check the data source; replacing machines does not help",
    ),
    FaultClass.CONTROL_PLANE: FaultSpec(
        description="an agent is gone; the processes on its node are not observed",
        advice="restart the agent; leave the replicas alone",
    ),
    FaultClass.CANNOT_TELL: FaultSpec(
        description="a fault whose class or location the evidence does not determine",
        advice="wait for the evidence that settles it; evict nothing",
        evidence=_EVERYTHING,
    ),
}
