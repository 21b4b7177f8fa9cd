"""Kinds of evidence and names of detectors that others look for in a finding."""

from rolecall.core.diagnosis import Evidence

SETTLE = "settle"
"""Evidence of this kind says what would settle a `cannot_tell`."""
ADVISES = "advice"
"""Evidence of this kind says what helps, where more is known than the class of the fault."""
GAIN = "slow_ratio"
"""Evidence of this kind holds `ratio`: how many times slower than its peers the suspect works."""

EXIT = "exit"
"""Evidence of this kind says how a process ended; `signal` among its values where one ended it, `oom` where that was
the kernel for want of memory."""

OF_GPU = "gpu"
"""Evidence of this kind says which GPU a suspect uses, and how its values compare with those of peers."""

PANEL = "panel:"
"""Names of detectors that begin with this look at panels of metrics: they tell that a machine changed, not what ails
it."""


COLLAPSE = "collapse"
"""The detector of a policy that collapsed: its findings are about the run, and about no machine."""


def settles(text: str) -> Evidence:
    return Evidence(kind=SETTLE, text=text)
