"""`watch prometheus|recording` and `record`: options, what they print, what they leave behind; and all of it
against a real Prometheus that scrapes real agents."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.rundir import RunDir
from rolecall.core.text import iso_utc
from rolecall.detector.live.fusion import merged
from rolecall.detector.panels.membership import WatchLimits
from rolecall.detector.panels.minder.detector import BUILT_IN
from rolecall.detector.panels.panel import Machine, Panel, PanelTick, Stopped, cannot_tell, findings, ticks_of
from rolecall.detector.panels.sequential.detector import MACHINES_MIN, Sequential
from rolecall.detector.sources import recording
from rolecall.detector.sources.prometheus import WINDOW_INTERVALS, Labels, MetricQuery, catalogue_queries, dcgm_queries
from rolecall.terminal.console import console
from rolecall.terminal.watch import PanelLines, PanelScreen, finding
from rolecall.watch import panels as fleet_watching
from rolecall.watch.panels import (
    HISTORY_TICKS,
    PrometheusOptions,
    authorization,
    load_queries,
    parse_query,
    prometheus_source,
    record,
    record_run,
    watch,
    watch_prometheus,
    watch_recording,
)
from tests.agent.processes import AgentProcess, Child
from tests.detector.fake_agent import NODE as FAKE_NODE
from tests.detector.fake_agent import FakeAgent
from tests.detector.panel_data import noise
from tests.detector.panels.test_source import Toy, a_panel, shape_of
from tests.prometheus_server import SCRAPE_SECONDS, prometheus
from tests.support import PATIENCE_SECONDS, eventually

OPTIONS = PrometheusOptions(url="http://127.0.0.1:1")


def never() -> bool:
    return False


# --- options ------------------------------------------------------------------------------------------------------


def test_a_queries_file(tmp_path: Path) -> None:
    path = tmp_path / "queries.yaml"
    path.write_text(
        "labels: {node: [instance], role: [], role_otherwise: server}\n"
        "queries:\n"
        "  cpu: {expression: 'rate(cpu_total{$match}[$window])'}\n"
        "  step_time: {expression: 'step_seconds{$match}', labels: {role: [stage], rank: [worker]}}\n"
    )
    cpu, step_time = load_queries(path)
    assert cpu == MetricQuery(
        metric="cpu",
        expression="rate(cpu_total{$match}[$window])",
        labels=Labels(node=("instance",), role=(), role_otherwise="server"),
    )
    assert (step_time.labels.role, step_time.labels.rank, step_time.labels.node) == (
        ("stage",),
        ("worker",),
        Labels().node,
    )
    path.write_text("defaults: true")
    assert load_queries(path) == (*catalogue_queries(), *dcgm_queries())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "queries: none"),
        ("[1]", "(top)"),
        ("queries: {a: {expression: x, odd: 1}}", "queries.a.odd"),
        ("queries: {a: {expression: ''}}", "queries.a.expression"),
        ("queries: {a: {}}", "queries.a.expression"),
        ("labels: {node: []}\nqueries: {a: {expression: x}}", "labels.node"),
        ("labels: {rank: rank}", "labels.rank"),
        ("queries: {a: {expression: x}, a: {expression: y}}", "duplicate key"),
        ("{", "not YAML"),
        ("\xff\xfe".encode("latin-1"), "not a text file"),
        (b"#" * (1 << 21), "larger than"),
    ],
)
def test_problems_of_a_queries_file(tmp_path: Path, text: str | bytes, reason: str) -> None:
    path = tmp_path / "queries.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as reported:
        load_queries(path)
    assert reason in str(reported.value) and str(path) in str(reported.value)


def test_a_queries_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_queries(tmp_path / "none.yaml")


def test_a_query_of_the_command_line() -> None:
    assert parse_query('a = x{b="c"}') == MetricQuery(metric="a", expression='x{b="c"}')
    for bad in ("a", "=x", "a=", ""):
        with pytest.raises(ConfigError, match="--query"):
            parse_query(bad)


def test_credentials_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("bearer abc.def\n")
    assert authorization(file, {}) == "Bearer abc.def"
    file.write_text("basic ann:pass: word")
    assert authorization(file, {}) == "Basic YW5uOnBhc3M6IHdvcmQ="
    assert authorization(None, {}) == ""
    assert authorization(None, {"ROLECALL_PROMETHEUS_TOKEN": "t"}) == "Bearer t"
    both = {"ROLECALL_PROMETHEUS_USER": "ann", "ROLECALL_PROMETHEUS_PASSWORD": "pass: word"}
    assert authorization(None, both) == "Basic YW5uOnBhc3M6IHdvcmQ="
    with pytest.raises(ConfigError, match="both set"):
        authorization(None, {**both, "ROLECALL_PROMETHEUS_TOKEN": "t"})
    with pytest.raises(ConfigError, match="No such file"):
        authorization(tmp_path / "none", {})


@pytest.mark.parametrize(
    "text", ["hunter2", "basic hunter2", "bearer hunter2\nX-Evil: 1", "digest hunter2", "bearer ", ""]
)
def test_credentials_that_are_none_are_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "credentials").write_text(text)
    with pytest.raises(ConfigError, match="expected one line") as reported:
        authorization(tmp_path / "credentials", {})
    assert "hunter2" not in str(reported.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PrometheusOptions(url="host:9090"), "--url"),
        (PrometheusOptions(url=OPTIONS.url, interval_seconds=0.0), "--interval"),
        (PrometheusOptions(url=OPTIONS.url, interval_seconds=float("nan")), "--interval"),
        (PrometheusOptions(url=OPTIONS.url, history_seconds=-1.0), "--history"),
        (PrometheusOptions(url=OPTIONS.url, queries=("a=b",), match='c="d"'), "--match"),
    ],
)
def test_wrong_options_are_reported(options: PrometheusOptions, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        prometheus_source(options, 0.0, FakeClock(), {})


# --- watching a recording -----------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "r.parquet"
    recording.write(path, [a_panel("trainer", 1.0, 1), a_panel("rollout", 2.5, 2)])
    return path


def test_diagnoses_are_sentences_as_they_come_on_a_terminal(recorded: Path) -> None:
    file = StringIO()
    with PanelScreen(console(file), str(recorded)) as screen:
        assert watch_recording(recorded, 1e6, [Toy()], display=screen, clock=FakeClock()) == 1
    lines = file.getvalue().splitlines()
    offline = merged([f for p in recording.read(recorded).panels for f in findings(Toy(), p)])
    assert sorted(lines[:-1]) == sorted(finding(d).plain for d in offline)
    assert lines[0].startswith(
        "2023-11-14T22:13:42Z slow: node n1 is high (since 2023-11-14T22:13:40Z, confidence 0.90; "
    )
    assert lines[-1].startswith(
        f"{len(offline)} findings in 120 ticks of 10 machines: role trainer (5 machines, 1 metric)"
    )


def test_elsewhere_each_line_is_one_object(recorded: Path) -> None:
    lines: list[str] = []
    display = PanelLines(lines.append)
    assert watch_recording(recorded, 1e6, [Toy(), Toy()], display=display, clock=FakeClock()) == 1
    said = [json.loads(line) for line in lines]
    assert said[0]["event"] == "watching" and said[0]["where"] == str(recorded), "at once"
    reported = [Diagnosis.from_dict(value["diagnosis"]) for value in said if value["event"] == "finding"]
    offline = merged([f for p in recording.read(recorded).panels for f in findings(Toy(), p)])
    assert sorted(reported, key=repr) == sorted(offline, key=repr), "once, whoever else finds it"
    assert said[-1]["event"] == "end" and said[-1]["findings"] == len(offline) and said[-1]["ticks"] == 120


def test_a_healthy_recording_and_one_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    healthy = a_panel("trainer", 1.0, 1, num_ticks=20)
    recording.write(path, [healthy])
    lines: list[str] = []
    assert watch_recording(path, 1e6, [Toy()], display=PanelLines(lines.append), clock=FakeClock()) == 0
    watching, end = map(json.loads, lines)
    assert watching["text"] == "5 machines: role trainer (5 machines, 1 metric)"
    assert end["text"] == "healthy: nothing found in 20 ticks of 5 machines: role trainer (5 machines, 1 metric)"
    display = PanelLines(lines.append)
    assert watch_recording(path, 1.0, [Toy()], display=display, seconds=10.0, clock=FakeClock()) == 0
    assert json.loads(lines[-1])["ticks"] == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("recording", "{recording}"), "model: detector 'sequential' has none; only minder has one"),
        (("recording", "{recording}", "--detector", "minder"), "not a model that rolecall fit wrote"),
        (("prometheus", OPTIONS.url, "--detector", "minder"), "not a model"),
        (("run", "latest"), "No such option: --model"),
    ],
)
def test_a_model_is_of_minder_and_of_a_fleet(
    recorded: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    """The model is a recording: whoever opens it says that it is none."""
    argv = [option.format(recording=recorded) for option in options]
    assert main(["watch", *argv, "--model", str(recorded)]) == 2
    assert said in capsys.readouterr().err


def test_minder_watches_with_the_model_given(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--speed", "inf", "--detector", "minder", "--model", str(BUILT_IN))
    assert main(["watch", "recording", str(recorded), *options]) == 0
    assert "detector minder has not seen enough of its 5 machines" in capsys.readouterr().out


def test_undecided_input_is_not_called_healthy(tmp_path: Path) -> None:
    for num, said in (
        (1, "one machine has no peers"),
        (4, "detector sequential has not seen enough of its 4 machines"),
    ):
        path, lines = tmp_path / f"{num}.parquet", list[str]()
        recording.write(path, [noise(machines=num, metrics=2, ticks=12)])
        assert watch_recording(path, 1e6, [Sequential()], display=PanelLines(lines.append), clock=FakeClock()) == 0
        end = json.loads(lines[-1])
        assert end["text"].startswith("nothing found, but not everything could be checked, in 12 ticks")
        assert said in end["cannot_tell"][0]


def test_a_watch_begins_with_enough_of_the_past() -> None:
    """For the smallest role; that of which nothing is asked of its peers."""
    panel = noise(machines=MACHINES_MIN, metrics=2, ticks=HISTORY_TICKS)
    tracker = Sequential().track(panel.shape)
    for at, values in panel.ticks():
        tracker.tick(at, values)
    assert cannot_tell(panel.shape, "sequential", tracker) == "" and WatchLimits().history_ticks >= HISTORY_TICKS


def test_a_sentence_is_one_plain_line() -> None:
    values = {"onset": 0.0, "detected_at": 1e300, "confidence": 1.0, "because": "evil \x1b[31m\nname"}
    said = finding(
        Diagnosis.from_dict({"detectors": ["d"], "suspects": [], "fault_class": "slow", "evidence": [], **values})
    )
    assert said.plain.isprintable()
    assert (iso_utc(0.0), iso_utc(-30.0), iso_utc(1e300)) == ("0.0 s", "-30.0 s", "1e+300 s")
    assert iso_utc(1e9) == "2001-09-09T01:46:40Z"


# --- recording ----------------------------------------------------------------------------------------------------


class Given:
    """A source that gives what it was given, and then perhaps fails."""

    def __init__(self, panels: list[Panel], then: Exception | None = None) -> None:
        self.panels, self.then = panels, then

    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        for tick in ticks_of(self.panels):
            if stopped():
                return
            yield tick
        if self.then is not None:
            raise self.then


def same(read: Path, panels: list[Panel]) -> bool:
    found = {p.shape.name: p for p in recording.read(read).panels}
    return len(found) == len(panels) and all(
        found[p.shape.name].shape == p.shape
        and np.array_equal(found[p.shape.name].at, p.at)
        and np.array_equal(found[p.shape.name].values, p.values, equal_nan=True)
        for p in panels
    )


@pytest.mark.parametrize("part_bytes", [1, 200, 1 << 20])
def test_a_written_recording_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(fleet_watching, "PART_BYTES", part_bytes)
    panels = [a_panel("trainer", 1.0, 1), a_panel("rollout", 2.5, 2)]
    path, lines = tmp_path / "out.parquet", list[str]()
    assert record(Given(panels), path, out=lines.append, stopped=never, clock=FakeClock()) == 0
    num_samples = sum(int(np.isfinite(p.values).sum()) for p in panels)
    assert same(path, panels) and lines == [f"{path}: {num_samples} samples"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.parquet"]


def test_shapes_that_change_are_one_recording(tmp_path: Path) -> None:
    at = 1_700_000_000.0 + np.arange(8.0)
    early = Panel(shape=shape_of("ab"), at=at[:4], values=np.ones((1, 4, 2), dtype=np.float32))
    late = Panel(shape=shape_of("abc"), at=at[4:], values=np.full((1, 4, 3), 2, dtype=np.float32))
    path = tmp_path / "out.parquet"
    record(Given([early, late]), path, out=print, stopped=never, clock=FakeClock())
    [panel] = recording.read(path).panels
    assert panel.shape == shape_of("abc") and panel.at.tolist() == at.tolist()
    assert np.nan_to_num(panel.values[0, :, 2]).tolist() == [0.0] * 4 + [2.0] * 4


def test_recorded_data_is_kept_when_the_source_fails(tmp_path: Path) -> None:
    panels, path = [a_panel("trainer", 1.0, 1)], tmp_path / "out.parquet"
    for then in (UnreadableInput(where="server", reason="gone"), KeyboardInterrupt()):
        with pytest.raises(type(then)):
            record(Given(panels, then), path, out=print, stopped=never, clock=FakeClock())  # type: ignore[arg-type]
        assert same(path, panels)
        path.unlink()


def test_nothing_is_overwritten_and_nothing_is_left_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    with pytest.raises(UnreadableInput, match="no sample"):
        record(Given([]), path, out=print, stopped=never, clock=FakeClock())
    assert not list(tmp_path.iterdir())
    panels = [a_panel("trainer", 1.0, 1)]
    record(Given(panels), path, out=print, stopped=never, clock=FakeClock())
    with pytest.raises(ConfigError, match="not overwritten"):
        record(Given([a_panel("trainer", 1.0, 2)]), path, out=print, stopped=never, clock=FakeClock())
    assert same(path, panels)
    (tmp_path / "other.parquet.parts").mkdir()
    with pytest.raises(ConfigError, match="move it away"):
        record(Given(panels), tmp_path / "other.parquet", out=print, stopped=never, clock=FakeClock())
    with pytest.raises(ConfigError, match="No such file"):
        record(Given(panels), tmp_path / "none" / "x.parquet", out=print, stopped=never, clock=FakeClock())


def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"

    def out_appears() -> bool:
        path.write_text("mine")
        return False

    with pytest.raises(UnreadableInput, match=r"out\.parquet\.parts"):
        record(Given([a_panel("t", 1.0, 1)]), path, out=print, stopped=out_appears, clock=FakeClock())
    assert path.read_text() == "mine" and same(
        tmp_path / "out.parquet.parts" / "000000.parquet", [a_panel("t", 1.0, 1)]
    )


def test_a_recording_that_is_full_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(recording, "NUM_ROWS_MAX", 50)
    path = tmp_path / "out.parquet"
    record(Given([a_panel("trainer", 1.0, 1)]), path, out=print, stopped=never, clock=FakeClock())
    assert "no more samples fit" in caplog.text and recording.read(path).num_rows <= 50


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: whatever started the tests may have reported its children to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_ends_it_in_order_and_a_second_one_at_once() -> None:
    with fleet_watching._until(None, SystemClock()) as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        eventually(stopped, "the signal is noticed")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(PATIENCE_SECONDS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_is_recorded_from_its_agents(tmp_path: Path) -> None:
    agent = FakeAgent()
    try:
        node = tmp_path / "run" / "nodes" / FAKE_NODE
        node.mkdir(parents=True)
        (node / "agent.json").write_text(json.dumps({"node": FAKE_NODE, "url": agent.url}))
        path, lines = tmp_path / "r.parquet", list[str]()
        agent_run = RunDir(tmp_path / "run")
        assert record_run(agent_run, path, out=lines.append, interval_seconds=0.2, seconds=1.5) == 0
    finally:
        agent.close()
    [panel] = recording.read(path).panels
    assert panel.shape.role == "rollout" and "rolecall_process_requests_active" in panel.shape.metrics
    assert panel.shape.machines == (Machine(node=FAKE_NODE, replica="rollout/1", rank=0),)
    with pytest.raises(ConfigError, match="--interval"):
        record_run(agent_run, path, out=print, interval_seconds=0.0)


# --- a real Prometheus, real agents -------------------------------------------------------------------------------

NODES = ("node-1", "node-2", "node-3")


class Node:
    """An agent and one process that works at a steady pace while it lives."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.name, self.number, self.folder = name, number, folder / name
        self.folder.mkdir(parents=True)
        self.agent = AgentProcess(self.folder, "--node", name, "--interval", "0.2")
        self.child = self.start_child(1)

    def start_child(self, incarnation: int) -> Child:
        child = Child(self.folder)
        child.start(f"rollout/{self.number}", incarnation=incarnation)
        child.do(f"exec({WORK!r}, dict(reporter=reporter))")
        return child

    def close(self) -> None:
        self.child.close()
        self.agent.close()


