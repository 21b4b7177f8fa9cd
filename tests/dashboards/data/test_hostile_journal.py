"""Whatever stands in a journal - of another version, of a bad disk, of somebody who means harm - every page still
draws, and what can be read of the rest is on it."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from rolecall.core.clock import FakeClock
from rolecall.core.journal.events import EventKind as K
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data.reader import SNAPSHOT_SECONDS, Reader
from rolecall.dashboards.server.serving import APP
from rolecall.dashboards.settings import Settings
from tests.dashboards.acting_world import texts
from tests.dashboards.made_runs import MadeRun, first_snapshot
from tests.support import eventually

PAGES = ("overview", "incidents", "fleet", "accounting", "operations")
WRONG = {
    "step": "x", "node": ["n"], "by": {"a": 1}, "because": 5, "incidents": 7, "checks": "no", "passed": "maybe",
    "seconds": "long", "verdict": 3, "digest": [], "until": "never", "plan": 5, "diagnosis": [], "groups": 5,
    "tokens": "many", "nodes": 5, "roles": [1], "replica": 5, "incarnation": {}, "mode": {"a": []}, "holder": 5,
}  # fmt: skip
FAR = 1e300


def append(run: RunDir, kind: str, body: str, incident: str | None = None) -> None:
    """A line that no writer of ours would write."""
    with sqlite3.connect(run.path / "journal.db") as conn:
        columns = [row[1] for row in conn.execute("PRAGMA table_info(events)")]
        newest = conn.execute("SELECT * FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        row = dict(zip(columns, newest, strict=True))
        row |= {"seq": row["seq"] + 1, "kind": kind, "body": body, "incident_id": incident, "key": None}
        marks = ",".join("?" * len(row))
        conn.execute(f"INSERT INTO events ({','.join(row)}) VALUES ({marks})", list(row.values()))


class TurnedClock(FakeClock):
    """One that somebody sets."""

    def set_back(self, seconds: float) -> None:
        self._wall_offset -= seconds


def _every_kind(run: RunDir) -> None:
    for kind in K:
        for body in ("{}", "[]", json.dumps(WRONG)):
            append(run, str(kind), body)
        append(run, str(kind), json.dumps(WRONG), "i-2")
    append(run, "of_a_newer_version", "{}", "i-2")


def _unsendable(run: RunDir) -> None:
    append(run, str(K.NODE_QUARANTINED), r'{"node": "n\ud800", "by": "x\udcff", "because": "<b>*\u0000\u202e"}')
    append(
        run, str(K.BURN_IN_FINISHED), '{"node": "n-1", "checks": [5, null, {"name": [], "values": 5}], "seconds": null}'
    )


def _numbers(run: RunDir) -> None:
    for step in ('"reward": NaN', '"tokens": 1e400', f'"step": {10**30}', '"step": ' + "9" * 5_000, '"tokens": -1e308'):
        append(run, str(K.STEP_COMMITTED), f'{{"step": 99, "epoch": 1, "groups": [], "seconds": 1e308, {step}}}')
    append(run, str(K.RECOVERY_PAUSED), '{"because": ' + "[" * 100_000 + "]" * 100_000 + "}")


def _long(run: RunDir) -> None:
    append(run, str(K.NODE_QUARANTINED), json.dumps({"node": "n" * 10**6, "by": "b" * 10**6, "because": "c" * 10**7}))


@pytest.mark.parametrize("harm", [_every_kind, _unsendable, _numbers, _long])
def test_every_page_draws_and_shows_the_rest(harm: Callable[[RunDir], None], tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "runs", num_steps=5)
    waits = made.open(because="it stands still")
    made.plan(waits)
    made.propose(waits, seconds=FAR)
    far = made.open(replica="rollout/0", name="i-3")
    made.plan(far)
    made.say(K.HOLD_PLACED, {"digest": far.digest, "by": "anna", "because": "wait", "until": FAR}, "i-3")
    harm(made.run)
    assert first_snapshot(made.settings()).usable
    for name in PAGES:
        at = AppTest.from_file(str(APP), default_timeout=60).switch_page(f"{name}.py").run()
        assert not at.exception, (name, [e.value for e in at.exception])
        assert name != "operations" or "replace rollout/1#1" in texts(at)
    for incident in ("i-1", "i-2", "../../etc", "i-1'--"):
        at = AppTest.from_file(str(APP), default_timeout=60)
        at.query_params["incident"] = incident
        at.switch_page("incidents.py").run()
        assert not at.exception, (incident, [e.value for e in at.exception])


def test_a_clock_that_is_set_back_hides_nothing_that_is_written_then(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "runs", num_steps=3)
    clock = TurnedClock(wall_offset=made.clock.wall())
    reader = Reader(Settings(journal_url=made.run.database_url), clock)
    try:
        eventually(lambda: reader.latest().usable, "a snapshot")
        clock.set_back(3600.0)
        made.open(because="it stands still")
        clock.advance(SNAPSHOT_SECONDS / 2)
        eventually(lambda: "i-1" in reader.latest().projection.incidents, "what was written since")
    finally:
        reader.close()
