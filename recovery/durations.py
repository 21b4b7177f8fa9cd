"""How long an incident took, by the clock that each duration counts from. Pure.

Report, pages, command line and terminal show these numbers and no others, each with its clock (docs/glossary.md, Clocks
of an incident). The fault's time is known only from the injector's log, that of serving only from the run's events.
"""

from dataclasses import dataclass

from rolecall.core.text import seconds
from rolecall.recovery.incidents import Incident

SECONDS_SHOWN_MIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentDurations:
    """Seconds, to the millisecond; None: it did not happen or is not known."""

    fault_to_finding: float | None
    onset_to_finding: float | None  # None of an operator's request, which has no onset
    finding_to_serving: float | None
    finding_to_verified: float | None
    opening_to_close: float | None
    open_seconds: float  # opening to close; to now while it is open

    @property
    def found_words(self) -> str:
        """`found 2.31 s after the fault, 1.10 s after the onset`; empty if neither time is known."""
        clocks = (("fault", self.fault_to_finding), ("onset", self.onset_to_finding))
        known = [f"{_short(value)} after the {clock}" for clock, value in clocks if value is not None]
        return f"found {', '.join(known)}" if known else ""

    @property
    def end_words(self) -> str:
        """`verified 9.80 s after the finding`, `closed 3.10 s after the opening` or `open for 35.0 s`."""
        if self.finding_to_verified is not None:
            return f"verified {_short(self.finding_to_verified)} after the finding"
        if self.opening_to_close is not None:
            return f"closed {_short(self.opening_to_close)} after the opening"
        return f"open for {seconds(self.open_seconds)}"

    @property
    def words(self) -> str:
        """All of them, in order of time."""
        serving = self.finding_to_serving
        again = "" if serving is None else f"serving again {_short(serving)} after the finding"
        return ", ".join(part for part in (self.found_words, again, self.end_words) if part)


def _short(value: float) -> str:
    return seconds(value) if value >= SECONDS_SHOWN_MIN else f"less than {SECONDS_SHOWN_MIN} s"


def durations(
    incident: Incident, now: float, *, fault_at: float | None = None, serving_at: float | None = None
) -> IncidentDurations:
    """`now`, `fault_at`, `serving_at`: wall seconds.

    Onset and finding are those of the first diagnosis: a newer one only knows more about the fault.
    """
    first = incident.first_diagnosis
    found_at, closed_at = first.detected_at, incident.closed_at

    def between(since: float, until: float | None) -> float | None:
        return None if until is None else round(max(0.0, until - since), 3)

    return IncidentDurations(
        fault_to_finding=None if fault_at is None else between(fault_at, found_at),
        onset_to_finding=None if incident.requested_by_operator else between(first.onset, found_at),
        finding_to_serving=between(found_at, serving_at),
        finding_to_verified=between(found_at, incident.verified_at),
        opening_to_close=between(incident.opened_at, closed_at),
        open_seconds=round(max(0.0, (now if closed_at is None else closed_at) - incident.opened_at), 3),
    )
