"""Flight Recorder dumps of 4,096 ranks with one culprit: is it the right one, and how long does it take?

    python benchmarks/flight_recorder.py                          the report: 4,096 ranks x 2,000 entries
    python benchmarks/flight_recorder.py --ranks 256 --no-stock   smaller, without PyTorch's own analyser

A job of tensor (8), pipeline (4) and data parallel groups beside the group of all runs its program, each operation
blocking, until one rank misbehaves. The dumps that its ranks would leave then are written to a temporary folder, byte for
byte as PyTorch's pickler writes them (compared with dumps of a gloo job), with stack frames. They are read again, in full
and by the fast way: the status of all first, then the entries of those who matter. PyTorch's `fr_trace` analyses the dumps
of a smaller job beside it.
"""

import argparse
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common

from rolecall.detector import flight_dumps, flight_recorder

TP, PP = 8, 4
NUM_LAYERS = 12
"""Of a pipeline stage: two all_reduces each, forward and backward."""
NUM_FRAMES = 10
"""Of each operation's stack; PyTorch adds stacks unless told not to."""
START_NS = 1_795_000_000_000_000_000
STEP_SECONDS = 4.0
NUM_STEPS_BEFORE = 300
BYTES_MAX = 6 << 30
PREFIX = "nccl_trace_rank_"
SCENARIOS = ("hang", "skipped collective", "mismatched collective", "dead rank")


# --- the job ---------------------------------------------------------------------------------------------------------


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


# --- its dumps, as PyTorch's pickler writes them -----------------------------------------------------------------------


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


def frames() -> list[dict[str, Any]]:
    names = (
        "all_reduce",
        "wrapper",
        "forward",
        "backward",
        "reduce",
        "step",
        "train_step",
        "train",
        "main",
        "<module>",
    )
    return [{"name": n, "filename": f"/opt/job/{n}.py", "line": 40 + i} for i, n in enumerate(names[:NUM_FRAMES])]


def entries(
    story: Story, rank: int, layout: Layout, num_entries: int, stack: list[dict[str, Any]]
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
                    "frames": stack,
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
    stack = frames()
    for n, rank in enumerate(story.dumped):
        head = TorchPickler()
        head.shared = {id(f) for f in stack}
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
            head.value(entries(story, rank, layout, num_entries, stack))
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


# --- reading -----------------------------------------------------------------------------------------------------------


def measure(folder: Path, world_size: int, fast: bool, num_processes: int) -> dict[str, Any]:
    """In this process and its readers, from nothing to the findings."""
    begun = time.perf_counter()
    paths = sorted(folder.iterdir())
    if fast:
        wanted = partial(flight_recorder.entries_wanted, world_size=world_size)
        dumps, unreadable = flight_dumps.read_as_needed(paths, wanted, num_processes=num_processes)
    else:
        dumps, unreadable = flight_dumps.read_many(paths, num_processes=num_processes)
    read_seconds = time.perf_counter() - begun
    found = flight_recorder.diagnose(dumps, world_size=world_size)
    seconds = time.perf_counter() - begun
    mine, theirs = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "seconds": seconds,
        "read_seconds": read_seconds,
        "cpu_seconds": mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime,
        "peak_gib": (mine.ru_maxrss + num_processes * theirs.ru_maxrss) / 2**20,
        "num_unreadable": len(unreadable),
        "num_parsed": sum(d.entries is not None for d in dumps),
        "num_entries": sum(len(d.entries) for d in dumps if d.entries is not None),
        "findings": [[str(f.fault_class), [s.rank for s in f.suspects], f.because] for f in found],
    }


def _machine_busy_seconds() -> float:
    """CPU seconds that all processes have used, and that the host has taken, since boot."""
    user, nice, system, _, _, *rest = (int(t) for t in Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def measured(folder: Path, world_size: int, fast: bool, num_processes: int) -> dict[str, Any]:
    """In a process of its own: memory is what this reading took. `others_cpu_seconds`: what all else took meanwhile."""
    command = [sys.executable, __file__, "--measure", str(folder), "--ranks", str(world_size)]
    command += ["--processes", str(num_processes), *(["--fast"] if fast else [])]
    before = _machine_busy_seconds()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    busy = _machine_busy_seconds() - before
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "others_cpu_seconds": max(0.0, busy - result["cpu_seconds"])}


STOCK_SECONDS_MAX = 300


