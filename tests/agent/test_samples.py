"""The ring of samples: cursors, what was lost, and JSON that equals the dataclasses' own."""

import json
import math

from rolecall.agent.samples import SampleRing, process_dict
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import HostSample, ProcessSample, SampleBatch

NODE = NodeId("node-1")


def process(progress: int = 0, **more: float) -> ProcessSample:
    who = ProcessId(node=NODE, pid=5, start_ticks=50)
    common = {"process": who, "role": "rollout", "replica": "rollout/1", "rank": 0, "incarnation": 2}
    return ProcessSample(**common, at=1.0, wall_at=2.0, alive=True, page_ok=True, progress=progress, **more)  # type: ignore[arg-type]


def host() -> HostSample:
    return HostSample(
        node=NODE,
        at=1.0,
        wall_at=2.0,
        cpu_count=2,
        cpu_busy_seconds=3.0,
        load_1m=0.5,
        memory_total_bytes=8,
        memory_available_bytes=4,
    )


def ring(clock: FakeClock | None = None, **limits: int) -> SampleRing:
    return SampleRing(NODE, 77, clock or FakeClock(), **limits)


def _progress(batch: SampleBatch) -> list[int]:
    return [p.progress for p in batch.processes]


def test_a_reader_gets_each_round_once() -> None:
    it = ring()
    it.add((process(1),), (host(),))
    it.add((process(2),), ())
    first = it.since(0)
    assert (_progress(first), len(first.hosts), first.lost, first.agent_pid) == ([1, 2], 1, 0, 77)
    it.add((process(3),), ())
    assert _progress(it.since(first.cursor)) == [3]
    assert _progress(it.since(it.since(0).cursor)) == []


def test_what_left_the_ring_unread_is_counted() -> None:
    it = ring(num_rounds=3)
    it.add((process(1),), ())
    cursor = it.since(0).cursor
    for n in range(2, 8):
        it.add((process(n), process(n)), ())  # rounds 2, 3 and 4 are dropped, with two samples each
    batch = it.since(cursor)
    assert sorted(set(_progress(batch))) == [5, 6, 7]
    assert batch.lost == 6
    assert it.num_lost == 6


def test_many_processes_keep_fewer_rounds() -> None:
    it = ring(num_rounds=100, num_samples=10)
    for n in range(20):
        it.add((process(n),) * 4, ())
    assert sorted(set(_progress(it.since(0)))) == [18, 19]
    it.add((process(99),) * 50, ())  # one round is always kept
    assert set(_progress(it.since(0))) == {99}


def test_cursors_grow_over_a_restart_and_a_larger_one_starts_from_the_first() -> None:
    clock = FakeClock()
    before = ring(clock)
    for _ in range(50):
        clock.advance(0.05)
        before.add((process(),), ())
    old = before.since(0).cursor
    after = ring(clock)  # the agent was restarted
    after.add((process(1),), ())
    batch = after.since(old)
    assert _progress(batch) == [1] and batch.cursor > old
    assert _progress(after.since(10**15)) == [1]


def test_json_is_what_the_dataclasses_say() -> None:
    odd = process(4, loss=1.5, reward=0.25, progress_at=3.25)
    assert math.isnan(odd.grad_norm)
    assert process_dict(odd) == odd.to_dict()
    clock = FakeClock()
    it = ring(clock)
    it.add((odd, process(5)), (host(),))
    it.add((), ())
    it.add((process(6),), ())
    assert json.loads(it.since_json(0)) == it.since(0).to_dict()
    assert json.loads(it.since_json(it.since(0).cursor)) == it.since(it.since(0).cursor).to_dict()
    assert SampleBatch.from_dict(json.loads(it.since_json(0))).to_dict() == it.since(0).to_dict()


def test_the_newest_look() -> None:
    it = ring()
    assert it.newest() == ((), ())
    it.add((process(1),), (host(),))
    it.add((process(2),), ())
    processes, hosts = it.newest()
    assert ([p.progress for p in processes], len(hosts)) == ([2], 1)
