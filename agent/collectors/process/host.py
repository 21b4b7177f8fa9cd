"""The node's CPU, load, memory, pressure stalls and OOM kills.

Formats: proc(5), Documentation/accounting/psi.rst. A missing file (a kernel without PSI) gives 0.
"""

import os
from pathlib import Path

from rolecall.agent.collectors.counters import whole
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import HostSample

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal. Guest time is in user; idle and iowait are not busy."""


def parse_cpu(stat: str, ticks_per_second: int) -> tuple[int, float]:
    """(number of CPUs, busy seconds summed over them) from `/proc/stat`. Raises ValueError: there is no `cpu` line."""
    busy, count = None, 0
    for line in stat.splitlines():
        if not line.startswith("cpu"):
            break  # the cpu lines come first
        name, *values = line.split()
        if name == "cpu":
            busy = sum(int(values[i]) for i in _BUSY_FIELDS if i < len(values)) / ticks_per_second
        else:
            count += 1
    if busy is None:
        raise ValueError("no cpu line in stat")
    return count, busy


def parse_stalls(text: str) -> dict[str, float]:
    """Seconds by `some` and `full`, from a `/proc/pressure` file. Other lines are skipped."""
    found = dict[str, float]()
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if kind in ("some", "full") and total.isascii() and total.isdecimal():
            found[kind] = int(total) / 1e6
    return found


def parse_keyed(text: str, *keys: str) -> list[int]:
    """Numbers of the lines that begin with `keys` (including the separator: `MemTotal:`, `oom_kill `), 0 if missing.
    Searching is faster than splitting all 150 lines."""
    lines = "\n" + text
    rest = (lines.partition("\n" + key)[2] for key in keys)
    return [int(r.split(maxsplit=1)[0]) if r else 0 for r in rest]


class HostProbe:
    """Reads the node; its files stay open. `failures`: files that the last reading could not use."""

    def __init__(self, node: NodeId, *, proc: Path = Path("/proc")) -> None:
        self._node, self._proc = node, str(proc)
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self.failures: tuple[str, ...] = ()
        self._open: dict[str, int] = {}

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _whole(self, name: str) -> str:
        """Raises OSError: it cannot be read."""
        if name not in self._open:
            self._open[name] = os.open(f"{self._proc}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return whole(self._open[name])

    def _text(self, name: str, failures: list[str]) -> str:
        try:
            return self._whole(name)
        except OSError:
            failures.append(name)
            return ""

    def read(self, at: float, wall_at: float) -> HostSample:
        """The node now. Never raises: unreadable values are 0 and listed in `failures`."""
        failures: list[str] = []
        try:
            cpu_count, busy = parse_cpu(self._text("stat", failures), self._ticks_per_second)
        except ValueError:
            failures.append("stat")
            cpu_count, busy = 0, 0.0
        total_kib, available_kib = self._keyed("meminfo", failures, "MemTotal:", "MemAvailable:")
        load = self._text("loadavg", failures).split()
        sample = HostSample(
            node=self._node,
            at=at,
            wall_at=wall_at,
            cpu_count=cpu_count,
            cpu_busy_seconds=busy,
            load_1m=float(load[0]) if load else 0.0,
            memory_total_bytes=total_kib * 1024,
            memory_available_bytes=available_kib * 1024,
            cpu_some_stall_seconds=self._stall("pressure/cpu"),
            memory_some_stall_seconds=self._stall("pressure/memory"),
            oom_kills=self._keyed("vmstat", failures, "oom_kill ")[0],
        )
        self.failures = tuple(failures)
        return sample

    def _stall(self, name: str) -> float:
        try:
            return parse_stalls(self._whole(name)).get("some", 0.0)
        except OSError:
            return 0.0  # no PSI in this kernel

    def _keyed(self, name: str, failures: list[str], *keys: str) -> list[int]:
        try:
            return parse_keyed(self._text(name, failures), *keys)
        except (ValueError, IndexError):
            failures.append(name)
            return [0] * len(keys)

    def oom_kills(self) -> int:
        """OOM kills since boot; 0 if unknown."""
        return self._keyed("vmstat", [], "oom_kill ")[0]
