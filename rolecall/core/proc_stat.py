"""`/proc/PID/stat` (proc(5)): who a process is, its state, and what it has used."""

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
STAT_BYTES_MAX = 4096


class Stat(NamedTuple):
    """Fields, numbered as in proc(5)."""

    name: str  # 2, truncated by the kernel to 15 characters
    state: str  # 3
    parent: int  # 4
    major_faults: int  # 12
    cpu_ticks: int  # 14 + 15: user and system
    num_threads: int  # 20
    start_ticks: int  # 22
    rss_pages: int  # 24
    exit_code: int  # 52, wait status; of a zombie only; 0 also where the reader may not trace the process

    @property
    def has_ended(self) -> bool:
        """It is a zombie: its parent has not read its exit code."""
        return self.state in ("Z", "X")


def parse_stat(raw: bytes) -> Stat:
    """Raises ValueError when `raw` is not a `stat` line."""
    # The command name (field 2) may contain spaces and parentheses: fields are counted after its last parenthesis.
    closed = raw.rindex(b")")
    fields = raw[closed + 2 :].split()
    try:
        return Stat(
            name=raw[raw.index(b"(") + 1 : closed].decode("utf-8", "replace"),
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            major_faults=int(fields[9]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            num_threads=int(fields[17]),
            start_ticks=int(fields[19]),
            rss_pages=int(fields[21]),
            exit_code=int(fields[49]) if len(fields) > 49 else 0,
        )
    except IndexError:
        raise ValueError("too few fields in stat") from None


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """None: there is no such process. Raises OSError and ValueError: it cannot be read, which says nothing about it."""
    try:
        return parse_stat((proc / str(pid) / "stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return None
