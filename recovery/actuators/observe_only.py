"""Acts on nothing: for jobs that rolecall did not start. What would help is said in the incident, and a person does it."""

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.errors import ActuatorError
from rolecall.core.journal.journal import Lease
from rolecall.recovery.actuators.base import ActionResult


class NoopActuator:
    """The actuator of mode `observe` on anybody's job."""

    name = "nothing"
    supports: frozenset[ActionKind] = frozenset()

    def failure_unit(self, replica: str) -> str:
        return replica

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        del plan
        return ()

    def perform(self, plan: Plan, lease: Lease) -> ActionResult:
        del lease
        raise ActuatorError(f"{self.name} cannot {plan.action}")
