"""Asks one GPU all that there is to ask, where each call may fail alone.

What a GPU or driver does not know is skipped for that GPU from then on, and said once. Other errors are counted and
tried again. Answers are kept by call, so that a call that fails takes away its own numbers and no others.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable, LoggedOnce
from rolecall.agent.collectors.gpu.fields import FieldQuery
from rolecall.agent.collectors.gpu.gpm import GpmSampler
from rolecall.agent.collectors.gpu.nvml import (
    FIELD_UNSUPPORTED,
    GONE,
    LOST,
    UNSUPPORTED,
    Handle,
    code_of,
    error_name,
    errors_of,
)
from rolecall.agent.collectors.gpu.nvml_calls import (
    FAST,
    FAST_FIELDS,
    LINK_FIELDS,
    NVLINK_ERRORS,
    SLOW,
    SLOW_FIELDS,
    Call,
    Key,
    Numbers,
)
from rolecall.formats.xid.xid import RecoveryAction

logger = logging.getLogger(__name__)

PROCESSES_MAX = 64
"""Of one GPU; a GPU shared by more shows the first ones."""
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
ERRORS_SUM = "nvlink_errors_total"
ERRORS_BY_LINK = "nvlink_link_errors_total"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. `memory_bytes` is 0 where the driver does not say (in containers, MIG)."""

    pid: int
    memory_bytes: int


class GpuLostError(Exception):
    """No call on this GPU will succeed: why."""


@dataclass(slots=True)
class GpuQueryState:
    """One GPU's answers. `parts`: numbers by the call that gave them. What a call gives replaces them as a whole, if it is
    not the same: who remembers the object sees whether anything has changed. A call that fails removes them."""

    index: int
    handle: Handle = None
    parts: dict[str, Numbers] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    unsupported: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)  # other failures, by name of the error
    slow_at: float | None = None  # when the slow calls are due; None: never made
    by_link: dict[tuple[int, Key], float] = field(default_factory=dict)  # a link that is down keeps what it counted
    gpm: GpmSampler | None = None
    queries: dict[str, FieldQuery] = field(default_factory=dict)  # by the call that makes them
    num_answered: int = 0  # calls of this look that NVML answered, be it with "not supported"
    last_error: str = ""

    @property
    def tells_processes(self) -> bool:
        return PROCESSES in self.parts

    def forget(self) -> None:
        """The GPU is lost: after a reset it may answer differently, and its counters start again."""
        self.parts.clear()
        self.processes = ()
        self.unsupported.clear()
        self.slow_at = None
        self.by_link.clear()
        self.queries.clear()
        self.close()

    def close(self) -> None:
        if self.gpm is not None:
            self.gpm.close()
            self.gpm = None


