"""Who holds up a job's collectives: on dumps made up, rank by rank, and on those of a real gloo job."""

import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.diagnosis import NO_TIME, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.flight_recorder import diagnosis as flight_recorder
from rolecall.detector.artifacts.flight_recorder import waits as flight_waits
from rolecall.detector.artifacts.flight_recorder.diagnosis import diagnose, summary
from rolecall.detector.artifacts.flight_recorder.dumps import read_as_needed, read_many
from rolecall.detector.base.findings import SETTLE
from tests.support import eventually

BEGAN_NS = 1_795_000_000_000_000_000
WRITTEN_AT = BEGAN_NS / 1e9 + 100.0
"""Seconds; operations are made one second apart from BEGAN_NS on."""
WORLD = "0"


@dataclass
class Job:
    """Groups by name, and what each rank did in them. Names end as PyTorch's: `WORLD` is the group of all."""

    folder: Path
    groups: dict[str, tuple[int, ...]]
    backend: str = "nccl"
    lost_records: int = 0
    """Of each ring; then numbers go on from there."""
    names: Callable[[int], str] = "nccl_trace_rank_{}".format
    done: dict[int, list[tuple[str, str, int, str, str]]] = field(default_factory=dict)
    """By rank: group, operation, size, dtype, state."""

    @property
    def num_ranks(self) -> int:
        return len(self.groups[WORLD])

    def did(
        self,
        ranks: Sequence[int],
        group: str,
        *names: str,
        size: int = 8,
        state: str = "completed",
        dtype: str = "Float",
    ) -> None:
        for rank in ranks:
            self.done.setdefault(rank, []).extend((group, name, size, dtype, state) for name in names)

    def waits(self, ranks: Sequence[int], group: str, name: str, *, size: int = 8, dtype: str = "Float") -> None:
        self.did(ranks, group, name, size=size, state="scheduled", dtype=dtype)

    def all_did(self, *names: str, groups: Sequence[str] = ()) -> None:
        for group in groups or self.groups:
            self.did(self.groups[group], group, *names)

    def content(self, rank: int) -> dict[str, Any]:
        mine = [g for g, ranks in self.groups.items() if rank in ranks]
        config = {g: {"name": g, "desc": _desc(g), "ranks": str(list(self.groups[g]))} for g in mine}
        seqs, p2p, status, entries = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0), {}, []
        for g in mine:
            seqs[g] = self.lost_records
        finished = dict(seqs)
        for n, (group, name, size, dtype, state) in enumerate(self.done.get(rank, ())):
            is_p2p = name.startswith(("send", "recv"))
            (p2p if is_p2p else seqs)[group] += 1
            if state == "completed" and not is_p2p:
                finished[group] = seqs[group]
            gloo = self.backend == "gloo"
            entries.append(
                {
                    "record_id": self.lost_records + n,
                    "pg_id": mine.index(group),
                    "process_group": (group, _desc(group)),
                    "collective_seq_id": seqs[group],
                    "p2p_seq_id": p2p[group],
                    "profiling_name": f"{self.backend}:{name}",
                    "time_created_ns": BEGAN_NS + n * 1_000_000_000,
                    "input_sizes": [[size]],
                    "input_dtypes": [dtype],
                    "output_sizes": [[size]],
                    "output_dtypes": [dtype],
                    "state": "scheduled" if gloo else state,
                    "retired": state == "completed",
                    "is_p2p": is_p2p,
                }
            )
            reported = (p2p if is_p2p else seqs)[group]  # as in PyTorch: one number for both
            before = status.get(str(mine.index(group)), {}).get("last_completed_collective", self.lost_records)
            status[str(mine.index(group))] = {
                "last_enqueued_collective": reported,
                "last_started_collective": -1,
                "last_completed_collective": reported if state == "completed" else before,
            }
        if self.backend == "gloo":
            config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        return {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}

    def dump(self, ranks: Sequence[int] | None = None, written_at: float = WRITTEN_AT) -> list[Path]:
        paths = []
        for rank in range(self.num_ranks) if ranks is None else ranks:
            path = self.folder / self.names(rank)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(pickle.dumps(self.content(rank), protocol=2))
            os.utime(path, (written_at, written_at))
            paths.append(path)
        return paths


