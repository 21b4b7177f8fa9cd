"""Field values: many numbers of a GPU in one call of NVML, each with a return code of its own.

pynvml makes the array that NVML fills anew for each call, and each member of it is an attribute that Python code looks up:
for the 250 fields of a GPU's links that is half a millisecond. What is asked again and again is asked with an array that is
kept, and read as a block of bytes. Layout: nvmlFieldValue_t of nvml.h, as nvidia-ml-py declares it (a test compares).
"""

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

from rolecall.agent.collectors.gpu.nvml import FUNCTION_NOT_FOUND, NOT_AVAILABLE, Handle

ROW = struct.Struct("=IIqqIi8s")
"""Field, scope (a link, say), time stamp, latency, type of the value, return code, value."""
_VALUES = tuple(struct.Struct(f"={letter}") for letter in "dIQQqiH")
"""By type of the value: double, unsigned int, unsigned long, unsigned long long, and signed and short ones."""
NOT_ANSWERED = 999
"""NVML_ERROR_UNKNOWN, before the call: a row that a driver leaves untouched is no answer."""


class FieldQuery:
    """The same fields, asked as often as one likes. One thread uses it."""

    def __init__(self, pynvml: Any, wanted: Iterable[tuple[int, int]]) -> None:
        """`wanted`: (field, scope)."""
        self.wanted = tuple(wanted)
        self._nvml = pynvml
        self._request = b"".join(ROW.pack(f, scope, 0, 0, 0, NOT_ANSWERED, b"") for f, scope in self.wanted)
        self._rows = ctypes.create_string_buffer(len(self._request) or 1)

    def ask(self, gpu: Handle) -> list[tuple[int, float | None]]:
        """(return code, number) of each, in order; no number where NVML does not know it.

        Raises:
            NVMLError: of the call as a whole.
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
    """Of the union's 8 bytes; None: NVML does not know it, or it is of a type newer than this."""
    if type_ >= len(_VALUES):
        return None
    number = _VALUES[type_].unpack_from(value)[0]
    return None if number == NOT_AVAILABLE else float(number)
