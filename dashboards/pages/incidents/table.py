"""The incident table: one row per incident, and filters that are stored in the URL. Pure, and fast for ten thousand.

`IncidentTable` rebuilds a row only when its incident has changed. Filtering is one pass over rows in memory, and a page
draws `PAGE_ROWS` of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

from rolecall.core.ids import split_replica
from rolecall.core.text import plain, utc
from rolecall.dashboards.data.incident_titles import GLYPHS as SEVERITY_GLYPHS
from rolecall.dashboards.data.incident_titles import severity, title
from rolecall.dashboards.pages.status import GLYPHS, SET_ASIDE, status_of
from rolecall.recovery.durations import durations
from rolecall.recovery.incidents import Incident, IncidentState

PAGE_ROWS = 50
"""Incidents per page of the table."""
TEXT_CHARS_MAX = 200
"""Longest filter value that is accepted."""
WITHIN_SECONDS: Mapping[str, float] = {"hour": 3600.0, "day": 86_400.0, "week": 7 * 86_400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTableRow:
    """One row. Times are wall seconds; texts are plain."""

    incident_id: str
    title: str = ""  # `trainer/1 hung`
    severity: str = ""  # with its glyph; empty: unknown
    status: str  # of `status.GLYPHS`
    is_open: bool = False
    who: str = "unknown"
    roles: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    fault_class: str = ""
    opened_at: float = 0.0
    closed_at: float | None = None
    found_seconds: float | None = None
    """Onset to finding."""
    verified_seconds: float | None = None
    """Finding to verified."""
    action: str = ""
    because: str
    review: str = ""  # right, wrong, or empty: not reviewed
    haystack: str = ""  # text that the search covers

    @property
    def glyph(self) -> str:
        return GLYPHS.get(self.status, "·")

    @property
    def words(self) -> str:
        return f"{self.glyph} {self.status.replace('_', ' ')}"

    def open_seconds(self, now: float) -> float:
        """Opening to close; to `now` while it is open."""
        return max(0.0, (self.closed_at if self.closed_at is not None else now) - self.opened_at)


def row_of(incident: Incident, set_aside: str = "", step: int | None = None) -> IncidentTableRow:
    """`set_aside`: why the incident is not handled further; empty: it is handled. `step`: that it hit. The status of
    an open incident depends on the time and is filled in by `IncidentTable`."""
    diagnosis, attempt = incident.diagnosis, incident.attempt
    names = [s.name for s in diagnosis.suspects]
    roles = {s.role or _role(s.replica) for s in diagnosis.suspects if s.role or s.replica}
    because, level = plain(set_aside or diagnosis.because), severity(incident)
    took = durations(incident, incident.opened_at)
    return _searchable(
        IncidentTableRow(
            incident_id=incident.incident_id,
            title=title(incident, step),
            severity=f"{SEVERITY_GLYPHS[level]} {level}",
            status=SET_ASIDE if set_aside else str(incident.outcome or incident.state),
            is_open=incident.state is not IncidentState.CLOSED and not set_aside,
            who=plain(", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""), 200) or "none",
            roles=tuple(sorted(plain(r, 60) for r in roles)),
            nodes=tuple(sorted({plain(s.node, 60) for s in diagnosis.suspects if s.node})),
            fault_class=str(diagnosis.fault_class),
            opened_at=incident.opened_at,
            closed_at=incident.closed_at,
            found_seconds=took.onset_to_finding,
            verified_seconds=took.finding_to_verified,
            action="" if attempt is None else str(attempt.plan.action),
            because=because,
            review="" if incident.review is None else "right" if incident.review.right else "wrong",
        )
    )


def broken_row(name: str, why: str) -> IncidentTableRow:
    """The row of an incident that cannot be read at all."""
    return _searchable(IncidentTableRow(incident_id=name, status=SET_ASIDE, because=plain(why)))


def _role(replica: str) -> str:
    try:
        return split_replica(replica)[0]
    except ValueError:
        return ""


def _searchable(row: IncidentTableRow) -> IncidentTableRow:
    words = (row.incident_id, row.status, row.who, *row.nodes, row.fault_class, row.action, row.because)
    return replace(row, haystack="\n".join(words).casefold())


@dataclass
class IncidentTable:
    """Cached rows by incident, rebuilt only for changed incidents. Owned by one page."""

    _made: dict[str, tuple[Incident, str, int | None, IncidentTableRow]] = field(default_factory=dict)

    def rows(
        self,
        incidents: Mapping[str, Incident],
        broken: Mapping[str, object],
        *,
        mode_of: Callable[[Incident], str] = lambda _: "",
        now: float = 0.0,
        step_of: Callable[[Incident], int | None] = lambda _: None,
        ended: bool = False,
    ) -> list[IncidentTableRow]:
        """All rows: open incidents first, then newest first. `mode_of`: mode of the watch. `ended`: the run has
        ended."""
        found = []
        for name, incident in list(incidents.items()):
            why = first_line(broken[name]) if name in broken else ""
            before, step = self._made.get(name), step_of(incident)
            if before is None or before[0] is not incident or before[1:3] != (why, step):
                before = self._made[name] = (incident, why, step, row_of(incident, why, step))
            row = before[3]
            if row.is_open:
                row = _searchable(replace(row, status=status_of(incident, mode_of(incident), now, ended=ended)))
            found.append(row)
        found += [broken_row(name, first_line(why)) for name, why in list(broken.items()) if name not in incidents]
        return sorted(found, key=lambda r: (not r.is_open, -r.opened_at, r.incident_id))


def first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The filters; the fields are URL parameters."""

    text: str = ""
    status: str = ""  # a status, or `open` for all open incidents
    role: str = ""
    fault: str = ""
    node: str = ""
    within: str = ""  # of WITHIN_SECONDS, before now
    day: str = ""  # 2026-11-22, in UTC
    review: str = ""  # right, wrong, none
    page: int = 1

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Self:
        """Invalid parameters are ignored: URLs are untrusted."""
        known = {f.name: str(query[f.name])[:TEXT_CHARS_MAX] for f in fields(cls) if f.name in query}
        page = known.pop("page", "1")
        number = int(page) if page.isascii() and page.isdecimal() and len(page) < 7 else 1
        if known.get("within") not in WITHIN_SECONDS:
            known.pop("within", None)
        return cls(page=max(1, number), **known)

    def to_query(self) -> dict[str, str]:
        """The non-default values."""
        empty = type(self)()
        return {f.name: str(v) for f in fields(self) if (v := getattr(self, f.name)) != getattr(empty, f.name)}

    def takes(self, row: IncidentTableRow, now: float) -> bool:
        return (
            (not self.status or self.status == row.status or (self.status == "open" and row.is_open))
            and (not self.role or self.role in row.roles)
            and (not self.fault or self.fault == row.fault_class)
            and (not self.node or self.node in row.nodes)
            and (not self.review or self.review == (row.review or "none"))
            and (not self.within or now - row.opened_at <= WITHIN_SECONDS[self.within])
            and (not self.day or day_of(row.opened_at) == self.day)
            and (not self.text or self.text.casefold() in row.haystack)
        )


