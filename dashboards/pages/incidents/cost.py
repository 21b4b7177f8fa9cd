"""The cost of an incident, computed from the journal. Pure.

replica-seconds   each affected replica from the onset (or the injection, if known) until its replacement serves; while
a
                  trainer is lost also every other trainer, which waits until the interrupted step is committed
GPU-seconds       replica-seconds times the GPUs per process, if the stored window shows how many
tokens            of requests that left the affected replica; kept: continued elsewhere from where they were
steps             interrupted: started again; rolled back: committed, and committed again later
"""

from dataclasses import dataclass

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import RequestsReassigned
from rolecall.core.text import plain, seconds
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.views.ettr import Loss, losses
from rolecall.views.incidents import IncidentSummary, MatchedIncidents

K = EventKind
TRAINER = "trainer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCost:
    replica_seconds: float
    gpu_seconds: float | None
    """None: no GPU was observed."""
    tokens_lost: int
    tokens_kept: int
    requests_reassigned: int
    steps_interrupted: int
    steps_undone: int
    is_final: bool
    """False: the incident is open and the cost still grows."""
    how: tuple[str, ...]
    """How the replica-seconds add up, a line each."""


def cost(m: IncidentPageInputs, story: IncidentSummary | None, gpus_per_process: float = 0.0) -> IncidentCost | None:
    """None: the incident cannot be summarized."""
    if story is None:
        return None
    lost = losses(MatchedIncidents(stories=(story,), missed=(), false_alarms=()), m.now if m.is_open else _end(m))
    waiting = _waiting(m, lost)
    replica_seconds = sum(loss.until - loss.since for loss in lost) + sum(s for _, s in waiting)
    during = [e for e in m.around if story.began_at - 0.05 <= e.wall_at <= (story.ends_at or float("inf"))]
    hit = {x.replica for x in lost}
    moved = [e.payload for e in during if isinstance(e.payload, RequestsReassigned) and e.payload.from_replica in hit]
    return IncidentCost(
        replica_seconds=replica_seconds,
        gpu_seconds=replica_seconds * gpus_per_process if gpus_per_process > 0 else None,
        tokens_lost=story.tokens_lost,
        tokens_kept=story.tokens_kept,
        requests_reassigned=sum(said.num_requests for said in moved),
        steps_interrupted=sum(e.kind is K.STEP_INTERRUPTED for e in during) if _hit_trainer(lost) else 0,
        steps_undone=story.steps_lost,
        is_final=not m.is_open,
        how=tuple(_words(lost, waiting)),
    )


def _end(m: IncidentPageInputs) -> float:
    return m.events[-1].wall_at if m.events else m.now


def _hit_trainer(lost: list[Loss]) -> bool:
    return any(loss.replica.startswith(TRAINER) for loss in lost)


def _waiting(m: IncidentPageInputs, lost: list[Loss]) -> list[tuple[str, float]]:
    """Healthy trainers, and how long each waited for the lost ones."""
    of_trainers = [loss for loss in lost if loss.replica.startswith(TRAINER)]
    if not of_trainers:
        return []
    affected = {loss.replica for loss in of_trainers}
    since = min(loss.since for loss in of_trainers)
    until = max(loss.stalled_until for loss in of_trainers)
    others = sorted({replica for replica, _ in m.known if replica.startswith(TRAINER)} - affected)
    return [(replica, until - since) for replica in others if until > since]


def _words(lost: list[Loss], waiting: list[tuple[str, float]]) -> list[str]:
    impaired = [f"{loss.replica} was impaired for {seconds(loss.until - loss.since)}" for loss in lost]
    idle = [f"{replica} waited for {seconds(s)} until the interrupted step was committed" for replica, s in waiting]
    return [plain(text, 200) for text in (*impaired, *idle)]
