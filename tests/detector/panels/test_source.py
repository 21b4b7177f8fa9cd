"""Live panels: recordings that run through the live path, fleets that change under a detector, agents as source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.diagnosis import Finding
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.detector.panels import series as series_panels
from rolecall.detector.panels.membership import PanelFollower, WatchLimits
from rolecall.detector.panels.panel import Floats, Machine, Panel, PanelShape, findings, ticks_of
from rolecall.detector.panels.series import MetricSeries, PanelPosition, Panels
from rolecall.detector.sources import recording
from rolecall.detector.sources.agent_panels import AgentsPanels
from rolecall.detector.sources.agents import AgentsSource
from rolecall.detector.sources.recording import RecordingSource
from tests.detector.fake_agent import NODE, FakeAgent, sample
from tests.support import PATIENCE_SECONDS


@dataclass(frozen=True)
class Toy:
    """Names a machine whose first metric stands above twice the median of all for three of its ticks in a row, once;
    silent for its first `warm_up` ticks. `made`: its trackers."""

    warm_up: int = 0
    made: "list[ToyTracker]" = field(default_factory=list)

    @property
    def name(self) -> str:
        return "toy"

    def track(self, shape: PanelShape) -> "ToyTracker":
        self.made.append(ToyTracker(shape, self.warm_up))
        return self.made[-1]


@dataclass
class ToyTracker:
    shape: PanelShape
    warm_up: int
    seen: list[tuple[float, Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.above = np.zeros(len(self.shape.machines), dtype=int)

    def tick(self, at: float, values: Floats) -> list[Finding]:
        assert values.shape == (len(self.shape.metrics), len(self.shape.machines))
        self.seen.append((at, values.copy()))
        if np.isnan(values[0]).all():
            return []
        high = values[0] > 2 * np.nanmedian(values[0])
        self.above = np.where(np.isnan(values[0]), self.above, np.where(high, self.above + 1, 0))
        if len(self.seen) <= self.warm_up:
            return []
        return [self.finding(n, at) for n in np.flatnonzero((self.above == 3) & high)]

    def finding(self, n: int, at: float) -> Finding:
        return Finding(
            detector="toy",
            suspects=(self.shape.suspect(n),),
            fault_class=FaultClass.SLOW,
            onset=at - 2 * self.shape.interval_seconds,
            detected_at=at,
            confidence=0.9,
            because=f"{self.shape.machines[n].name} is high",
        )


def shape_of(nodes: Sequence[str], role: str = "trainer", interval_seconds: float = 1.0) -> PanelShape:
    machines = tuple(Machine(node=n) for n in sorted(nodes))
    return PanelShape(role=role, metrics=("load",), machines=machines, interval_seconds=interval_seconds)


def a_panel(role: str, interval_seconds: float, seed: int, num_ticks: int = 60) -> Panel:
    """Five machines, two of which are high for a while; some samples are missing."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(1.0, 1.5, (1, num_ticks, 5)).astype(np.float32)
    values[0, 20:30, seed % 5] = 9.0
    values[0, 40:45, (seed + 2) % 5] = 9.0
    values[rng.random(values.shape) < 0.05] = np.nan
    at = 1_700_000_000.0 + np.arange(num_ticks) * interval_seconds
    return Panel(shape=shape_of([f"n{i}" for i in range(5)], role, interval_seconds), at=at, values=values)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "r.parquet"
    recording.write(path, [a_panel("trainer", 1.0, 1), a_panel("rollout", 2.5, 2)])
    return path


def never() -> bool:
    return False


def test_a_recording_gives_the_same_findings_live_as_offline(recorded: Path) -> None:
    watch, found = PanelFollower(Toy()), []
    for tick in RecordingSource(recorded, 1e6, FakeClock()).ticks(never):
        found += watch.tick(tick)
    offline = [f for p in recording.read(recorded).panels for f in findings(Toy(), p)]
    assert len(offline) >= 4
    for role in ("trainer", "rollout"):
        of_role = [f for f in found if f.suspects[0].role == role]
        assert of_role == [f for f in offline if f.suspects[0].role == role]
    assert [f.detected_at for f in found] == sorted(f.detected_at for f in offline), "reported in the order of time"


def test_a_recording_keeps_its_own_time_divided_by_the_speed(recorded: Path) -> None:
    clock = FakeClock()
    begun = clock.monotonic()
    for tick in RecordingSource(recorded, 10.0, clock).ticks(never):
        assert clock.monotonic() - begun == pytest.approx((tick.at - 1_700_000_000.0) / 10.0)
    assert clock.monotonic() - begun == pytest.approx(59 * 2.5 / 10.0)


