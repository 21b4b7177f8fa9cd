"""NVML through nvidia-ml-py (module `pynvml`): initialization, the meaning of its return codes, and field values.

`pynvml` binds each function at its first call: a function that an old driver lacks raises FunctionNotFound only there,
so each call degrades alone. It is imported only here, when a collector first reads: an agent without GPUs does not need
the package. Several collectors may hold NVML open at once; NVML counts references.

For field values pynvml allocates a new ctypes array per call and accesses it member by member: half a millisecond for
the 250 NVLink fields of a GPU. `FieldQuery` keeps the array and decodes it as one block of bytes."""

import contextlib
import ctypes
import importlib
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable

UNSUPPORTED = frozenset({3, 4, 13, 25, 26})
"""NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED: a retry is useless."""
FIELD_UNSUPPORTED = UNSUPPORTED | {2}
"""For field values also INVALID_ARGUMENT: the driver is too old for the field."""
LOST = frozenset({15, 16, 28})
"""GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND: no other call on this GPU will succeed."""
GONE = frozenset({1, 9, 18})
"""UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH: the driver was unloaded or replaced."""
TIMEOUT, FUNCTION_NOT_FOUND = 10, 13
NOT_AVAILABLE = (1 << 64) - 1
"""Marks an unknown number although the return code says success."""

_NO_NVML = {
    12: "no libnvidia-ml.so.1: no NVIDIA driver is installed (or not in this container)",
    9: "the NVIDIA driver is installed but not loaded: modprobe nvidia",
    18: "NVML and the loaded NVIDIA driver differ in version: reboot after the upgrade",
}
"""Why it cannot be initialized: LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH."""

_lock = threading.Lock()

Handle = Any
"""Opaque pynvml device handle."""


def open_nvml(library: Path | None = None) -> Any:
    """The initialized module `pynvml`; `close_nvml` undoes it.

    library: path of `libnvidia-ml.so.1` where the loader does not find it; the first path used in a process stays.

    Raises:
        CollectorUnavailable: the package, the library or the driver is missing; the text says which.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise CollectorUnavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    with _lock:
        if library is not None and pynvml.nvmlLib is None:
            try:
                pynvml.nvmlLib = ctypes.CDLL(str(library))
            except OSError as e:
                raise CollectorUnavailable(f"NVML cannot be loaded from {library}: {e}") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            raise CollectorUnavailable(_NO_NVML.get(code_of(e), f"NVML initialization failed: {e}")) from None
    return pynvml


def close_nvml(pynvml: Any) -> None:
    with contextlib.suppress(pynvml.NVMLError):  # the driver was unloaded: nothing to release
        pynvml.nvmlShutdown()


def errors_of(pynvml: Any) -> tuple[type[Exception], ...]:
    """Exceptions of one call that do not affect other calls.

    Besides NVMLError: some wrappers raise their own class for a missing function, and an nvidia-ml-py older than the
    call lacks the wrapper itself."""
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", None)
    return (pynvml.NVMLError, AttributeError, *(() if mismatch is None else (mismatch,)))


def code_of(error: Exception) -> int:
    """NVML's return code; FUNCTION_NOT_FOUND for the exceptions of `errors_of` without one.

    Raises:
        AttributeError: not from the module `pynvml`: a bug in rolecall.
    """
    if isinstance(error, AttributeError) and not isinstance(error.obj, ModuleType):
        raise error
    return int(getattr(error, "value", FUNCTION_NOT_FOUND))


@cache
def error_name(pynvml: Any, code: int) -> str:
    """Name from a closed set, such as `gpu_is_lost` for 15; `other` for codes that pynvml does not know."""
    prefix = "NVML_ERROR_"
    names = [name for name in dir(pynvml) if name.startswith(prefix) and getattr(pynvml, name) == code]
    return names[-1].removeprefix(prefix).lower() if names else "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuId:
    """`pci`: as the kernel log writes it, `0000:1a:00`; `pci_bus_id`: as NVML does. Unknown fields are "" or 0."""

    index: int
    uuid: str = ""
    name: str = ""
    pci: str = ""
    pci_bus_id: str = ""
    minor: int = 0

    @property
    def detail(self) -> dict[str, str]:
        return {"gpu": str(self.index), "uuid": self.uuid, "pci": self.pci}


def identify(pynvml: Any, index: int, handle: Handle) -> GpuId:
    """Raises: NVMLError."""
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    try:
        minor = pynvml.nvmlDeviceGetMinorNumber(handle)
    except pynvml.NVMLError:
        minor = index
    return GpuId(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        pci=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
        pci_bus_id=pci.busId,
        minor=minor,
    )


FIELD_ROW = struct.Struct("=IIqqIi8s")
"""Field, scope (for example a link), timestamp, latency, value type, return code, value: nvmlFieldValue_t of nvml.h, as
nvidia-ml-py declares it (a test compares)."""
_VALUES = tuple(struct.Struct(f"={letter}") for letter in "dIQQqiH")
"""By value type: double, unsigned int, unsigned long, unsigned long long, signed long long, int, unsigned short."""
NOT_ANSWERED = 999
"""NVML_ERROR_UNKNOWN, preset before the call: marks rows that the driver leaves untouched."""


class FieldQuery:
    """A repeatable query of the same fields. One thread uses it."""

    def __init__(self, pynvml: Any, wanted: Iterable[tuple[int, int]]) -> None:
        """`wanted`: (field, scope)."""
        self.wanted = tuple(wanted)
        self._nvml = pynvml
        self._request = b"".join(FIELD_ROW.pack(f, scope, 0, 0, 0, NOT_ANSWERED, b"") for f, scope in self.wanted)
        self._rows = ctypes.create_string_buffer(len(self._request) or 1)

    def ask(self, gpu: Handle) -> list[tuple[int, float | None]]:
        """(return code, number) of each field, in order; None where NVML does not know the number.

        Raises:
            NVMLError: the call as a whole failed.
        """
        if not self.wanted:
            return []
        function = getattr(self._nvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        if function is None:
            raise self._nvml.NVMLError(FUNCTION_NOT_FOUND)
        ctypes.memmove(self._rows, self._request, len(self._request))
        code = function(gpu, len(self.wanted), self._rows)
        if code != 0:
            raise self._nvml.NVMLError(code)
        return [
            (refused, None if refused else number_of(type_, value))
            for _, _, _, _, type_, refused, value in FIELD_ROW.iter_unpack(self._rows.raw[: len(self._request)])
        ]


def number_of(type_: int, value: bytes) -> float | None:
    """Decodes the union's 8 bytes; None: NVML does not know the value, or its type is newer than this code."""
    if type_ >= len(_VALUES):
        return None
    number = _VALUES[type_].unpack_from(value)[0]
    return None if number == NOT_AVAILABLE else float(number)
