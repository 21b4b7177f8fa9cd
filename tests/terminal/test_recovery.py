"""`status` and `incidents` in each state of a run and of its watch. Times are relative and absolute."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from rolecall.core.text import ago, past
from rolecall.recovery.durations import IncidentDurations
from rolecall.recovery.operators import queries
from rolecall.terminal import recovery
from rolecall.terminal.console import as_text
from rolecall.views.observed_ranks import ObservedRank
from tests.events import filled
from tests.recovery.world import World
from tests.terminal.texts import incidents_text, status_text

NOON = 1_700_049_600.0  # 2023-11-15 12:00:00 UTC


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s ago, 11:59:59 UTC"),
        (119.0, "119 s ago, 11:58:01 UTC"),
        (180.0, "3 min ago, 11:57:00 UTC"),
        (10_800.0, "3 h ago, 09:00:00 UTC"),
        (86_400.0, "24 h ago, 2023-11-14 12:00:00 UTC"),
        (259_200.0, "3 d ago, 2023-11-12 12:00:00 UTC"),
        (-60.0, "in 60 s, 12:01:00 UTC"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert ago(NOON - seconds, NOON) == text


def ended(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "ended": "all 9 steps are committed", "ended_at": NOON - 180.0}


@pytest.mark.parametrize(
    ("state", "running", "over"),
    [
        ("none", "no watch has led yet; start one: rolecall watch run my-run", "ended with the run"),
        (
            "stopped",
            "no watch is running: the last one was stopped; start one: rolecall watch run",
            "ended with the run",
        ),
        (
            "lost",
            "NO WATCH IS RUNNING: the lease of host:1:1 expired 3 min ago, 11:57:00 UTC; start",
            "ended with the run",
        ),
        ("leads", "led by watch host:1:1 (fencing number 1)", "led by watch host:1:1 (fencing number 1)"),
    ],
)
def test_a_watch_that_ended_with_its_run_is_not_missed(tmp_path: Path, state: str, running: str, over: str) -> None:
    world = World(tmp_path)
    world.step(world.watch())
    value = queries.status(RunDir(tmp_path), world.clock)
    value |= {"watch_state": state, "lost_watch": {"holder": "host:1:1", "expired_at": NOON - 180.0}}
    assert running in status_text(value, NOON)
    text = status_text(ended(value), NOON)
    assert over in text and "ended 3 min ago, 11:57:00 UTC: all 9 steps are committed" in text
    assert "NO WATCH" not in text


def test_orphans_with_a_mode_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(world.watch())
    value = queries.status(RunDir(tmp_path), world.clock)
    assert (value["mode"], value["orphans_mode"]) == ("act", "act")
    assert "recovery: mode act, led by" in status_text(value, NOON)
    assert "recovery: mode act, orphans in mode approve, led by" in status_text(
        {**value, "orphans_mode": "approve"}, NOON
    )


def test_a_run_with_hybrids_shows_its_mode_and_who_shares_a_node(tmp_path: Path) -> None:
    world, run = World(tmp_path), RunDir(tmp_path)
    assert "with " not in status_text(queries.status(run, world.clock), NOON)
    roles = {"trainer": 2, "rollout": 3}
    world.journal.append(filled(EventKind.RUN_STARTED, {"roles": roles, "mode": "semi_sync"}), key="run-started")
    value = queries.status(run, world.clock)
    assert value["run_mode"] == "semi_sync"
    text = status_text(value, world.clock.wall())
    assert "UTC, mode semi_sync; no open incident" in text.splitlines()[0]
    assert "with trainer/1" in text and "with rollout/1" in text and "/2" not in text.partition("with ")[0]


def test_the_state_of_the_watch(tmp_path: Path) -> None:
    world, run = World(tmp_path), RunDir(tmp_path)

    def state() -> str:
        return str(queries.status(run, world.clock)["watch_state"])

    assert state() == "none"
    watch = world.watch()
    world.step(watch)
    assert state() == "leads"
    lease = world.journal.lease("watch")
    assert lease is not None
    world.clock.advance(60)
    assert state() == "lost"
    world.journal.release(lease)
    assert state() == "stopped"


def test_open_incidents_come_first_with_their_age_and_a_hint_that_runs(tmp_path: Path) -> None:
    world, run = World(tmp_path, mode="approve"), RunDir(tmp_path)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: world.events(EventKind.PLAN_PROPOSED), watch)
    now = world.clock.wall() + 200.0
    lines = status_text(queries.status(run, world.clock), now).splitlines()
    assert lines[0].endswith("1 open incident") and lines[1].startswith("inc-1-rollout-1 proposed: rollout/1#1: hang")
    assert "opened 3 min ago, " in lines[2] and lines[2].endswith(" UTC")
    attempt = world.only().attempt
    assert attempt is not None
    assert f"rolecall approve {attempt.plan.digest} --run my-run" in "\n".join(lines)


def test_what_a_closed_incident_says_is_past() -> None:
    hang = "trainer/0 is hung: no progress in step 7 for 3.1 s; trainer/1 is waiting for it in all-reduce"
    assert past(hang) == (
        "trainer/0 was hung: no progress in step 7 for 3.1 s; trainer/1 was waiting for it in all-reduce"
    )
    assert past("trainer/0 crashed: process exited on signal 9") == "trainer/0 crashed: process exited on signal 9"
    incident = {
        "incident_id": "inc-1-trainer-0", "state": "closed", "open": False, "outcome": "self_recovered",
        "because": hang, "set_aside": None, "opened_at": 0.0, "closed_at": 9.0, "plan": None, "held_by": [],
        "hold": None, "review": None, "page": None,
    }  # fmt: skip
    text = incidents_text([incident], 10.0)
    assert text.startswith("inc-1-trainer-0 self recovered: trainer/0 was hung: ") and " is " not in text


def test_a_duration_too_short_to_be_shown_is_not_zero() -> None:
    took = IncidentDurations(
        fault_to_finding=None, onset_to_finding=0.004, finding_to_serving=None, finding_to_verified=None,
        opening_to_close=0.0, open_seconds=0.0,
    )  # fmt: skip
    assert took.words == "found less than 0.01 s after the onset, closed less than 0.01 s after the opening"


def test_ranks_of_a_watched_job_have_pids_and_an_observed_plan_is_not_one(tmp_path: Path) -> None:
    world, run = World(tmp_path, mode="observe"), RunDir(tmp_path)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: world.events(EventKind.PLAN_BLOCKED), watch)
    now = world.clock.wall()
    ranks = [asdict(ObservedRank("trainer/0", n, "vm", 40 + n, n == 0, "step", 7, now, now - 3.0)) for n in range(2)]
    text = status_text({**queries.status(run, world.clock), "ranks": ranks}, now)
    lines = text.splitlines()
    assert "  trainer/0 rank 0  pid 40  vm  phase step  step 7  last progress 3 s ago" in text
    assert "  trainer/0 rank 1  pid 41  vm  exited" in text
    assert lines[1].startswith("inc-1-rollout-1 open: rollout/1#1: hang") and "in mode act rolecall would" in text
    assert "(plan " not in text and "evictions" not in text
    assert text.count(world.only().diagnosis.because) == 1, "the reason of the page does not repeat it"
    narrow = as_text(recovery.status({**queries.status(run, world.clock), "ranks": ranks}, now, "my-run"), width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "  trainer/0 rank 0  pid 40  vm  phase step  step 7\n      last progress 3 s ago, " in narrow
    assert "  trainer/0 rank 1  pid 41  vm  exited      step 7\n      last progress" in narrow
    silent = status_text({**queries.status(run, world.clock), "ranks": [{**ranks[0], "phase": ""}]}, now)
    assert "  vm  running  " in silent
    later = status_text({**queries.status(run, world.clock), "ranks": ranks}, now + 300.0)
    assert "trainer/0 rank 0  pid 40  vm  last seen 5 min ago" in later, "its watch may have ended"
    many = status_text({**queries.status(run, world.clock), "ranks": ranks * 100}, now)
    assert "200 ranks, 100 alive; --json lists them" in many and "pid" not in many


def test_steps_the_dataset_and_the_evaluation_have_a_line_each(tmp_path: Path) -> None:
    world, run = World(tmp_path), RunDir(tmp_path)
    text = status_text(queries.status(run, world.clock))
    assert "steps committed" not in text and "dataset" not in text and "held-out" not in text
    world.journal.append(filled(EventKind.RUN_STARTED, {"num_steps": 40}))
    world.journal.append(filled(EventKind.STEP_COMMITTED, {"step": 2, "reward": 0.25}))
    assert "steps committed: 3 of 40; reward 0.250\n" in status_text(queries.status(run, world.clock))
    dataset = {"rows": 32, "rows_seen": 40, "dropped": {"prompt too long": 2}}
    world.journal.append(filled(EventKind.STEP_COMMITTED, {"step": 9, "reward": None, "dataset": dataset}))
    world.journal.append(filled(EventKind.EVALUATION_FINISHED, {"step": 8, "reward": 0.5, "prompts": 16}))
    lines = status_text(queries.status(run, world.clock)).splitlines()
    at = lines.index("steps committed: 10 of 40")
    assert lines[at + 1] == "dataset: epoch 2, 25% of its 32 rows; groups dropped: 2 prompt too long"
    assert lines[at + 2] == "held-out reward at step 8: 0.500 (16 prompts)"


def test_a_large_fleet_is_a_line_for_each_role_and_those_that_do_not_serve(tmp_path: Path) -> None:
    world = World(tmp_path)
    value = queries.status(RunDir(tmp_path), world.clock)
    one = value["replicas"][0]
    many = [{**one, "replica": f"rollout/{n}"} for n in range(1000)]
    lost = {**one, "replica": "trainer/7", "state": "lost"}
    text = status_text({**value, "replicas": [*many, lost]})
    assert "rollout  1,000 of 1,000 serving" in text and "trainer  0 of 1 serving" in text
    assert "trainer/7#1  lost" in text and "rollout/999" not in text


def test_events_say_why(tmp_path: Path) -> None:
    world, run = World(tmp_path), RunDir(tmp_path)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    (one,) = queries.incidents(run, "inc-1-rollout-1")
    lines = incidents_text([one], world.clock.wall()).splitlines()
    (opened,) = [line for line in lines if "incident opened" in line]
    assert "UTC  incident opened: …" in opened, "the diagnosis is in the first line"
    assert sum(one["because"] in line for line in lines) == 1
    (made,) = [line for line in lines if "plan created" in line]
    assert "plan created: replace replica of rollout/1#1: …" in made
    assert incidents_text([]) == "no incidents\n"
