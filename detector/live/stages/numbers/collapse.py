"""Policy collapse: a finding about the run, not about a machine.

    fleet -> training history (one point per step) -> collapse_symptoms -> one finding while they last

The history merges all reports of a step; a point is complete when a later step is reported. The axis is steps, not
seconds: waiting for a repair does not affect the policy. When the newest step of all live processes decreases, the run
resumed from an older checkpoint, and later points are discarded.

Each run is its own baseline. Its *best stretch* is the sequence of `LEVEL_STEPS` steps with the highest median reward;
the last `RECENT_STEPS` are compared with it:

    fallen       the reward is clearly below the best stretch and stays there
    dived        the reward dropped recently and recovered, while the responses changed in kind: likely reward hacking
    other        responses became three times longer or shorter, or are cut off, without a gain in reward
    shut         entropy fell to almost 0 without a gain in reward: one answer for every prompt
    diverged     the policy is far from the policy that sampled its tokens
    disagreeing  trainer and engine differ on tokens of the same policy version: weights or numerics are wrong

Falling entropy with rising reward is learning, whatever the amounts. No test fires before a baseline level and enough
newer steps are available.

`disagreeing` is `silent_corruption` between two roles. If the controller named one and the same engine, and no other,
(`EngineDisagrees`) in at least two steps since, that engine is replaced, else no replica. All others are `user_code`:
learning rate, reward or data are at fault, and on-call is paged, since replacing a machine would not help and a false
alarm must not stop a run of several days (`recovery.policy`). Machine faults are independent diagnoses.

A finding stands until `QUIET_STEPS` consecutive steps show no symptom, or the run goes back to before its onset.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median
from typing import Any, Final, Self

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.errors import EngineDisagrees
from rolecall.core.faults import FaultClass
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.core.telemetry import AgentEventKind, Phase, ProcessSample
from rolecall.detector.base.findings import ADVISES, COLLAPSE, WRONG_NUMBERS, settles
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, finding
from rolecall.detector.live.stages.stage import Stage, Tick

SIGNS = (
    *("reward", "entropy", "kl_sampler", "response_length", "truncated_fraction", "filtered_fraction", "log_ratio_max"),
)
"""Fields of ProcessSample kept in the history. NaN: unknown at that step."""
OF_OTHERS = frozenset({"reward", "filtered_fraction"})
"""Fields that are not reported by trainers alone: reported by the sampler, or missing in a step without a finished
response."""
STEPS_KEPT = 256
"""Longer than a collapse takes, and small enough for every stored window (30 kB)."""

REPORTS_MAX = 8
"""Reports merged per step and observation. All trainers report the same values; several are read because an agent may
have sampled one in the middle of its update."""


@dataclass(slots=True)
class TrainingStepPoint:
    step: int
    wall_at: float  # time of the first report
    values: dict[str, float] = field(default_factory=dict)  # known SIGNS

    def get(self, sign: str) -> float:
        return self.values.get(sign, math.nan)


@dataclass(slots=True)
class TrainingHistory:
    """History of one run. The newest point may be incomplete."""

    points: deque[TrainingStepPoint] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT + 1))

    @property
    def done(self) -> Sequence[TrainingStepPoint]:
        """Complete points: all but the newest."""
        return list(islice(self.points, max(0, len(self.points) - 1)))

    def take(self, fleet: MonitoredProcesses) -> bool:
        """Adds the samples of the newest observation. Returns whether the complete points changed."""
        changed, newest, num_reports = False, None, 0
        for subject in fleet.sampled:
            sample = subject.sample
            # Fast path: most processes of a large fleet report neither value.
            if sample is None or (sample.reward != sample.reward and sample.entropy != sample.entropy):
                continue
            step, last = step_of(sample), self.points[-1].step if self.points else -1
            if step < 0:
                continue  # before the first step
            if step < last:
                newest = _newest(fleet) if newest is None else newest
                if newest >= last:
                    continue  # it lags behind its peers
                while self.points and self.points[-1].step >= newest:
                    self.points.pop()
                changed, last = True, self.points[-1].step if self.points else -1
            if step > last:
                self.points.append(TrainingStepPoint(step, sample.wall_at + subject.offset_seconds))
                changed, last, num_reports = True, step, 0
            if step == last and num_reports < REPORTS_MAX:
                _fill(self.points[-1], sample)
                num_reports += 1
        return changed

    def to_dict(self) -> dict[str, Any]:
        return {"points": [[p.step, p.wall_at, dict(p.values)] for p in self.points]}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        made = cls()
        made.points.extend(TrainingStepPoint(step, wall_at, dict(values)) for step, wall_at, values in d["points"])
        return made


def step_of(sample: ProcessSample) -> int:
    """The step that the sample's values describe: trainers report them with the policy version that the step produced.
    Without versions, the current step is used, which is at most one later."""
    return sample.policy_version - 1 if sample.policy_version >= 0 else sample.step


def _newest(fleet: MonitoredProcesses) -> int:
    """Newest step of all live processes that report training values."""
    samples = (s.sample for s in fleet.current() if not s.gone and s.sample is not None)
    return max((step_of(p) for p in samples if p.reward == p.reward or p.entropy == p.entropy), default=-1)


def _fill(point: TrainingStepPoint, sample: ProcessSample) -> None:
    """Known values are kept unless a trainer now reports them as unknown: the earlier sample was taken mid-update."""
    is_trainer = not math.isnan(sample.entropy)
    for sign in SIGNS:
        value = getattr(sample, sign)
        if math.isfinite(value):
            point.values[sign] = value
        elif is_trainer and sign not in OF_OTHERS:
            point.values.pop(sign, None)


RECENT_STEPS: Final = 8
"""Shorter drops are not reported. Eight steps in a row below the median occur by chance once in 256 times; the required
depth of the drop excludes these."""
LEVEL_STEPS: Final = 8
"""Number of steps whose median is a level."""
CLEAR_SHARE: Final = 0.25
"""A drop is clear if it exceeds a quarter of the level, or of the run's total gain if that is larger. Healthy runs
dropped by at most a twelfth for this long (benchmarks/detection/collapse/)."""
NOISE_FACTOR: Final = 4.0
"""A clear drop must also exceed this multiple of the step-to-step noise, for rewards that are small relative to it."""
DIVE_STEPS: Final = 3
DIVE_REMEMBERED: Final = 32
OTHER_FACTOR: Final = 3.0
"""Factor of response length (either way) or of entropy (upwards) from which responses count as changed in kind."""
ENTROPY_OPEN, ENTROPY_SHUT = 0.3, 0.03
"""Nats per token. Above 0.3 several responses are likely (a token is predicted with about 90 % probability); at 0.03
each token is almost certain. A policy that learns while its entropy falls between them gains clear reward."""
OPEN_STEPS: Final = 4
"""Number of last steps with open entropy that give the reward before the fall: entropy may collapse in ten steps."""
RISE_NOISE: Final = 3.0
"""Standard errors from which a rise in reward is significant."""
ENTROPY_HIGH: Final = 0.5
"""Minimum increase over the best stretch, in nats per token, that counts as an entropy explosion."""
CUT_OFF: Final = 0.9
"""Fraction of responses cut off at the length limit from which responses count as having lost their end."""
FILTERED_MORE: Final = 0.2
"""Increase of the filtered fraction from which the reward covers a different set of prompts and is not comparable."""
DIVERGED_NATS: Final = 0.2
"""Minimum kl_sampler for divergence: importance weights of tokens spread by a factor of two. Healthy runs never
exceeded 0.06 for four steps in a row after their baseline was known."""
DIVERGED_FACTOR: Final = 10.0
DIVERGED_STEPS: Final = 4
LOG_RATIO_FACTOR: Final = 10.0
LOG_RATIO_SEEN, LOG_RATIO_ABOVE = 4, 3
"""Three of the last four steps with a log ratio must be above the limit."""
NAMED_STEPS_MIN: Final = 2
"""Steps in which the controller must have named one engine, and no other."""
ENGINES_DISAGREE: Final = "engines_disagree"
"""The symptom that is a fault of weights or numerics."""

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
    """One symptom of collapse. `text` is a clause for `because`."""

    kind: str
    since: TrainingStepPoint
    text: str
    values: dict[str, float]


def collapse_symptoms(points: Sequence[TrainingStepPoint]) -> list[CollapseSymptom]:
    """All symptoms at the newest point, most severe first."""
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
    """Standard deviation of a step, estimated from differences of neighbours, so that a trend hardly affects it."""
    apart = [abs(b - a) for (_, a), (_, b) in pairwise(series)]
    return 1.4826 * median(apart) / math.sqrt(2) if apart else 0.0


def middle(points: Sequence[TrainingStepPoint], name: str) -> float:
    values = [v for _, v in known(points, name)]
    return median(values) if values else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRewardLevel:
    """The best stretch and the reward below which a drop is clear (`line`)."""

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
    """The reward dropped clearly for a few steps and recovered, and the responses have changed in kind since."""
    reward = known(points, "reward")
    begin = max(0, len(reward) - DIVE_REMEMBERED)
    best = best_stretch(reward[:begin])
    if best is None:
        return None
    lately = reward[begin:]
    starts = range(len(lately) - DIVE_STEPS)
    at = next((i for i in starts if all(v < best.line for _, v in lately[i : i + DIVE_STEPS])), None)
    if at is None:
        return None
    now = points[-RECENT_STEPS:]
    if now[0].step <= lately[at][0].step:
        return None
    entropy, entropy_then = middle(now, "entropy"), middle(best.level.points, "entropy")
    change = _of_other_length(best.level.points, now)
    if entropy >= OTHER_FACTOR * entropy_then and entropy - entropy_then >= ENTROPY_HIGH:
        change = f"entropy is {entropy:.2g} nats a token, not {entropy_then:.2g}"
    if not change:
        return None
    since = lately[at][0]
    fell = f"mean reward fell from {best.level.value:.3g} ({best.level.steps}) to {lately[at][1]:.3g}"
    text = f"{fell} in step {since.step}, and since it recovered {change}"
    return CollapseSymptom(
        kind="reward_dived", since=since, text=text, values={"reward": lately[at][1], "reward_before": best.level.value}
    )


def other(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    """Response length differs from the best stretch of a run that had learned, without a gain in reward.

    Before the run has learned anything, length may change freely: policies often learn to end a response first.
    """
    reward = known(points, "reward")
    best = best_stretch(reward[:-RECENT_STEPS])
    if best is None:
        return None
    error = 1.2533 * best.noise * math.sqrt(1 / LEVEL_STEPS + 1 / RECENT_STEPS)  # of a difference of two medians
    first, now = median(v for _, v in reward[:LEVEL_STEPS]), points[-RECENT_STEPS:]
    earned = middle(now, "reward")
    change = _of_other_length(best.level.points, now)
    if not change or sum(bool(_of_other_length(best.level.points, [p])) for p in now) < RECENT_STEPS - 1:
        return None
    had_learned = best.level.value - first > best.clear
    if not had_learned or not best.line <= earned <= best.level.value + RISE_NOISE * error:
        return None  # a drop in reward is reported by `fallen`
    text = (
        f"{change} as in {best.level.steps}, since step {now[0].step}, and the reward did not rise for it "
        f"({earned:.3g})"
    )
    values = {"reward": earned, "reward_before": best.level.value}
    return CollapseSymptom(kind="length_collapsed", since=now[0], text=text, values=values)


def shut(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    """Entropy fell from open to shut without a gain in reward."""
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
    # The best level since: a gain that was lost again is a drop in reward, not an effect of entropy.
    after = max((x.value for x in levels(known(points[opened[-1] + 1 :], "reward"))), default=math.nan)
    error = 1.2533 * noise(reward) * math.sqrt(1 / OPEN_STEPS + 1 / RECENT_STEPS)  # of a difference of two medians
    cut = middle(now, "truncated_fraction")
    endless = cut >= CUT_OFF > min((v for _, v in known(points, "truncated_fraction")), default=1.0)
    if not after - before <= RISE_NOISE * error and not endless:
        return None
    since = points[opened[-1] + 1]
    why = f"{cut:.0%} of the responses have no end" if endless else "the reward did not rise for it"
    text = (
        f"entropy fell to {nats:.2g} nats a token, one answer to all prompts, from {middle(then, 'entropy'):.2g} until "
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
        f"the policy is {now:.2g} nats a token away from the one that sampled its tokens (at most {usual:.2g} before), "
        f"since step {recent[0][0].step}"
    )
    return CollapseSymptom(
        kind="policy_diverged", since=recent[0][0], text=text, values={"kl_nats": now, "kl_nats_before": usual}
    )


def disagreeing(points: Sequence[TrainingStepPoint]) -> CollapseSymptom | None:
    ratios = known(points, "log_ratio_max")
    recent, before = ratios[-LOG_RATIO_SEEN:], ratios[:-LOG_RATIO_SEEN]
    if len(before) < LEVEL_STEPS:
        return None  # the usual log ratio of this run is unknown
    usual = median(v for _, v in before)
    limit = max(LOG_RATIO_ALARM, LOG_RATIO_FACTOR * usual)
    above = [(p, v) for p, v in recent if v > limit]
    if len(above) < LOG_RATIO_ABOVE:
        return None
    text = (
        f"log-probabilities of tokens of the same version differ by up to {max(v for _, v in above):.2g} "
        f"(usual: {usual:.2g}; more than {limit:.2g} in {len(above)} of the last {len(recent)} steps that reported it)"
    )
    values = {"log_ratio_max": max(v for _, v in above), "log_ratio_usual": usual}
    return CollapseSymptom(kind=ENGINES_DISAGREE, since=above[0][0], text=text, values=values)


def _since(series: Known, line: float) -> TrainingStepPoint:
    """First point of the newest stretch below the line, in which single points may be above it."""
    first, above = series[-1][0], 0
    for point, value in reversed(series):
        above = 0 if value < line else above + 1
        if above > 1:
            break
        if not above:
            first = point
    return first


def _of_other_length(then: Sequence[TrainingStepPoint], now: Sequence[TrainingStepPoint]) -> str:
    length, length_then = middle(now, "response_length"), middle(then, "response_length")
    cut, cut_then = middle(now, "truncated_fraction"), middle(then, "truncated_fraction")
    if length * OTHER_FACTOR <= length_then or length >= OTHER_FACTOR * length_then:
        return f"responses have {length:.3g} tokens, not {length_then:.3g}"
    if cut >= CUT_OFF > 0.5 >= cut_then:
        return f"{cut:.0%} of the responses are cut off at the limit, not {cut_then:.0%}"
    return ""


def _others(then: Sequence[TrainingStepPoint], now: Sequence[TrainingStepPoint]) -> str:
    """Other known changes since the best stretch, for `because`."""
    changes = []
    entropy, length = ((middle(then, name), middle(now, name)) for name in ("entropy", "response_length"))
    if not math.isnan(sum(entropy)):
        changes.append(f"entropy {entropy[0]:.2g} nats a token then, {entropy[1]:.2g} now")
    if not math.isnan(sum(length)):
        changes.append(f"responses {length[0]:.3g} tokens then, {length[1]:.3g} now")
    if (cut := middle(now, "truncated_fraction")) >= CUT_OFF:
        changes.append(f"{cut:.0%} of them cut off at the limit")
    return f" ({'; '.join(changes)})" if changes else ""


QUIET_STEPS: Final = 16
"""Twice the steps needed to detect a symptom, so that an intermittent symptom is one incident."""
CONFIDENCE: Final = {FaultClass.SILENT_CORRUPTION: 0.9, FaultClass.USER_CODE: 0.7}
"""A difference of log-probabilities is measured; the cause of a drop in reward is inferred."""


@dataclass(slots=True)
class CollapseWatch:
    """Collapse state of one run."""

    history: TrainingHistory = field(default_factory=TrainingHistory)
    reported: Finding | None = None
    since_step: int = 0  # onset of `reported`
    quiet: int = 0  # steps since the last symptom

    def judge(self, fleet: MonitoredProcesses, now: float) -> None:
        points = self.history.done
        if self.reported and (not points or points[-1].step < self.since_step):
            self.reported = None
        seen = collapse_symptoms(points)
        if seen:
            self.quiet = 0
            disagree = _class(seen) is FaultClass.SILENT_CORRUPTION
            since = min((s.since.step for s in seen if s.kind == ENGINES_DISAGREE), default=0)
            engine = disagreeing_engine(fleet, since) if disagree else None
            before = self.reported
            more_severe = disagree and before is not None and before.fault_class is not FaultClass.SILENT_CORRUPTION
            if before is None or more_severe or (engine is not None and not before.suspects):
                made = _finding(seen, points, fleet, engine, now)
                self.reported, self.since_step = made, min(sign.since.step for sign in seen)
        elif self.reported:
            self.quiet += 1
            if self.quiet >= QUIET_STEPS:
                self.reported = None


class CollapseStage(Stage):
    name = "collapse"

    def __init__(self) -> None:
        self.state: CollapseWatch = CollapseWatch()

    def evaluate(self, tick: Tick) -> list[Finding]:
        if self.state.history.take(tick.fleet):
            self.state.judge(tick.fleet, tick.now)
        return [self.state.reported] if self.state.reported else []


def _class(seen: Sequence[CollapseSymptom]) -> FaultClass:
    disagree = any(sign.kind == ENGINES_DISAGREE for sign in seen)
    return FaultClass.SILENT_CORRUPTION if disagree else FaultClass.USER_CODE


def disagreeing_engine(fleet: MonitoredProcesses, since_step: int) -> MonitoredProcess | None:
    """The engine that the controller named in each of its reports from this step on; None if there are too few."""
    steps_of: dict[tuple[str, int], set[int]] = {}
    for replica, incarnation, step in _named_since(fleet, since_step).values():
        steps_of.setdefault((replica, incarnation), set()).add(step)
    if len(steps_of) != 1 or len(next(iter(steps_of.values()))) < NAMED_STEPS_MIN:
        return None
    (replica, incarnation), _ = steps_of.popitem()
    here = fleet.roster.of_replica(replica).values()
    return next((s for s in here if s.incarnation == incarnation and not s.gone), None)


def _named_since(fleet: MonitoredProcesses, since_step: int) -> dict[str, tuple[str, int, int]]:
    """The controller's reports from this step on: message -> (replica, incarnation, step)."""
    messages = [s.event.detail.get("message", "") for s in fleet.wrong_numbers]
    parsed = ((message, EngineDisagrees.parse(message)) for message in messages)
    return {message: found for message, found in parsed if found is not None and found[2] >= since_step}


