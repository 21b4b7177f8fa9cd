"""Rows of the metric catalogue: what the kernel log tells."""

from rolecall.core.metric import Metric

KERNEL_METRICS: tuple[Metric, ...] = ()
