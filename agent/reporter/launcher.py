"""Which rank of which job a process is, from the environment that its launcher gave it. Pure.

    launcher                       rank           world size     local rank      run
    torchrun, Kubeflow, verl       RANK           WORLD_SIZE     LOCAL_RANK      TORCHELASTIC_RUN_ID
    srun                           SLURM_PROCID   SLURM_NTASKS   SLURM_LOCALID   SLURM_JOB_ID
    Ray                            -              -              -               RAY_JOB_ID

torchrun's variables come first: it may itself be a task of srun or run inside an actor of Ray. Arguments override
everything; then ROLECALL_ROLE, ROLECALL_REPLICA and ROLECALL_RANK, which a job's script, an `env_vars` of a Ray runtime
environment or a pod can set. A process without a launcher is rank 0 of 1; an actor of Ray must say its rank.
Standard library only: training processes import this.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.ids import split_replica

DEFAULT_ROLE = "trainer"
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"),
)
LAUNCHERS = tuple(row[0] for row in _LAUNCHERS)
"""Those whose children are the ranks."""
_RENDEZVOUS = {
    "torchrun": (("MASTER_ADDR", "MASTER_PORT"), ":"),
    "srun": (("SLURM_JOB_ID", "SLURM_STEP_ID"), "."),
}
"""Variables whose values tell a job from others on its nodes; the agent's rules (discovery.py) use the same text."""
_RAY_JOB = "RAY_JOB_ID"
_UNNAMED = ("", "none", "default")
"""What torchrun writes as run id and as role when none is given."""


class RankUnknown(Exception):
    """The environment does not tell this process's rank; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedProcess:
    replica: str
    rank: int
    launcher: str = ""
    run_id: str = ""
    rendezvous: str = ""  # the same in all ranks of the job, and in no other job on its nodes; empty: unknown
    lighthouse: str = ""  # of torchft: the same in all replicas of the job, each of which has a rendezvous of its own
    world_size: int | None = None
    local_rank: int | None = None

    def detail(self) -> dict[str, str]:
        """What is known beyond replica and rank, as texts."""
        known = {
            "launcher": self.launcher,
            "job": self.run_id,
            "rendezvous": self.rendezvous,
            "lighthouse": self.lighthouse,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
        }
        return {k: str(v) for k, v in known.items() if v not in (None, "")}


def launched_process(
    environ: Mapping[str, str],
    *,
    role: str | None = None,
    replica: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    run_id: str | None = None,
) -> LaunchedProcess:
    """Arguments override the environment.

    Raises:
        RankUnknown: an actor of Ray, whose rank only its code knows.
        InvalidId: the role or replica has an invalid name.
    """
    name, found_rank, size, local, job = next(
        (row for row in _LAUNCHERS if _number(environ, row[1]) is not None), ("", "", "", "", "")
    )
    if not name and _RAY_JOB in environ:
        name, job = "ray", _RAY_JOB
    if rank is None:
        rank = _number(environ, "ROLECALL_RANK")
    if rank is None:
        rank = _number(environ, found_rank)
    if rank is None:
        if name == "ray":
            raise RankUnknown("an actor of Ray has no rank: give reporter.start(rank=...) or set ROLECALL_RANK")
        rank = 0
    if role is None:
        named = environ.get("ROLE_NAME", "").lower()
        role = environ.get("ROLECALL_ROLE") or (DEFAULT_ROLE if named in _UNNAMED else named)
    replica = replica or environ.get("ROLECALL_REPLICA") or f"{role}/0"
    split_replica(replica)
    found_run = environ.get(job, "")
    variables, between = _RENDEZVOUS.get(name, ((), ""))
    values = [environ.get(variable, "") for variable in variables]
    return LaunchedProcess(
        replica=replica,
        rank=rank,
        launcher=name,
        run_id=run_id if run_id is not None else "" if found_run in _UNNAMED else found_run,
        rendezvous=between.join(values) if all(values) else "",
        lighthouse=environ.get("TORCHFT_LIGHTHOUSE", ""),
        world_size=_number(environ, size) if world_size is None else world_size,
        local_rank=_number(environ, local) if local_rank is None else local_rank,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None
