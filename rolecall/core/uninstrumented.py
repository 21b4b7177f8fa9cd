"""Processes that know nothing of rolecall: they write no state page, so their samples hold what the kernel says alone.

The phase of such a sample is empty, and every field from the page is absent: 0 progress would be an accusation.
"""

from typing import Final

from rolecall.core.telemetry import ProcessSample

NO_PAGE: Final = ""
"""Phase in a sample of a process without a state page."""
UNCOUNTED: Final = 0
"""Incarnation of such a process: rolecall did not start it and cannot know how often it was started."""


def is_instrumented(sample: ProcessSample) -> bool:
    """Whether the page fields of this sample say anything."""
    return sample.phase != NO_PAGE
