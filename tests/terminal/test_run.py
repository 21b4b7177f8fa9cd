"""The terminal: what it shows at each moment of a run, that it fits, and that untrusted text does not control it."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, JournalPage
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.core.text import escape, plain, seconds
from rolecall.recovery.durations import IncidentDurations
from rolecall.recovery.incidents import fold
from rolecall.reports.report import write_report
from rolecall.terminal.run import Screen, braille, plain_lines, render, summary
from rolecall.views.snapshot import IncidentRow, ReplicaRow, RunSnapshot, RunSnapshotProjection, replica_rows
from tests.events import made_event

HOSTILE = ("[red]x[/red]", "[/]", "\x1b[2J\x1b]0;owned\x07", "<script>", "a\nb\r\nc", "\u202eevil", "[link=file:///x]y")
# Sequences of rich itself: colours, and cursor movement of the live view. Never a title, a clear or a link.
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*[AK]|\x1b\[1A|\x1b\[2K")

CLEAR = "\x1b[2J"


def printed(what: RenderableType, width: int = 80, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=24, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(what)
    return out.getvalue()


def _at(run: RunDir, until: float) -> RunSnapshot:
    """The screen that many seconds after the start."""
    journal = Journal(run.database_url, create=False)
    events = journal.events()
    journal.close()
    now = events[0].wall_at + until
    memory = RunSnapshotProjection(num_steps=120)
    events = [e for e in events if e.wall_at <= now]
    memory.read(events)
    return memory.snapshot(now, {}, {}, None, incidents=fold(events).values())


def _rows() -> tuple[ReplicaRow, ...]:
    states = {"trainer/0": "serving", "rollout/0": "serving", "rollout/1": "lost", "standby/0": "ready"}
    return tuple(ReplicaRow(replica=r, node="node-1", incarnation=1, state=s) for r, s in states.items())


def _incident(**changes: Any) -> IncidentRow:
    values = {
        "incident_id": "i-1",
        "suspects": ("rollout/1#1",),
        "fault_class": "crash",
        "because": "it ended by signal 9",
        "stage": "acting",
        "detail": "replace it",
        "durations": IncidentDurations(
            fault_to_finding=None,
            onset_to_finding=0.5,
            finding_to_serving=None,
            finding_to_verified=None,
            opening_to_close=None,
            open_seconds=1.0,
        ),
    }
    return IncidentRow(**{**values, **changes})


# --- what is shown ------------------------------------------------------------------------------------------------


def test_an_open_incident_is_shown_with_its_sentence_and_stage(fake_run: RunDir) -> None:
    snapshot = _at(fake_run, 38.6)
    assert [i.stage for i in snapshot.open_incidents] == ["verifying"]
    text = printed(render(snapshot, "demo"))
    assert "crash  rollout/1#1" in text and "process exited on signal 9" in " ".join(text.split())
    assert "no open incidents" not in text


def test_a_closed_incident_stays_in_sight(fake_run: RunDir) -> None:
    text = printed(render(_at(fake_run, 90.0), "demo"))
    assert "no open incidents" in text
    assert "✓ resolved rollout/1#1 crash" in text and "✓ resolved trainer/1#1 hang" in text


def test_progress_before_the_first_step_is_the_note() -> None:
    text = printed(render(RunSnapshot(now=1.0, note="starting raylet node-3"), "demo"))
    assert "starting raylet node-3" in text


def test_step_reward_rate_and_pace_are_shown(fake_run: RunDir) -> None:
    snapshot = _at(fake_run, 50.0)
    assert snapshot.tokens_per_second == pytest.approx(8 * 96 / 0.62, rel=0.1)
    assert snapshot.step_seconds == pytest.approx(0.62, rel=0.2)
    line = r"step \d+/120 +reward 0\.\d\d +tokens/s 1,\d{3} +s/step 0\.\d\d +membership \d+"
    assert re.search(line, printed(render(snapshot)))


def test_the_rate_falls_while_nothing_is_committed(fake_run: RunDir) -> None:
    before, stalled = _at(fake_run, 57.3), _at(fake_run, 61.5)
    assert before.tokens_per_second and stalled.tokens_per_second
    assert stalled.tokens_per_second < 0.85 * before.tokens_per_second


def test_replicas_that_do_not_serve_are_named() -> None:
    text = printed(render(RunSnapshot(now=0.0, replicas=_rows())))
    assert re.search(r"rollout +1/2 +● 0 +✕ 1 lost", text) and re.search(r"standby +1/1", text)


def test_a_large_role_shows_only_replicas_that_do_not_serve() -> None:
    rows = tuple(
        ReplicaRow(replica=f"rollout/{n}", node="n", incarnation=1, state="lost" if n == 77 else "serving")
        for n in range(99)
    )
    text = printed(render(RunSnapshot(now=0.0, replicas=rows)))
    assert "98/99" in text and "77 lost" in text and "● 5" not in text


def test_desired_that_is_not_there_yet_is_wanted() -> None:
    node = NodeId("node-1")
    wanted = {ReplicaId("rollout/1"): Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=node)}
    lost = Actual(replica=ReplicaId("rollout/1"), incarnation=1, node=node, state=ReplicaState.LOST)
    assert [(r.incarnation, r.state) for r in replica_rows(wanted, {lost.replica: lost})] == [(2, "wanted")]
    assert [(r.incarnation, r.state) for r in replica_rows({}, {lost.replica: lost})] == [(1, "lost")]
    lent = {lost.replica: replace(wanted[lost.replica], node=NodeId(""))}
    assert [(r.incarnation, r.state, r.node) for r in replica_rows(lent, {lost.replica: lost})] == [(1, "lent", "")]


def test_before_the_run_has_begun_no_time_is_shown() -> None:
    assert "0.00 s" not in printed(render(RunSnapshot(now=5.0, note="starting"), "demo"))
    assert "5.00 s" in printed(render(RunSnapshot(now=5.0, started_at=0.0), "demo"))


def test_a_proposal_shows_the_command_that_approves_it() -> None:
    memory = RunSnapshotProjection()
    proposed = {"digest": "4f2a"}
    events = [(EventKind.INCIDENT_OPENED, {}), (EventKind.PLAN_CREATED, {}), (EventKind.PLAN_PROPOSED, proposed)]
    events = [
        made_event(seq=seq, kind=kind, wall_at=1.0, body=body, incident_id="inc-1")
        for seq, (kind, body) in enumerate(events, start=1)
    ]
    memory.read(events)
    text = printed(render(memory.snapshot(2.0, {}, {}, None, incidents=fold(events, strict=False).values())))
    assert "waits for approval" in text and "rolecall approve 4f2a" in text


def test_pause_and_end_are_shown() -> None:
    assert "paused: lunch" in printed(render(RunSnapshot(now=0.0, paused="lunch")))
    assert "completed" in printed(render(RunSnapshot(now=0.0, ended="completed")))


def test_a_mode_with_hybrids_is_shown_with_their_replicas() -> None:
    roles = {"trainer": 1, "rollout": 2}
    started = made_event(kind=EventKind.RUN_STARTED, body={"roles": roles, "mode": "semi_sync"}, wall_at=1.0)
    memory = RunSnapshotProjection()
    memory.read([started])
    names = [ReplicaId(r) for r in ("trainer/0", "rollout/0", "rollout/1")]
    wanted = {r: Desired(replica=r, incarnation=1, node=NodeId("node-1")) for r in names}
    shown = memory.snapshot(2.0, wanted, {}, None)
    assert {r.replica: r.partner for r in shown.replicas} == {
        "trainer/0": "rollout/0",
        "rollout/0": "trainer/0",
        "rollout/1": "",
    }
    assert "mode semi_sync" in printed(render(shown))
    assert "mode" not in printed(render(RunSnapshot(now=0.0)))


def test_the_memory_reads_each_event_once(fake_run: RunDir) -> None:
    journal = Journal(fake_run.database_url, create=False)
    whole, parts = RunSnapshotProjection(), RunSnapshotProjection()
    whole.read(journal.events())
    for _ in range(40):
        parts.read(journal.events(after=parts.seq, limit=20))
    journal.close()
    assert parts == whole


# --- it fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds_in", [0.5, 10.0, 38.7, 61.0, 95.0, 106.0])
@pytest.mark.parametrize("width", [80, 60, 200])
def test_it_fits_into_the_window(fake_run: RunDir, seconds_in: float, width: int) -> None:
    snapshot = _at(fake_run, seconds_in)
    rows = tuple(
        ReplicaRow(replica=f"{role}/{n}", node="node-1", incarnation=3, state="starting")
        for role in ("trainer", "rollout", "standby", "reward", "controller")
        for n in range(6)
    )
    shown = RunSnapshot(**{**{f: getattr(snapshot, f) for f in RunSnapshot.__slots__}, "replicas": rows})
    lines = printed(render(shown, "demo " * 30, width), width).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width


def test_policy_health_is_one_line_of_the_known_metrics(fake_run: RunDir) -> None:
    text = printed(render(_at(fake_run, 95.0)))
    (line,) = [line for line in text.splitlines() if line.startswith("entropy ")]
    assert "filtered 37%" in line and "KL 0.00" in line and len(line) <= 80
    reported = RunSnapshot(now=1.0, signs={"kl_sampler": 0.0031, "truncated_fraction": 0.021})
    (line,) = [line for line in printed(render(reported)).splitlines() if "KL" in line]
    assert line.rstrip() == "cut off 2%   KL 0.0031"
    assert "KL" not in printed(render(RunSnapshot(now=1.0, rewards=(0.5,)))), "a run of before there were signs"


def test_a_plan_that_repeats_the_diagnosis_is_not_shown_twice() -> None:
    snapshot = RunSnapshot(now=101.0, open_incidents=(_incident(detail="it ended by signal 9"),))
    assert printed(render(snapshot)).count("it ended by signal 9") == 1


def test_a_wide_window_shows_more_of_the_sentence() -> None:
    snapshot = RunSnapshot(now=101.0, open_incidents=(_incident(because="word " * 100 + "end"),))
    assert "end" not in printed(render(snapshot)) and "end" in printed(render(snapshot, width=200), 200)


def test_an_escalated_incident_has_no_tick() -> None:
    text = printed(render(RunSnapshot(now=1.0, closed_incidents=(_incident(stage="escalated", closed_at=1.0),))))
    assert "✕ escalated rollout/1#1" in text and "✓" not in text


def test_a_long_sentence_does_not_push_the_rest_out() -> None:
    snapshot = RunSnapshot(
        now=101.0, replicas=_rows(), open_incidents=(_incident(because="word " * 500, detail="x" * 900),) * 5
    )
    assert len(printed(render(snapshot)).splitlines()) <= 24


@given(st.lists(st.floats(-10, 10), max_size=400), st.integers(1, 60), st.integers(1, 6))
def test_a_curve_has_its_size_and_only_braille(values: list[float], columns: int, rows: int) -> None:
    drawn = braille(values, columns, rows, -1.0, 1.0)
    assert len(drawn) == rows and all(len(r) == columns for r in drawn)
    assert all(0x2800 <= ord(c) <= 0x28FF for r in drawn for c in r)
    if values:
        assert any(c != chr(0x2800) for r in drawn for c in r)


def test_a_rising_curve_rises() -> None:
    low, high = braille([0.0, 0.0], 2, 2, 0.0, 1.0), braille([1.0, 1.0], 2, 2, 0.0, 1.0)
    assert low[0] == "\u2800\u2800" and low[1] != "\u2800\u2800"
    assert high[1] == "\u2800\u2800" and high[0] != "\u2800\u2800"


# --- untrusted text does not reach the terminal
# ---------------------------------------------------------------------------


def _hostile_snapshot(text: str) -> RunSnapshot:
    row = ReplicaRow(replica=f"{text}/{text}", node=text, incarnation=1, state=text)
    incident = _incident(incident_id=text, suspects=(text,), fault_class=text, because=text, stage=text, detail=text)
    return RunSnapshot(
        now=200.0,
        replicas=(row,),
        open_incidents=(incident,),
        closed_incidents=(_incident(because=text, stage=text, suspects=(text,), closed_at=150.0),),
        paused=text,
        ended=text,
        note=text,
    )


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("colour", [False, True])
def test_hostile_text_is_shown_as_text(text: str, colour: bool) -> None:
    shown = printed(render(_hostile_snapshot(text), text, 200), 200, colour)
    bare = OURS.sub("", shown)
    assert "\x1b" not in bare and "\x07" not in bare and "\u202e" not in bare and "\r" not in bare
    assert plain(text)[:12] in bare, "markup must not be swallowed"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_in_lines_and_summary(text: str, fake_run: RunDir) -> None:
    lines = plain_lines(RunSnapshot(now=1.0), _hostile_snapshot(text))
    assert lines and all(line.isprintable() for line in lines)
    report = write_report(fake_run)
    report["incidents"][0] |= {
        "suspects": [text],
        "fault": None,
        "fault_class": text,
        "outcome": text,
        "resolved_seconds": None,
    }
    report["verdict"] = [{"what": text, "ok": False, "because": text}]
    report["missed"] = [{"kind": text, "target": text}]
    report["audit"] = {**report["audit"], "problems": [text]}
    report["html"] = text
    bare = OURS.sub("", printed(summary(report), 160, colour=True))
    assert "\x1b" not in bare and "\x07" not in bare and "\u202e" not in bare


@given(st.text())
def test_plain_text_is_one_printable_line(text: str) -> None:
    assert plain(text).isprintable() and len(plain(text, 10)) <= 10
    assert not set("<>\"'") & set(escape(text))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.314, "0.31 s"), (9.996, "10.00 s"), (12.34, "12.3 s"), (125.4, "2 min 05 s")]
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


# --- lines --------------------------------------------------------------------------------------------------------


def test_lines_show_changes_once_then_progress() -> None:
    first = RunSnapshot(now=10.0, started_at=0.0, step=3, rewards=(0.5,), replicas=_rows())
    changed = tuple(
        ReplicaRow(replica=r.replica, node=r.node, incarnation=2, state="serving") if r.state == "lost" else r
        for r in _rows()
    )
    second = RunSnapshot(
        now=13.0, started_at=0.0, step=5, rewards=(0.6,), replicas=changed, open_incidents=(_incident(),)
    )
    lines = plain_lines(first, second)
    assert [line[11:31].strip() for line in lines] == [
        "rollout/1#2 on node-",
        "INCIDENT i-1 crash:",
        "incident i-1 rollout",
        "step 6   reward 0.60",
    ]
    assert len(plain_lines(second, second)) == 1, "a shown line is not repeated"
    assert plain_lines(second, second, progress_due=False) == [], "nothing has changed"
    assert len(plain_lines(first, second, progress_due=False)) == 4, "changes come with the progress"
    evaluated = replace(second, held_out_reward=0.7)
    assert len(plain_lines(second, evaluated, progress_due=False)) == 1, "an evaluation is a change"
    assert len(plain_lines(None, first)) == 1, "the first snapshot has no list of changes"


def test_the_same_incident_in_a_new_stage_is_reported_without_its_sentence() -> None:
    before = RunSnapshot(now=1.0, open_incidents=(_incident(),))
    after = RunSnapshot(now=2.0, closed_incidents=(_incident(stage="resolved", closed_at=2.0),))
    lines = [line for line in plain_lines(before, after) if "i-1" in line]
    assert len(lines) == 1 and "resolved" in lines[0]


def test_a_plan_that_begins_with_the_diagnosis_adds_only_the_rest() -> None:
    detail = "it ended by signal 9; trainer/1 and rollout/1 share a machine and are replaced together"
    shown = RunSnapshot(now=1.0, open_incidents=(_incident(detail=detail),))
    told = [line[11:] for line in plain_lines(None, shown) if "i-1" in line]
    assert told == [
        "INCIDENT i-1 crash: it ended by signal 9",
        "incident i-1 rollout/1#1: acting. trainer/1 and rollout/1 share a machine and are replaced together",
    ]
    bare = RunSnapshot(now=1.0, open_incidents=(_incident(detail="it ended by signal 9"),))
    assert plain_lines(None, bare)[1].endswith("incident i-1 rollout/1#1: acting")


def test_steps_beyond_those_asked_for_are_no_share() -> None:
    within = RunSnapshot(now=1.0, step=119, num_steps=120)
    assert "step 120/120 " in plain_lines(None, within)[0]
    assert "step 127 " in plain_lines(None, replace(within, step=126))[0]


def test_what_a_start_waits_for_is_not_said_twice() -> None:
    starting = RunSnapshot(now=1.0, note="rollout/1#1 is ready on node-2, pid 5")
    assert plain_lines(None, starting) == []
    assert plain_lines(starting, starting)[0].endswith("rollout/1#1 is ready on node-2, pid 5"), "after half a minute"


# --- the summary and the screen -----------------------------------------------------------------------------------


def test_the_summary_has_the_audit_and_the_path_of_the_report(fake_run: RunDir) -> None:
    report = write_report(fake_run)
    text = printed(summary(report))
    assert "3 of 3 faults resolved, the audit holds" in text
    assert re.search(r"A +rollout-kill +rollout/1 +rollout/1#1 +0\.31 s +2\.05 s", text)
    assert "".join(report["html"].split()) in "".join(text.split())
    assert "✓ processes kept" in text
    assert f"lost, replica-seconds: detect {report['lost_replica_seconds']['detect']:,.1f}, decide " in text
    assert ", recompute 0.0" in " ".join(printed(summary(report), 60).split()), "wrapped, not cut"
    unknown = {**report, "lost_replica_seconds": {"detect": 2.0, "decide": None}}
    assert "lost, replica-seconds: detect 2.0, decide –" in printed(summary(unknown))
    bad = {**report, "ok": False, "audit": {**report["audit"], "ok": False, "problems": ["ledger line 3 was changed"]}}
    assert "ledger line 3 was changed" in printed(summary(bad))


@pytest.mark.parametrize("live", [False, True])
def test_a_screen_draws_a_run_and_leaves_the_terminal_as_it_was(fake_run: RunDir, live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=live, color_system=None)
    journal = Journal(fake_run.database_url, create=False)
    with Screen(live=live, title="demo [red]", console=console) as screen:
        screen.note("starting [bold]raylets")
        screen.draw(journal, 1.0)
        screen.draw(journal, 2.0)
    journal.close()
    text = out.getvalue()
    assert "demo [red]" in text and "starting [bold]raylets" in text and "step 120" in text
    assert not live or text.rstrip().endswith("\x1b[?25h") or text.count("\x1b[?25l") == text.count("\x1b[?25h")


def test_a_resized_terminal_is_drawn_on_again(fake_run: RunDir) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    journal = Journal(fake_run.database_url, create=False)
    with Screen(live=True, title="demo", console=console) as screen:
        screen.draw(journal, 1.0)
        screen.draw(journal, 2.0)
        assert CLEAR not in out.getvalue()
        console.width = 120
        screen.draw(journal, 3.0)
        screen.draw(journal, 4.0)
    journal.close()
    assert out.getvalue().count(CLEAR) == 1


def test_a_picture_that_fails_does_not_end_the_run(fake_run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Journal):
        def page(self, **_: Any) -> JournalPage:
            raise ValueError("a defect")

    journal = Broken(fake_run.database_url, create=False)
    with Screen(live=False, title="demo", console=Console(file=io.StringIO())) as screen:
        screen.draw(journal, 1.0)
    journal.close()
    assert "cannot draw" in caplog.text


def test_the_rate_of_slow_steps_is_a_mean_over_some_of_them() -> None:
    memory = RunSnapshotProjection()
    memory.read(
        made_event(seq=n, kind=EventKind.STEP_COMMITTED, wall_at=100.0 * n, body={"step": n, "tokens": 5000})
        for n in range(9)
    )
    shown = memory.snapshot(880.0, {}, {}, None)
    assert shown.rate_seconds == 300.0
    assert shown.tokens_per_second == pytest.approx(3 * 5000 / 300.0)
    assert memory.tokens_per_second(1300.0) == 0.0, "a stall shows"


def test_a_rollout_has_the_version_of_the_last_step_and_a_newer_replacement_its_first_version() -> None:
    def rollout(number: int, state: ReplicaState, changed_at: float) -> Actual:
        name = ReplicaId(f"rollout/{number}")
        return Actual(
            replica=name, incarnation=1, node=NodeId("n"), state=state, policy_version=4, changed_at=changed_at
        )

    there = [
        rollout(0, ReplicaState.SERVING, 10.0),
        rollout(1, ReplicaState.SERVING, 60.0),
        rollout(2, ReplicaState.STOPPED, 60.0),
        rollout(3, ReplicaState.SERVING, 10.0),
    ]
    rows = replica_rows({}, {a.replica: a for a in there}, {"rollout/0": 9, "rollout/1": 9, "rollout/2": 9}, 50.0)
    assert [r.policy_version for r in rows] == [9, 4, 9, 4]
