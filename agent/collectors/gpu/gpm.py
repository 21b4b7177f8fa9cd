"""GPM: activity of a GPU's units since the last poll (SMs, tensor cores, memory, links). Hopper and later.

NVML computes the metrics from two counter samples at least 100 ms apart. Each poll keeps its sample for the next, so
that no poll sleeps. Each metric has its own return code. A spinning NCCL kernel shows here: SMs at 100 %, tensor cores
at 0."""

import ctypes
import struct
from typing import Any

from rolecall.agent.collectors.gpu.nvml import Handle
from rolecall.agent.collectors.gpu.nvml_calls import Key, Numbers

GPM_INTERVAL_SECONDS_MIN = 0.1
"""NVIDIA's documentation of nvmlGpmMetricsGet: samples closer than that give unreliable numbers."""

ROW = struct.Struct("=Iid24x")
"""nvmlGpmMetric_t: metric ID, return code, value, and three strings. Decoded as bytes, because member access through
ctypes costs thousands of attribute lookups a second for eight GPUs. A test compares the layout."""

_MEBI = float(1 << 20)
GPM_METRICS: dict[int, tuple[Key, float]] = {
    1: (("graphics_active_ratio",), 0.01),
    2: (("sm_active_ratio",), 0.01),
    3: (("sm_occupancy_ratio",), 0.01),
    5: (("tensor_active_ratio",), 0.01),
    10: (("dram_active_ratio",), 0.01),
    11: (("fp64_active_ratio",), 0.01),
    12: (("fp32_active_ratio",), 0.01),
    13: (("fp16_active_ratio",), 0.01),
    20: (("pcie_transmit_bytes_per_second",), _MEBI),
    21: (("pcie_receive_bytes_per_second",), _MEBI),
    60: (("nvlink_receive_bytes_per_second",), _MEBI),
    61: (("nvlink_transmit_bytes_per_second",), _MEBI),
}
"""NVML metric ID to key and scale (from percent or MiB/s)."""


class GpmSampler:
    """For one GPU, or one of its MIG instances. Do not call its methods when `supported` is False (A100 and older)."""

    def __init__(self, pynvml: Any, gpu: Handle, gpu_instance: int | None = None) -> None:
        """Raises: NVMLError."""
        self._nvml, self._gpu, self._gpu_instance = pynvml, gpu, gpu_instance
        self.supported = bool(pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice)
        self._samples: list[Any] = []  # the older one first; the two buffers alternate
        self._taken_at: float | None = None
        self._numbers: Numbers = {}
        self._query: Any = None
        if self.supported:
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
            self._query = pynvml.c_nvmlGpmMetricsGet_t()
            self._query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            self._query.numMetrics = len(GPM_METRICS)
            self._rows_at = ctypes.addressof(self._query) + type(self._query).metrics.offset
            for i, number in enumerate(GPM_METRICS):
                self._query.metrics[i].metricId = number

    def sample(self, at: float) -> Numbers:
        """Numbers since the last call; empty at the first, unchanged when called again too soon.

        Raises:
            NVMLError: taking the sample or the computation as a whole failed. The next call starts over.
        """
        before = self._taken_at
        if before is not None and at - before < GPM_INTERVAL_SECONDS_MIN:
            return self._numbers
        older, newer = self._samples
        self._taken_at, self._numbers = None, {}
        # Overwrites the older of the two samples.
        if self._gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, older)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._gpu_instance, older)
        self._samples = [newer, older]
        if before is not None:
            self._query.sample1, self._query.sample2 = newer, older
            self._nvml.nvmlGpmMetricsGet(self._query)
            rows = ROW.iter_unpack(ctypes.string_at(self._rows_at, len(GPM_METRICS) * ROW.size))
            for (_, code, value), (key, scale) in zip(rows, GPM_METRICS.values(), strict=True):
                if code == 0:
                    self._numbers[key] = value * scale
        self._taken_at = at
        return self._numbers

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []
