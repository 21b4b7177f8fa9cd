"""Which registered processes use which GPU: from NVML, else from each process's environment.

NVML lists the PIDs that hold a context on a GPU. A rank is a listed process or its ancestor: the workers of an
inference engine are children of the registered process. Without NVML's list (dcgm-exporter in its place, an
unresponsive GPU, PIDs of another namespace), the process's initial CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES and
LOCAL_RANK decide. Values that a process sets later (as Ray does) are not visible."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolecall.agent.collectors.base import LoggedOnce
from rolecall.agent.identity import Registration
from rolecall.core.ids import ProcessId

logger = logging.getLogger(__name__)

ANCESTORS_MAX = 16
ENVIRON_BYTES_MAX = 256 * 1024
OWNERS_MAX = 64
"""Registered processes per GPU; further ones are left out."""
BY_NVML, BY_ENVIRONMENT = "nvml", "environment"
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
CONTAINER, CUDA = "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_WANTED = frozenset({*LOCAL_RANKS, CONTAINER, CUDA})
_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class GpuOwnership:
    """Of one GPU: PIDs of registered processes, and the source of that."""

    pids: tuple[int, ...] = ()
    by: str = ""


NO_OWNER = GpuOwnership()


def gpus_of(environ: Mapping[str, str], uuids: Mapping[int, str]) -> tuple[int, ...]:
    """Indices of the GPUs that a process with this environment uses; () if unknown. `uuids`: of the node's GPUs, by
    index. Assumes that CUDA and NVML number GPUs alike, which holds on nodes with one GPU model."""
    visible = sorted(uuids)
    if environ.get(CONTAINER, "") not in ("", "all", "none", "void"):
        visible = _listed(environ[CONTAINER], visible, uuids)
    if CUDA in environ:
        visible = _listed(environ[CUDA], visible, uuids)
    local_rank = next((environ[name] for name in LOCAL_RANKS if _NUMBER.fullmatch(environ.get(name, ""))), "")
    if not local_rank:
        return tuple(visible) if CUDA in environ or len(visible) < len(uuids) else ()
    return tuple(visible) if len(visible) == 1 else tuple(visible[int(local_rank) :][:1])


def _listed(text: str, seen: Sequence[int], uuids: Mapping[int, str]) -> list[int]:
    """CUDA stops at the first invalid entry; an index is relative to the visible GPUs `seen`, a UUID may be a
    prefix."""
    found: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            named = [seen[int(entry)]] if int(entry) < len(seen) else []
        else:
            named = [gpu for gpu in seen if entry.startswith("GPU-") and uuids[gpu].startswith(entry)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


class GpuOwners:
    """Mutable; used by one thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._lines: dict[int, tuple[int, ...]] = {}
        """Per listed PID: itself and its ancestors, nearest first; () if it is not in /proc."""
        self._from_environ: dict[ProcessId, tuple[int, ...]] = {}
        self._logged = LoggedOnce()

    def of_gpus(
        self, listed: Mapping[int, Sequence[int]], uuids: Mapping[int, str], ranks: Sequence[Registration]
    ) -> dict[int, GpuOwnership]:
        """By GPU index. `listed`: PIDs by GPU, from NVML; `uuids`: of all GPUs."""
        pids = {pid for found in listed.values() for pid in found}
        lines = self._lines
        self._lines = {pid: lines[pid] if pid in lines else tuple(self._line(pid)) for pid in pids}
        if any(self._lines.values()):
            live = {rank.process.pid for rank in ranks}
            return {gpu: _owners((self._owner(pid, live) for pid in found), BY_NVML) for gpu, found in listed.items()}
        if pids:
            self._log_once(f"none of the processes that NVML lists is in {self._proc}: another PID namespace")
        return self._by_environment(uuids, ranks)

    def _owner(self, pid: int, live: set[int]) -> int:
        """The registered process that this PID is or descends from; 0: none."""
        return next((above for above in self._lines[pid] if above in live), 0)

    def _line(self, pid: int) -> Iterator[int]:
        for _ in range(ANCESTORS_MAX):
            parent = self._parent(pid)
            if parent is None:
                return
            yield pid
            if parent <= 1:
                return
            pid = parent

    def _by_environment(self, uuids: Mapping[int, str], ranks: Sequence[Registration]) -> dict[int, GpuOwnership]:
        known = self._from_environ
        self._from_environ = {
            rank.process: known[rank.process] if rank.process in known else self._environ_says(rank, uuids)
            for rank in ranks
        }
        users: dict[int, list[int]] = {}
        for process, gpus in self._from_environ.items():
            for gpu in gpus:
                users.setdefault(gpu, []).append(process.pid)
        return {gpu: _owners(pids, BY_ENVIRONMENT) for gpu, pids in users.items()}

    def _environ_says(self, rank: Registration, uuids: Mapping[int, str]) -> tuple[int, ...]:
        environ = self._environ(rank.process.pid)
        found = gpus_of(environ, uuids)
        if not found and CUDA not in environ:
            self._log_once(
                f"GPU assignment unknown for {rank.replica} rank {rank.rank}, and possibly other ranks: NVML lists no "
                f"process of this node, and the environment has neither {CUDA} nor {LOCAL_RANKS[0]}"
            )
        return found

    def _log_once(self, text: str) -> None:
        """Logs the first text of each kind, whichever process it concerns."""
        if self._logged.is_new(text[:20]):
            logger.warning("GPUs and ranks: %s", text)

    # --- /proc: a process that is gone or unreadable yields nothing

    def _parent(self, pid: int) -> int | None:
        """proc(5), field 4 of `stat`; None: no such process."""
        fields = _read(f"{self._proc}/{pid}/stat", 4096).rpartition(b")")[2].split()
        return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None

    def _environ(self, pid: int) -> dict[str, str]:
        """The variables of interest."""
        found = {}
        for entry in _read(f"{self._proc}/{pid}/environ", ENVIRON_BYTES_MAX).split(b"\0"):
            name, equals, value = entry.decode("utf-8", "replace").partition("=")
            if equals and name in _WANTED:
                found[name] = value
        return found


def _owners(pids: Iterable[int], by: str) -> GpuOwnership:
    found = tuple(sorted({pid for pid in pids if pid}))[:OWNERS_MAX]
    return GpuOwnership(found, by) if found else NO_OWNER


def _read(path: str, bytes_max: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(bytes_max)
    except OSError:
        return b""
