"""The Operations page: plans that await approval, and all operator commands. Nothing happens without a click."""

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.errors import JournalError
from rolecall.core.text import plain, seconds, utc
from rolecall.dashboards.data.node_history import quarantined
from rolecall.dashboards.data.nodes import node_names
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.operations.buttons import as_commands, button, form, operations, show_result
from rolecall.dashboards.pages.operations.commands import OperatorCommand, OperatorCommandKind
from rolecall.dashboards.pages.operations.history import CommandLogEntry, history
from rolecall.dashboards.pages.operations.plans import GLYPHS, MODES, PlanRow, PlanStatus, plan_rows
from rolecall.dashboards.pages.operations.preview import preview, replicas_on
from rolecall.dashboards.pages.operations.state import State, newest_limits
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import HOW_TO, Viewer, follow, sidebar
from rolecall.recovery.incidents.incident import Incident

HOLD_FOR = {"10 minutes": 600.0, "1 hour": 3600.0, "4 hours": 14400.0, "12 hours": 43200.0}
PLANS_SHOWN = 20
"""Plans shown as cards; the page only counts the rest."""
HISTORY_SHOWN = 500


def show() -> None:
    sidebar(reader())
    page("Operations", _draw)


def _draw(r: Reader, snapshot: JournalSnapshot) -> None:
    viewer, state, now = follow(r), operations(r).latest(r), r.now()
    incidents = tuple(snapshot.projection.incidents.values())
    show_result()
    _status(r, viewer, state, ended=snapshot.run.ended)
    _plans(r, viewer, plan_rows(incidents, state.mode, now), now)
    _pause(r, viewer, state)
    _nodes(r, viewer, state, incidents, now)
    _replica(r, viewer, state)
    _history(history(state.events, incidents))


def _status(r: Reader, viewer: Viewer, state: State, *, ended: str) -> None:
    if r.settings.users_path is None:
        st.info("This dashboard is read-only, because it was started without a users file. To enable commands:")
        st.code(HOW_TO, language=None, wrap_lines=True)
    elif not viewer.may_act:
        st.info("Read-only: sign in (in the sidebar) to use commands.", icon=":material/lock:")
    if ended:
        st.info("The run has ended: commands no longer have an effect.", icon=":material/flag:")
        st.text(plain(ended))
        return
    watch = f"{plain(state.watch)} holds the lease" if state.watch else "NO WATCH HOLDS THE LEASE: nothing is recovered"
    st.text(f"mode {state.mode or 'unknown'}: {MODES.get(state.mode, 'no watch has started yet.')}")
    st.text(watch)
    if state.paused is not None:
        st.warning("Recovery is paused.", icon=":material/pause_circle:")
        st.text(plain(state.paused))
    if state.stopping is not None:
        st.warning("The job is being stopped.", icon=":material/stop_circle:")
        st.text(plain(state.stopping))


# --- plans --------------------------------------------------------------------------------------------------------


def _plans(r: Reader, viewer: Viewer, rows: Sequence[PlanRow], now: float) -> None:
    waiting = sum(row.status is PlanStatus.AWAITS_APPROVAL for row in rows)
    st.subheader(f"Plans: {waiting} await{'s' if waiting == 1 else ''} approval" if waiting else "Plans")
    if not rows:
        st.text("No pending plans.")
    for row in rows[:PLANS_SHOWN]:
        _plan(r, viewer, row, now)
    if len(rows) > PLANS_SHOWN:
        st.text(f"and {len(rows) - PLANS_SHOWN} more")


def _plan(r: Reader, viewer: Viewer, row: PlanRow, now: float) -> None:
    with st.container(border=True, key=f"plan-{row.digest}"):
        st.text(f"{GLYPHS[row.status]} {row.status}{_until(row, now)}")
        st.text(plain(row.sentence))
        st.text(plain(f"plan: {row.action} {', '.join(row.targets) or 'the job'}, because {row.because}"))
        st.text(plain(f"side effects: {'; '.join(row.also_hit)}" if row.also_hit else "side effects: none"))
        if row.hold is not None:
            st.text(plain(f"on hold by {row.hold.by} until {_clock(row.hold.until)}: {row.hold.because}"))
        if row.held_by:
            st.text(plain(f"blocked by guards: {', '.join(row.held_by)}"))
        if row.decided:
            st.text(plain(row.decided))
        if row.status is PlanStatus.AWAITS_APPROVAL and row.expires_at is not None:
            total = max(1.0, row.expires_at - row.made_at)
            st.progress(min(1.0, (row.seconds_left(now) or 0.0) / total))
        with st.expander(f"Evidence ({len(row.evidence)})"):
            for line in (f"confidence {row.confidence:.2f}, attempt {row.attempt}", *row.evidence):
                st.text(plain(line))
            st.text(f"{plain(row.incident_id)}, plan {plain(row.digest)}")
        _plan_commands(r, viewer, row)


