"""Processes of uninstrumented jobs: without a state page their samples hold kernel data only.

The phase of such a sample is empty, and every field from the page is absent: 0 progress would be an accusation.
"""

from typing import Final

from rolecall.core.telemetry import ProcessSample

NO_PAGE: Final = ""
"""Phase in a sample of a process without a state page."""
UNCOUNTED: Final = 0
"""Incarnation of such a process: rolecall did not start it and cannot know how often it was started."""


def is_instrumented(sample: ProcessSample) -> bool:
    """Whether the page fields of this sample are valid."""
    return sample.phase != NO_PAGE
