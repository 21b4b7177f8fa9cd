"""Incidents as annotations: one each, made once, updated when they close, with nothing of a log taken for HTML."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.errors import CommandRefused
from rolecall.core.faults import FaultClass
from rolecall.dashboards.grafana.push import TEXT_MAX, annotate, annotation
from rolecall.dashboards.grafana.server import GrafanaRefused, Server, Token, address
from rolecall.recovery.incidents import Incident, IncidentOutcome, IncidentState
from tests.dashboards.acting_world import diagnosis
from tests.dashboards.grafana.fake_grafana import EDITOR, VIEWER, FakeGrafana, Refused, fake_grafana


def incident(name: str, replica: str, fault: FaultClass, opened_at: float) -> Incident:
    return Incident(
        incident_id=name,
        state=IncidentState.OPEN,
        diagnosis=diagnosis(replica, "trainer/1 has finished nothing for 2.6 s", fault_class=fault),
        opened_at=opened_at,
        seen_keys=frozenset(),
    )


def with_diagnosis(of: Incident, **changes: Any) -> Incident:
    return replace(of, diagnosis=replace(of.diagnosis, **changes))


HANG = incident("i1-trainer-1", "trainer/1", FaultClass.HANG, 1_795_000_000.25)
CLOSED = replace(HANG, state=IncidentState.CLOSED, closed_at=1_795_000_011.5, outcome=IncidentOutcome.RESOLVED)
KILL = incident("i2-rollout-1", "rollout/1", FaultClass.CRASH, 1_795_000_100.0)


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana() as server:
        yield server


@pytest.fixture
def server(grafana: FakeGrafana) -> Iterator[Server]:
    server = Server(address(grafana.url), Token(EDITOR))
    yield server
    server.close()


def _mappings(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def test_an_open_incident_is_a_point_and_a_closed_one_a_region() -> None:
    point = annotation("demo-7", HANG)
    assert point["time"] == point["timeEnd"] == 1_795_000_000_250
    assert point["text"] == "trainer/1 has finished nothing for 2.6 s (open)"
    assert point["tags"] == ["rolecall", "run:demo-7", "incident:i1-trainer-1", "fault:hang", "role:trainer"]
    region = annotation("demo-7", CLOSED)
    assert (region["time"], region["timeEnd"]) == (1_795_000_000_250, 1_795_000_011_500)
    assert region["text"].endswith("(resolved)")
    assert "role:" not in str(annotation("demo-7", with_diagnosis(HANG, suspects=())))


def test_words_of_a_log_are_text() -> None:
    hostile = with_diagnosis(HANG, because='<img src=x onerror="fetch(1)"> & \x1b[31m\n# big\u202e')
    text = annotation("demo-7", hostile)["text"]
    assert not set(text) & set("<>\"'\x1b\n\u202e")
    assert "&lt;img src=x onerror=&quot;" in text and "&amp;" in text
    long = annotation("demo-7", with_diagnosis(HANG, because="<" * 5000))["text"]
    assert long.count("&lt;") == TEXT_MAX - 1


def test_each_incident_is_made_once_and_fixed_when_it_closes(grafana: FakeGrafana, server: Server) -> None:
    assert _mappings(annotate(server, "demo-7", [HANG, KILL]).done) == ["created", "created"]
    grafana.requests.clear()
    assert _mappings(annotate(server, "demo-7", [HANG, KILL]).done) == ["unchanged", "unchanged"]
    assert grafana.writes == []
    assert _mappings(annotate(server, "demo-7", [CLOSED, KILL]).done) == ["updated", "unchanged"]
    assert len(grafana.annotations) == 2
    kept = next(a for a in grafana.annotations.values() if "incident:i1-trainer-1" in a["tags"])
    assert kept["timeEnd"] - kept["time"] == 11_250
    assert kept["text"].endswith("(resolved)")


def test_the_same_incident_name_in_another_run_is_another_incident(grafana: FakeGrafana, server: Server) -> None:
    annotate(server, "demo-7", [HANG])
    assert _mappings(annotate(server, "demo-8", [HANG]).done) == ["created"]
    assert len(grafana.annotations) == 2


def test_annotations_of_people_are_left_alone(grafana: FakeGrafana, server: Server) -> None:
    theirs = {"id": 99, "time": 1, "timeEnd": 1, "tags": ["rolecall", "run:demo-7"], "text": "lunch"}
    grafana.annotations[99] = dict(theirs)
    annotate(server, "demo-7", [HANG])
    assert grafana.annotations[99] == theirs


def test_a_run_with_very_many_incidents_shows_the_newest(grafana: FakeGrafana, server: Server) -> None:
    reported = annotate(server, "demo-7", [KILL, HANG], incidents_max=1)
    assert reported.done[0].startswith("left out   1 older")
    assert "i2-rollout-1" in reported.done[1] and len(grafana.annotations) == 1


def test_too_many_to_know_them_all_are_refused_before_anything_is_written(grafana: FakeGrafana, server: Server) -> None:
    annotate(server, "demo-7", [HANG, KILL])
    grafana.requests.clear()
    with pytest.raises(CommandRefused, match="2 or more annotations of demo-7"):
        annotate(server, "demo-7", [CLOSED], found_max=2)
    assert grafana.writes == []


def test_one_that_fails_is_reported_and_the_others_are_written(grafana: FakeGrafana, server: Server) -> None:
    writes = []

    def fail_first(method: str, path: str) -> None:
        if method == "POST":
            writes.append(path)
            if len(writes) == 1:
                raise Refused(500, "database is locked")

    grafana.before = fail_first
    reported = annotate(server, "demo-7", [HANG, KILL])
    assert _mappings(reported.done) == ["created"] and "database is locked" in reported.failed[0]
    assert _mappings(annotate(server, "demo-7", [HANG, KILL]).done) == ["created", "unchanged"]


def test_a_token_that_may_not_write_or_is_none(grafana: FakeGrafana) -> None:
    for token, reported in ((VIEWER, "role Editor"), ("glsa_stranger", "does not accept the token")):
        server = Server(address(grafana.url), Token(token))
        try:
            failed = annotate(server, "demo-7", [HANG]).failed
            assert reported in failed[0]
        except GrafanaRefused as e:
            assert reported in str(e)
        finally:
            server.close()
    assert not grafana.annotations
