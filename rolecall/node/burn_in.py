"""Burn-in: work with a known result on this machine, compared bit by bit.

Arithmetic on the GPU and on each core must give the same bits every time; memory, disk and loopback must return what
was written. Data comes from a fixed seed, so that digests can be compared between machines and over time. Each check
runs in a separate process with a deadline, because a faulty machine may hang during the test.

A check that could not be done gives its reason and neither passes nor fails. A pass means that no fault was found in
the given time, not that there is none.
"""

import hashlib
import multiprocessing
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.text import counted

GRACE_SECONDS = 60.0
"""Time for a check beyond its share: process start and the import of torch from a slow disk."""
KILL_SECONDS = 5.0
"""How long a killed process may take to end; one in an uninterruptible wait is reported and left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """`passed` None: it could not be done; `because` gives the reason."""

    name: str
    passed: bool | None
    because: str
    values: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInBudget:
    """How long a check works and where it may write."""

    seconds: float
    folder: Path


Check = Callable[[BurnInBudget, Clock], CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInResult:
    seconds: float  # of all
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """No check failed, and at least one was done."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "seconds": self.seconds, "checks": [asdict(c) for c in self.checks]}


def burn_in(
    checks: Mapping[str, Check],
    seconds: float,
    folder: Path,
    *,
    clock: Clock | None = None,
    grace_seconds: float = GRACE_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> BurnInResult:
    """Runs the checks one after the other, each for its share of `seconds`."""
    clock = clock or SystemClock()
    began = clock.monotonic()
    work = BurnInBudget(seconds=seconds / max(1, len(checks)), folder=folder)
    found = []
    for name, check in checks.items():
        if progress is not None:
            progress(f"{name}: for {work.seconds:.0f} s")
        found.append(_in_process(name, check, work, grace_seconds))
    return BurnInResult(seconds=round(clock.monotonic() - began, 3), checks=tuple(found))


def _in_process(name: str, check: Check, work: BurnInBudget, grace_seconds: float) -> CheckResult:
    """Runs one check in a separate process, which is killed at its deadline."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, name, check, work), daemon=True)
    process.start()
    theirs.close()
    limit = work.seconds + grace_seconds
    try:
        if not ours.poll(limit):
            return CheckResult(name=name, passed=False, because=f"no result within {limit:.0f} s{_end(process)}")
        found: CheckResult = ours.recv()
        return found
    except EOFError:
        process.join(KILL_SECONDS)
        return CheckResult(name=name, passed=False, because=f"its process exited with code {process.exitcode}")
    finally:
        _end(process)
        ours.close()


def _end(process: Any) -> str:
    process.join(0.5)
    if process.is_alive():
        process.kill()
        process.join(KILL_SECONDS)
    return "; its process cannot be killed" if process.is_alive() else ""


def _run(to: Connection, name: str, check: Check, work: BurnInBudget) -> None:
    try:
        to.send(check(work, SystemClock()))
    except Exception as e:  # noqa: BLE001 - whatever a driver raises is a result
        to.send(CheckResult(name=name, passed=False, because=f"{type(e).__name__}: {e}"[:500]))
    finally:
        to.close()


SEED = 20_26
MEMORY_BYTES = 256 << 20
"""Written and read repeatedly. More would take memory from other processes on a node in use."""
BLOCK_BYTES = 4 << 20
DISK_BYTES = 64 << 20
MATRIX_SIZE = 2048
CPU_MATRIX_SIZE = 192
SOCKET_SECONDS = 10.0
"""Longest wait for one block over loopback."""
Values = dict[str, float | int | str]
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)


def gpu_math(work: BurnInBudget, clock: Clock) -> CheckResult:
    """Repeats the same products on each GPU: the bits must not change."""
    name = "gpu_math"
    try:
        import torch
    except ImportError:
        return CheckResult(name=name, passed=None, because="torch is not installed: no GPU was tested")
    if not torch.cuda.is_available():
        return CheckResult(name=name, passed=None, because="torch sees no GPU: none was tested")
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    found = products(torch, devices, work.seconds, clock)
    kinds = sorted({str(torch.cuda.get_device_name(d)) for d in devices})
    values: Values = {"gpus": len(devices), "rounds": found.rounds, "kind": ", ".join(kinds), **found.digests}
    if found.wrong:
        return CheckResult(name=name, passed=False, because=found.wrong, values=values)
    if len(kinds) == 1 and len(set(found.digests.values())) > 1:
        return CheckResult(
            name=name, passed=False, because="GPUs of the same model give different products", values=values
        )
    because = f"{counted(len(devices), 'GPU')}, {found.rounds} products: all bits identical"
    return CheckResult(name=name, passed=True, because=because, values=values)


@dataclass(frozen=True, slots=True)
class Products:
    """`wrong` names the device that gave different bits; empty if none did."""

    wrong: str
    rounds: int
    digests: dict[str, str]  # of the product, by device


def products(torch: Any, devices: Sequence[str], seconds: float, clock: Clock, size: int = MATRIX_SIZE) -> Products:
    """Repeats one product on each device, for its share of `seconds`."""
    made = torch.Generator().manual_seed(SEED)
    left, right = (torch.randn(size, size, generator=made) for _ in range(2))
    rounds, digests = 0, dict[str, str]()
    for device in devices:
        left_factor, right_factor = (m.to(device=device, dtype=torch.bfloat16) for m in (left, right))
        first = (left_factor @ right_factor).view(torch.int16)
        for _ in _rounds(clock, seconds / len(devices)):
            rounds += 1
            wrong = int(((left_factor @ right_factor).view(torch.int16) != first).sum())
            if wrong:
                because = f"{device}: {wrong} of {first.numel()} results differed in round {rounds}"
                return Products(because, rounds, digests)
        digests[device] = hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]
    return Products("", rounds, digests)


def cpu_math(work: BurnInBudget, clock: Clock, arithmetic: tuple[Callable[[], str], str] | None = None) -> CheckResult:
    """Repeats the same arithmetic on each core: the bits must be identical everywhere."""
    product, what = arithmetic or _arithmetic()
    cores = sorted(os.sched_getaffinity(0))
    wanted, rounds = product(), 0
    for _ in _rounds(clock, work.seconds):
        for core in cores:
            os.sched_setaffinity(0, {core})
            rounds += 1
            if product() != wanted:
                because = f"core {core}: result differs from core {cores[0]} in round {rounds}"
                return CheckResult(name="cpu_math", passed=False, because=because, values={"core": core})
    values: Values = {"cores": len(cores), "rounds": rounds, "digest": wanted[:16], "what": what}
    because = f"{counted(len(cores), 'core')}, {rounds} rounds of {what}: all bits identical"
    return CheckResult(name="cpu_math", passed=True, because=because, values=values)


def _arithmetic() -> tuple[Callable[[], str], str]:
    """A deterministic CPU load that returns its digest, and its name."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, on the pinned core
    try:
        import numpy as np
    except ImportError:
        return _scalar, "scalar arithmetic (numpy is not installed: vector units were not tested)"
    made = np.random.default_rng(SEED)
    a, b = made.standard_normal((2, CPU_MATRIX_SIZE, CPU_MATRIX_SIZE))

    def product() -> str:
        return hashlib.sha256((a @ b @ a).tobytes()).hexdigest()

    return product, "matrix products"


def _scalar() -> str:
    x, digest = 0.5, hashlib.sha256()
    for n in range(1, 20_000):
        x = (x * 3.999_999 * (1.0 - x)) or 0.5
        digest.update(f"{x.hex()}{pow(n, n % 97, 1_000_000_007)}".encode())
    return digest.hexdigest()


def memory(work: BurnInBudget, clock: Clock, num_bytes: int = MEMORY_BYTES) -> CheckResult:
    """Writes patterns and noise to memory and reads them back."""
    noise, rounds, began = random.Random(SEED).randbytes(BLOCK_BYTES), 0, clock.monotonic()
    held = [bytearray(BLOCK_BYTES) for _ in range(num_bytes // BLOCK_BYTES)]
    for _ in _rounds(clock, work.seconds):
        for wanted in (*(bytes([p]) * BLOCK_BYTES for p in PATTERNS), noise):
            for block in held:
                block[:] = wanted
            wrong = [n for n, block in enumerate(held) if block != wanted]
            rounds += 1
            if wrong:
                because = f"{len(wrong)} of {len(held)} blocks did not come back as written, in round {rounds}"
                return CheckResult(name="memory", passed=False, because=because, values={"blocks": len(wrong)})
    gigabytes = rounds * num_bytes / 1e9
    values = {"bytes": num_bytes, "rounds": rounds, "gb_per_second": _rate(gigabytes, clock.monotonic() - began)}
    because = f"{num_bytes >> 20} MiB, {rounds} times, came back as written (the rest of memory was not tested)"
    return CheckResult(name="memory", passed=True, because=because, values=values)


def disk(work: BurnInBudget, clock: Clock, num_bytes: int = DISK_BYTES) -> CheckResult:
    """Writes, flushes and reads back a file; its digest must match."""
    began = clock.monotonic()
    made = random.Random(SEED)
    path = work.folder / f".rolecall-burn-in-{os.getpid()}"
    blocks = [made.randbytes(BLOCK_BYTES) for _ in range(4)]
    wanted = _digest(blocks[n % 4] for n in range(num_bytes // BLOCK_BYTES))
    try:
        for rounds in _rounds(clock, work.seconds):
            with path.open("wb") as file:
                for n in range(num_bytes // BLOCK_BYTES):
                    file.write(blocks[n % 4])
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with path.open("rb") as file:
                found = _digest(iter(lambda: file.read(BLOCK_BYTES), b""))
            if found != wanted:
                because = f"the file did not come back as written, in round {rounds}"
                return CheckResult(name="disk", passed=False, because=because, values={"rounds": rounds})
    except OSError as e:
        return CheckResult(name="disk", passed=False, because=f"{work.folder}: {e.strerror}")
    finally:
        path.unlink(missing_ok=True)
    rate = _rate(rounds * num_bytes * 2 / 1e9, clock.monotonic() - began)
    values = {"bytes": num_bytes, "rounds": rounds, "gb_per_second": rate}
    because = f"{num_bytes >> 20} MiB, {rounds} times, came back as written (the kernel may have kept some in memory)"
    return CheckResult(name="disk", passed=True, because=because, values=values)


def loopback(work: BurnInBudget, clock: Clock) -> CheckResult:
    """Sends noise through a TCP connection over loopback."""
    block, began = random.Random(SEED).randbytes(BLOCK_BYTES), clock.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SOCKET_SECONDS)
        with socket.create_connection(server.getsockname(), SOCKET_SECONDS) as there, server.accept()[0] as here:
            here.settimeout(SOCKET_SECONDS)
            for rounds in _rounds(clock, work.seconds):
                sender = threading.Thread(target=there.sendall, args=(block,), daemon=True)
                sender.start()
                found = bytearray()
                while len(found) < len(block) and (piece := here.recv(1 << 20)):
                    found += piece
                sender.join(SOCKET_SECONDS)
                sent = rounds * len(block)
                if found != block:
                    because = f"received other bytes than sent, after {sent} bytes"
                    return CheckResult(name="loopback", passed=False, because=because, values={"bytes": sent})
    values = {"bytes": sent, "gb_per_second": _rate(sent / 1e9, clock.monotonic() - began)}
    because = f"{sent >> 20} MiB arrived unchanged (no network card was tested)"
    return CheckResult(name="loopback", passed=True, because=because, values=values)


def _rounds(clock: Clock, seconds: float) -> Iterator[int]:
    """1, 2, ... until the time is over; at least one."""
    ends = clock.monotonic() + seconds
    for number in count(1):
        yield number
        if clock.monotonic() >= ends:
            return


def _digest(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _rate(gigabytes: float, seconds: float) -> float:
    return round(gigabytes / max(seconds, 1e-9), 3)


CHECKS: dict[str, Check] = {
    "gpu_math": gpu_math,
    "cpu_math": cpu_math,
    "memory": memory,
    "disk": disk,
    "loopback": loopback,
}
