"""Prompt sampler state as a fold over the ledger, and the decisions of dynamic sampling. Pure.

The ledger is the only persistent state: a controller folds its lines at the start and then advances with each line it
writes. After any failure, the cursor, the accepted groups and the groups filtered for a step match the ledger, and no
prompt is skipped or repeated. Randomness has no state either: a group's seed is a function of the job's seed and the
prompt's number. Each ISSUED line records the seed and, of a dataset, its fingerprint, the row and the epoch, so that a
sampler that would continue differently (another job file, dataset or rolecall version) is rejected instead of mixing
two runs.

Dynamic sampling (DAPO, 2503.14476 eq. 11) judges a scored group by the task's rewards, before the overlong penalty. A
group without a learning signal is dropped, with one of three verdicts. The number of groups judged for one step is
bounded, so that prompts that are too easy or too hard end the run with an error instead of stalling it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.errors import BatchNotFilled, SamplerMismatch
from rolecall.core.ids import GroupId
from rolecall.core.journal.ledger import FILTERED, GroupState, LedgerLine
from rolecall.rl_runtime.algorithms.group_relative import all_equal
from rolecall.rl_runtime.tasks.task import group_id, group_number, group_start

EXACT_REWARD: Final = 1.0
"""A task's reward for the exact answer only."""
SEED = "seed "
"""Prefix of an ISSUED line's reason; older ledgers lack it and are accepted unchecked."""
TAKEN = "taken although "
"""Prefix of an ACCEPTED line's reason for a filtered group that fills an otherwise incomplete batch."""


class GroupSignal(StrEnum):
    INFORMATIVE = "informative"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    ALL_EQUAL = "all equal"


def classify_rewards(rewards: Sequence[float], filter_by: Literal["reward", "exact"]) -> GroupSignal:
    """Verdict of dynamic sampling on a group with these rewards."""
    exact = sum(r == EXACT_REWARD for r in rewards)
    if exact == len(rewards):
        return GroupSignal.ALL_RIGHT
    if filter_by == "exact":
        return GroupSignal.INFORMATIVE if exact else GroupSignal.ALL_WRONG
    if not all_equal(rewards):
        return GroupSignal.INFORMATIVE
    return GroupSignal.ALL_EQUAL if rewards[0] > 0.0 else GroupSignal.ALL_WRONG


def group_seed(job_seed: int, number: int) -> int:
    """Random seed of a prompt's group: a counter, without state carried from draw to draw."""
    return (job_seed * 1_000_003 + number * 8_191) % (2**31)


def request_seed(job_seed: int, number: int, sample: int) -> int:
    """Seed of one sample, independent of the engine or controller that requests it."""
    return (group_seed(job_seed, number) + sample) % (2**31)


def no_origin(_number: int) -> str:
    """Of prompts that their seed alone determines."""
    return ""


