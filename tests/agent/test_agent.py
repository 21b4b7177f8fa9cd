"""The agent as a process: SIGKILL, restart, exits, promotion, bad input, clean end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.node import Agent, AgentSettings
from rolecall.core.clock import FakeClock
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import bearer_token
from rolecall.core.telemetry import EventBatch, SampleBatch
from rolecall.detector.sources.agent_wire import checked_news
from tests.agent.processes import NODE, TOKEN, AgentProcess, Child, http_request, secret
from tests.support import PATIENCE_SECONDS, eventually

WAIT_SECONDS = 30.0
"""The longest that the agent lets a request wait for an event."""


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    path = tmp_path / "node-1"
    path.mkdir()
    return path


@pytest.fixture
def agent(node_dir: Path) -> Iterator[AgentProcess]:
    it = AgentProcess(node_dir)
    yield it
    it.close()


@pytest.fixture
def child(node_dir: Path) -> Iterator[Child]:
    it = Child(node_dir)
    yield it
    it.close()


def _kinds(agent: AgentProcess) -> list[str]:
    return [e["kind"] for e in agent.events()]


def _registered(agent: AgentProcess, replica: str) -> None:
    eventually(lambda: agent.newest(replica) is not None, f"{replica} is seen")


def test_a_process_is_seen_and_its_exit_is_heard(agent: AgentProcess, child: Child) -> None:
    child.start("rollout/1", incarnation=2)
    _registered(agent, "rollout/1")
    child.do("reporter.enter_phase('generate'); reporter.progress(3)")
    eventually(lambda: (agent.newest("rollout/1") or {})["progress"] == 3, "its progress is seen")
    after = agent.events()[-1]["seq"]
    begun = time.monotonic()
    child.signal(signal.SIGKILL)
    [event] = agent.events(after, wait=WAIT_SECONDS)
    assert begun <= event["at"] <= time.monotonic()
    assert (event["kind"], event["replica"], event["incarnation"]) == ("exited", "rollout/1", 2)
    assert event["process"]["pid"] == child.pid
    assert event["detail"]["last_phase"] == "generate" and event["detail"]["cause"] == "killed"
    sample = agent.newest("rollout/1")
    assert sample is not None and sample["progress"] == 3
    eventually(lambda: (agent.newest("rollout/1") or {})["alive"] is False, "it is shown dead")
    _, metrics = agent.get("/metrics")
    counted = (
        'rolecall_process_exits_total{node="node-1",rank="0",reason="killed",replica="rollout/1",role="rollout"} 1.0'
    )
    assert counted in metrics


def test_a_stopped_process_is_sampled(agent: AgentProcess, child: Child) -> None:
    child.start("trainer/1")
    _registered(agent, "trainer/1")
    child.do("reporter.enter_phase('compute')")
    child.signal(signal.SIGSTOP)

    def stopped() -> bool:
        sample = agent.newest("trainer/1")
        return sample is not None and sample["proc_state"] == "T" and sample["phase"] == "compute"

    eventually(stopped, "T and the phase are seen")
    cursor = agent.get("/v1/samples?since=0")[1]["cursor"]

    def later() -> list[int]:
        return [p["beats"] for p in agent.get(f"/v1/samples?since={cursor}")[1]["processes"]]

    eventually(lambda: len(later()) >= 5, "five more rounds")
    assert len(set(later())) == 1, "a stopped process does not beat"


def test_numbers_and_processes_survive_a_sigkill_of_the_agent(node_dir: Path, child: Child) -> None:
    first = AgentProcess(node_dir)
    child.start("rollout/1")
    _registered(first, "rollout/1")
    before = first.events()
    first.kill()
    assert (node_dir / "agent.sock").exists()  # what it left behind
    child.do("reporter.progress(5)")  # the job continues without
    second = AgentProcess(node_dir)
    try:
        _registered(second, "rollout/1")
        assert (second.newest("rollout/1") or {})["progress"] == 5
        events = second.events()
        assert events[: len(before)] == before
        assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
        assert [e["kind"] for e in events] == ["agent_started", "registered", "agent_started"]
        child.signal(signal.SIGKILL)
        assert [e["kind"] for e in second.events(events[-1]["seq"], wait=WAIT_SECONDS)] == ["exited"]
    finally:
        second.close()


def test_a_process_that_starts_before_its_agent_is_found(node_dir: Path, child: Child) -> None:
    child.start("rollout/1")
    late = AgentProcess(node_dir)
    try:
        _registered(late, "rollout/1")
    finally:
        late.close()


def test_a_promotion_reaches_samples_and_events(agent: AgentProcess, child: Child) -> None:
    child.start("standby/0")
    _registered(agent, "standby/0")
    child.do(f"reporter.become(replica='rollout/2', incarnation=4, secret={secret('rollout/2', 0, 4)!r})")
    _registered(agent, "rollout/2")
    reported = [(e["replica"], e["incarnation"]) for e in agent.events() if e["kind"] == "registered"]
    assert reported == [("standby/0", 1), ("rollout/2", 4)]


def test_an_impostor_is_not_seen(agent: AgentProcess, child: Child) -> None:
    child.start("rollout/1", given_secret=secret("rollout/2"))
    assert "refused register: wrong secret for rollout/1:0#1" in child.warning()
    own = Child(agent.node_dir)
    try:
        own.start("rollout/3")
        _registered(agent, "rollout/3")
    finally:
        own.close()
    assert agent.newest("rollout/1") is None
    metrics = agent.get("/metrics")[1]
    assert 'rolecall_agent_registrations_refused_total{node="node-1"} 1.0' in metrics


def test_a_fast_death_by_exception_is_reported_with_its_cause(agent: AgentProcess, child: Child) -> None:
    child.start("trainer/0")
    _registered(agent, "trainer/0")
    child.execute("reporter.set_step(3); raise FloatingPointError('loss is NaN')")
    eventually(lambda: "exited" in _kinds(agent), "its exit is reported")
    events = agent.events()[1:]
    assert [e["kind"] for e in events] == ["registered", "exception", "exited"]
    detail = events[1]["detail"]
    assert (detail["type"], detail["message"], detail["step"]) == ("FloatingPointError", "loss is NaN", "3")
    assert events[2]["detail"]["cause"] == "exception"


def test_a_raylet_that_becomes_known_later(agent: AgentProcess) -> None:
    raylet = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    record = {"pid": raylet.pid, "start_ticks": process_start_ticks(raylet.pid)}
    (agent.node_dir / "raylet.json").write_text("{torn")
    (agent.node_dir / "raylet.json").write_text(json.dumps(record))
    raylet.kill()
    raylet.communicate()
    [event] = agent.events(1, wait=WAIT_SECONDS)  # also when it died before the agent read the file
    assert (event["kind"], event["process"]["pid"]) == ("raylet_exited", raylet.pid)


def test_answers_match_the_detectors_types(agent: AgentProcess, child: Child) -> None:
    child.start("rollout/1")
    _registered(agent, "rollout/1")
    batch = SampleBatch.from_dict(agent.get("/v1/samples?since=0")[1])
    assert batch.agent_pid == agent.pid and batch.processes and batch.hosts
    events = EventBatch.from_dict(agent.get("/v1/events?after=0")[1])
    assert events.newest == len(events.events) == 2
    news, reported = checked_news(agent.get("/v1/news?after=1&since=0&wait=0")[1], "node-1")
    assert news.agent_pid == agent.pid and news.cursor >= batch.cursor and news.hosts
    assert {p.replica for p in news.processes} == {"rollout/1"} and reported.events == events.events[1:]
    newest, _ = checked_news(agent.get("/v1/news?after=9&since=0&wait=0.01&rounds=1")[1], "node-1")
    assert len(newest.processes) == 1 and len(newest.hosts) == 1
    assert agent.get("/v1/news?form=rows")[0] == 400
    status, health = agent.get("/healthz")
    assert status == 200 and health["ok"] and health["processes"] == 1
    status, metrics = agent.get("/metrics")
    assert status == 200
    assert re.search(r'rolecall_process_up\{[^}]*replica="rollout/1"[^}]*\} 1\.0', metrics)
    assert 'rolecall_probe_up{node="node-1",probe="process"} 1.0' in metrics


def test_a_poll_of_a_watch_ends_with_an_event_else_with_a_sample(agent: AgentProcess, child: Child) -> None:
    child.start("rollout/1")
    _registered(agent, "rollout/1")
    first, _ = checked_news(agent.get("/v1/news?after=2&since=0&wait=0")[1], "node-1")
    batch, events = checked_news(agent.get(f"/v1/news?after=2&since={first.cursor}&wait=0.5")[1], "node-1")
    assert batch.cursor > first.cursor and batch.processes and (events.newest, events.events) == (2, ())
    assert events.after_wall_at == agent.events()[-1]["wall_at"]
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(agent.get, f"/v1/news?after=2&since={batch.cursor}&wait={WAIT_SECONDS}")
        child.execute("reporter.set_step(3); raise FloatingPointError('loss is NaN')")
        _, events = checked_news(poll.result()[1], "node-1")
    assert events.events[0].kind == "exception"


def test_stacks_need_the_token_and_a_registered_process(agent: AgentProcess, child: Child) -> None:
    child.start("rollout/1")
    _registered(agent, "rollout/1")
    bearer = f"Bearer {bearer_token(TOKEN)}"
    assert agent.get(f"/v1/evidence/stacks?pid={child.pid}")[0] == 401
    assert agent.get(f"/v1/evidence/stacks?pid={child.pid}", Authorization=f"Bearer {TOKEN}")[0] == 401
    assert agent.get(f"/v1/evidence/stacks?pid={os.getpid()}", Authorization=bearer)[0] == 404
    assert agent.get("/v1/evidence/stacks?pid=x", Authorization=bearer)[0] == 400
    child.signal(signal.SIGSTOP)  # as a hung one would be
    answers: list[Any] = []

    def dumped() -> bool:  # py-spy may take longer than the agent waits for it, on a loaded machine
        status, stacks = agent.get(f"/v1/evidence/stacks?pid={child.pid}", Authorization=bearer)
        answers.append(stacks)
        return status == 200

    eventually(dumped, "its stacks are reported")
    frames = [f for thread in answers[-1]["threads"] for f in thread["frames"]]
    assert any(f["filename"].endswith("child.py") for f in frames)
    assert all(not f["locals"] for f in frames)


def test_sigterm_ends_it_and_takes_its_files_away(agent: AgentProcess) -> None:
    agent.process.terminate()
    assert agent.process.wait(PATIENCE_SECONDS) == 0
    assert not (agent.node_dir / "agent.json").exists()
    assert not (agent.node_dir / "agent.sock").exists()


def test_it_ends_with_its_parent(node_dir: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    start = str(process_start_ticks(parent.pid))
    agent = AgentProcess(node_dir, "--parent-pid", str(parent.pid), "--parent-start", start)
    try:
        parent.kill()
        parent.communicate()
        assert agent.process.wait(PATIENCE_SECONDS) == 0
        assert not (node_dir / "agent.sock").exists()
    finally:
        agent.close()


def test_without_a_user_healthz_returns_only_the_health(node_dir: Path) -> None:
    clock = FakeClock()
    agent = Agent(AgentSettings(node=NODE, data_dir=node_dir, token=TOKEN, interval_seconds=1.0), clock)
    try:
        agent._sampler.round()
        route = agent._routes.public()["/healthz"]
        fresh = route(http_request("/healthz"))
        assert (fresh.status_code, fresh.body) == (200, b'{"ok":true}')
        clock.advance(60.0)
        stale = route(http_request("/healthz"))
        assert (stale.status_code, stale.body) == (503, b'{"ok":false}')
    finally:
        agent._shut()


def test_two_agents_do_not_share_a_directory(agent: AgentProcess) -> None:
    command = [
        sys.executable,
        "-m",
        "rolecall.agent",
        "--ranks-only",
        "--node",
        "node-1",
        "--data-dir",
        str(agent.node_dir),
    ]
    command += ["--token-file", str(agent.node_dir.parent / "token")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert second.returncode == 2
    written = json.loads((agent.node_dir / "agent.json").read_text())
    assert f"another agent (PID {written['pid']}, {written['url']}) uses this directory" in second.stderr
    assert f"kill {written['pid']};" in second.stderr and "--data-dir DIR --port PORT" in second.stderr
    assert agent.get("/healthz")[0] == 200


def test_a_second_agent_on_the_same_port_names_the_port(agent: AgentProcess, tmp_path: Path) -> None:
    url = json.loads((agent.node_dir / "agent.json").read_text())["url"]
    command = [
        sys.executable,
        "-m",
        "rolecall.agent",
        "--ranks-only",
        "--node",
        "node-1",
        "--data-dir",
        str(tmp_path / "other"),
    ]
    command += ["--token-file", str(agent.node_dir.parent / "token"), "--port", url.rpartition(":")[2]]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert second.returncode == 2
    assert f"cannot listen on {url.removeprefix('http://')}: in use by PID {agent.process.pid} (" in second.stderr
    assert "; stop it, or choose another port: --port PORT" in second.stderr
    assert "Traceback" not in second.stderr and "Errno" not in second.stderr and agent.get("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--node", "Node 1"], "node: 'node 1' is not allowed: write 1 to 63 of a-z"),
        (["--node", "n", "--token-file", "/nonexistent"], "--token-file"),
        (["--node", "n", "--interval", "0"], "expected 0.02 to 60.0 seconds"),
        (["--node", "n", "--raylet-pid", "5"], "--raylet-pid and --raylet-start belong together"),
    ],
)
def test_wrong_arguments(node_dir: Path, options: list[str], reason: str) -> None:
    (node_dir / "token").write_text(TOKEN)
    defaults = ["--token-file", str(node_dir / "token")] if "--token-file" not in options else []
    command = [sys.executable, "-m", "rolecall.agent", "--ranks-only", "--data-dir", str(node_dir), *defaults, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 2
    assert reason in done.stderr


def test_imports_of_the_agent_and_the_reporter() -> None:
    """The agent starts seven times on two cores, the reporter sits in every training process."""
    heavy = ("torch", "ray", "vllm", "numpy", "pydantic", "sqlalchemy")
    network = ("prometheus_client", "http.server", "asyncio")
    for module, forbidden in (
        ("rolecall.agent.reporter.reporter", (*heavy, *network)),
        ("rolecall.agent.__main__", heavy),
    ):
        code = f"import {module}, sys; print([m for m in {forbidden!r} if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.stdout.strip() == "[]", (module, done.stdout, done.stderr)
    code = (
        "import rolecall.agent.reporter.reporter, sys; print(sorted(m for m in sys.modules if "
        "m.startswith('rolecall')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert "telemetry" not in done.stdout and "registry" not in done.stdout


@pytest.mark.parametrize(("host", "open_to_network"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_listening_beyond_loopback_without_tls_is_warned_of(tmp_path: Path, host: str, open_to_network: bool) -> None:
    (tmp_path / "data").mkdir()
    agent = AgentProcess(tmp_path / "data", "--host", host)
    agent.process.terminate()
    said = agent.process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert ("is open to the network without TLS: set web_config_file" in said) is open_to_network, said
