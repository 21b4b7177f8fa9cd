"""Answers of NCCL RAS: JSON as it is and as it is broken, the text of STATUS, several in one file, and any bytes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.formats.nccl.ras import (
    COLLECTIVES,
    Condition,
    MalformedRasStatus,
    NcclResult,
    RankState,
    behind,
    ranks_text,
    statuses,
)


def rank(n: int, *counts: int, **status: object) -> dict[str, Any]:
    """A rank as NCCL writes it."""
    fine = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": n,
        "host": f"10.0.0.{n // 2}",
        "pid": 100 + n,
        "cuda_dev": 0,
        "nvml_dev": n % 2,
        "status": {**fine, **status},
        "collective_counts": dict(zip(COLLECTIVES, counts or (0, 0, 0, 0, 0), strict=True)),
    }


def lost(n: int, *, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    about = {"rank": n, "host": f"10.0.0.{n // 2}", "pid": 100 + n, "cuda_dev": 0, "nvml_dev": n % 2}
    return {**about, "status": {"unresponsive": unresponsive, "considered_dead": dead}}


def communicator(
    *ranks: dict[str, Any], missing: tuple[dict[str, Any], ...] = (), name: str = "0xae94"
) -> dict[str, Any]:
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(missing),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing),
        "ranks": list(ranks),
        "missing_ranks": list(missing),
    }


def answer(*communicators: dict[str, Any]) -> dict[str, Any]:
    return {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2025-12-19 13:06:53",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 2},
    }


def raw(*communicators: dict[str, Any]) -> bytes:
    return json.dumps(answer(*communicators), indent=2).encode()


def test_json_has_launch_counts_and_missing_ranks() -> None:
    four = communicator(
        rank(0, 1, 0, 5, 5, 100),
        rank(1, 1, 0, 5, 5, 98, async_error=6),
        rank(2, 1, 0, 5, 5, 100, finalize_called=True),
        missing=(lost(3, dead=True), lost(4, unresponsive=False)),
    )
    (status,) = statuses(b"SERVER PROTOCOL 2\nOK\nOK\n" + raw(four))
    assert (status.form, status.repaired) == ("json", False)
    (c,) = status.communicators
    assert (c.hash, c.size, c.num_missing) == ("000000000000ae94", 5, 1)
    assert c.launched() == {"Broadcast": 1, "Reduce": 0, "AllGather": 5, "ReduceScatter": 5, "AllReduce": 100}
    assert [r.state for r in c.ranks] == [RankState.RUNNING, RankState.RUNNING, RankState.FINALIZE]
    assert c.conditions == {Condition.MISMATCH, Condition.INCOMPLETE, Condition.DEAD, Condition.ERROR}
    assert [(f.member.rank, f.result) for f in c.failures] == [(1, NcclResult.REMOTE)]
    assert (c.width, c.has_counts) == (2, True)
    assert ranks_text(behind(c)["AllReduce"]) == "rank 1 (10.0.0.0, process 101, GPU 1)"
    assert [(m.member.rank, m.dead, m.unresponsive) for m in c.missing] == [(3, True, True), (4, False, False)]


def test_the_comma_that_2_28_9_leaves_out_is_put_back_and_reported() -> None:
    text = raw(communicator(rank(0), missing=(lost(1),))).decode()
    broken = text.replace('"nvml_dev": 1,\n', '"nvml_dev": 1\n')
    assert broken != text
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(broken)
    (status,) = statuses(broken.encode())
    assert status.repaired and status.communicators[0].missing[0].member.rank == 1


def test_other_damage_is_not_repaired() -> None:
    whole = raw(communicator(rank(0), rank(1)))
    with pytest.raises(MalformedRasStatus, match="cut short"):
        statuses(whole[: len(whole) // 2])
    with pytest.raises(MalformedRasStatus, match="cut short"):
        statuses(whole.replace(b'"rank": 0,', b'"rank": 0'.replace(b'"rank"', b"rank")))


def test_all_zero_counts_give_no_information() -> None:
    (status,) = statuses(raw(communicator(rank(0), rank(1))))
    assert not status.has_counts and status.communicators[0].spreads == ()


def test_counts_as_a_list_are_in_the_order_of_nccl() -> None:
    one = {**rank(0), "collective_counts": [1, 2, 3, 4, 5]}
    short = {**rank(1), "collective_counts": [1, 2, 3]}
    (status,) = statuses(raw(communicator(one, short)))
    assert [r.counts for r in status.communicators[0].ranks] == [(1, 2, 3, 4, 5), (1, 2, 3, 0, 0)]


def test_standing_is_equal_only_while_no_rank_launches() -> None:
    def one(*counts: int) -> object:
        return (
            statuses(raw(communicator(rank(0, 0, 0, 0, 0, counts[0]), rank(1, 0, 0, 0, 0, counts[1]))))[0]
            .communicators[0]
            .standing()
        )

    assert one(5, 4) == one(5, 4) != one(6, 4)


def test_answers_one_after_the_other() -> None:
    found = statuses(raw(communicator(rank(0))) + b"\nOK\n" + raw(communicator(rank(0), rank(1))))
    assert [len(s.communicators[0].ranks) for s in found] == [1, 2]


def test_a_majority_is_not_behind() -> None:
    (status,) = statuses(raw(communicator(rank(0, 0, 0, 0, 0, 7), rank(1, 0, 0, 0, 0, 6), rank(2, 0, 0, 0, 0, 6))))
    assert status.communicators[0].width == 1 and behind(status.communicators[0]) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "an empty answer"),
        (b"OK\n", "an empty answer"),
        (b"ERROR: Unknown command x\n", "neither JSON nor the text"),
        (b"{}", "without a list `communicators`"),
        (b'{"communicators": [1]}', "not an object"),
        (b'{"communicators": [{"ranks": [3]}]}', "not a list of objects"),
        (b'{"communicators": [{"ranks": [{}]}]}', "without its number"),
        (b'{"communicators":' + b"[" * 100_000, "nested too deep"),
        (b'{"communicators": [' + b"{}," * 2_000_000, "more than 1,565,536 lists"),
        (b'{"communicators": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"Job summary\n===========\n", "cut short before its table"),
    ],
    ids=range(11),
)
def test_an_invalid_response_is_refused_with_its_reason(text: bytes, reason: str) -> None:
    with pytest.raises(MalformedRasStatus, match=reason):
        statuses(text)


TEXT = b"""NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE
    1         8         4         1         4        32   RUNNING  MISMATCH

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213

