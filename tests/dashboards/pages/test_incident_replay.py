"""Replay, evidence files, and Prometheus in place of a stored window."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import PlanCreated
from rolecall.core.rundir import create_run_dir
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.incidents.cache import (
    ASK_AGAIN_SECONDS,
    ASK_SECONDS,
    SETTLED_SECONDS,
    IncidentPageCache,
    from_prometheus,
)
from rolecall.dashboards.pages.incidents.evidence_files import SHOWN_BYTES_MAX, names, read
from rolecall.dashboards.pages.incidents.timeline import TimelineRange
from rolecall.dashboards.pages.incidents.what_if import replay
from rolecall.dashboards.settings import Settings
from rolecall.testing.recovery_world import diagnosis
from tests.dashboards.incident_cases import found, material_of, world_of
from tests.dashboards.made_runs import MadeRun

K = EventKind


def test_the_same_input_gives_the_same_plan(tmp_path: Path) -> None:
    m = material_of(world_of("retried", tmp_path))
    done = replay(m.events, None)
    assert done.same is True
    assert len(done.lines) == 3
    assert "same plan, replace replica" in done.lines[0]


def test_another_plan_is_reported(tmp_path: Path) -> None:
    m = material_of(world_of("resolved", tmp_path))
    changed = []
    for e in m.events:
        payload = e.payload
        if isinstance(payload, PlanCreated):
            payload = replace(payload, plan=replace(payload.plan, because="somebody wrote this"))
        changed.append(replace(e, payload=payload))
    done = replay(changed, None)
    assert done.same is False
    assert "DIFFERENT plan" in done.lines[0]


def test_the_diagnosis_is_made_again_from_its_window(tmp_path: Path) -> None:
    d, window = found("stopped", "trainer/1")
    m = material_of(world_of("resolved", tmp_path))
    opened = [replace(e, payload=replace(e.payload, diagnosis=d)) for e in m.events if e.kind is K.INCIDENT_OPENED]
    done = replay(opened, window)
    assert done.same is True
    assert done.lines == (f"same diagnosis from the stored window: {d.because}",)
    other = replace(d, fault_class=FaultClass.GPU)
    done = replay([replace(opened[0], payload=replace(opened[0].payload, diagnosis=other))], window)
    assert done.same is False


@pytest.mark.parametrize("window", [{"version": 99}, {"version": 1}, {}])
def test_a_window_that_cannot_be_read_is_no_verdict(window: dict[str, object], tmp_path: Path) -> None:
    m = material_of(world_of("resolved", tmp_path))
    done = replay([e for e in m.events if e.kind is K.INCIDENT_OPENED], window)
    assert done.same is None
    assert "cannot be read" in done.lines[0]


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_text_of_a_limited_size(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r")
    folder = run.path / "evidence" / "inc-1"
    folder.mkdir(parents=True)
    (folder / "stack.json").write_bytes(b"<b>\x1b[31m one\n\xff two\n")
    (folder / "big").write_bytes(b"x" * (SHOWN_BYTES_MAX + 1))
    (folder / ".hidden").write_text("no")
    (folder / "link").symlink_to("/etc/passwd")
    assert names(run, "inc-1") == ("big", "stack.json")
    text = read(run, "inc-1", "stack.json").text
    assert text == "<b>\N{REPLACEMENT CHARACTER}[31m one\n\N{REPLACEMENT CHARACTER} two\n"
    big = read(run, "inc-1", "big")
    assert len(big.text) < SHOWN_BYTES_MAX
    assert big.note.startswith("The first 64 KiB of 65,537 bytes")


@pytest.mark.parametrize("incident", ["..", "../..", "/etc", ".", "inc-2"])
@pytest.mark.parametrize("name", ["passwd", "../token", "run.json", ""])
def test_no_name_leaves_the_incidents_folder(incident: str, name: str, tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r")
    (run.path / "evidence" / "inc-1").mkdir(parents=True)
    (run.path / "evidence" / "inc-2").symlink_to("/etc")
    assert names(run, incident) == ()
    assert read(run, incident, name).note == "The file is not on this machine."
    assert names(None, "inc-1") == ()


# --- Prometheus -------------------------------------------------------------------------------------------------------


@contextmanager
def server(answers: list[bytes], asked: list[str]) -> Iterator[str]:
    """Gives the last answer of the list."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            asked.append(form["query"][0])
            answer = answers[-1]
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def matrix(*series: str) -> bytes:
    return f'{{"status":"success","data":{{"resultType":"matrix","result":[{",".join(series)}]}}}}'.encode()


def of_prometheus(url: str) -> Settings:
    return Settings(journal_url="sqlite:////runs/mine/journal.db", prometheus_url=url)


