"""The ring of samples: cursors, what was lost, and JSON that equals the dataclasses' own."""

import json
import math
from dataclasses import replace

from rolecall.agent.samples import SampleRing
from rolecall.core.clock import FakeClock
from rolecall.core.columns import GPUS, HOSTS, PROCESSES
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import GpuSample, HostSample, ProcessSample, SampleBatch

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


def gpu(index: int) -> GpuSample:
    return GpuSample(node=NODE, gpu=index, uuid=f"GPU-{index}", at=1.0, wall_at=2.0, pids=(5,), power_watts=300.5)


def ring(clock: FakeClock | None = None, **limits: int) -> SampleRing:
    return SampleRing(NODE, 77, clock or FakeClock(), **limits)


def since(it: SampleRing, cursor: int) -> SampleBatch:
    return SampleBatch.from_dict(json.loads(it.since_json(cursor)))


def _progress(batch: SampleBatch) -> list[int]:
    return [p.progress for p in batch.processes]


def test_a_reader_gets_each_round_once() -> None:
    it = ring()
    it.add((process(1),), (host(),))
    it.add((process(2),), ())
    first = since(it, 0)
    assert (_progress(first), len(first.hosts), first.lost, first.agent_pid) == ([1, 2], 1, 0, 77)
    it.add((process(3),), ())
    assert _progress(since(it, first.cursor)) == [3]
    assert _progress(since(it, since(it, 0).cursor)) == []


def test_unread_samples_that_leave_the_ring_are_counted() -> None:
    it = ring(num_rounds=3)
    it.add((process(1),), ())
    cursor = since(it, 0).cursor
    for n in range(2, 8):
        it.add((process(n), process(n)), ())  # rounds 2, 3 and 4 are dropped, with two samples each
    batch = since(it, cursor)
    assert sorted(set(_progress(batch))) == [5, 6, 7]
    assert batch.lost == 6
    assert it.num_lost == 6


def test_many_processes_keep_fewer_rounds() -> None:
    it = ring(num_rounds=100, num_samples=10)
    for n in range(20):
        it.add((process(n),) * 4, ())
    assert sorted(set(_progress(since(it, 0)))) == [18, 19]
    it.add((process(99),) * 50, ())  # one round is always kept
    assert set(_progress(since(it, 0))) == {99}


def test_cursors_grow_over_a_restart_and_a_larger_one_starts_from_the_first() -> None:
    clock = FakeClock()
    before = ring(clock)
    for _ in range(50):
        clock.advance(0.05)
        before.add((process(),), ())
    old = since(before, 0).cursor
    after = ring(clock)  # the agent was restarted
    after.add((process(1),), ())
    batch = since(after, old)
    assert _progress(batch) == [1] and batch.cursor > old
    assert _progress(since(after, 10**15)) == [1]


def test_json_matches_the_dataclasses() -> None:
    odd = process(4, loss=1.5, reward=0.25, progress_at=3.25)
    assert math.isnan(odd.grad_norm)
    assert "grad_norm" not in odd.to_dict() and ProcessSample.from_dict(odd.to_dict()).to_dict() == odd.to_dict()
    clock = FakeClock()
    it = ring(clock)
    it.add((odd, process(5)), (host(),), (gpu(0), gpu(1)))
    it.add((), ())
    it.add((), (), (gpu(0),))
    it.add((process(6),), ())
    whole = SampleBatch(
        node=NODE,
        agent_pid=77,
        cursor=since(it, 0).cursor,
        lost=0,
        at=clock.monotonic(),
        wall_at=clock.wall(),
        processes=(odd, process(5), process(6)),
        hosts=(host(),),
        gpus=(gpu(0), gpu(1), gpu(0)),
    )
    assert json.loads(it.since_json(0)) == whole.to_dict() == since(it, 0).to_dict()
    none = replace(whole, processes=(), hosts=(), gpus=())
    assert json.loads(it.since_json(whole.cursor)) == none.to_dict() == since(it, whole.cursor).to_dict()


def test_news_are_the_same_samples_as_columns() -> None:
    it = ring()
    it.add((process(4, loss=1.5), process(5)), (host(),), (gpu(0), gpu(1)))
    it.add((process(6),), ())
    for cursor in (0, since(it, 0).cursor - 1, since(it, 0).cursor):
        answer, rows = json.loads(json.dumps(it.news(cursor))), since(it, cursor)
        assert (answer["cursor"], answer["samples_lost"]) == (rows.cursor, rows.lost)
        for name, layout, samples in (
            ("processes", PROCESSES, rows.processes),
            ("hosts", HOSTS, rows.hosts),
            ("gpus", GPUS, rows.gpus),
        ):
            found = layout.build(NODE, answer[name]["rows"], answer[name]["columns"]) if name in answer else ()
            assert [s.to_dict() for s in found] == [s.to_dict() for s in samples]


def test_the_newest_round_includes_the_newest_host_and_gpu_samples() -> None:
    it = ring()
    it.add((process(1),), (host(),), (gpu(0), gpu(1)))
    it.add((process(2), process(3)), (), ())
    it.add((process(4),), (), ())
    answer = it.news(0, 1)
    assert answer["processes"] == {**answer["processes"], "rows": 1} and answer["hosts"]["rows"] == 1
    assert answer["processes"]["columns"]["progress"] == 4 and answer["gpus"]["rows"] == 2
    assert answer["samples_lost"] == 0 and it.news(0, 2)["processes"]["columns"]["progress"] == [2, 3, 4]
    assert it.news(answer["cursor"], 1) == {"cursor": answer["cursor"], "samples_lost": 0}


def test_gpus_are_given_out_once_and_count_among_the_samples() -> None:
    it = ring(num_samples=6)
    it.add((process(1),), (host(),), (gpu(0), gpu(1)))
    first = since(it, 0)
    assert [g.gpu for g in first.gpus] == [0, 1]
    it.add((process(2),), ())
    assert since(it, first.cursor).gpus == ()
    it.add((), (), (gpu(0), gpu(1)))  # seven samples by now: the first round goes
    assert [len(since(it, 0).processes), len(since(it, 0).gpus)] == [1, 2]


def test_the_newest_round() -> None:
    it = ring()
    assert it.newest() == ((), ())
    it.add((process(1),), (host(),))
    it.add((process(2),), ())
    processes, hosts = it.newest()
    assert ([p.progress for p in processes], len(hosts)) == ([2], 1)
