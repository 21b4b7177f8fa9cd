"""Effective training time ratio (ETTR), pace of steps, and seconds to N steps compared with a failure-free run. Pure.

ETTR follows RobustRL (arXiv 2512.22492): the share of time in which rollouts or trainers compute. While trainers
recover and the rollouts run, a window counts

    num_rollouts / (num_rollouts + num_trainers)

because the rollouts continue to generate. The paper does not define the cost of a lost rollout. Here, while k of the
rollouts are lost, the window counts (num_rollouts - k + active trainers) / (num_rollouts + num_trainers), so the result
is never higher than the paper's. From the fault until the interrupted step is committed, no trainer counts; from then
until the replacement serves, the survivors do. A replica slowed by a fault counts as lost, although it still does some
work.

The time runs from the first membership epoch with a trainer and a rollout to the last committed step.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads import EpochAdvanced, StepCommitted
from rolecall.core.policy_health import BY_NAME, policy_health_of
from rolecall.views.incidents import MatchedIncidents

UNDETECTED = "undetected"
"""Fault class of an injected fault without an incident."""

Cause = tuple[str, str]
"""(role, fault class) of lost time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step as finally committed. Times are wall seconds."""

    step: int
    at: float
    seconds: float
    reward: float
    loss: float
    epoch: int
    num_tokens: int
    signs: Mapping[str, float] = field(default_factory=dict)
    """Policy health metrics (core/policy_health.py) that the step reported."""

    def to_dict(self, zero: float) -> dict[str, float | int | None]:
        """Layout in the report: `at` in seconds after `zero`; non-finite values are null."""
        return {
            "step": self.step,
            "at": round(self.at - zero, 3),
            "seconds": _finite(self.seconds),
            "reward": _finite(self.reward),
            "loss": _finite(self.loss),
            "epoch": self.epoch,
            "num_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Work of one replica lost from `since` to `until`, wall seconds. `stalled_until`: trainers only; no trainer
    computes before it. `incident_id` is empty for an undetected fault."""

    replica: str
    since: float
    until: float
    stalled_until: float = 0.0
    fault: str = UNDETECTED
    incident_id: str = ""

    @property
    def role(self) -> str:
        return self.replica.partition("/")[0]


def _number(value: float | None) -> float:
    """NaN for null: a restarted controller may know that a step was committed, but not its loss."""
    return math.nan if value is None else value


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def training_began(events: Iterable[Event]) -> float | None:
    """When an epoch first had both a trainer and a rollout, wall seconds."""
    for event in events:
        if isinstance(event.payload, EpochAdvanced):
            roles = {replica.partition("/")[0] for replica, _ in event.payload.members}
            if {"trainer", "rollout"} <= roles:
                return event.wall_at
    return None


def steps(events: Iterable[Event]) -> list[Step]:
    """The committed steps in order; for a step that was undone and repeated, the last time counts."""
    found: dict[int, Step] = {}
    for event in events:
        if isinstance(event.payload, StepCommitted):
            found[event.payload.step] = step_of(event.payload, event.wall_at)
    return [found[n] for n in sorted(found)]


def step_of(committed: StepCommitted, at: float) -> Step:
    return Step(
        step=committed.step,
        at=at,
        seconds=committed.seconds,
        reward=_number(committed.reward),
        loss=_number(committed.loss),
        epoch=committed.epoch,
        num_tokens=committed.tokens,
        signs=policy_health_of(committed),
    )


def health(committed: Sequence[Step]) -> dict[str, list[float | None]]:
    """Policy health metrics for the report: name -> one value per step, null if missing."""
    told = [name for name in BY_NAME if any(name in step.signs for step in committed)]
    return {name: [_finite(step.signs.get(name, math.nan)) for step in committed] for name in told}


def losses(joined: MatchedIncidents, end: float) -> list[Loss]:
    """Lost work per replica of each incident and each undetected fault; open losses last until `end`."""
    found = []
    for story in joined.stories:
        if story.fault is None and story.action_started_at is None:
            continue  # no known impact, and no replica was replaced
        hurt = set(story.fault.hit) if story.fault else {s.replica for s in story.diagnosis.suspects if s.replica}
        until = story.serving_at if story.serving_at is not None else story.ends_at
        stalled = story.step_committed_at if story.step_committed_at is not None else until
        found += [
            Loss(
                replica=replica,
                since=story.began_at,
                until=end if until is None else min(until, end),
                stalled_until=end if stalled is None else min(stalled, end),
                fault=str(story.diagnosis.fault_class),
                incident_id=story.incident_id,
            )
            for replica in sorted(hurt)
        ]
    found += [Loss(replica=r, since=f.injected_at, until=end, stalled_until=end) for f in joined.missed for r in f.hit]
    return [loss for loss in found if loss.until > loss.since]


