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


KINDS = {
    "state": STATE,
    "waiting": WAITING,
    "own_work": OWN_WORK,
    "hardware": frozenset(
        {"temperature", "temp", "celsius", "power", "watts", "clock", "clocks", "mhz", "hertz", "fan"}
    ),
    "usage": frozenset({"cpu", "util", "utilization", "percent", "ratio", "busy", "active", "load", "runnable"}),
    "traffic": frozenset(
        {"net", "network", "disk", "read", "write", "rx", "tx", "bytes", "kbps", "packets", "io", "pcie", "nvlink"}
        | {"pgpgin", "pgpgout", "infiniband", "ib"}
    ),
    "events": frozenset({"fork", "pswitch", "pgfault", "faults", "switches", "interrupts", "errors", "retransmits"}),
}
"""In this order: the first set that has a word of the name."""
ANY_KIND = "any"


def kind(metric: str) -> str:
    """Metrics of one kind have a prior in common."""
    words = _words(metric)
    return next((name for name, these in KINDS.items() if words & these), ANY_KIND)


def _words(metric: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", metric).lower()))