#0-0 (cf264af53edbe986) ERROR
  Asynchronous errors on 3 ranks
  2 ranks reported Remote process error
  Rank 3 -- GPU 3 managed by process 11 on node 172.16.64.210
  Rank 4 -- [process information not found]
  Rank 5 reported System error -- GPU 0 (NVML 5) managed by process 13 on node 172.16.64.210

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#1-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different status
  3 ranks have status RUNNING
  Rank 3 has status NOCOMM -- GPU 3 managed by process 14 on node 172.16.64.210
  Communicator ranks have different AllReduce operation counts
  26 ranks have launched up to operation 6650
  5 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 7 has launched up to operation 12 -- GPU 7 managed by process 483079 on node 172.16.64.210

  Communicator ranks have different Broadcast operation counts
  Rank 1 has not launched any operations -- GPU 1 managed by process 483073 on node 172.16.64.210
"""


def test_text_lists_outliers_missing_and_dead() -> None:
    (status,) = statuses(b"OK\n" + TEXT)
    assert (status.form, status.num_communicators) == ("text", 9)
    assert [(p.pid, p.host, p.gpus, p.dead) for p in status.lost] == [(3487984, "172.16.64.213", "5", True)]
    world, small = status.communicators
    assert world.conditions == {Condition.INCOMPLETE, Condition.ERROR, Condition.DEAD}
    assert [(m.member.rank, m.member.gpu, m.dead) for m in world.missing] == [(21, 5, True)]
    assert [(f.member.rank, f.member.gpu, str(f.result)) for f in world.failures] == [
        (3, 3, "Remote process error"),
        (4, None, "Remote process error"),
        (5, 5, "System error"),
    ]
    assert [(v.launched, v.num_ranks, len(v.members)) for v in small.spreads[0].levels] == [
        (6650, 26, 0),
        (6649, 5, 2),
        (12, 1, 1),
    ]
    assert [m.rank for m in behind(small)["AllReduce"]] == [7]
    assert small.spreads[1].collective == "Broadcast" and small.spreads[1].levels[0].launched == 0
    assert small.has_counts and not world.has_counts


def test_text_of_a_healthy_job_and_of_older_versions() -> None:
    healthy = TEXT.split(b"Errors\n======")[0].replace(b"INCOMPLETE", b"OK").replace(b"MISMATCH", b"OK")
    (status,) = statuses(healthy)
    assert (status.communicators, status.num_communicators) == ((), 9)
    older = (
        healthy
        + b"""Errors
======

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 3, 21

#1-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
"""
    )
    (status,) = statuses(older)
    assert [m.member.rank for m in status.communicators[0].missing] == [3, 21]
    assert status.communicators[1].spreads[0].collective == "all" and status.communicators[1].width == 1


@settings(max_examples=100)
@given(st.binary(max_size=400))
def test_any_bytes_are_an_answer_or_malformed(some: bytes) -> None:
    try:
        statuses(some)
    except MalformedRasStatus:
        pass


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["rank", "ranks", "missing_ranks", "status", "collective_counts", "hash", "size", "async_error", "host"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(_JUNK, max_size=3), _JUNK)
def test_any_json_is_an_answer_or_malformed(communicators: list[Any], ras: Any) -> None:
    try:
        found = statuses(json.dumps({"communicators": communicators, "ras": ras}).encode())
    except MalformedRasStatus:
        return
    assert all(c.width >= 0 and c.standing() is not None and len(c.launched()) <= 64 for c in found[0].communicators)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.binary(max_size=6)), max_size=6))
def test_damaged_text_is_an_answer_or_malformed(damage: list[tuple[int, bytes]]) -> None:
    text = bytearray(TEXT)
    for at, some in damage:
        text[at : at + len(some)] = some
    try:
        for status in statuses(bytes(text)):
            for c in status.communicators:
                assert c.width >= 0
    except MalformedRasStatus:
        pass
