"""The evaluations of a run: a fold of its journal, the same for the controller and for all views."""

from dataclasses import dataclass, field

from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.run import EvaluationFinished, StepInterrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One evaluation. `at`: when it finished, wall seconds."""

    at: float
    result: EvaluationFinished


@dataclass(slots=True)
class EvaluationHistory:
    """Evaluations of policy versions that still belong to the run's history: a return to a checkpoint discards later
    ones. Owned by one thread."""

    by_step: dict[int, EvaluationPoint] = field(default_factory=dict)
    returns: int = 0
    """Returns to a checkpoint so far."""

    def take(self, event: Event) -> None:
        match event.payload:
            case EvaluationFinished() as result:
                self.by_step[result.step] = EvaluationPoint(at=event.wall_at, result=result)
            case StepInterrupted(step=step, attempt=0):
                self.discard_after(step)

    def discard_after(self, version: int) -> None:
        """The run went back to this policy version."""
        self.by_step = {step: point for step, point in self.by_step.items() if step <= version}
        self.returns += 1

    def points(self) -> tuple[EvaluationPoint, ...]:
        """By step."""
        return tuple(point for _, point in sorted(self.by_step.items()))

    @property
    def newest(self) -> EvaluationPoint | None:
        return self.by_step[max(self.by_step)] if self.by_step else None
