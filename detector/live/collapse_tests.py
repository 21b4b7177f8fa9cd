"""Whether a policy collapsed, from the course of its run alone. Pure.

A run is its own measure. Its *best stretch* is the run of `LEVEL_STEPS` steps with the highest median reward; what the
last `RECENT_STEPS` show is compared with that:

    fallen       reward lies clearly below the best stretch and stays there
    dived        it did lately, and came back while answers became of another kind: a reward that can be had for nothing
    other        answers became three times as long or short, or lost their end, and the reward did not rise for it
    shut         entropy fell to almost 0 and the reward did not rise for it: one answer for everything
    diverged     the policy is far from the one that made its tokens
    disagreeing  trainer and engine differ about tokens of the very same weights: then weights or numerics are wrong

Entropy may fall and reward may rise as far as they like, in step with each other: that is learning. A medians' window
forgives single steps. Nothing is said before a level is known, and as many newer steps as a sign needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from rolecall.core.diagnosis import Evidence
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.detector.live.training_history import TrainingStepPoint

RECENT_STEPS: Final = 8
"""A fall that is over sooner is not told. Eight in a row below what half of all steps reach happen by chance once in
256 times; that they lie far below it is what makes the difference."""
LEVEL_STEPS: Final = 8
"""A level is the median of so many steps."""
CLEAR_SHARE: Final = 0.25
"""A fall is clear if a quarter of the level is lost, or of all that the run ever gained where that is more. Healthy
runs lost up to a twelfth for so long (benchmarks/collapse.py)."""
NOISE_FACTOR: Final = 4.0
"""It must also be so many times the noise from one step to the next: for rewards that are small beside their noise."""
DIVE_STEPS: Final = 3
DIVE_REMEMBERED: Final = 32
OTHER_FACTOR: Final = 3.0
"""Answers three times shorter or longer, or entropy three times higher, are of another kind."""
ENTROPY_OPEN, ENTROPY_SHUT = 0.3, 0.03
"""Nats a token. From 0.3 on several answers are likely (a token is right nine times in ten); at 0.03 each is all but
certain. Between them a policy that learns earns clearly more."""
OPEN_STEPS: Final = 4
"""The last ones with open entropy say what was earned then: a policy may shut within ten steps."""
RISE_NOISE: Final = 3.0
"""A rise of so many standard errors is one."""
ENTROPY_HIGH: Final = 0.5
"""Nats above the best stretch, at least, for entropy to have exploded."""
CUT_OFF: Final = 0.9
"""Of the answers: at the limit of length, all but every tenth."""
FILTERED_MORE: Final = 0.2
"""If so much more of what is generated is filtered, the reward is that of other prompts, and not to be compared."""
DIVERGED_NATS: Final = 0.2
"""kl_sampler from here on: weights of tokens spread by a factor of two. Healthy runs were above 0.06 in
no four steps in a row, once their level was known."""
DIVERGED_FACTOR: Final = 10.0
DIVERGED_STEPS: Final = 4
LOG_RATIO_FACTOR: Final = 10.0
LOG_RATIO_SEEN, LOG_RATIO_ABOVE = 4, 3
"""Of the last four steps that told one, three."""

Known = Sequence[tuple[TrainingStepPoint, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLevel:
    value: float
    points: Sequence[TrainingStepPoint]

    @property
    def steps(self) -> str:
        return f"steps {self.points[0].step} to {self.points[-1].step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseSymptom:
    """One way in which the policy collapsed. `text` continues a sentence."""

    kind: str
    since: TrainingStepPoint
    text: str
    values: dict[str, float]

    def evidence(self) -> Evidence:
        return Evidence(kind=self.kind, text=self.text, values={"step": float(self.since.step), **self.values})


def collapse_symptoms(points: Sequence[TrainingStepPoint]) -> list[CollapseSymptom]:
    """All that can be said of the newest of these points, the gravest first."""
    reward = fallen(points) or dived(points)
    found = (disagreeing(points), reward or other(points), shut(points), diverged(points))
    return [sign for sign in found if sign is not None]


def known(points: Sequence[TrainingStepPoint], name: str) -> list[tuple[TrainingStepPoint, float]]:
    return [(p, v) for p in points if (v := p.get(name)) == v]


def levels(series: Known) -> list[RewardLevel]:
    return [
        RewardLevel(value=median(v for _, v in part), points=[p for p, _ in part])
        for i in range(len(series) - LEVEL_STEPS + 1)
        if (part := series[i : i + LEVEL_STEPS])
    ]


def noise(series: Known) -> float:
    """Standard deviation of a step, from how neighbours differ: a trend hardly adds to it."""
    apart = [abs(b - a) for (_, a), (_, b) in pairwise(series)]
    return 1.4826 * median(apart) / math.sqrt(2) if apart else 0.0


def middle(points: Sequence[TrainingStepPoint], name: str) -> float:
    values = [v for _, v in known(points, name)]
    return median(values) if values else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRewardLevel:
    """The best stretch, and how far below it is clearly below."""

    level: RewardLevel
    clear: float
    noise: float

    @property
    def line(self) -> float:
        return self.level.value - max(self.clear, NOISE_FACTOR * self.noise)


def best_stretch(reward: Known) -> BestRewardLevel | None:
    found = levels(reward)
    if not found:
        return None
    top, low = max(found, key=lambda x: x.value), min(x.value for x in found)
    return BestRewardLevel(level=top, clear=CLEAR_SHARE * max(abs(top.value), top.value - low), noise=noise(reward))


def fallen(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    reward = known(points, "reward")
    best = best_stretch(reward[:-RECENT_STEPS])
    if best is None:
        return None
    recent = reward[-RECENT_STEPS:]
    low = median(v for _, v in recent)
    halfway = (best.level.value + best.line) / 2
    if low > best.line or sum(v < halfway for _, v in recent) < RECENT_STEPS - 1:
        return None
    now = [p for p, _ in recent]
    if middle(now, "filtered_fraction") - middle(best.level.points, "filtered_fraction") >= FILTERED_MORE:
        return None
    since = _since(reward, halfway)
    text = f"mean reward fell from {best.level.value:.3g} ({best.level.steps}) to {low:.3g}, since step {since.step}"
    return CollapseSymptom(
        kind="reward_fell",
        since=since,
        text=text + _others(best.level.points, now),
        values={"reward": low, "reward_before": best.level.value},
    )


def dived(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    """The reward fell clearly for a few steps and came back, and answers are of another kind since."""
    reward = known(points, "reward")
    begin = max(0, len(reward) - DIVE_REMEMBERED)
    best = best_stretch(reward[:begin])
    if best is None:
        return None
    lately = reward[begin:]
    at = next((i for i in range(len(lately) - DIVE_STEPS) if _below(lately[i : i + DIVE_STEPS], best.line)), None)
    if at is None:
        return None
    now = points[-RECENT_STEPS:]
    if now[0].step <= lately[at][0].step:
        return None
    change = _of_another_kind(best.level.points, now)
    if not change:
        return None
    since = lately[at][0]
    text = (
        f"mean reward fell from {best.level.value:.3g} ({best.level.steps}) to {lately[at][1]:.3g} in step "
        f"{since.step}, "
        f"and since it came back {change}"
    )
    return CollapseSymptom(
        kind="reward_dived",
        since=since,
        text=text,
        values={"reward": lately[at][1], "reward_before": best.level.value},
    )


def other(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    """Answers have another length than in the best stretch of a run that had learned, and nothing is earned by it.

    Before anything was learned, lengths may go anywhere: an answer's end is often learned first.
    """
    reward = known(points, "reward")
    best = best_stretch(reward[:-RECENT_STEPS])
    if best is None:
        return None
    error = 1.2533 * best.noise * math.sqrt(1 / LEVEL_STEPS + 1 / RECENT_STEPS)  # of the difference of two medians
    first, now = median(v for _, v in reward[:LEVEL_STEPS]), points[-RECENT_STEPS:]
    earned = middle(now, "reward")
    change = _of_other_length(best.level.points, now)
    if not change or sum(bool(_of_other_length(best.level.points, [p])) for p in now) < RECENT_STEPS - 1:
        return None
    had_learned = best.level.value - first > best.clear
    if not had_learned or not best.line <= earned <= best.level.value + RISE_NOISE * error:
        return None  # a fall of the reward is a sign of its own
    text = (
        f"{change} as in {best.level.steps}, since step {now[0].step}, and the reward did not rise for it "
        f"({earned:.3g})"
    )
    values = {"reward": earned, "reward_before": best.level.value}
    return CollapseSymptom(kind="length_collapsed", since=now[0], text=text, values=values)


def shut(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    """Entropy went from open to shut, and the reward earned nothing by it."""
    entropy, reward = known(points, "entropy"), known(points, "reward")
    if len(entropy) < LEVEL_STEPS + RECENT_STEPS or len(reward) < LEVEL_STEPS + RECENT_STEPS:
        return None
    now = points[-RECENT_STEPS:]
    nats = middle(now, "entropy")
    opened = [i for i, p in enumerate(points) if p.get("entropy") >= ENTROPY_OPEN]
    if not nats <= ENTROPY_SHUT or not opened or opened[-1] >= len(points) - RECENT_STEPS:
        return None
    then = points[max(0, opened[-1] + 1 - OPEN_STEPS) : opened[-1] + 1]
    before = middle(then, "reward")
    # At its best since: what was earned and then lost is a fall of the reward, and not what entropy did.
    after = max((x.value for x in levels(known(points[opened[-1] + 1 :], "reward"))), default=math.nan)
    error = 1.2533 * noise(reward) * math.sqrt(1 / OPEN_STEPS + 1 / RECENT_STEPS)  # of the difference of two medians
    cut = middle(now, "truncated_fraction")
    endless = cut >= CUT_OFF > min((v for _, v in known(points, "truncated_fraction")), default=1.0)
    if not after - before <= RISE_NOISE * error and not endless:
        return None
    since = points[opened[-1] + 1]
    why = f"{cut:.0%} of the answers have no end" if endless else "the reward did not rise for it"
    text = (
        f"entropy went to {nats:.2g} nats a token, one answer for everything, from {middle(then, 'entropy'):.2g} up to "
        f"step {then[-1].step}, and {why} (reward {before:.3g} then, at most {after:.3g} since)"
    )
    return CollapseSymptom(
        kind="entropy_collapsed",
        since=since,
        text=text,
        values={"entropy_nats": nats, "reward": after, "reward_before": before},
    )


def diverged(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    kl = known(points, "kl_sampler")
    found = levels(kl[:-DIVERGED_STEPS])
    if not found:
        return None
    usual, recent = max(x.value for x in found), kl[-DIVERGED_STEPS:]
    limit = max(DIVERGED_NATS, DIVERGED_FACTOR * usual)
    if not all(v > limit for _, v in recent):
        return None
    now = median(v for _, v in recent)
    text = (
        f"the policy is {now:.2g} nats a token away from the one that made its tokens (at most {usual:.2g} before), "
        f"since step {recent[0][0].step}"
    )
    return CollapseSymptom(
        kind="policy_diverged", since=recent[0][0], text=text, values={"kl_nats": now, "kl_nats_before": usual}
    )


def disagreeing(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    ratios = known(points, "log_ratio_max")
    recent, before = ratios[-LOG_RATIO_SEEN:], ratios[:-LOG_RATIO_SEEN]
    if len(before) < LEVEL_STEPS:
        return None  # what is usual here is not known
    usual = median(v for _, v in before)
    limit = max(LOG_RATIO_ALARM, LOG_RATIO_FACTOR * usual)
    above = [(p, v) for p, v in recent if v > limit]
    if len(above) < LOG_RATIO_ABOVE:
        return None
    text = (
        f"log-probabilities of tokens of the very same version differ by up to {max(v for _, v in above):.2g} "
        f"(usual: {usual:.2g}; more than {limit:.2g} in {len(above)} of the last {len(recent)} steps that told it)"
    )
    values = {"log_ratio_max": max(v for _, v in above), "log_ratio_usual": usual}
    return CollapseSymptom(kind="engines_disagree", since=above[0][0], text=text, values=values)


def _below(part: Known, line: float) -> bool:
    return all(v < line for _, v in part)


def _since(series: Known, line: float) -> TrainingStepPoint:
    """First of the newest points below the line; one above it may be among them."""
    first, above = series[-1][0], 0
    for point, value in reversed(series):
        above = 0 if value < line else above + 1
        if above > 1:
            break
        if not above:
            first = point
    return first


def _of_another_kind(then: Sequence[TrainingStepPoint], now: Sequence[TrainingStepPoint]) -> str:
    entropy, entropy_then = middle(now, "entropy"), middle(then, "entropy")
    if entropy >= OTHER_FACTOR * entropy_then and entropy - entropy_then >= ENTROPY_HIGH:
        return f"entropy is {entropy:.2g} nats a token, not {entropy_then:.2g}"
    return _of_other_length(then, now)


def _of_other_length(then: Sequence[TrainingStepPoint], now: Sequence[TrainingStepPoint]) -> str:
    length, length_then = middle(now, "response_length"), middle(then, "response_length")
    cut, cut_then = middle(now, "truncated_fraction"), middle(then, "truncated_fraction")
    if length * OTHER_FACTOR <= length_then or length >= OTHER_FACTOR * length_then:
        return f"responses have {length:.3g} tokens, not {length_then:.3g}"
    if cut >= CUT_OFF > 0.5 >= cut_then:
        return f"{cut:.0%} of the responses are cut off at the limit, not {cut_then:.0%}"
    return ""


def _others(then: Sequence[TrainingStepPoint], now: Sequence[TrainingStepPoint]) -> str:
    """What else changed meanwhile, as far as it is known."""
    told = []
    entropy, length = ((middle(then, name), middle(now, name)) for name in ("entropy", "response_length"))
    if not math.isnan(sum(entropy)):
        told.append(f"entropy {entropy[0]:.2g} nats a token then, {entropy[1]:.2g} now")
    if not math.isnan(sum(length)):
        told.append(f"responses {length[0]:.3g} tokens then, {length[1]:.3g} now")
    if (cut := middle(now, "truncated_fraction")) >= CUT_OFF:
        told.append(f"{cut:.0%} of them cut off at the limit")
    return f" ({'; '.join(told)})" if told else ""
