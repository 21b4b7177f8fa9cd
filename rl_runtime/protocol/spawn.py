"""An actor's constructor argument: identity, place, and the secret that proves it. Frozen and picklable."""

from dataclasses import dataclass
from pathlib import Path

from rolecall.core.config.job import DeviceName, JobConfig
from rolecall.core.ids import NodeId, ReplicaId, RunId, split_replica
from rolecall.core.rundir import RunDir, registration_secret

NAMESPACE = "rolecall"
"""Ray namespace of all actors."""
START_FACTOR = 2.0
"""Of `detector.first_unit_seconds`, until the runtime gives up a start. A watch judges a start earlier, and by the CPU
time that it got: on a busy machine a healthy one takes longer. This ends those that no watch sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """First argument of every actor's constructor."""

    run_dir: str
    run_id: RunId
    replica: ReplicaId
    incarnation: int
    node: NodeId
    secret: str  # registration_secret of (replica, rank 0, incarnation)
    database_url: str
    device: DeviceName = "cpu"  # of a role that computes
    gpus: tuple[str, ...] = ()  # of a hybrid, whose two actors see the same ones; of others Ray decides

    def __repr__(self) -> str:
        # The secret must not reach any log: Ray prints arguments of failed calls.
        return f"Spawn({self.replica}#{self.incarnation} on {self.node})"

    @property
    def run(self) -> RunDir:
        return RunDir(Path(self.run_dir))


def start_seconds(job: JobConfig) -> float:
    """Until the runtime gives up a start."""
    return START_FACTOR * job.detector.first_unit_seconds


def actor_name(run_id: str, replica: str, incarnation: int) -> str:
    """`demo-x`, `rollout/1`, 2 -> `demo-x:rollout-1:2`."""
    role, index = split_replica(replica)
    return f"{run_id}:{role}-{index}:{incarnation}"


def make_spawn(
    run: RunDir,
    replica: ReplicaId,
    incarnation: int,
    node: NodeId,
    *,
    database_url: str | None = None,
    device: DeviceName = "cpu",
    gpus: tuple[str, ...] = (),
) -> ActorSpec:
    """The spec of one incarnation, of rank 0; its secret is derived from the run's token."""
    return ActorSpec(
        run_dir=str(run.path),
        run_id=run.run_id,
        replica=replica,
        incarnation=incarnation,
        node=node,
        secret=registration_secret(run.token(), replica, 0, incarnation),
        database_url=database_url or run.database_url,
        device=device,
        gpus=gpus,
    )