def lost_seconds(
    lost: Iterable[Loss], start: float, end: float, *, num_rollouts: int, num_trainers: int
) -> dict[tuple[str, Loss], float]:
    """Seconds of the whole run lost between `start` and `end`, by role and by the loss that is charged.

    Their sum is (1 - ETTR) x duration. A second lost to several faults at once is charged to the loss that began first;
    a stalled trainer is charged for all trainers.
    """
    total = num_rollouts + num_trainers
    here = sorted((c for c in lost if c.until > start and c.since < end), key=lambda c: (c.since, c.replica))
    if total == 0 or end <= start or not here:
        return {}
    cuts = {start, end} | {t for c in here for t in (c.since, c.until, c.stalled_until) if start < t < end}
    begins = [c.since for c in here]
    active: list[Loss] = []
    taken, found = 0, dict[tuple[str, Loss], float]()
    for left, right in pairwise(sorted(cuts)):
        upto = bisect_left(begins, right)
        active = [c for c in (*active, *here[taken:upto]) if c.until > left]
        taken = max(taken, upto)
        units = _idle_replicas([c for c in active if c.since <= left], left, num_trainers)
        idle = sum(units.values())
        scale = min(1.0, total / idle) if idle else 0.0
        for key, unit in units.items():
            found[key] = found.get(key, 0.0) + (right - left) * unit * scale / total
    return found


def _idle_replicas(active: Sequence[Loss], at: float, num_trainers: int) -> dict[tuple[str, Loss], float]:
    """Number of replicas that do not count at `at`, by role and loss. One stalled trainer stalls all trainers."""
    units: dict[tuple[str, Loss], float] = {}
    seen: set[str] = set()
    stall = next((c for c in active if c.role == "trainer" and at < c.stalled_until), None)
    if stall is not None:
        units["trainer", stall] = float(num_trainers)
    for loss in active:
        if loss.replica in seen or loss.role not in ("rollout", "trainer") or (loss.role == "trainer" and stall):
            continue
        seen.add(loss.replica)
        units[loss.role, loss] = 1.0
    return units


def by_cause(lost: Mapping[tuple[str, Loss], float]) -> dict[Cause, float]:
    """Sums of `lost_seconds` by role and fault class."""
    found: dict[Cause, float] = {}
    for (role, loss), seconds in lost.items():
        found[role, loss.fault] = found.get((role, loss.fault), 0.0) + seconds
    return found


def ettr(
    start: float, end: float, lost: Iterable[Loss], *, num_rollouts: int, num_trainers: int, count_rollouts: bool = True
) -> float | None:
    """Effective training time ratio from `start` to `end`, 0..1; None if no time passed.

    `count_rollouts` false: the paper's formula, in which a lost rollout costs nothing.
    """
    if end <= start or num_rollouts + num_trainers == 0:
        return None
    counted = [c for c in lost if count_rollouts or c.role != "rollout"]
    idle = lost_seconds(counted, start, end, num_rollouts=num_rollouts, num_trainers=num_trainers)
    return 1.0 - sum(idle.values()) / (end - start)


def faultless_step_seconds(committed: Sequence[Step], lost: Sequence[Loss]) -> float | None:
    """Mean time between commits without an open fault in between; None if there is no such pair."""
    gaps = [
        b.at - a.at
        for a, b in pairwise(committed)
        if not any(loss.since <= b.at and a.at <= loss.until for loss in lost)
    ]
    return sum(gaps) / len(gaps) if gaps else None


def seconds_to(committed: Sequence[Step], start: float, num_steps: int) -> float | None:
    """Seconds from `start` until that many steps were committed; None if they never were."""
    if num_steps < 1 or len(committed) < num_steps:
        return None
    return committed[num_steps - 1].at - start


def compare_pace(
    committed: Sequence[Step], start: float, lost: Sequence[Loss], baseline: Mapping[str, object] | None
) -> dict[str, object]:
    """`seconds_to_n_steps` of the report.

    `baseline`: the report of a failure-free run, with its `steps` and `training_started_seconds`. Without one,
    `baseline` is null and `estimate` is derived from this run's pace without faults.
    """
    n, theirs = len(committed), None
    name = None
    if baseline is not None:
        rows = baseline["steps"]
        assert isinstance(rows, list)
        n = min(n, len(rows))
        if n:
            theirs = round(float(rows[n - 1]["at"]) - float(str(baseline["training_started_seconds"])), 3)
            name = str(baseline["run_id"])
    this = seconds_to(committed, start, n)
    pace = faultless_step_seconds(committed, lost)
    return {
        "n": n,
        "this": None if this is None else round(this, 3),
        "baseline": theirs,
        "baseline_run": name,
        "estimate": round(pace * n, 3) if pace is not None and n else None,
        "estimate_how": "n x mean time between commits of this run with no fault open in between",
    }


def mean_of_ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last 10 %, of at least 3 values each; missing values are ignored."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return None, None
    width = min(len(known), max(3, round(len(known) / 10)))
    return round(sum(known[:width]) / width, 4), round(sum(known[-width:]) / width, 4)
