"""One incident has one set of durations: report, page, command line and terminal show the same numbers."""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentUpdated
from rolecall.core.rundir import RunDir
from rolecall.core.text import seconds
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs, read
from rolecall.dashboards.pages.incidents.table import row_of
from rolecall.dashboards.pages.incidents.timeline import incident_summary
from rolecall.dashboards.pages.incidents.view import head
from rolecall.recovery.operators import queries
from rolecall.recovery.operators.run_location import JournalLocation
from rolecall.recovery.projection import IncidentProjection
from rolecall.reports.html import render_html
from rolecall.reports.report import write_report
from rolecall.terminal.run import render, summary
from rolecall.views.snapshot import RunSnapshot, RunSnapshotProjection
from tests.dashboards.incident_cases import world_of
from tests.terminal.test_run import printed
from tests.terminal.texts import incidents_text, status_text

Numbers = Mapping[tuple[str, str], str]
"""(what happened, its clock) -> the duration, as shown."""

CLOCK = re.compile(
    r"(found|serving again|verified|closed)((?: [\d.]+ (?:s|min \d\d s) after the (?:fault|onset|finding|opening),?)+)"
)
ONE = re.compile(r"([\d.]+ (?:s|min \d\d s)) after the (\w+)")


def _numbers(text: str) -> Numbers:
    """The durations that a text names with their clocks. Raises if it shows two for one."""
    found: dict[tuple[str, str], str] = {}
    for what, clocks in CLOCK.findall(" ".join(text.split())):
        for number, clock in ONE.findall(clocks):
            assert found.setdefault((what, clock), number) == number, (what, clock)
    for number in re.findall(r"open for ([\d.]+ (?:s|min \d\d s))", " ".join(text.split())):
        assert found.setdefault(("open", "opening"), number) == number
    return found


def _agree(screens: Mapping[str, Numbers]) -> None:
    for name, numbers in screens.items():
        assert numbers, f"{name} shows no duration"
        for key, number in numbers.items():
            for other, theirs in screens.items():
                assert theirs.get(key, number) == number, f"{key}: {number} in {name}, {theirs[key]} in {other}"


def _page(journal: Journal, incident_id: str, run: RunDir | None, now: float) -> IncidentPageInputs:
    projection = IncidentProjection()
    projection.refresh(journal)
    return read(journal, projection, incident_id, run, now)


def _page_text(material: IncidentPageInputs) -> str:
    shown_head = head(material, incident_summary(material))
    return "; ".join([shown_head.state, shown_head.injected, *(value for _, value in shown_head.facts)])


def _snapshot(journal: Journal, now: float) -> RunSnapshot:
    memory, projection = RunSnapshotProjection(), IncidentProjection()
    memory.read(journal.events())
    projection.refresh(journal)
    return memory.snapshot(now, {}, {}, None, incidents=projection.incidents.values())


def test_closed_incidents_have_the_same_durations_on_every_screen(
    fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write_report(fake_run)
    page = re.sub(r"<[^>]+>", "\n", render_html(report))
    with closing(Journal(fake_run.database_url, create=False)) as journal:
        now = journal.events()[-1].wall_at
        terminal = printed(render(_snapshot(journal, now), width=300), 300)
        for number, incident in enumerate(report["incidents"]):
            incident_id = incident["incident_id"]
            assert main(["incidents", incident_id, "--run", fake_run.run_id, "--runs", str(fake_run.path.parent)]) == 0
            material = _page(journal, incident_id, fake_run, now)
            assert material.incident is not None
            row = row_of(material.incident)
            (live,) = [line for line in terminal.splitlines() if f" {incident['suspects'][0]} " in line]
            (html,) = [line for line in page.splitlines() if line == incident["durations"]]
            last = [
                line for line in printed(summary(report), 200).splitlines() if f" {incident['suspects'][0]} " in line
            ]
            screens = {
                "report": _numbers(html),
                "page": _numbers(_page_text(material)),
                "command line": _numbers(capsys.readouterr().out),
                "terminal": _numbers(live),
                "table": {
                    ("found", "onset"): seconds(row.found_seconds),
                    ("verified", "finding"): seconds(row.verified_seconds),
                },
                "report.json": {
                    ("found", "fault"): seconds(incident["detected_seconds"]),
                    ("found", "onset"): seconds(incident["detected_after_onset_seconds"]),
                    ("serving again", "finding"): seconds(incident["serving_seconds"]),
                    ("verified", "finding"): seconds(incident["verified_seconds"]),
                    ("closed", "opening"): seconds(incident["closed_seconds"]),
                },
            }
            _agree(screens)
            assert all(("verified", "finding") in numbers for numbers in screens.values()), number
            assert {("found", "fault"), ("found", "onset"), ("serving again", "finding")} <= screens["report"].keys()
            assert {("found", "fault"), ("found", "onset"), ("serving again", "finding")} <= screens["page"].keys()
            assert ("found", "onset") in screens["command line"]
            assert f" {seconds(incident['detected_seconds'])} " in last[0]
            assert f" {seconds(incident['verified_seconds'])} " in last[0]


@pytest.mark.parametrize("kind", ["held", "proposed"])
def test_an_open_incident_has_the_same_age_on_every_screen(kind: str, tmp_path: Path) -> None:
    world = world_of(kind, tmp_path)
    now = world.only().opened_at + 83.25
    where, clock = JournalLocation(world.url), FakeClock(now=0.0, wall_offset=now)
    material = _page(world.journal, world.only().incident_id, None, now)
    assert material.incident is not None
    snapshot = _snapshot(world.journal, now)
    story = incident_summary(material)
    assert story is not None
    screens = {
        "report": _numbers(story.to_dict(now)["durations"]),
        "page": _numbers(_page_text(material)),
        "status": _numbers(status_text(queries.status(where, clock=clock))),
        "incidents": _numbers(incidents_text(queries.incidents(where, clock=clock))),
        "terminal": _numbers(printed(render(snapshot))),
        "table": {("open", "opening"): seconds(row_of(material.incident).open_seconds(now))},
    }
    _agree(screens)
    for name, numbers in screens.items():
        assert numbers["open", "opening"] == "83.2 s", name


def test_the_first_diagnosis_gives_onset_and_finding(tmp_path: Path) -> None:
    """An update that knows another onset changes no duration."""
    world = world_of("held", tmp_path)
    first = world.only().first_diagnosis
    newer = replace(first, onset=first.onset - 40.0, detected_at=first.detected_at + 5.0)
    world.journal.append(IncidentUpdated(diagnosis=newer), incident_id=world.only().incident_id)
    material = _page(world.journal, world.only().incident_id, None, world.clock.wall())
    assert material.incident is not None and material.incident.diagnosis.onset == newer.onset
    expected = seconds(first.detected_at - first.onset)
    assert _numbers(_page_text(material))["found", "onset"] == expected
    assert seconds(row_of(material.incident).found_seconds) == expected


def test_an_operators_request_has_no_onset(tmp_path: Path) -> None:
    world = world_of("asked by an operator", tmp_path)
    text = incidents_text(queries.incidents(JournalLocation(world.url)))
    assert "after the onset" not in text and "after the finding" in text