AXIS = TimelineRange(begin=1000.0, end=1100.0, zero=1050.0)


def test_prometheus_gives_the_suspect_and_its_peers() -> None:
    series = [
        f'{{"metric":{{"replica":"rollout/{n}","node":"n-{n}","role":"rollout"}},"values":[[1000,"{n}"],[1001,"NaN"]]}}'
        for n in range(3)
    ]
    asked: list[str] = []
    with server([matrix(*series)], asked) as url:
        reported = from_prometheus(
            of_prometheus(url), diagnosis(FaultClass.CRASH, ("rollout/1", 1)), AXIS, SystemClock()
        )
    work = reported.signals[0]
    assert asked[0] == 'rate(rolecall_process_progress_total{role=~"rollout"}[20s])'
    assert work.lines[0].name == "rollout/1 (n-1)"
    assert work.lines[0].points == ((1000.0, 1.0),)
    assert work.band == ((1000.0, 0.0, 1.0, 2.0),)
    assert reported.source.startswith("Prometheus at http://127.0.0.1")


def test_series_of_another_run_on_the_same_prometheus_are_left_out() -> None:
    series = [
        f'{{"metric":{{"replica":"rollout/{n}","node":"n-{n}","instance":"{run}/n-{n}"}},"values":[[1000,"{value}"]]}}'
        for run, value in (("other", 7), ("mine", 1), ("mine-2", 9))
        for n in range(2)
    ]
    with server([matrix(*series)], []) as url:
        d = diagnosis(FaultClass.CRASH, ("rollout/1", 1))
        work = from_prometheus(of_prometheus(url), d, AXIS, SystemClock()).signals[0]
    assert [line.points for line in work.lines] == [((1000.0, 1.0),)] and work.num_peers == 1


def test_prometheus_is_asked_again_while_its_answer_can_change(tmp_path: Path) -> None:
    def points(num: int) -> bytes:
        values = ",".join(f'[{n},"1"]' for n in range(num))
        return matrix(f'{{"metric":{{"replica":"rollout/1","node":"node-4"}},"values":[{values}]}}')

    clock = FakeClock(wall_offset=SystemClock().wall() - 10_000.0)
    made = MadeRun(tmp_path, clock=clock)
    plan = made.open()
    answers, asked = [b"busy"], list[str]()
    with server(answers, asked) as url:
        reader = Reader(replace(made.settings(), prometheus_url=url), clock)
        cache = IncidentPageCache(clock)

        def drawn(after_seconds: float) -> int | str:
            """Number of points of the suspect, or why there are none."""
            clock.advance(after_seconds)
            signals = cache.get(reader, reader.fresh(), "i-1").signals
            return len(signals.signals[0].lines[0].points) if signals.signals else signals.missing

        assert "query failed" in str(drawn(0.0))
        num_asked = len(asked)
        answers.append(points(2))
        assert "query failed" in str(drawn(ASK_AGAIN_SECONDS - 1)) and len(asked) == num_asked
        assert drawn(1.0) == 2
        answers.append(points(3))
        assert drawn(ASK_SECONDS - 1) == 2 and drawn(1.0) == 3  # the incident is open
        answers.append(b"busy")
        assert drawn(ASK_SECONDS) == 3 and drawn(ASK_AGAIN_SECONDS) == 3
        made.plan(plan)
        made.act(plan)
        made.resolve(plan)
        answers.append(points(4))
        assert drawn(SETTLED_SECONDS + 1) == 4  # to its end
        num_asked = len(asked)
        assert drawn(3600.0) == 4 and len(asked) == num_asked
        reader.close()


def test_a_name_is_no_expression() -> None:
    asked: list[str] = []
    with server([matrix()], asked) as url:
        d = diagnosis(FaultClass.CRASH, ("rollout/1", 1))
        d = replace(d, suspects=tuple(replace(s, role='a"} or vector(1) #.*') for s in d.suspects))
        reported = from_prometheus(of_prometheus(url), d, AXIS, SystemClock())
    assert '{role=~"a\\\\x{22}\\\\x{7d}\\\\x{20}or' in asked[0]
    assert "has no series of the suspects" in reported.missing


def test_a_server_that_is_away_costs_a_sentence() -> None:
    d = diagnosis(FaultClass.CRASH, ("rollout/1", 1))
    reported = from_prometheus(of_prometheus("http://127.0.0.1:9"), d, AXIS, SystemClock())
    assert not reported.signals
    assert "query failed" in reported.missing
    reported = from_prometheus(of_prometheus("ftp://x"), d, AXIS, SystemClock())
    assert "Prometheus: " in reported.missing
