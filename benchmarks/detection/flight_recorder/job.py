"""A large job that one rank holds up, and the Flight Recorder dumps that its ranks would leave then.

Tensor, pipeline and data parallel groups beside the group of all; each operation blocks until all have entered it. The
dumps are byte for byte as PyTorch's pickler writes them (compared with dumps of a gloo job), with stack frames.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TP, PP = 8, 4
NUM_LAYERS = 12
"""Of a pipeline stage: two all_reduces each, forward and backward."""
NUM_PLACES = 4 * NUM_LAYERS + 13
"""Operations of a program at most, each with a stack of its own; PyTorch adds stacks unless told not to."""
START_NS = 1_795_000_000_000_000_000
STEP_SECONDS = 4.0
NUM_STEPS_BEFORE = 300
BYTES_MAX = 6 << 30
PREFIX = "nccl_trace_rank_"
SCENARIOS = ("hang", "skipped collective", "mismatched collective", "dead rank")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a rank's program. `group`: place in the rank's list of groups. `peer`: of send and recv, as the
    place in the group."""

    group: int
    name: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    peer: int = -1


BUCKET = 1 << 23
"""Elements of a rank's share of a gradient bucket; each of the four is a little larger than the one before."""


def program(stage: int, dp: int, pp: int) -> list[Op]:
    """One step of a rank of this pipeline stage. Groups: 0 all, 1 tensor, 2 pipeline, 3 data."""
    hidden = ((4096, 8192),)
    reduce = Op(1, "all_reduce", hidden, hidden)
    ops: list[Op] = []
    if stage > 0:
        ops.append(Op(2, f"recv {stage}<-{stage - 1}", hidden, hidden, stage - 1))
    ops += [reduce] * (2 * NUM_LAYERS)
    if stage < pp - 1:
        ops.append(Op(2, f"send {stage}->{stage + 1}", hidden, hidden, stage + 1))
        ops.append(Op(2, f"recv {stage}<-{stage + 1}", hidden, hidden, stage + 1))
    ops += [reduce] * (2 * NUM_LAYERS)
    if stage > 0:
        ops.append(Op(2, f"send {stage}->{stage - 1}", hidden, hidden, stage - 1))
    shares = [BUCKET + 1024 * bucket for bucket in range(4)]
    ops += [Op(3, "_reduce_scatter_base", ((n * dp,),), ((n,),)) for n in shares]
    ops.append(Op(0, "all_reduce", ((1,),), ((1,),)))
    ops += [Op(3, "_all_gather_base", ((n,),), ((n * dp,),)) for n in shares]
    return ops


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in Megatron's order: tensor fastest, then data, then pipeline."""

    num_ranks: int
    pp: int = PP

    @property
    def dp(self) -> int:
        return self.num_ranks // (TP * self.pp)

    def stage(self, rank: int) -> int:
        return rank // (TP * self.dp)

    def groups(self, rank: int) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, description and ranks, in the order of creation. Names count through the whole job."""
        n, dp = self.num_ranks, self.dp
        tensor = rank // TP
        within = rank % (TP * dp)
        data = self.stage(rank) * TP + rank % TP
        return [
            ("0", "default_pg", tuple(range(n))),
            (str(10 + tensor), "TENSOR_MODEL_PARALLEL_GROUP", tuple(range(tensor * TP, tensor * TP + TP))),
            (
                str(10_000 + within),
                "PIPELINE_MODEL_PARALLEL_GROUP",
                tuple(within + s * TP * dp for s in range(self.pp)),
            ),
            (
                str(20_000 + data),
                "DATA_PARALLEL_GROUP",
                tuple(self.stage(rank) * TP * dp + d * TP + rank % TP for d in range(dp)),
            ),
        ]


@dataclass(frozen=True, slots=True)
class Story:
    """Where each rank stands: how many operations of its last step it has begun and finished, and its odd program."""

    begun: dict[int, int]
    finished: dict[int, int]
    programs: dict[int, list[Op]]
    dumped: tuple[int, ...]


def play(layout: Layout, scenario: str, culprit: int) -> Story:
    """The step in which `culprit` misbehaves. Each operation blocks until all have entered it with the same name."""
    programs = {r: program(layout.stage(r), layout.dp, layout.pp) for r in range(layout.num_ranks)}
    ops = programs[culprit]
    first_data = next(i for i, op in enumerate(ops) if op.group == 3)
    limit = {}
    if scenario in ("hang", "dead rank"):
        limit[culprit] = TP + 3  # it gets no further than into its forward pass
    elif scenario == "skipped collective":
        programs[culprit] = ops[: first_data + 1] + ops[first_data + 2 :]
    elif scenario == "mismatched collective":
        other = Op(3, "_all_gather_base", ((BUCKET,),), ((BUCKET * layout.dp,),))
        programs[culprit] = [*ops[: first_data + 1], other, *ops[first_data + 2 :]]
    ranks_of = {r: [g[2] for g in layout.groups(r)] for r in range(layout.num_ranks)}
    begun = dict.fromkeys(programs, 0)
    finished = dict.fromkeys(programs, 0)
    seqs: dict[int, list[int]] = {r: [0] * 4 for r in programs}
    arrived: dict[tuple[Any, ...], set[int]] = {}
    work = list(programs)
    while work:
        rank = work.pop()
        at = begun[rank]
        if at != finished[rank] or at >= min(len(programs[rank]), limit.get(rank, 1 << 30)):
            continue
        op = programs[rank][at]
        begun[rank] += 1
        ranks = ranks_of[rank][op.group]
        if op.peer >= 0:
            me, it = rank, ranks[op.peer]
            pair = (me, it) if op.name.startswith("send") else (it, me)
            key: tuple[Any, ...] = ("pair", *pair)
            needed = 2
        else:
            seqs[rank][op.group] += 1
            # NCCL does not compare what it is asked for: another operation or size under the same number hangs.
            key = (ranks, seqs[rank][op.group], op.name, op.input_sizes)
            needed = len(ranks)
        here = arrived.setdefault(key, set())
        here.add(rank)
        if len(here) == needed:
            for r in arrived.pop(key):
                finished[r] += 1
                work.append(r)
    dumped = tuple(r for r in programs if not (scenario == "dead rank" and r == culprit))
    return Story(begun, finished, programs, dumped)


class TorchPickler:
    """The opcodes of torch/csrc/jit/serialization/pickler.cpp for plain values: protocol 2, strings memoised by value,
    shared dicts (frames) by identity, nothing else; integers by size; lists and dicts as MARK ... APPENDS/SETITEMS."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[Any, int] = {}
        self.shared: set[int] = set()

    def _remember(self, key: Any) -> None:
        n = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n)

    def _recall(self, key: Any) -> bool:
        n = self.memo.get(key)
        if n is None:
            return False
        self.out += b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        return True

    def string(self, text: str) -> None:
        if not self._recall(text):
            data = text.encode()
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._remember(text)

    def value(self, value: Any) -> None:
        if value is None:
            self.out += b"N"
        elif value is True or value is False:
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, str):
            self.string(value)
        elif isinstance(value, int):
            self.integer(value)
        elif isinstance(value, tuple):
            for item in value:
                self.value(item)
            self.out += b"\x86"
        elif isinstance(value, list):
            self.out += b"]("
            for item in value:
                self.value(item)
            self.out += b"e"
        else:
            shared = id(value) in self.shared
            if shared and self._recall(id(value)):
                return
            self.out += b"}("
            for key, item in value.items():
                self.value(key)
                self.value(item)
            self.out += b"u"
            if shared:
                self._remember(id(value))

    def integer(self, value: int) -> None:
        if 0 <= value <= 0xFF:
            self.out += b"K" + bytes([value])
        elif 0 <= value <= 0xFFFF:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            self.out += b"\x8a\x08" + struct.pack("<q", value)


