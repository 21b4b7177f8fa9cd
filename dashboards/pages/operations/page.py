"""The Operations page: plans that await approval, and all operator commands. Nothing happens without a click."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.errors import JournalError
from rolecall.core.text import in_words, plain, seconds, utc
from rolecall.dashboards.data.nodes import natural, node_names, quarantined
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.links import href
from rolecall.dashboards.pages.operations import plans
from rolecall.dashboards.pages.operations.commands import (
    OperatorCommand,
    as_commands,
    button,
    form,
    operations,
    show_result,
)
from rolecall.dashboards.pages.operations.commands import OperatorCommandKind as Kind
from rolecall.dashboards.pages.operations.plans import (
    ActionLogEntry,
    CommandLogEntry,
    State,
    history,
    newest_limits,
    performed,
)
from rolecall.dashboards.pages.shell import chosen_run, data_table, page
from rolecall.dashboards.pages.sign_in import HOW_TO, Viewer, follow
from rolecall.dashboards.pages.style import Cell, Link, table
from rolecall.recovery.incidents import Incident
from rolecall.recovery.nodes import NodeRecord

HOLD_FOR = {"10 minutes": 600.0, "1 hour": 3600.0, "4 hours": 14400.0, "12 hours": 43200.0}
PLANS_SHOWN = 20
"""Plans shown as cards; the page only counts the rest."""
PLACES_SHOWN = 20
ACTIONS_SHOWN = 50
HISTORY_SHOWN = 500


def show() -> None:
    page("Operations", _draw)


def _draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    viewer, state, now = follow(reader), operations(reader).latest(reader), reader.now()
    incidents = tuple(snapshot.projection.incidents.values())
    show_result(reader)
    _status(reader, viewer, state, snapshot)
    if not snapshot.run.ended:
        _plans(reader, viewer, plans.plan_rows(incidents, snapshot.mode_of, now), now)
        _pause(reader, viewer, state)
        if snapshot.observed and not state.fleet.replicas:
            _watched_job(reader, viewer, state, snapshot)
        else:
            _nodes(reader, viewer, state, incidents, now)
            _replica(reader, viewer, state)
    _actions(performed(incidents, ended=snapshot.run.ended != ""))
    _history(history(state.events, incidents))


def _status(reader: Reader, viewer: Viewer, state: State, snapshot: JournalSnapshot) -> None:
    ended = snapshot.run.ended
    if ended:
        st.info("The run has ended: there is nothing left to command.", icon=":material/flag:")
    else:
        holder = f" {plain(state.watch)} holds the lease." if state.watch else ""
        st.text(f"mode {state.mode or 'unknown'}: {plans.MODES.get(state.mode, 'no watch has started yet.')}{holder}")
        if snapshot.orphans_mode not in ("", snapshot.mode):
            st.text(f"mode of orphans {snapshot.orphans_mode}: {plans.MODES.get(snapshot.orphans_mode, '')}")
    if reader.settings.users_path is None:
        with st.expander("This dashboard is read-only, because it was started without a users file"):
            st.text("To enable commands:")
            st.code(HOW_TO, language=None, wrap_lines=True)
    elif not viewer.may_act:
        st.info("Read-only: sign in (in the sidebar) to use commands.", icon=":material/lock:")
    if ended:
        return
    if state.paused is not None:
        st.warning("Recovery is paused.", icon=":material/pause_circle:")
        st.text(plain(state.paused))
    if state.stopping is not None:
        st.warning("The job is being stopped.", icon=":material/stop_circle:")
        st.text(plain(state.stopping))


def _plans(reader: Reader, viewer: Viewer, rows: Sequence[plans.PlanRow], now: float) -> None:
    waiting = sum(row.status is plans.PlanStatus.AWAITS_APPROVAL for row in rows)
    st.subheader(f"Plans: {waiting} await{'s' if waiting == 1 else ''} approval" if waiting else "Plans")
    if not rows:
        st.text("No pending plans.")
    for row in rows[:PLANS_SHOWN]:
        _plan(reader, viewer, row, now)
    if len(rows) > PLANS_SHOWN:
        st.text(f"and {len(rows) - PLANS_SHOWN} more")


def _plan(reader: Reader, viewer: Viewer, row: plans.PlanRow, now: float) -> None:
    attempt, plan, diagnosis = row.attempt, row.attempt.plan, row.incident.diagnosis
    with st.container(border=True, key=f"plan-{plan.digest}"):
        st.text(f"{plans.GLYPHS[row.status]} {row.status}{_until(row, now)}")
        st.text(plain(diagnosis.because))
        st.text(plain(f"{'would' if row.status is plans.PlanStatus.NOT_EXECUTED else 'plan'}: {plan.intent}"))
        st.text(plain(f"reason: {plan.because}"))
        if plan.also_hit:
            st.text(plain(f"also disturbs: {'; '.join(plan.also_hit)}"))
        if row.hold is not None:
            st.text(plain(f"on hold by {row.hold.by} until {_clock(row.hold.until)}: {row.hold.because}"))
        if attempt.held_by:
            guards = in_words(", ".join(sorted(attempt.held_by)))
            st.text(plain(f"blocked ({guards}): {'; '.join(attempt.held_because)}"))
        if attempt.decision:
            st.text(plain(f"{attempt.decision} by {attempt.decided_by}" if attempt.decided_by else attempt.decision))
        if row.status is plans.PlanStatus.AWAITS_APPROVAL and row.expires_at is not None:
            total = max(1.0, row.expires_at - attempt.made_at)
            st.progress(min(1.0, (row.seconds_left(now) or 0.0) / total))
        with st.expander(f"Evidence ({len(diagnosis.evidence)})"):
            st.text(f"confidence {diagnosis.confidence:.2f}, attempt {attempt.number}")
            for e in diagnosis.evidence:
                st.text(plain(f"{e.kind}: {e.text}"))
            st.text(f"{plain(row.incident.incident_id)}, plan {plain(plan.digest)}")
        _plan_commands(reader, viewer, row)


def _plan_commands(reader: Reader, viewer: Viewer, row: plans.PlanRow) -> None:
    digest = row.attempt.plan.digest
    approve, hold, reject, lift = (
        OperatorCommand(what=what, on=digest) for what in (Kind.APPROVE, Kind.HOLD, Kind.REJECT, Kind.LIFT)
    )
    if row.can_be_approved:
        button(reader, viewer, "Approve", approve)
    if row.hold is not None:
        button(reader, viewer, "Lift the hold", lift)
    if row.can_be_stopped:
        stops = {"Hold": hold, "Reject": reject}
        if row.hold is not None:
            del stops["Hold"]
        if row.status is plans.PlanStatus.APPROVED:
            del stops["Reject"]  # it is approved already; a hold or a pause can still stop it
        with st.expander(" or ".join(stops).capitalize()):
            form(reader, viewer, f"plan:{digest}", stops, seconds=HOLD_FOR if "Hold" in stops else None)
        direct = ((approve,) if row.can_be_approved else ()) + ((lift,) if row.hold is not None else ())
        as_commands(reader, viewer, *direct, *stops.values())


def _until(row: plans.PlanRow, now: float) -> str:
    left = row.seconds_left(now)
    if left is None or row.expires_at is None or row.status is plans.PlanStatus.EXPIRED:
        return ""
    return f": expires in {seconds(round(left))} (at {_clock(row.expires_at)})"


def _clock(at: float) -> str:
    return utc(at, "%H:%M:%S UTC")


def _pause(reader: Reader, viewer: Viewer, state: State) -> None:
    st.subheader("Automatic recovery")
    if state.paused is None:
        pause = OperatorCommand(what=Kind.PAUSE)
        with st.expander("Pause recovery"):
            st.text("No new action starts until recovery is resumed. Actions in progress continue.")
            form(reader, viewer, "pause", {"Pause": pause})
            as_commands(reader, viewer, pause)
    else:
        resume = OperatorCommand(what=Kind.RESUME)
        button(reader, viewer, "Resume recovery", resume)
        as_commands(reader, viewer, resume)


def _watched_job(reader: Reader, viewer: Viewer, state: State, snapshot: JournalSnapshot) -> None:
    """Says what cannot be commanded, too, so that nobody looks for it."""
    st.subheader("Nodes and replicas")
    places = {(r.replica, r.node) for r in snapshot.observed}
    st.text("rolecall only watches this job: it can neither drain its nodes nor replace its replicas.")
    for replica, node in sorted(places, key=lambda p: (natural(p[0]), natural(p[1])))[:PLACES_SHOWN]:
        st.text(plain(f"{replica} on {node}"))
    if len(places) > PLACES_SHOWN:
        st.text(f"and {len(places) - PLACES_SHOWN} more")
    away = quarantined(state.events)
    names = sorted({*(node for _, node in places), *away}, key=natural)
    _quarantine(reader, viewer, names, away, "the watch calls the node unfit (/v1/unfit), and nothing else is done")


def _nodes(reader: Reader, viewer: Viewer, state: State, incidents: Sequence[Incident], now: float) -> None:
    st.subheader("Nodes")
    away = quarantined(state.events)
    names = node_names(state.fleet, [*away, *state.nodes])
    if not names:
        st.text("The journal contains no nodes.")
        return
    node = _quarantine(reader, viewer, names, away, "no new replicas are placed on the node; running ones stay")
    with st.expander("Drain: move all replicas off the node and quarantine it"):
        _drain(reader, viewer, state, incidents, node, frozenset(away), now)


def _quarantine(
    reader: Reader, viewer: Viewer, names: Sequence[str], away: Mapping[str, NodeRecord], effect: str
) -> str:
    """Quarantine of one of `names`, or its return; the node that was chosen."""
    node = st.selectbox("Node", names, key="operations.node")
    if node in away:
        st.text(plain(f"{node} was quarantined by {away[node].quarantined_by}: {away[node].quarantined_because}"))
        back = OperatorCommand(what=Kind.RETURN, on=node)
        form(reader, viewer, f"return:{node}", {"Return to service": back})
        as_commands(reader, viewer, back)
    else:
        keep = OperatorCommand(what=Kind.QUARANTINE, on=node)
        with st.expander(f"Quarantine: {effect}"):
            form(reader, viewer, f"quarantine:{node}", {"Quarantine": keep})
            as_commands(reader, viewer, keep)
    return node


def _drain(
    reader: Reader,
    viewer: Viewer,
    state: State,
    incidents: Sequence[Incident],
    node: str,
    away: frozenset[str],
    now: float,
) -> None:
    if not plans.replicas_on(state.fleet, node):
        st.text("No replica runs on it.")
    try:
        limits = newest_limits(reader, state.mode)
    except JournalError:
        st.text("The guards cannot be evaluated now: the journal is not readable.")
        return
    moving = plans.preview(
        node,
        fleet=state.fleet,
        incidents=incidents,
        avoided=away,
        limits=limits,
        paused=state.paused,
        stopping=state.stopping,
        now=now,
    )
    for m in moving:
        guard = "✓ allowed by all guards" if not m.guard else f"✗ blocked by guard {m.guard}: {m.guard_because}"
        st.text(plain(f"{m.replica}: {m.action} ({m.because}). {guard}"))
    if moving and not limits.known:
        st.text("This run has no plan yet, so the guards' default limits apply here.")
    drain = OperatorCommand(what=Kind.DRAIN, on=node)
    form(reader, viewer, f"drain:{node}", {"Drain": drain}, confirm=node)
    as_commands(reader, viewer, drain)


def _replica(reader: Reader, viewer: Viewer, state: State) -> None:
    st.subheader("Replicas")
    names = [str(v.replica) for v in state.fleet.replicas]
    if not names:
        st.text("The journal contains no replicas.")
        return
    with st.expander("Replace a replica"):
        chosen = st.selectbox("Replica", names, key="operations.replica")
        view = state.fleet.find(chosen)
        if view is not None:
            st.text(plain(f"{chosen}#{view.incarnation} is {view.state or 'not started'} on {view.node}"))
        ask = OperatorCommand(what=Kind.REPLACE, on=chosen)
        form(reader, viewer, f"replace:{chosen}", {"Replace": ask})
        as_commands(reader, viewer, ask)


def _actions(entries: Sequence[ActionLogEntry]) -> None:
    st.subheader("Actions of rolecall")
    if not entries:
        st.text("None so far.")
        return
    run = chosen_run()
    rows: list[list[Cell]] = [
        [utc(e.at), e.what, e.because, e.by, e.result, Link(e.incident_id, href(e.incident_id, run))]
        for e in entries[:ACTIONS_SHOWN]
    ]
    st.html(table(["started", "action", "because", "by", "result", "incident"], rows, stack=True))
    if len(entries) > ACTIONS_SHOWN:
        st.text(f"and {len(entries) - ACTIONS_SHOWN:,} older")


def _history(entries: Sequence[CommandLogEntry]) -> None:
    st.subheader("Command history")
    if not entries:
        st.text("No operator commands yet.")
        return
    rows = entries[:HISTORY_SHOWN]
    data_table(
        {
            "when (UTC)": [datetime.fromtimestamp(e.at, UTC) for e in rows],
            "operator": [plain(e.by) for e in rows],
            "command": [e.what for e in rows],
            "target": [plain(e.on) for e in rows],
            "reason": [plain(e.because) for e in rows],
        },
        column_config={"when (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss")},
    )
    if len(entries) > HISTORY_SHOWN:
        st.text(f"and {len(entries) - HISTORY_SHOWN} older")
