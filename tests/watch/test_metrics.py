"""What `/metrics` of a watch says: every name of the catalogue, the right values, whatever the names and the journal
hold."""

import http.client
import json
import math
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit

import pytest

from rolecall.agent.collectors.exporters.scrape import parse_page
from rolecall.agent.http.web_config import load_web_config
from rolecall.cli.main import main
from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, JournalPage
from rolecall.core.metrics.catalogue import BY_NAME, CATALOGUE
from rolecall.core.metrics.metric import MetricScope
from rolecall.core.policy_health import SIGNS
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.core.telemetry import SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.recovery import guards
from rolecall.recovery.operators import commands
from rolecall.recovery.projection import IncidentProjection, open_incident
from rolecall.testing.recovery_world import FakeSource, diagnosis
from rolecall.views.run_totals import NUM_ROLES_MAX
from rolecall.watch.addresses import (
    EndpointAnnouncement,
    ListenAddress,
    ServedEndpoint,
    own,
    parse_address,
    serving,
    targets_path,
    withdraw,
)
from rolecall.watch.meter import Meter, MeteredDetector, MeteredSource, MeteredWatch
from rolecall.watch.metrics import GUARDS
from rolecall.watch.run import watch_run
from rolecall.watch.server import JournalMetricsPoller, WatchServer
from tests.agent.http.test_web_config import HASH, PASSWORD, basic, certificate
from tests.events import filled
from tests.fake_run import FakeRun, made_health
from tests.prometheus_server import prometheus
from tests.recovery.world import World
from tests.support import PATIENCE_SECONDS, eventually

WALL_OFFSET = FakeClock(0.0).wall()
LOOPBACK = ListenAddress("127.0.0.1", 0)
Values = Mapping[tuple[str, ...], float]


def _job(run: RunDir) -> JobConfig:
    return parse_job(run.read()["config"])


def _looked(run: RunDir, clock: Any = None) -> dict[tuple[str, ...], float]:
    """(name without rolecall_, labels...) -> value, of a look at a run's journal."""
    journal = Journal(run.database_url, create=False)
    try:
        looks = JournalMetricsPoller(journal, _job(run), run.run_id, clock or FakeClock(), ours=True)
        assert looks.poll()
    finally:
        journal.close()
    return _by_key(looks)


def _by_key(looks: JournalMetricsPoller) -> dict[tuple[str, ...], float]:
    found = {(v.metric.name.removeprefix("rolecall_"), *v.labels): v.value for v in looks.values}
    assert len(found) == len(looks.values), "no series stands twice"
    return found


def _get(url: str, path: str = "/metrics", authorization: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS)
    with closing(connection):
        connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


# --- values ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_comes_out_as_its_journal_has_it(fake_run: RunDir) -> None:
    found = _looked(fake_run)
    assert found["run_info", "demo-7", "demo"] == 1
    assert (found["run_step",], found["run_steps_wanted",], found["run_steps_committed_total",]) == (119, 120, 120)
    assert found["run_tokens_total",] == 120 * 8 * 96
    assert found["run_ended",] == 1 and found["run_staleness",] == 1
    assert found["run_tokens_kept_total",] == 2 * 862 and found["run_steps_interrupted_total",] == 1
    assert 0.9 < found["run_ettr_ratio",] < 1
    spent = [v for k, v in found.items() if k[0] == "run_lost_seconds"]
    assert sum(spent) + found["run_effective_seconds",] == pytest.approx(found["run_training_seconds",])
    opened = {k[1:]: v for k, v in found.items() if k[0] == "incidents_opened_total" and v}
    assert opened == {("rollout", "crash"): 1, ("trainer", "hang"): 1, ("rollout", "slow"): 1}
    assert found["incidents_closed_total", "resolved"] == 3 and found["incidents_open", "open"] == 0
    assert found["incident_resolutions_total", "rollout"] == 2 and found["incident_resolutions_total", "reward"] == 0
    # Serving 1.62 and 1.71 s after the finding (tests/fake_run.py).
    assert found["incident_resolution_seconds_total", "rollout"] == pytest.approx(1.62 + 1.71, abs=0.01)
    assert found["incident_newest_detection_seconds", "trainer"] == pytest.approx(3.0, abs=0.01)
    assert found["actions_total", "replace_replica", "done"] == 3
    assert found["plans_total", "replace_replica"] == 3 and found["plans_total", "stop_job"] == 0
    assert found["replica_state", "trainer", "trainer/1", "stopped"] == 1
    assert found["replicas", "rollout", "stopped"] == found["replicas_wanted", "rollout"] == 3
    assert found["replica_incarnation", "rollout", "rollout/1"] == 2
    assert found["replica_policy_version", "rollout", "rollout/1"] == 120
    assert found["journal_events_total", "checkpoint_written"] == 6
    assert not any(math.isnan(v) for v in found.values())
    reported = made_health(119, 120)
    assert (
        found["run_entropy_nats",] == reported["entropy"]
        and found["run_filtered_ratio",] == reported["filtered_fraction"]
    )
    assert found["run_clip_low_ratio",] > found["run_clip_high_ratio",] > 0
    assert found["run_log_ratio_max",] == 0.002
    # Of its last step no answer was over, and there is no critic: nothing, and not 0.
    absent = {"run_response_tokens", "run_response_tokens_max", "run_truncated_ratio", "run_value_loss"}
    assert not absent & {k[0] for k in found}


