"""Where the time of a recovery goes, from the moments in the journal."""

from dataclasses import replace

import pytest

from rolecall.core.journal.events import Event, EventKind
from rolecall.views.lifetimes import IncarnationRecord, Key
from rolecall.views.phases import PHASES, Commits, RecoveryPhases, phase_times, phases_of_run, recovery_phases
from tests.events import made_event
from tests.views.test_incidents import Tale, _fault

K = EventKind


def _commits(*said: tuple[float, int]) -> list[Event]:
    return [made_event(seq=n, kind=K.STEP_COMMITTED, wall_at=at, body={"step": s}) for n, (at, s) in enumerate(said, 1)]


def _record(replica: str = "trainer/0", *, ready_at: float | None = 40.0, serving_at: float | None = 60.0):  # type: ignore[no-untyped-def]
    return IncarnationRecord(replica=replica, incarnation=2, starting_at=30.0, ready_at=ready_at, serving_at=serving_at)


def _phases(*made: IncarnationRecord, said: tuple[tuple[float, int], ...], began_at: float = 20.0) -> RecoveryPhases:
    moments = {"began_at": began_at, "detected_at": 21.0, "started_at": 22.0}
    return recovery_phases(**moments, made=made, commits=Commits(_commits(*said)))  # type: ignore[arg-type]


def test_each_phase_ends_where_the_next_begins_and_together_they_are_the_whole() -> None:
    found = _phases(_record(), said=((10.0, 0), (70.0, 1), (100.0, 2)))
    assert found.seconds == dict(zip(PHASES, (1.0, 1.0, 18.0, 20.0, 10.0), strict=True))
    assert found.whole == 50.0 == sum(filter(None, found.seconds.values()))


def test_of_several_replacements_the_last_one_counts() -> None:
    found = _phases(_record(), _record("trainer/1", ready_at=35.0, serving_at=66.0), said=((10.0, 0), (70.0, 1)))
    assert (found.seconds["restart"], found.seconds["reconnect"], found.seconds["recompute"]) == (18.0, 26.0, 4.0)


@pytest.mark.parametrize(
    ("other", "known"),
    [
        ({"ready_at": 35.0, "serving_at": None}, (18.0, None, None)),
        ({"ready_at": None, "serving_at": None}, (None, None, None)),
    ],
    ids=["never serves", "never ready"],
)
def test_a_replacement_that_does_not_get_there_leaves_the_phase_without_a_time(
    other: dict[str, float | None], known: tuple[float | None, ...]
) -> None:
    found = _phases(_record(), _record("trainer/1", **other), said=((10.0, 0), (70.0, 1)))
    assert tuple(found.seconds[p] for p in PHASES[2:]) == known and found.whole == 50.0


def test_survivors_that_commit_the_step_earlier_leave_nothing_to_compute_again() -> None:
    found = _phases(_record(), said=((10.0, 0), (25.0, 1), (90.0, 2)))
    assert found.seconds["recompute"] == 0.0 and found.whole == 5.0


@pytest.mark.parametrize("said", [((10.0, 0),), ()], ids=["not committed yet", "no step yet"])
def test_what_has_not_happened_has_no_time(said: tuple[tuple[float, int], ...]) -> None:
    found = _phases(_record(serving_at=None), said=said)
    assert [found.seconds[p] for p in PHASES] == [1.0, 1.0, 18.0, None, None] and found.whole is None


def test_a_step_that_is_undone_counts_when_it_is_committed_again() -> None:
    """A restart from a checkpoint undoes step 2, which had been committed before the fault."""
    said = ((10.0, 0), (15.0, 1), (18.0, 2), (50.0, 1), (70.0, 2), (80.0, 3))
    assert _phases(_record(), said=said).whole == 60.0, "step 3 was interrupted"
    assert Commits(_commits(*said)).of_interrupted(5.0) == 10.0
    assert Commits(_commits(*said)).of_interrupted(55.0) == 70.0, "step 2 was interrupted, after the rollback"


def _story() -> tuple[Tale, dict[Key, IncarnationRecord]]:
    tale = (
        Tale().say(10.0, K.STEP_COMMITTED, step=0).opened(21.0, "inc-1", "trainer/0").acted(22.0, "inc-1", "trainer/0")
    )
    tale.say(70.0, K.STEP_COMMITTED, step=1).resolved(71.0, "inc-1").opened(80.0, "inc-2", "rollout/1")
    return tale, {("trainer/0", 2): _record()}


def test_every_recovery_that_has_started_counts_from_the_injection_where_it_is_known() -> None:
    tale, known = _story()
    (of_onset,) = phases_of_run(tale.reported(known=known).summaries, tale.events)
    (of_fault,) = phases_of_run(tale.reported(_fault("trainer/0", 18.0), known=known).summaries, tale.events)
    assert (of_onset.incident_id, of_onset.seconds["detect"], of_onset.whole) == ("inc-1", 1.0, 50.0)
    assert (of_fault.seconds["detect"], of_fault.whole) == (3.0, 52.0)
    assert {k: v for k, v in of_fault.seconds.items() if k != "detect"} == dict(
        zip(PHASES[1:], (1.0, 18.0, 20.0, 10.0), strict=True)
    )


def test_times_by_phase_leave_out_what_is_not_known() -> None:
    first = _phases(_record(), said=((10.0, 0), (70.0, 1))).seconds
    times = phase_times([first, {**first, "restart": 2.0, "recompute": None}])
    assert [(t.phase, t.num) for t in times] == [*((p, 2) for p in PHASES[:4]), ("recompute", 1)]
    restart = times[2]
    assert (restart.median_seconds, restart.worst_seconds, restart.total_seconds) == (10.0, 18.0, 20.0)
    assert restart.share == pytest.approx(20.0 / 74.0) and sum(t.share for t in times) == pytest.approx(1.0)
    assert phase_times([]) == ()


def test_only_what_computes_counts_in_a_restart_of_the_job() -> None:
    tale, known = _story()
    (summary,) = tale.reported(known=known).summaries[:1]
    reward = replace(_record("reward/0"), ready_at=200.0, serving_at=300.0)
    mixed = replace(summary, replacements=(*summary.replacements, reward))
    alone = replace(summary, replacements=(reward,))
    assert phases_of_run([mixed], tale.events)[0].seconds["restart"] == 18.0
    assert phases_of_run([alone], tale.events)[0].seconds["restart"] == 178.0