def _desc(group: str) -> str:
    return "default_pg" if group == WORLD else f"group_{group}"


def found(paths: Sequence[Path], world_size: int | None = None) -> list[Finding]:
    """By the full way; the fast way must say the same, and so must any order of the files."""
    dumps, unreadable = read_many(paths, num_processes=1)
    assert not unreadable
    full = diagnose(dumps, world_size=world_size)
    assert diagnose(dumps[::-1], world_size=world_size) == full

    def wanted(dumps: Sequence[Any]) -> set[int]:
        return flight_recorder.entries_wanted(dumps, world_size=world_size)

    fast = diagnose(read_as_needed(paths, wanted, num_processes=1)[0], world_size=world_size)
    assert [(f.fault_class, f.suspects) for f in fast] == [(f.fault_class, f.suspects) for f in full]
    return full


def the_one(findings: Sequence[Finding]) -> tuple[str, list[int | None], str]:
    """Class, ranks and sentence of the only finding; it survives JSON."""
    assert len(findings) == 1, [f.because for f in findings]
    (finding,) = findings
    assert Finding.from_dict(finding.to_dict()) == finding
    assert finding.onset <= finding.detected_at and 0 < finding.confidence < 1
    return str(finding.fault_class), [s.rank for s in finding.suspects], finding.because


def square(folder: Path, **settings: Any) -> Job:
    """Eight ranks; pairs of tensor parallel ranks, and two groups of four that hold one of each pair."""
    groups = {WORLD: tuple(range(8)), **{str(1 + p): (2 * p, 2 * p + 1) for p in range(4)}}
    groups |= {"5": (0, 2, 4, 6), "6": (1, 3, 5, 7)}
    job = Job(folder, groups, **settings)
    for _ in range(3):
        job.all_did("all_reduce", "_all_gather_base")
    return job


