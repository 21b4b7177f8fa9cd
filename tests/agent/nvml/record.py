"""Writes the state of this machine's GPUs as the stand-in reads it: `python -m tests.agent.nvml.record > h100.state`.

What a GPU or driver does not know is recorded as its return code, so that a test replays an A100 or an old driver
without one. UUIDs and names of hosts are left out.
"""

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.gpu.nvml import FieldQuery, close_nvml, code_of, errors_of, open_nvml
from rolecall.agent.collectors.gpu.queries import (
    FAST_FIELDS,
    GPM_INTERVAL_SECONDS_MIN,
    GPM_METRICS,
    LINK_FIELDS,
    NVLINK_ERRORS,
    SLOW_FIELDS,
)
from rolecall.core.clock import Clock, SystemClock

PLAIN = (
    "PowerUsage",
    "EnforcedPowerLimit",
    "TotalEnergyConsumption",
    "CurrentClocksEventReasons",
    "PcieReplayCounter",
    "CurrPcieLinkGeneration",
    "MaxPcieLinkGeneration",
    "CurrPcieLinkWidth",
    "MaxPcieLinkWidth",
)
"""Calls that answer one number, without `nvmlDeviceGet`."""


def record(library: Path | None = None, clock: Clock | None = None) -> dict[str, object]:
    """Raises:
    CannotRead: no NVML, no driver.
    """
    nvml = open_nvml(library)
    try:
        count = nvml.nvmlDeviceGetCount()
        state: dict[str, object] = {"count": count, "driver": nvml.nvmlSystemGetDriverVersion()}
        for index in range(count):
            of_gpu = _record_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), clock or SystemClock())
            state |= {f"{index}.{key}": value for key, value in of_gpu.items()}
    finally:
        close_nvml(nvml)
    return state


def _record_gpu(nvml: Any, gpu: Any, clock: Clock) -> dict[str, object]:
    state: dict[str, object] = {"Name": nvml.nvmlDeviceGetName(gpu)}

    def note(symbol: str, read: Callable[[], dict[str, object]]) -> None:
        try:
            state.update(read())
        except errors_of(nvml) as e:
            state[f"error.nvml{symbol}"] = code_of(e)

    def call(name: str, *arguments: Any) -> Any:
        return getattr(nvml, f"nvmlDeviceGet{name}")(gpu, *arguments)

    def utilization() -> dict[str, object]:
        u = call("UtilizationRates")
        return {"UtilizationRates": u.gpu, "UtilizationRates.memory": u.memory}

    def memory() -> dict[str, object]:
        m = call("MemoryInfo", nvml.nvmlMemory_v2)
        return {f"MemoryInfo.{part}": getattr(m, part) for part in ("total", "used", "reserved")}

    def remapped() -> dict[str, object]:
        names = ("corrected", "uncorrected", "pending", "failure")
        return {f"RemappedRows.{n}": v for n, v in zip(names, call("RemappedRows"), strict=True)}

    def sram() -> dict[str, object]:
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        call("SramEccErrorStatus", ctypes.byref(status))
        return {"SramEccErrorStatus.threshold": status.bThresholdExceeded}

    def fabric() -> dict[str, object]:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        call("GpuFabricInfoV", ctypes.byref(info))
        return {f"GpuFabricInfoV.{part}": getattr(info, part) for part in ("state", "status", "healthMask")}

    for name in PLAIN:
        note(f"DeviceGet{name}", lambda name=name: {name: call(name)})  # type: ignore[misc]
    note("DeviceGetUtilizationRates", utilization)
    note("DeviceGetMemoryInfo_v2", memory)
    note("DeviceGetTemperatureV", lambda: {"Temperature": call("Temperature", 0)})
    note("DeviceGetClockInfo", lambda: {"ClockInfo.sm": call("ClockInfo", 1), "ClockInfo.mem": call("ClockInfo", 2)})
    note("DeviceGetMaxClockInfo", lambda: {"MaxClockInfo.sm": call("MaxClockInfo", 1)})
    note("DeviceGetEncoderUtilization", lambda: {"EncoderUtilization": call("EncoderUtilization")[0]})
    note("DeviceGetDecoderUtilization", lambda: {"DecoderUtilization": call("DecoderUtilization")[0]})
    note("DeviceGetMigMode", lambda: {"MigMode": call("MigMode")[0]})
    for kind, counter in itertools.product((0, 1), (0, 1)):
        note(
            "DeviceGetTotalEccErrors",
            lambda k=kind, c=counter: {f"TotalEccErrors.{k}.{c}": call("TotalEccErrors", k, c)},  # type: ignore[misc]
        )
    note("DeviceGetRemappedRows", remapped)
    note("DeviceGetSramEccErrorStatus", sram)
    note("DeviceGetGpuFabricInfoV", fabric)
    note("DeviceGetSupportedEventTypes", lambda: {"SupportedEventTypes": call("SupportedEventTypes")})
    note("GpmSampleGet", lambda: _gpm(nvml, gpu, clock))
    num_links = _fields(nvml, gpu, state)
    for link in range(num_links):
        note("DeviceGetNvLinkState", lambda k=link: {f"NvLinkState.{k}": call("NvLinkState", k)})  # type: ignore[misc]
        for error in NVLINK_ERRORS:
            note(
                "DeviceGetNvLinkErrorCounter",
                lambda k=link, e=error: {  # type: ignore[misc]
                    "NvLinkErrorCounter": 1,
                    f"NvLinkErrorCounter.{k}.{e}": call("NvLinkErrorCounter", k, e),
                },
            )
    return state


def _fields(nvml: Any, gpu: Any, state: dict[str, object]) -> int:
    """Adds field values to `state`; the number of NVLinks."""

    def ask(wanted: list[tuple[int, int]], name: Callable[[int, int], str]) -> None:
        for (number, link), (code, value) in zip(wanted, FieldQuery(nvml, wanted).ask(gpu), strict=True):
            state[name(number, link)] = f"{value:.0f}" if code == 0 and value is not None else f"@{code or 3}"

    ask([(number, 0) for number in (*FAST_FIELDS, *SLOW_FIELDS)], lambda number, _: f"field.{number}")
    links = str(state["field.91"])
    num_links = 0 if links.startswith("@") else int(links)
    if num_links:
        wanted = [(number, link) for number in LINK_FIELDS for link in range(num_links)]
        ask(wanted, lambda number, link: f"field.{number}.{link}")
    return num_links


def _gpm(nvml: Any, gpu: Any, clock: Clock) -> dict[str, object]:
    if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
        return {"gpm": 0}
    samples = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    query = nvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
    for i, number in enumerate(GPM_METRICS):
        query.metrics[i].metricId = number
    try:
        nvml.nvmlGpmSampleGet(gpu, samples[0])
        clock.sleep(2 * GPM_INTERVAL_SECONDS_MIN)
        nvml.nvmlGpmSampleGet(gpu, samples[1])
        query.sample1, query.sample2 = samples
        nvml.nvmlGpmMetricsGet(query)
        rows = [query.metrics[i] for i in range(len(GPM_METRICS))]
        return {"gpm": 1} | {f"gpm.{r.metricId}": repr(r.value) for r in rows if r.nvmlReturn == 0}
    finally:
        for sample in samples:
            nvml.nvmlGpmSampleFree(sample)


if __name__ == "__main__":
    print("".join(f"{key}={value}\n" for key, value in record().items()), end="")
