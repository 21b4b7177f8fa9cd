"""The job that `recordings.py` records: data-parallel training in PyTorch, its faults, and its sampler. Needs root.

Each worker is a process with its own CPU share, disk limits (control groups, version 1) and network namespace. A step
reads a batch from the worker's data file, looks rows up in its memory-mapped table, runs forward and backward of a
small model on one thread, sleeps `PAUSE_SECONDS` (where a real job would wait for its accelerator; no metric contains
it but the step time), sums the gradients over all workers (gloo) and, in every tenth step, writes a checkpoint. All of
it happens in network namespaces of its own, so nothing outside the job is slowed but by the use of shared cores.

A fault hits one worker, from before the first sample or from its onset on, until the end:

    cpu_hog    `severity` busy processes in the worker's CPU share; below 1: one that is busy for this part of the time
    cpu_quota  the worker's CPU share becomes `severity` cores
    memory     `severity` times a second its table is reclaimed from memory, as under pressure (MADV_PAGEOUT), while a
               neighbour in its CPU share writes to fresh memory. No limit of memory is set
    disk       its reads and its writes are limited to `severity` MB/s each
    network    its link is limited to `severity` Mbit/s in each direction, with a queue of 64 KB that drops the rest
    everyone   not a fault: a hog like `cpu_hog` at every worker; no machine is to be named
"""

import ctypes
import math
import mmap
import multiprocessing
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CGROUPS = Path("/sys/fs/cgroup")
CPU_PERIOD_MICROSECONDS, CPU_SHARE_CORES = 20_000, 0.6
DATA_BYTES, TABLE_BYTES, CHECKPOINT_BYTES, BATCH_BYTES = 8 << 20, 4 << 20, 256 << 10, 128 << 10
BATCH_SAMPLES, ROW_BYTES, NUM_HIDDEN, NUM_LAYERS = 512, 512, 128, 6
CHECKPOINT_STEPS = 10
PAUSE_SECONDS = 0.25
FIRST_STEPS = 3
"""All workers have done these before the first sample."""
START_SECONDS_MAX, COLLECTIVE_SECONDS_MAX = 120.0, 120.0
STORE_PORT = 29_500
FRESH_BYTES = 20 << 20
"""What the neighbour writes to each time it has the worker's table reclaimed."""
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
SYS_PROCESS_MADVISE, MADV_PAGEOUT = 440, 21

_libc = ctypes.CDLL(None, use_errno=True)


