"""The arithmetic of the slow test, and the parts of it that whole runs do not single out."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import Phase, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.progress import slow
from rolecall.detector.live.stages.progress.slow import SIGMA_PRIOR, SlowState
from rolecall.testing.synthetic_run import FakeFault, FakeFleet

DRIFT = math.log(2) / 2


@pytest.mark.parametrize("run_length", [300.0, 3000.0])
def test_the_threshold_gives_the_run_length_asked_for(run_length: float) -> None:
    """Page's sum on normal noise: Siegmund's formula promises the mean number of strides between false alarms."""
    h, rng = slow.threshold(0.6, DRIFT, run_length), random.Random(1)
    alarms, total, strides = 0, 0.0, 300_000
    for _ in range(strides):
        total = max(0.0, total + rng.gauss(0.0, 0.6) - DRIFT)
        if total >= h:
            alarms, total = alarms + 1, 0.0
    assert 0.7 * run_length < strides / alarms < 2.0 * run_length


def test_a_lower_false_alarm_rate_and_more_noise_raise_the_threshold() -> None:
    assert slow.threshold(0.6, DRIFT, 1e6) > slow.threshold(0.6, DRIFT, 1e5)
    assert slow.threshold(0.9, DRIFT, 1e6) > slow.threshold(0.6, DRIFT, 1e6)
    assert slow.threshold(0.01, DRIFT, 10.0) == DRIFT, "never below one stride of drift"


def test_autocorrelated_residuals_count_as_more_noise() -> None:
    state = SlowState(moments={"white": (0.0, 1.0, 0.0, 10_000), "red": (0.0, 1.0, 0.5, 10_000)})
    assert slow.sigma(state, "white") == pytest.approx(1.0, abs=0.01)
    assert slow.sigma(state, "red") == pytest.approx(math.sqrt(3), abs=0.01)
    assert slow.sigma(state, "unknown") == SIGMA_PRIOR


@pytest.mark.parametrize(("ratio", "with_peers", "alone"), [(1.5, 1.5, 2.0), (3.0, 3.0, 3.0)])
def test_without_peers_the_test_is_less_sensitive(ratio: float, with_peers: float, alone: float) -> None:
    config = DetectorConfig(slow_ratio=ratio)
    beside, by_itself = slow.sensitivity(config, 2), slow.sensitivity(config, 0)
    assert (beside.drift, by_itself.drift) == pytest.approx((math.log(with_peers) / 2, math.log(alone)))
    calm = SlowState(moments={"controller": (0.0, 0.01, 0.0, 10_000)})
    assert slow.sigma(calm, "controller", by_itself.sigma_min) == 0.6 > slow.sigma(calm, "controller", beside.sigma_min)


def test_a_load_without_baseline_uses_near_ones_only() -> None:
    state = SlowState()
    assert slow.expected(state, "rollout", 8) is None
    for _ in range(10):
        slow.learn(state, "rollout", 8, -4.0)
    assert slow.expected(state, "rollout", 8) == pytest.approx(-4.0)
    assert slow.expected(state, "rollout", 15) == pytest.approx(-4.0)
    assert slow.expected(state, "rollout", 64) is None
    assert slow.expected(state, "trainer", 8) is None


def test_one_wild_observation_hardly_moves_a_baseline() -> None:
    state = SlowState()
    for _ in range(500):
        slow.learn(state, "rollout", 8, -4.0)
    slow.learn(state, "rollout", 8, 3.0)
    assert slow.expected(state, "rollout", 8) == pytest.approx(-4.0, abs=0.01)


def sampled(
    subject: MonitoredProcess, seconds: float, *, units: int, delay: float, throttled: float = 0.0, exchanges: int = 0
) -> None:
    """A sample of a process that is always busy."""
    subject.sample = ProcessSample(
        process=ProcessId(node=NodeId("node-0"), pid=1, start_ticks=1),
        role=subject.role,
        replica=subject.replica,
        rank=0,
        incarnation=1,
        at=seconds,
        wall_at=seconds,
        alive=True,
        page_ok=True,
        phase=Phase.GENERATE,
        exchanges=exchanges,
        busy_seconds=seconds,
        work_units=units,
        tokens=units * 20,
        main_run_delay_seconds=delay,
        throttled_seconds=throttled,
    )


def test_a_quota_is_not_taken_for_neighbours_while_its_throttling_is_unread() -> None:
    """Run delay (read five times a second) holds the throttled time, which agents read every other second."""
    subject = MonitoredProcess("rollout/0", "rollout", 0, 1, "node-0", None, seen_wall=0.0)
    taken = []
    for tick in range(1, 151):
        seconds = tick * 0.2
        sampled(subject, seconds, units=tick * 5, delay=0.75 * seconds, throttled=0.75 * (seconds // 2 * 2))
        work = slow.measure(subject, stride_seconds=1.0, gap_p99=None)
        if work is not None and seconds > 5.0:  # before the second reading nothing can be known
            taken.append(work.seconds_per_unit)
    assert len(taken) >= 10
    assert all(0.035 < seconds < 0.045 for seconds in taken), "0.04 s a unit, all of it its own"


@pytest.mark.parametrize(("exchanges", "counts"), [(0, True), (9, False)])
def test_an_unfinished_unit_of_ranks_that_compute_together_is_no_observation(exchanges: int, counts: bool) -> None:
    """Each of them may be the one that the others wait for."""
    subject = MonitoredProcess("trainer/0", "trainer", 0, 1, "node-0", None, seen_wall=0.0)
    sampled(subject, 1.0, units=5, delay=0.0, exchanges=exchanges)
    assert slow.measure(subject, stride_seconds=1.0, gap_p99=0.3) is None
    subject.slow.load, subject.slow.expected_seconds_per_unit = 20.0, 0.2
    subject.stall.advance(9.0, 0.0, 0.0)
    sampled(subject, 10.0, units=5, delay=0.0, exchanges=exchanges)
    work = slow.measure(subject, stride_seconds=1.0, gap_p99=0.3)
    assert (work is not None and work.censored) is counts


@pytest.mark.parametrize(("starved", "named"), [(0.3, True), (0.7, False)])
def test_without_peers_a_crowded_host_is_no_evidence(starved: float, named: bool) -> None:
    """From 60 s on the process takes three times its CPU time, and neighbours take a share of its time."""
    config, state, fleet = DetectorConfig(), SlowState(), MonitoredProcesses()
    subject = MonitoredProcess("trainer/0", "trainer", 0, 1, "node-0", None, seen_wall=0.0)
    fleet.roster.add(subject)
    done = delay = 0.0
    for tick in range(1, 900):
        seconds = tick * 0.2
        crowded = seconds > 60
        delay += 0.2 * starved * crowded
        done += 0.2 / 0.04 * ((1 - starved) / 3 if crowded else 1.0)
        sampled(subject, seconds, units=int(done), delay=delay)
        fleet.sampled = [subject]
        slow.update(state, fleet, config, seconds)
    assert subject.slow.alarmed is named


def test_the_onset_is_on_the_watchers_clock() -> None:
    fleet, detector, ahead = FakeFleet(seed=4), LiveDetector(DetectorConfig(mask_proc_state=True)), 1000.0
    for o in fleet.run(60.0):
        detector.observe(replace(o, wall_at=o.wall_at + ahead))
    began = o.wall_at + ahead
    fleet.processes["rollout/0"].fault = FakeFault("unit_delay")
    reported = [d for o in fleet.run(60.0) for d in detector.observe(replace(o, wall_at=o.wall_at + ahead))]
    assert reported and reported[0].fault_class is FaultClass.SLOW
    assert began - 5.0 <= reported[0].onset < reported[0].detected_at  # a sum of strides takes its time


@pytest.mark.parametrize("replica", ["rollout/0", "trainer/1"])
def test_a_process_that_is_half_as_slow_again_is_named_within_a_minute_of_the_run(replica: str) -> None:
    fleet, detector = FakeFleet(seed=4), LiveDetector(DetectorConfig(mask_proc_state=True))
    assert not [d for o in fleet.run(120.0) for d in detector.observe(o)]
    fleet.processes[replica].fault = FakeFault("unit_delay", factor=1.5)
    reported = {d.key: d for o in fleet.run(60.0) for d in detector.observe(o)}
    assert [[s.replica for s in d.suspects] for d in reported.values()] == [[replica]]


def test_pauses_of_a_process_do_not_make_it_slow() -> None:
    """In each stride of ten, three wait a second longer than their work takes."""
    fleet, detector = FakeFleet(seed=5), LiveDetector(DetectorConfig(mask_proc_state=True))
    for second in range(120):
        process = fleet.processes["rollout/1"]
        process.fault = FakeFault("stopped") if second >= 60 and second % 10 in (0, 3, 6) else None
        assert not [d for o in fleet.run(1.0) for d in detector.observe(o)], f"second {second}"


def observed(now: float, samples: Sequence[dict[str, Any]]) -> Observation:
    """One batch of node-1, of processes that live; their PIDs are numbered."""
    processes = tuple(
        ProcessSample(
            process=ProcessId(node=NodeId("node-1"), pid=100 + n, start_ticks=7),
            at=now,
            wall_at=now,
            alive=True,
            page_ok=True,
            **sample,
        )
        for n, sample in enumerate(samples)
    )
    batch = SampleBatch(
        node=NodeId("node-1"), agent_pid=1, cursor=0, lost=0, at=now, wall_at=now, processes=processes, hosts=()
    )
    return Observation(wall_at=now, batches=(batch,))


LONG_SECONDS = 40.0
"""Of a step: compute, then the wait for the slowest rank; 10 s of loading lie between two steps."""


class LongSteps:
    """Four ranks that compute together for most of a minute, sampled once a second as agents do by default."""

    def __init__(self, slow: int | None = None, ranks: int = 4) -> None:
        self._slow, self._ranks, self._rng = slow, ranks, random.Random(3)
        self._detector = LiveDetector(DetectorConfig(first_unit_seconds=1800.0), {})
        self._busy, self._waited, self._step, self._began, self._ended = [0.0] * ranks, [0.0] * ranks, 0, 0.0, 0.0
        self._compute = self._draw(0.0)
        self.is_slow = False
        self.now = 0.3
        self.named: dict[int | None, float] = {}
        """Rank -> when it was called slow first."""

    def _draw(self, spread: float) -> list[float]:
        common = math.exp(self._rng.gauss(0.0, spread))
        return [LONG_SECONDS * common * math.exp(self._rng.gauss(0.0, 0.02)) for _ in range(self._ranks)]

    def run(self, steps: int, spread: float = 0.1, scale: float = 1.0) -> None:
        """`spread`: of the work from step to step, in log, the same for all ranks. `scale`: of all of it."""
        for _ in range(steps):
            compute = [scale * seconds for seconds in self._draw(spread)]
            if self.is_slow and self._slow is not None:
                compute[self._slow] *= 2.0
            self._began, end = self._ended + 10.0, self._ended + 10.0 + max(compute)
            while self.now < end:
                self._observe()
                self.now += 1.0
            for n, seconds in enumerate(compute):
                self._busy[n] += seconds
                self._waited[n] += max(compute) - seconds
            self._step, self._ended = self._step + 1, end

    def _observe(self) -> None:
        inside = self.now >= self._began
        samples = [
            {
                "role": "trainer",
                "replica": "trainer/0",
                "rank": n,
                "incarnation": 0,
                "beats": round(10 * self.now),
                "cpu_seconds": self.now,
                "phase": Phase.STEP if inside else Phase.WAIT,
                "phase_since": self._began if inside else self._ended,
                "phase_entries": 2 * self._step + inside,
                "step": self._step,
                "progress": self._step,
                "progress_at": self._ended,
                "work_units": self._step,
                "busy_seconds": self._busy[n],
                "exchange_seconds": self._waited[n],
                "exchanges": (self._step + inside) if self._ranks > 1 else 0,
            }
            for n in range(self._ranks)
        ]
        for found in self._detector.observe(observed(self.now, samples)):
            if found.fault_class is FaultClass.SLOW:
                self.named.setdefault(found.suspects[0].rank, self.now)


def test_a_slow_rank_of_a_job_with_long_steps_is_named_after_a_few_of_them() -> None:
    job = LongSteps(slow=0)
    job.run(10)
    assert not job.named
    job.is_slow, began = True, job.now
    job.run(8)
    assert list(job.named) == [0] and job.named[0] - began < 7 * (10.0 + 2 * LONG_SECONDS)


@pytest.mark.parametrize("ranks", [1, 4])
def test_long_steps_of_different_lengths_are_not_slow(ranks: int) -> None:
    job = LongSteps(ranks=ranks)
    job.run(10)
    job.run(1, scale=4.5)
    job.run(30, spread=0.7)
    assert not job.named


class LittleWork:
    """Two reward workers with 16 units of 0.05 ms a second each, sampled five times a second."""

    def __init__(self) -> None:
        self._detector = LiveDetector(DetectorConfig(), {"reward": 2})
        self._busy, self._units, self._tick, self._rng = [0.0, 0.0], [0, 0], 0, random.Random(7)
        self.named: list[str] = []

    def run(self, seconds: int, extra: Callable[[int, int], float] = lambda worker, tick: 0.0) -> None:
        """`extra`: seconds that a worker takes longer for the four groups of every fourth tick (0.8 s)."""
        for _ in range(seconds * 5):
            self._tick += 1
            now = 0.2 * self._tick
            for n in range(2):
                if self._tick % 4 == n:
                    self._units[n] += 13
                    self._busy[n] += 13 * 5e-5 * math.exp(self._rng.gauss(0.0, 0.5)) + extra(n, self._tick)
            samples = [
                {
                    "role": "reward",
                    "replica": f"reward/{n}",
                    "rank": 0,
                    "incarnation": 1,
                    "beats": self._tick,
                    "cpu_seconds": 0.01 * now,
                    "phase": Phase.WAIT,
                    "progress": self._units[n],
                    "progress_at": 0.2 * (self._tick - (self._tick - n) % 4),
                    "work_units": self._units[n],
                    "busy_seconds": self._busy[n],
                    "tokens": 100 * self._units[n],
                }
                for n in range(2)
            ]
            for found in self._detector.observe(observed(now, samples)):
                self.named += [s.replica for s in found.suspects]


@pytest.mark.parametrize("seconds_before", [5, 120])
def test_a_process_with_little_work_is_slow_if_it_takes_much_longer_for_it(seconds_before: int) -> None:
    """Each call finds the worker stopped for a while, as one that gets a quarter of its time. What little it usually
    takes is not measured, and the first strides of the slow one do not become what is usual."""
    job = LittleWork()
    job.run(seconds_before)
    job.run(60, lambda worker, tick: 0.075 if worker == 1 else 0.0)
    assert set(job.named) == {"reward/1"}


@pytest.mark.parametrize(
    "extra",
    [
        lambda worker, tick: 0.3 if worker == 1 and tick % 100 == 1 else 0.0,  # a pause every 20 s
        lambda worker, tick: 0.008 if worker == 1 else 0.0,  # hundreds of times slower, and no matter
        lambda worker, tick: 0.075,  # both
    ],
)
def test_a_process_with_little_work_is_not_slow_for_little(extra: Callable[[int, int], float]) -> None:
    job = LittleWork()
    job.run(30)
    job.run(180, extra)
    assert not job.named


def test_a_process_without_peers_whose_work_becomes_longer_for_good_is_slow_for_half_an_hour() -> None:
    """As a job of one rank whose answers become longer. Then its new level is usual, and so is the old one again."""
    detector = LiveDetector(DetectorConfig(), {})
    process = ProcessId(node=NodeId("node-1"), pid=1, start_ticks=1)
    at, work, slow_seconds, because = 0.0, 0.0, 0.0, ""

    def run(seconds: float, seconds_per_unit: float) -> bool:
        nonlocal at, work, slow_seconds, because
        standing = []
        for _ in range(round(seconds / 0.5)):
            at, work = at + 0.5, work + 0.5 / seconds_per_unit
            sample = ProcessSample(
                process=process,
                role="trainer",
                replica="trainer/0",
                rank=0,
                incarnation=0,
                at=at,
                wall_at=at,
                alive=True,
                page_ok=True,
                phase=Phase.STEP,
                step=int(work),
                progress=int(work),
                progress_at=at,
                beats=round(10 * at),
                busy_seconds=at,
                work_units=int(work),
                cpu_seconds=at,
            )
            batch = SampleBatch(
                node=process.node, agent_pid=1, cursor=0, lost=0, at=at, wall_at=at, processes=(sample,), hosts=()
            )
            standing = detector.observe(Observation(wall_at=at, batches=(batch,), events=()))
            slow_seconds += 0.5 * bool(standing)
            because = standing[0].because if standing else because
        return bool(standing)

    assert not run(200.0, 0.5) and not because
    assert run(400.0, 1.25) and ", or its work has changed; its last unit" in because
    assert not run(1800.0, 1.25) and slow_seconds == pytest.approx(slow.ACCEPTED_SECONDS, abs=5.0)
    assert not run(300.0, 0.5) and not run(200.0, 1.25)
