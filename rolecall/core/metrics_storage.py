"""Rows of the metric catalogue: disks and file systems."""

from rolecall.core.metric import Metric

STORAGE_METRICS: tuple[Metric, ...] = ()
