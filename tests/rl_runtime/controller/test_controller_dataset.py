"""A dataset of a few rows, several epochs, and controllers that are killed: each row once in an epoch, and no more."""

import random
from collections import Counter
from pathlib import Path

import pytest

from rolecall.core.journal.ledger import Ledger
from rolecall.rl_runtime.tasks.dataset import row_of
from rolecall.rl_runtime.tasks.task import Prompt, group_id
from tests.rl_runtime.loop import Prompts, World, small_job

NUM_ROWS, TOO_LONG = 17, 3


class Rows(Prompts):
    """Of which one is too long."""

    num_rows = NUM_ROWS

    def prompt(self, number: int) -> Prompt:
        row, _ = row_of(number, NUM_ROWS, seed=5, shuffle=True)
        unusable = "prompt too long: 9 tokens, at most 8" if row == TOO_LONG else ""
        return Prompt(group_id=group_id(number), tokens=(1, number), unusable=unusable)

    def origin(self, number: int) -> str:
        row, epoch = row_of(number, NUM_ROWS, seed=5, shuffle=True)
        return f"row {row} epoch {epoch} of 0123456789ab"


@pytest.mark.parametrize("seed", range(12))
def test_each_row_comes_once_in_an_epoch_whatever_dies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    deaths = [rng.randrange(1, 400) for _ in range(3)]
    world = World(small_job(), tmp_path, seed, deaths=deaths, source=Rows).run()
    world.check()
    lines = list(Ledger(world.journal.store).lines())
    issued = Counter(line["reason"].partition(" row ")[2] for line in lines if line["state"] == "issued")
    assert set(issued.values()) == {1}
    assert len({origin.split()[2] for origin in issued}) >= 5, "several epochs"
    by_epoch = Counter(int(origin.split()[2]) for origin in issued)
    assert all(by_epoch[epoch] == NUM_ROWS for epoch in range(max(by_epoch)))
    too_long = {line["group_id"] for line in lines if f" row {TOO_LONG} epoch" in line["reason"]}
    dropped = {line["group_id"]: line["reason"] for line in lines if line["state"] == "dropped"}
    assert {dropped[g] for g in too_long} <= {"prompt too long: 9 tokens, at most 8", "run_ended"}
    assert not any(line["state"] == "trained" and line["group_id"] in too_long for line in lines)
