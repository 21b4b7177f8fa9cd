"""Plans that stand, from incidents; and what a preview of draining says."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.dashboards.pages.operations.commands import OperatorCommand, OperatorCommandKind, command_line
from rolecall.dashboards.pages.operations.plans import (
    GLYPHS,
    PlanRow,
    PlanStatus,
    history,
    limits_of,
    performed,
    plan_rows,
    preview,
)
from rolecall.recovery.fleet_view import FleetView, RunPlaces, fleet_view
from rolecall.recovery.incidents import Incident, IncidentState, fold
from tests.dashboards.acting_world import HOMES, diagnosis, plan
from tests.events import made_event

K = EventKind
NOW = 1000.0


def _incidents(*reported: tuple[EventKind, dict[str, object]]) -> tuple[Incident, ...]:
    events = [
        made_event(seq=n, kind=kind, wall_at=900.0 + n, body=dict(body), incident_id="i-1")
        for n, (kind, body) in enumerate(reported, 1)
    ]
    return tuple(fold(events).values())


OPENED = (K.INCIDENT_OPENED, {"diagnosis": diagnosis("rollout/1", "it ended").to_dict()})
PLAN = plan("i-1", "rollout/1", "a new process resolves it")
MADE = (K.PLAN_CREATED, {"plan": PLAN.to_dict()})
PROPOSED = (K.PLAN_PROPOSED, {"plan": PLAN.to_dict(), "expires_at": NOW + 60})
APPROVED = (K.PLAN_APPROVED, {"digest": PLAN.digest, "by": "anna"})
REJECTED = (K.PLAN_REJECTED, {"digest": PLAN.digest, "by": "anna", "because": "no"})
LAPSED = (K.PLAN_EXPIRED, {"digest": PLAN.digest, "because": "no one decided"})
GUARDED = (K.PLAN_BLOCKED, {"digest": PLAN.digest, "guard": "at_once", "because": "another first"})
HOLD = (K.HOLD_PLACED, {"digest": PLAN.digest, "by": "bert", "because": "wait", "until": NOW + 30})
LIFTED = (K.HOLD_LIFTED, {"digest": PLAN.digest, "by": "bert", "because": ""})
STARTED = (K.ACTION_STARTED, {"plan": PLAN.to_dict(), "digest": PLAN.digest})


@pytest.mark.parametrize(
    ("reported", "mode", "now", "standing"),
    [
        ((OPENED, MADE, PROPOSED), "approve", NOW, PlanStatus.AWAITS_APPROVAL),
        ((OPENED, MADE, PROPOSED), "approve", NOW + 61, PlanStatus.EXPIRED),
        ((OPENED, MADE, PROPOSED, LAPSED), "approve", NOW, PlanStatus.EXPIRED),
        ((OPENED, MADE, PROPOSED, APPROVED), "approve", NOW, PlanStatus.APPROVED),
        ((OPENED, MADE, PROPOSED, REJECTED), "approve", NOW, PlanStatus.REJECTED),
        ((OPENED, MADE, PROPOSED, HOLD), "approve", NOW, PlanStatus.HELD),
        ((OPENED, MADE, PROPOSED, HOLD, LIFTED), "approve", NOW, PlanStatus.AWAITS_APPROVAL),
        ((OPENED, MADE, HOLD), "act", NOW, PlanStatus.HELD),
        ((OPENED, MADE, HOLD), "act", NOW + 31, PlanStatus.DUE),
        ((OPENED, MADE), "act", NOW, PlanStatus.DUE),
        ((OPENED, MADE, GUARDED), "act", NOW, PlanStatus.BLOCKED),
        ((OPENED, MADE), "observe", NOW, PlanStatus.NOT_EXECUTED),
    ],
)
def test_what_a_plan_waits_for(
    reported: tuple[tuple[EventKind, dict[str, object]], ...], mode: str, now: float, standing: PlanStatus
) -> None:
    (row,) = plan_rows(_incidents(*reported), lambda _: mode, now)
    assert row.status is standing


@pytest.mark.parametrize("reported", [(OPENED,), (OPENED, MADE, STARTED)])
def test_what_has_no_plan_or_has_begun_is_no_row(reported: tuple[tuple[EventKind, dict[str, object]], ...]) -> None:
    assert plan_rows(_incidents(*reported), lambda _: "act", NOW) == ()


def test_a_plan_to_do_nothing_is_no_row() -> None:
    nothing = replace(PLAN, action=ActionKind.TOLERATE, targets=())
    found = _incidents(OPENED, (K.PLAN_CREATED, {"plan": nothing.to_dict()}))
    assert plan_rows(found, lambda _: "act", NOW) == ()


def test_only_what_waits_can_be_approved_and_the_time_left_counts_down() -> None:
    (row,) = plan_rows(_incidents(OPENED, MADE, PROPOSED), lambda _: "approve", NOW)
    assert row.can_be_approved
    assert (row.seconds_left(NOW), row.seconds_left(NOW + 100)) == (60.0, 0.0)
    (held,) = plan_rows(_incidents(OPENED, MADE, PROPOSED, HOLD), lambda _: "approve", NOW)
    assert not held.can_be_approved
    assert held.can_be_stopped
    assert held.hold is not None
    assert held.hold.by == "bert"


def test_those_that_wait_for_an_operator_come_first_and_of_these_what_lapses_soonest() -> None:
    def of(name: str, *reported: tuple[EventKind, dict[str, object]]) -> Incident:
        (found,) = _incidents(*reported)
        return replace(found, incident_id=name)

    later = (K.PLAN_PROPOSED, {"plan": PLAN.to_dict(), "expires_at": NOW + 500})
    rows = plan_rows(
        [of("due", OPENED, MADE), of("later", OPENED, MADE, later), of("soon", OPENED, MADE, PROPOSED)],
        lambda _: "approve",
        NOW,
    )
    assert [r.incident.incident_id for r in rows] == ["soon", "later", "due"]


def test_every_standing_has_a_glyph_of_its_own() -> None:
    assert len({GLYPHS[s] for s in PlanStatus}) == len(PlanStatus)
    assert PlanRow.__dataclass_params__.frozen  # type: ignore[attr-defined]


FREE = RunPlaces(nodes=("node-9",))


def _fleet(homes: dict[str, str] | None = None) -> FleetView:
    homes = HOMES if homes is None else homes
    desired = {ReplicaId(r): Desired(replica=ReplicaId(r), incarnation=1, node=NodeId(n)) for r, n in homes.items()}
    current = {
        ReplicaId(r): Actual(replica=ReplicaId(r), incarnation=1, node=NodeId(n), state=ReplicaState.SERVING)
        for r, n in homes.items()
    }
    return fleet_view(desired, current)


@pytest.mark.parametrize(
    ("mode", "paused", "guard"), [("act", None, ""), ("act", "anna: wait", "paused"), ("observe", None, "mode")]
)
def test_a_preview_says_what_moves_and_which_guard_would_hold_it(mode: str, paused: str | None, guard: str) -> None:
    (moving,) = preview(
        "node-2",
        fleet=replace(_fleet(), places=FREE),
        incidents=(),
        avoided=frozenset(),
        limits=limits_of(None, mode),
        paused=paused,
        stopping=None,
        now=NOW,
    )
    assert moving.replica == "rollout/1#1"
    assert moving.action == "replace node"
    assert moving.guard == guard


@pytest.mark.parametrize(("now", "guard"), [(NOW, "evictions"), (NOW + 2 * 3600, "")])
def test_a_preview_counts_evictions_of_closed_incidents_within_the_hour(now: float, guard: str) -> None:
    (closed,) = _incidents(OPENED, MADE, STARTED)
    others = [replace(closed, incident_id=f"i-{n}", state=IncidentState.CLOSED, closed_at=950.0) for n in range(6)]
    limits = limits_of(None, "act")
    limits = replace(limits, config=limits.config.model_copy(update={"retries_per_replica_max": 100}))
    (moving,) = preview(
        "node-2",
        fleet=replace(_fleet(), places=FREE),
        incidents=others,
        avoided=frozenset(),
        limits=limits,
        paused=None,
        stopping=None,
        now=now,
    )
    assert moving.guard == guard


def test_a_preview_with_no_other_node_left_says_so() -> None:
    (moving,) = preview(
        "node-2",
        fleet=_fleet(),
        incidents=(),
        avoided=frozenset({"node-1", "node-3", "node-4", "node-5"}),
        limits=limits_of(None, "act"),
        paused=None,
        stopping=None,
        now=NOW,
    )
    assert "no other node" in moving.because


@pytest.mark.parametrize("body", [None, {}, {"question": 5}, {"question": {"config": {"never": 1}, "supports": []}}])
def test_limits_of_a_plan_without_any_are_the_defaults(body: dict[str, object] | None) -> None:
    assert not limits_of(body, "act").known


def test_a_name_from_elsewhere_cannot_leave_its_place_in_a_command() -> None:
    line = command_line(OperatorCommand(what=OperatorCommandKind.DRAIN, on="x; rm -rf ~"), "run $(id)")
    assert line == "rolecall node drain 'x; rm -rf ~' --reason \"REASON\" --run 'run $(id)'"


def test_a_replica_that_an_operator_had_replaced_is_in_the_history() -> None:
    asked = diagnosis("rollout/1", "anna requested replacement of rollout/1#1: it stutters", detectors=("operator",))
    found = _incidents((K.INCIDENT_OPENED, {"diagnosis": asked.to_dict()}))
    words = [made_event(seq=9, kind=K.RECOVERY_PAUSED, wall_at=1.0, body={"by": "bert", "because": "x"})]
    first, second = history(words, found)
    assert (first.by, first.what, first.on) == ("anna", "requested a replacement", "rollout/1#1, i-1")
    assert (second.by, second.what, second.on) == ("bert", "paused recovery", "the run")


@pytest.mark.parametrize("what", OperatorCommandKind)
def test_every_command_that_is_shown_is_one_of_the_command_line(
    what: OperatorCommandKind, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on = "" if what in (OperatorCommandKind.PAUSE, OperatorCommandKind.RESUME) else "rollout/0"
    argv = shlex.split(command_line(OperatorCommand(what=what, on=on), "nowhere"))[1:]
    assert main([*argv, "--runs", str(tmp_path)]) == 2
    # The run is missed, and nothing before that: no unknown command, no unknown or missing option.
    assert "nowhere: no run of this name" in capsys.readouterr().err


def test_actions_that_were_begun_with_who_approved_them_and_their_result() -> None:
    done = (K.ACTION_DONE, {"digest": PLAN.digest})
    assert performed(_incidents(OPENED, MADE), ended=False) == ()
    (begun,) = performed(_incidents(OPENED, MADE, STARTED), ended=False)
    assert (begun.incident_id, begun.what, begun.by, begun.result) == ("i-1", PLAN.intent, "rolecall", "in progress")
    assert begun.because == "rollout/1 crashed"
    (approved,) = performed(_incidents(OPENED, MADE, PROPOSED, APPROVED, STARTED, done), ended=False)
    assert (approved.by, approved.result) == ("rolecall, approved by anna", "done, not verified")
    closed = (K.INCIDENT_CLOSED, {"outcome": "escalated", "because": "the job is stopped"})
    assert [e.result for e in performed(_incidents(OPENED, MADE, STARTED, closed), ended=False)] == ["not finished"]
    assert [e.result for e in performed(_incidents(OPENED, MADE, STARTED), ended=True)] == ["not finished"]