def test_a_recording_without_waiting_and_its_end_when_stopped(recorded: Path) -> None:
    clock = FakeClock()
    ticks = list(RecordingSource(recorded, float("inf"), clock).ticks(never))
    assert len(ticks) == 120 and clock.monotonic() == 1000.0
    end = clock.monotonic() + 7.0
    seen = list(RecordingSource(recorded, 1.0, clock).ticks(lambda: clock.monotonic() >= end))
    assert [t.at for t in seen] == [t.at for t in ticks if t.at < ticks[0].at + 7.0]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_no_such_speed(recorded: Path, speed: float) -> None:
    with pytest.raises(ConfigError, match="--speed"):
        RecordingSource(recorded, speed, FakeClock())


# --- a fleet that changes -----------------------------------------------------------------------------------------


class Fleet:
    """Feeds a watch with ticks of whoever is there, as a source does."""

    def __init__(self, toy: Toy, **limits: int) -> None:
        self.toy, self.watch = toy, PanelFollower(toy, WatchLimits(**limits))
        self.panels, self.at = Panels(1.0), 0.0
        self.found: list[Finding] = []

    def ticks(self, number: int, **values: float) -> "Fleet":
        for _ in range(number):
            places = [PanelPosition(role="trainer", machine=Machine(node=n)) for n in values]
            table = np.array([[v] for v in values.values()], dtype=np.float32)
            [panel] = self.panels.build(np.array([self.at]), [MetricSeries(metric="load", places=places, values=table)])
            for tick in ticks_of([panel]):
                self.found += self.watch.tick(tick)
            self.at += 1.0
        return self

    @property
    def named(self) -> list[tuple[str, float]]:
        return [(f.suspects[0].node, f.detected_at) for f in self.found]


def test_a_machine_that_leaves_and_comes_back_is_a_gap() -> None:
    fleet = Fleet(Toy()).ticks(5, a=1, b=1, c=1).ticks(40, a=1, b=1).ticks(5, a=1, b=1, c=1)
    [tracker] = fleet.toy.made
    missing = [bool(np.isnan(values[0, 2])) for _, values in tracker.seen]
    assert missing == [False] * 5 + [True] * 40 + [False] * 5 and not fleet.found


def test_machines_that_come_are_tracked_after_some_ticks_with_what_was_kept() -> None:
    fleet = Fleet(Toy(), grow_ticks=10, history_ticks=15).ticks(20, a=1, b=1, c=1).ticks(12, a=1, b=1, c=1, d=1)
    first, second = fleet.toy.made
    assert [len(t.shape.machines) for t in (first, second)] == [3, 4]
    assert [at for at, _ in first.seen] == [float(t) for t in range(29)], "its own machines, until the other takes over"
    assert [at for at, _ in second.seen] == [float(t) for t in range(15, 32)], "the kept ticks, then on without a hole"
    assert [int(np.isnan(values).sum()) for _, values in second.seen] == [1] * 5 + [0] * 12
    assert not fleet.found and fleet.watch.shapes == [second.shape]


def test_a_fleet_that_grows_machine_by_machine_is_not_tracked_again_each_time() -> None:
    fleet, there = Fleet(Toy(), grow_ticks=10), {"m0": 1.0}
    for i in range(1, 41):
        there[f"m{i}"] = 1.0
        fleet.ticks(1, **there)
    assert len(fleet.toy.made) == 4 and not fleet.found


def test_a_standing_fault_is_not_reported_again_by_a_new_tracker() -> None:
    fleet = Fleet(Toy(), grow_ticks=5, history_ticks=10).ticks(5, a=1, b=1, c=1).ticks(20, a=9, b=1, c=1)
    assert fleet.named == [("a", 7.0)]
    fleet.ticks(10, a=9, b=1, c=1, d=1)
    assert len(fleet.toy.made) == 2 and fleet.named == [("a", 7.0)]


def test_a_fault_that_ended_may_be_reported_when_it_comes_back_later() -> None:
    fleet = Fleet(Toy(), grow_ticks=5, history_ticks=10).ticks(5, a=9, b=1, c=1).ticks(20, a=1, b=1, c=1)
    fleet.ticks(5, a=9, b=1, c=1)
    assert [node for node, _ in fleet.named] == ["a", "a"]


def test_a_machine_that_comes_faulty_is_named() -> None:
    fleet = Fleet(Toy(), grow_ticks=8).ticks(20, a=1, b=1, c=1).ticks(12, a=1, b=1, c=1, d=9)
    assert fleet.named == [("d", 22.0)], "as soon as it is tracked, with the time at which it showed"


def test_what_a_new_tracker_says_about_the_past_is_not_reported() -> None:
    """The tracker of that time had its warm-up and was silent; no one else looks at those ticks again."""
    fleet = Fleet(Toy(warm_up=5), grow_ticks=5, history_ticks=100)
    fleet.ticks(1, a=1, b=1, c=1).ticks(4, a=9, b=1, c=1).ticks(20, a=1, b=1, c=1)
    assert not fleet.found
    object.__setattr__(fleet.toy, "warm_up", 0)
    fleet.ticks(10, a=1, b=1, c=1, d=1)
    assert len(fleet.toy.made) == 2 and not fleet.found


