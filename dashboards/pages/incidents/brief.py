"""The first screen of an incident's page: what, where, why, what was done, whether it is over, and its cost; the same
as Markdown for a ticket; links to Grafana and logs. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from rolecall.core.ids import role_of
from rolecall.core.text import counted, plain, seconds, utc
from rolecall.dashboards.data.incident_titles import GLYPHS, severity, title
from rolecall.dashboards.data.run_state import KIND_OF
from rolecall.dashboards.pages.incidents.cache import IncidentCost, IncidentPageModel
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.dashboards.pages.incidents.view import Facts
from rolecall.dashboards.pages.status import NOT_YET_KNOWN, doing
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents import Incident

WHO_SHOWN = 4
LINK_SECONDS = 300.0
"""Time before the onset and after the close (of an open incident: the opening) that links to logs and Grafana show."""
REPLICA_BOARD = "rolecall-replica"
"""UID of the Grafana dashboard of one replica (dashboards/grafana/board.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentBrief:
    kind: str  # bad, warn, note or good
    glyph: str
    title: str
    tags: tuple[str, ...]
    soft: str
    because: str
    rows: Facts


def brief(whole: IncidentPageModel, step: int | None, similar: Sequence[Incident]) -> IncidentBrief:
    """`step`: that the fault hit (`run_state.step_of`)."""
    head, incident = whole.head, whole.material.incident
    if incident is None:
        return IncidentBrief(
            kind="warn", glyph=head.glyph, title="Incident set aside", tags=(head.status,), soft=head.incident_id,
            because=head.sentence, rows=(("is it over", head.state),),
        )  # fmt: skip
    level = severity(incident)
    facts = dict(head.facts)
    newest = f", the newest {similar[0].incident_id} at {utc(similar[0].opened_at)}" if similar else ""
    rows = (
        ("where", _where(head.who)),
        ("action", _done(whole)),
        ("is it over", head.state),
        ("cost", cost_words(whole.cost)),
        ("onset", f"{facts.get('Onset', '')}, {facts.get('Found', '')}, by detector {facts.get('Detected by', '')}"),
        ("confidence", f"{facts.get('Confidence', '')}, class {facts.get('Fault class', '')}"),
        ("slowdown", facts.get("Slowdown compared with peers", "")),
        ("injected fault", head.injected),
        ("review", facts.get("Review", "")),
        ("earlier here", f"{len(similar)} on this node{newest}" if similar else ""),
    )
    over = incident.closed_at is not None
    return IncidentBrief(
        kind="good" if over else KIND_OF[level],
        glyph=head.glyph if over else GLYPHS[level],
        title=title(incident, step),
        tags=(str(level), head.status),
        soft=head.incident_id,
        because=head.sentence,
        rows=tuple((label, text) for label, text in rows if text),
    )


def _where(who: Sequence[str]) -> str:
    if not who:
        return "the whole job: no suspect is named"
    more = f" and {len(who) - WHO_SHOWN} more" if who[WHO_SHOWN:] else ""
    return "; ".join(who[:WHO_SHOWN]) + more


def _done(whole: IncidentPageModel) -> str:
    material = whole.material
    if material.incident is not None and material.is_open:
        return doing(material.incident, material.mode, material.now, ended=material.ended_at is not None)
    if not whole.plan_sections:
        return "no plan was made"
    last = whole.plan_sections[-1]
    attempts = f" at attempt {last.number}" if last.number > 1 else ""
    return f"{last.title}: {last.outcome}{attempts}"


def cost_words(cost: IncidentCost | None) -> str:
    if cost is None:
        return ""
    if not cost.how and not cost.is_final:
        return NOT_YET_KNOWN
    parts = [
        f"{cost.replica_seconds:,.1f} replica-seconds" if cost.replica_seconds else "",
        f"{cost.gpu_seconds:,.1f} GPU-seconds" if cost.gpu_seconds else "",
        f"{counted(cost.steps_interrupted, 'step')} interrupted" if cost.steps_interrupted else "",
        f"{counted(cost.steps_undone, 'step')} rolled back" if cost.steps_undone else "",
        f"{cost.tokens_lost:,} tokens lost" if cost.tokens_lost else "",
        f"{cost.tokens_kept:,} tokens kept" if cost.tokens_kept else "",
    ]
    found = ", ".join(p for p in parts if p)
    return f"{found}{'' if cost.is_final else ' so far'}" if found else ""


def similar_before(incident: Incident | None, incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """Earlier incidents on the nodes of this one, the newest first."""
    if incident is None:
        return ()
    nodes = {str(s.node) for s in incident.suspects if s.node}
    found = [
        i for i in incidents if i.opened_at < incident.opened_at and nodes & {str(s.node) for s in i.diagnosis.suspects}
    ]
    return tuple(sorted(found, key=lambda i: -i.opened_at))


def markdown(found: IncidentBrief, run: str) -> str:
    """For a ticket. The reader's tool renders it, so it is only text here."""
    lines = [f"## {found.title}", "", f"Run {run}, incident {found.soft}: {', '.join(found.tags)}.", ""]
    lines += [f"> {found.because}", "", *(f"- **{label}**: {text}" for label, text in found.rows), ""]
    lines += [f"Replay: `rolecall replay {found.soft} --run {run}`"]
    return "\n".join(plain(line) for line in lines)


def links(settings: Settings, material: IncidentPageInputs) -> tuple[tuple[str, str], ...]:
    """(label, URL) of Grafana and of the logs at the time of the incident, where they are configured."""
    incident = material.incident
    if incident is None:
        return ()
    first = incident.first_diagnosis
    begin = first.onset - LINK_SECONDS
    end = max(first.onset, incident.opened_at if incident.closed_at is None else incident.closed_at) + LINK_SECONDS
    end = min(end, material.now)
    suspect = incident.diagnosis.suspects[0] if incident.diagnosis.suspects else None
    node, replica = (str(suspect.node), suspect.replica) if suspect else ("", "")
    found = []
    if settings.grafana_url:
        query = {"from": f"{begin * 1000:.0f}", "to": f"{end * 1000:.0f}", "var-run": settings.run_id}
        query |= {"var-role": role_of(replica), "var-replica": replica} if replica else {}
        found.append(("Grafana", f"{settings.grafana_url.rstrip('/')}/d/{REPLICA_BOARD}?{urlencode(query)}"))
    if settings.logs_url:
        values = {"node": node, "replica": replica, "start": utc(begin, _ISO), "end": utc(end, _ISO)}
        url = settings.logs_url
        for name, value in values.items():
            url = url.replace(f"{{{name}}}", quote(value, safe=""))
        found.append(("Logs", url))
    return tuple(found)


_ISO = "%Y-%m-%dT%H:%M:%SZ"


def age_of(incident: Incident, of: Incident) -> str:
    return f"{seconds(of.opened_at - incident.opened_at)} before"
