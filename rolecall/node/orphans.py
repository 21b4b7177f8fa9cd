"""Engine processes whose server is gone: they keep GPU memory, and nobody will ever use or end them.

The rule is that of the agent (`agent.collectors.process.orphans`), which reports them as events.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.counters import read_at_most, stat_of
from rolecall.agent.collectors.process.orphans import TITLE_BYTES_MAX, end_command, is_orphan
from rolecall.core.errors import CommandRefused
from rolecall.core.ids import process_start_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProcess:
    """`title`: first argument; `start_ticks`: field 22 of /proc/PID/stat."""

    pid: int
    parent: int
    name: str
    title: str
    start_ticks: int
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedEngine:
    """`gpu_bytes`: None: unknown. `command`: ends it and its descendants, and no other process that has its PID by
    then."""

    pid: int
    title: str
    age_seconds: float
    adopted_by: str
    gpu_bytes: int | None
    command: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_orphans(
    processes: Iterable[RunningProcess], gpu_bytes: Mapping[int, int] | None = None
) -> Iterator[OrphanedEngine]:
    """`gpu_bytes`: GPU memory by PID; None: unknown."""
    by_pid = {p.pid: p for p in processes}
    for process in by_pid.values():
        parent = by_pid.get(process.parent)
        if parent is None or not is_orphan(process.title, parent.name):
            continue
        yield OrphanedEngine(
            pid=process.pid,
            title=process.title,
            age_seconds=process.age_seconds,
            adopted_by=f"{parent.name} ({parent.pid})",
            gpu_bytes=None if gpu_bytes is None else gpu_bytes.get(process.pid, 0),
            command=end_command(process.pid, process.start_ticks),
        )


def running_processes(now: float) -> Iterator[RunningProcess]:
    """Of this node. `now`: wall seconds. Processes that end meanwhile are left out."""
    import psutil

    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "create_time"]):
        facts = process.info
        ticks = process_start_ticks(facts["pid"])
        if ticks is None:
            continue
        words = facts["cmdline"] or [facts["name"] or ""]
        yield RunningProcess(
            pid=facts["pid"],
            parent=facts["ppid"] or 0,
            name=facts["name"] or "",
            title=words[0],
            start_ticks=ticks,
            age_seconds=max(0.0, now - (facts["create_time"] or now)),
        )


def gpu_bytes_by_pid() -> dict[int, int] | None:
    """GPU memory by PID, over all GPUs of this node; None: NVML is not there, or does not say."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 no library, no driver, or one that does not work
        return None
    found: dict[int, int] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            for user in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                found[user.pid] = found.get(user.pid, 0) + (user.usedGpuMemory or 0)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return found


def refuse_unless_orphan(pid: int, start_ticks: int, proc: Path = Path("/proc")) -> None:
    """Raises CommandRefused: the process runs and is no orphan. One that is gone is left to the caller."""
    stat = stat_of(proc, pid)
    if stat is None or stat.start_ticks != start_ticks:
        return
    parent = stat_of(proc, stat.parent)
    title = read_at_most(f"{proc}/{pid}/cmdline", TITLE_BYTES_MAX).split(b"\0")[0].decode("utf-8", "replace")
    if parent is None or not is_orphan(title, parent.name):
        whose = f"its parent is {parent.name} ({stat.parent})" if parent is not None else "its parent is not known"
        raise CommandRefused(f"PID {pid} ({title}) is no orphan of an engine: {whose}")
