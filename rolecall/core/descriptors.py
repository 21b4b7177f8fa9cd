"""Waiting for file descriptors of any number: `select.select` refuses those from 1024 on."""

import select
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(source: int | HasDescriptor, seconds: float) -> bool:
    """Whether `source` has something to read, or has ended, within `seconds`; of a pidfd, whether its process has."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
