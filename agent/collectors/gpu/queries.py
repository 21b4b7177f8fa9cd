"""Polls one GPU with all NVML calls, each of which may fail alone.

A call that a GPU or driver does not support is logged once and skipped for that GPU from then on. Other errors are
counted and retried. Results are kept by call, so that a failing call removes only its own numbers.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable, LoggedOnce
from rolecall.agent.collectors.gpu.gpm import GpmSampler
from rolecall.agent.collectors.gpu.nvml import (
    FIELD_UNSUPPORTED,
    GONE,
    LOST,
    UNSUPPORTED,
    FieldQuery,
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
"""Per GPU; further ones are left out."""
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
ERRORS_SUM = "nvlink_errors_total"
ERRORS_BY_LINK = "nvlink_link_errors_total"


class GpuLostError(Exception):
    """No call on this GPU succeeds; the text says why."""


@dataclass(slots=True)
class GpuQueryState:
    """One GPU's results. `parts`: numbers by call. A changed result replaces the object, so that callers detect changes
    by identity. A failing call removes its part."""

    index: int
    handle: Handle = None
    parts: dict[str, Numbers] = field(default_factory=dict)
    pids: tuple[int, ...] = ()  # of processes with a context on it
    unsupported: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)  # other failures, by name of the error
    slow_at: float | None = None  # when the slow calls are due; None: not yet made
    by_link: dict[tuple[int, Key], float] = field(default_factory=dict)  # a link that is down keeps its counts
    gpm: GpmSampler | None = None
    queries: dict[str, FieldQuery] = field(default_factory=dict)  # by the call that makes them
    num_answered: int = 0  # calls of this poll that NVML answered, also with "not supported"
    last_error: str = ""

    def forget(self) -> None:
        """The GPU is lost: after a reset it may support other calls, and its counters restart."""
        self.parts.clear()
        self.pids = ()
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
    """Owned by one thread. The slow calls of `num_gpus` GPUs are spread over `slow_seconds`."""

    def __init__(self, pynvml: Any, logged: LoggedOnce, *, num_gpus: int, slow_seconds: float) -> None:
        self._nvml, self._logged = pynvml, logged
        self._errors = errors_of(pynvml)
        self._num_gpus, self._slow_seconds = num_gpus, slow_seconds

    def poll(self, gpu: GpuQueryState, at: float) -> None:
        """Raises:
        GpuLostError: no call succeeds, or NVML reports it.
        CollectorUnavailable: the driver was unloaded.
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
            # Spread over the interval, so that only the first poll makes the slow calls of all GPUs.
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
        """Makes the first of `calls` that this GPU and driver support; replaces its previous result.

        Raises:
            GpuLostError: NVML says that the GPU is lost.
            CollectorUnavailable: the driver was unloaded.
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
        """Whether to skip this call from now on. Any other failure is counted and retried at the next poll."""
        code = code_of(error)
        if code in GONE:
            raise CollectorUnavailable(f"the NVIDIA driver was unloaded: {error}")
        if code in LOST:
            raise GpuLostError(str(error))
        if code in UNSUPPORTED:
            gpu.num_answered += 1
            self._skip(gpu, name, str(error))
            return True
        gpu.last_error = str(error)
        text = error_name(self._nvml, code)
        gpu.errors[text] = gpu.errors.get(text, 0) + 1
        if self._logged.is_new(f"{gpu.index} {name} {code}"):
            logger.warning("GPU %d: %s failed: %s", gpu.index, name, error)
        return False

    def _skip(self, gpu: GpuQueryState, name: str, why: str) -> None:
        gpu.unsupported.add(name)
        if self._logged.is_new(f"{gpu.index} {name}"):
            logger.info("GPU %d: %s skipped: %s", gpu.index, name, why)

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
        """(field, link, value) of the supported fields; unsupported ones are not queried again.

        Raises:
            NVMLError: the call as a whole failed.
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
        for number in refused.keys() - known:  # a link that is down may reject fields that others support
            self._skip(gpu, f"field {number}", error_name(self._nvml, refused[number]))
            gpu.queries.pop(part, None)  # rebuilt without it
        return found

    def _gpm(self, gpu: GpuQueryState, at: float) -> Numbers:
        if gpu.gpm is None:
            gpu.gpm = GpmSampler(self._nvml, gpu.handle)
            if not gpu.gpm.supported:
                gpu.gpm = None
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.gpm.sample(at)

    def _links(self, gpu: GpuQueryState) -> Numbers:
        """State, bytes and errors of all NVLinks: sums, and per link where errors are nonzero."""
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
            gpu.by_link[link, key] = value * scale  # if two fields have one key, the later one wins
        for (link, key), value in gpu.by_link.items():
            numbers[key] = numbers.get(key, 0.0) + value
            if value and key[0] == ERRORS_SUM:
                numbers[ERRORS_BY_LINK, str(link), key[1]] = value
        return numbers

    def _of_links(
        self, gpu: GpuQueryState, num_links: int, function: str, *arguments: int
    ) -> Iterator[tuple[int, float]]:
        """(link, result) of the links that support the call; if none does, it is not made again.

        Raises:
            NVMLError: any other failure.
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
        gpu.pids = tuple(p.pid for p in found[:PROCESSES_MAX])
        return {("processes",): len(found)}
