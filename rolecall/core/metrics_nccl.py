"""Rows of the metric catalogue: NCCL: RAS and Inspector."""

from rolecall.core.metric import Metric

NCCL_METRICS: tuple[Metric, ...] = ()
