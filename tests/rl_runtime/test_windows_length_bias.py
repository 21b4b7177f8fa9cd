"""T-PPO: windows of long answers are not dropped more often than those of short ones, whoever is killed."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rolecall.core.ledger import GroupState, Ledger
from rolecall.rl_runtime.task import group_number
from rolecall.rl_runtime.testing import request_seed_of
from tests.rl_runtime.loop import World
from tests.rl_runtime.test_controller_windows import PREFIXES, tppo_job
from tests.rl_runtime.test_length_bias import KILLS, LONG_TAIL, Z_MAX, bucket, kill_again_and_again, trend

WINDOW = 16


@dataclass
class Counts:
    """By bucket of the whole answer's length."""

    windows: Counter[int] = field(default_factory=Counter)  # that came to an end
    dropped: Counter[int] = field(default_factory=Counter)
    kills: int = 0


def check(counts: Counts) -> None:
    assert trend(counts.dropped, counts.windows) < Z_MAX, (counts.dropped, counts.windows)
    assert sum(counts.dropped.values()) <= 0.02 * sum(counts.windows.values()), counts.dropped


def add(counts: Counts, w: World) -> None:
    """Windows that came to an end by the length of their whole answers."""
    counts.kills += KILLS
    whole = {}
    for request in w.fleet.tokens_made:
        group = request.rpartition(".")[0]
        length = len(LONG_TAIL.tokens(request_seed_of(w.job.seed, request)))
        whole[group_number(group)] = length
    for line in Ledger(w.journal.store).lines():
        if line["state"] in (GroupState.TRAINED, GroupState.DROPPED) and line["reason"] != "run_ended":
            length = whole.get(group_number(line["group_id"]), 0)
            counts.windows[bucket(length)] += 1
            counts.dropped[bucket(length)] += line["state"] == GroupState.DROPPED


def counted(path: Path, prefixes: str, runs: range) -> Counts:
    counts = Counts()
    for run in runs:
        folder = path / f"{prefixes}-{run}"
        folder.mkdir()
        rng = random.Random(f"bias/tppo/{prefixes}/{run}")
        job = tppo_job(prefixes, num_steps=4, seed=run, algorithm__window_tokens=WINDOW)
        w = World(
            job=job, path=folder, seed=run, answers=LONG_TAIL, script=lambda w, rng=rng: kill_again_and_again(w, rng)
        )
        w.run()
        w.check()
        add(counts, w)
        w.journal.close()
    return counts


@pytest.mark.parametrize("prefixes", PREFIXES)
def test_windows_of_long_answers_are_not_lost_more_often(tmp_path: Path, prefixes: str) -> None:
    check(counted(tmp_path, prefixes, range(1)))


@pytest.mark.long
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_nor_over_a_thousand_kills(tmp_path: Path, prefixes: str) -> None:
    counts = counted(tmp_path, prefixes, range(1000 // KILLS))
    assert counts.kills == 1000
    check(counts)
