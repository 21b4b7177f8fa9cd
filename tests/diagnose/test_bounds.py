"""The limits of a call hold within each file, and what was read before is judged and not lost."""

import gzip
import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.stacks import diagnosis as stack_diagnosis
from rolecall.detector.artifacts.stacks import dumps as stack_dumps
from rolecall.detector.base.read_budget import ReadLimits
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.sources import recording
from rolecall.diagnose.diagnose import DiagnosisReport, diagnose, explained
from tests.detector.panel_data import noise

XID = "[    5.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
IDLE = "[    6.000000] usb 1-1: new high-speed USB device number 2 using xhci_hcd\n"
MIB = 1 << 20


class Passing(FakeClock):
    """A second passes with each read of the clock, so that reads are counted."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def judged(path: Path, seconds: float = 6.0) -> DiagnosisReport:
    return diagnose([path], [], limits=ReadLimits(seconds_max=seconds), clock=Passing())


def kernel_log(path: Path) -> Path:
    """40 KB of gzip that unpack to 16 MiB; the fault is in its first line."""
    path = path.with_suffix(".log.gz")
    path.write_bytes(gzip.compress((XID + IDLE * (16 * MIB // len(IDLE))).encode()))
    return path


def pickled(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"entries": list(range(1 << 20))}, protocol=2))
    return path


def stacks(path: Path) -> Path:
    frames = [{"name": f"f{n}", "short_filename": "a.py"} for n in range(20)]
    threads = [{"pid": 1, "thread_id": n, "thread_name": f"t{n}", "frames": frames} for n in range(1000)]
    path.write_text(json.dumps(threads))
    return path


def ras(path: Path) -> Path:
    ranks = [{"rank": n, "host": "h", "pid": n, "status": {}} for n in range(50_000)]
    path.write_text(json.dumps({"nccl_version": "2.28.9", "communicators": [{"hash": "0x1", "ranks": ranks}]}))
    return path


def ras_text(path: Path) -> Path:
    rows = "".join(f"  Rank {n} has launched up to operation {n}\n" for n in range(50_000))
    path.write_text(f"Job summary\n\nCommunicators...\n#0-0 (00000000000000ab) MISMATCH\n{rows}")
    return path


def inspector(path: Path) -> Path:
    header = {"id": "0x1", "rank": 0, "n_ranks": 2, "nnodes": 1}
    line = json.dumps({"header": header, "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_exec_time_us": 9}})
    path.write_text(f"{line}\n" * 20_000)
    return path


def events(path: Path) -> Path:
    line = json.dumps({"seq": 1, "kind": "registered", "node": "n1", "wall_at": 1.0, "at": 1.0})
    path.write_text(f"{line}\n" * 20_000)
    return path


def ports(path: Path) -> Path:
    for n in range(20):
        folder = path / f"node{n}" / "mlx5_0" / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n")
    return path


@pytest.mark.parametrize("write", [kernel_log, pickled, stacks, ras, ras_text, inspector, events, ports])
def test_the_time_ends_within_a_file_which_is_named_and_makes_it_cannot_tell(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "rank0")
    answer = judged(path)
    [said] = [r for i in answer.inputs for r in i.remarks if "not read to its end in the 6 s" in r]
    assert said.startswith(f"cannot tell from {path}") and "name fewer files" in said
    assert answer.verdict in ("cannot_tell", "fault")


def test_what_a_log_held_before_the_time_ended_is_not_lost(tmp_path: Path) -> None:
    answer = judged(kernel_log(tmp_path / "gpu7"))
    [found] = answer.diagnoses
    assert found.suspects[0].node == "gpu7" and "XID 79" in found.because and answer.open_ends
    assert "kernel lines" in answer.inputs[0].content and "0 lines" not in answer.inputs[0].content


def test_all_kinds_of_file_share_the_time_and_later_ones_are_counted(tmp_path: Path) -> None:
    for n in range(3):
        stacks(tmp_path / f"rank_{n}.json")
        kernel_log(tmp_path / f"gpu{n}")
    answer = judged(tmp_path)
    said = [r for i in answer.inputs for r in i.remarks if "not read to its end" in r]
    assert len(said) == 2 and "rank_0.json" in said[0] and "(3 files not read)" in said[0]
    assert "gpu0.log.gz" in said[1] and "(3 files not read)" in said[1]


def test_a_rank_whose_dump_was_not_read_is_not_the_one_that_left_none(tmp_path: Path) -> None:
    """All others wait for rank 3: were its dump missing, it would be named."""
    for rank in range(3):
        group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}
        status = {"last_enqueued_collective": 7, "last_started_collective": 7, "last_completed_collective": 6}
        dump = {"version": "2.9", "rank": rank, "pg_config": {"0": group}, "pg_status": {"0": status}, "entries": []}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    assert [s.rank for d in diagnose([tmp_path], []).diagnoses for s in d.suspects] == [3]
    pickled(tmp_path / "nccl_trace_rank_3")
    answer = judged(tmp_path)
    assert answer.open_ends and not any(s.rank == 3 for d in answer.diagnoses for s in d.suspects)


def test_a_process_whose_stack_was_not_read_is_not_the_one_that_left_none(tmp_path: Path) -> None:
    frame = {"name": "all_reduce", "short_filename": "torch/distributed/distributed_c10d.py"}
    for rank in range(8):
        thread = {"pid": rank + 1, "thread_id": 1, "thread_name": "MainThread", "frames": [frame]}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps([thread]))
    read = [replace(stack_dumps.read(path), world_size=9) for path in sorted(tmp_path.iterdir())]
    [found] = stack_diagnosis.diagnose(read)
    assert [s.rank for s in found.suspects] == [8]
    assert stack_diagnosis.diagnose(read, complete=False) == []


PICKLE_BYTES = 54 * MIB


@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_a_pickle_of_54_mib_stays_within_the_memory_of_a_call(tmp_path: Path, hostile: bool) -> None:
    """Measured in a process of its own. A hostile one makes a list from each of its bytes."""
    path = tmp_path / "nccl_trace_rank_0"
    text = b"X\x00\x00\x01\x00" + b"x" * 0x10000
    body = b"]" * PICKLE_BYTES if hostile else b"](" + text * (PICKLE_BYTES // len(text)) + b"e"
    path.write_bytes(b"\x80\x02}X\x07\x00\x00\x00entries" + body + b"s.")
    read = "import sys; from rolecall.cli.main import main; sys.exit(main(['diagnose', sys.argv[1]]))"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (1536 * MIB, 1536 * MIB))

    command = [sys.executable, "-c", read, str(path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=limited, timeout=120)
    assert ended.returncode == 2 and "nccl_trace_rank_0" in ended.stderr and "Traceback" not in ended.stderr
    assert ("more memory than the 768 MiB" in ended.stderr) == hostile


class Alarms:
    """A detector that suspects the first machine at its third tick."""

    name, threshold, ticks = "alarms", 0.5, 0

    def track(self, shape: PanelShape) -> "Alarms":
        self.shape, self.ticks, self.scores = shape, 0, np.ones(len(shape.machines))
        return self

    def tick(self, at: float, values: Floats) -> list[Finding]:
        self.ticks += 1
        if self.ticks != 3:
            return []
        return [
            Finding(
                detector=self.name,
                suspects=(self.shape.suspect(0),),
                fault_class=FaultClass.SLOW,
                onset=at,
                detected_at=at,
                confidence=0.9,
                because="it is slow",
            )
        ]


def recorded(folder: Path, num: int) -> None:
    for n in range(num):
        recording.write(folder / f"{n}.parquet", [noise(ticks=100)])


def test_the_time_ends_between_two_ticks_and_what_was_found_is_kept(tmp_path: Path) -> None:
    recorded(tmp_path, 3)
    detector = Alarms()
    answer = diagnose([tmp_path], [detector], limits=ReadLimits(seconds_max=30.0), clock=Passing())
    assert 3 < detector.ticks < 30 and [d.because for d in answer.diagnoses] == ["it is slow"]
    first, others = answer.inputs
    [said] = first.remarks
    assert said.startswith(f"cannot tell for role trainer: {detector.ticks} of its 100 ticks were judged in the 30 s")
    assert "would settle it" in said
    assert others.remarks[0].startswith(f"cannot tell from {tmp_path / '1.parquet'}: not read to its end in the 30 s")
    assert others.remarks[0].endswith("(2 files not read)")


def test_a_recording_takes_no_time_from_dumps_and_logs(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    kernel_log(tmp_path / "gpu7")
    answer = diagnose([tmp_path], [Alarms()], limits=ReadLimits(seconds_max=100.0), clock=Passing())
    assert any("XID 79" in d.because for d in answer.diagnoses), "although its reading took most of the time"
    assert [i.kind for i in answer.inputs] == ["kernel logs", "recording"] and answer.inputs[1].remarks


def test_scores_are_drawn_as_far_as_there_is_time(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    clock = FakeClock()
    answer = diagnose([tmp_path], [Alarms()], limits=ReadLimits(seconds_max=30.0), clock=clock)
    (whole,) = explained(answer, [Alarms()])
    clock.advance(31.0)
    (none,) = explained(answer, [Alarms()])
    assert whole.score is not None and none.score is not None
    assert np.isfinite(whole.score.score).all() and not np.isfinite(none.score.score).any()