def test_signs_of_health_are_those_of_the_newest_step_and_none_of_a_run_without_them(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, num_steps=5, strikes=(), finish=False).build()
    names = {f"run_{sign.metric}" for sign in SIGNS}
    assert {k[0] for k in _looked(run)} & names
    with closing(Journal(run.database_url, create=False)) as journal:
        journal.append(
            filled(EventKind.STEP_COMMITTED, {"step": 5, "health": {"entropy": math.nan, "kl_sampler": math.inf}})
        )
    reported = {k[0]: v for k, v in _looked(run).items() if k[0] in names}
    assert reported == {"run_kl_sampler_nats": math.inf}
    with closing(Journal(run.database_url, create=False)) as journal:
        journal.append(filled(EventKind.STEP_COMMITTED, {"step": 6, "reward": 0.5}))  # as old controllers wrote it
    found = _looked(run)
    assert found["run_step",] == 6 and not {k[0] for k in found} & names


class Read(Journal):
    """Remembers how many events it gave."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=False)
        self.num_given = 0

    def page(self, **how: Any) -> JournalPage:
        found = super().page(**how)
        self.num_given += len(found.events)
        return found


def test_an_incident_that_was_over_between_two_scrapes_shows_for_two_minutes(fake_run: RunDir) -> None:
    closed_at = max(e.wall_at for e in _events(fake_run) if e.kind is EventKind.INCIDENT_CLOSED)
    soon = _looked(fake_run, FakeClock(now=closed_at + 100.0 - WALL_OFFSET))
    recent = {k[3:]: v for k, v in soon.items() if k[0] == "incident_recent_timestamp_seconds"}
    assert set(recent) == {("rollout/0", "slow")} and closed_at - 60 < recent["rollout/0", "slow"] < closed_at
    assert not any(k[0] in ("incident_open", "incident_opened_timestamp_seconds") for k in soon)
    later = _looked(fake_run, FakeClock(now=closed_at + 121.0 - WALL_OFFSET))
    assert not any(k[0] == "incident_recent_timestamp_seconds" for k in later)


def _events(run: RunDir) -> list[Event]:
    with closing(Journal(run.database_url, create=False)) as journal:
        return journal.events()


def test_looks_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, num_steps=5, strikes=(), finish=False).build()
    with closing(Read(run.database_url)) as journal:
        looks = JournalMetricsPoller(journal, _job(run), run.run_id, FakeClock(), ours=True)
        assert looks.poll() and journal.num_given == journal.head().position
        body = {"step": 5, "seconds": 1.0, "reward": None, "loss": 0.5, "tokens": 7}
        journal.append(filled(EventKind.STEP_COMMITTED, body))
        journal.num_given = 0
        assert looks.poll() and journal.num_given == 1
    found = _by_key(looks)
    assert found["run_step",] == 5 and found["run_loss",] == 0.5 and ("run_reward",) not in found


def test_lines_that_are_not_as_their_kind_has_them_are_passed_over(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, num_steps=5, strikes=(), finish=False).build()
    journal = Journal(run.database_url, create=False)
    for kind in (
        EventKind.STEP_COMMITTED,
        EventKind.PLAN_CREATED,
        EventKind.INCIDENT_OPENED,
        EventKind.NODE_QUARANTINED,
    ):
        journal.append_unchecked(kind, {"strange": True}, incident_id="inc-1")
    journal.append(filled(EventKind.NODE_QUARANTINED, {"node": "node-3", "by": "eve", "because": "ECC"}))
    journal.append(
        filled(EventKind.DIAGNOSIS_REVIEWED, {"verdict": "right", "by": "eve", "because": ""}), incident_id="inc-9"
    )
    journal.append(
        filled(EventKind.DIAGNOSIS_REVIEWED, {"verdict": "wrong", "by": "eve", "because": ""}), incident_id="inc-9"
    )
    journal.close()
    found = _looked(run)
    assert found["run_step",] == 4
    assert found["nodes_quarantined",] == 1
    assert (found["diagnoses_reviewed", "right"], found["diagnoses_reviewed", "wrong"]) == (0, 1)


# --- a watch at work ------------------------------------------------------------------------------------------------


def _observed(clock: FakeClock) -> Observation:
    at = clock.wall()
    batch = SampleBatch(
        node=NodeId("node-1"), agent_pid=1, cursor=1, lost=0, at=0.0, wall_at=at - 0.4, processes=(), hosts=()
    )
    return Observation(wall_at=at, batches=(batch,), unreachable=(("node-2", at - 9.0, "refused"),))


class Observing(FakeSource):
    """Looks as the agents' source does."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self._fake = clock

    def poll(self, timeout_seconds: float) -> Any:
        self._fake.advance(0.05)  # waited
        return _observed(self._fake)


