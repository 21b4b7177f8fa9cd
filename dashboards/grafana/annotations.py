"""Incidents as Grafana annotations: a region from detection to close, identified by its tags.

Repeated runs write one annotation per incident: the tags `run:RUN` and `incident:ID` identify it. An open incident is a
point and becomes a region when it closes. Annotations that are up to date are not written again. Grafana renders the
text as HTML, and diagnoses can quote logs, so the text is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rolecall.core.errors import CommandRefused
from rolecall.core.text import escape, plain
from rolecall.dashboards.grafana.push import PushResult
from rolecall.dashboards.grafana.server import GrafanaRefused, Json, Server

TAG = "rolecall"
EPISODES_MAX = 1000
"""Number of incidents of a run that are annotated, the newest ones. More would hide the graph."""
FOUND_MAX = 5000
"""Number of existing annotations of a run that are read. With more, duplicates could not be excluded: an error."""
TEXT_MAX = 500
TAG_MAX = 90
MILLISECONDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentAnnotation:
    """An incident on a graph. Times are wall seconds."""

    incident_id: str
    role: str  # "": none
    fault: str
    sentence: str
    opened_at: float
    closed_at: float | None = None
    outcome: str = ""


def annotation(run_id: str, episode: IncidentAnnotation) -> Json:
    """The desired annotation of an incident."""
    tags = [TAG, f"run:{run_id}", f"incident:{episode.incident_id}", f"fault:{episode.fault}"]
    tags += [f"role:{episode.role}"] if episode.role else []
    start = round(episode.opened_at * MILLISECONDS)
    end = start if episode.closed_at is None else max(start, round(episode.closed_at * MILLISECONDS))
    state = f" ({episode.outcome})" if episode.outcome else " (open)" if episode.closed_at is None else ""
    return {
        "time": start,
        "timeEnd": end,
        "tags": [plain(t, TAG_MAX) for t in tags],
        "text": escape(plain(episode.sentence, TEXT_MAX) + state),
    }


def annotate(
    server: Server,
    run_id: str,
    episodes: Sequence[IncidentAnnotation],
    *,
    episodes_max: int = EPISODES_MAX,
    found_max: int = FOUND_MAX,
) -> PushResult:
    """Creates and updates annotations; reports the result for each incident.

    Raises:
        GrafanaRefused: the server does not respond as expected; nothing was written.
        CommandRefused: the server has too many annotations of this run.
    """
    there = _there(server, run_id, found_max)
    done = PushResult()
    newest = sorted(episodes, key=lambda e: e.opened_at)[-episodes_max:]
    if len(newest) < len(episodes):
        done.done.append(
            f"left out   {len(episodes) - len(newest)} older incidents: only the newest {episodes_max} are annotated"
        )
    for episode in newest:
        wanted = annotation(run_id, episode)
        name = plain(episode.incident_id, TAG_MAX)
        try:
            done.done.append(f"{_put(server, there.get(_incident(wanted)), wanted):<9}  {name}")
        except GrafanaRefused as e:
            done.failed.append(f"failed     {name}: {e}")
            if not e.status:
                rest = len(newest) - newest.index(episode) - 1
                done.failed.append(
                    f"not tried  {rest} more; run it again, existing annotations are found by their tags"
                )
                break
    return done


def _there(server: Server, run_id: str, found_max: int) -> dict[str, Json]:
    """Annotations of the run by incident tag; of duplicates the oldest."""
    tags = [quote(plain(t, TAG_MAX), safe="") for t in (TAG, f"run:{run_id}")]
    found = server.listing(lambda g: g.annotations.find_annotations(tags=tags, ann_type="annotation", limit=found_max))
    if len(found) >= found_max:
        raise CommandRefused(f"{server.where} has {found_max} or more annotations of {run_id}: delete old ones first")
    known = [one for one in found if isinstance(one.get("id"), int) and _incident(one)]
    return {_incident(one): one for one in sorted(known, key=lambda one: -int(one["id"]))}


def _incident(one: Mapping[str, Any]) -> str:
    tags: Iterable[Any] = one.get("tags") or ()
    return next((t for t in tags if isinstance(t, str) and t.startswith("incident:")), "")


def _put(server: Server, before: Json | None, wanted: Json) -> str:
    if before is None:
        server.mapping(
            lambda g: g.annotations.add_annotation(
                time_from=wanted["time"], time_to=wanted["timeEnd"], tags=wanted["tags"], text=wanted["text"]
            )
        )
        return "created"
    same = all(before.get(k) == wanted[k] for k in ("time", "timeEnd", "text"))
    if same and set(before["tags"]) == set(wanted["tags"]):
        return "unchanged"
    server.mapping(
        lambda g: g.annotations.partial_update_annotation(
            before["id"],
            time_from=wanted["time"],
            time_to=wanted["timeEnd"],
            tags=wanted["tags"],
            text=wanted["text"],
        )
    )
    return "updated"
