"""Invariant Constant work (docs/invariants.md): each step has exactly B microbatches, whatever their assignment.

A step's composition depends only on its set of groups: sorted by id and cut into equal pieces. A controller that
restarts from the ledger therefore forms the same microbatches with the same ids. `assign` distributes them, and
redistributes them when a replica is lost. Which microbatches make a mini-batch follows from their ids and the job's
seed alone, so a step's updates are the same on any number of replicas. Pure.
"""

import random
from collections.abc import Collection, Mapping, Sequence

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import Microbatch, PromptGroup, StepStatistics


def microbatch_id(step: int, number: int) -> str:
    """Step 12, 3 -> `12.3`."""
    return f"{step}.{number}"


def form_microbatches(
    step: int,
    groups: Sequence[PromptGroup],
    microbatches_per_step: int,
    statistics: StepStatistics | None = None,
) -> tuple[Microbatch, ...]:
    """The step's B microbatches of equal numbers of groups, the same for the same set of groups.

    `statistics`: of the step's advantages (`group_relative.step_statistics`), for each of them.

    Raises:
        ValueError: the groups cannot be cut into that many equal pieces, or one occurs twice.
    """
    ordered = sorted(groups, key=lambda g: g.group_id)
    size, rest = divmod(len(ordered), microbatches_per_step)
    if rest or not size:
        raise ValueError(f"step {step}: {len(ordered)} groups do not make {microbatches_per_step} equal microbatches")
    if len({g.group_id for g in ordered}) != len(ordered):
        raise ValueError(f"step {step}: a group occurs twice")
    return tuple(
        Microbatch(
            microbatch_id=microbatch_id(step, n),
            groups=tuple(ordered[n * size : (n + 1) * size]),
            statistics=statistics,
        )
        for n in range(microbatches_per_step)
    )


def mini_batches(all_ids: Sequence[str], *, step: int, number: int, seed: int) -> list[tuple[str, ...]]:
    """The step's microbatches in `number` equal parts, drawn at random; the same for the same set of ids."""
    if number == 1:
        return [tuple(all_ids)]
    size = len(all_ids) // number
    drawn = random.Random(f"{seed}.{step}").sample(sorted(all_ids), len(all_ids))
    return [tuple(drawn[n * size : (n + 1) * size]) for n in range(number)]


def updates(all_ids: Sequence[str], algorithm: AlgorithmConfig, *, step: int, seed: int) -> list[tuple[str, ...]]:
    """The microbatches of each optimizer update of the step: `ppo_epochs` passes over the same mini-batches, in another
    order each time.

    The parts stay the same in all passes, because only then can each member have its share of every one.
    """
    parts = mini_batches(all_ids, step=step, number=algorithm.mini_batches, seed=seed)
    orders = (random.Random(f"{seed}.{step}.{number}") for number in range(algorithm.ppo_epochs))
    return [part for order in orders for part in order.sample(parts, len(parts))]


def interleaved(parts: Sequence[Sequence[str]]) -> list[str]:
    """All ids, so that a run of them has about equally many of each part: the order to `assign` mini-batches in."""
    return [identity for row in zip(*parts, strict=True) for identity in row]


def chunks(lengths: Sequence[int], tokens_max: int | None) -> list[list[int]]:
    """Rows that are computed together: row count x longest <= `tokens_max`, or one longer row alone.

    Rows of similar length are together, so that little is padding. Without a limit: all of them, in their order.
    """
    if tokens_max is None:
        return [list(range(len(lengths)))]
    found: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= tokens_max:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def assign(
    all_ids: Sequence[str], computed: Mapping[ReplicaId, Collection[str]], members: Collection[ReplicaId]
) -> dict[ReplicaId, list[str]]:
    """Replica -> microbatches: assigns every id exactly once and keeps finished work at its replica.

    `computed`: gradients that members hold from an interrupted attempt. Those of previous members are ignored; if two
    members hold the same id, the first in order keeps it. Totals are balanced as far as the held gradients allow, then
    the free ids fill up the members in order. Deterministic and stable: when part of the result has been computed, the
    result stays the same, so an attempt that is retried after a lost answer matches the one still running.

    Raises:
        ValueError: there is no member, or an id occurs twice.
    """
    order = sorted(members)
    if not order:
        raise ValueError(f"no replica is left to compute {len(all_ids)} microbatches")
    if len(set(all_ids)) != len(all_ids):
        raise ValueError("a microbatch id occurs twice")
    owner: dict[str, ReplicaId] = {}
    for replica in order:
        for held in computed.get(replica, ()):
            owner.setdefault(held, replica)
    free = [i for i in all_ids if i not in owner]
    held_count = {replica: sum(owner.get(i) == replica for i in all_ids) for replica in order}
    room = {r: target - held_count[r] for r, target in _levelled(held_count, len(free)).items()}
    for identity in free:
        taker = next(r for r in order if room[r] > 0)
        room[taker] -= 1
        owner[identity] = taker
    return {replica: [i for i in all_ids if owner[i] == replica] for replica in order}


def _levelled(counts: Mapping[ReplicaId, int], num_free: int) -> dict[ReplicaId, int]:
    """`counts` after `num_free` more, each given to the replica with the fewest; ties by order."""
    levels = dict(counts)
    for _ in range(num_free):
        levels[min(levels, key=lambda r: (levels[r], r))] += 1
    return levels
