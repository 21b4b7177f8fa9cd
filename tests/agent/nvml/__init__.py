"""Our own stand-in for NVIDIA's management library: `nvml.c`, built with gcc, and the machine that it shows.

The real `pynvml` runs on it through ctypes. Numbers from it are never measurements of a GPU.
"""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
TIMED_SOURCE = SOURCE.with_name("timed.c")
LIBRARY_NAME = "libnvidia-ml.so.1"
STATE_VARIABLE = "STANDIN_NVML_STATE"
TIME_VARIABLE = "STANDIN_NVML_TIME"
NUM_LINKS = 18
NOT_SUPPORTED = "@3"


def build(folder: Path, *, without: tuple[str, ...] = (), timed: bool = False) -> Path:
    """The library, in `folder`; `without`: symbols that it lacks, as an old driver's does; `timed`: it counts its own
    CPU time, see `timed.c`."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is not installed")
    library = folder / LIBRARY_NAME
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    options += [f"-D{symbol}=absent_{symbol}" for symbol in without]
    sources = [str(SOURCE)]
    if timed:
        options += ["-finstrument-functions", f"-finstrument-functions-exclude-function-list={','.join(_INNER)}"]
        sources.append(str(TIMED_SOURCE))
    subprocess.run([gcc, *options, f"-Wl,-soname,{LIBRARY_NAME}", *sources, "-o", str(library)], check=True)
    return library


_INNER = (
    *("by_key", "reread", "find", "number", "sleep_ms", "gpu_of", "enter", "text_of", "uuid_of", "plain", "coder"),
    *("mig_of", "find_mig", "mig_number", "enter_mig", "mig_id"),
)
"""Functions of `nvml.c` that are not exported: their time is that of who calls them."""


def read_time(file: Path) -> float:
    """Seconds of CPU that a timed library has taken, from the file that TIME_VARIABLE named."""
    return int.from_bytes(file.read_bytes()[:8], sys.byteorder) / 1e9


def healthy(num_gpus: int) -> dict[str, object]:
    """A node of GPUs like an H100's with NVLink 4, all well and half busy, in NVML's own units."""
    fields: dict[str, object] = {f"field.{n}": 0 for n in (74, 75, 76, 77, 79, 269, 270, 271, 169, 173, 176, 179, 180)}
    fields |= {f"field.{n}": 1 << 20 for n in (138, 139)}  # KiB on each link
    fields |= {"field.82": 51, "field.197": 10**12, "field.198": 2 * 10**12, "field.230": 0, "field.91": NUM_LINKS}
    gpm = {1: 99.5, 2: 80.0, 3: 40.0, 5: 55.0, 10: 30.0, 11: 0.0, 12: 5.0, 13: 1.0, 20: 100.0, 21: 200.0}
    return {
        "count": num_gpus,
        "driver": "575.57.08",
        "Name": "NVIDIA Stand-in 80GB",
        "UtilizationRates": 87,
        "UtilizationRates.memory": 42,
        "MemoryInfo.total": 80 << 30,
        "MemoryInfo.used": 60 << 30,
        "MemoryInfo.reserved": 1 << 30,
        "PowerUsage": 512_345,
        "EnforcedPowerLimit": 700_000,
        "TotalEnergyConsumption": 123_456_789_000,
        "Temperature": 47,
        "ClockInfo.sm": 1755,
        "ClockInfo.mem": 2619,
        "MaxClockInfo.sm": 1980,
        "CurrentClocksEventReasons": 0,
        "CurrentClocksThrottleReasons": 0,
        "EncoderUtilization": 0,
        "DecoderUtilization": 0,
        "CurrPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "PcieReplayCounter": 0,
        "MigMode": 0,
        "TotalEccErrors.0.0": 0,
        "TotalEccErrors.1.0": 0,
        "TotalEccErrors.0.1": 3,
        "TotalEccErrors.1.1": 0,
        "SramEccErrorStatus.threshold": 0,
        "RemappedRows.corrected": 0,
        "GpuFabricInfoV.state": 3,
        "GpuFabricInfoV.healthMask": 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8,  # every fault known and not there
        "NvLinkErrorCounter": 1,
        "gpm": 1,
        **fields,
        **{f"gpm.{number}": value for number, value in gpm.items()},
        "gpm.60": 1000.0,
        "gpm.61": 2000.0,
    }


class Machine:
    """The state that the stand-in shows. Keys as in `nvml.c`; `gpu=None`: of all GPUs, or of the machine."""

    def __init__(self, path: Path, num_gpus: int = 8) -> None:
        self.path = path
        self._state = healthy(num_gpus)
        self._write()

    def set(self, changes: Mapping[str, object], gpu: int | None = None) -> None:
        prefix = "" if gpu is None else f"{gpu}."
        self._state |= {prefix + key: value for key, value in changes.items()}
        self._write()

    def unset(self, *keys: str, gpu: int | None = None) -> None:
        for key in keys:
            del self._state[key if gpu is None else f"{gpu}.{key}"]
        self._write()

    def show(self, state: dict[str, object]) -> None:
        """Another machine from now on: one that was recorded, say."""
        self._state = dict(state)
        self._write()

    def event(self, gpu: int, data: int, event_type: int = 0x8) -> None:
        """An event of the driver: type 0x8 is an XID, and `data` its code."""
        seq = int(str(self._state.get(f"{gpu}.event_seq", 0))) + 1
        self.set({"event_seq": seq, "event_type": event_type, "event_data": data}, gpu)

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{key}={value}\n" for key, value in self._state.items()))
        new.rename(self.path)


@contextmanager
def shown_by(machine: Machine) -> Iterator[Machine]:
    """`pynvml` of this process finds no library but the one that a collector names, and that one shows `machine`."""
    pynvml: Any = importlib.import_module("pynvml")
    previous = os.environ.get(STATE_VARIABLE)

    def forget() -> None:
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

    forget()
    os.environ[STATE_VARIABLE] = str(machine.path)
    try:
        yield machine
    finally:
        forget()
        if previous is None:
            del os.environ[STATE_VARIABLE]
        else:
            os.environ[STATE_VARIABLE] = previous