WORK = """
import threading, time
def work():
    while True:
        time.sleep(0.05)
        reporter.progress(1)
threading.Thread(target=work, daemon=True).start()
"""


@pytest.mark.slow
def test_a_real_server_with_real_agents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Real scrapes, machines by their labels, a restarted process as a gap, and the same recorded and watched."""
    (tmp_path / "prometheus").mkdir()
    with ExitStack() as stack:
        nodes = []
        for i, name in enumerate(NODES):
            nodes.append(Node(tmp_path / "nodes", name, i))
            stack.callback(nodes[-1].close)
        server = stack.enter_context(prometheus(tmp_path / "prometheus", targets=[n.agent.netloc for n in nodes]))
        [rate] = [q.expression for q in catalogue_queries() if q.metric == "rolecall_process_progress_per_second"]
        rate = rate.replace("$match", "").replace("$window", f"{WINDOW_INTERVALS * SCRAPE_SECONDS}s")
        two_ticks = f"count_over_time(({rate})[{2 * SCRAPE_SECONDS}s:{SCRAPE_SECONDS}s]) >= 2"
        eventually(lambda: server.count(two_ticks) == 3, "all three have a rate, at a tick of the recording")
        nodes[0].child.close()
        nodes[0].child = nodes[0].start_child(2)
        eventually(lambda: server.count(rate) == 2, "one has none")
        eventually(lambda: server.count(rate) == 3, "it has one again")
        options = PrometheusOptions(url=server.url, interval_seconds=SCRAPE_SECONDS, history_seconds=60.0)
        path, lines, watched = tmp_path / "r.parquet", list[str](), list[str]()
        fleet_watching.record_prometheus(options, path, out=lines.append, seconds=1.5)
        code = watch_prometheus(options, [Toy()], display=PanelLines(watched.append), seconds=1.5)
    panels = {p.shape.role: p for p in recording.read(path).panels}
    assert sorted(panels) == ["node", "rollout"] and panels["rollout"].shape.interval_seconds == SCRAPE_SECONDS
    shape, values = panels["rollout"].shape, panels["rollout"].values
    assert shape.machines == tuple(Machine(node=n, replica=f"rollout/{i}", rank=0) for i, n in enumerate(NODES))
    rates = values[shape.metrics.index("rolecall_process_progress_per_second")]
    reported = rates[np.isfinite(rates)]
    assert reported.min() > 5 and reported.max() < 40, (
        f"20 a second, but for the load of this machine: {rates.tolist()}"
    )
    begun = int(np.flatnonzero(np.isfinite(rates).all(axis=1))[0])
    gaps = np.isnan(rates[begun:])
    assert gaps[:, 0].sum() >= WINDOW_INTERVALS - 1 and not gaps[:, 1:].any(), (
        "of the restarted one, and of no one else"
    )
    hosts = panels["node"].shape
    assert [m.node for m in hosts.machines] == list(NODES)
    assert {"rolecall_host_load1", "rolecall_host_cpu_busy_ratio"} <= set(hosts.metrics)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert code in (0, 1) and "ticks of" in watched[-1] and "3 machines" in watched[-1]


def test_a_real_server_takes_the_default_queries_and_gives_in_pieces_what_it_refuses_as_a_whole(tmp_path: Path) -> None:
    """Eight targets (itself, under other names), and no query may load more than five samples."""
    names = [f"n{i}" for i in range(8)]
    with prometheus(tmp_path, "--query.max-samples=5", itself=[{"node": n} for n in names]) as server:
        for query in (*catalogue_queries(), *dcgm_queries()):
            assert server.count(query.expression.replace("$match", 'node!=""').replace("$window", "60000ms")) == 0
        few = f"{4 * SCRAPE_SECONDS}s"  # a longer time would hold more samples than a query may load, on a slow machine
        for n in names:
            eventually(lambda n=n: server.count(f'count_over_time(up{{node="{n}"}}[{few}]) >= 3'), "scraped")  # type: ignore[misc]
        clock = SystemClock()
        options = PrometheusOptions(
            url=server.url, queries=("up=up{$match}",), interval_seconds=SCRAPE_SECONDS, history_seconds=10.0
        )
        deadline = clock.monotonic() + PATIENCE_SECONDS
        ticks = prometheus_source(options, 0.0, clock, {}).ticks(lambda: clock.monotonic() > deadline)
        whole = list(islice((t for t in ticks if np.isfinite(t.values).sum() == 8), 3))
        ticks.close()  # type: ignore[attr-defined]
    assert len(whole) == 3 and [m.node for m in whole[-1].shape.machines] == names


def test_a_watch_of_nothing_that_answers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnreadableInput, match="no answer"):
        watch_prometheus(OPTIONS, [Toy()], display=PanelLines(print), clock=FakeClock())
    with pytest.raises(UnreadableInput, match=r"no tick was received: .*refused"):
        watch_prometheus(OPTIONS, [Toy()], display=PanelLines(print), seconds=0.05)
    with pytest.raises(UnreadableInput, match="here: no tick was received"):
        watch(Given([]), [Toy()], display=PanelLines(print), stopped=never, where="here")