@dataclass(slots=True)
class SamplerState:
    """Sampler state after a prefix of the ledger's lines."""

    job_seed: int
    cursor: int = 0
    """Number of the next prompt; every smaller one has a group in the ledger."""
    accepted: set[GroupId] = field(default_factory=set)
    """Accepted by dynamic sampling, not assigned to a step yet."""
    filtered: dict[GroupId, tuple[int, GroupSignal]] = field(default_factory=dict)
    """Group -> (step being formed, verdict), since the newest assigned step. Includes groups taken to fill a batch."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups dropped, by the first part of the reason: `filtered`, `stale`, `prompt too long`, `reward_failed`, ..."""
    origin: Callable[[int], str] = field(default=no_origin, compare=False)
    """What an ISSUED line says of a prompt beside its seed."""

    @classmethod
    def of(
        cls, lines: Iterable[Mapping[str, Any]], job_seed: int, origin: Callable[[int], str] = no_origin
    ) -> "SamplerState":
        """The state after the ledger's last line.

        Raises:
            SamplerMismatch: a group's seed differs from the one this job would draw, or a prompt was skipped.
        """
        state = cls(job_seed, origin=origin)
        for line in lines:
            state.advance(GroupId(line["group_id"]), GroupState(line["state"]), int(line["step"]), str(line["reason"]))
        return state

    def advance_by(self, lines: Iterable[LedgerLine]) -> None:
        for line in lines:
            self.advance(line.group_id, line.state, line.step, line.reason)

    def advance(self, group: GroupId, state: GroupState, step: int, reason: str) -> None:
        """Folds one more line."""
        # Dynamic sampling first: every state except ACCEPTED removes a group from the accepted ones.
        if state is GroupState.ACCEPTED:
            self.accepted.add(group)
        else:
            self.accepted.discard(group)
        if state is GroupState.DROPPED:
            self.dropped[reason.partition(":")[0]] += 1
        match state:
            case GroupState.ISSUED:
                number = group_number(group)
                if group_start(group) == 0:
                    if number != self.cursor:
                        here = f"that {group_id(self.cursor)} comes next"
                        raise SamplerMismatch(group=group, what="that this one", ledger="came next", here=here)
                    self.cursor += 1
                wanted = self.seed_line(number)
                if reason.startswith(SEED) and reason != wanted:
                    raise SamplerMismatch(group=group, what="its", ledger=reason, here=wanted)
            case GroupState.ACCEPTED if reason.startswith(TAKEN):
                self.filtered[group] = step, GroupSignal(reason.removeprefix(TAKEN))
            case GroupState.DROPPED if reason.startswith(FILTERED):
                self.filtered[group] = step, GroupSignal(reason.removeprefix(FILTERED))
            case GroupState.ASSIGNED:
                # A returned step is formed again: groups filtered for it still count.
                self.filtered = {g: found for g, found in self.filtered.items() if found[0] >= step}
            case GroupState.UNDONE:
                self.filtered = {}

    def seed_line(self, number: int) -> str:
        """Reason of an ISSUED line: the group's seed, and the prompt's origin."""
        return f"{SEED}{group_seed(self.job_seed, number)} {self.origin(number)}".rstrip()

    def verdicts(self, step: int) -> Counter[GroupSignal]:
        """Groups filtered for `step`, by kind."""
        return Counter(verdict for at, verdict in self.filtered.values() if at == step)

    def filtered_fraction(self, step: int, groups: Iterable[GroupId]) -> float:
        """Share of the groups judged for `step` that were filtered, once its `groups` are chosen."""
        filtered = {g for g, (at, _) in self.filtered.items() if at == step}
        return len(filtered) / len(filtered | set(groups))


def is_at_limit(algorithm: AlgorithmConfig, *, accepted: int, filtered: int) -> bool:
    """Whether a step has reached the limit of judged groups without being full."""
    limit = algorithm.refills_max * algorithm.groups_per_step
    return accepted < algorithm.groups_per_step and accepted + filtered >= limit


def not_filled(
    algorithm: AlgorithmConfig, step: int, *, accepted: int, verdicts: Mapping[GroupSignal, int]
) -> BatchNotFilled:
    """The error that ends the run: the counts by verdict, and the settings to change."""
    kinds = {
        kind: verdicts.get(kind, 0) for kind in (GroupSignal.ALL_RIGHT, GroupSignal.ALL_WRONG, GroupSignal.ALL_EQUAL)
    }
    easy = kinds[GroupSignal.ALL_RIGHT] > kinds[GroupSignal.ALL_WRONG] + kinds[GroupSignal.ALL_EQUAL]
    others = "" if algorithm.filter_by == "reward" else ", filter_by: reward"
    advice = (
        f"The prompts are too {'easy' if easy else 'hard'} for this policy: make the task "
        f"{'harder' if easy else 'easier'}"
        f", or change the algorithm: a larger group_size or refills_max{others}, or at_refill_limit: take"
    )
    return BatchNotFilled(
        step=step,
        wanted=algorithm.groups_per_step,
        accepted=accepted,
        by_verdict={str(k): n for k, n in kinds.items()},
        advice=advice,
    )