def stacks() -> list[list[dict[str, Any]]]:
    """One for each place in the program, innermost frame first: the two innermost are its own, the others are
    shared."""
    outer = [
        _frame(n, 40 + i)
        for i, n in enumerate(("reduce", "step", "train_step", "run", "train", "fit", "main", "<module>"))
    ]
    return [[_frame("all_reduce", 100 + i), _frame("forward", 300 + i), *outer] for i in range(NUM_PLACES)]


def _frame(name: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": f"/opt/job/{name}.py", "line": line}


def entries(
    story: Story, rank: int, layout: Layout, num_entries: int, taken: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The newest `num_entries` of a long run whose last step is the story's."""
    whole = program(layout.stage(rank), layout.dp, layout.pp)
    last = story.programs[rank][: story.begun[rank]]
    per_step = [sum(1 for op in whole if op.group == g and op.peer < 0) for g in range(4)]
    p2p_per_step = sum(1 for op in whole if op.peer >= 0)
    groups = layout.groups(rank)
    rows: list[dict[str, Any]] = []
    num_steps = min(NUM_STEPS_BEFORE, -(-num_entries // len(whole)) + 1)
    for step in range(NUM_STEPS_BEFORE - num_steps, NUM_STEPS_BEFORE + 1):
        ops = last if step == NUM_STEPS_BEFORE else whole
        seqs = [step * n for n in per_step]
        p2p = step * p2p_per_step
        begins = START_NS + int(step * STEP_SECONDS * 1e9)
        for i, op in enumerate(ops):
            p2p += op.peer >= 0
            seqs[op.group] += op.peer < 0
            done = step < NUM_STEPS_BEFORE or i < story.finished[rank]
            created = begins + int(i * 1e9 * STEP_SECONDS / len(whole))
            rows.append(
                {
                    "frames": taken[i],
                    "record_id": step * len(whole) + i,
                    "pg_id": op.group,
                    "process_group": (groups[op.group][0], groups[op.group][1]),
                    "thread_name": "pt_main_thread",
                    "thread_id": "140357539175296",
                    "collective_seq_id": seqs[op.group],
                    "p2p_seq_id": p2p if op.group == 2 else 0,
                    "op_id": seqs[op.group] + (p2p if op.group == 2 else 0),
                    "profiling_name": f"nccl:{op.name}",
                    "time_created_ns": created,
                    "input_sizes": [list(s) for s in op.input_sizes],
                    "input_dtypes": ["BFloat16"] * len(op.input_sizes),
                    "output_sizes": [list(s) for s in op.output_sizes],
                    "output_dtypes": ["BFloat16"] * len(op.output_sizes),
                    "state": "completed" if done else "scheduled",
                    "time_discovered_started_ns": None,
                    "time_discovered_completed_ns": created + 20_000_000 if done else None,
                    "retired": done,
                    "timeout_ms": 600_000,
                    "is_p2p": op.peer >= 0,
                }
            )
    return rows[-num_entries:]


def status(story: Story, rank: int, layout: Layout) -> dict[str, dict[str, int]]:
    """Point-to-point operations write their own numbers into it: seen in real dumps, and in ProcessGroupNCCL."""
    whole = program(layout.stage(rank), layout.dp, layout.pp)
    told = {}
    for g in range(4):
        p2p = g == 2
        before = NUM_STEPS_BEFORE * sum(1 for op in whole if op.group == g)
        now = [i for i, op in enumerate(story.programs[rank]) if op.group == g and (op.peer >= 0) == p2p]
        told[str(g)] = {
            "last_enqueued_collective": before + sum(1 for i in now if i < story.begun[rank]),
            "last_started_collective": -1,
            "last_completed_collective": before + sum(1 for i in now if i < story.finished[rank]),
        }
    return told


def write_dumps(folder: Path, layout: Layout, story: Story, num_entries: int, told: Callable[[str], None]) -> int:
    """One file a rank; bytes written. What follows the head is the same for all ranks that did the same: the memo
    numbers in it are, too, since heads hold the same strings in the same order but for their names."""
    tails: dict[tuple[Any, ...], bytes] = {}
    size = 0
    taken = stacks()
    for n, rank in enumerate(story.dumped):
        head = TorchPickler()
        head.shared = {id(frame) for stack in taken for frame in stack}
        head.out += b"}("
        groups = layout.groups(rank)
        for key, value in (
            ("version", "2.10"),
            ("pg_config", {name: {"name": name, "desc": desc, "ranks": str(list(r))} for name, desc, r in groups}),
            ("comm_lib_version", "2.27.5"),
            ("pg_status", status(story, rank, layout)),
        ):
            head.value(key)
            head.value(value)
        kind = (
            layout.stage(rank),
            story.begun[rank],
            story.finished[rank],
            tuple(story.programs[rank]),
            len(head.memo),
        )
        tail = tails.get(kind)
        if tail is None:
            begin = len(head.out)
            head.value("entries")
            head.value(entries(story, rank, layout, num_entries, taken))
            head.out += b"u"
            head._remember("the dump")  # as PyTorch's does at its end
            head.out += b"."
            tail = tails[kind] = bytes(head.out[begin:])
            del head.out[begin:]
        data = bytes(head.out) + tail
        size += len(data)
        assert size <= BYTES_MAX, "the dumps would take more than 6 GB"
        (folder / f"{PREFIX}{rank}").write_bytes(data)
        if (n + 1) % 512 == 0:
            told(f"  {n + 1:,} dumps, {size / 2**30:.2f} GiB")
    return size
