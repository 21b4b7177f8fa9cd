"""The page `Acting`: what waits for a person, and all that a person can say. Nothing here happens without a click."""

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.errors import JournalError
from rolecall.core.text import plain, seconds, utc
from rolecall.dashboards.data.node_history import quarantined
from rolecall.dashboards.data.nodes import node_names
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.operations.buttons import answer, as_commands, button, desk, form
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
"""Cards on the page; of more, a person reads the first ones and the count."""
HISTORY_SHOWN = 500


def show() -> None:
    sidebar(reader())
    page("Acting", _draw)


def _draw(r: Reader, look: JournalSnapshot) -> None:
    person, state, now = follow(r), desk(r).look(r), r.now()
    incidents = tuple(look.book.incidents.values())
    answer()
    _who_acts(r, person, state, ended=look.snapshot.ended)
    _plans(r, person, plan_rows(incidents, state.mode, now), now)
    _all(r, person, state)
    _nodes(r, person, state, incidents, now)
    _replica(r, person, state)
    _history(history(state.words, incidents))


def _who_acts(r: Reader, person: Viewer, state: State, *, ended: str) -> None:
    if r.settings.users_path is None:
        st.info("Nobody may act here: this dashboard was started without a people file. To make one:")
        st.code(HOW_TO, language=None, wrap_lines=True)
    elif not person.may_act:
        st.info("You look as a guest: sign in (in the sidebar) to act.", icon=":material/lock:")
    if ended:
        st.info("The run is over: no word said here is acted on any more.", icon=":material/flag:")
        st.text(plain(f"ended: {ended}"))
        return
    watch = f"{plain(state.watch)} holds the lease" if state.watch else "NO WATCH HOLDS THE LEASE: nobody acts"
    st.text(f"mode {state.mode or 'unknown'}: {MODES.get(state.mode, 'no watch has said how it acts yet.')}")
    st.text(watch)
    if state.paused is not None:
        st.warning("All acting is paused.", icon=":material/pause_circle:")
        st.text(plain(state.paused))
    if state.stopping is not None:
        st.warning("The job is being stopped.", icon=":material/stop_circle:")
        st.text(plain(state.stopping))


# --- plans --------------------------------------------------------------------------------------------------------


def _plans(r: Reader, person: Viewer, rows: Sequence[PlanRow], now: float) -> None:
    waiting = sum(row.standing is PlanStatus.WAITS for row in rows)
    st.subheader(f"Plans: {waiting} wait{'s' if waiting == 1 else ''} for a person" if waiting else "Plans")
    if not rows:
        st.text("No plan stands that is not begun.")
    for row in rows[:PLANS_SHOWN]:
        _plan(r, person, row, now)
    if len(rows) > PLANS_SHOWN:
        st.text(f"and {len(rows) - PLANS_SHOWN} more")


def _plan(r: Reader, person: Viewer, row: PlanRow, now: float) -> None:
    with st.container(border=True, key=f"plan-{row.digest}"):
        st.text(f"{GLYPHS[row.standing]} {row.standing}{_until(row, now)}")
        st.text(plain(row.sentence))
        st.text(plain(f"plan: {row.action} {', '.join(row.targets) or 'the job'}, because {row.because}"))
        st.text(plain(f"also hit: {'; '.join(row.also_hit)}" if row.also_hit else "also hit: nobody"))
        if row.hold is not None:
            st.text(plain(f"held by {row.hold.by} until {_clock(row.hold.until)}: {row.hold.because}"))
        if row.held_by:
            st.text(plain(f"guards that held it: {', '.join(row.held_by)}"))
        if row.decided:
            st.text(plain(row.decided))
        if row.standing is PlanStatus.WAITS and row.expires_at is not None:
            total = max(1.0, row.expires_at - row.made_at)
            st.progress(min(1.0, (row.seconds_left(now) or 0.0) / total))
        with st.expander(f"Evidence ({len(row.evidence)})"):
            for line in (f"confidence {row.confidence:.2f}, attempt {row.attempt}", *row.evidence):
                st.text(plain(line))
            st.text(f"{plain(row.incident_id)}, plan {plain(row.digest)}")
        _words_on(r, person, row)


def _words_on(r: Reader, person: Viewer, row: PlanRow) -> None:
    approve, hold = (
        OperatorCommand(what=OperatorCommandKind.APPROVE, on=row.digest),
        OperatorCommand(what=OperatorCommandKind.HOLD, on=row.digest),
    )
    veto, lift = (
        OperatorCommand(what=OperatorCommandKind.REJECT, on=row.digest),
        OperatorCommand(what=OperatorCommandKind.LIFT, on=row.digest),
    )
    if row.can_be_approved:
        button(r, person, "Approve", approve, primary=True)
    if row.hold is not None:
        button(r, person, "Lift the hold", lift, primary=True)
    if row.can_be_stopped:
        stops = {"Hold": hold, "Veto": veto}
        if row.hold is not None:
            del stops["Hold"]
        if row.standing is PlanStatus.APPROVED:
            del stops["Veto"]  # it was said yes to already: a hold, or a pause, still stops it
        with st.expander(" or ".join(stops)):
            form(r, person, f"plan:{row.digest}", stops, seconds=HOLD_FOR if "Hold" in stops else None)
        said = ((approve,) if row.can_be_approved else ()) + ((lift,) if row.hold is not None else ())
        as_commands(r, person, *said, *stops.values())


