"""NVML through nvidia-ml-py (module `pynvml`): initialization and the meaning of its return codes.

`pynvml` binds each function at its first call: a function that an old driver lacks raises FunctionNotFound only there,
so each call degrades alone. It is imported only here, when a collector first reads: an agent without GPUs does not need
the package. Several collectors may hold NVML open at once; NVML counts references."""

import ctypes
import importlib
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable

UNSUPPORTED = frozenset({3, 4, 13, 25, 26})
"""NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED: a retry gives the same
result."""
FIELD_UNSUPPORTED = UNSUPPORTED | {2}
"""For field values also INVALID_ARGUMENT: the driver is too old for the field."""
LOST = frozenset({15, 16, 28})
"""GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND: no other call on this GPU will succeed."""
GONE = frozenset({1, 9, 18})
"""UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH: the driver was unloaded or replaced."""
TIMEOUT, FUNCTION_NOT_FOUND = 10, 13
NOT_AVAILABLE = (1 << 64) - 1
"""Marks an unknown number although the return code says success."""

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
        raise CollectorUnavailable("nvidia-ml-py is not installed: pip install 'rolecall[agent]'") from None
    with _lock:
        if library is not None and pynvml.nvmlLib is None:
            try:
                pynvml.nvmlLib = ctypes.CDLL(str(library))
            except OSError as e:
                raise CollectorUnavailable(f"NVML cannot be loaded from {library}: {e}") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            raise CollectorUnavailable(
                "no libnvidia-ml.so.1: no NVIDIA driver is installed (or not in this container)"
            ) from None
        except pynvml.NVMLError_DriverNotLoaded:
            raise CollectorUnavailable("the NVIDIA driver is installed but not loaded: modprobe nvidia") from None
        except pynvml.NVMLError_LibRmVersionMismatch:
            raise CollectorUnavailable(
                "NVML and the loaded NVIDIA driver differ in version: reboot after the upgrade"
            ) from None
        except pynvml.NVMLError as e:
            raise CollectorUnavailable(f"NVML initialization failed: {e}") from None
    return pynvml


def close_nvml(pynvml: Any) -> None:
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass  # the driver was unloaded: nothing to release


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


def error_name(pynvml: Any, code: int) -> str:
    """Name from a closed set, such as `gpu_is_lost` for 15; `other` for codes that pynvml does not know."""
    return _error_names(pynvml).get(code, "other")


_names: dict[int, str] = {}


def _error_names(pynvml: Any) -> dict[int, str]:
    if not _names:
        prefix = "NVML_ERROR_"
        _names.update({getattr(pynvml, n): n[len(prefix) :].lower() for n in dir(pynvml) if n.startswith(prefix)})
    return _names