def _metered(world: World, source: Any = None) -> tuple[MeteredWatch, Meter]:
    meter = Meter(world.clock)
    plain = world.watch()
    watch = MeteredWatch(
        plain._journal,
        MeteredSource(source or Observing(world.clock), meter, lambda: 3),
        MeteredDetector(world.detector, meter, lambda: 8),
        plain._actuator,
        world.config,
        world.notifier,
        world.clock,
        "host:metered:1",
        run_id="test-run",
        meter=meter,
    )
    return watch, meter


@contextmanager
def _served(path: Path, world: World, meter: Meter, *, ours: bool = True) -> Iterator[WatchServer]:
    job = parse_job({"recovery": world.config.model_dump(), "runtime": {"trainer_peak_flops": 1e12}})
    agents = dict[str, str] if ours else None
    server = WatchServer(
        RunDir(path), job, LOOPBACK, meter, world.clock, agents=agents, calls_failed=lambda: 2, poll_seconds=0.01
    )
    try:
        yield server
    finally:
        server.close()


def _scraped(server: WatchServer) -> Values:
    status, page = _get(server.url)
    assert status == 200
    read = parse_page(page)
    assert read.num_malformed == 0
    return {
        (s.name.removeprefix("rolecall_"), *(s.labels[label] for label in BY_NAME[s.name].labels)): s.value
        for s in read.samples
    }


def test_a_running_watch_exports_its_state(tmp_path: Path) -> None:
    world = World(tmp_path, mode="approve")
    watch, meter = _metered(world)
    world.run(1.0, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: any(e.kind is EventKind.PLAN_PROPOSED for e in world.journal.events()), watch)
    with _served(tmp_path, world, meter) as server:
        eventually(lambda: ("plans_waiting",) in _scraped(server), "the journal is read")
        found = _scraped(server)
        assert found["watch_acting",] == 1 and found["watch_mode", "approve"] == 1 and found["watch_mode", "act"] == 0
        assert found["watch_ticks_total",] == meter.view.num_ticks > 4 and found["watch_tick_failures_total",] == 0
        assert found["watch_tick_seconds",] == 0, "waiting for news is no work"
        assert found["watch_observed_age_seconds",] == pytest.approx(0.4)
        assert found["watch_agents", "reached"] == 2 and found["watch_agents", "unreachable"] == 1
        assert found["watch_agent_unreachable_timestamp_seconds", "node-2"] < world.clock.wall()
        assert found["watch_processes",] == 8 and found["watch_diagnoses", "crash"] == 1
        assert found["watch_notifications_failed_total",] == 2 and found["watch_fence",] == 1
        who = ("node-rollout-1", "rollout", "rollout/1", "crash")
        assert found["incident_open", *who] == 1
        assert found["incident_opened_timestamp_seconds", *who] <= world.clock.wall()
        assert found["incident_recent_timestamp_seconds", *who] <= world.clock.wall()
        assert found["incidents_open", "proposed"] == 1
        assert found["plans_waiting",] == 1 and found["evictions_limit",] == 6
        assert found["plans_waiting_deadline_timestamp_seconds",] > world.clock.wall()
        assert found["watch_lease_expires_timestamp_seconds",] > world.clock.wall()
        assert found["replicas", "rollout", "lost"] == 1 and found["replicas", "rollout", "serving"] == 2

        commands.pause_recovery(RunDir(tmp_path), "eve", "drill")
        eventually(lambda: _scraped(server)["watch_paused",] == 1, "the pause shows")


