"""`rolecall watch run --require-approval`: while this watch is the recovery leader, each plan requires approval.

It only restricts: mode `act` becomes `approve`, `observe` stays. It is refused while another watch acts without
approval, because it would have no effect.
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
        ConfigError: the job is only observed, or another watch acts without approval.
    """
    if job.recovery.mode == "observe":
        raise ConfigError(
            [
                (
                    "--require-approval: recovery.mode is observe in the job file, so no action is allowed; set it to "
                    "approve there"
                )
            ]
        )
    lease, taken = journal.lease(LEASE_NAME), journal.last(EventKind.LEASE_ACQUIRED)
    held = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    mode = taken.as_(LeaseAcquired).mode if taken is not None else "unknown"
    if lease is not None and held and mode != APPROVE:
        because = f"watch {lease.holder} holds the lease in mode {mode} and acts without approval"
        raise ConfigError(
            [f"--require-approval: {because}; stop it first, or start the job with recovery.mode: approve"]
        )
    return job.model_copy(update={"recovery": job.recovery.model_copy(update={"mode": APPROVE})})
