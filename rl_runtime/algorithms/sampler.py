"""Where the sampling of prompts stands, as a fold over the ledger; and dynamic sampling's decisions. Pure.

Nothing about the sampler is kept beside the ledger: a controller that begins folds the ledger's lines, and then
continues with each line that it writes. So after any death the cursor, accepted groups and what was filtered for a step
are what was written, and no prompt is skipped or used twice. Randomness has no state to lose either: a group's seed is
a function of the job's seed and the prompt's number. Each ISSUED line records it all the same, so that a sampler that
would draw another one (another job file, another version of rolecall) is refused, instead of mixing two runs in one.

Dynamic sampling (DAPO, 2503.14476 eq. 11) judges a scored group by the rewards as the task gave them, before length is
punished. A group without a learning signal is dropped, with which of three kinds it was; the number of groups judged
for one step is bounded, so that prompts which are too easy or too hard end the run with an error instead of running for
ever.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
"""A task's reward for the exact answer, and for no other."""
SEED = "seed "
"""How the reason of an ISSUED line begins; ledgers of before have none, and are believed."""
TAKEN = "taken although "
"""How the reason of an ACCEPTED line begins, where a filtered group fills a batch that nothing else could fill."""


class GroupSignal(StrEnum):
    INFORMATIVE = "informative"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    ALL_EQUAL = "all equal"


def classify_rewards(rewards: Sequence[float], filter_by: Literal["reward", "exact"]) -> GroupSignal:
    """What dynamic sampling thinks of a group whose samples earned `rewards`."""
    exact = sum(r == EXACT_REWARD for r in rewards)
    if exact == len(rewards):
        return GroupSignal.ALL_RIGHT
    if filter_by == "exact":
        return GroupSignal.INFORMATIVE if exact else GroupSignal.ALL_WRONG
    if not all_equal(rewards):
        return GroupSignal.INFORMATIVE
    return GroupSignal.ALL_EQUAL if rewards[0] > 0.0 else GroupSignal.ALL_WRONG


def group_seed(job_seed: int, number: int) -> int:
    """The random state of a prompt's group: a counter, and nothing that continues from draw to draw."""
    return (job_seed * 1_000_003 + number * 8_191) % (2**31)


def request_seed(job_seed: int, number: int, sample: int) -> int:
    """Seed of one sample: the same whichever engine, or controller, asks for it."""
    return (group_seed(job_seed, number) + sample) % (2**31)


@dataclass(slots=True)
class SamplerState:
    """What the ledger's lines up to one of them say."""

    job_seed: int
    cursor: int = 0
    """Number of the next prompt; every smaller one has a group in the ledger."""
    accepted: set[GroupId] = field(default_factory=set)
    """Judged and found worth training on, and in no step yet."""
    filtered: dict[GroupId, tuple[int, GroupSignal]] = field(default_factory=dict)
    """Group -> (step that was being formed, verdict), since the newest step that was assigned. With those taken."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], job_seed: int) -> "SamplerState":
        """The state after the ledger's last line.

        Raises:
            SamplerMismatch: a group has another seed than this job would draw, or a prompt was skipped.
        """
        state = cls(job_seed)
        for line in lines:
            state.advance(GroupId(line["group_id"]), GroupState(line["state"]), int(line["step"]), str(line["reason"]))
        return state

    def advance_by(self, lines: Iterable[LedgerLine]) -> None:
        for line in lines:
            self.advance(line.group_id, line.state, line.step, line.reason)

    def advance(self, group: GroupId, state: GroupState, step: int, reason: str) -> None:
        """One line more."""
        # What the line says of dynamic sampling comes first: all but ACCEPTED takes a group from those accepted.
        if state is GroupState.ACCEPTED:
            self.accepted.add(group)
        else:
            self.accepted.discard(group)
        match state:
            case GroupState.ISSUED:
                self._issued(group, reason)
            case GroupState.ACCEPTED if reason.startswith(TAKEN):
                self.filtered[group] = step, GroupSignal(reason.removeprefix(TAKEN))
            case GroupState.DROPPED if reason.startswith(FILTERED):
                self.filtered[group] = step, GroupSignal(reason.removeprefix(FILTERED))
            case GroupState.ASSIGNED:
                # A step that is returned is formed again: what was filtered for it still counts.
                self.filtered = {g: found for g, found in self.filtered.items() if found[0] >= step}
            case GroupState.UNDONE:
                self.filtered = {}

    def _issued(self, group: GroupId, reason: str) -> None:
        number = group_number(group)
        if group_start(group) == 0:
            if number != self.cursor:
                here = f"that {group_id(self.cursor)} comes next"
                raise SamplerMismatch(group=group, what="that this one", ledger="came next", here=here)
            self.cursor += 1
        wanted = self.seed_line(number)
        if reason.startswith(SEED) and reason != wanted:
            raise SamplerMismatch(group=group, what="its", ledger=reason, here=wanted)

    def seed_line(self, number: int) -> str:
        """What an ISSUED line says of the random state."""
        return f"{SEED}{group_seed(self.job_seed, number)}"

    def verdicts(self, step: int) -> Counter[GroupSignal]:
        """Groups filtered for `step`, by kind."""
        return Counter(verdict for at, verdict in self.filtered.values() if at == step)

    def filtered_fraction(self, step: int, groups: Iterable[GroupId]) -> float:
        """Share of the groups judged for `step` that were filtered, once it has its `groups`."""
        filtered = {g for g, (at, _) in self.filtered.items() if at == step}
        return len(filtered) / len(filtered | set(groups))


def is_at_limit(algorithm: AlgorithmConfig, *, accepted: int, filtered: int) -> bool:
    """Whether no more groups may be judged for a step: so many were, and they do not fill it."""
    limit = algorithm.refills_max * algorithm.groups_per_step
    return accepted < algorithm.groups_per_step and accepted + filtered >= limit


def not_filled(
    algorithm: AlgorithmConfig, step: int, *, accepted: int, verdicts: Mapping[GroupSignal, int]
) -> BatchNotFilled:
    """The error that ends the run: what was found, and what can be changed."""
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
