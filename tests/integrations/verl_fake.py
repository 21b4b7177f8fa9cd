"""Stand-ins for verl's replicas and its manager of weight updates, and for Ray. Nothing of verl is imported."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rolecall.integrations.verl_replacements import Replacements

RUNNING = {"pid": 0, "host": "127.0.0.1", "started_at": 0.0, "alive": True, "server": True}


@dataclass(eq=False)
class Replica:
    """`engine`: name of what runs; `mode`: as in verl."""

    replica_rank: int
    engine: str
    mode: str = "standalone"
    pid: int = 0
    config: Any = None
    resumes: bool = True

    @property
    def rollout_mode(self) -> str:
        return self.mode


@dataclass(eq=False)
class Manager:
    """verl's CheckpointEngineManager: which replicas an update reached."""

    replicas: list[Replica]
    backend: str = "nccl"
    updated: list[list[str]] = field(default_factory=list)
    error: Exception | None = None

    def add_replicas(self, replicas: list[Replica]) -> None:
        self.replicas.extend(replicas)

    def remove_replicas(self, replicas: list[Replica]) -> None:
        gone = set(replicas)
        self.replicas = [r for r in self.replicas if r not in gone]

    def update(self, replacements: Replacements) -> None:
        """One weight update, as `verl_engines` wraps it."""
        asyncio.run(replacements.before_update(self))
        self.updated.append([r.engine for r in self.replicas])
        if self.error is not None:
            error, self.error = self.error, None
            replacements.update_failed(self, error)
            return
        asyncio.run(replacements.after_update(self))


class Balancer:
    """Route of all replicas: the engines that get requests."""

    def __init__(self, manager: Manager) -> None:
        self.engines = {r.engine for r in manager.replicas}
        self.fails = False

    async def remove(self, replica: Replica) -> None:
        self._check()
        self.engines.discard(replica.engine)

    async def add(self, replica: Replica) -> None:
        self._check()
        self.engines.add(replica.engine)

    def _check(self) -> None:
        if self.fails:
            raise ConnectionError("the balancer is gone")


class FakeCluster:
    """`ended`: engines, in order. `fails`: what `start` raises."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.dead: set[str] = set()
        self.fails: Exception | None = None
        self.number = 0

    def instance(self, replica: Replica) -> str:
        return replica.engine

    def processes(self, replica: Replica) -> list[dict[str, Any]]:
        return [{**RUNNING, "pid": replica.pid, "alive": replica.engine not in self.dead}]

    def end(self, replica: Replica) -> None:
        self.ended.append(replica.engine)

    def start(self, old: Replica) -> Replica:
        if self.fails is not None:
            raise self.fails
        self.number += 1
        return Replica(old.replica_rank, f"new-{self.number}")


class Now:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class FakeJob:
    """Three standalone replicas of one manager. `threads`: what is to run in threads, not run yet."""

    manager: Manager
    cluster: FakeCluster
    balancer: Balancer
    now: Now
    threads: list[Callable[[], None]]
    replacements: Replacements

    def run_threads(self) -> None:
        while self.threads:
            self.threads.pop(0)()

    def update(self) -> None:
        self.manager.update(self.replacements)

    def phase(self, key: str) -> str:
        state = self.replacements.state(key)
        assert state is not None
        return str(state["phase"])


def fake_job(num_replicas: int = 3, **fields: Any) -> FakeJob:
    manager = Manager([Replica(n, f"e{n}", **fields) for n in range(num_replicas)])
    cluster, balancer, now, threads = FakeCluster(), Balancer(manager), Now(), list[Callable[[], None]]()
    replacements = Replacements(cluster, lambda _: balancer, lambda r: r.resumes, now, threads.append)
    return FakeJob(manager, cluster, balancer, now, threads, replacements)