DAY_SECONDS = 86400.0


def day_of(at: float) -> str:
    return utc(at)[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    statuses: tuple[str, ...]
    roles: tuple[str, ...]
    faults: tuple[str, ...]
    nodes: tuple[str, ...]
    days: tuple[str, ...]  # newest first


def choices(rows: Iterable[IncidentTableRow]) -> Choices:
    kept = list(rows)
    statuses = {r.status for r in kept}
    first = ("open",) if any(r.is_open for r in kept) else ()
    days = {int(r.opened_at // DAY_SECONDS) for r in kept if r.opened_at > 0}
    return Choices(
        statuses=(*first, *sorted(statuses - {"open"})),
        roles=tuple(sorted({role for r in kept for role in r.roles})),
        faults=tuple(sorted({r.fault_class for r in kept if r.fault_class})),
        nodes=tuple(sorted({node for r in kept for node in r.nodes})),
        days=tuple(day_of(n * DAY_SECONDS) for n in sorted(days, reverse=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTablePage:
    rows: tuple[IncidentTableRow, ...]
    num_found: int
    num_all: int
    page: int
    num_pages: int


def shown(rows: Sequence[IncidentTableRow], wanted: Filter, now: float) -> IncidentTablePage:
    found = [r for r in rows if wanted.takes(r, now)]
    num_pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(wanted.page, num_pages)
    begin = (page - 1) * PAGE_ROWS
    return IncidentTablePage(
        rows=tuple(found[begin : begin + PAGE_ROWS]),
        num_found=len(found),
        num_all=len(rows),
        page=page,
        num_pages=num_pages,
    )
