"""The supervisor's operations on actors: a Protocol and its Ray implementation. Every call has a deadline."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ActuatorError, DeadlineExceeded
from rolecall.core.ids import ReplicaId, split_replica
from rolecall.core.membership import STANDBY_ROLES
from rolecall.rl_runtime.device import num_gpus
from rolecall.rl_runtime.protocol.spawn import NAMESPACE, ActorSpec, actor_name

REASON_LENGTH_MAX = 600
CONCURRENCY_GROUPS = {"work": 1, "control": 4, "write": 1}
"""One `work` thread keeps work in order; `control` threads answer in the meantime. `write` may wait for a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorProcess:
    """A process that answered."""

    pid: int
    start_ticks: int


class ActorOperations(Protocol):
    """Thread-safe. Actors are named; a name is never used twice."""

    def start(self, spawn: ActorSpec, seconds: float) -> ActorProcess:
        """Creates an actor and waits until it is ready. Raises ActuatorError or DeadlineExceeded."""

    def promote(self, actor: str, replica: ReplicaId, incarnation: int, secret: str, seconds: float) -> None:
        """Lets a standby become `replica`. Raises ActuatorError or DeadlineExceeded."""

    def renew(self, lease_seconds: float) -> None:
        """Renews the lease of every actor that was started; waits for none of them."""

    def stop(self, actor: str, seconds: float) -> None:
        """Asks an actor to finish. Raises ActuatorError or DeadlineExceeded."""

    def forget(self, actor: str) -> None:
        """The process is dead or being killed: stops renewing its lease and removes it from Ray."""


class RayActorOperations:
    """Named, detached actors; Ray's own restarts and retries are 0 because recovery does the replacement."""

    def __init__(self, job: JobConfig, classes: Callable[[], Mapping[str, Any]]) -> None:
        """`classes`: creates role -> actor class; called once, after Ray is connected."""
        self._job, self._make_classes = job.model_dump(mode="json"), classes
        self._runtime = job.runtime
        self._classes: Mapping[str, Any] | None = None
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()

    def start(self, spawn: ActorSpec, seconds: float) -> ActorProcess:
        name = actor_name(spawn.run_id, spawn.replica, spawn.incarnation)
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": 0 if spawn.gpus else num_gpus(spawn.replica, spawn.device, self._runtime),
            "resources": {str(spawn.node): 1},
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        handle = self._class(spawn.replica).options(**options).remote(spawn, self._job)
        with self._lock:
            self._handles[name] = handle
        what = f"{spawn.replica} to start (see detector.first_unit_seconds)"
        pid, start_ticks = self._get(handle.ready.remote(), seconds, what)
        return ActorProcess(pid=int(pid), start_ticks=int(start_ticks))

    def promote(self, actor: str, replica: ReplicaId, incarnation: int, secret: str, seconds: float) -> None:
        call = self._handle(actor).promote.remote(replica, incarnation, secret)
        self._get(call, seconds, f"{actor} to become {replica}")

    def renew(self, lease_seconds: float) -> None:
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            handle.renew.remote(lease_seconds)

    def stop(self, actor: str, seconds: float) -> None:
        self._get(self._handle(actor).stop.remote(), seconds, f"{actor} to stop")

    def forget(self, actor: str) -> None:
        import ray

        with self._lock:
            handle = self._handles.pop(actor, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def _handle(self, actor: str) -> Any:
        with self._lock:
            handle = self._handles.get(actor)
        if handle is None:
            raise ActuatorError(f"{actor}: no such actor")
        return handle

    def _class(self, replica: ReplicaId) -> Any:
        import ray

        with self._lock:
            if self._classes is None:
                self._classes = self._make_classes()
        role, _ = split_replica(replica)
        found = self._classes[STANDBY_ROLES.get(role, role)]
        if isinstance(found, ray.actor.ActorClass):
            return found
        return ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(found)

    def _get(self, reference: Any, seconds: float, waited_for: str) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(waited_for=waited_for, seconds=seconds) from None
        except ray.exceptions.RayError as e:
            raise ActuatorError(f"waiting for {waited_for}: {type(e).__name__}: {_reason(str(e))}") from e


def _reason(text: str) -> str:
    """The relevant part of Ray's message: the end of a traceback, or the first line without the general advice."""
    if "Traceback" in text or 'File "' in text:
        return text[-REASON_LENGTH_MAX:].strip()
    return text.strip().partition("\n")[0][:REASON_LENGTH_MAX]


def runtime_classes() -> Mapping[str, Any]:
    """The actor classes of the runtime, by role."""
    from rolecall.rl_runtime.cluster.actors import ControllerActor, RewardActor, RolloutActor, TrainerActor

    return {"trainer": TrainerActor, "rollout": RolloutActor, "reward": RewardActor, "controller": ControllerActor}
