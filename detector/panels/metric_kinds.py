"""What a metric measures, by the words of its name: which of its values can be compared, with what."""

import re

OWN_WORK = frozenset({"compute", "forward", "backward", "fwd", "bwd", "kernel", "gemm", "matmul"})
WAITING = frozenset(
    {"recv", "send", "wait", "reduce", "gather", "scatter", "broadcast", "comm", "idle", "sync", "alltoall"}
)
NOT_SECONDS = frozenset({"ratio", "percent", "util", "utilization", "flops", "bytes", "count", "rate", "active"})
"""Parts of a metric's name. A metric is own work if it has one of the first set, or counts busy seconds, and has none
of the others. A busy disk is not work."""

STATE = frozenset(
    {"mem", "memory", "memfree", "memtotal", "cached", "buffers", "dirty", "free", "avail", "available", "used", "size"}
    | {"swap", "slab", "filesystem", "files", "inodes", "uptime", "boot", "rss", "pss", "vms", "info"}
)
"""What a machine holds, not what it does: healthy peers that do equal work differ in it by any factor."""


def is_own_work(metric: str) -> bool:
    """Seconds of a machine's own work: equal among peers."""
    words = _words(metric)
    return (bool(words & OWN_WORK) or {"busy", "seconds"} <= words) and not words & (WAITING | NOT_SECONDS)


def has_equal_levels(metric: str) -> bool:
    """Whether healthy peers have about the same level: neither state nor waiting for others."""
    return not _words(metric) & (STATE | WAITING)


def _words(metric: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", metric).lower()))
