"""Pushes dashboards to a Grafana server: checks all of them first and writes only if there is no problem.

    missing                                       -> created
    up to date                                    -> unchanged: not written, its version stays
    differs, latest version written by a push     -> updated, based on exactly that version
    differs, latest version written by a user     -> conflict: reported, nothing is written, unless `overwrite`

All problems are reported at once. A write names the version that was checked, so the server rejects it (412) if someone
edited the dashboard in between. Alert rules are not pushed: Prometheus loads them (`rolecall grafana export`).

Incidents are written as annotations: a region from detection to close. Repeated runs write one annotation per incident:
the tags `run:RUN` and `incident:ID` identify it. An open incident is a point and becomes a region when it closes.
Annotations that are up to date are not written again. Grafana renders the text as HTML, and diagnoses can quote logs,
so the text is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from rolecall.core.errors import CommandRefused, RolecallError
from rolecall.core.text import counted, escape, plain
from rolecall.dashboards.grafana.board import TAG
from rolecall.dashboards.grafana.server import GrafanaRefused, Json, Server
from rolecall.recovery.incidents import Incident

MESSAGE = "rolecall grafana push"
"""Message of each version that a push writes; it distinguishes them from versions that users saved."""
UID_MAX = 40
NAMES_SHOWN_MAX = 20
FOLDERS_MAX = 1000
"""Page size of Grafana's folder list. With more folders a duplicate could be created: an error."""
CONFLICT = 412


class DashboardChangeKind(StrEnum):
    CREATE = "created"
    UPDATE = "updated"
    UNCHANGED = "unchanged"


class PushRejected(RolecallError):
    """All problems that prevent the push; nothing was written."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {p}" for p in problems)
        super().__init__(f"nothing was written, {counted(len(problems), 'problem')}\n{lines}")


@dataclass(frozen=True, slots=True)
class DashboardChange:
    """The change of one dashboard. `body` is the desired dashboard, with the version that was checked."""

    verdict: DashboardChangeKind
    body: Json
    because: str = ""

    @property
    def uid(self) -> str:
        return str(self.body["uid"])

    @property
    def title(self) -> str:
        return str(self.body["title"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    folder: str
    folder_uid: str | None  # None: create it. "": top level
    changes: tuple[DashboardChange, ...]
    overwrite: bool = False

    @property
    def writes(self) -> tuple[DashboardChange, ...]:
        return tuple(c for c in self.changes if c.verdict is not DashboardChangeKind.UNCHANGED)


@dataclass(slots=True)
class PushResult:
    """Results, a line each; `failed` is empty on success."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def plan(
    server: Server, dashboards: Sequence[Mapping[str, Any]], *, folder: str, datasource: str, overwrite: bool = False
) -> PushPlan:
    """Checks everything and writes nothing. `folder` "": top level. `datasource` "": each viewer chooses.

    Raises:
        PushRejected: all problems that were found.
        GrafanaRefused: the server is not usable.
    """
    # Needs no token: distinguishes a wrong address from a wrong token.
    server.mapping(lambda g: g.client.GET("/health"))
    problems: list[str] = []
    folder_uid = _folder_uid(server, folder)
    source = None
    try:
        source = _source(server, datasource) if datasource else None
    except PushRejected as e:
        problems += e.problems
    changes = []
    for one in dashboards:
        try:
            changes.append(_change(server, _ready(one, source), folder_uid, overwrite))
        except PushRejected as e:
            problems += e.problems
        except GrafanaRefused as e:
            if e.status in (0, 401):  # the same would happen for every other dashboard
                raise
            problems.append(f"{plain(one.get('uid'), UID_MAX)}: {e}")
    uids = [c.uid for c in changes]
    problems += [f"{uid}: two dashboards have this uid" for uid in sorted({u for u in uids if uids.count(u) > 1})]
    if problems:
        raise PushRejected(problems)
    return PushPlan(folder=folder, folder_uid=folder_uid, changes=tuple(changes), overwrite=overwrite)


def push(server: Server, wanted: PushPlan) -> PushResult:
    """Executes the plan and reports the result for each dashboard. Server errors are reported, not raised."""
    pushed = PushResult()
    folder_uid = wanted.folder_uid
    if folder_uid is None and wanted.writes:
        try:
            folder_uid = _uid(server.mapping(lambda g: g.folder.create_folder(wanted.folder)))
        except GrafanaRefused as e:
            pushed.failed.append(f"folder {plain(wanted.folder)!r} could not be created, no dashboard was written: {e}")
            return pushed
        pushed.done.append(f"created    folder {plain(wanted.folder)!r}")
    gone = ""
    for change in wanted.changes:
        name = f"{change.uid}  {plain(change.title, 100)}"
        if change.verdict is DashboardChangeKind.UNCHANGED:
            pushed.done.append(f"unchanged  {name}")
        elif gone:
            pushed.failed.append(f"not tried  {name}")
        else:
            try:
                version = _write(server, change, folder_uid or "", wanted.overwrite)
                pushed.done.append(f"{change.verdict:<9}  {name} (version {version})")
            except GrafanaRefused as e:
                gone = "" if e.status else str(e)
                doubt = "" if e.status else "; it may have been written: push again to check"
                pushed.failed.append(f"failed     {name}: {_error_text(server, change, e)}{doubt}")
    return pushed


