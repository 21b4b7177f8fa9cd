"""`watch agents FILE`: its two forms, and a list that is read again while the watch runs."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.config.job import parse_job
from rolecall.core.errors import ConfigError, JournalError
from rolecall.core.http import HttpFailed
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.sources.agents import AgentsSource
from rolecall.testing.synthetic_run import FakeFleet
from rolecall.watch.agents import (
    RETRY_SECONDS,
    AgentsFile,
    entries_of,
    former_agents,
    named_agents,
    node_of,
    observing_run,
)
from tests.agent.processes import AgentProcess
from tests.support import PATIENCE_SECONDS, eventually


class World:
    """Agents that answer with their host's name, and one file about them."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.kept = path, FakeClock(), list[dict[str, str]]()
        self.silent, self.asked = set[str](), list[str]()
        self.renamed = dict[str, str]()  # URL -> node, instead of its host's name
        self.file = AgentsFile(path, self.ask, self.keep, self.clock)

    def ask(self, url: str) -> str:
        self.asked.append(url)
        if url in self.silent:
            raise HttpFailed("connection refused")
        return self.renamed.get(url) or url.removeprefix("http://").partition(":")[0]

    def keep(self, found: Mapping[str, str]) -> None:
        self.kept.append(dict(found))

    def write(self, text: str) -> None:
        """In place of the old one, as configuration management does it."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    def nodes(self) -> list[str]:
        return sorted(self.file.urls())

    def settle(self) -> list[str]:
        """The nodes once the file as it is now has been read."""
        self.file.urls()
        if self.file._thread is not None:
            self.file._thread.join()
        return self.nodes()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "agents.yaml")


GROUPS = [
    {"targets": ["a:1", "b:2"], "labels": {"cluster": "x"}},
    {"targets": ["c:3"], "labels": {"__scheme__": "https"}},
    {"targets": []},
]


@pytest.mark.parametrize("name", ["nodes.json", "nodes.yml", "nodes.yaml"])
def test_groups_as_prometheus_reads_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(GROUPS))
    assert entries_of(tmp_path / name) == ["http://a:1", "http://b:2", "https://c:3"]


def test_the_example_of_the_docs_is_one(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(
        "# written by the scheduler\n- targets: [gpu-001:9477, gpu-002:9477]\n  labels: {cluster: a}\n"
    )
    assert entries_of(tmp_path / "nodes.yaml") == ["http://gpu-001:9477", "http://gpu-002:9477"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1", "expected a list of groups"),
        ("[1]", "group 0: expected targets"),
        ("[{targets: a:1}]", "group 0: expected targets"),
        ("[{targets: ['a:1'], labels: 3}]", "group 0"),
        ("[{targets: ['']}]", "neither"),
        ("[{targets: ['a:1'], labels: {__scheme__: ftp}}]", "'ftp://a:1' is neither"),
        ("[{targets: ['a:99999']}]", "neither"),
        ("[]", "expected 1 to"),
        ("{", "not YAML"),
        ("\x00", "not a text"),
    ],
)
def test_an_invalid_list_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "nodes.yaml").write_text(text)
    with pytest.raises(ConfigError) as e:
        entries_of(tmp_path / "nodes.yaml")
    assert problem in str(e.value)


def test_a_changed_file_is_reread_and_known_agents_are_not_queried_again(world: World) -> None:
    world.write("[{targets: ['a:1', 'b:1']}]")
    assert world.file.first() == {"a": "http://a:1", "b": "http://b:1"}
    assert world.settle() == ["a", "b"] and world.kept == []
    world.write("[{targets: ['b:1', 'c:1']}]")
    assert world.settle() == ["b", "c"]
    assert world.kept == [{"b": "http://b:1", "c": "http://c:1"}]
    assert sorted(world.asked) == ["http://a:1", "http://b:1", "http://c:1"]
    assert world.settle() == ["b", "c"] and len(world.kept) == 1  # not read again as it stands


def test_requests_block_nothing(world: World) -> None:
    world.write("[{targets: ['a:1']}]")
    world.file.first()
    answers, asked = threading.Event(), threading.Event()

    def slow(url: str) -> str:
        asked.set()
        assert answers.wait(60)
        return "b"

    world.file._ask = slow
    world.write("[{targets: ['a:1', 'b:1']}]")
    assert world.nodes() == ["a"] and asked.wait(60) and world.nodes() == ["a"]
    answers.set()
    assert world.settle() == ["a", "b"]


@pytest.mark.parametrize("text", ["[{targets: 5}]", "", "[{targets: ['nonsense:x']}]", None])
def test_a_file_that_is_damaged_or_gone_changes_nothing(
    world: World, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    world.write("[{targets: ['a:1']}]")
    world.file.first()
    if text is None:
        world.path.unlink()
    else:
        world.write(text)
    for _ in range(3):
        assert world.settle() == ["a"]
    assert len(caplog.records) == 1 and "agents: " in caplog.text
    world.write("[{targets: ['b:1']}]")
    assert world.settle() == ["b"]


def test_one_that_does_not_answer_is_left_out_said_once_and_asked_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.silent = {"http://b:1"}
    world.write("[{targets: ['a:1', 'b:1']}]")
    assert world.file.first() == {"a": "http://a:1"}
    assert world.settle() == ["a"]
    world.clock.advance(RETRY_SECONDS)
    assert world.settle() == ["a"] and world.asked.count("http://b:1") == 2
    assert len(caplog.records) == 1 and "b:1: no agent answers there (connection refused)" in caplog.text
    world.silent = set()
    world.clock.advance(RETRY_SECONDS)
    assert world.settle() == ["a", "b"] and world.asked.count("http://a:1") == 1
    world.clock.advance(RETRY_SECONDS)
    world.settle()
    assert world.asked.count("http://b:1") == 3


def test_a_node_that_is_down_when_the_watch_starts_again_has_its_former_name(world: World) -> None:
    """One that is not listed is never unreachable: its incident would end as recovered."""
    world.write("[{targets: ['a:1', 'b:1', 'new:1', 'c:2']}]")
    world.silent, world.renamed = {"http://b:1", "http://new:1", "http://a:1"}, {"http://c:2": "c"}
    former = {"a": "http://a:1", "b-7": "http://b:1", "c": "http://c:1", "gone": "http://gone:1"}
    world.file = AgentsFile(world.path, world.ask, world.keep, world.clock, former)
    assert world.file.first() == {"c": "http://c:2", "a": "http://a:1", "b-7": "http://b:1"}
    world.silent = {"http://b:1"}
    world.clock.advance(RETRY_SECONDS)
    assert world.settle() == ["a", "b-7", "c", "new"] and world.asked.count("http://b:1") == 2
    assert world.kept[-1]["b-7"] == "http://b:1", "known to the next watch, too"
    world.silent, world.renamed = set(), {"http://b:1": "b-8"}
    world.clock.advance(RETRY_SECONDS)
    assert world.settle() == ["a", "b-8", "c", "new"], "as it calls itself now"


def test_a_former_name_is_not_kept_once_its_agent_is_elsewhere(world: World) -> None:
    world.write("[{targets: ['a:1', 'b:1']}]")
    world.silent, world.renamed = {"http://a:1"}, {"http://b:1": "a"}
    world.file = AgentsFile(world.path, world.ask, world.keep, world.clock, {"a": "http://a:1"})
    assert world.file.first() == {"a": "http://b:1"}


def test_a_list_of_addresses_has_the_former_names_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observing_run(tmp_path, "job", {"b-7": "http://b:1"})
    world = World(tmp_path / "unused")
    world.silent = {"http://b:1", "http://c:1"}
    found = named_agents(["http://a:1", "http://b:1"], world.ask, former_agents(tmp_path, "job"))
    assert found == {"a": "http://a:1", "b-7": "http://b:1"} and "b:1: no agent answers there" in caplog.text
    with pytest.raises(ConfigError, match="c:1: no agent answers there"):
        named_agents(["http://b:1", "http://c:1"], world.ask, former_agents(tmp_path, "job"))
    assert former_agents(tmp_path, "another") == {}


def test_two_nodes_that_swap_their_addresses_are_named_again(world: World) -> None:
    world.write("[{targets: ['a:1', 'b:1', 'c:1']}]")
    world.file.first()
    world.renamed = {"http://a:1": "b", "http://b:1": "a"}
    assert world.settle() == ["a", "b", "c"] and len(world.asked) == 3
    world.file.doubt("b")  # the source has noticed one of them
    world.settle()
    assert world.file.urls() == {"a": "http://b:1", "b": "http://a:1", "c": "http://c:1"} == world.kept[-1]
    assert world.asked.count("http://c:1") == 1
    world.renamed["http://a:1"] = "d"
    world.file.doubt("b")
    assert world.settle() == ["a", "b", "c"], "not before it is due"
    world.clock.advance(RETRY_SECONDS)
    assert world.settle() == ["a", "c", "d"]
    assert world.asked.count("http://a:1") == 3


def test_a_node_that_is_in_doubt_and_does_not_answer_stays_listed(world: World) -> None:
    world.write("[{targets: ['a:1']}]")
    world.file.first()
    world.silent = {"http://a:1"}
    world.file.doubt("a")
    assert world.settle() == ["a"]


def test_two_entries_of_one_node_are_asked_once_each_time(world: World) -> None:
    world.write("[{targets: ['a:1']}]")
    world.file.first()
    world.renamed = {"http://b:1": "a"}
    world.write("[{targets: ['a:1', 'b:1']}]")
    world.settle()
    assert world.file.urls() == {"a": "http://a:1"}
    assert sorted(world.asked) == ["http://a:1", "http://a:1", "http://b:1"]


def test_none_that_answers_is_a_mistake_at_the_start(world: World) -> None:
    world.silent = {"http://a:1"}
    world.write("[{targets: ['a:1']}]")
    with pytest.raises(ConfigError, match="no agent answers there"):
        world.file.first()


def test_two_of_one_node_are_reported_and_the_first_is_watched(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("[{targets: ['a:1', 'a:2']}]")
    assert world.file.first() == {"a": "http://a:1"}
    assert "http://a:1 and http://a:2 both report node a" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError(28, os.strerror(28)), JournalError("No space left")], ids=["disk", "journal"]
)
def test_a_disk_that_is_full_does_not_end_the_watch(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def full(found: Mapping[str, str]) -> None:
        raise error

    world.write("[{targets: ['a:1']}]")
    world.file.first()
    world.file._keep = full
    world.write("[{targets: ['b:1']}]")
    assert world.settle() == ["b"]
    assert "No space left" in caplog.text


def test_agents_come_and_go_with_the_file(tmp_path: Path) -> None:
    """Real agents, a real source: who is added is read, who is taken away is not asked any more, nor missed."""
    agents = [AgentProcess(tmp_path / name, "--node", name) for name in ("node-1", "node-2")]
    path = tmp_path / "nodes.json"
    netlocs = [agent.netloc for agent in agents]
    path.write_text(json.dumps([{"targets": netlocs[:1]}]))
    run = observing_run(tmp_path / "runs", "r", {"none": "http://a:1"})
    clock = SystemClock()
    file = AgentsFile(path, node_of, lambda found: observing_run(tmp_path / "runs", "r", found) and None, clock)
    source = AgentsSource(file.urls, clock, 0.05, forgets=True)

    def read() -> set[str]:
        return {str(b.node) for b in source.poll(0.05).batches}

    try:
        assert list(file.first()) == ["node-1"]
        source.start()
        eventually(lambda: read() == {"node-1"}, "the first is read")
        path.write_text(json.dumps([{"targets": netlocs}]))
        eventually(lambda: read() == {"node-1", "node-2"}, "both are read")
        path.write_text(json.dumps([{"targets": netlocs[1:]}]))
        eventually(lambda: read() == {"node-2"} == set(source._agents), "the second alone is read")
        eventually(lambda: list(run.read()["agents"]) == ["node-2"], "it is kept")
        agents.pop(0).close()
        eventually(lambda: read() == {"node-2"}, "it goes on")
        assert not source.poll(0.05).unreachable
    finally:
        source.close()
        for agent in agents:
            agent.close()


def test_a_watch_follows_a_node_that_is_renamed(tmp_path: Path) -> None:
    """A real agent, and a real source that notices it."""
    agent = AgentProcess(tmp_path / "node", "--node", "node-1")
    path = tmp_path / "nodes.yaml"
    path.write_text(f"[{{targets: ['{agent.netloc}']}}]")
    clock = SystemClock()
    file = AgentsFile(path, node_of, lambda _: None, clock)
    source = AgentsSource(file.urls, clock, 0.05, forgets=True, doubt=file.doubt)
    try:
        assert list(file.first()) == ["node-1"]
        file._names = {entry: "former" for entry in file._names}
        file._found = {"former": f"http://{agent.netloc}"}
        source.start()
        eventually(lambda: {str(b.node) for b in source.poll(0.05).batches} == {"node-1"}, "it is read by its name")
        assert list(source._agents) == ["node-1"]
    finally:
        source.close()
        agent.close()


def test_the_command_watches_the_agents_of_a_file(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "node")
    try:
        (tmp_path / "nodes.yaml").write_text(f"- targets: ['{agent.netloc}', 'localhost:1']\n")
        command = [sys.executable, "-m", "rolecall", "watch", "agents", str(tmp_path / "nodes.yaml"), "--id", "w"]
        command += ["--runs", str(tmp_path / "runs"), "--for", "0.5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        assert "watching 1 node" in done.stdout + done.stderr
        assert "http://localhost:1: no agent answers there" in done.stderr
        assert json.loads((tmp_path / "runs" / "w" / "run.json").read_text())["agents"] == {
            "node-1": f"http://{agent.netloc}"
        }
    finally:
        agent.close()


def test_a_node_that_is_watched_no_more_is_no_fault() -> None:
    fleet, detector = FakeFleet(seed=3), LiveDetector(parse_job({"name": "x"}).detector, {})
    for observation in fleet.run(90):
        assert not detector.observe(observation)
    for observation in fleet.run(150):
        kept = tuple(b for b in observation.batches if b.node != "node-rollout-1")
        assert not detector.observe(replace(observation, batches=kept))
