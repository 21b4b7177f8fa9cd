"""A trainer service of several ranks: every rank makes the calls that change the state, the first one answers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rolecall.agent.reporter import reporter
from rolecall.core.config.job import DeviceName, JobConfig, parse_job
from rolecall.core.errors import RolecallError
from rolecall.core.ids import ReplicaId
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.protocol.spawn import ActorSpec
from rolecall.rl_runtime.rank_processes import (
    RANKS_TIMEOUT_SECONDS,
    FurtherRanks,
    Next,
    RankStart,
    end_with_error,
)
from rolecall.rl_runtime.trainer.ranks import Ranks
from rolecall.rl_runtime.trainer.reduce import LOOPBACK, EpochStore
from rolecall.rl_runtime.trainer.service import TrainerService

TOLD: Final = frozenset(("join", "train_step", "copy_from", "load_checkpoint", "take_snapshot", "reset_step"))


class MultiRankTrainer:
    """In the process of the first rank. Has the methods of a trainer service."""

    def __init__(
        self,
        spawn: ActorSpec,
        job: JobConfig,
        ranks: FurtherRanks,
        *,
        address: str,
        injection: Callable[[], faults.Injection],
    ) -> None:
        """Returns when all ranks are ready. `injection`: makes an injection agreement."""
        self._store = EpochStore(LOOPBACK, RANKS_TIMEOUT_SECONDS)
        at = self._store.host, self._store.port
        self._ranks = ranks
        ranks.tell("begin", address, at)
        own = _ranks(job, 0, at, spawn.device)
        self._service = make_service(spawn, job, address=address, ranks=own, injection=injection)

    def promote(self, replica: ReplicaId, incarnation: int, secret: str) -> None:
        """A standby becomes `replica`, with all its ranks."""
        self._ranks.become(replica, incarnation)
        self._ranks.tell("take_name", replica, incarnation)
        self._service.promote(replica, incarnation, secret)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._service, name)
        return partial(self._by_all, name, method) if name in TOLD else method

    def _by_all(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            self._ranks.tell(name, *args)
            return method(*args)
        except RolecallError:
            raise  # every rank has it
        except Exception as e:  # noqa: BLE001 it is reported
            end_with_error(e)  # the other ranks may be in the middle of the call


def further_rank(start: RankStart, next_call: Next, _answer: Callable[[Any], None]) -> None:
    _, (address, at) = next_call()
    job = parse_job(start.job)
    service = make_service(
        start.spawn,
        job,
        address=address,
        ranks=_ranks(job, start.rank, at, start.spawn.device),
        injection=start.injection,
    )
    while True:
        name, args = next_call()
        try:
            getattr(service, name)(*args)
        except RolecallError:
            pass  # the first rank has the same, and answers


def make_service(
    spawn: ActorSpec, job: JobConfig, *, address: str, ranks: Ranks, injection: Callable[[], faults.Injection]
) -> TrainerService:
    """A trainer service with the checkpoints of fault injection. Ends this rank's start."""
    of_work = injection()
    service = TrainerService(
        spawn,
        job,
        address=address,
        ranks=ranks,
        on_microbatch=partial(of_work.factor, faults.MICROBATCH),
        on_bucket=partial(of_work.checkpoint, faults.BUCKET),
        on_stage=of_work.checkpoint,
        on_tensor=partial(injection().factor, faults.WEIGHTS),
    )
    reporter.enter_phase(Phase.WAIT)
    return service


def _ranks(job: JobConfig, rank: int, at: tuple[str, int], device: DeviceName) -> Ranks:
    host, port = at
    size, tensor = job.runtime.trainer_ranks, job.runtime.trainer_tensor_ranks
    return Ranks(rank, size, tensor=tensor, host=host, port=port, seconds=RANKS_TIMEOUT_SECONDS, device=device)