def _folder_uid(server: Server, title: str) -> str | None:
    if not title:
        return ""
    found = server.listing(lambda g: g.client.GET(f"/folders?limit={FOLDERS_MAX}"))
    for one in found:
        if one.get("title") == title and one.get("uid"):
            return str(one["uid"])
    if len(found) >= FOLDERS_MAX:
        raise PushRejected(
            [f"--folder: {title!r} is not among the first {FOLDERS_MAX} folders, but may exist beyond them"]
        )
    return None


def _source(server: Server, name: str) -> Json:
    try:
        found = server.mapping(lambda g: g.datasource.get_datasource_by_name(quote(name, safe="")))
    except GrafanaRefused as e:
        if e.status != 404:
            raise
        there = [
            f"{plain(s.get('name'), 60)!r} ({plain(s.get('type'), 30)})"
            for s in server.listing(lambda g: g.datasource.list_datasources())
        ]
        shown = ", ".join(there[:NAMES_SHOWN_MAX]) or "none"
        raise PushRejected([f"--datasource: no data source {plain(name)!r}; available: {shown}"]) from None
    if found.get("type") != "prometheus":
        kind = plain(found.get("type"), 30)
        raise PushRejected(
            [f"--datasource: {plain(name)!r} is of type {kind!r}; the dashboards need a Prometheus data source"]
        )
    return {"text": name, "value": _uid(found), "selected": True}


def _ready(dashboard: Mapping[str, Any], source: Json | None) -> Json:
    """The dashboard as it will be written: without server-specific id, its variable set to the data source."""
    body = deepcopy(dict(dashboard))
    body.pop("id", None)
    body.pop("version", None)
    uid = body.get("uid")
    if not isinstance(uid, str) or not uid or len(uid) > UID_MAX or not body.get("title"):
        raise PushRejected(
            [f"{plain(uid, UID_MAX)!r}: a dashboard needs a title and a uid of 1 to {UID_MAX} characters"]
        )
    if source is not None:
        for variable in body.get("templating", {}).get("list", []):
            if variable.get("type") == "datasource" and variable.get("query") == "prometheus":
                variable["current"] = source
    return body


def _change(server: Server, body: Json, folder_uid: str | None, overwrite: bool) -> DashboardChange:
    uid = str(body["uid"])
    try:
        found = server.mapping(lambda g: g.dashboard.get_dashboard(quote(uid, safe="")))
    except GrafanaRefused as e:
        if e.status != 404:
            raise
        return DashboardChange(DashboardChangeKind.CREATE, body, "it does not exist")
    there, meta = found.get("dashboard"), found.get("meta")
    if not isinstance(there, dict) or not isinstance(meta, dict) or not isinstance(there.get("version"), int):
        raise PushRejected([f"{uid}: the server returned no dashboard with a version"])
    moved = folder_uid is None or (meta.get("folderUid") or "") != folder_uid
    if not moved and holds(there, body):
        return DashboardChange(DashboardChangeKind.UNCHANGED, body)
    if meta.get("provisioned"):
        raise PushRejected([f"{uid}: it is provisioned from a file on the server and can only be changed there"])
    if not overwrite and (who := _edited(server, uid)):
        raise PushRejected(
            [f"{uid}: {who}; --overwrite replaces that version (Grafana keeps it in the version history)"]
        )
    because = "it is in another folder" if moved else "it differs"
    return DashboardChange(DashboardChangeKind.UPDATE, {**body, "version": there["version"]}, because)