class Fault(StrEnum):
    NONE = "none"
    EVERYONE = "everyone"
    CPU_HOG = "cpu_hog"
    CPU_QUOTA = "cpu_quota"
    MEMORY = "memory"
    DISK = "disk"
    NETWORK = "network"

    @property
    def is_healthy(self) -> bool:
        return self in (Fault.NONE, Fault.EVERYONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`severity`: in the unit of the fault. `worker`: which one it hits, -1 if healthy. `onset_seconds`: after the
    first sample, 0 if it is there before it."""

    name: str
    seed: int
    num_workers: int
    fault: Fault
    severity: float
    worker: int
    onset_seconds: int
    num_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a worker reports of a step, all in seconds."""

    data_load: float
    compute: float
    all_reduce: float
    step: float
    checkpoint: float
    """0 in a step without one."""


STEP_REPORT = struct.Struct(f"{len(fields(StepReport))}d")

COUNTERS = (
    "cpu_seconds",
    "run_queue_seconds",
    "minor_page_faults",
    "major_page_faults",
    "voluntary_context_switches",
    "involuntary_context_switches",
    "read_bytes",
    "write_bytes",
    "network_receive_bytes",
    "network_transmit_bytes",
    "tcp_retransmitted_segments",
)
GAUGES = ("rss_bytes", "threads")
REPORTED = ("data_load_seconds", "compute_seconds", "all_reduce_seconds", "step_seconds")
METRICS = tuple(
    sorted((*(f"{c}_per_second" for c in COUNTERS), *GAUGES, *REPORTED, "checkpoint_seconds", "samples_per_second"))
)


def process_readings(pid: int, proc: Path = Path("/proc")) -> dict[str, float]:
    """Counters and gauges of a process by name. Raises OSError if it is gone."""
    root = proc / str(pid)
    stat = (root / "stat").read_text().rpartition(")")[2].split()
    io = dict(line.split(": ") for line in (root / "io").read_text().splitlines())
    run = wait = voluntary = involuntary = 0
    for task in (root / "task").iterdir():
        ran, waited, _ = (task / "schedstat").read_text().split()
        run, wait = run + int(ran), wait + int(waited)
        switches = re.findall(r"^(?:non)?voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
        voluntary, involuntary = voluntary + int(switches[0]), involuntary + int(switches[1])
    received = transmitted = 0
    for line in (root / "net" / "dev").read_text().splitlines()[2:]:
        of_interface = line.partition(":")[2].split()
        received, transmitted = received + int(of_interface[0]), transmitted + int(of_interface[8])
    names, values = (line.split() for line in (root / "net" / "snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return {
        "cpu_seconds": run / 1e9,
        "run_queue_seconds": wait / 1e9,
        "minor_page_faults": int(stat[7]),
        "major_page_faults": int(stat[9]),
        "threads": int(stat[17]),
        "rss_bytes": int(stat[21]) * mmap.PAGESIZE,
        "voluntary_context_switches": voluntary,
        "involuntary_context_switches": involuntary,
        "read_bytes": int(io["read_bytes"]),
        "write_bytes": int(io["write_bytes"]),
        "network_receive_bytes": received,
        "network_transmit_bytes": transmitted,
        "tcp_retransmitted_segments": int(dict(zip(names, values, strict=True))["RetransSegs"]),
    }


def measured(
    before: Mapping[str, float], now: Mapping[str, float], seconds: float, steps: list[StepReport], checkpoint: float
) -> dict[str, float]:
    """Values of one worker at one tick by metric; means of its steps since the last one, NaN if it finished none.
    `checkpoint`: seconds of the last one."""
    values = {f"{name}_per_second": (now[name] - before[name]) / seconds for name in COUNTERS}
    values |= {name: now[name] for name in GAUGES}
    for name in REPORTED:
        of_steps = [getattr(s, name.removesuffix("_seconds")) for s in steps]
        values[name] = sum(of_steps) / len(of_steps) if of_steps else math.nan
    return values | {"checkpoint_seconds": checkpoint, "samples_per_second": len(steps) * BATCH_SAMPLES / seconds}


class _Container:
    """CPU share, disk limits and network of one worker and its neighbours."""

    def __init__(self, job: str, rank: int) -> None:
        name = f"rolecall-{job}-{rank}"
        self._cpu, self._disk = CGROUPS / "cpu" / name, CGROUPS / "blkio" / name
        self.rank, self.pid = rank, 0
        self.report_from, self._report_to = os.pipe()
        for group in (self._cpu, self._disk):
            group.mkdir(exist_ok=True)  # left behind by a recording that was killed
        self.limit_cpu(CPU_SHARE_CORES)

    def remove(self) -> None:
        for group in (self._cpu, self._disk):
            group.rmdir()

    def enter(self) -> None:
        """Called by the process that enters."""
        for group in (self._cpu, self._disk):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def report(self, step: bytes) -> None:
        os.write(self._report_to, step)

    def connect(self, pid: int) -> None:
        """Gives the worker, in its own namespace, a link to the bridge."""
        self.pid = pid
        _ip(f"link add link{self.rank} type veth peer name eth0 netns {pid}")
        _ip(f"link set link{self.rank} master bridge up")
        _ip(f"addr add {address(self.rank)}/24 dev eth0", pid)
        _ip("link set eth0 up", pid)
        _ip("link set lo up", pid)

    def limit_cpu(self, cores: float) -> None:
        (self._cpu / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_MICROSECONDS))
        (self._cpu / "cpu.cfs_quota_us").write_text(str(round(CPU_PERIOD_MICROSECONDS * cores)))

    def limit_disk(self, device: int, megabytes_per_second: float) -> None:
        for way in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {round(megabytes_per_second * 1e6)}"
            (self._disk / f"blkio.throttle.{way}_bps_device").write_text(limit)

    def limit_network(self, megabits_per_second: float) -> None:
        shape = f"root tbf rate {megabits_per_second}mbit burst 16kb limit 64kb".split()
        _run("tc", "qdisc", "add", "dev", f"link{self.rank}", *shape)
        _run("nsenter", "-t", str(self.pid), "-n", "tc", "qdisc", "add", "dev", "eth0", *shape)

    def neighbour(self, *what: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, *what]
        return subprocess.Popen(command, preexec_fn=self._as_neighbour)  # noqa: PLW1509 its calls take no locks

    def _as_neighbour(self) -> None:
        _die_with_parent()
        self.enter()


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def record(case: Case, folder: Path) -> tuple[float, NDArray[np.float32]]:
    """Runs the job of a case: (when its first second began, Unix seconds; values (METRICS, ticks, workers)).

    `folder`: for the job's data, on a disk.

    Raises OSError or CalledProcessError where control groups or namespaces are not permitted, RuntimeError if the job
    does not start or a worker ends.
    """
    for group in ("cpu", "blkio"):
        if not os.access(CGROUPS / group / "cgroup.procs", os.W_OK):
            raise OSError(f"{CGROUPS / group}: recording needs root and control groups of version 1 there")
    import torch.distributed as dist  # before the fork: workers need not import it again

    _check(_libc.unshare(CLONE_NEWNET))
    _ip("link set lo up")
    _ip("link add bridge type bridge")
    _ip("addr add 10.77.0.254/24 dev bridge")
    _ip("link set bridge up")
    containers = [_Container(case.name, rank) for rank in range(case.num_workers)]
    processes: list[Any] = []
    try:
        fork = multiprocessing.get_context("fork")
        for c in containers:
            connected, can_go = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(case, c, folder, connected, can_go), daemon=True)
            process.start()
            processes.append(process)
            can_go.send("namespace?")
            assert process.pid is not None
            _until(partial(_has_own_network, process.pid), "a worker's namespace")
            c.connect(process.pid)
            can_go.send("go")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "10.77.0.254", STORE_PORT, case.num_workers, is_master=True, wait_for_workers=False
        )  # kept: the workers' meeting point
        sampled = _sample(case, containers, processes, folder)
        del store
        return sampled
    finally:
        for p in processes:
            p.kill()
        for p in processes:
            p.wait() if isinstance(p, subprocess.Popen) else p.join()
        for c in containers:
            c.remove()


