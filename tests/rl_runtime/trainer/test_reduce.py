"""The vote as a pure function, ballots on the wire, and where a group listens.

pytest tests/rl_runtime/trainer/test_reduce.py
"""

import ast
import itertools
import os
import socket
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from rolecall.core.config.job import parse_job
from rolecall.core.errors import PeerLost
from rolecall.core.ids import GroupId, NodeId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.algorithms.batching import assign
from rolecall.rl_runtime.protocol.messages import MicrobatchNumbers
from rolecall.rl_runtime.protocol.policy_health import HealthSums
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.trainer.reduce import (
    BALLOT_BYTES_MAX,
    CommitVote,
    EpochStore,
    MicrobatchStats,
    ReduceGroup,
    disagreement,
)
from rolecall.rl_runtime.trainer.service import TrainerService

ALL_IDS = ["7.0", "7.1", "7.2", "7.3"]
MEMBERS = ["trainer/0", "trainer/1"]


def stats(microbatch_id: str) -> MicrobatchStats:
    return MicrobatchStats(
        microbatch_id=microbatch_id,
        group_ids=(GroupId("g00000001"), GroupId("g00000002")),
        policy_loss=0.1,
        health=HealthSums(tokens=9, samples=2, ended=2, reward=1.5, log_ratio_max=1e-6),
        finite=True,
        numbers=MicrobatchNumbers(loss=0.1, grad_norm=1.0),
    )


def ballot(index: int, ids: list[str]) -> CommitVote:
    return CommitVote(
        replica=ReplicaId(f"trainer/{index}"),
        incarnation=1,
        epoch=3,
        step=7,
        microbatches=tuple(stats(i) for i in ids),
        gradient_digest="aa",
        weights_digest="bb",
        ledger=ChainHead(position=4, hash="cc"),
    )


def votes() -> list[CommitVote]:
    return [ballot(0, ["7.0", "7.3"]), ballot(1, ["7.1", "7.2"])]


def test_agreement() -> None:
    assert disagreement(votes(), members=MEMBERS, all_ids=ALL_IDS) == ""
    assert disagreement([ballot(0, ALL_IDS)], members=["trainer/0"], all_ids=ALL_IDS) == ""


DIFFERENCES = [
    ("step", {"step": 8}, "step: trainer/0 has 7, trainer/1 has 8"),
    ("epoch", {"epoch": 2}, "epoch: trainer/0 has 3, trainer/1 has 2"),
    ("gradient", {"gradient_digest": "xx"}, "gradient_digest: trainer/0 has aa, trainer/1 has xx"),
    ("weights", {"weights_digest": "xx"}, "weights_digest: trainer/0 has bb, trainer/1 has xx"),
    ("ledger", {"ledger": ChainHead(position=5, hash="cc")}, "ledger: "),
    ("computed twice", {"microbatches": (stats("7.0"),)}, "7.0: computed by both trainer/0 and trainer/1"),
    ("missing", {"microbatches": (stats("7.1"),)}, "missing: ['7.2']"),
    ("of another step", {"microbatches": (stats("7.1"), stats("7.2"), stats("6.0"))}, "not of this step: ['6.0']"),
    ("stranger", {"replica": "trainer/9"}, "voters are ['trainer/0', 'trainer/9']"),
]


@pytest.mark.parametrize(("change", "because"), [d[1:] for d in DIFFERENCES], ids=[d[0] for d in DIFFERENCES])
def test_disagreement_names_the_member_and_the_difference(change: dict[str, object], because: str) -> None:
    one, other = votes()
    sentence = disagreement([one, replace(other, **change)], members=MEMBERS, all_ids=ALL_IDS)  # type: ignore[arg-type]
    assert because in sentence


def test_a_member_that_did_not_vote_is_missed() -> None:
    assert "members" in disagreement(votes()[:1], members=MEMBERS, all_ids=ALL_IDS)


def test_ballot_round_trips_exactly() -> None:
    odd = replace(stats("7.0"), policy_loss=0.1 + 0.2, health=HealthSums(log_ratio_max=5e-324, reward=1e300, capped=3))
    for original in (ballot(0, []), replace(ballot(1, ["7.1"]), microbatches=(odd,))):
        assert CommitVote.from_bytes(original.to_bytes()) == original


def test_the_largest_ballot_of_any_job_is_within_the_bound() -> None:
    """1,024 microbatches of 256 windows, all computed by one member; every sum as long as a number can be written."""
    sums = HealthSums(**{f.name: -1.2345678901234567e-300 for f in fields(HealthSums)})  # type: ignore[arg-type]
    one = replace(
        stats("1000000.1023"),
        group_ids=tuple(GroupId(f"g{n:08d}-{1_000_000:05d}") for n in range(256)),
        policy_loss=-1.2345678901234567e-300,
        health=sums,
        log_ratios={f"rollout/{n}#100": -1.2345678901234567e-100 for n in range(256)},
    )
    largest = replace(ballot(0, []), microbatches=(one,) * 1024)
    assert BALLOT_BYTES_MAX // 2 < len(largest.to_bytes()) < BALLOT_BYTES_MAX