def _until(row: PlanRow, now: float) -> str:
    left = row.seconds_left(now)
    if left is None or row.expires_at is None or row.standing is PlanStatus.EXPIRED:
        return ""
    return f": lapses in {seconds(round(left))} (at {_clock(row.expires_at)})"


def _clock(at: float) -> str:
    return utc(at, "%H:%M:%S UTC")


# --- the rest -----------------------------------------------------------------------------------------------------


def _all(r: Reader, person: Viewer, state: State) -> None:
    st.subheader("All acting")
    if state.paused is None:
        pause = OperatorCommand(what=OperatorCommandKind.PAUSE)
        with st.expander("Pause all acting"):
            st.text("No action begins until somebody lets it act again. What is under way goes on.")
            form(r, person, "pause", {"Pause": pause})
            as_commands(r, person, pause)
    else:
        resume = OperatorCommand(what=OperatorCommandKind.RESUME)
        button(r, person, "Let it act again", resume, primary=True)
        as_commands(r, person, resume)


def _nodes(r: Reader, person: Viewer, state: State, incidents: Sequence[Incident], now: float) -> None:
    st.subheader("Nodes")
    away = quarantined(state.words)
    names = node_names(state.fleet, [*away, *state.nodes])
    if not names:
        st.text("The journal names no node.")
        return
    node = st.selectbox("Node", names, key="acting.node")
    if node in away:
        st.text(plain(f"{node} is in quarantine, by {away[node].quarantined_by}: {away[node].quarantined_because}"))
        back = OperatorCommand(what=OperatorCommandKind.RETURN, on=node)
        form(r, person, f"return:{node}", {"End the quarantine": back})
        as_commands(r, person, back)
    else:
        keep = OperatorCommand(what=OperatorCommandKind.QUARANTINE, on=node)
        with st.expander("Quarantine: nothing new is placed there, what runs there goes on"):
            form(r, person, f"quarantine:{node}", {"Quarantine": keep})
            as_commands(r, person, keep)
    with st.expander("Drain: every replica on it moves elsewhere, and it is in quarantine"):
        _drain(r, person, state, incidents, node, frozenset(away), now)


def _drain(
    r: Reader, person: Viewer, state: State, incidents: Sequence[Incident], node: str, away: frozenset[str], now: float
) -> None:
    if not replicas_on(state.fleet, node):
        st.text("No replica runs there.")
    try:
        limits = newest_limits(r, state.mode)
    except JournalError:
        st.text("What the guards would say cannot be read now.")
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
        word = "✓ the guards would pass" if not m.guard else f"✗ guard {m.guard} would hold it: {m.guard_because}"
        st.text(plain(f"{m.replica}: {m.action} ({m.because}). {word}"))
    if moving and not limits.known:
        st.text("No plan was made in this run yet: these are the guards' default limits.")
    drain = OperatorCommand(what=OperatorCommandKind.DRAIN, on=node)
    form(r, person, f"drain:{node}", {"Drain": drain}, confirm=node)
    as_commands(r, person, drain)


def _replica(r: Reader, person: Viewer, state: State) -> None:
    st.subheader("A replica by hand")
    names = [str(v.replica) for v in state.fleet.replicas]
    if not names:
        st.text("The journal names no replica.")
        return
    with st.expander("Replace a replica"):
        chosen = st.selectbox("Replica", names, key="acting.replica")
        view = state.fleet.find(chosen)
        if view is not None:
            st.text(plain(f"{chosen}#{view.incarnation} is {view.state or 'not there'} on {view.node}"))
        ask = OperatorCommand(what=OperatorCommandKind.REPLACE, on=chosen)
        form(r, person, f"replace:{chosen}", {"Replace": ask})
        as_commands(r, person, ask)


def _history(deeds: Sequence[CommandLogEntry]) -> None:
    st.subheader("Who did what")
    if not deeds:
        st.text("Nobody has said anything yet.")
        return
    rows = deeds[:HISTORY_SHOWN]
    st.dataframe(
        {
            "when (UTC)": [datetime.fromtimestamp(d.at, UTC) for d in rows],
            "who": [plain(d.by) for d in rows],
            "what": [d.what for d in rows],
            "on": [plain(d.on) for d in rows],
            "why": [plain(d.because) for d in rows],
        },
        hide_index=True,
        width="stretch",
        column_config={"when (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss")},
    )
    if len(deeds) > HISTORY_SHOWN:
        st.text(f"and {len(deeds) - HISTORY_SHOWN} before that")
