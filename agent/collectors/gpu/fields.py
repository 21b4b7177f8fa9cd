"""Field values: many numbers of a GPU in one NVML call, each with its own return code.

pynvml allocates a new ctypes array per call and accesses it member by member: half a millisecond for the 250 NVLink
fields of a GPU. This keeps the array and decodes it as one block of bytes. Layout: nvmlFieldValue_t of nvml.h, as
nvidia-ml-py declares it (a test compares).
"""

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

from rolecall.agent.collectors.gpu.nvml import FUNCTION_NOT_FOUND, NOT_AVAILABLE, Handle

ROW = struct.Struct("=IIqqIi8s")
"""Field, scope (for example a link), timestamp, latency, value type, return code, value."""
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
        self._request = b"".join(ROW.pack(f, scope, 0, 0, 0, NOT_ANSWERED, b"") for f, scope in self.wanted)
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
            for _, _, _, _, type_, refused, value in ROW.iter_unpack(self._rows.raw[: len(self._request)])
        ]


def number_of(type_: int, value: bytes) -> float | None:
    """Decodes the union's 8 bytes; None: NVML does not know the value, or its type is newer than this code."""
    if type_ >= len(_VALUES):
        return None
    number = _VALUES[type_].unpack_from(value)[0]
    return None if number == NOT_AVAILABLE else float(number)
