"""Rows of the metric catalogue: NICs, InfiniBand and RoCE, TCP."""

from rolecall.core.metric import Metric

NETWORK_METRICS: tuple[Metric, ...] = ()
