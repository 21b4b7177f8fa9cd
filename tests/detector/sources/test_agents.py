"""The source `agents` against small fake agents: restarts, garbage, oversize, silence."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rolecall.core.clock import SystemClock
from rolecall.core.columns import PROCESSES
from rolecall.core.telemetry import ProcessSample, SampleBatch
from rolecall.detector.sources import agents as source_module
from rolecall.detector.sources.agents import (
    LATE_EXCUSES_SECONDS,
    AgentClientLimits,
    AgentsSource,
    Observation,
    _Agent,
    wait_seconds,
)
from tests.detector.fake_agent import NODE, FakeAgent, sample
from tests.support import PATIENCE_SECONDS


class SettableClock(SystemClock):
    set_by = 0.0

    def wall(self) -> float:
        return super().wall() + self.set_by


@contextmanager
def watched(
    agents: Callable[[], dict[str, str]],
    poll_seconds: float = 0.05,
    limits: AgentClientLimits | None = None,
    clock: SystemClock | None = None,
) -> Iterator[AgentsSource]:
    source = AgentsSource(agents, clock or SystemClock(), poll_seconds, limits)
    source.start()
    try:
        yield source
    finally:
        source.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as s:
        yield s


def agent(stack: ExitStack, **settings: Any) -> FakeAgent:
    a = FakeAgent(**settings)
    stack.callback(a.close)
    return a


def polled_until(
    source: AgentsSource, good: Callable[[Observation], object], seconds: float = PATIENCE_SECONDS
) -> Observation:
    deadline = time.monotonic() + seconds
    while True:
        observation = source.poll(0.05)
        if good(observation):
            return observation
        assert time.monotonic() < deadline, f"not within {seconds} s; last: {observation}"


def has_samples(o: Observation) -> bool:
    return any(b.processes for b in o.batches)


def test_samples_arrive_over_one_kept_connection(stack: ExitStack) -> None:
    a = agent(stack)
    source = stack.enter_context(
        watched(lambda: {NODE: a.url}, limits=AgentClientLimits(answer_seconds=PATIENCE_SECONDS))
    )
    o = polled_until(source, has_samples)
    assert o.batches[0].processes[0].replica == "rollout/1"
    polled_until(source, lambda _: len(a.asked) > 12)
    assert a.connections == 1
    assert "/v1/news?after=0&since=100&wait=0.05" in a.asked, "the cursor is given back"
    assert Observation.from_dict(json.loads(json.dumps(o.to_dict()))) == o


def test_an_event_wakes_a_poll_early_and_comes_once(stack: ExitStack) -> None:
    a = agent(stack)
    source = stack.enter_context(watched(lambda: {NODE: a.url}, poll_seconds=1.0))
    asked = "/v1/news?after={}&since=100&wait=1"
    polled_until(source, lambda _: asked.format(0) in a.asked)
    a.add_event()
    o = source.poll(600.0)  # longer than a test may take: it returned because of the event
    assert [e.replica for e in o.events] == ["rollout/1"]
    polled_until(source, lambda o: asked.format(1) in a.asked and not o.events)


def test_a_restarted_agent_is_found_at_its_new_address_and_read_from_the_start(stack: ExitStack) -> None:
    first = FakeAgent()
    urls = {NODE: first.url}
    source = stack.enter_context(watched(lambda: urls))
    polled_until(source, has_samples)
    first.add_event()
    polled_until(source, lambda o: o.events)
    first.close()
    second = agent(stack, agent_pid=2, events=list(first.events))
    urls[NODE] = second.url
    o = polled_until(source, has_samples)
    assert o.batches[-1].agent_pid == 2
    second.add_event(kind="finished")
    o = polled_until(source, lambda o: o.events)
    assert [e.seq for e in o.events] == [2], "the events read before do not come again"
    polled_until(source, lambda o: not o.unreachable)


@pytest.mark.parametrize("agent_pid", [1, 2])
@pytest.mark.parametrize("num_events", [1, 2, 3])
def test_all_events_of_a_new_data_directory_are_read(stack: ExitStack, num_events: int, agent_pid: int) -> None:
    """Its numbers have reached or passed that of the last event read from the former one. In a container the new agent
    may have the same PID."""
    first = FakeAgent()
    urls = {NODE: first.url}
    source = stack.enter_context(watched(lambda: urls))
    for _ in range(2):
        first.add_event()
    polled_until(source, lambda o: o.events)
    polled_until(source, lambda _: any("after=2" in path for path in first.asked))
    first.close()
    second = agent(stack, agent_pid=agent_pid)
    for n in range(num_events):
        second.add_event(kind="registered", wall_at=1_700_000_100.0 + n)
    urls[NODE] = second.url
    read: list[int] = []
    polled_until(source, lambda o: read.extend(e.seq for e in o.events) or len(read) >= num_events)
    second.add_event(kind="finished")
    polled_until(source, lambda o: read.extend(e.seq for e in o.events) or len(read) > num_events)
    assert read == [*range(1, num_events + 2)]


def test_an_agent_that_does_not_name_the_last_event_is_read_as_before(stack: ExitStack) -> None:
    a = agent(stack, names_last=False)
    a.add_event()
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    polled_until(source, lambda o: o.events)
    polled_until(source, lambda _: any("after=1" in path for path in a.asked))
    a.add_event(wall_at=1_700_000_012.0)
    assert [e.seq for e in polled_until(source, lambda o: o.events).events] == [2]


def test_an_agent_that_claims_thousands_of_processes_does_not_slow_the_watch(stack: ExitStack) -> None:
    many = [sample(process={"node": NODE, "pid": n, "start_ticks": 7}, rank=n) for n in range(1, 5001)]
    a = agent(stack, samples=many)
    source = stack.enter_context(
        watched(lambda: {NODE: a.url}, limits=AgentClientLimits(answer_seconds=PATIENCE_SECONDS))
    )
    polled_until(source, has_samples)
    num_asked = len(a.asked)
    polled_until(source, lambda _: len(a.asked) > num_asked + 1)
    assert a.asked[-1] == "/v1/news?after=0&since=100&wait=0.05"


def test_a_dead_agent_is_reported_with_the_reason_and_since_when(stack: ExitStack) -> None:
    gone = FakeAgent()
    gone.close()
    alive = agent(stack)
    alive.samples = []
    clock = SettableClock()
    source = stack.enter_context(watched(lambda: {"node-0": gone.url, NODE: alive.url}, clock=clock))
    o = polled_until(source, lambda o: o.unreachable)
    ((node, since, reason),) = o.unreachable
    assert node == "node-0" and reason == "connection refused" and abs(since - o.wall_at) < 10.0
    later = polled_until(source, lambda o: o.batches and o.unreachable)
    assert later.unreachable[0][1] == since, "the moment stays"
    clock.set_by = -3600.0
    assert source.poll(0.05).unreachable[0][1] == pytest.approx(since - 3600.0, abs=0.2), "on the clock as it is"


GARBAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no json": ({"/v1/news": b"<html>"}, "no JSON"),
    "deep json": ({"/v1/news": b"[" * 100_000}, "no JSON"),
    "no mapping": ({"/v1/news": b"[]"}, "expected a mapping"),
    "redirect": ({"/v1/news": 302}, "status 302"),
    "refusal": ({"/v1/news": 503}, "status 503"),
    "infinite": ({"/v1/news": json.dumps({"events": []}).encode()}, "missing"),
    "unknown path": ({"/v1/news": 404}, "status 404"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_reported_and_survived(stack: ExitStack, name: str) -> None:
    bad, reason = GARBAGE[name]
    a = agent(stack, bad=bad)
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.unreachable)
    assert reason in o.unreachable[0][2]
    assert not has_samples(o)
    a.bad = {}
    polled_until(source, lambda o: has_samples(o) and not o.unreachable)


WRONG: dict[str, tuple[str, object]] = {
    "text for a number": ("progress", "many"),
    "truth for a number": ("progress", True),
    "number for a text": ("phase", 3),
    "not finite": ("busy_seconds", float("nan")),
    "huge": ("progress", 10**30),
    "another role": ("role", "trainer"),
    "no replica": ("replica", "../../etc"),
}


def block(name: str, replicas: list[str]) -> dict[str, Any]:
    """The samples of these replicas, the first with a wrong value."""
    reported = [ProcessSample.from_dict(sample(replica=replica)) for replica in replicas]
    column, wrong = WRONG[name]
    encoded = PROCESSES.encode(reported)
    encoded["columns"][column] = [wrong, *(getattr(s, column) for s in reported[1:])]
    return encoded


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sample_does_not_hide_its_neighbour(stack: ExitStack, name: str) -> None:
    a = agent(stack, block=block(name, ["rollout/1", "rollout/2"]))
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, has_samples)
    assert [p.replica for b in o.batches for p in b.processes] == ["rollout/2"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_samples_of_its_only_process_do_not_hide_a_node(stack: ExitStack, name: str) -> None:
    a = agent(stack, block=block(name, ["rollout/1"]))
    a.add_event("xid", process=None, role="", replica="")
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.events)
    assert [str(e.kind) for e in o.events] == ["xid"] and not o.unreachable and not has_samples(o)


WRONG_EVENTS: dict[str, dict[str, Any]] = {
    "a long name": {"detail": {"x" * 5000: ""}},
    "a long text": {"detail": {"message": "x" * 5000}},
    "no detail": {"detail": None},
    "another node": {"node": "node-9"},
    "no replica": {"replica": "../../etc"},
    "half a process": {"process": {"node": NODE, "pid": 42}},
}


@pytest.mark.parametrize("name", WRONG_EVENTS)
def test_a_wrong_event_hides_none_that_follows(stack: ExitStack, name: str) -> None:
    """The agent is asked for what follows it, although nothing else came with it."""
    a = agent(stack)
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    polled_until(source, has_samples)
    a.add_event(**WRONG_EVENTS[name], wall_at=1_700_000_012.5)
    o = polled_until(source, lambda o: o.events)
    assert [(str(e.kind), e.process, e.detail) for e in o.events] == [("other", None, {})] and not o.unreachable
    a.add_event("xid")
    o = polled_until(source, lambda o: o.events)
    assert [(str(e.kind), e.seq) for e in o.events] == [("xid", 2)], "the wrong one does not come again"


def test_an_event_without_a_number_is_left_out(stack: ExitStack) -> None:
    a = agent(stack)
    a.add_event(seq="1")
    a.add_event("xid")
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    assert [e.seq for e in polled_until(source, lambda o: o.events).events] == [2]


def test_too_large_an_answer_is_refused(stack: ExitStack) -> None:
    a = agent(stack, bad={"/v1/news": b" " * (2 << 20)})
    source = stack.enter_context(watched(lambda: {NODE: a.url}, limits=AgentClientLimits(answer_bytes_max=1 << 20)))
    o = polled_until(source, lambda o: o.unreachable)
    assert "more than 1 MiB" in o.unreachable[0][2]


@pytest.mark.parametrize("how", ["silent", "drip"])
def test_an_agent_that_never_ends_its_answer_is_reported_and_left(stack: ExitStack, how: str) -> None:
    a = agent(stack, bad={"/v1/news": how})
    limits = AgentClientLimits(answer_seconds=0.3, connect_seconds=0.2)
    source = stack.enter_context(watched(lambda: {NODE: a.url}, limits=limits))
    polled_until(source, lambda o: o.unreachable)
    a.bad = {}
    polled_until(source, lambda o: has_samples(o) and not o.unreachable)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "file:///etc/passwd", "http://", "nonsense", "http://[::1"])
def test_an_invalid_address_is_reported(stack: ExitStack, url: str) -> None:
    source = stack.enter_context(watched(lambda: {NODE: url}))
    polled_until(source, lambda o: o.unreachable)


def test_close_ends_all_threads_while_an_agent_is_silent(stack: ExitStack) -> None:
    a = agent(stack)
    source = AgentsSource(lambda: {NODE: a.url}, SystemClock(), poll_seconds=0.05)
    source.start()
    polled_until(source, has_samples)
    source.close()
    assert not source._thread.is_alive() and not source._tasks
    assert source.poll(30.0).events == ()


def test_a_list_of_agents_that_cannot_be_read_keeps_those_known(stack: ExitStack) -> None:
    a = agent(stack)
    lists: list[dict[str, str]] = [{NODE: a.url}]

    def agents() -> dict[str, str]:
        if lists:
            return lists.pop()
        raise ValueError("half a file")

    source = stack.enter_context(watched(agents))
    polled_until(source, has_samples)
    a.add_event()
    assert polled_until(source, lambda o: o.events).events[0].replica == "rollout/1"


@pytest.mark.parametrize("version", [1, 3])
def test_an_agent_one_version_apart_still_works(stack: ExitStack, version: int) -> None:
    """A later one sends fields and kinds of events that are unknown here; an earlier one no number."""
    later = {} if version == 1 else {"version": version, "colour": "blue"}
    a = agent(stack, extra=later, samples=[sample(**({"mood": 0.5} if later else {}))])
    if later:
        a.add_event(kind="gpu_is_bored", mood="bad")
    a.add_event()
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    heard: list[str] = []

    def both(o: Observation) -> bool:
        heard.extend(str(e.kind) for e in o.events)
        return heard[-1:] == ["exited"] and not o.unreachable

    polled_until(source, both)
    assert heard == (["other", "exited"] if later else ["exited"])


@pytest.mark.parametrize("version", [0, 4, "2", None])
def test_an_agent_of_another_age_is_reported(stack: ExitStack, version: object) -> None:
    a = agent(stack, extra={"version": version})
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.unreachable)
    assert "version: the agent has" in o.unreachable[0][2]


def test_an_agent_that_leaves_the_list_is_reported_once(stack: ExitStack) -> None:
    a = agent(stack)
    agents = {NODE: a.url}
    source = AgentsSource(lambda: agents, SystemClock(), 0.05, forgets=True)
    stack.callback(source.close)
    source.start()
    polled_until(source, has_samples)
    assert source._num_processes == 1
    agents.clear()
    assert polled_until(source, lambda o: o.left).left == (NODE,)
    polled_until(source, lambda _: not source._num_processes)  # else who stays is asked more and more rarely
    assert not source.poll(0.0).left


def test_a_watch_that_is_always_late_names_a_silent_agent_all_the_same(stack: ExitStack) -> None:
    source = AgentsSource(dict, SystemClock())
    stack.callback(source.close)
    reported = []
    silent = _Agent(NODE, "http://nowhere")
    for now in range(int(LATE_EXCUSES_SECONDS) + 2):
        source._loop.time = lambda at=float(now): at  # type: ignore[method-assign]
        source._late_at = now - 0.1
        reported.append(source._excused(silent))
    assert reported == [True] * int(LATE_EXCUSES_SECONDS) + [False] * 2


@pytest.mark.parametrize("status", [401, 403])
def test_an_unauthorized_client_gets_advice(stack: ExitStack, status: int) -> None:
    a = agent(stack, bad={"/v1/news": status})
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    assert "--credentials" in polled_until(source, lambda o: o.unreachable).unreachable[0][2]


def test_unpolled_data_is_bounded_over_all_agents(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "SAMPLES_HELD_MAX", 10)
    source = AgentsSource(dict, SystemClock())
    stack.callback(source.close)
    head = {"agent_pid": 1, "lost": 0, "at": 1.0, "wall_at": 2.0, "hosts": [], "processes": [sample(), sample(rank=1)]}
    agents = [_Agent(f"n-{n}", "") for n in range(3)]
    source._agents = {a.node: a for a in agents}
    for round_ in range(20):
        for a in agents:
            source._take_batch(a, SampleBatch.from_dict({**head, "node": a.node, "cursor": round_}))
        assert source._num_held == sum(len(b.processes) for a in agents for b in a.batches) <= 10
    assert {b.node: b.cursor for b in source.poll(0.0).batches} == dict.fromkeys(source._agents, 19)
    assert not source._num_held


def test_descriptors_are_asked_for_when_agents_come_not_at_every_look(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hard limit is too low each time is a line in the log."""
    asked: list[int] = []
    monkeypatch.setattr(source_module, "_allow_descriptors", asked.append)
    monkeypatch.setattr(source_module, "AGENTS_SECONDS", 0.0)
    agents = {"n-0": "http://nowhere"}
    source = stack.enter_context(watched(lambda: agents))
    source.poll(0.0)
    agents["n-1"] = "http://nowhere"
    source.poll(0.0)
    source.poll(0.0)
    assert asked == [source_module.DESCRIPTORS_OWN + 1, source_module.DESCRIPTORS_OWN + 2]


@pytest.mark.parametrize(("timeout", "since", "expected"), [(1.0, 0.5, 0.1), (0.05, 0.5, 0.05), (1.0, 10.0, 1.0)])
def test_after_an_event_a_poll_waits_less(timeout: float, since: float, expected: float) -> None:
    assert wait_seconds(timeout, since) == expected
