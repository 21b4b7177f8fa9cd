"""`rolecall status` and `rolecall incidents`: the values of `recovery/operators/queries.py` as text. Pure.

`now` is wall seconds; `name` names the run in a command line (`RunDir.shell_name`), so that each hint can be run as it
is printed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rolecall.core.diagnosis import Plan
from rolecall.core.ids import role_of
from rolecall.core.journal.events import EventKind
from rolecall.core.text import ago, counted, in_words, past, utc
from rolecall.detector.base.findings import LOG_FILE
from rolecall.recovery.guards import MODE
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.notifications.outbox import notification_text
from rolecall.recovery.operators.queries import WatchState, event_text
from rolecall.terminal.console import BAD, GOOD, PLAIN, SOFT, STRONG, WARN, Indented, Rows, aligned
from rolecall.views.observed_ranks import SILENT_SECONDS

REPLICAS_SHOWN_MAX = 40
"""Of a larger fleet each role is one line, and only replicas that do not serve are listed."""
JOBS_SHOWN_MAX, REPLICAS_NAMED_MAX = 8, 4
SERVING = ("serving", "ready")
OBSERVE = "observe"
_REPLICA_STYLES = {"serving": GOOD, "ready": GOOD, "starting": WARN, "lost": BAD, "stopped": SOFT}
_OUTCOME_STYLES = {IncidentOutcome.RESOLVED: GOOD, IncidentOutcome.SELF_RECOVERED: GOOD}


def _text(*pieces: str | tuple[str, str]) -> Text:
    """Pieces with their styles. A piece is one line, whatever it holds."""
    parts = [(p, PLAIN) if isinstance(p, str) else p for p in pieces]
    return Text.assemble(*((notification_text(text), style) for text, style in parts))


def status(value: Mapping[str, Any], now: float, name: str, start: str = "") -> RenderableType:
    """What is wrong first, then who leads recovery, then the replicas. `start`: the command that starts a watch, where
    it is not that of a run of rolecall."""
    incidents: Sequence[Mapping[str, Any]] = value["open_incidents"]
    parts: list[RenderableType] = [Indented(_head(value, now))]
    if value["paused"] is not None:
        parts.append(Indented(_text(("PAUSED", WARN), f": {value['paused']}")))
    if value["stopping"] is not None:
        parts.append(Indented(_text(("STOPPING", WARN), f": {value['stopping']}")))
    parts += _incidents(incidents, now, name)
    parts += [Indented(_text(("SET ASIDE", WARN), f": {n}: {why}")) for n, why in value["broken_incidents"].items()]
    parts += [
        Indented(_text(("QUARANTINED", WARN), f": {n}, by {why}")) for n, why in value["quarantined_nodes"].items()
    ]
    parts.append(Indented(_leader(value, now, start or f"rolecall watch run {name}")))
    if value["mode"] != OBSERVE:
        parts.append(_text(f"evictions in the last hour: {value['evictions_last_hour']}"))
    if (progress := value.get("progress")) is not None:
        parts += _progress(progress, value.get("num_steps"))
    if (evaluated := value.get("evaluation")) is not None:
        reward = "not scored" if evaluated["reward"] is None else f"{evaluated['reward']:.3f}"
        parts.append(_text(f"held-out reward at step {evaluated['step']}: {reward} ({evaluated['prompts']} prompts)"))
    parts += _replicas(value["replicas"], now)
    parts += _ranks(value.get("ranks", ()), now)
    return Group(*parts)


def _head(value: Mapping[str, Any], now: float) -> Text:
    incidents, ended = value["open_incidents"], value["ended"]
    head = _text("run ", (value["run"], STRONG), ": ")
    if ended is not None:
        at = f" {ago(value['ended_at'], now)}" if value["ended_at"] is not None else ""
        head += _text(f"ended{at}: {ended}")
    elif value["started_at"] is not None:
        mode = value.get("run_mode") or "async"
        head += _text(f"started {ago(value['started_at'], now)}", f", mode {mode}" if mode != "async" else "")
    else:
        head += _text("watched")
    number = (f"{counted(len(incidents), 'open incident')}", BAD) if incidents else ("no open incident", GOOD)
    return head + _text("; ", number)


def _progress(progress: Mapping[str, Any], num_steps: int | None) -> list[Text]:
    steps, reward, data = progress["steps"], progress["reward"], progress["dataset"]
    # A run goes on while an incident is open.
    of = "" if not num_steps else f" of {num_steps:,}" if steps <= num_steps else f", {num_steps:,} were asked for"
    lines = [_text(f"steps committed: {steps:,}{of}", f"; reward {reward:.3f}" if reward is not None else "")]
    if data is not None:
        dropped = ", ".join(f"{num:,} {reason}" for reason, num in sorted(data["dropped"].items()))
        seen = f"epoch {data['epoch'] + 1}, {data['epoch_share']:.0%} of its {data['rows']:,} rows"
        lines.append(_text(f"dataset: {seen}; groups dropped: {dropped or 'none'}"))
    return lines


def _leader(value: Mapping[str, Any], now: float, command: str) -> Text:
    mode = f"recovery: mode {value['mode']}, " if value["mode"] else "recovery: "
    if value.get("orphans_mode") not in (None, value["mode"]):
        mode += f"orphans in mode {value['orphans_mode']}, "
    start = f"start one: {command}"
    match value["watch_state"]:
        case WatchState.LEADS:
            return _text(mode, f"led by watch {value['watch']['holder']} (fencing number {value['watch']['fence']})")
        case _ if value["ended"] is not None:
            return _text(mode, "ended with the run")
        case WatchState.LOST:
            lost = value["lost_watch"]
            return _text(
                mode,
                ("NO WATCH IS RUNNING", BAD),
                f": the lease of {lost['holder']} expired {ago(lost['expired_at'], now)}; {start}",
            )
        case WatchState.STOPPED:
            return _text(mode, ("no watch is running", WARN), f": the last one was stopped; {start}")
        case _:
            return _text(mode, ("no watch has led yet", WARN), f"; {start}")


def _replicas(replicas: Sequence[Mapping[str, Any]], now: float) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if len(replicas) > REPLICAS_SHOWN_MAX:
        roles: dict[str, list[bool]] = {}
        for r in replicas:
            roles.setdefault(role_of(r["replica"]), []).append(r["state"] in SERVING)
        lines += aligned(
            (_text(role), _text(f"{sum(all_):,} of {len(all_):,} serving")) for role, all_ in roles.items()
        )
        replicas = [r for r in replicas if r["state"] not in SERVING]
    rows = [
        _lender(r, now)
        if r.get("lent") is not None
        else (
            _text(f"{r['replica']}#{r['incarnation']}"),
            _text((r["state"] or "not started", _REPLICA_STYLES.get(r["state"], WARN))),
            _text(str(r["node"]), f" with {r['partner']}" if r.get("partner") else ""),
            _text((ago(r["since"], now) if r["since"] else "", SOFT))
            if r["incarnation"] == r["desired_incarnation"]
            else _text((f"to be replaced by #{r['desired_incarnation']}", WARN)),
        )
        for r in replicas
    ]
    return [*lines, Rows(rows)]


def _lender(r: Mapping[str, Any], now: float) -> tuple[Text, Text, Text, Text]:
    lent = r["lent"]
    where = f"{lent['node']} to {lent['to']}" if lent else ""
    since = (ago(lent["since"], now), SOFT) if lent else ""
    return _text(f"{r['replica']}#{r['incarnation']}"), _text(("lent its node", WARN)), _text(where), _text(since)


def _jobs(ranks: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Whose ranks these are: `job 4711 (launcher pid 41): trainer/0`."""
    jobs: dict[str, list[Mapping[str, Any]]] = {}
    for r in ranks:
        if r.get("job"):
            jobs.setdefault(r["job"], []).append(r)
    lines = list[RenderableType]()
    for job, of_job in list(jobs.items())[:JOBS_SHOWN_MAX]:
        launchers = {r["launcher_pid"] for r in of_job} - {0}
        launcher = f" (launcher pid {min(launchers)})" if len(launchers) == 1 else ""
        replicas = list(dict.fromkeys(r["replica"] for r in of_job))
        more = f" and {len(replicas) - REPLICAS_NAMED_MAX:,} more" if len(replicas) > REPLICAS_NAMED_MAX else ""
        lines.append(Indented(_text(f"job {job}{launcher}: {', '.join(replicas[:REPLICAS_NAMED_MAX])}{more}"), 2, 4))
    if len(jobs) > JOBS_SHOWN_MAX:
        lines.append(_text(f"  and {counted(len(jobs) - JOBS_SHOWN_MAX, 'more job')}"))
    return lines


