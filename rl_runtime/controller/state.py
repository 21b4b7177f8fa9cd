"""The state of the controller's loop, and the plan of one optimizer step.

The controller owns `LoopState` and is the only one to assign its fields; its components read them. `next_step.py`
decides from it. State that must survive the controller is in the journal and the ledger.
"""

from dataclasses import dataclass

from rolecall.core.journal.payloads import ChainHead
from rolecall.rl_runtime.protocol.messages import CommitRecord, Microbatch, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Content of an optimizer step, decided once and written to the ledger."""

    step: int
    microbatches: tuple[Microbatch, ...]
    ledger: ChainHead
    resumed: bool = False  # trainers may already hold its gradients

    @property
    def ids(self) -> list[str]:
        return [m.microbatch_id for m in self.microbatches]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that is part of the trainers' state. `result` is None when every trainer that had it died after the
    commit.
    """

    commit: CommitRecord
    result: StepResult | None
    attempts: int


@dataclass(slots=True)
class LoopState:
    """Progress of the loop. Times are seconds of the controller's monotonic clock."""

    num_steps: int
    step: int = 0
    """The step being formed or trained; its policy version has the same number."""
    hold: bool = False
    """The flag `hold` is set: steps beyond `num_steps` are wanted."""
    stop_because: str = ""
    """Why the run is to stop; empty while it continues."""
    issuing: bool = False
    """Groups may be issued, and filtered by dynamic sampling."""
    plan: StepPlan | None = None
    """The step that is in the ledger and not committed yet."""
    published: bool = False
    """The rollouts were offered the newest policy version."""
    publish_failed: bool = False
    """The last attempt found no trainer that could name the holders of the newest version."""
    full_since: float | None = None
    """Time since which there are enough groups for the step being formed."""
    doing: str = ""
    """The last decision and its reason, for `Controller.status`."""
    tokens_trained: int = 0
    reward: float = 0.0

    @property
    def wants_more(self) -> bool:
        return self.step < self.num_steps or self.hold