def test_constant_work_over_any_order_of_losses() -> None:
    """For any order of deaths and any progress of members, the vote accepts exactly the step's B."""
    for num_members, num_ids in itertools.product(range(1, 5), (1, 4, 7)):
        ids = [f"0.{n}" for n in range(num_ids)]
        names = [ReplicaId(f"trainer/{i}") for i in range(num_members)]
        for order in itertools.permutations(names):
            alive, held = list(order), {name: list[str]() for name in names}
            while alive:
                plan = assign(ids, {name: held[name] for name in alive}, alive)
                assert sorted(i for part in plan.values() for i in part) == sorted(ids)
                cast = [replace(ballot(0, plan[name]), replica=name) for name in alive]
                assert disagreement(cast, members=alive, all_ids=ids) == ""
                for name in alive:  # half of each share was computed when the next one dies
                    held[name] = plan[name][: (len(plan[name]) + 1) // 2]
                alive.pop()


def listening() -> set[tuple[str, str]]:
    """This process's listening IPv4 and IPv6 sockets: local address as the kernel writes it (hex), inode."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: set[tuple[str, str]] = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add((fields[1].split(":")[0], fields[9]))
    return found


def as_the_kernel_writes(address: str) -> str:
    return socket.inet_aton(address)[::-1].hex().upper()


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.3")], ids=["one", "own"])
def test_members_listen_on_their_own_address_only(addresses: tuple[str, str]) -> None:
    before = listening()  # groups of tests before may still be closing
    store = EpochStore(addresses[0], 10.0)
    groups: dict[int, ReduceGroup] = {}

    def connect(rank: int) -> None:
        groups[rank] = ReduceGroup(
            epoch=1,
            rank=rank,
            size=2,
            host=store.host,
            port=store.port,
            timeout_seconds=10.0,
            address=addresses[rank],
        )

    threads = [threading.Thread(target=connect, args=(r,)) for r in range(2)]
    [t.start() for t in threads]
    [t.join(20.0) for t in threads]
    assert sorted(groups) == [0, 1]
    assert {a for a, _ in listening() - before} == {as_the_kernel_writes(a) for a in addresses}
    results: dict[int, torch.Tensor] = {}
    local = torch.arange(10, dtype=torch.float64)

    def reduce(rank: int) -> None:
        results[rank] = groups[rank].all_reduce(local, bucket_bytes=24)

    threads = [threading.Thread(target=reduce, args=(r,)) for r in range(2)]
    [t.start() for t in threads]
    [t.join(20.0) for t in threads]
    assert torch.equal(results[0], 2 * torch.arange(10, dtype=torch.float64))
    assert torch.equal(results[1], results[0])
    assert torch.equal(local, torch.arange(10, dtype=torch.float64)), "local gradients stay as they are"
    [g.close() for g in groups.values()]
    store.close()


def test_a_trainer_is_reached_at_its_own_address(tmp_path: Path) -> None:
    spawn = make_spawn(create_run_dir(tmp_path, "r"), ReplicaId("trainer/0"), 1, NodeId("node-1"))
    before = listening()
    service = TrainerService(spawn, parse_job({}), address="127.0.0.2")
    try:
        assert service.open_store(1)[0] == "127.0.0.2"
        assert service.info().holder.host == "127.0.0.2"
        assert {a for a, _ in listening() - before} == {as_the_kernel_writes("127.0.0.2")}
    finally:
        service.close()


def test_group_of_one_needs_no_store_and_a_closed_group_fails_at_once() -> None:
    buckets = []
    group = ReduceGroup(epoch=4, rank=0, size=1, host="127.0.0.1", port=0, timeout_seconds=1.0)
    reduced = group.all_reduce(torch.ones(10), bucket_bytes=16, on_bucket=lambda: buckets.append(1))
    assert (reduced.tolist(), len(buckets)) == ([1.0] * 10, 3)
    assert group.gather(b"x") == [b"x"]
    group.close()
    with pytest.raises(PeerLost) as lost:
        group.all_reduce(torch.ones(1))
    assert lost.value.epoch == 4


def test_no_global_process_group() -> None:
    source = Path(__file__).parents[3] / "rl_runtime" / "trainer" / "reduce.py"
    names = {n.attr for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Attribute)}
    assert "init_process_group" not in names
