"""Evidence kinds and detector names that consumers of a finding match on."""

from rolecall.core.diagnosis import Evidence

SETTLE = "settle"
"""Evidence that describes which further observation would settle a `cannot_tell`."""
ADVISES = "advice"
"""Evidence with advice more specific than the default for the fault class."""
GAIN = "slow_ratio"
"""Evidence whose `ratio` is the slowdown of the suspect relative to its peers."""

EXIT = "exit"
"""Evidence of a process exit. Its values include `signal` if a signal ended it, and `oom` if the OOM killer did."""

LOG_FILE = "log_file"
"""Evidence whose text is the path of the file that the standard error of an ended process went to, on its node."""

OF_GPU = "gpu"
"""Evidence that identifies a GPU of the suspect and compares its metrics with those of peers."""

PANEL = "panel:"
"""Name prefix of metric-panel detectors: they detect that a machine changed, not the cause."""

WRONG_NUMBERS_ONCE, WRONG_NUMBERS = "wrong_numbers_once", "wrong_numbers"
"""Detectors of microbatches with numbers that are not finite, or not those of another replica: of a single one; and of
several of one process, or of data and code."""
NOT_FINITE = "not_finite"
"""Detector of NaN and infinite training values of a job that rolecall did not start."""
FULL_DISK = "full_disk"
"""Detector of disks without space: its findings name a node, and no process is at fault."""
ORPHAN = "orphan"
"""Detector of engine processes without their server: its findings name a node and a process of no replica."""
SUSPENDED = "suspended"
"""Detector of processes that are stopped on purpose: nothing is replaced."""
COLLAPSE = "collapse"
"""Detector of policy collapse: its findings concern the run, not a machine."""


def settles(text: str) -> Evidence:
    return Evidence(kind=SETTLE, text=text)