def test_every_name_of_the_catalogue_is_served(tmp_path: Path, fake_run: RunDir) -> None:
    world = World(tmp_path, mode="approve")
    watch, meter = _metered(world)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: any(e.kind is EventKind.PLAN_PROPOSED for e in world.journal.events()), watch)
    dataset = {"rows": 8, "rows_seen": 4, "dropped": {"stale": 1}}
    step = {"step": 0, "seconds": 1.0, "health": {sign.name: 0.5 for sign in SIGNS}, "dataset": dataset}
    world.journal.append(filled(EventKind.STEP_COMMITTED, step))
    rewards = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "response_length": 7.0}
    evaluation = {**rewards, "pass_at": {"1": 0.5}, "unscored": {"reward_failed": 1}}
    world.journal.append(filled(EventKind.EVALUATION_FINISHED, evaluation))
    with _served(tmp_path, world, meter) as server:
        eventually(lambda: ("plans_waiting",) in _scraped(server), "the journal is read")
        names = {f"rolecall_{key[0]}" for key in (*_scraped(server), *_looked(fake_run))}
        page = _get(server.url)[1]
    assert names == {m.name for m in CATALOGUE if m.subject in (MetricScope.WATCH, MetricScope.RUN)}
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_scrape_during_a_stuck_tick_shows_the_age_of_the_tick(tmp_path: Path) -> None:
    world = World(tmp_path)
    stuck, goes_on = threading.Event(), threading.Event()

    class Stuck(FakeSource):
        def poll(self, timeout_seconds: float) -> Any:
            if goes_on.is_set():
                return super().poll(timeout_seconds)
            stuck.set()
            assert goes_on.wait(PATIENCE_SECONDS)
            return super().poll(timeout_seconds)

    watch, meter = _metered(world, Stuck(world.clock))
    thread = threading.Thread(target=watch.tick)
    thread.start()
    try:
        assert stuck.wait(PATIENCE_SECONDS)
        with _served(tmp_path, world, meter) as server:
            eventually(lambda: ("watch_fence",) in _scraped(server), "the journal is read meanwhile")
            assert _scraped(server)["watch_ticks_total",] == 0
            assert ("watch_tick_timestamp_seconds",) not in _scraped(server)
            world.clock.advance(60.0)
            assert _get(server.url, "/healthz")[0] == 503
            goes_on.set()
            thread.join(PATIENCE_SECONDS)
            assert _scraped(server)["watch_ticks_total",] == 1
            assert _get(server.url, "/healthz")[0] == 200
    finally:
        goes_on.set()
        thread.join(PATIENCE_SECONDS)


def test_a_tick_that_fails_and_a_detector_that_fails_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch, meter = _metered(world)

    def broken(observation: Any) -> Any:
        raise ValueError("no band")

    world.detector.observe = broken  # type: ignore[method-assign]
    world.step(watch)
    assert meter.view.blind and meter.view.num_failures == 0
    world.switch.dies_before = "append oncall_paged"
    watch._journal.close()
    watch._journal.flag = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="no band"):
        watch.tick()
    assert (meter.view.num_ticks, meter.view.num_failures) == (2, 1)


def test_a_watch_without_the_lease_serves_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = _metered(world), _metered(world)
    second[0]._holder = "host:other:2"
    world.step(first[0], second[0])
    with _served(tmp_path, world, first[1]) as one, _served(tmp_path, world, second[1]) as other:
        for server in (one, other):
            eventually(lambda s=server: ("watch_fence",) in _scraped(s), "the journal is read")
        assert (_scraped(one)["watch_acting",], _scraped(other)["watch_acting",]) == (1, 0)
        assert _scraped(one)["watch_fence",] == _scraped(other)["watch_fence",] == 1