def test_kept_ticks_are_bounded_by_bytes() -> None:
    fleet = Fleet(Toy(), grow_ticks=2, history_bytes=4 * 3 * 7).ticks(30, a=1, b=1, c=1).ticks(2, a=1, b=1, c=1, d=1)
    assert len(fleet.toy.made[1].seen) == 6, "two ticks of four values and four of three"


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_order_of_series_does_not_matter(order: list[int], there: list[bool]) -> None:
    places = [PanelPosition(role="r", machine=Machine(node=f"n{i}")) for i in range(6)]
    values = np.array([[float(i)] if there[i] else [np.nan] for i in range(6)], dtype=np.float32)

    def built(rows: list[int]) -> list[Panel]:
        series = MetricSeries(metric="m", places=[places[i] for i in rows], values=values[rows])
        return Panels(1.0).build(np.array([5.0]), [series])

    once, again = built(list(range(6))), built(order)
    assert [p.shape for p in once] == [p.shape for p in again]
    assert all(np.array_equal(p.values, q.values) for p, q in zip(once, again, strict=True))
    assert [m.node for p in once for m in p.shape.machines] == [f"n{i}" for i in range(6) if there[i]]


def test_what_was_not_seen_for_long_is_left_out_when_a_panel_grows() -> None:
    panels = Panels(1.0)

    def shape(at: float, *nodes: str) -> PanelShape:
        places = [PanelPosition(role="r", machine=Machine(node=n)) for n in nodes]
        series = MetricSeries(metric="m", places=places, values=np.ones((len(nodes), 1), dtype=np.float32))
        return panels.build(np.array([at]), [series])[0].shape

    assert shape(0.0, "a", "b") is shape(5000.0, "b"), "no change, no other shape"
    assert [m.node for m in shape(5001.0, "b", "c").machines] == ["b", "c"]


def test_panels_of_yesterday_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job each hour is no reason to stop after a thousand."""
    monkeypatch.setattr(series_panels, "PANELS_MAX", 4)
    panels = Panels(1.0)

    def build(job: str, at: float) -> None:
        place = PanelPosition(role="r", machine=Machine(node="n"), job=job)
        panels.build(
            np.array([at]), [MetricSeries(metric="m", places=[place], values=np.ones((1, 1), dtype=np.float32))]
        )

    for n in range(10):
        build(f"job {n}", 2000.0 * n)
    for n in range(2):
        build(f"other {n}", 18_100.0)
    with pytest.raises(UnreadableInput, match="more than 4 panels"):
        build("one more", 18_200.0)


def test_labels_that_name_no_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_panels, "MACHINES_MAX", 10)
    places = [PanelPosition(role="r", machine=Machine(node=f"n{i}")) for i in range(11)]
    series = MetricSeries(metric="m", places=places, values=np.ones((11, 1), dtype=np.float32))
    with pytest.raises(UnreadableInput, match="more than 10 machines"):
        Panels(1.0).build(np.array([0.0]), [series])


# --- agents -------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    it = FakeAgent()
    yield it
    it.close()


def test_agents_give_gauges_and_rates(agent: FakeAgent) -> None:
    """The fake agent has its samples ready at once; a rate needs those of two ticks."""
    clock = SystemClock()
    source = AgentsPanels(AgentsSource(lambda: {NODE: agent.url}, clock, 0.05), clock, 0.2)
    agent.samples = [sample(tokens=100, work_units=10, busy_seconds=1.0, requests_active=3)]
    deadline = clock.monotonic() + PATIENCE_SECONDS
    ticks = source.ticks(lambda: clock.monotonic() > deadline)
    first = next(ticks)
    assert first.shape.role == "rollout"
    assert first.shape.machines == (Machine(node=NODE, replica="rollout/1", rank=0),)
    gauges = dict(zip(first.shape.metrics, first.values[:, 0].tolist(), strict=True))
    assert gauges["rolecall_process_requests_active"] == 3 and "rolecall_process_tokens_per_second" not in gauges
    agent.samples = [sample(at=10.2, tokens=150, work_units=20, busy_seconds=1.1)]
    agent.agent_pid = 2  # restarted: what it holds is read again
    second = next(t for t in ticks if "rolecall_process_tokens_per_second" in t.shape.metrics)
    rates = dict(zip(second.shape.metrics, second.values[:, 0].tolist(), strict=True))
    assert rates["rolecall_process_tokens_per_second"] == pytest.approx(250.0)
    assert rates["rolecall_process_busy_ratio"] == pytest.approx(0.5)
    assert rates["rolecall_process_busy_seconds_per_work_unit"] == pytest.approx(0.01)
    agent.samples, agent.agent_pid = [sample(at=10.4, incarnation=2, tokens=9000)], 3
    third = next(ticks)
    again = dict(zip(third.shape.metrics, third.values[:, 0].tolist(), strict=True))
    assert np.isnan(again["rolecall_process_tokens_per_second"]), "another incarnation's counters are not compared"
    ticks.close()  # type: ignore[attr-defined]