def stock(folder: Path) -> tuple[float, str, set[int]]:
    """PyTorch's analyser: seconds, how it ended, and all ranks that it calls missing or culprit."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", PREFIX]
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--allow-incomplete-ranks"],
            capture_output=True,
            text=True,
            timeout=STOCK_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return STOCK_SECONDS_MAX, "gave up", set()
    seconds = time.perf_counter() - begun
    text = done.stdout + done.stderr
    named = {
        int(r) for found in re.findall(r"missing ranks: \{([0-9, ]*)\}", text) for r in found.split(",") if r.strip()
    }
    named |= {int(r) for r in re.findall(r"Culprit rank ([0-9]+)", text)}
    last = (done.stderr.strip().splitlines() or ["?"])[-1][:80]
    return seconds, "ended" if done.returncode == 0 else f"failed: {last}", named


# --- the report --------------------------------------------------------------------------------------------------------


def named(result: dict[str, Any]) -> str:
    return "; ".join(f"{fault} {ranks if len(ranks) < 6 else len(ranks)}" for fault, ranks, _ in result["findings"])


def right(result: dict[str, Any], scenario: str, culprit: int) -> bool:
    """The culprit and only it, in one finding of the right class."""
    fault = "hang" if scenario in ("hang", "dead rank") else "user_code"
    return [f[:2] for f in result["findings"]] == [[fault, [culprit]]]


def run(num_ranks: int, num_entries: int, culprit: int, num_processes: int, scratch: Path) -> list[str]:
    layout = Layout(num_ranks)
    lines = [
        "| scenario | dumps | full: s | CPU s | others' CPU s | peak GiB | right | fast: s | CPU s | others' CPU s | peak GiB"
        + " | parsed whole | right |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    sentences = []
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            print(f"{scenario}: writing", flush=True)
            story = play(layout, scenario, culprit)
            size = write_dumps(folder, layout, story, num_entries, partial(print, flush=True))
            full = measured(folder, num_ranks, False, num_processes)
            fast = measured(folder, num_ranks, True, num_processes)
        assert full["num_parsed"] == len(story.dumped) and not full["num_unreadable"] + fast["num_unreadable"]
        assert full["num_entries"] == len(story.dumped) * num_entries
        cells = [scenario, f"{len(story.dumped):,} x {num_entries:,}, {size / 2**30:.2f} GiB"]
        for result in (full, fast):
            cells += [f"{result[k]:.1f}" for k in ("seconds", "cpu_seconds", "others_cpu_seconds")]
            cells += [f"{result['peak_gib']:.2f}"]
            cells += [f"{result['num_parsed']:,}"] if result is fast else []
            cells += ["yes" if right(result, scenario, culprit) else f"NO: {named(result)}"]
        lines.append(f"| {' | '.join(cells)} |")
        sentences.append(f"- {scenario}: {full['findings'][0][2] if full['findings'] else 'nothing'}")
        print(lines[-1], flush=True)
    return [*lines, "", "What it says (full):", "", *sentences]


def run_stock(num_ranks: int, num_entries: int, scratch: Path) -> list[str]:
    lines = [
        "| ranks x entries | pipeline | scenario | fr_trace: seconds | it names | ours, full: seconds | it names |",
        "|---|---|---|---|---|---|---|",
    ]
    culprit = num_ranks // 3
    for pp in (1, PP):
        layout = Layout(num_ranks, pp)
        for scenario in SCENARIOS:
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                folder = Path(name)
                story = play(layout, scenario, culprit)
                write_dumps(folder, layout, story, num_entries, lambda text: None)
                seconds, how, ranks = stock(folder)
                ours = measured(folder, num_ranks, False, 2)
            told = f"{sorted(ranks)}" if len(ranks) < 6 else f"{len(ranks)} ranks"
            told += f", {'with' if culprit in ranks else 'without'} the culprit {culprit}"
            cells = [f"{num_ranks} x {num_entries:,}", str(pp), scenario, f"{seconds:.1f} ({how})", told]
            cells += [f"{ours['seconds']:.1f}", named(ours)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--culprit", type=int, default=1234)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="needs 2 GB")
    parser.add_argument("--stock-ranks", type=int, default=128, help="size of the job that PyTorch's analyser gets")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--no-report", action="store_true", help="print only")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fast", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.ranks, args.fast, args.processes)))
        return
    lines = run(args.ranks, args.entries, args.culprit, args.processes, args.scratch)
    config = f"{args.ranks} ranks x {args.entries} entries with {NUM_FRAMES} stack frames, {args.processes} processes"
    report = common.header("Flight Recorder: who holds up the job", config, f"none; culprit is rank {args.culprit}")
    report += [
        f"Tensor parallel {TP}, pipeline {PP}, data parallel {args.ranks // TP // PP}; NCCL-like dumps. Wall seconds from the",
        "first file to the findings in a process started for it, readers included; dumps lie in the page cache. Peak: resident",
        f"memory of the parent plus {args.processes} times the largest reader. Others' CPU seconds: what the rest of the machine",
        "used meanwhile; wall seconds grow with it, and on a machine of its own are about half of the CPU seconds.",
        "",
        *lines,
    ]
    if not args.no_stock:
        report += [
            "",
            "PyTorch's analyser (`fr_trace --allow-incomplete-ranks`, one process, its import of torch included) on the dumps",
            "of smaller jobs of the same kind, with and without the pipeline's point-to-point traffic; named is whoever it",
            f"calls missing or culprit. It was given {STOCK_SECONDS_MAX} s:",
            "",
        ]
        report += run_stock(args.stock_ranks, args.entries, args.scratch)
    if args.no_report:
        print("\n".join(report))
    else:
        print(common.write("flight_recorder", report))


if __name__ == "__main__":
    main()