def holds(there: object, wanted: object) -> bool:
    """Whether `there` contains all of `wanted`, and lists are equally long. What a server adds to objects (ids,
    defaults of another release) is not a difference; otherwise every push would create a version."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(
            holds(there.get(k), v) if k in there else v is None for k, v in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(holds, there, wanted))
    return isinstance(there, bool) == isinstance(wanted, bool) and there == wanted


def _edited(server: Server, uid: str) -> str:
    """Who wrote the latest version, if it was not a push; otherwise ""."""
    path = f"/dashboards/uid/{quote(uid, safe='')}/versions?limit=1"
    found = server.answer(lambda g: g.client.GET(path))
    versions = found.get("versions") if isinstance(found, dict) else found  # an object since Grafana 11, a list before
    if not isinstance(versions, list) or not versions or not isinstance(versions[0], dict):
        return "the author of its latest version is unknown"
    newest = versions[0]
    if str(newest.get("message") or "").startswith(MESSAGE):
        return ""
    who, when = plain(newest.get("createdBy") or "someone", 60), plain(newest.get("created") or "an unknown time", 40)
    return f"{who} edited it at {when} (version {plain(newest.get('version'), 20)})"


def _write(server: Server, change: DashboardChange, folder_uid: str, overwrite: bool) -> int:
    sent = {"dashboard": change.body, "folderUid": folder_uid, "message": MESSAGE, "overwrite": overwrite}
    said = server.mapping(lambda g: g.dashboard.update_dashboard(sent))
    if said.get("status") != "success" or said.get("uid") != change.uid or not isinstance(said.get("version"), int):
        raise GrafanaRefused("the server did not confirm that it saved this dashboard")
    return int(said["version"])


def _error_text(server: Server, change: DashboardChange, error: GrafanaRefused) -> str:
    if error.status != CONFLICT or error.said.get("status") != "version-mismatch":
        return str(error)
    try:
        who = _edited(server, change.uid) or "another push wrote it"
    except GrafanaRefused:
        who = "someone edited it"
    return f"{who} after it was checked; that version was kept: push again"


def _uid(said: Json) -> str:
    if isinstance(uid := said.get("uid"), str) and uid:
        return uid
    raise GrafanaRefused("unexpected response: no uid")


INCIDENTS_MAX = 1000
"""Number of incidents of a run that are annotated, the newest ones. More would hide the graph."""
FOUND_MAX = 5000
"""Number of existing annotations of a run that are read. With more, duplicates could not be excluded: an error."""
TEXT_MAX = 500
TAG_MAX = 90
MILLISECONDS = 1000


def annotation(run_id: str, incident: Incident) -> Json:
    diagnosis = incident.diagnosis
    tags = [TAG, f"run:{run_id}", f"incident:{incident.incident_id}", f"fault:{diagnosis.fault_class}"]
    if diagnosis.suspects and diagnosis.suspects[0].role:
        tags.append(f"role:{diagnosis.suspects[0].role}")
    start = round(incident.opened_at * MILLISECONDS)
    end = start if incident.closed_at is None else max(start, round(incident.closed_at * MILLISECONDS))
    state = f" ({incident.outcome})" if incident.outcome else " (open)" if incident.closed_at is None else ""
    return {
        "time": start,
        "timeEnd": end,
        "tags": [plain(t, TAG_MAX) for t in tags],
        "text": escape(plain(diagnosis.because, TEXT_MAX) + state),
    }


def annotate(
    server: Server,
    run_id: str,
    incidents: Sequence[Incident],
    *,
    incidents_max: int = INCIDENTS_MAX,
    found_max: int = FOUND_MAX,
) -> PushResult:
    """Creates and updates annotations; reports the result for each incident.

    Raises:
        GrafanaRefused: the server does not respond as expected; nothing was written.
        CommandRefused: the server has too many annotations of this run.
    """
    there = _there(server, run_id, found_max)
    done = PushResult()
    newest = sorted(incidents, key=lambda e: e.opened_at)[-incidents_max:]
    if len(newest) < len(incidents):
        done.done.append(
            f"left out   {len(incidents) - len(newest)} older incidents: only the newest {incidents_max} are annotated"
        )
    for incident in newest:
        wanted = annotation(run_id, incident)
        name = plain(incident.incident_id, TAG_MAX)
        try:
            done.done.append(f"{_put(server, there.get(_incident_tag(wanted)), wanted):<9}  {name}")
        except GrafanaRefused as e:
            done.failed.append(f"failed     {name}: {e}")
            if not e.status:
                rest = len(newest) - newest.index(incident) - 1
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
    known = [one for one in found if isinstance(one.get("id"), int) and _incident_tag(one)]
    return {_incident_tag(one): one for one in sorted(known, key=lambda one: -int(one["id"]))}


def _incident_tag(one: Mapping[str, Any]) -> str:
    tags: Iterable[Any] = one.get("tags") or ()
    return next((t for t in tags if isinstance(t, str) and t.startswith("incident:")), "")


def _put(server: Server, before: Json | None, wanted: Json) -> str:
    sent = {
        "time_from": wanted["time"],
        "time_to": wanted["timeEnd"],
        "tags": wanted["tags"],
        "text": wanted["text"],
    }
    if before is None:
        server.mapping(lambda g: g.annotations.add_annotation(**sent))
        return "created"
    same = all(before.get(k) == wanted[k] for k in ("time", "timeEnd", "text"))
    if same and set(before["tags"]) == set(wanted["tags"]):
        return "unchanged"
    server.mapping(lambda g: g.annotations.partial_update_annotation(before["id"], **sent))
    return "updated"