def _sample(
    case: Case, containers: list[_Container], processes: list[Any], folder: Path
) -> tuple[float, NDArray[np.float32]]:
    for c in containers:
        os.set_blocking(c.report_from, False)
    num_steps = [0] * len(containers)
    if not case.onset_seconds:
        processes += _inject(case, containers, folder)

    def all_began() -> bool:
        for rank, c in enumerate(containers):
            num_steps[rank] += len(_reports(c))
        return min(num_steps) >= FIRST_STEPS

    _until(all_began, "the first steps")
    values = np.full((len(METRICS), case.num_ticks, len(containers)), np.nan, dtype=np.float32)
    checkpoint = [math.nan] * len(containers)
    before = [process_readings(c.pid) for c in containers]
    read_at = [time.monotonic()] * len(containers)
    began_at, began = time.time(), time.monotonic()
    for tick in range(case.num_ticks):
        time.sleep(max(0.0, began + tick + 1 - time.monotonic()))
        for rank, c in enumerate(containers):
            now, at, steps = process_readings(c.pid), time.monotonic(), _reports(c)
            checkpoint[rank] = next((s.checkpoint for s in reversed(steps) if s.checkpoint), checkpoint[rank])
            told = measured(before[rank], now, at - read_at[rank], steps, checkpoint[rank])
            values[:, tick, rank] = [told[name] for name in METRICS]
            before[rank], read_at[rank] = now, at
        if tick == case.onset_seconds - 1:
            processes += _inject(case, containers, folder)
    if not all(p.is_alive() for p in processes[: len(containers)]):
        raise RuntimeError(f"{case.name}: a worker ended")
    return began_at, values


def _inject(case: Case, containers: list[_Container], folder: Path) -> list[Any]:
    """The neighbours that do it, if it takes any."""
    hit = containers[case.worker]
    match case.fault:
        case Fault.EVERYONE:
            return [c.neighbour("hog", str(case.severity)) for c in containers]
        case Fault.CPU_HOG:
            busy = min(1.0, case.severity)
            return [hit.neighbour("hog", str(busy)) for _ in range(math.ceil(case.severity))]
        case Fault.CPU_QUOTA:
            hit.limit_cpu(case.severity)
        case Fault.MEMORY:
            return [hit.neighbour("pressure", str(case.severity), str(hit.pid), str(_table(folder, hit.rank)))]
        case Fault.DISK:
            hit.limit_disk(folder.stat().st_dev, case.severity)
        case Fault.NETWORK:
            hit.limit_network(case.severity)
    return []


def _reports(container: _Container) -> list[StepReport]:
    try:
        data = os.read(container.report_from, 1000 * STEP_REPORT.size)
    except BlockingIOError:
        return []
    names = [f.name for f in fields(StepReport)]
    return [StepReport(**dict(zip(names, x, strict=True))) for x in STEP_REPORT.iter_unpack(data)]


