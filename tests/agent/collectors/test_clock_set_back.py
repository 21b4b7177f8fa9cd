"""Clocks that are set, by an hour: of a node, of all, of the watch. What orders and what times out is the monotonic
clock."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.events import EventLog
from rolecall.agent.node import Agent, AgentSettings
from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.testing.synthetic_run import FakeFleet
from tests.agent.processes import NODE, TOKEN, http_request

HOUR_SECONDS = 3600.0


class SetClock(FakeClock):
    """Its wall time can be set, as an operator or NTP does it; its monotonic time continues."""

    def set_by(self, seconds: float) -> None:
        self._wall_offset += seconds


def test_an_agent_continues_and_only_wall_times_move(tmp_path: Path) -> None:
    clock = SetClock()
    agent = Agent(AgentSettings(node=NODE, data_dir=tmp_path, token=TOKEN, interval_seconds=1.0), clock)

    def ask(path: str, **query: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(agent._routes.table()[path](http_request(path, **query)).body)
        return found

    try:
        agent._sampler.round()
        agent.events.append(AgentEventKind.KERNEL)
        cursor, before = ask("/v1/samples")["cursor"], ask("/v1/samples")
        clock.set_by(-HOUR_SECONDS)
        clock.advance(1.0)
        agent._sampler.round()
        agent.events.append(AgentEventKind.KERNEL)
        after = ask("/v1/samples", since=str(cursor))
        [earlier], [later] = before["hosts"], after["hosts"]
        assert after["cursor"] > cursor and after["lost"] == 0
        assert later["at"] - earlier["at"] == 1.0 and later["wall_at"] - earlier["wall_at"] == 1.0 - HOUR_SECONDS
        assert ask("/healthz")["ok"] is True
        first, second = ask("/v1/events")["events"]
        assert (first["seq"], second["seq"]) == (1, 2) and second["at"] - first["at"] == 1.0
        assert [e["seq"] for e in ask("/v1/events", after="1")["events"]] == [2]
        page = bytes(agent._routes.metrics(http_request("/metrics")).body).decode()
        assert "rolecall_host_cpus{" in page
        assert not re.search(r"\} \S+ \d+$", page, re.MULTILINE), "with times of their own Prometheus would refuse them"
    finally:
        agent._shut()
    again = EventLog(tmp_path / "events.jsonl", NODE, clock)
    try:
        assert again.append(AgentEventKind.KERNEL).seq == 3
    finally:
        again.close()


def moved(o: Observation, *, node: str | None, watch: bool, by: float) -> Observation:
    """Events received when the clock of `node` (None: of every node), and of the watch, is set by so much."""
    batches = []
    for b in o.batches:
        if node in (None, b.node):
            processes = tuple(replace(p, wall_at=p.wall_at + by) for p in b.processes)
            hosts = tuple(replace(h, wall_at=h.wall_at + by) for h in b.hosts)
            b = replace(b, wall_at=b.wall_at + by, processes=processes, hosts=hosts)
        batches.append(b)
    return replace(o, batches=tuple(batches), wall_at=o.wall_at + (by if watch else 0.0))


@pytest.mark.parametrize("by", [-HOUR_SECONDS, HOUR_SECONDS], ids=["back", "forward"])
@pytest.mark.parametrize(
    ("node", "watch"),
    [("node-rollout-1", False), (None, False), ("none", True), (None, True)],
    ids=["of one node", "of all nodes", "of the watch", "of all"],
)
def test_no_clock_that_is_set_makes_or_hides_a_fault(node: str | None, watch: bool, by: float) -> None:
    fleet = FakeFleet(seed=3)
    detector = LiveDetector(
        parse_job({"name": "x"}).detector, {"trainer": 2, "rollout": 3, "reward": 2, "controller": 1}
    )
    for observation in fleet.run(40):
        assert not detector.observe(observation)
    for observation in fleet.run(40):
        assert not detector.observe(moved(observation, node=node, watch=watch, by=by))
    fleet.kill("rollout/1")
    found = [d for o in fleet.run(5) for d in detector.observe(moved(o, node=node, watch=watch, by=by))]
    assert found and "rollout/1" in found[0].because and "crashed" in found[0].because