def _ranks(ranks: Sequence[Mapping[str, Any]], now: float) -> list[RenderableType]:
    """Of a job that rolecall only watches."""
    if len(ranks) > REPLICAS_SHOWN_MAX:
        alive = sum(r["is_alive"] and now - r["seen_at"] <= SILENT_SECONDS for r in ranks)
        return [*_jobs(ranks), _text(f"  {len(ranks):,} ranks, {alive:,} alive; --json lists them")]
    rows = [
        (
            _text(f"{r['replica']} rank {r['rank']}"),
            _text(f"pid {r['pid']}"),
            _text(r["node"]),
            _text(_doing(r, now)),
            _text(f"step {r['step']}" if r["step"] >= 0 else ""),
            _text((f"last progress {ago(r['progress_at'], now)}" if r["progress_at"] else "", SOFT)),
        )
        for r in ranks
    ]
    return [*_jobs(ranks), Rows(rows)]


def _doing(rank: Mapping[str, Any], now: float) -> str | tuple[str, str]:
    if not rank["is_alive"]:
        return "exited", SOFT
    if now - rank["seen_at"] > SILENT_SECONDS:
        return f"last seen {ago(rank['seen_at'], now)}", WARN
    return f"phase {rank['phase']}" if rank["phase"] else "running"


