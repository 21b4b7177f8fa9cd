"""The actuator interface: the adapter that performs plans on one kind of system.

An actuator declares the actions it supports and the smallest set of processes it can replace. Performing is idempotent:
repeating a plan after a crash at any point has no further effect. It acts under the lease of the calling watch and
refuses when a newer lease exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.journal.journal import Lease


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

    def failure_unit(self, replica: str) -> str:
        """What goes down when `replica` is replaced."""

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        """Side effects of the plan on other replicas, as text."""

    def perform(self, plan: Plan, lease: Lease) -> ActionResult:
        """Performs the plan, or finds it performed.

        Raises:
            LeaseFenced: `lease` is over; another watch is the recovery leader.
            ActuatorError: this actuator does not support the plan.
        """