class GpuPoller:
    """Owned by one thread. `num_gpus`: over which the slow calls are spread."""

    def __init__(self, pynvml: Any, said: LoggedOnce, *, num_gpus: int, slow_seconds: float) -> None:
        self._nvml, self._said = pynvml, said
        self._errors = errors_of(pynvml)
        self._num_gpus, self._slow_seconds = num_gpus, slow_seconds

    def ask(self, gpu: GpuQueryState, at: float) -> None:
        """One look.

        Raises:
            LostError: no call succeeds, or NVML says so.
            CannotRead: the driver is gone.
        """
        gpu.num_answered, gpu.last_error = 0, ""
        self._ask_all(gpu, at)
        if not gpu.num_answered and gpu.last_error:
            raise GpuLostError(gpu.last_error)

    def _ask_all(self, gpu: GpuQueryState, at: float) -> None:
        for calls in FAST:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("fields", lambda _, __: self._fields(gpu, "fields", FAST_FIELDS)),))
        self._ask(gpu, (Call("GPM", lambda _, __: self._gpm(gpu, at)),))
        if gpu.slow_at is None:
            # Later ones are spread over the interval: no look bears the slow calls of all GPUs but the first.
            gpu.slow_at = at + self._slow_seconds * gpu.index / self._num_gpus
        elif at < gpu.slow_at:
            return
        gpu.slow_at += self._slow_seconds * (1 + (at - gpu.slow_at) // self._slow_seconds)
        for calls in SLOW:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("slow fields", lambda _, __: self._fields(gpu, "slow fields", SLOW_FIELDS)),))
        self._ask(gpu, (Call("NVLinks", lambda _, __: self._links(gpu)),))
        self._ask(gpu, (Call(PROCESSES, lambda _, __: self._processes(gpu)),))

    def _ask(self, gpu: GpuQueryState, calls: tuple[Call, ...]) -> None:
        """The first of `calls` that this GPU and driver know; what it gave before is replaced.

        Raises:
            LostError: NVML says that the GPU is lost.
            CannotRead: the driver is gone.
        """
        part = calls[0].name
        for call in calls:
            if call.name in gpu.unsupported:
                continue
            try:
                numbers = call.read(self._nvml, gpu.handle)
            except self._errors as e:
                gpu.parts.pop(part, None)
                if not self._is_unsupported(gpu, call.name, e):
                    return
            else:
                gpu.num_answered += 1
                if gpu.parts.get(part) != numbers:
                    gpu.parts[part] = numbers
                return

    def _is_unsupported(self, gpu: GpuQueryState, name: str, error: Exception) -> bool:
        """Whether to go on without this call. Any other failure is counted, and tried again at the next look."""
        code = code_of(error)
        if code in GONE:
            raise CollectorUnavailable(f"the NVIDIA driver went away: {error}")
        if code in LOST:
            raise GpuLostError(str(error))
        if code in UNSUPPORTED:
            gpu.num_answered += 1
            self._skip(gpu, name, str(error))
            return True
        gpu.last_error = str(error)
        text = error_name(self._nvml, code)
        gpu.errors[text] = gpu.errors.get(text, 0) + 1
        if self._said.is_new(f"{gpu.index} {name} {code}"):
            logger.warning("GPU %d: %s failed: %s", gpu.index, name, error)
        return False

    def _skip(self, gpu: GpuQueryState, name: str, why: str) -> None:
        gpu.unsupported.add(name)
        if self._said.is_new(f"{gpu.index} {name}"):
            logger.info("GPU %d: %s is left out: %s", gpu.index, name, why)

    def _fields(self, gpu: GpuQueryState, part: str, fields: Mapping[int, tuple[Key, float]]) -> Numbers:
        numbers: Numbers = {}
        for number, _, value in self._field_values(gpu, part, fields):
            key, scale = fields[number]
            if key == ("recovery_action",):
                wanted = RecoveryAction.of_number(int(value))
                numbers |= {("recovery_action", action): float(action is wanted) for action in RecoveryAction}
            else:
                numbers[key] = value * scale
        return numbers

    def _field_values(
        self, gpu: GpuQueryState, part: str, fields: Iterable[int], num_links: int = 1
    ) -> list[tuple[int, int, float]]:
        """(field, link, value) of those that NVML knows; what it does not is not asked again.

        Raises:
            NVMLError: of the call as a whole.
        """
        query = gpu.queries.get(part)
        if query is None:
            supported = (f for f in fields if f"field {f}" not in gpu.unsupported)
            query = FieldQuery(self._nvml, ((f, link) for f in supported for link in range(num_links)))
            gpu.queries[part] = query
        found: list[tuple[int, int, float]] = []
        known: set[int] = set()
        refused: dict[int, int] = {}
        for (number, link), (code, value) in zip(query.wanted, query.ask(gpu.handle), strict=True):
            if code == 0:
                known.add(number)
                if value is not None:
                    found.append((number, link, value))
            elif code in LOST:
                raise self._nvml.NVMLError(code)
            elif code in FIELD_UNSUPPORTED:
                refused[number] = code
        for number in refused.keys() - known:  # a link that is down may refuse what the others answer
            self._skip(gpu, f"field {number}", error_name(self._nvml, refused[number]))
            gpu.queries.pop(part, None)  # made anew without it
        return found

    def _gpm(self, gpu: GpuQueryState, at: float) -> Numbers:
        if gpu.gpm is None:
            gpu.gpm = GpmSampler(self._nvml, gpu.handle)
            if not gpu.gpm.supported:
                gpu.gpm = None
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.gpm.look(at)

    def _links(self, gpu: GpuQueryState) -> Numbers:
        """State, bytes and errors of all NVLinks: sums, and by link where something is wrong."""
        num_links = int(gpu.parts.get("slow fields", {}).get(("nvlinks",), 0))
        if not num_links:
            return {}
        numbers: Numbers = {("nvlinks_active",): 0.0}
        for link, active in self._of_links(gpu, num_links, "nvmlDeviceGetNvLinkState"):
            numbers[("nvlinks_active",)] += bool(active)
            numbers["nvlink_down", str(link)] = float(not active)
        for counter, error in NVLINK_ERRORS.items():
            for link, count in self._of_links(gpu, num_links, "nvmlDeviceGetNvLinkErrorCounter", counter):
                gpu.by_link[link, (ERRORS_SUM, error)] = count
        for number, link, value in self._field_values(gpu, f"fields of {num_links} links", LINK_FIELDS, num_links):
            key, scale = LINK_FIELDS[number]
            gpu.by_link[link, key] = value * scale  # of two fields for one key the later one counts
        for (link, key), value in gpu.by_link.items():
            numbers[key] = numbers.get(key, 0.0) + value
            if value and key[0] == ERRORS_SUM:
                numbers[ERRORS_BY_LINK, str(link), key[1]] = value
        return numbers

    def _of_links(
        self, gpu: GpuQueryState, num_links: int, function: str, *arguments: int
    ) -> Iterator[tuple[int, float]]:
        """(link, answer) of those links for which NVML knows it; where that is none, it is not asked again.

        Raises:
            NVMLError: of another kind.
        """
        name = f"{function}{arguments or ''}"
        if name in gpu.unsupported:
            return
        refused, num_answered = "", 0
        for link in range(num_links):
            try:
                answer = getattr(self._nvml, function)(gpu.handle, link, *arguments)
            except self._nvml.NVMLError as e:
                if code_of(e) not in FIELD_UNSUPPORTED:
                    raise
                refused = str(e)
            else:
                num_answered += 1
                yield link, float(answer)
        if not num_answered:
            self._skip(gpu, name, refused)

    def _processes(self, gpu: GpuQueryState) -> Numbers:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        gpu.processes = tuple(GpuProcess(p.pid, p.usedGpuMemory or 0) for p in found[:PROCESSES_MAX])
        return {("processes",): len(found)}
