"""NCCL evidence for `rolecall diagnose`: RAS status answers and Inspector files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rolecall.core.diagnosis import Finding
from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.nccl import inspector_times as nccl_times
from rolecall.detector.artifacts.nccl import ras_status as nccl_status
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base.read_budget import Budget

T = TypeVar("T")


@dataclass(slots=True)
class NcclFiles:
    answers: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def take(self, file: Path) -> bool:
        """Whether it is an NCCL file, which is then kept. Raises OSError."""
        for kind, files in ((nccl_status.is_status, self.answers), (nccl_times.is_log, self.logs)):
            if kind(file):
                files.append(file)
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclInputSummary:
    files: Sequence[Path]
    kind: str
    looked_at: str
    remarks: tuple[str, ...]


def diagnose(
    files: NcclFiles, named: Sequence[Path], budget: Callable[[], Budget], topology: Topology | None
) -> tuple[list[Finding], list[NcclInputSummary]]:
    """Raises UnreadableInput: a named file cannot be read, or none can, or a budget is exhausted."""
    findings, summaries = list[Finding](), list[NcclInputSummary]()
    if files.answers:
        read, remarks = _read(
            files.answers, named, budget(), lambda file: (p := nccl_status.read(file), nccl_status.kept_bytes(p))
        )
        polls = [p for several in read for p in several]
        found, more = nccl_status.diagnose(polls, topology=topology)
        findings += found
        about = nccl_status.looked_at(polls)
        summaries.append(
            NcclInputSummary(files=files.answers, kind="nccl ras", looked_at=about, remarks=(*remarks, *more))
        )
    if files.logs:
        logs, remarks = _read(
            files.logs, named, budget(), lambda file: (log := nccl_times.read(file), nccl_times.kept_bytes(log))
        )
        found, more = nccl_times.diagnose(logs, topology=topology)
        findings += found
        about = nccl_times.looked_at(logs)
        summaries.append(
            NcclInputSummary(files=files.logs, kind="nccl inspector", looked_at=about, remarks=(*remarks, *more))
        )
    return findings, summaries


def _read(
    files: Sequence[Path], named: Sequence[Path], budget: Budget, read: Callable[[Path], tuple[T, int]]
) -> tuple[list[T], tuple[str, ...]]:
    kept, unreadable = list[T](), list[UnreadableInput]()
    for file in files:
        budget.check_time(str(file))
        try:
            value, num_bytes = read(file)
        except UnreadableInput as e:
            if file in named:
                raise
            unreadable.append(e)
            continue
        budget.keep(num_bytes, str(file))
        kept.append(value)
    if not kept:
        raise unreadable[0]
    return kept, tuple(str(e) for e in unreadable)