def test_hostile_names_stay_text_and_are_bounded(tmp_path: Path) -> None:
    world = World(tmp_path, mode="observe")
    watch, meter = _metered(world)
    evil = 'rollout/1"} 1\nrolecall_watch_acting 7 # \\ ' + "x" * 5000
    said = diagnosis(FaultClass.CRASH, ("rollout/1", 1))
    world.step(watch)
    open_incident(
        world.journal, IncidentProjection(), replace(said, suspects=(replace(said.suspects[0], replica=evil),))
    )
    meter.change(unreachable=(("node-\udce9\n", 1.0),))
    with _served(tmp_path, world, meter) as server:
        eventually(lambda: any(k[0] == "incident_open" for k in _scraped(server)), "the incident is open")
        found = _scraped(server)
    assert found["watch_acting",] == 1
    ((_, _, _, replica, _),) = [k for k in found if k[0] == "incident_open"]
    assert found["watch_agent_unreachable_timestamp_seconds", "node-?\n"] == 1
    assert replica.startswith('rollout/1"} 1\nrolecall') and len(replica) == 120


def test_roles_that_an_agent_invents_fill_no_prometheus(tmp_path: Path) -> None:
    world = World(tmp_path)
    book = IncidentProjection()
    for n in range(NUM_ROLES_MAX + 10):
        open_incident(world.journal, book, diagnosis(FaultClass.CRASH, (f"invented{n}/0", 1)))
    looks = JournalMetricsPoller(world.journal, parse_job({}), "r-1", world.clock, ours=False)
    assert looks.poll()
    opened = {k[1]: v for k, v in _by_key(looks).items() if k[0] == "incidents_opened_total" and v}
    assert len(opened) == NUM_ROLES_MAX + 1 and opened[""] == 10
    assert len({k[1] for k in _by_key(looks) if k[0] == "incident_detections_total"}) < NUM_ROLES_MAX + 10


# --- where it is served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "9478", ":9478", "localhost", "127.0.0.1:99999", "127.0.0.1:x", "http://a:1", "a:1/x", "u@a:1", "::1:2"],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics: .* is not HOST:PORT"):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9478") == ("127.0.0.1", 9478)
    assert parse_address("[::1]:0") == ("::1", 0)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, meter = _metered(world)
    with _served(tmp_path, world, meter) as server:
        taken = parse_address(urlsplit(server.url).netloc)
        with pytest.raises(ConfigError, match=f"--metrics: 127.0.0.1:{taken.port}: .*in use"):
            WatchServer(RunDir(tmp_path), parse_job({}), taken, meter, SystemClock(), agents=None)


def test_the_address_in_the_runs_directory_is_of_a_living_watch(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r-1")
    (run.path / "watch.json").write_text(
        json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid(), "start_ticks": 1})
    )
    assert serving(run) is None, "another process of this number wrote it"
    first = EndpointAnnouncement(run, own("http://127.0.0.1:2"))
    first.announce({"node-1": "http://127.0.0.1:3"})
    assert serving(run) == own("http://127.0.0.1:2")
    second = EndpointAnnouncement(
        run, ServedEndpoint(url="http://127.0.0.1:4", pid=os.getpid(), start_ticks=own("").start_ticks)
    )
    second.announce({})
    assert serving(run) == own("http://127.0.0.1:2"), "the first one's stays"
    groups = json.loads(targets_path(run).read_text())
    assert [g["targets"] for g in groups] == [["127.0.0.1:3"], ["127.0.0.1:2"]]
    assert [g["labels"]["instance"] for g in groups] == ["r-1/node-1", "r-1/watch"]

    first.announce({"node-1": "http://127.0.0.1:5"})
    assert json.loads(targets_path(run).read_text())[0]["targets"] == ["127.0.0.1:5"]
    second.close()
    assert serving(run) is not None
    first.close()
    assert not (run.path / "watch.json").exists() and targets_path(run).exists()
    second.announce({})
    assert serving(run) == own("http://127.0.0.1:4")
    withdraw(run)
    assert not targets_path(run).exists()
    (run.path / "watch.json").write_text("{")
    assert serving(run) is None


def test_a_real_watch_serves_and_its_address_goes_with_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, num_steps=5, strikes=(), finish=False).build()
    stop = threading.Event()
    thread = threading.Thread(target=watch_run, args=(run,), kwargs={"stop": stop})
    thread.start()
    try:
        eventually(lambda: serving(run), "the watch says where it serves")
        at = serving(run)
        assert at is not None and at.url.startswith("http://127.0.0.1:")
        eventually(lambda: b"\nrolecall_watch_acting 1.0\n" in _get(at.url)[1], "it acts")
        eventually(lambda: b"\nrolecall_run_step 4.0\n" in _get(at.url)[1], "it reads the journal")
    finally:
        stop.set()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and not (run.path / "watch.json").exists()
    with pytest.raises(OSError, match="refused"):
        _get(at.url)


