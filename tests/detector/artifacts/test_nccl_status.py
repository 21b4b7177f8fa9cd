"""Which ranks are named from answers of RAS and files of the Inspector, and where the answer is "cannot tell"."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.cli.main import main
from rolecall.core.diagnosis import Finding
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.nccl import inspector_times as nccl_times
from rolecall.detector.artifacts.nccl import ras_status as nccl_status
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.formats.nccl.ras import Communicator, CommunicatorMember, LaunchLevel, RasStatus, Spread
from tests.formats.test_nccl_inspector import line
from tests.formats.test_nccl_ras import TEXT, communicator, lost, rank, raw


def ranks(*launched: int) -> list[dict[str, Any]]:
    return [rank(n, 0, 0, 7, 0, number) for n, number in enumerate(launched)]


def polled(folder: Path, *answers: bytes, seconds: float = 30.0) -> tuple[list[Finding], tuple[str, ...]]:
    """The answers as files, taken `seconds` apart."""
    polls = []
    for n, answer in enumerate(answers):
        file = folder / f"{n}.json"
        file.write_bytes(answer)
        os.utime(file, (1000.0 + seconds * n,) * 2)
        assert nccl_status.is_status(file)
        polls += nccl_status.read(file)
    return nccl_status.diagnose(polls)


def suspects(finding: Finding) -> list[tuple[str, int | None]]:
    return [(s.node, s.rank) for s in finding.suspects]


def test_a_rank_behind_without_any_progress_is_hung(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 101, 100, 101)))
    (finding,), remarks = polled(tmp_path, answer, answer)
    assert (finding.fault_class, suspects(finding)) == (FaultClass.HANG, [("10.0.0.1", 2)])
    assert "launched 100 AllReduce, others 101" in finding.because and "2 reports over 30 s" in finding.because
    assert (finding.onset, finding.detected_at) == (1000.0, 1030.0)
    assert finding.suspects[0].gpu == 0 and not remarks


def test_ranks_apart_that_advance_are_healthy(tmp_path: Path) -> None:
    found, remarks = polled(
        tmp_path, raw(communicator(*ranks(101, 101, 100))), raw(communicator(*ranks(105, 104, 105)))
    )
    assert found == [] and remarks == ()


def test_a_single_report_accuses_no_rank_and_lists_those_behind(tmp_path: Path) -> None:
    found, remarks = polled(tmp_path, raw(communicator(*ranks(101, 101, 100))))
    assert found == []
    assert remarks[0].startswith("cannot tell") and "rank 2 (10.0.0.1, process 102, GPU 0) in AllReduce" in remarks[0]
    assert "query RAS again" in remarks[-1]


def test_two_answers_too_close_are_as_one(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 101, 100)))
    assert polled(tmp_path, answer, answer, seconds=1.0)[0] == []


def test_answers_of_many_nodes_at_one_moment_are_as_one(tmp_path: Path) -> None:
    found, remarks = polled(tmp_path, *[raw(communicator(*ranks(101, 101, 100)))] * 8, seconds=0.04)
    assert found == [] and "in RAS reports of one moment, ranks of a healthy job differ, too" in remarks[0]
    found, remarks = polled(tmp_path, *[raw(communicator(*ranks(101, 101, 101)))] * 8, seconds=0.04)
    assert found == [] and remarks == (nccl_status.SYMMETRIC,)


def test_answers_in_one_file_count_unless_it_has_times(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 101, 100)))
    assert len(polled(tmp_path, answer + answer + answer)[0]) == 1
    assert polled(tmp_path, b"\n".join(stamped(answer, s, "reports") for s in (0, 1, 2)))[0] == []


def test_a_symmetric_hang_is_undecided_and_stated(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 101, 101)))
    for answers in ((answer,), (answer, answer, answer)):
        found, remarks = polled(tmp_path, *answers)
        assert found == [] and remarks == (nccl_status.SYMMETRIC,)


def test_answers_of_zeros_are_left_out(tmp_path: Path) -> None:
    apart, zeros = raw(communicator(*ranks(101, 101, 100))), raw(communicator(rank(0), rank(1), rank(2)))
    found, remarks = polled(tmp_path, apart, zeros, apart)
    assert [suspects(f) for f in found] == [[("10.0.0.1", 2)]]
    assert "all counts are 0" in remarks[0]
    assert polled(tmp_path, zeros, zeros, zeros)[0] == []


def test_dead_and_missing_ranks(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 100), missing=(lost(4, dead=True), lost(6), lost(7, unresponsive=False))))
    found, remarks = polled(tmp_path, answer, answer)
    assert [(f.fault_class, suspects(f)) for f in found] == [
        (FaultClass.CRASH, [("10.0.0.2", 4)]),
        (FaultClass.HANG, [("10.0.0.3", 6)]),
    ]
    assert any("wait for the missing ranks" in r for r in remarks)


def test_a_victim_of_another_communicator_is_not_accused(tmp_path: Path) -> None:
    # Rank 1 is behind in the pair (0, 1), since in the pair (1, 2) it waits for rank 2.
    first = communicator(rank(0, 0, 0, 0, 0, 9), rank(1, 0, 0, 0, 0, 8), name="0xa")
    second = communicator({**rank(1, 0, 0, 0, 0, 5), "rank": 0}, {**rank(2, 0, 0, 0, 0, 4), "rank": 1}, name="0xb")
    (finding,), remarks = polled(tmp_path, raw(first, second), raw(first, second))
    assert suspects(finding) == [("10.0.0.1", None)]  # of pairs no one knows the job's ranks
    assert "rank 1 (10.0.0.1, process 102" in finding.because
    assert any("is its victim" in r for r in remarks)


class CountedHost(str):
    """Counts comparisons with others."""

    num = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedHost.num += 1
        return str(self) == other


def test_each_stalled_communicator_is_not_compared_with_all_others() -> None:
    """Rank 0 waits in each of them for another rank."""
    num = 100
    pairs = [
        Communicator(
            hash=f"{n:x}",
            spreads=(
                Spread(
                    collective="AllReduce",
                    levels=tuple(
                        LaunchLevel(
                            launched=launched,
                            num_ranks=1,
                            members=(CommunicatorMember(rank, CountedHost(f"n{rank * n}"), 1, rank),),
                        )
                        for rank, launched in ((0, 9), (1, 8))
                    ),
                ),
            ),
        )
        for n in range(1, num + 1)
    ]
    status = RasStatus(form="json", communicators=tuple(pairs), num_communicators=num)
    polls = [nccl_status.Poll(path=f"{at}.json", at=at, status=status) for at in (1000.0, 1030.0)]
    CountedHost.num = 0
    found, _ = nccl_status.diagnose(polls)
    assert len(found) == num and CountedHost.num < 50 * num


def test_a_circle_of_waits_is_not_judged(tmp_path: Path) -> None:
    first = communicator(rank(0, 0, 0, 0, 0, 9), rank(1, 0, 0, 0, 0, 8), name="0xa")
    second = communicator(rank(0, 0, 0, 0, 0, 4), rank(1, 0, 0, 0, 0, 5), name="0xb")
    (finding,), _ = polled(tmp_path, raw(first, second), raw(first, second))
    assert finding.fault_class is FaultClass.CANNOT_TELL and len(finding.suspects) == 2


def test_a_rank_that_launched_another_collective_runs_other_code(tmp_path: Path) -> None:
    listed = [rank(n, 0, 0, 7, 0, 101) for n in range(3)] + [rank(3, 0, 0, 8, 0, 100)]
    (finding,), _ = polled(tmp_path, raw(communicator(*listed)), raw(communicator(*listed)))
    assert (finding.fault_class, suspects(finding)) == (FaultClass.USER_CODE, [("10.0.0.1", 3)])
    assert (
        "launched AllGather where the other ranks of communicator 000000000000ae94 launched AllReduce"
        in finding.because
    )


def test_a_majority_that_is_behind_is_not_accused(tmp_path: Path) -> None:
    answer = raw(communicator(*ranks(101, 100, 100)))
    found, remarks = polled(tmp_path, answer, answer)
    assert found == [] and "more than half" in remarks[0]


def test_errors_name_the_failed_rank_and_not_its_victims(tmp_path: Path) -> None:
    answer = raw(communicator(rank(0, async_error=6), rank(1, async_error=1), rank(2, async_error=6)))
    (finding,), remarks = polled(tmp_path, answer)
    assert (finding.fault_class, suspects(finding)) == (FaultClass.GPU, [("10.0.0.0", 1)])
    assert any("victims" in r and "rank 0" in r for r in remarks)


def test_a_communicator_that_was_torn_down_is_history(tmp_path: Path) -> None:
    old, new = communicator(*ranks(9, 8), name="0xa"), communicator(*ranks(1, 1), name="0xb")
    assert polled(tmp_path, raw(old), raw(old), raw(new))[0] == []


def test_text(tmp_path: Path) -> None:
    found, remarks = polled(tmp_path, TEXT, TEXT)
    crash, network, hang = found
    assert (crash.fault_class, suspects(crash)) == (FaultClass.CRASH, [("172.16.64.213", None)])
    assert (network.fault_class, suspects(network)) == (FaultClass.NETWORK, [("172.16.64.210", None)])
    assert (hang.fault_class, suspects(hang)) == (FaultClass.HANG, [("172.16.64.210", None)])
    assert "rank 7 (172.16.64.210, process 483079, GPU 7) launched 12 AllReduce, others 6650" in hang.because
    assert any("victims" in r for r in remarks)


DEAD_AND_MISSING = b"""Job summary
===========

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  INCOMPLETE

