"""Where the time of a recovery goes, from the moments in the journal."""

from dataclasses import replace

import pytest

from rolecall.core.journal.events import Event, EventKind
from rolecall.views.ettr import UNDETECTED, Charge, Loss, charges, losses, lost_seconds
from rolecall.views.incidents import AwayTime
from rolecall.views.lifetimes import IncarnationRecord, Key
from rolecall.views.phases import (
    AFTERWARDS,
    NOT_KNOWN,
    PHASES,
    Commits,
    RecoveryPhases,
    lost_by_incident,
    lost_by_phase,
    lost_in_run,
    phase_times,
    phases_of_run,
    recovery_phases,
)
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


def test_a_recovery_counts_from_the_injection_where_it_is_known() -> None:
    tale, known = _story()
    of_onset, _ = phases_of_run(tale.reported(known=known).summaries, tale.events)
    of_fault, _ = phases_of_run(tale.reported(_fault("trainer/0", 18.0), known=known).summaries, tale.events)
    assert (of_onset.incident_id, of_onset.seconds["detect"], of_onset.whole) == ("inc-1", 1.0, 50.0)
    assert (of_fault.seconds["detect"], of_fault.whole) == (3.0, 52.0)
    assert {k: v for k, v in of_fault.seconds.items() if k != "detect"} == dict(
        zip(PHASES[1:], (1.0, 18.0, 20.0, 10.0), strict=True)
    )


def test_before_an_action_only_the_detection_is_known() -> None:
    tale, known = _story()
    started, waiting = phases_of_run(tale.reported(known=known).summaries, tale.events)
    assert started.has_action and not waiting.has_action
    assert waiting.incident_id == "inc-2" and list(waiting.seconds.values()) == [1.0, None, None, None, None]


def test_the_report_rounds_to_milliseconds() -> None:
    found = _phases(_record(ready_at=40.00049), said=((10.0, 0),))
    assert found.seconds["restart"] == pytest.approx(18.00049) and found.to_dict()["restart"] == 18.0


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


# --- lost replica-seconds -----------------------------------------------------------------------------------------

SIZES = {"num_rollouts": 3, "num_trainers": 2}


def _lasted(began_at: float, *seconds: float | None, incident: str = "") -> RecoveryPhases:
    by_phase = dict(zip(PHASES, seconds, strict=True))
    return RecoveryPhases(began_at=began_at, seconds=by_phase, whole=None, incident_id=incident)


def _charged(*lost: Loss) -> list[Charge]:
    return list(charges(lost, 0.0, 100.0, **SIZES))


def test_replica_seconds_are_lost_in_the_phase_in_which_a_replica_stands_still() -> None:
    rollout = Loss(replica="rollout/1", since=10.0, until=18.0)
    trainer = Loss(replica="trainer/0", since=40.0, until=70.0, stalled_until=65.0)
    both = _charged(rollout, trainer)
    of_rollout = lost_by_phase(both, _lasted(10.0, 1.0, 2.0, 4.0, 1.0, 20.0))
    assert of_rollout == {"detect": 1.0, "decide": 2.0, "restart": 4.0, "reconnect": 1.0, "recompute": 0.0}
    # Both trainers until the interrupted step is committed at 65, then the lost one alone.
    of_trainer = lost_by_phase(both, _lasted(40.0, 1.0, 2.0, 20.0, 7.0, 20.0))
    assert of_trainer == {"detect": 2.0, "decide": 4.0, "restart": 40.0, "reconnect": 4.0 + 5.0, "recompute": 0.0}


def test_a_phase_that_is_not_known_ends_the_split_and_is_no_zero() -> None:
    trainer = Loss(replica="trainer/0", since=40.0, until=70.0, stalled_until=65.0, incident_id="i")
    phases = _lasted(40.0, 1.0, 2.0, None, 7.0, 20.0, incident="i")
    assert lost_by_phase(_charged(trainer), phases) == {"detect": 2.0, "decide": 4.0}
    found = lost_by_incident(_charged(trainer), [phases])
    assert found == {"i": {"detect": 2.0, "decide": 4.0, NOT_KNOWN: 44.0 + 5.0}}
    assert lost_in_run(found) == {**dict.fromkeys(PHASES), "detect": 2.0, "decide": 4.0, NOT_KNOWN: 49.0}


def test_the_split_of_a_run_adds_up_to_all_that_was_lost() -> None:
    """A trainer that borrowed a node, a rollout lost meanwhile, one without an action, and one that nobody noticed."""
    # Work that is done again is no loss: of the trainer's recovery, only the lender is away while its step is repeated.
    tale = Tale().opened(11.0, "trainer", "trainer/0").acted(12.0, "trainer", "trainer/0")
    tale.opened(16.0, "rollout", "rollout/1").acted(16.5, "rollout", "rollout/1")
    tale.say(25.0, K.STEP_COMMITTED, step=0).resolved(26.0, "trainer").resolved(27.0, "rollout")
    tale.opened(71.0, "waits", "rollout/0")
    known = {
        ("trainer/0", 2): IncarnationRecord(replica="trainer/0", incarnation=2, ready_at=20.0, serving_at=22.0),
        ("rollout/1", 2): IncarnationRecord(replica="rollout/1", incarnation=2, ready_at=21.0, serving_at=23.0),
    }
    joined = tale.reported(_fault("rollout/0", 90.0), known=known)
    joined = replace(
        joined, away=(AwayTime(replica="rollout/2", incarnation=1, since=12.5, until=30.0, incident_id="trainer"),)
    )
    assert [f.target for f in joined.missed] == ["rollout/0"]
    lost = losses(joined, 100.0)
    found = lost_by_incident(charges(lost, 0.0, 100.0, **SIZES), phases_of_run(joined.summaries, tale.events))
    assert list(found) == ["trainer", "rollout", "waits"], "the fault that nobody noticed hit a replica lost already"
    assert found["trainer"] == {
        "detect": 2.0, "decide": 2.0, "restart": 2 * 8.0 + 7.5, "reconnect": 2 * 2.0 + 2.0,
        "recompute": 3.0, AFTERWARDS: 5.0,
    }  # fmt: skip
    assert found["rollout"] == {"detect": 1.0, "decide": 0.5, "restart": 4.5, "reconnect": 2.0, "recompute": 0.0}
    assert found["waits"] == {"detect": 1.0, NOT_KNOWN: 29.0}
    total = 5 * sum(lost_seconds(lost, 0.0, 100.0, **SIZES).values())
    assert sum(filter(None, lost_in_run(found).values())) == pytest.approx(total)


def test_an_undetected_fault_has_a_row_of_its_own_and_the_phases_stay_unknown() -> None:
    found = lost_by_incident(_charged(Loss(replica="rollout/1", since=10.0, until=18.0)), [])
    assert found == {"": {UNDETECTED: 8.0}}
    assert lost_in_run(found) == {**dict.fromkeys(PHASES), UNDETECTED: 8.0}
    assert lost_in_run({}) == {}, "nothing was lost"