def _work(case: Case, container: _Container, folder: Path, connected: Any, _can_go: Any) -> None:
    """A worker, until it is killed."""
    _die_with_parent()
    assert connected.recv() == "namespace?"
    _check(_libc.unshare(CLONE_NEWNET))
    assert connected.recv() == "go"
    container.enter()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rank = container.rank
    rng = random.Random(f"{case.seed} {rank}")
    data, table, checkpoint = _files(folder, rank, rng)
    buffer, state = mmap.mmap(-1, BATCH_BYTES), mmap.mmap(-1, CHECKPOINT_BYTES)
    num_inputs = BATCH_BYTES // BATCH_SAMPLES
    shared = torch.nn.Sequential(torch.nn.Linear(NUM_HIDDEN, NUM_HIDDEN), torch.nn.Tanh())  # all layers but the first
    model = torch.nn.Sequential(torch.nn.Linear(num_inputs + ROW_BYTES, NUM_HIDDEN), *[shared] * NUM_LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "10.77.0.254", STORE_PORT, case.num_workers, is_master=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_workers)
    for step in count():
        began = time.perf_counter()
        os.preadv(data, [buffer], rng.randrange(DATA_BYTES // BATCH_BYTES) * BATCH_BYTES)
        batch = torch.frombuffer(buffer, dtype=torch.uint8).view(BATCH_SAMPLES, num_inputs)
        loaded = time.perf_counter()
        rows = [rng.randrange(TABLE_BYTES // ROW_BYTES) * ROW_BYTES for _ in range(BATCH_SAMPLES)]
        looked_up = torch.frombuffer(bytearray(b"".join(table[r : r + ROW_BYTES] for r in rows)), dtype=torch.uint8)
        inputs = torch.cat([batch, looked_up.view(BATCH_SAMPLES, ROW_BYTES)], dim=1).float() / 255
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        computed = time.perf_counter()
        time.sleep(PAUSE_SECONDS)
        paused = time.perf_counter()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        summed = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(summed)
        reduced = time.perf_counter()
        parts = summed.split([g.numel() for g in gradients])  # type: ignore[no-untyped-call]
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient) / case.num_workers)
        optimizer.step()
        stepped = time.perf_counter()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            state[:64] = os.urandom(64)
            os.pwritev(checkpoint, [state], 0)
        written = time.perf_counter()
        container.report(
            STEP_REPORT.pack(
                loaded - began,
                computed - loaded,
                reduced - paused,
                written - began,
                written - stepped if (step + 1) % CHECKPOINT_STEPS == 0 else 0.0,
            )
        )


def _table(folder: Path, rank: int) -> Path:
    return folder / f"table-{rank}"


def _files(folder: Path, rank: int, rng: random.Random) -> tuple[int, mmap.mmap, int]:
    """(data, table, checkpoint) of a worker, filled. Data and checkpoint bypass the page cache."""
    sizes = {"data": DATA_BYTES, "table": TABLE_BYTES, "checkpoint": CHECKPOINT_BYTES}
    for name, size in sizes.items():
        with (folder / f"{name}-{rank}").open("wb") as file:
            file.write(rng.randbytes(size))
            os.fsync(file.fileno())
    with _table(folder, rank).open("rb") as file:
        table = mmap.mmap(file.fileno(), TABLE_BYTES, prot=mmap.PROT_READ)
    data = os.open(folder / f"data-{rank}", os.O_RDONLY | os.O_DIRECT)
    # Written in place and without waiting for the file system's journal, which all workers share.
    return data, table, os.open(folder / f"checkpoint-{rank}", os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)


def _hog(busy: float) -> None:
    """Computes for a part of each 0.2 s."""
    while True:
        began = time.monotonic()
        while time.monotonic() < began + 0.2 * busy:
            pass
        time.sleep(max(0.0, began + 0.2 - time.monotonic()))


def _pressure(times_per_second: float, pid: int, table: str) -> None:
    """Has a worker's table reclaimed, and writes to fresh memory."""
    lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
    first, last = (int(x, 16) for x in next(line.split()[0] for line in lines if line.endswith(table)).split("-"))
    process = os.pidfd_open(pid)
    part = (ctypes.c_size_t * 2)(first, last - first)
    while True:
        if _libc.syscall(SYS_PROCESS_MADVISE, process, part, 1, MADV_PAGEOUT, 0) < 0:
            raise OSError(ctypes.get_errno(), "process_madvise")
        with mmap.mmap(-1, FRESH_BYTES) as fresh:
            for page in range(0, FRESH_BYTES, mmap.PAGESIZE):
                fresh[page] = 1
        time.sleep(1 / times_per_second)


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {START_SECONDS_MAX:g} s")
        time.sleep(0.05)


def _die_with_parent() -> None:
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(words: str, pid: int = 0) -> None:
    _run(*(("nsenter", "-t", str(pid), "-n") if pid else ()), "ip", *words.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


if __name__ == "__main__":
    if sys.argv[1] == "hog":
        _hog(float(sys.argv[2]))
    else:
        _pressure(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
