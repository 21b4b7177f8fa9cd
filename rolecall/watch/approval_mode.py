"""`rolecall watch run --require-approval`: for as long as this watch acts, a person approves each plan.

It takes away and never gives: a job whose file says `act` is asked about, one that says `observe` stays observed. And it
does not pretend: beside a watch that acts without asking, nobody would be asked.
"""

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ConfigError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import LeaseAcquired
from rolecall.recovery.loop import LEASE_NAME

APPROVE = "approve"


def with_required_approval(job: JobConfig, journal: Journal) -> JobConfig:
    """The job, with mode approve.

    Raises:
        ConfigError: the job is only observed, or another watch acts on it without asking.
    """
    if job.recovery.mode == "observe":
        raise ConfigError(
            [
                "--require-approval: recovery.mode is observe in the job file, so nothing may be done; set it to approve there"
            ]
        )
    lease, taken = journal.lease(LEASE_NAME), journal.last(EventKind.LEASE_ACQUIRED)
    held = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    mode = taken.as_(LeaseAcquired).mode if taken is not None else "unknown"
    if lease is not None and held and mode != APPROVE:
        because = f"watch {lease.holder} holds the lease in mode {mode}, and asks nobody"
        raise ConfigError(
            [f"--require-approval: {because}; end it first, or start the job with recovery.mode: approve"]
        )
    return job.model_copy(update={"recovery": job.recovery.model_copy(update={"mode": APPROVE})})
