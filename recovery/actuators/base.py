"""What an actuator is: the adapter that performs plans on one kind of system.

It declares what it can do and the smallest set of processes that it can replace alone. Performing is idempotent: the
same plan again, after a crash at any point, has no further effect. It acts under the lease of the watch that calls it,
and refuses when a newer one holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.journal.journal import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """`done` False: the action is impossible now, with the reason; nothing was changed."""

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
        """What really goes down when `replica` is replaced."""

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        """Whom else the plan would disturb, in words."""

    def perform(self, plan: Plan, lease: Lease) -> ActionResult:
        """Does it, or finds it done.

        Raises:
            Fenced: `lease` is over: somebody else acts.
            ActuatorError: the plan is none that this actuator supports.
        """