def _finding(
    seen: Sequence[CollapseSymptom],
    points: Sequence[TrainingStepPoint],
    fleet: MonitoredProcesses,
    engine: MonitoredProcess | None,
    now: float,
) -> Finding:
    """`engine`: the only one that disagrees with the trainers; None: not known."""
    fault = _class(seen)
    began = min((sign.since for sign in seen), key=lambda p: p.step)
    what = "; ".join(sign.text for sign in seen)
    evidence = [
        Evidence(kind=sign.kind, text=sign.text, values={"step": float(sign.since.step), **sign.values})
        for sign in seen
    ]
    if engine is not None:
        evidence += [
            Evidence(kind=AgentEventKind.EXCEPTION, text=message, values={"step": float(step)})
            for message, (*who, step) in _named_since(fleet, began.step).items()
            if who == [engine.replica, engine.incarnation]
        ]
        because = (
            f"{engine.name()} alone computes other log-probabilities than the trainers, in each of the steps that "
            f"distinguish engines: {what}"
        )
        advice = f"check what was trained on its tokens, from step {began.step} on"
    elif fault is FaultClass.SILENT_CORRUPTION:
        trainers, engines = _roles(fleet)
        because = (
            f"weights or numerics differ between {trainers} and {engines}: {what}; these numbers do not identify the "
            "replica, so none is evicted"
        )
        settle = (
            f"compare the digest of the weights of each replica of {engines}, and its output for one fixed text, with "
            f"{trainers}: the replica that differs is wrong"
        )
        evidence.append(settles(settle))
        advice = (
            f"find and replace the replica whose weights differ; steps from {began.step} on were trained on its tokens"
        )
    else:
        because = f"the policy collapsed, not a machine fault: {what}; {_engines_agree(points, began.step)}"
        advice = (
            f"check learning rate, reward function and data of step {began.step}, and what changed before it; "
            f"save a checkpoint of an earlier step before it is rotated out"
        )
    return finding(
        COLLAPSE if engine is None else WRONG_NUMBERS,
        [] if engine is None else [engine],
        fault,
        onset=began.wall_at,
        now=now,
        confidence=CONFIDENCE[fault],
        because=because,
        evidence=(*evidence, Evidence(kind=ADVISES, text=advice)),
        about=f":{COLLAPSE}",  # no role: it must not explain crashes and hangs
    )


