"""The schedule of faults, and what the benchmark reads from a run's journal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recovery.ettr import measures
from benchmarks.recovery.ettr.report import report
from benchmarks.recovery.ettr.schedule import ROLES, schedule
from rolecall.core.journal.events import Event, EventKind
from rolecall.views.ettr import ettr
from rolecall.views.incidents import InjectedFault
from rolecall.views.lifetimes import IncarnationRecord
from rolecall.views.phases import PHASES
from tests.events import made_event
from tests.views.test_incidents import Tale

K = EventKind
MEMBERS = [[f"trainer/{n}", 1] for n in range(2)] + [[f"rollout/{n}", 1] for n in range(3)]


@given(
    seed=st.integers(0, 99),
    steps=st.integers(10, 200),
    percent=st.sampled_from([2.0, 5.0, 10.0, 20.0]),
    roles=st.sampled_from(sorted(ROLES)),
)
def test_one_fault_falls_into_each_part_of_the_steps(seed: int, steps: int, percent: float, roles: str) -> None:
    kills = schedule(seed, steps, percent, roles)
    width = max(2, round(100 / percent))
    assert [k.step // width for k in kills] == list(range(steps // width))
    assert {k.role for k in kills} <= set(ROLES[roles]) and all(0 <= k.share < 1 for k in kills)
    assert kills == schedule(seed, steps, percent, roles), "every arm has the same faults"
    assert all(k.step < steps - 1 for k in kills)


def commits(*at: tuple[float, int]) -> list[Event]:
    began = made_event(kind=K.EPOCH_ADVANCED, body={"members": MEMBERS}, wall_at=0.0)
    made = [
        made_event(kind=K.STEP_COMMITTED, body={"step": step, "tokens": 100, "reward": t / 100}, wall_at=t, seq=n)
        for n, (t, step) in enumerate(at, start=2)
    ]
    return [began, *made]


def test_steps_that_are_trained_again_are_counted_and_delay_the_last_one() -> None:
    found = measures.measured(commits((10.0, 0), (20.0, 1), (50.0, 1), (60.0, 2)), {}, [], [])
    assert (found["num_steps"], found["seconds_to_n"]) == (3, 60.0)
    assert (found["steps_trained_again"], found["tokens_trained"], found["tokens_trained_again"]) == (1, 300, 100)
    assert found["ettr"] == 1.0
    assert found["rewards"] == [[10.0, 0.1], [50.0, 0.5], [60.0, 0.6]], "of a step that was undone the last"


def test_a_recovery_has_its_times_and_what_was_lost_in_each_phase() -> None:
    tale = Tale()
    tale.events = commits((15.0, 0))
    tale.opened(21.0, "i", "trainer/0").acted(23.0, "i", "trainer/0").say(40.0, K.STEP_COMMITTED, step=1)
    tale.resolved(41.0, "i").say(50.0, K.STEP_COMMITTED, step=2)
    made = IncarnationRecord(replica="trainer/0", incarnation=2, ready_at=33.0, serving_at=35.0)
    fault = InjectedFault(kind="trainer-kill", target="trainer/0", injected_at=20.0)
    (recovery,) = measures.measured(tale.events, {("trainer/0", 2): made}, [fault], [])["recoveries"]
    assert recovery["incident_id"] == "i" and recovery["whole"] == 20.0
    assert [recovery[phase] for phase in PHASES] == [1.0, 2.0, 10.0, 2.0, 5.0]
    assert recovery["lost"] == {"detect": 2.0, "decide": 4.0, "restart": 20.0, "reconnect": 4.0, "recompute": 0.0}


def test_in_a_cold_restart_every_replica_is_lost_until_it_serves() -> None:
    fault = InjectedFault(kind="trainer-kill", target="trainer/0", injected_at=20.0)
    known = {
        (str(replica), 2): IncarnationRecord(
            replica=str(replica), incarnation=2, starting_at=30.0, ready_at=40.0, serving_at=60.0
        )
        for replica, _ in MEMBERS
    }
    lost = measures.cold_losses(known, [fault], [22.0], 100.0)
    sizes = {"num_rollouts": 3, "num_trainers": 2}
    # 2 s without the two trainers, then 38 s without any replica.
    assert ettr(0.0, 100.0, lost, **sizes) == pytest.approx(1 - (2 * 2 / 5 + 38) / 100)


def test_a_run_without_a_step_has_no_numbers() -> None:
    assert measures.measured([], {}, [], []) == {}


def test_the_report_compares_with_the_same_seed_without_faults() -> None:
    shared = {"commit": "c", "seed": 1, "ok": True, "num_skipped": 0, "audit_ok": True, "num_missed": 0}
    settings = {"steps": 5, "microbatches": 8, "checkpoint_every": 1, "standbys": 1}
    shared |= {
        "settings": settings,
        "num_steps": 5,
        "false_alarms_about": [],
        "false_alarms": 0,
        "tokens_trained_again": 0,
        "steps_trained_again": 0,
    }
    free = shared | {"arm": "none", "percent": 0.0, "roles": "", "ettr": 1.0, "ettr_with_rollouts": 1.0}
    free |= {"seconds_to_n": 50.0, "tokens_generated": 900, "step_seconds": 10.0, "recoveries": [], "num_faults": 0}
    recovery = dict.fromkeys(PHASES, 1.0) | {"role": "trainer", "replica": 0, "step": 2.5, "whole": 20.0}
    recovery |= {"away": 2.0, "lost": dict.fromkeys(PHASES, 4.0)}
    warm = free | {"arm": "warm", "percent": 10.0, "roles": "both", "seconds_to_n": 75.0, "tokens_generated": 1000}
    warm |= {"recoveries": [recovery], "num_faults": 1, "ettr": 0.6, "step_seconds": 12.0}
    warm["rewards"] = [[10.0, 0.1], [20.0, 0.3], [60.0, 0.5], [75.0, 0.7]]
    text = "\n".join(report([free, warm], "c"))
    (row,) = [line for line in text.splitlines() if line.startswith("| 10.0 | 10 % | both | warm")]
    assert "| 75.0 | 50.0 | 100 |" in row
    assert "| 20.0 | 2.00 |" in text, "recovery to step time"
    assert "| 10.0 | warm | trainer | 1 | 4.0 | 4.0 | 4.0 | 4.0 | 4.0 | 20.0 |" in text, "replica-seconds"
    rewards = "0.100; 1 | 0.200; 2 | 0.200; 2 | 0.200; 2 | 0.400; 4"
    assert f"| 10.0 | 10 % | warm | 1 | {rewards} |" in text
    # Detect, decide and 2 s away, then 6 s until the trainers have work, and half a step that is trained again.
    assert "| 10.0 | 10 % | 1 | warm | 0.600 |" in text and "| 75.0 | 65.0 |" in text


def test_a_moment_is_told_in_steps_also_after_a_return_to_an_older_one() -> None:
    commits = [(110.0, 0), (120.0, 1), (135.0, 1)]
    assert measures.position(100.0, commits, 10.0, 105.0) == 0.5
    assert measures.position(100.0, commits, 10.0, 122.0) == 2.2
    assert measures.position(100.0, commits, 10.0, 160.0) == 2.99, "a step that takes longer"
