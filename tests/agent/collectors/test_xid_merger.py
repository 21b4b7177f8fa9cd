"""One XID reported twice is one event; one that came twice is two. Counts continue over a restart."""

import threading
from pathlib import Path

import pytest

from rolecall.agent.collectors.gpu.xid_merger import NUM_SERIES_MAX, SAME_SECONDS, XidCollector, XidMerger, gpu_key
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId

NODE = NodeId("gpu-7")


def counts(merger: XidMerger) -> dict[tuple[str, int], int]:
    return {key: count.number for key, count in merger.counts().items()}


@pytest.mark.parametrize(
    ("name", "reported", "new"),
    [
        ("both sources", [(10.0, 3, 79, "nvml"), (10.4, 3, 79, "kernel")], [True, False]),
        ("either order", [(10.0, 3, 79, "kernel"), (11.9, 3, 79, "nvml")], [True, False]),
        ("too far apart", [(10.0, 3, 79, "kernel"), (12.1, 3, 79, "nvml")], [True, True]),
        ("other code", [(10.0, 3, 79, "kernel"), (10.1, 3, 45, "nvml")], [True, True]),
        ("other GPU", [(10.0, 3, 79, "kernel"), (10.1, 4, 79, "nvml")], [True, True]),
        ("true repeat", [(10.0, 3, 31, "kernel"), (10.0, 3, 31, "kernel")], [True, True]),
        (
            "repeats of both",
            [(10.0, 3, 31, "kernel"), (10.1, 3, 31, "kernel"), (10.2, 3, 31, "nvml"), (10.3, 3, 31, "nvml")],
            [True, True, False, False],
        ),
        (
            "one more than the other reported",
            [(10.0, 3, 31, "nvml"), (10.1, 3, 31, "kernel"), (10.2, 3, 31, "kernel")],
            [True, False, True],
        ),
        (
            "three sources",
            [(10.0, 3, 79, "kernel"), (10.0, 3, 79, "kernel without XID"), (10.1, 3, 79, "nvml")],
            [True, False, False],
        ),
        ("by address", [(10.0, "PCI:0000:3B:00", 79, "kernel"), (10.1, "00000000:3b:00.0", 79, "nvml")], [True, False]),
        ("index as text", [(10.0, "3", 79, "kernel"), (10.1, 3, 79, "nvml")], [True, False]),
        ("of the past, read late", [(10.0, 3, 79, "nvml"), (4.0, 3, 79, "kernel")], [True, True]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_reports_of_one_event_are_merged(
    name: str, reported: list[tuple[float, int | str, int, str]], new: list[bool]
) -> None:
    merger = XidMerger()
    assert [merger.merge(*t) for t in reported] == new
    assert sum(counts(merger).values()) == sum(new)


def test_the_newest_time_is_kept() -> None:
    merger = XidMerger()
    for at in (10.0, 50.0, 30.0):
        merger.merge(at, 0, 31, "kernel")
    assert merger.counts()["0", 31].last_at == 50.0


def test_threads_count_each_event_once() -> None:
    merger = XidMerger()
    start = threading.Barrier(2)

    def report(source: str) -> None:
        start.wait()
        for i in range(500):
            merger.merge(i * (SAME_SECONDS + 1), 0, 31, source)

    threads = [threading.Thread(target=report, args=(s,)) for s in ("nvml", "kernel")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    # One thread may be a whole run ahead: the other's reports are then older than the window. Never more than
    # both reported, never fewer than happened.
    assert 500 <= counts(merger)["0", 31] <= 1000


def test_series_are_bounded_and_the_rest_is_counted_in_one_sum() -> None:
    merger = XidMerger()
    for code in range(NUM_SERIES_MAX + 5):
        assert merger.merge(1.0, 0, code, "kernel")
    assert len(merger.counts()) == NUM_SERIES_MAX and merger.not_counted == 5


def test_keys() -> None:
    assert gpu_key(3) == gpu_key("3") == "3" and gpu_key("PCI:0000:3B:00") == "0000:3b:00"


def values(collector: XidCollector, at: float) -> dict[tuple[str, ...], float]:
    return {(v.metric.name, *v.labels[1:]): v.value for v in collector.read(at).values}


def test_counts_are_metrics_and_continue_over_a_restart(tmp_path: Path) -> None:
    clock = FakeClock(now=100.0, wall_offset=1_000_000.0)
    merger = XidMerger()
    collector = XidCollector(merger, node=NODE, state_file=tmp_path / "xids.json", clock=clock)
    assert values(collector, 100.0) == {("rolecall_xid_events_not_counted_total",): 0.0}
    merger.merge(99.0, 3, 79, "kernel")
    shown = values(collector, 101.0)
    assert shown["rolecall_xid_events_total", "3", "79"] == 1.0
    assert shown["rolecall_xid_last_timestamp_seconds", "3", "79"] == 1_000_099.0
    merger.merge(120.0, 3, 79, "nvml")
    collector.close()  # reports since the last poll are kept, too

    clock = FakeClock(now=5.0, wall_offset=1_000_200.0)  # the machine booted anew
    merger = XidMerger()
    collector = XidCollector(merger, node=NODE, state_file=tmp_path / "xids.json", clock=clock)
    shown = values(collector, 5.0)
    assert shown["rolecall_xid_events_total", "3", "79"] == 2.0
    assert shown["rolecall_xid_last_timestamp_seconds", "3", "79"] == 1_000_120.0
    merger.merge(6.0, 3, 79, "nvml")
    assert values(collector, 7.0)["rolecall_xid_last_timestamp_seconds", "3", "79"] == 1_000_206.0
    assert counts(merger) == {("3", 79): 3}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"xids": [[1]]}', '{"xids": [["3", "x", 1, 2.0]]}'])
def test_a_damaged_file_costs_the_counts_alone(tmp_path: Path, damage: str) -> None:
    (tmp_path / "xids.json").write_text(damage)
    merger = XidMerger()
    collector = XidCollector(merger, node=NODE, state_file=tmp_path / "xids.json", clock=FakeClock())
    assert merger.counts() == {} and collector.read(1.0).values


def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rolecall.agent.collectors.gpu.xid_merger.write_atomically", full)
    merger = XidMerger()
    collector = XidCollector(merger, node=NODE, state_file=tmp_path / "x", clock=FakeClock())
    merger.merge(1.0, 3, 79, "kernel")
    assert values(collector, 2.0)["rolecall_xid_events_total", "3", "79"] == 1.0
    collector.close()