@pytest.fixture(params=["nccl", "gloo", "nccl, ring run over"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    backend, _, lost = request.param.partition(", ")
    return square(tmp_path, backend=backend, lost_records=5000 if lost else 0)


# --- nothing wrong ---------------------------------------------------------------------------------------------------


def test_a_healthy_job_is_healthy(job: Job) -> None:
    paths = job.dump()
    assert found(paths) == []
    text = summary(read_many(paths)[0])
    assert "8 ranks, 7 process groups, 144 operations" in text and "none waited for 1 s" in text


def test_the_summary_lists_waiting_ranks(job: Job) -> None:
    job.waits([0, 1, 2], WORLD, "all_reduce")
    assert "ranks 0-2 waited for 1 s or longer" in summary(read_many(job.dump())[0])


def test_dumps_of_a_job_at_work_are_not_taken_at_one_moment(tmp_path: Path) -> None:
    job = square(tmp_path)
    job.waits(range(5), WORLD, "all_reduce")
    newest = BEGAN_NS / 1e9 + 18
    assert found(job.dump(written_at=newest + 0.5)) == []
    assert the_one(found(job.dump(written_at=newest + 1.5)))[1] == [5, 6, 7]


def test_uneven_operations_are_no_mismatch(tmp_path: Path) -> None:
    job = square(tmp_path)
    for rank in range(8):
        job.waits([rank], WORLD, "all_to_all", size=8 + rank)
    fault, ranks, because = the_one(found(job.dump()))
    assert fault == "cannot_tell" and ranks == list(range(8)) and "all wait in" in because


# --- who is late -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 3, 7])
def test_a_rank_that_has_not_entered_is_named(job: Job, late: int) -> None:
    job.waits([r for r in range(8) if r != late], WORLD, "all_reduce")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("hang", [late])
    assert f"rank {late} has not entered all_reduce #{job.lost_records + 7} of group 0 (default_pg)" in because
    assert "since 2026-11-18" in because


def test_two_ranks_that_have_not_entered_are_named_together(job: Job) -> None:
    job.waits([r for r in range(8) if r not in (2, 5)], WORLD, "all_reduce")
    assert the_one(found(job.dump()))[:2] == ("hang", [2, 5])


def test_cause_comes_before_symptom_across_groups(job: Job) -> None:
    """Rank 5 is outside. Its pair waits, their data parallel peers wait for the pair, and all others for those."""
    job.waits([4], "3", "all_reduce")
    job.waits([0, 2, 6], "5", "all_reduce")
    job.waits([1, 3, 7], "6", "all_reduce")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("hang", [5]) and "rank 5 has not entered all_reduce" in because


def test_operations_enqueued_behind_a_hang_are_no_tie(tmp_path: Path) -> None:
    """NCCL's work is only enqueued: pairs have all entered their next operation, which stands behind the stuck one."""
    job = square(tmp_path)
    waiting = [r for r in range(8) if r != 5]
    job.waits(waiting, WORLD, "all_reduce")
    for pair in ("1", "2", "4"):
        job.waits(job.groups[pair], pair, "all_reduce")
    assert the_one(found(job.dump()))[:2] == ("hang", [5])


def test_how_far_ranks_have_run_ahead_does_not_matter(tmp_path: Path) -> None:
    """All have entered what they wait for; that some have enqueued more behind it makes no one late."""
    job = square(tmp_path)
    job.waits(range(8), WORLD, "all_reduce")
    job.waits(range(3), WORLD, "all_reduce")
    finding = found(job.dump())[0]
    assert finding.fault_class == FaultClass.CANNOT_TELL and len(finding.suspects) == 8
    assert any(e.kind == SETTLE for e in finding.evidence)


def test_most_of_a_group_is_not_accused_for_one_that_waits(job: Job) -> None:
    job.waits([6], WORLD, "all_reduce")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("cannot_tell", [6]) and "most of the group has not entered" in because


def test_a_rank_that_alone_has_not_finished_is_on_the_gpu_side(tmp_path: Path) -> None:
    job = square(tmp_path)
    job.did([0, 1, 2, 4, 5, 6, 7], WORLD, "broadcast")
    job.waits([3], WORLD, "broadcast")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("gpu", [3]) and "did not finish it, as others did" in because


def test_a_rank_that_alone_has_not_started_is_on_the_gpu_side(tmp_path: Path) -> None:
    job = square(tmp_path)
    job.did([0, 1, 2, 4, 5, 6, 7], WORLD, "all_reduce", state="started")
    job.waits([3], WORLD, "all_reduce")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("gpu", [3]) and "did not start it" in because


def test_a_rank_without_operations_is_late_for_the_first(tmp_path: Path) -> None:
    job = Job(tmp_path, {WORLD: (0, 1, 2, 3)})
    job.waits([0, 1, 3], WORLD, "all_reduce")
    assert the_one(found(job.dump()))[:2] == ("hang", [2])


# --- who left no dump ------------------------------------------------------------------------------------------------


def test_a_rank_without_a_dump_is_evidence(job: Job) -> None:
    alive = [r for r in range(8) if r != 2]
    job.waits(alive, WORLD, "all_reduce")
    fault, ranks, because = the_one(found(job.dump(alive), world_size=8))
    assert (fault, ranks) == ("hang", [2]) and "rank 2 left no dump" in because


def test_a_late_rank_explains_more_than_a_missing_file(tmp_path: Path) -> None:
    job = square(tmp_path)
    job.waits([0, 1, 3, 4, 6, 7], WORLD, "all_reduce")
    (finding,) = found(job.dump([0, 1, 3, 4, 5, 6, 7]))
    assert [s.rank for s in finding.suspects] == [5] and "no dump of rank 2" in finding.evidence[0].text


def test_a_missing_dump_without_waits_is_undecided(job: Job) -> None:
    fault, ranks, because = the_one(found(job.dump(range(7)), world_size=8))
    assert (fault, ranks) == ("cannot_tell", [7]) and "none of the 7 other ranks waits" in because


def test_one_dump_alone_is_undecided(job: Job) -> None:
    assert found(job.dump([3]), world_size=8) == []
    assert "no dump of ranks 0-2 and 4-7" in summary(read_many(job.dump([3]))[0], world_size=8)
    job.waits([3], WORLD, "all_reduce")
    (finding,) = found(job.dump([3]), world_size=8)
    assert finding.fault_class == FaultClass.CANNOT_TELL and finding.suspects == ()
    assert "rank 3 waits in all_reduce" in finding.because and finding.evidence[-1].kind == SETTLE


def test_without_dumps_there_is_no_finding() -> None:
    assert diagnose([]) == [] and summary([]) == "no dump"


# --- another operation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ({"name": "broadcast"}, "COLLECTIVE_TYPE_MISMATCH"),
        ({"name": "all_reduce", "size": 9}, "SIZE_OR_SYNTAX_MISMATCH"),
        ({"name": "all_reduce", "dtype": "BFloat16"}, "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_another_operation_is_the_fault_of_the_code(job: Job, odd: dict[str, Any], kind: str) -> None:
    job.waits([r for r in range(8) if r != 4], WORLD, "all_reduce")
    job.waits([4], WORLD, **odd)
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("user_code", [4])
    assert kind in because and "not a machine fault" in because and "rank 4 entered a different operation" in because


def test_halves_that_differ_are_named_as_a_set(job: Job) -> None:
    job.waits(range(4), WORLD, "all_reduce")
    job.waits(range(4, 8), WORLD, "broadcast")
    assert the_one(found(job.dump()))[:2] == ("user_code", list(range(8)))


def test_a_skipped_collective_is_seen_in_what_follows(job: Job) -> None:
    """Everybody's turn is `all_reduce`, then `_all_gather_base`: rank 1 has left out the first."""
    job.waits([r for r in range(8) if r != 1], WORLD, "all_reduce")
    job.waits([1], WORLD, "_all_gather_base")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("user_code", [1]) and "as if it had skipped one" in because


def test_a_mismatch_explains_waits_elsewhere(job: Job) -> None:
    job.waits([1, 3, 5], "6", "all_reduce")
    job.waits([7], "6", "broadcast")
    for pair, waiter in (("1", 0), ("2", 2), ("3", 4), ("4", 6)):
        job.waits([waiter], pair, "all_reduce")
    assert the_one(found(job.dump()))[:2] == ("user_code", [7])


def test_waits_in_a_circle_are_another_collective(job: Job) -> None:
    job.waits([r for r in range(8) if r != 3], WORLD, "all_reduce")
    job.waits([3], "6", "all_reduce")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("user_code", [3])
    assert "all_reduce #" in because and "of group 6" in because and "order of collectives differs" in because


def test_a_circle_is_reported_beside_what_is_enqueued_behind_it(tmp_path: Path) -> None:
    """Pairs that have all entered what stands behind the circle explain nothing of it."""
    job = square(tmp_path)
    job.waits([r for r in range(8) if r != 3], WORLD, "all_reduce")
    job.waits([3], "6", "all_reduce")
    job.waits([0, 1], "1", "all_reduce")
    job.waits([2, 3], "2", "all_reduce")
    assert the_one(found(job.dump()))[:2] == ("user_code", [3])


# --- point to point --------------------------------------------------------------------------------------------------


def pipeline(folder: Path, **settings: Any) -> Job:
    job = Job(folder, {WORLD: (0, 1, 2, 3), "1": (0, 1, 2, 3)}, **settings)
    for _ in range(2):
        for stage in range(3):
            job.did([stage], "1", f"send {stage}->{stage + 1}")
            job.did([stage + 1], "1", f"recv {stage + 1}<-{stage}")
    job.all_did("all_reduce", groups=[WORLD])
    return job


@pytest.mark.parametrize("lost", [0, 5000])
def test_a_rank_that_never_sent_blocks_the_pipeline(tmp_path: Path, lost: int) -> None:
    """Stage 1 hangs before it receives: stage 0 waits to send, 2 and 3 to receive."""
    job = pipeline(tmp_path, lost_records=lost)
    assert found(job.dump()) == [], "unequal numbers of sends are no lateness"
    job.waits([0], "1", "send 0->1")
    job.waits([2], "1", "recv 2<-1")
    job.waits([3], "1", "recv 3<-2")
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("hang", [1]) and "send and recv" in because


def test_a_send_that_has_left_is_not_awaited_from_its_sender(tmp_path: Path) -> None:
    job = pipeline(tmp_path)
    job.did([1], "1", "send 1->2")
    job.waits([2], "1", "recv 2<-1")
    fault, ranks, _ = the_one(found(job.dump()))
    assert ranks == [2] and fault == "gpu"


def test_send_and_recv_of_other_sizes_are_the_fault_of_the_code(tmp_path: Path) -> None:
    job = pipeline(tmp_path)
    job.waits([1], "1", "send 1->2", size=8)
    job.waits([2], "1", "recv 2<-1", size=16)
    fault, ranks, because = the_one(found(job.dump()))
    assert (fault, ranks) == ("user_code", [1, 2]) and "rank 1 sends [(8,)], rank 2 expects [(16,)]" in because


def test_two_ranks_that_both_receive_first_wait_in_a_cycle(tmp_path: Path) -> None:
    job = pipeline(tmp_path)
    job.waits([1], "1", "recv 1<-2")
    job.waits([2], "1", "recv 2<-1")
    assert the_one(found(job.dump()))[:2] == ("user_code", [1, 2])


def test_a_late_rank_is_found_through_the_pipeline(tmp_path: Path) -> None:
    job = pipeline(tmp_path)
    job.waits([0, 2], WORLD, "all_reduce")
    job.waits([3], "1", "recv 3<-1")
    assert the_one(found(job.dump()))[:2] == ("hang", [1])


# --- one group, and the dump's own times ------------------------------------------------------------------------------


def test_a_sentence_speaks_of_one_group(tmp_path: Path) -> None:
    """Ranks 0 and 1 are outside of different groups, and no group has both of them: each is told of its own."""
    job = square(tmp_path)
    job.waits([2, 4, 6], "5", "all_reduce")
    job.waits([3, 5, 7], "6", "broadcast")
    (finding,) = found(job.dump())
    assert [s.rank for s in finding.suspects] == [0, 1]
    first, _, rest = finding.because.partition("; the same was found for ")
    assert first.startswith("rank 0 has not entered all_reduce #7 of group 5")
    assert "ranks 2, 4 and 6 wait in it" in first and "group 6" not in finding.because
    assert rest == "rank 1 in 1 other group"
    assert finding.evidence[0].values["num_waiting"] == 3 and finding.evidence[0].values["num_members"] == 4


def test_ranks_that_block_one_group_together_are_named_for_it(tmp_path: Path) -> None:
    """Their pairs have waited longer, but only the group of all ranks waits for both."""
    job = square(tmp_path)
    job.waits([0], "1", "all_reduce")
    job.waits([4], "3", "all_reduce")
    job.waits([2, 3, 6, 7], WORLD, "all_reduce")
    _, ranks, because = the_one(found(job.dump()))
    assert ranks == [1, 5] and "ranks 1 and 5 have not entered all_reduce #7 of group 0" in because
    assert "other group" not in because and "ranks 2, 3, 6 and 7 wait in it" in because


def test_waiting_ranks_are_counted_in_the_group_of_the_sentence(tmp_path: Path) -> None:
    """Four more ranks wait elsewhere for those that wait here."""
    job = square(tmp_path)
    job.waits([1, 3, 5], "6", "all_reduce")
    job.waits([7], "6", "broadcast")
    for pair, waiter in (("1", 0), ("2", 2), ("3", 4), ("4", 6)):
        job.waits([waiter], pair, "all_reduce")
    (finding,) = found(job.dump())
    assert "3 other ranks wait since" in finding.because and finding.evidence[0].values["num_waiting"] == 3


@pytest.mark.parametrize("days", [0, 318])
def test_the_time_of_the_file_is_not_the_time_of_the_finding(tmp_path: Path, days: int) -> None:
    job = square(tmp_path)
    job.waits([r for r in range(8) if r != 5], WORLD, "all_reduce")
    began = BEGAN_NS / 1e9 + 18
    (finding,) = found(job.dump(written_at=began + 60.0 + days * 86_400.0))
    assert finding.onset == finding.detected_at == began
    assert not any(e.kind == NO_TIME for e in finding.evidence)


def test_dumps_without_times_say_that_the_time_is_unknown(tmp_path: Path) -> None:
    job = square(tmp_path)
    (finding,) = found(job.dump(range(7)), world_size=8)
    assert any(e.kind == NO_TIME for e in finding.evidence)


# --- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "node"),
    [
        ("host{host}_nccl_trace_rank_{rank}", "host1"),
        ("node-{host}/nccl_trace_rank_{rank}", "node-1"),
        ("one/nccl_trace_rank_{rank}", "rank-5"),
    ],
)
def test_file_and_folder_names_give_the_machine(tmp_path: Path, names: str, node: str) -> None:
    job = square(tmp_path, names=lambda rank: names.format(rank=rank, host=rank // 4))
    job.waits([r for r in range(8) if r != 5], WORLD, "all_reduce")
    (late,) = found(job.dump())[0].suspects
    assert late.node == node
    (missing,) = found(job.dump([r for r in range(8) if r != 5]) and sorted(job_files(tmp_path, without=5)))[0].suspects
    assert (missing.rank, missing.node) == (5, node), "between two of one machine"


def job_files(folder: Path, without: int) -> list[Path]:
    return [p for p in folder.rglob("*rank_*") if not p.name.endswith(f"_{without}")]


def test_thousands_of_groups_of_all_ranks_do_no_harm(tmp_path: Path) -> None:
    """As a hostile dump may claim them: who is in each is not listed once more for each."""
    job = Job(tmp_path, {WORLD: (0, 1)})
    job.all_did("all_reduce")
    (path,) = job.dump([0])
    content = job.content(0)
    content["rank"], content["pg_status"] = 400_000, {}
    content["pg_config"] = {str(n): {"desc": "default_pg", "ranks": "[]"} for n in range(5000)}
    path.write_bytes(pickle.dumps(content, protocol=2))
    begun = time.monotonic()
    assert found([path, *job.dump([1])]) == []
    assert time.monotonic() - begun < 30.0, "400,000 ranks in 5,000 groups would take minutes, and 16 GB"


ODD: dict[type, list[Any]] = {
    bool: [True, False],
    int: [0, 1, -1, 7, 1 << 31, (1 << 63) - 1, -(1 << 63)],
    str: ["", "0", "1", "99", "default_pg", "nccl:send 0->1", "nccl:send 9->9", "gloo:recv 1<-0", "[]", "[5, 3]"],
    list: [[], [[1, 2]], None],
    dict: [{}, None],
    tuple: [("0", "0"), ("9", "")],
}


def spoil(value: Any, rng: random.Random) -> None:
    """Puts something else that could be there somewhere into a dump."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if keys:
        key = rng.choice(keys)
        if isinstance(value[key], dict | list) and rng.random() < 0.9:
            spoil(value[key], rng)
        else:
            value[key] = rng.choice(ODD.get(type(value[key]), [0, ""]))


@pytest.mark.parametrize("case", range(40))
def test_whatever_dumps_claim_they_get_an_answer(tmp_path: Path, rng: random.Random, case: int) -> None:
    rng = random.Random(rng.random() + case)
    job = square(tmp_path, backend=rng.choice(("nccl", "gloo")), lost_records=rng.choice((0, 5000)))
    job.waits([r for r in range(8) if r != 3], WORLD, "all_reduce")
    paths = job.dump()
    for path in rng.sample(paths, 3):
        content = pickle.loads(path.read_bytes())
        for _ in range(rng.randint(1, 5)):
            spoil(content, rng)
        if rng.random() < 0.2:
            content.pop(rng.choice(list(content)))
        path.write_bytes(pickle.dumps(content, protocol=2))
    dumps, _ = read_as_needed(paths, flight_recorder.entries_wanted, num_processes=1)
    for finding in diagnose(dumps):
        assert Finding.from_dict(finding.to_dict()) == finding and len(finding.because) < 3000
    assert summary(dumps)


# --- any job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(30))
def test_the_culprit_is_found_wherever_it_stops(tmp_path: Path, rng: random.Random, case: int) -> None:
    """Random groups and programs, the same for all; one rank stops somewhere, the others run until they block."""
    rng = random.Random(rng.random() + case)
    num_ranks = rng.choice((4, 6, 9))
    groups = {WORLD: tuple(range(num_ranks))}
    for g in range(1, rng.randint(2, 6)):
        groups[str(g)] = tuple(sorted(rng.sample(range(num_ranks), rng.randint(2, num_ranks))))
    job = Job(tmp_path, groups, lost_records=rng.choice((0, 3000)))
    program = [rng.choice([*groups, WORLD]) for _ in range(12)] + [WORLD]
    culprit = rng.randrange(num_ranks)
    mine = [n for n, g in enumerate(program) if culprit in groups[g]]
    stops_before = rng.choice(mine)
    blocked: set[int] = {culprit}
    for n, group in enumerate(program):
        members = groups[group]
        if n < stops_before or not blocked.intersection(members):
            job.did([r for r in members if r not in blocked], group, "all_reduce")
        else:
            job.waits([r for r in members if r not in blocked], group, "all_reduce")
            blocked.update(members)
    paths = job.dump()
    dead = rng.random() < 0.4 and num_ranks > 2
    if dead:
        paths[culprit].unlink()
        del paths[culprit]
    findings = found(paths, world_size=num_ranks)
    # Of two ranks one waits and the other does not, so half of the group is late: still named. More are never accused.
    assert [s.rank for s in findings[0].suspects] == [culprit], (culprit, groups, [f.because for f in findings])


# --- real ------------------------------------------------------------------------------------------------------------

DEADLINE_SECONDS = 120.0


class Gloo:
    """The ranks of flight_worker.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).parents[1] / "flight_worker.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        self.unasked: list[str] = []
        self.pids: dict[int, int] = {}
        self.recorded: Counter[int] = Counter()
        """How many operations each rank's recorder holds once it has begun all it was reported. (gloo records no pairs.)"""

    def start(self) -> None:
        while len(self.pids) < 4:
            rank, _, pid = self._next("the ranks start").partition(" ready ")
            self.pids[int(rank)] = int(pid)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def _next(self, what: str) -> str:
        try:
            return self.lines.get(timeout=DEADLINE_SECONDS)
        except queue.Empty:
            raise AssertionError(f"waited {DEADLINE_SECONDS:g} s, in vain: {what}") from None

    def tell(self, *lines: str) -> None:
        assert self.process.stdin is not None
        for line in lines:
            rank, operation, *_ = line.split()
            self.recorded[int(rank)] += operation in ("reduce", "start", "gather")
            self.process.stdin.write(line + "\n")

    def expect(self, *lines: str) -> None:
        awaited = list(lines)
        while awaited:
            if (known := [line for line in awaited if line in self.unasked]) == []:
                self.unasked.append(self._next(f"{awaited}, after {self.unasked}"))
            for line in known:
                self.unasked.remove(line)
                awaited.remove(line)

    def do(self, *lines: str) -> None:
        self.tell(*lines)
        self.expect(*lines)

    def dumped(self, name: str, ranks: Sequence[int] = range(4)) -> list[list[Finding]]:
        """What the pickles tell, and what the JSON does."""
        for folder in (name, f"{name}_json"):
            (self.folder / folder).mkdir()
        self.do(*(f"{r} dump {name}" for r in ranks))
        return [found(sorted((self.folder / f).iterdir()), world_size=4) for f in (name, f"{name}_json")]

    def dumped_while_waiting(self, name: str, ranks: Sequence[int]) -> list[list[Finding]]:
        """Dumps anew until each of these ranks has begun all that it was reported for as long as counts as waiting."""
        reported: list[list[Finding]] = []
        number = count()

        def all_wait() -> bool:
            nonlocal reported
            folder = f"{name}-{next(number)}"
            reported = self.dumped(folder, ranks)
            for r in ranks:
                path = self.folder / folder / f"gloo_trace_rank_{r}"  # the JSON is later in all
                entries = pickle.loads(path.read_bytes())["entries"]
                waited_seconds = path.stat().st_mtime - max(e["time_created_ns"] for e in entries) / 1e9
                if len(entries) < self.recorded[r] or waited_seconds < flight_waits.WAIT_SECONDS_MIN:
                    return False
            return True

        eventually(all_wait, f"ranks {ranks} wait", seconds=DEADLINE_SECONDS)
        return reported

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_SECONDS)
        finally:
            self.process.kill()
            self.listener.join(DEADLINE_SECONDS)
            self.process.stdout.close()


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[Gloo]:
    job = Gloo(tmp_path)
    try:
        job.start()
        yield job
    finally:
        job.close()


@pytest.mark.slow
def test_a_real_job_is_judged_by_its_own_dumps(gloo: Gloo) -> None:
    """One job goes through it all: each hang is dumped while it lasts, from beside the blocked thread, then
    released."""
    world = [f"{r} reduce world" for r in range(4)]

    def both(name: str, fault: str, rank: int, *ranks: int) -> str:
        reported = [the_one(findings) for findings in gloo.dumped_while_waiting(name, ranks or range(4))]
        assert [t[:2] for t in reported] == [(fault, [rank])] * 2, reported
        return reported[0][2]

    gloo.do(*world, "0 reduce left", "1 reduce left", "2 reduce right", "3 reduce right", "0 send 1", "1 recv 0")
    gloo.do(*(f"{r} {name} odd" for name in ("reduce", "gather") for r in (1, 2, 3)))
    assert gloo.dumped("healthy") == [[], []]

    gloo.tell(*world[:3])
    assert "has not entered all_reduce #2 of group 0 (default_pg)" in both("sleeps", "hang", 3)
    gloo.do(world[3])
    gloo.expect(*world[:3])

    gloo.tell("0 reduce left", world[2], world[3])
    assert "rank 1 has not entered all_reduce" in both("nested", "hang", 1), "and not rank 0, which waits for it"
    gloo.do("1 reduce left", "0 reduce world", "1 reduce world")
    gloo.expect("0 reduce left", world[2], world[3])

    gloo.do("3 start right")
    gloo.tell(*world[:3])
    assert "another collective" in both("elsewhere", "user_code", 3)
    gloo.do(world[3], "2 start right")
    gloo.expect(*world[:3])

    os.kill(gloo.pids[2], signal.SIGSTOP)
    gloo.tell(world[0], world[1], world[3])
    assert "left no dump" in both("stopped", "hang", 2, 0, 1, 3)
    os.kill(gloo.pids[2], signal.SIGCONT)
    gloo.do(world[2])
    gloo.expect(world[0], world[1], world[3])

    # The neighbours of a dead rank fail at once, the others wait for them: not waited for here, to go on afterwards.
    os.kill(gloo.pids[0], signal.SIGKILL)
    gloo.do("1 start world", "2 start world", "3 start world")
    assert "rank 0 left no dump" in both("dead", "hang", 0, 1, 2, 3)

    gloo.tell("1 gather odd", "2 reduce odd", "3 reduce odd")
    assert "as if it had skipped one" in both("skips", "user_code", 1, 1, 2, 3)
