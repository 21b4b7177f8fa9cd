"""Operations that PyTorch launches together (`batch_isend_irecv`, coalesced collectives): only the last entry of a batch,
`coalesced`, has its state; the entries of its operations stay `scheduled`."""

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.detector.artifacts.test_flight_recorder import BEGAN_NS, WRITTEN_AT, found, the_one

NUM_RANKS = 4
Batch = tuple[str, Sequence[str], int]
"""State, operations and size."""


def dumped(folder: Path, batches: Mapping[int, Sequence[Batch]], *, first_seq: int = 1) -> list[Path]:
    paths = []
    for rank, mine in batches.items():
        entries: list[dict[str, Any]] = []
        for seq, (state, names, size) in enumerate(mine, start=first_seq):
            of_pairs = names[0].startswith(("send", "recv"))
            for name, of_batch in (*((n, "scheduled") for n in names), ("coalesced", state)):
                entries.append(
                    {
                        "record_id": first_seq - 1 + len(entries),
                        "pg_id": 0,
                        "process_group": ("0", "default_pg"),
                        "collective_seq_id": 0 if of_pairs else seq,
                        "p2p_seq_id": seq if of_pairs else 0,
                        "profiling_name": f"nccl:{name}",
                        "time_created_ns": BEGAN_NS + len(entries) * 1_000_000_000,
                        "input_sizes": [[size]] if name != "coalesced" else [],
                        "input_dtypes": ["Float"] if name != "coalesced" else [],
                        "output_sizes": [[size]] if name != "coalesced" else [],
                        "output_dtypes": ["Float"] if name != "coalesced" else [],
                        "state": of_batch,
                        "retired": of_batch == "completed",
                        "is_p2p": of_pairs,
                    }
                )
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(NUM_RANKS)))}}
        path = folder / f"nccl_trace_rank_{rank}"
        content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        path.write_bytes(pickle.dumps(content, protocol=2))
        os.utime(path, (WRITTEN_AT, WRITTEN_AT))
        paths.append(path)
    return paths


def stage(rank: int, state: str = "completed", size: int = 8) -> Batch:
    """A pipeline stage receives from the one before it and sends to the one behind it."""
    receives = [f"recv {rank}<-{rank - 1}"] if rank else []
    sends = [f"send {rank}->{rank + 1}"] if rank < NUM_RANKS - 1 else []
    return state, [*receives, *sends], size


@pytest.mark.parametrize("first_seq", [1, 5000])
def test_batches_that_are_done_are_not_waited_for(tmp_path: Path, first_seq: int) -> None:
    """Sizes that vary from batch to batch are no mismatch either."""
    batches = {r: [stage(r, size=size) for size in (8, 16, 32)] for r in range(NUM_RANKS)}
    assert found(dumped(tmp_path, batches, first_seq=first_seq)) == []


def test_a_rank_that_has_not_entered_its_batch_is_named(tmp_path: Path) -> None:
    """Rank 0 hangs after its second batch. What rank 1 has sent has arrived, but its batch also awaits rank 0."""
    batches = {r: [stage(r), stage(r)] for r in range(NUM_RANKS)}
    batches[1].append(stage(1, "started"))
    for r in (2, 3):
        batches[r].append(stage(r))
    fault, ranks, because = the_one(found(dumped(tmp_path, batches)))
    assert (fault, ranks) == ("hang", [0]) and "rank 1 waits in it" in because


def test_a_batch_whose_last_entry_is_missing_is_waited_for(tmp_path: Path) -> None:
    """PyTorch records `coalesced` when the batch has been launched; a rank may hang before that."""
    batches = {r: [stage(r)] for r in range(NUM_RANKS)}
    batches[1].append(stage(1, "started"))
    paths = dumped(tmp_path, batches)
    content = pickle.loads(paths[1].read_bytes())
    content["entries"].pop()
    paths[1].write_bytes(pickle.dumps(content, protocol=2))
    assert {0, 2} == set(the_one(found(paths))[1])


def test_coalesced_collectives_are_done_with_their_batch(tmp_path: Path) -> None:
    done = ("completed", ["all_reduce", "all_reduce"], 8)
    batches: dict[int, list[Batch]] = {r: [done, done] for r in range(NUM_RANKS)}
    assert found(dumped(tmp_path, batches)) == []
    for r in (0, 1, 3):
        batches[r].append(("started", ["all_reduce", "all_reduce"], 8))
    fault, ranks, because = the_one(found(dumped(tmp_path, batches)))
    assert (fault, ranks) == ("hang", [2]) and "all_reduce #3" in because
