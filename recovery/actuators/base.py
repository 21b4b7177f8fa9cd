"""Actuators perform plans: the interface, and the actuator of jobs that are only observed.

An actuator declares the actions it supports and the smallest set of processes it can replace. Performing is idempotent:
repeating a plan after a crash at any point has no further effect. It acts under the lease of the calling watch and
refuses when a newer lease exists.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.errors import ActuatorError
from rolecall.core.journal.journal import Lease
from rolecall.core.text import in_words
from rolecall.recovery.borrowing import Comeback


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """`done` False: the action is impossible now, for the reason given, and nothing was changed."""

    done: bool
    because: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"done": self.done, "because": self.because, **self.facts}


class Actuator(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def supports(self) -> frozenset[ActionKind]: ...

    @property
    def schedules(self) -> bool:
        """Whether the system itself finds a node for a replacement. Else the plan needs a free one."""

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        """Side effects of the plan on other replicas, as text."""

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        """Names of the replicas that end with the plan's targets, and of nothing that the plan names itself."""

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult | None:
        """Performs the plan, or finds it performed. None: it is under way; the caller asks again. `lost_nodes`: nothing
        is placed there, as on quarantined ones. Raises LeaseFenced: `lease` is over; another watch is the recovery
        leader; ActuatorError: this actuator does not support the plan."""

    def resume(self, comeback: Comeback, lease: Lease) -> None:
        """Starts a replica again that had lent its node. Raises LeaseFenced: as above."""


class NoopActuator:
    """For jobs that rolecall did not start: supports no action. An operator performs what the incident names."""

    name = "nothing"
    supports: frozenset[ActionKind] = frozenset()
    schedules = False

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        del plan
        return ()

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        del plan
        return ()

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult:
        del lease, lost_nodes
        raise ActuatorError(f"{self.name} cannot {in_words(plan.action)}")

    def resume(self, comeback: Comeback, lease: Lease) -> None:
        del lease
        raise ActuatorError(f"{self.name} cannot start {comeback.replica}")
