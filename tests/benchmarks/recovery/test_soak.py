"""What the soak reads from a run's journal."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.soak import run as soak
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from tests.events import filled

CONFIG = {"algorithm": {"microbatches_per_step": 2}}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(f"sqlite:///{tmp_path / 'journal.db'}")


def commit(journal: Journal, step: int, *microbatches: str) -> None:
    journal.append(filled(EventKind.STEP_COMMITTED, {"step": step, "microbatches": list(microbatches)}))


def fault_at(injected_at: float) -> dict[str, Any]:
    return {"fault": {"target": "rollout/1", "incarnation": 2, "injected_at": injected_at}}


def test_requests_that_left_the_killed_incarnation_are_timed_from_the_fault(journal: Journal, tmp_path: Path) -> None:
    commit(journal, 0, "0.0", "0.1")
    journal.append(filled(EventKind.REQUESTS_REASSIGNED, {"from_replica": "rollout/1", "from_incarnation": 1}))
    journal.append(filled(EventKind.REQUESTS_REASSIGNED, {"from_replica": "rollout/2", "from_incarnation": 2}))
    journal.append(filled(EventKind.REQUESTS_REASSIGNED, {"from_replica": "rollout/1", "from_incarnation": 2}))
    *_, moved = journal.events(kinds=[EventKind.REQUESTS_REASSIGNED])
    journal.close()
    incident, later, false_alarm = fault_at(moved.wall_at - 0.4), fault_at(moved.wall_at + 1.0), {"fault": None}
    soak.from_journal(tmp_path, [incident, later, false_alarm], CONFIG)
    assert incident["requests_moved_seconds"] == pytest.approx(0.4, abs=0.002)
    assert later["requests_moved_seconds"] is None, "what moved before the fault did not move because of it"
    assert "requests_moved_seconds" not in false_alarm


@pytest.mark.parametrize(
    ("second_step", "same"),
    [
        (("1.0", "1.1"), True),
        (("1.0",), False),
        (("1.0", "1.1", "1.1"), False),
        (("0.0", "1.1"), False),
    ],
    ids=["all", "one missing", "one twice", "one of another step"],
)
def test_the_microbatches_of_a_run_are_compared_with_a_failure_free_one(
    journal: Journal, tmp_path: Path, second_step: tuple[str, ...], same: bool
) -> None:
    commit(journal, 0, "0.0", "0.1")
    commit(journal, 1, *second_step)
    journal.close()
    assert soak.from_journal(tmp_path, [], CONFIG) == {"microbatches_failure_free": same}
