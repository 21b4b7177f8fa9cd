"""A fleet in one process for tests of the loop: scripted deaths, hangs and slow answers, in simulated time.

`SimulatedLoop` jumps over every wait, so that minutes of a run take a second and the same seed gives the same run.
`SimulatedFleet` plays Ray (calls that die, hang and lose answers), the supervisor and recovery (replaces what is dead or hung)
around the controller's real code, a real journal and a real ledger. The fakes check what they are asked to do, and
keep what tests compare: which microbatches entered the optimizer, which tokens and rewards were trained on.
"""

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import GroupId, NodeId, ReplicaId, replica_id, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.protocol.clients import ReplicaExited
from rolecall.rl_runtime.protocol.messages import CommitRecord, EndReason, Holder, Manifest, Microbatch, PromptGroup
from rolecall.rl_runtime.tasks.task import group_start
from rolecall.testing.runtime_roles import (
    Collective,
    FakeReward,
    FakeRollout,
    FakeTrainer,
    FakeWeightPull,
    Member,
    ScriptedResponses,
    expected_logprob,
)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and nothing will ever happen")
        if not ready and timeout:
            self._clock.advance(timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a FakeClock that jumps to the next timer."""

    def __init__(self, clock: FakeClock) -> None:
        self._fake_clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._fake_clock.monotonic()


def run_simulated(clock: FakeClock, main: Coroutine[Any, Any, Any]) -> Any:
    """Runs `main` to its end in simulated time."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(clock)) as runner:
        return runner.run(main)


@dataclass(eq=False)
class SimulatedProcess:
    """One incarnation's process."""

    member: Member
    body: Any
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0

    def __post_init__(self) -> None:
        self.running.set()


class FakeClient:
    """Calls that take a moment, hang with their process, and lose their answer when it dies."""

    def __init__(self, fleet: "SimulatedFleet", process: SimulatedProcess, on_effect: Callable[[str], None]) -> None:
        self.replica, self.incarnation = process.member
        self._fleet, self._process, self._on_effect = fleet, process, on_effect

    async def call(self, method: str, *args: Any) -> Any:
        self._on_effect(f"before {self.replica} {method}")
        # What was sent goes on at the replica even when the caller dies: so it is the fleet's task, not the caller's.
        answer = await asyncio.shield(self._fleet.spawn(self._served(method, args)))
        self._on_effect(f"after {self.replica} {method}")
        return answer

    async def _served(self, method: str, args: tuple[Any, ...]) -> Any:
        process, fleet = self._process, self._fleet
        process.calls += 1
        await asyncio.sleep(fleet.rng.uniform(0.0005, 0.003))
        work = asyncio.ensure_future(self._perform(method, args))
        dies = asyncio.ensure_future(process.dead.wait())
        try:
            await asyncio.wait({work, dies}, return_when=asyncio.FIRST_COMPLETED)
            if process.dead.is_set():
                raise ReplicaExited(replica=self.replica, incarnation=self.incarnation, because="killed")
            return work.result()
        finally:
            for task in (work, dies):
                task.cancel()
            await asyncio.gather(work, dies, return_exceptions=True)

    async def _perform(self, method: str, args: tuple[Any, ...]) -> Any:
        await self._process.running.wait()
        result = getattr(self._process.body, method)(*args)
        if asyncio.iscoroutine(result):
            result = await result
        await self._process.running.wait()
        return result


BODIES: Mapping[str, Callable[["SimulatedFleet", Member], FakeTrainer | FakeRollout | FakeReward]] = {
    "trainer": FakeTrainer,
    "rollout": FakeRollout,
    "reward": FakeReward,
}


class SimulatedFleet:
    """All fake processes, and who looks after them. Time in seconds of the simulated loop."""

    def __init__(
        self,
        job: JobConfig,
        journal: Journal,
        seed: int,
        *,
        recovers: bool = True,
        answers: ScriptedResponses | None = None,
    ) -> None:
        self.job, self.journal, self.rng = job, journal, random.Random(seed)
        self.answers = answers or ScriptedResponses()
        self.recovers = recovers
        self.dead_seconds, self.hung_seconds, self.spawn_seconds = 0.2, 3.0, 1.0
        self.processes: dict[Member, SimulatedProcess] = {}
        self.collectives: dict[int, Collective] = {}
        self.checkpoints: dict[int, tuple[CommitRecord, str]] = {}
        self.optimizer: dict[int, dict[str, CommitRecord]] = {}
        """Step -> gradient digest -> commit: more than one digest only after going back to a checkpoint."""
        self.tokens_made: Counter[str] = Counter()
        """Request -> tokens generated for it by all engines: more than it has means that some were made again."""
        self.context_made: Counter[str] = Counter()
        """Of these, tokens that stand before the request's window: their engine was lost, and the controller with it."""
        self.offsets_asked: Counter[str] = Counter()
        """Request -> tokens that a controller had of it when it asked for more."""
        self.pulls: list[FakeWeightPull] = []
        self.started_over: list[str] = []
        """Requests that were submitted with fewer tokens than a controller had had of them."""
        self.contexts_lost: list[str] = []
        """Windows that were submitted without all that stands before them."""
        self.used: dict[GroupId, tuple[int, int, EndReason]] = {}
        """Group -> which tokens of its (last) sample were fresh when it was last trained on, and how they end."""
        self.problems: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(task.exception(), AssertionError):
            self.problems.append(str(task.exception()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- processes

    def start_all(self) -> None:
        counts = {"trainer": self.job.roles.trainer, "rollout": self.job.roles.rollout, "reward": self.job.roles.reward}
        for role, count in counts.items():
            for index in range(count):
                self.start(replica_id(role, index), 1)

    def start(self, replica: ReplicaId, incarnation: int) -> SimulatedProcess:
        """A process that is READY at once, wanted by the border."""
        because = "" if incarnation == 1 else "replaced"
        self.journal.set_desired(
            Desired(replica=replica, incarnation=incarnation, node=NodeId("node-0"), because=because)
        )
        process = SimulatedProcess((replica, incarnation), None)
        self.processes[process.member] = process
        process.body = BODIES[split_replica(replica)[0]](self, process.member)
        self.journal.set_actual(self._actual(process.member, ReplicaState.READY))
        return process

    def _actual(self, member: Member, state: ReplicaState, because: str = "") -> Actual:
        return Actual(replica=member[0], incarnation=member[1], node=NodeId("node-0"), state=state, because=because)

    def newest(self, replica: str) -> SimulatedProcess:
        return max((p for m, p in self.processes.items() if m[0] == replica), key=lambda p: p.member[1])

    def kill(self, replica: str) -> SimulatedProcess:
        """SIGKILL."""
        process = self.newest(replica)
        process.body.die()
        process.dead.set()
        process.running.set()
        self.spawn(self._recover(process, self.dead_seconds))
        return process

    def hang(self, replica: str) -> SimulatedProcess:
        """SIGSTOP. Recovery, if it works, kills and replaces it after a while."""
        process = self.newest(replica)
        process.running.clear()
        self.spawn(self._recover(process, self.hung_seconds))
        return process

    def resume(self, replica: str) -> None:
        """SIGCONT: it goes on where it was, and answers what it was asked meanwhile."""
        self.newest(replica).running.set()

    async def _recover(self, process: SimulatedProcess, seconds: float) -> None:
        replica, incarnation = process.member
        if not self.recovers:
            return
        await asyncio.sleep(seconds * self.rng.uniform(0.5, 1.5))
        if process.running.is_set() and not process.dead.is_set():
            return  # it came to itself
        wanted = Desired(replica=replica, incarnation=incarnation + 1, node=NodeId("node-0"), because="found dead")
        self.journal.set_desired(wanted)
        await asyncio.sleep(0.05)
        process.dead.set()
        process.running.set()
        lost = self._actual(process.member, ReplicaState.LOST, "its process is gone")
        self.journal.set_actual(lost, unless=(ReplicaState.LOST, ReplicaState.STOPPED))
        await asyncio.sleep(self.spawn_seconds * self.rng.uniform(0.5, 1.5))
        self.start(replica, incarnation + 1)

    def connect(self, record: Actual, on_effect: Callable[[str], None] = lambda _: None) -> FakeClient:
        process = self.processes.get((record.replica, record.incarnation))
        if process is None or process.dead.is_set():
            raise ReplicaExited(replica=record.replica, incarnation=record.incarnation, because="no such process")
        return FakeClient(self, process, on_effect)

    def holds(self, holder: Holder, manifest: Manifest) -> bool:
        process = self.processes.get((holder.replica, holder.incarnation))
        if process is None or process.dead.is_set() or not process.running.is_set():
            return False
        body = process.body
        if isinstance(body, FakeRollout):
            return body.manifest_digest == manifest.digest
        # A trainer keeps the snapshots of the last versions.
        return isinstance(body, FakeTrainer) and body.commit.policy_version >= manifest.policy_version

    # --- what must hold of everything that is trained

    def check_microbatch(self, step: int, microbatch: Microbatch) -> None:
        assert microbatch.microbatch_id.startswith(f"{step}.")
        assert len(microbatch.groups) == self.job.algorithm.groups_per_microbatch
        for group in microbatch.groups:
            assert len(group.samples) == self.job.algorithm.group_size
            fresh = [v for s in group.samples for v in s.versions[s.first_fresh :] or s.versions]
            assert step - max(fresh) <= self.job.runtime.staleness_max, f"all of {fresh} are too old in step {step}"
            self.check_filter(group)
            for n, sample in enumerate(group.samples):
                seed = request_seed_of(self.job.seed, sample.request_id)
                assert sample.request_id == f"{group.group_id}.{n}"
                whole = self.answers.tokens(seed)
                wanted = whole[: len(sample.tokens)] if sample.end is EndReason.TRUNCATED else whole
                assert sample.tokens == wanted, f"{sample.request_id}: tokens were lost or doubled"
                assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
                logprobs = tuple(expected_logprob(v, at) for at, v in enumerate(sample.versions))
                assert sample.logprobs == logprobs, f"{sample.request_id}: log-probabilities of other versions"
                if sample.is_over:
                    assert sample.reward == self.answers.reward(sample.tokens), f"{sample.request_id}: {sample.reward}"
                else:
                    assert self.job.algorithm.window_tokens is not None, f"{sample.request_id} is not over"
                assert all(0 <= v <= step for v in sample.versions), f"{sample.versions} in step {step}"
                assert sample.first_fresh == group_start(group.group_id)
                self.used[group.group_id] = (sample.first_fresh, len(sample.tokens), sample.end)

    def check_filter(self, group: PromptGroup) -> None:
        """With dynamic sampling no group is trained on that teaches nothing."""
        algorithm = self.job.algorithm
        if algorithm.dynamic_sampling and algorithm.at_refill_limit == "fail":
            rewards = {s.reward for s in group.samples}
            assert len(rewards) > 1, f"{group.group_id}: trained on, although all rewards are {rewards}"


def request_seed_of(job_seed: int, request_id: str) -> int:
    from rolecall.rl_runtime.algorithms.sampler import request_seed
    from rolecall.rl_runtime.tasks.task import group_number

    group, _, sample = request_id.rpartition(".")
    return request_seed(job_seed, group_number(group), int(sample))