def incidents(value: Sequence[Mapping[str, Any]], now: float, name: str) -> RenderableType:
    """Every incident, and all that is known of one whose value has its events: evidence first, then what happened."""
    if not value:
        return _text(("no incidents", GOOD))
    parts = list[RenderableType]()
    for incident in value:
        parts += _incidents([incident], now, name)
        evidence = incident.get("diagnosis", {}).get("evidence", ())
        parts += [Indented(_text(("evidence: ", SOFT), _evidence_text(e)), 2, 4) for e in evidence]
        events = incident.get("events", ())
        for body in (e["body"] for e in events if e["kind"] == EventKind.EVIDENCE_COLLECTED):
            missing = [f"not collected: {text}" for text in body.get("missing", ())]
            files = [f["name"] for f in body.get("files", ())]
            parts += [Indented(_text(t), 4, 6) for t in (*body.get("statements", ()), *missing, *files)]
        said = [incident["because"]] if events else []
        for event in events:
            at = utc(event["wall_at"], "%H:%M:%S UTC")
            parts.append(Indented(_text((f"e{event['seq']}  {at}  ", SOFT), _once(event_text(event), said)), 2, 6))
            said.append(event["body"].get("diagnosis", {}).get("because") or incident["because"])
    return Group(*parts)


def _evidence_text(evidence: Mapping[str, Any]) -> str:
    return f"its standard error: {evidence['text']}" if evidence["kind"] == LOG_FILE else str(evidence["text"])


def _once(text: str, said: Iterable[str]) -> str:
    """`text` with `…` for each diagnosis that was printed before."""
    for because in sorted(filter(None, said), key=len, reverse=True):
        text = text.replace(because, "…")
    return text


def _incidents(found: Iterable[Mapping[str, Any]], now: float, name: str) -> list[RenderableType]:
    parts = list[RenderableType]()

    def add(*pieces: str | tuple[str, str]) -> None:
        parts.append(Indented(_text(*pieces), 2, 4))

    for incident in found:
        outcome = incident["outcome"]
        would, to_do = incident.get("would"), incident.get("to_do")
        current = "open" if would or to_do else incident["state"]
        state = "SET ASIDE" if incident["set_aside"] else in_words(outcome or current)
        style = BAD if outcome is None else _OUTCOME_STYLES.get(outcome, WARN)
        because = incident["set_aside"] or (incident["because"] if outcome is None else past(incident["because"]))
        parts.append(Indented(_text((incident["incident_id"], STRONG), " ", (state, style), f": {because}")))
        for earlier in incident.get("before", ()):
            add(("before that", SOFT), f": {past(earlier['because'])}")
        closed = f"; closed {ago(incident['closed_at'], now)}" if incident["closed_at"] is not None else ""
        add((f"opened {ago(incident['opened_at'], now)}{closed}", SOFT))
        if durations := incident.get("durations"):
            add((durations["text"], SOFT))
        if would:
            add(("only observed", WARN), f": in mode act rolecall would {would}")
        if to_do and outcome is None:
            add(("what to do", WARN), f": {to_do}")
        elif to_do:
            add((f"rolecall took no action; closed: {incident['closed_because']}", SOFT))
        if incident["plan"] and MODE not in incident["held_by"]:
            digest = incident["plan"]["digest"]
            add(f"{Plan.from_dict(incident['plan']).words} (plan {digest}, attempt {incident['num_attempts']})")
            if incident["held_by"] and outcome is None:
                guards = in_words(", ".join(incident["held_by"]))
                add(("blocked", WARN), f" ({guards}): {'; '.join(incident['held_because'])}")
            for hit in incident["plan"]["also_hit"]:
                add(f"also: {hit}")
        if (hold := incident["hold"]) and not hold["lifted"] and outcome is None:
            add(("on hold", WARN), f" by {hold['by']} until {hold['until_text']}: {hold['because']}")
        if review := incident["review"]:
            reason = f": {review['because']}" if review["because"] else ""
            add(f"diagnosis reviewed as {review['verdict']} by {review['by']}{reason}")
        if incident["page"] and outcome is None:
            # Most reasons begin with the diagnosis; that of a watched job ends with what rolecall would do.
            rest = "" if would or to_do else incident["page_reason"].removeprefix(because).removeprefix("; ")
            done, comma, why = incident["page"].partition(",")
            add((done.upper(), WARN), f"{comma}{why}", f": {rest}" if rest else "")
        if incident["state"] == IncidentState.PROPOSED:
            digest = incident["plan"]["digest"]
            add(("awaiting approval", WARN), f": rolecall approve {digest} --run {name}")
            add(f'or: rolecall reject {digest} --run {name} --reason "why"')
    return parts