def _plan_commands(r: Reader, viewer: Viewer, row: PlanRow) -> None:
    approve, hold = (
        OperatorCommand(what=OperatorCommandKind.APPROVE, on=row.digest),
        OperatorCommand(what=OperatorCommandKind.HOLD, on=row.digest),
    )
    reject, lift = (
        OperatorCommand(what=OperatorCommandKind.REJECT, on=row.digest),
        OperatorCommand(what=OperatorCommandKind.LIFT, on=row.digest),
    )
    if row.can_be_approved:
        button(r, viewer, "Approve", approve, primary=True)
    if row.hold is not None:
        button(r, viewer, "Lift the hold", lift, primary=True)
    if row.can_be_stopped:
        stops = {"Hold": hold, "Reject": reject}
        if row.hold is not None:
            del stops["Hold"]
        if row.status is PlanStatus.APPROVED:
            del stops["Reject"]  # it is approved already; a hold or a pause can still stop it
        with st.expander(" or ".join(stops).capitalize()):
            form(r, viewer, f"plan:{row.digest}", stops, seconds=HOLD_FOR if "Hold" in stops else None)
        direct = ((approve,) if row.can_be_approved else ()) + ((lift,) if row.hold is not None else ())
        as_commands(r, viewer, *direct, *stops.values())


def _until(row: PlanRow, now: float) -> str:
    left = row.seconds_left(now)
    if left is None or row.expires_at is None or row.status is PlanStatus.EXPIRED:
        return ""
    return f": expires in {seconds(round(left))} (at {_clock(row.expires_at)})"


def _clock(at: float) -> str:
    return utc(at, "%H:%M:%S UTC")


# --- the rest -----------------------------------------------------------------------------------------------------


def _pause(r: Reader, viewer: Viewer, state: State) -> None:
    st.subheader("Automatic recovery")
    if state.paused is None:
        pause = OperatorCommand(what=OperatorCommandKind.PAUSE)
        with st.expander("Pause recovery"):
            st.text("No new action starts until recovery is resumed. Actions in progress continue.")
            form(r, viewer, "pause", {"Pause": pause})
            as_commands(r, viewer, pause)
    else:
        resume = OperatorCommand(what=OperatorCommandKind.RESUME)
        button(r, viewer, "Resume recovery", resume, primary=True)
        as_commands(r, viewer, resume)


def _nodes(r: Reader, viewer: Viewer, state: State, incidents: Sequence[Incident], now: float) -> None:
    st.subheader("Nodes")
    away = quarantined(state.events)
    names = node_names(state.fleet, [*away, *state.nodes])
    if not names:
        st.text("The journal contains no nodes.")
        return
    node = st.selectbox("Node", names, key="operations.node")
    if node in away:
        st.text(plain(f"{node} was quarantined by {away[node].quarantined_by}: {away[node].quarantined_because}"))
        back = OperatorCommand(what=OperatorCommandKind.RETURN, on=node)
        form(r, viewer, f"return:{node}", {"Return to service": back})
        as_commands(r, viewer, back)
    else:
        keep = OperatorCommand(what=OperatorCommandKind.QUARANTINE, on=node)
        with st.expander("Quarantine: no new replicas are placed on the node; running ones stay"):
            form(r, viewer, f"quarantine:{node}", {"Quarantine": keep})
            as_commands(r, viewer, keep)
    with st.expander("Drain: move all replicas off the node and quarantine it"):
        _drain(r, viewer, state, incidents, node, frozenset(away), now)


def _drain(
    r: Reader, viewer: Viewer, state: State, incidents: Sequence[Incident], node: str, away: frozenset[str], now: float
) -> None:
    if not replicas_on(state.fleet, node):
        st.text("No replica runs on it.")
    try:
        limits = newest_limits(r, state.mode)
    except JournalError:
        st.text("The guards cannot be evaluated now: the journal is not readable.")
        return
    moving = preview(
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
    drain = OperatorCommand(what=OperatorCommandKind.DRAIN, on=node)
    form(r, viewer, f"drain:{node}", {"Drain": drain}, confirm=node)
    as_commands(r, viewer, drain)


def _replica(r: Reader, viewer: Viewer, state: State) -> None:
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
        ask = OperatorCommand(what=OperatorCommandKind.REPLACE, on=chosen)
        form(r, viewer, f"replace:{chosen}", {"Replace": ask})
        as_commands(r, viewer, ask)


def _history(entries: Sequence[CommandLogEntry]) -> None:
    st.subheader("Command history")
    if not entries:
        st.text("No operator commands yet.")
        return
    rows = entries[:HISTORY_SHOWN]
    st.dataframe(
        {
            "when (UTC)": [datetime.fromtimestamp(e.at, UTC) for e in rows],
            "operator": [plain(e.by) for e in rows],
            "command": [e.what for e in rows],
            "target": [plain(e.on) for e in rows],
            "reason": [plain(e.because) for e in rows],
        },
        hide_index=True,
        width="stretch",
        column_config={"when (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss")},
    )
    if len(entries) > HISTORY_SHOWN:
        st.text(f"and {len(entries) - HISTORY_SHOWN} older")
