"""The event file: numbers that never start again, a torn end, retention."""

import json
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.agent.events import DETAIL_CHARACTERS_MAX, EventLog
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEventKind

KIND = AgentEventKind.REGISTERED
NODE = NodeId("node-1")
PROCESS = ProcessId(node=NODE, pid=5, start_ticks=50)


def log(tmp_path: Path, num_kept: int = 100) -> EventLog:
    return EventLog(tmp_path / "events.jsonl", NODE, FakeClock(), num_kept)


def _seqs(it: EventLog, after: int = 0) -> list[int]:
    return [e.seq for e in it.after(after).events]


def test_events_are_numbered_and_survive(tmp_path: Path) -> None:
    first = log(tmp_path)
    event = first.append(KIND, process=PROCESS, role="trainer", replica="trainer/1", incarnation=2, detail={"k": "v"})
    first.append(AgentEventKind.FINISHED)
    # No close: a SIGKILL leaves what was written, and that is everything.
    second = log(tmp_path)
    assert second.after(0).events[0] == event
    assert second.append(KIND).seq == 3
    assert _seqs(second, 1) == [2, 3]
    assert second.has(KIND, PROCESS) and not second.has(AgentEventKind.EXITED, PROCESS)


def test_a_torn_last_line_is_truncated_and_its_number_repeated(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(KIND)
    it.append(KIND)
    it.close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # killed in the middle of the second
    again = log(tmp_path)
    assert _seqs(again) == [1]
    assert again.append(KIND).seq == 2
    again.close()
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_damaged_line_is_skipped_and_no_number_is_used_twice(tmp_path: Path) -> None:
    it = log(tmp_path)
    for _ in range(3):
        it.append(KIND)
    it.close()
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], "{garbage"]) + "\n")
    again = log(tmp_path)
    assert _seqs(again) == [1, 2]
    assert again.append(KIND).seq > 3


def test_events_of_a_renamed_node_have_its_present_name(tmp_path: Path) -> None:
    it = log(tmp_path)
    events = [it.append(KIND, process=PROCESS), it.append(AgentEventKind.AGENT_STARTED)]
    it.close()
    name = NodeId("gpu-7")
    process = replace(PROCESS, node=name)
    renamed = EventLog(tmp_path / "events.jsonl", name, FakeClock())
    assert renamed.after(0).events == (
        replace(events[0], node=name, process=process),
        replace(events[1], node=name),
    )
    assert renamed.has(KIND, process)


def test_retention_keeps_the_newest_and_counts_the_lost(tmp_path: Path) -> None:
    it = log(tmp_path, num_kept=10)
    for _ in range(57):
        it.append(KIND)
    assert _seqs(it) == list(range(48, 58))
    assert it.after(40).lost == 7
    assert it.after(50).lost == 0
    assert it.after(0).lost == 0  # a newcomer has lost nothing
    it.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) <= 20
    again = log(tmp_path, num_kept=10)
    assert _seqs(again) == list(range(48, 58))
    assert again.append(KIND).seq == 58


def test_registrations_of_processes_that_live_are_kept(tmp_path: Path) -> None:
    it = log(tmp_path, num_kept=10)
    for pid in range(1, 5):
        it.append(KIND, process=replace(PROCESS, pid=pid), detail={"job": "mine"})
    for n in range(42):
        ended = {3: 1, 14: 2}.get(n, 0)  # the second once its registration is an old event
        kind = AgentEventKind.EXITED if ended else AgentEventKind.PROBE_DOWN
        it.append(kind, process=replace(PROCESS, pid=ended) if ended else None)
    it.close()
    again = log(tmp_path, num_kept=10)
    for reader in (it, again):
        events = reader.after(0).events
        assert [e.seq for e in events] == [3, 4, *range(37, 47)]
        assert [(e.kind, e.process and e.process.pid, e.detail.get("job")) for e in events[:2]] == [
            (KIND, 3, "mine"),
            (KIND, 4, "mine"),
        ]
        assert _seqs(reader, 3) == [4, *range(37, 47)] and reader.after(0, limit=1).events == events[:1]
        assert reader.after(3).lost == 32 and reader.after(3).after_wall_at == events[0].wall_at
        assert reader.after(40).lost == 0
    for pid in range(5, 20):  # more than there is room for
        again.append(KIND, process=replace(PROCESS, pid=pid))
    assert _seqs(again) == [50, 51, *range(52, 62)]


def test_a_file_that_cannot_be_shortened_loses_nothing(tmp_path: Path) -> None:
    it = log(tmp_path, num_kept=3)
    in_the_way = tmp_path / "events.tmp"
    in_the_way.mkdir()
    for _ in range(8):
        it.append(KIND)
    path = tmp_path / "events.jsonl"
    assert it.num_unwritten == 0 and len(path.read_text().splitlines()) == 8
    in_the_way.rmdir()
    it.append(KIND)  # the next try is due
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [7, 8, 9]


def test_a_cursor_of_another_life_starts_from_the_first(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(KIND)
    assert _seqs(it, 99) == [1]


def test_a_reader_can_tell_whether_its_last_event_is_still_the_one_of_that_number(tmp_path: Path) -> None:
    clock = FakeClock()
    it = EventLog(tmp_path / "events.jsonl", NODE, clock, 2)
    assert it.nothing_after(0) == it.after(0)
    events = []
    for _ in range(3):
        clock.advance(1.0)
        events.append(it.append(KIND))
    kept = {seq: it.after(seq).after_wall_at for seq in range(5)}
    assert kept == {0: 0.0, 1: 0.0, 2: events[1].wall_at, 3: events[2].wall_at, 4: 0.0}, "the first is not kept"
    assert it.nothing_after(2) is None
    assert it.nothing_after(3) == it.after(3)


def test_waiting_ends_with_the_event_or_the_deadline(tmp_path: Path) -> None:
    it = log(tmp_path)
    assert it.wait(0, 0.01).events == ()
    timer = threading.Timer(0.05, it.append, (KIND,))
    timer.start()
    assert [e.seq for e in it.wait(0, 30).events] == [1]
    timer.join()


def test_long_details_are_cut(tmp_path: Path) -> None:
    assert len(log(tmp_path).append(KIND, detail={"message": "x" * 10_000}).detail["message"]) == DETAIL_CHARACTERS_MAX


def test_a_full_disk_costs_durability_not_the_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = log(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), it._descriptor)
    assert it.append(KIND).seq == 1
    assert _seqs(it) == [1]
    assert it.num_unwritten == 1
    assert "could not be written" in caplog.text


def test_without_a_free_descriptor_it_is_flushed_the_next_time(tmp_path: Path) -> None:
    it = log(tmp_path)
    it.append(KIND)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        it.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert it._dirty
    it.sync()
    assert not it._dirty


def test_limit_of_one_answer(tmp_path: Path) -> None:
    it = log(tmp_path)
    for _ in range(5):
        it.append(KIND)
    assert [e.seq for e in it.after(1, limit=2).events] == [2, 3]
