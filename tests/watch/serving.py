"""A job that tests of the watch replace replicas of."""

from collections.abc import Iterator
from typing import TypeVar

from rolecall.testing.watched_job import WatchedJob
from tests.support import eventually

Job = TypeVar("Job", bound=WatchedJob)


def serving(job: Job) -> Iterator[Job]:
    """Agent and replicas run. However the test ends, nothing of it is left running."""
    try:
        job.start_agent()
        eventually(lambda: job.agent_url, "the agent serves")
        job.start_replicas()
        yield job
    finally:
        job.close()
