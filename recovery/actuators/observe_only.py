"""For jobs that rolecall did not start: performs no action. The incident names the remediation; an operator performs
it."""

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.errors import ActuatorError
from rolecall.core.journal.journal import Lease
from rolecall.recovery.actuators.base import ActionResult


class NoopActuator:
    """Supports no action."""

    name = "nothing"
    supports: frozenset[ActionKind] = frozenset()

    def failure_unit(self, replica: str) -> str:
        return replica

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        del plan
        return ()

    def perform(self, plan: Plan, lease: Lease) -> ActionResult:
        del lease
        raise ActuatorError(f"{self.name} cannot perform {plan.action}")
