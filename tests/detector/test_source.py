"""The source `agents` against small fake agents: restarts, garbage, oversize, silence."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rolecall.core.clock import SystemClock
from rolecall.detector.source import AgentsSource, Limits, Observation
from tests.detector.fake_agent import NODE, FakeAgent, sample
from tests.support import PATIENCE_SECONDS


@contextmanager
def watched(
    agents: Callable[[], dict[str, str]], poll_seconds: float = 0.05, limits: Limits | None = None
) -> Iterator[AgentsSource]:
    source = AgentsSource(agents, SystemClock(), poll_seconds, limits)
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
    source = stack.enter_context(watched(lambda: {NODE: a.url}, limits=Limits(answer_seconds=PATIENCE_SECONDS)))
    o = polled_until(source, has_samples)
    assert o.batches[0].processes[0].replica == "rollout/1"
    polled_until(source, lambda _: len(a.asked) > 12)
    assert a.connections == 1
    assert "/v1/samples?since=100" in a.asked, "the cursor is given back"
    assert Observation.from_dict(json.loads(json.dumps(o.to_dict()))) == o


def test_an_event_wakes_a_poll_early_and_comes_once(stack: ExitStack) -> None:
    a = agent(stack)
    source = stack.enter_context(watched(lambda: {NODE: a.url}, poll_seconds=1.0))
    polled_until(source, lambda _: "/v1/events?after=0&wait=1" in a.asked)
    a.add_event()
    o = source.poll(600.0)  # longer than a test may take: it returned because of the event
    assert [e.replica for e in o.events] == ["rollout/1"]
    polled_until(source, lambda o: "/v1/events?after=1&wait=1" in a.asked and not o.events)


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


def test_a_dead_agent_is_told_with_the_reason_and_since_when(stack: ExitStack) -> None:
    gone = FakeAgent()
    gone.close()
    alive = agent(stack)
    alive.samples = []
    source = stack.enter_context(watched(lambda: {"node-0": gone.url, NODE: alive.url}))
    o = polled_until(source, lambda o: o.unreachable)
    ((node, since, reason),) = o.unreachable
    assert node == "node-0" and reason == "connection refused" and abs(since - o.wall_at) < 10.0
    later = polled_until(source, lambda o: o.batches and o.unreachable)
    assert later.unreachable[0][1] == since, "the moment stays"


GARBAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no json": ({"/v1/samples": b"<html>"}, "no JSON"),
    "deep json": ({"/v1/samples": b"[" * 100_000}, "no JSON"),
    "no mapping": ({"/v1/samples": b"[]"}, "expected a mapping"),
    "redirect": ({"/v1/samples": 302}, "status 302"),
    "refusal": ({"/v1/events": 503}, "status 503"),
    "infinite": ({"/v1/samples": json.dumps({"processes": [], "hosts": []}).encode()}, "missing"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_told_and_survived(stack: ExitStack, name: str) -> None:
    bad, reason = GARBAGE[name]
    a = agent(stack, bad=bad)
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.unreachable)
    assert reason in o.unreachable[0][2]
    assert not has_samples(o)
    a.bad = {}
    polled_until(source, lambda o: has_samples(o) and not o.unreachable)


WRONG = {
    "text for a number": sample(progress="many"),
    "truth for a number": sample(progress=True),
    "number for a text": sample(phase=3),
    "not finite": sample(busy_seconds=float("nan")),
    "huge": sample(progress=10**30),
    "another node": sample(process={"node": "node-9", "pid": 1, "start_ticks": 1}),
    "another role": sample(role="trainer"),
    "no replica": sample(replica="../../etc"),
    "no process": {k: v for k, v in sample().items() if k != "process"},
    "no sample": 7,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sample_does_not_hide_its_neighbour(stack: ExitStack, name: str) -> None:
    a = agent(stack, samples=[WRONG[name], sample(replica="rollout/2")])
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, has_samples)
    assert [p.replica for b in o.batches for p in b.processes] == ["rollout/2"]


@pytest.mark.parametrize("name", WRONG)
def test_an_agent_with_nothing_but_wrong_samples_is_told(stack: ExitStack, name: str) -> None:
    a = agent(stack, samples=[WRONG[name]])
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.unreachable)
    assert "makes no sense" in o.unreachable[0][2]


def test_too_large_an_answer_is_refused(stack: ExitStack) -> None:
    a = agent(stack, bad={"/v1/samples": b" " * (2 << 20)})
    source = stack.enter_context(watched(lambda: {NODE: a.url}, limits=Limits(answer_bytes_max=1 << 20)))
    o = polled_until(source, lambda o: o.unreachable)
    assert "more than 1 MiB" in o.unreachable[0][2]


@pytest.mark.parametrize("how", ["silent", "drip"])
def test_an_agent_that_never_ends_its_answer_is_told_and_left(stack: ExitStack, how: str) -> None:
    a = agent(stack, bad={"/v1/samples": how})
    limits = Limits(answer_seconds=0.3, connect_seconds=0.2)
    source = stack.enter_context(watched(lambda: {NODE: a.url}, limits=limits))
    polled_until(source, lambda o: o.unreachable)
    a.bad = {}
    polled_until(source, lambda o: has_samples(o) and not o.unreachable)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "file:///etc/passwd", "http://", "nonsense", "http://[::1"])
def test_what_is_no_address_is_told(stack: ExitStack, url: str) -> None:
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
def test_an_agent_of_another_age_is_told(stack: ExitStack, version: object) -> None:
    a = agent(stack, extra={"version": version})
    source = stack.enter_context(watched(lambda: {NODE: a.url}))
    o = polled_until(source, lambda o: o.unreachable)
    assert "version: it speaks" in o.unreachable[0][2]
