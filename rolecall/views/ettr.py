"""How much of the run was training: ETTR, the pace of steps, and seconds to N steps beside a failure-free run. Pure.

ETTR follows RobustRL (arXiv 2512.22492): time in which rollouts or trainers compute counts, over all time. While
trainers recover and the rollouts live, a window counts

    num_rollouts / (num_rollouts + num_trainers)

because the rollouts go on generating. The paper does not say what a lost rollout costs. Ours: while k of the rollouts
are lost, the window counts (num_rollouts - k + trainers at work) / (num_rollouts + num_trainers), so ours is never
higher than the paper's. From the fault until the interrupted step is committed no trainer counts; from then until the
replacement serves, the survivors do. A replica slowed by a fault counts as lost, although it still does something.

The clock runs from the first membership epoch with a trainer and a rollout in it to the last committed step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads import EpochAdvanced, StepCommitted
from rolecall.core.policy_health import BY_NAME, policy_health_of
from rolecall.views.incidents import IncidentSummary, MatchedIncidents


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step as it was committed for good. Times are wall seconds."""

    step: int
    at: float
    seconds: float
    reward: float
    loss: float
    epoch: int
    num_tokens: int
    signs: Mapping[str, float] = field(default_factory=dict)
    """Of the policy's health (core/policy_health.py), those that the step had."""

    def to_dict(self, zero: float) -> dict[str, float | int | None]:
        """As the report holds it: `at` in seconds after `zero`; what is not a number is null."""
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
    """One replica's work lost from `since` to `until`. `stalled_until`: trainers only, no trainer works before it."""

    replica: str
    since: float
    until: float
    stalled_until: float = 0.0


def _number(value: float | None) -> float:
    """NaN for what is null: a restarted controller may know that a step was committed, and not its loss."""
    return math.nan if value is None else value


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def training_began(events: Iterable[Event]) -> float | None:
    """When a trainer and a rollout were members of an epoch together for the first time, wall seconds."""
    for event in events:
        if isinstance(event.payload, EpochAdvanced):
            roles = {replica.partition("/")[0] for replica, _ in event.payload.members}
            if {"trainer", "rollout"} <= roles:
                return event.wall_at
    return None


def steps(events: Iterable[Event]) -> list[Step]:
    """The committed steps in order; of a step that was undone and done again, the last time counts."""
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
    """Signs of the policy's health as the report holds them: name -> a value for each step, null where it had none."""
    told = [name for name in BY_NAME if any(name in step.signs for step in committed)]
    return {name: [_finite(step.signs.get(name, math.nan)) for step in committed] for name in told}


def losses(joined: MatchedIncidents, end: float) -> list[Loss]:
    """What each incident, and each fault that nobody noticed, took from whom."""
    found = []
    for story in joined.stories:
        if story.fault is None and story.action_started_at is None:
            continue  # nothing is known to have been hurt, and nobody was replaced
        hurt = set(story.fault.hit) if story.fault else {s.replica for s in story.diagnosis.suspects if s.replica}
        found += [_loss(story, replica, end) for replica in sorted(hurt)]
    found += [Loss(replica=r, since=f.injected_at, until=end, stalled_until=end) for f in joined.missed for r in f.hit]
    return [loss for loss in found if loss.until > loss.since]


def _loss(story: IncidentSummary, replica: str, end: float) -> Loss:
    until = story.serving_at if story.serving_at is not None else story.ends_at
    stalled = story.step_committed_at if story.step_committed_at is not None else until
    return Loss(
        replica=replica,
        since=story.began_at,
        until=end if until is None else min(until, end),
        stalled_until=end if stalled is None else min(stalled, end),
    )


def ettr(
    start: float, end: float, lost: Sequence[Loss], *, num_rollouts: int, num_trainers: int, count_rollouts: bool = True
) -> float | None:
    """Effective training time ratio from `start` to `end`, 0..1; None when no time passed.

    `count_rollouts` false: the paper's formula alone, in which a lost rollout costs nothing.
    """
    total = num_rollouts + num_trainers
    if end <= start or total == 0:
        return None
    cuts = {start, end} | {t for loss in lost for t in (loss.since, loss.until, loss.stalled_until) if start < t < end}
    effective = 0.0
    for left, right in pairwise(sorted(cuts)):
        now = [loss for loss in lost if loss.since <= left < loss.until]
        rollouts = len({loss.replica for loss in now if loss.replica.startswith("rollout/")})
        trainers = {loss.replica for loss in now if loss.replica.startswith("trainer/")}
        stalled = any(loss.replica in trainers and left < loss.stalled_until for loss in now)
        at_work = 0 if stalled else num_trainers - len(trainers)
        generating = num_rollouts - (rollouts if count_rollouts else 0)
        effective += (right - left) * max(0, at_work + generating) / total
    return effective / (end - start)


def faultless_step_seconds(committed: Sequence[Step], lost: Sequence[Loss]) -> float | None:
    """Mean time from commit to commit where no fault was open in between; None if there is no such pair."""
    gaps = [
        b.at - a.at
        for a, b in pairwise(committed)
        if not any(loss.since <= b.at and a.at <= loss.until for loss in lost)
    ]
    return sum(gaps) / len(gaps) if gaps else None


def seconds_to(committed: Sequence[Step], start: float, num_steps: int) -> float | None:
    """Seconds from `start` until that many steps stood committed; None when they never did."""
    if num_steps < 1 or len(committed) < num_steps:
        return None
    return committed[num_steps - 1].at - start


def compare_pace(
    committed: Sequence[Step], start: float, lost: Sequence[Loss], baseline: Mapping[str, object] | None
) -> dict[str, object]:
    """`seconds_to_n_steps` of the report.

    `baseline`: the report of a failure-free run, with `steps` and `training_started_seconds` as a report has them.
    Without one, `baseline` is null and `estimate` says what this run's own faultless pace would have needed.
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
    """Mean of the first and of the last 10 %, of at least 3 values each; numbers that are none are left out."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return None, None
    width = min(len(known), max(3, round(len(known) / 10)))
    return round(sum(known[:width]) / width, 4), round(sum(known[-width:]) / width, 4)
