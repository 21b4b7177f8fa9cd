"""NVML through nvidia-ml-py (module `pynvml`): opening it, and what its return codes mean.

`pynvml` binds each function at its first call: one that an old driver lacks raises FunctionNotFound there and nowhere
else, so every call degrades alone. It is imported here only, when a collector first reads: an agent without GPUs does
not need the package. Several collectors may hold NVML open at once, it counts.
"""

import ctypes
import importlib
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable

UNSUPPORTED = frozenset({3, 4, 13, 25, 26})
"""NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED: asking again gives the same
answer."""
FIELD_UNSUPPORTED = UNSUPPORTED | {2}
"""Of a field value, also INVALID_ARGUMENT: the driver is too old for the field."""
LOST = frozenset({15, 16, 28})
"""GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND: no other call on this GPU will succeed."""
GONE = frozenset({1, 9, 18})
"""UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH: the driver went away or was replaced below us."""
TIMEOUT, FUNCTION_NOT_FOUND = 10, 13
NOT_AVAILABLE = (1 << 64) - 1
"""A number that NVML does not know, where the return code says success."""

_lock = threading.Lock()

Handle = Any
"""An opaque device of pynvml."""


def open_nvml(library: Path | None = None) -> Any:
    """The module `pynvml`, initialised; `close_nvml` undoes it.

    library: of `libnvidia-ml.so.1`, where the loader would not find it; the first one named in a process stays.

    Raises:
        CannotRead: the package, the library or the driver is not there: which.
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
            raise CollectorUnavailable(f"NVML does not start: {e}") from None
    return pynvml


def close_nvml(pynvml: Any) -> None:
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass  # the driver went away before us: there is nothing to give back


def errors_of(pynvml: Any) -> tuple[type[Exception], ...]:
    """What a call may raise that the others do not suffer from.

    Beside NVMLError: some wrappers answer a missing function with a class of their own, and an nvidia-ml-py that is
    older than the call lacks the wrapper itself.
    """
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", None)
    return (pynvml.NVMLError, AttributeError, *(() if mismatch is None else (mismatch,)))


def code_of(error: Exception) -> int:
    """NVML's return code; FUNCTION_NOT_FOUND for the errors of `errors_of` that have none.

    Raises:
        AttributeError: it is of something else than the module `pynvml`: a defect of ours.
    """
    if isinstance(error, AttributeError) and not isinstance(error.obj, ModuleType):
        raise error
    return int(getattr(error, "value", FUNCTION_NOT_FOUND))


def error_name(pynvml: Any, code: int) -> str:
    """A closed set of names: `gpu_is_lost` of 15. `other`: none that pynvml knows."""
    return _error_names(pynvml).get(code, "other")


_names: dict[int, str] = {}


def _error_names(pynvml: Any) -> dict[int, str]:
    if not _names:
        prefix = "NVML_ERROR_"
        _names.update({getattr(pynvml, n): n[len(prefix) :].lower() for n in dir(pynvml) if n.startswith(prefix)})
    return _names