Errors
======

%b#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 2,3

"""
TEXT_OK = DEAD_AND_MISSING[: DEAD_AND_MISSING.index(b"Errors\n===")].replace(b"INCOMPLETE", b"OK")
DEAD_TWO = b"DEAD\n  Process 1002 on node n7 managing GPU 2\n  Process 1003 on node n7 managing GPU 3\n\n"
SILENT_TWO = DEAD_TWO.replace(b"DEAD", b"INCOMPLETE")


@pytest.mark.parametrize("sections", [DEAD_TWO, SILENT_TWO + DEAD_TWO])
def test_a_dead_process_and_its_missing_rank_are_one_diagnosis(tmp_path: Path, sections: bytes) -> None:
    [finding], _ = polled(tmp_path, DEAD_AND_MISSING % sections)
    assert finding.fault_class == FaultClass.CRASH


def stamped(answer: bytes, seconds: int, form: str) -> bytes:
    stamp = b"[2025-11-20 10:00:%02d]" % seconds
    lines = answer.splitlines(keepends=True)
    return b"".join(stamp + b" " + line for line in lines) if form == "lines" else stamp + b"\n" + answer


@pytest.mark.parametrize("form", ["lines", "reports"])
def test_of_a_monitor_the_newest_report_counts_and_earlier_ones_say_since_when(tmp_path: Path, form: str) -> None:
    healthy, dead = TEXT_OK, DEAD_AND_MISSING % DEAD_TWO
    answers = [stamped(a, s, form) for a, s in ((healthy, 0), (dead, 10), (dead, 25))]
    [finding], _ = polled(tmp_path, b"".join(answers))
    assert finding.fault_class == FaultClass.CRASH and finding.detected_at - finding.onset == pytest.approx(15.0)
    found, _ = polled(tmp_path, b"".join([stamped(dead, 0, form), stamped(healthy, 10, form)]))
    assert not found  # they answer again


def test_json_reports_with_time_stamps_are_as_far_apart_as_those(tmp_path: Path) -> None:
    one = raw(communicator(*ranks(5, 5, 5, 4)))
    [finding], _ = polled(tmp_path, stamped(one, 0, "reports") + b"\n" + stamped(one, 30, "reports"))
    assert finding.detected_at - finding.onset == pytest.approx(30.0)


def test_a_topology_names_node_role_and_replica(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(raw(communicator(*ranks(9, 8, 9))) * 3)
    topology = Topology(role="trainer", nodes={1: "m7"}, replicas={1: "trainer/1"})
    (finding,), _ = nccl_status.diagnose(nccl_status.read(file), topology=topology)
    (who,) = finding.suspects
    assert (who.node, who.role, who.replica, who.rank) == ("m7", "trainer", "trainer/1", 1)


def test_input_that_resembles_a_report_is_refused(tmp_path: Path) -> None:
    whole = raw(communicator(*ranks(9, 8)))
    file = tmp_path / "a.json"
    file.write_bytes(whole[:-20])
    assert nccl_status.is_status(file)
    with pytest.raises(UnreadableInput, match="cut short"):
        nccl_status.read(file)


# --- the Inspector ------------------------------------------------------------------------------------------------

Times = Callable[[int, int], float]
"""Microseconds of a rank in an operation."""


def recorded(
    folder: Path, times: Times, *, num_ranks: int = 4, num: int = 40, tail: bytes = b""
) -> list[nccl_times.InspectorLog]:
    logs = []
    for r in range(num_ranks):
        file = folder / f"node-{r // 2}-pid{100 + r}.log"
        file.write_bytes(b"".join(line(r, n, times(r, n), num_ranks=4) for n in range(num)) + tail)
        assert nccl_times.is_log(file) and not nccl_status.is_status(file)
        logs.append(nccl_times.read(file))
    return logs


def test_the_rank_with_the_shortest_times_is_the_late_one(tmp_path: Path) -> None:
    logs = recorded(tmp_path, lambda r, n: 1200 if r == 3 else 8500 + 10 * r)
    (finding,), remarks = nccl_times.diagnose(logs)
    assert (finding.fault_class, suspects(finding)) == (FaultClass.SLOW, [("node-1", 3)])
    assert "in 40 of 40" in finding.because and "1.20 ms" in finding.because and remarks == ()


def test_even_ranks_and_single_late_arrivals_give_no_finding(tmp_path: Path) -> None:
    assert nccl_times.diagnose(recorded(tmp_path, lambda r, n: 8500 + 100 * ((r + n) % 4))) == ([], ())
    everybody_in_turn = recorded(tmp_path, lambda r, n: 1000 if n % 4 == r else 8500)
    assert nccl_times.diagnose(everybody_in_turn)[0] == []


def test_missing_and_short_files_are_remarks(tmp_path: Path) -> None:
    logs = recorded(tmp_path, lambda r, n: 8500, num_ranks=3, tail=b'{"header": {"id"')
    logs[1].operations["0x7f8c", 1].pop()
    found, remarks = nccl_times.diagnose(logs)
    assert found == []
    assert "3 truncated or unknown lines" in remarks[0] and "1 of 4 ranks of communicator" in remarks[1]
    assert "rank 1 of communicator 0x7f8c finished AllReduce up to 38, others up to 39" in remarks[2]


def test_one_rank_alone_gives_no_comparison(tmp_path: Path) -> None:
    found, remarks = nccl_times.diagnose(recorded(tmp_path, lambda r, n: 8500, num_ranks=1))
    assert found == [] and "collect the files of all nodes" in remarks[0]


def test_few_joint_operations_are_not_compared(tmp_path: Path) -> None:
    found, remarks = nccl_times.diagnose(recorded(tmp_path, lambda r, n: 1 if r else 8500, num=5))
    assert found == [] and "5 operations" in remarks[0]


def test_a_communicator_slower_than_its_likes(tmp_path: Path) -> None:
    logs = []
    for c in range(4):
        for r in range(2):
            file = tmp_path / f"{c}-{r}.log"
            whole = (line(2 * c + r, n, 8500, num_ranks=2, communicator=hex(c + 1)) for n in range(20))
            text = b"".join(whole).replace(b'"rank": %d' % (2 * c + r), b'"rank": %d' % r)
            file.write_bytes(text.replace(b'"coll_busbw_gbs": 2.0', b'"coll_busbw_gbs": 0.5') if c == 2 else text)
            logs.append(nccl_times.read(file))
    (finding,), _ = nccl_times.diagnose(logs)
    assert (finding.fault_class, suspects(finding)) == (FaultClass.NETWORK, [("node-2", None)])
    assert "at 0.5 GB/s, the 3 others of 2 ranks at 2 GB/s" in finding.because


def test_a_large_file_is_read_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = line(0, 1, 5.0)
    monkeypatch.setattr(nccl_times, "FILE_BYTES_MAX", 10 * len(one) + 3)
    file = tmp_path / "a.log"
    file.write_bytes(one * 50)
    log = nccl_times.read(file)
    assert log.cut and log.num_lines == 10 and log.num_bad == 0


@settings(max_examples=60)
@given(some=st.binary(max_size=300))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, some: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any"
    for begin in (b"", raw(communicator(rank(0)))[:-4], TEXT[:900], line(0, 1, 5.0)):
        file.write_bytes(begin + some)
        for module in (nccl_status, nccl_times):
            try:
                module.read(file)
            except UnreadableInput:
                continue


# --- as a user calls it -------------------------------------------------------------------------------------------


def test_a_folder_of_both_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = raw(communicator(*ranks(101, 101, 100, 101)))
    for n, seconds in enumerate((1000.0, 1060.0)):
        file = tmp_path / f"ras-{n}.json"
        file.write_bytes(b"OK\n" + answer)
        os.utime(file, (seconds, seconds))
    (tmp_path / "ras-torn.json").write_bytes(answer[:400])
    recorded(tmp_path, lambda r, n: 1200 if r == 3 else 8500)
    assert main(["diagnose", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "hang: rank 2 (10.0.0.1, process 102, GPU 0) launched 100 AllReduce, others 101" in out
    assert "slow: rank 3 (node-1, process 103) enters the collectives" in out
    assert "3 files: 2 NCCL RAS reports" in out and "ras-torn.json" in out
    assert "4 files: NCCL Inspector: 160 finished collectives" in out


def test_a_healthy_answer_lists_what_is_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ras.txt"
    file.write_bytes(raw(communicator(*ranks(5, 5))))
    assert main(["diagnose", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing found, but not everything could be checked") and "looks like" in out
    file.write_bytes(raw(communicator(*ranks(5, 5)))[:-9])
    assert main(["diagnose", str(file)]) == 2