def _engines_agree(points: Sequence[TrainingStepPoint], since: int) -> str:
    """Clause on engine-trainer agreement. Steps sampled only from versions that no trainer holds have no log ratio."""
    ratios = [(p.step, v) for p in points if (v := p.get("log_ratio_max")) == v][-8:]
    if not ratios:
        return "agreement between engines and trainers is unknown (no log ratio reported)"
    (last, _), largest = ratios[-1], max(v for _, v in ratios)
    if last < since:
        return (
            f"engines and trainers last reported agreement about tokens of the same version at step {last} "
            f"(within {largest:.1g})"
        )
    if largest > LOG_RATIO_ALARM:
        return (
            f"engines and trainers differ about tokens of the same version by up to {largest:.1g}, too rarely or too "
            "usual here to conclude that weights are wrong"
        )
    return f"engines and trainers agree about tokens of the same version (within {largest:.1g})"


def _roles(fleet: MonitoredProcesses) -> tuple[str, str]:
    """Names of the roles that report entropy and of the roles that generate, for `because`."""
    trainers = {s.role for s in fleet.current() if s.sample is not None and s.sample.entropy == s.sample.entropy}
    engines = {s.role for s in fleet.current() if s.phase == Phase.GENERATE or Phase.GENERATE in s.phases_done}
    return _named(trainers, "the trainers"), _named(engines - trainers, "the engines")


def _named(roles: set[str], otherwise: str) -> str:
    return f"role {' and '.join(sorted(roles))}" if roles else otherwise