def _main(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    return main(["watch", *argv]), capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_serve(
    tmp_path: Path, fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(fake_run.path)
    assert _main(capsys, "run", run, "--metrics", "9478") == (2, ANY)
    code, said = _main(capsys, "run", run, "--web-config", str(tmp_path / "web.yml"))
    assert code == 2 and "--web-config: needs --metrics" in said
    code, said = _main(capsys, "run", run, "--metrics", "127.0.0.1:0", "--web-config", str(tmp_path / "web.yml"))
    assert code == 2 and "web.yml" in said
    code, said = _main(capsys, "prometheus", "http://127.0.0.1:1", "--metrics", "127.0.0.1:0")
    assert code == 2 and "No such option: --metrics" in said
    assert not (fake_run.path / "watch.json").exists()


def test_tls_and_users_are_asked_for_and_strangers_learn_only_that_it_lives(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config: {{cert_file: node.crt, key_file: node.key}}\nbasic_auth_users: {{prometheus: {HASH}}}\n"
    )
    world = World(tmp_path)
    _, meter = _metered(world)
    web = load_web_config(tmp_path / "web.yml")
    server = WatchServer(RunDir(tmp_path), parse_job({}), LOOPBACK, meter, world.clock, agents=None, web=web)
    context = ssl.create_default_context(cafile=tmp_path / "node.crt")

    def get(path: str, authorization: str = "") -> tuple[int, bytes]:
        port = urlsplit(server.url).port
        with closing(http.client.HTTPSConnection("localhost", port, timeout=10, context=context)) as connection:
            connection.request("GET", path, headers={"Authorization": authorization})
            answer = connection.getresponse()
            return answer.status, answer.read()

    try:
        assert server.url.startswith("https://")
        assert get("/metrics")[0] == 401 and get("/metrics", basic("prometheus", "wrong"))[0] == 401
        assert get("/healthz") == (200, b'{"ok":true}')
        status, page = get("/metrics", basic("prometheus", PASSWORD))
        assert status == 200 and b"rolecall_watch_build_info" in page
    finally:
        server.close()


def test_an_external_job_has_a_watch_and_incidents_and_no_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch, meter = _metered(world)
    world.step(watch)
    with _served(tmp_path, world, meter, ours=False) as server:
        eventually(lambda: ("watch_fence",) in _scraped(server), "the journal is read")
        names = {key[0] for key in _scraped(server)}
    assert {n for n in names if n.startswith(("run_", "replica"))} == {"run_info"}
    assert "incidents_open" in names
    assert not (tmp_path / "watch.json").exists() and not targets_path(RunDir(tmp_path)).exists()


def test_every_guard_has_a_series_before_it_holds_something() -> None:
    named = set(re.findall(r'GuardResult\(\s*"(\w+)"', Path(guards.__file__).read_text()))
    assert len(named) > 5 and named | {guards.AT_ONCE, guards.HOLD, guards.MODE} == set(GUARDS)


def test_a_real_prometheus_finds_the_watch_by_the_runs_targets(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch, meter = _metered(world)
    world.step(watch)
    run, folder = RunDir(tmp_path), tmp_path / "server"
    folder.mkdir()
    scrape = {"job_name": "rolecall-run", "scrape_interval": "1s", "scrape_timeout": "1s"}
    files = [{"files": [str(targets_path(run))], "refresh_interval": "1s"}]
    config = {"scrape_configs": [{**scrape, "file_sd_configs": files}]}
    (folder / "scrape.yml").write_text(json.dumps(config))
    name = f'job="rolecall-watch",instance="{tmp_path.name}/watch"'
    with prometheus(folder, config=folder / "scrape.yml") as scraper:
        with _served(tmp_path, world, meter):
            eventually(lambda: scraper.count(f"rolecall_watch_acting{{{name}}} == 1"), "the watch is scraped")
        assert scraper.count(f"up{{{name}}}"), "it is gone, and the run goes on"
        withdraw(run)
        eventually(lambda: not scraper.count(f"up{{{name}}}"), "the run is over")
