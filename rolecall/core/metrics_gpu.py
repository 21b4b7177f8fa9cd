"""Rows of the metric catalogue: GPUs, read through NVML."""

from rolecall.core.metric import Metric

GPU_METRICS: tuple[Metric, ...] = ()
