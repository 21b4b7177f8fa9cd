"""A fleet in one process for tests of the loop: scripted deaths, hangs and slow answers, in simulated time.

`SimulatedLoop` jumps over every wait, so that minutes of a run take a second and the same seed gives the same run.
`Fleet` plays Ray (calls that die, hang and lose answers), the supervisor and recovery (replaces what is dead or hung)
around the controller's real code, a real journal and a real ledger. The fakes check what they are asked to do, and
keep what tests compare: which microbatches entered the optimizer, which tokens and rewards were trained on.
"""

import asyncio
import hashlib
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.clock import FakeClock
from rolecall.core.config import JobConfig
from rolecall.core.errors import PeerLost, StaleIncarnation, WireError
from rolecall.core.ids import NodeId, ReplicaId, replica_id, split_replica
from rolecall.core.journal import ChainHead, Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.store import GENESIS
from rolecall.rl_runtime.clients import LoadedCheckpoint, ReplicaGone
from rolecall.rl_runtime.protocol import (
    CommitRecord,
    Group,
    Holder,
    Manifest,
    Microbatch,
    Proof,
    PulledTokens,
    Request,
    RolloutInfo,
    StepResult,
    TensorEntry,
    TokenChunk,
    TrainerInfo,
)

Member = tuple[ReplicaId, int]
TOKENS_PER_SECOND = 40.0
MAX_NEW_TOKENS = 16
MICROBATCH_SECONDS = 0.04
UPDATE_SECONDS = 0.05


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


def expected_tokens(seed: int) -> tuple[int, ...]:
    """What every engine makes for a seed, whatever prefix it starts from: a lost or doubled token shows."""
    rng = random.Random(f"tokens/{seed}")
    return tuple(rng.randrange(3, 16) for _ in range(rng.randrange(1, MAX_NEW_TOKENS + 1)))


def expected_reward(tokens: Sequence[int]) -> float:
    return sum(tokens) / (16.0 * MAX_NEW_TOKENS)


@dataclass(eq=False)
class Process:
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

    def __init__(self, fleet: "Fleet", process: Process, on_effect: Callable[[str], None]) -> None:
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
                raise ReplicaGone(replica=self.replica, incarnation=self.incarnation, because="killed")
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


class _Body:
    """What all fakes share."""

    def __init__(self, fleet: "Fleet", member: Member) -> None:
        self.fleet, self.replica, self.incarnation = fleet, *member
        self.holder = Holder(replica=self.replica, incarnation=self.incarnation, host="fake", port=self.incarnation)

    def ready(self) -> tuple[int, int]:
        return 1, 1

    def _check(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise StaleIncarnation(replica=self.replica, wanted=f"#{self.incarnation}", got=f"#{incarnation}")


def fake_manifest(version: int, lineage: str) -> Manifest:
    digest = hashlib.sha256(f"{version}/{lineage}".encode()).hexdigest()
    entry = TensorEntry(name="w", dtype="float32", shape=(1,), digest=digest)
    return Manifest(policy_version=version, tensors=(entry,), canary_logprobs=(0.0,), digest=digest)


def first_commit() -> CommitRecord:
    return CommitRecord(
        step=-1,
        epoch=0,
        microbatch_ids=(),
        group_ids=(),
        gradient_digest="",
        ledger=ChainHead(position=0, hash=GENESIS),
    )


class Collective:
    """The process group of one epoch: a barrier that fails for all when one of them is gone."""

    def __init__(self, fleet: "Fleet", epoch: int, size: int) -> None:
        self.fleet, self.epoch, self.size = fleet, epoch, size
        self.joined: dict[Member, Process] = {}
        self.left: set[Member] = set()
        self._arrived: dict[str, dict[Member, Any]] = {}

    async def meet(self, what: str, member: Member, value: Any) -> dict[Member, Any]:
        """What all brought.

        Raises:
            PeerLost: one is dead or has left, or the group's timeout ran out.
        """
        arrived = self._arrived.setdefault(what, {})
        arrived[member] = value
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.fleet.job.runtime.group_timeout_seconds
        while len(arrived) < self.size:
            gone = [m for m, p in self.joined.items() if p.dead.is_set() or m in self.left]
            if gone:
                raise PeerLost(epoch=self.epoch, because=f"connection closed by {gone[0]}")
            if loop.time() > deadline:
                raise PeerLost(epoch=self.epoch, because=f"timeout in {what}")
            await asyncio.sleep(0.01)
        return arrived


class FakeTrainer(_Body):
    """Keeps gradients of an interrupted step, reduces in a collective, commits when all agree."""

    def __init__(self, fleet: "Fleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.commit, self.has_state = first_commit(), member[1] == 1
        self.lineage = "first"
        self.computed: dict[str, Microbatch] = {}
        self.group: Collective | None = None
        self.joined_epoch = -1
        self.last: StepResult | None = None
        self._work = asyncio.Lock()
        self.raises: list[Exception] = []

    def info(self) -> TrainerInfo:
        return TrainerInfo(
            replica=self.replica,
            incarnation=self.incarnation,
            pid=1,
            start_ticks=1,
            has_state=self.has_state,
            commit=self.commit,
            holder=self.holder,
            computed=tuple(sorted(self.computed)),
            joined_epoch=self.joined_epoch,
        )

    def commit_record(self) -> CommitRecord:
        return self.commit

    def last_result(self) -> StepResult | None:
        return self.last

    def open_store(self, epoch: int) -> tuple[str, int]:
        return "fake", epoch

    def reset_step(self, step: int) -> None:
        self.computed = {}

    def manifest(self, policy_version: int) -> Manifest:
        if policy_version != self.commit.policy_version:
            raise StaleIncarnation(
                replica=self.replica, wanted=f"{self.commit.policy_version}", got=f"{policy_version}"
            )
        return fake_manifest(policy_version, self.lineage)

    async def idle(self) -> None:
        async with self._work:
            pass

    async def join(self, incarnation: int, epoch: int, rank: int, size: int, host: str, port: int) -> None:
        self._check(incarnation)
        self._leave()
        async with self._work:
            assert self.has_state, "a trainer without state must not join"
            assert epoch > self.joined_epoch
            self.joined_epoch = epoch
            self.group = self.fleet.collectives.setdefault(epoch, Collective(self.fleet, epoch, size))
            me = (self.replica, self.incarnation)
            self.group.joined[me] = self.fleet.processes[me]
            await self.group.meet("join", me, self.commit)

    def _leave(self) -> None:
        if self.group is not None:
            self.group.left.add((self.replica, self.incarnation))

    async def copy_from(self, holder: Holder) -> None:
        async with self._work:
            await asyncio.sleep(0.1)
            source = self.fleet.processes[holder.replica, holder.incarnation]
            if source.dead.is_set():
                raise WireError(f"{holder.replica} does not answer")
            self.commit, self.lineage, self.has_state = source.body.commit, source.body.lineage, True
            self.computed = {}

    async def train_step(
        self,
        incarnation: int,
        epoch: int,
        step: int,
        mine: Sequence[Microbatch],
        all_ids: Sequence[str],
        ledger: ChainHead,
        members: Sequence[ReplicaId],
    ) -> StepResult:
        self._check(incarnation)
        async with self._work:
            if epoch != self.joined_epoch or step != self.commit.step + 1:
                raise StaleIncarnation(replica=self.replica, wanted=f"{self.joined_epoch}", got=f"{epoch}/{step}")
            assert self.group is not None and self.group.size == len(members)
            plan = {m.microbatch_id: m for m in mine}
            if any(plan.get(i) != m for i, m in self.computed.items()):
                self.computed = {}
            for microbatch in mine:
                if microbatch.microbatch_id not in self.computed:
                    if self.raises:
                        self._leave()
                        raise self.raises.pop(0)
                    await asyncio.sleep(MICROBATCH_SECONDS)
                    self.fleet.check_microbatch(step, microbatch)
                    self.computed[microbatch.microbatch_id] = microbatch
            return await self._commit(epoch, step, list(all_ids), ledger)

    async def _commit(self, epoch: int, step: int, all_ids: list[str], ledger: ChainHead) -> StepResult:
        assert self.group is not None
        me = (self.replica, self.incarnation)
        ballots = await self.group.meet(f"step {step}", me, dict(self.computed))
        union = {i: m for ballot in ballots.values() for i, m in ballot.items()}
        assert sum(len(b) for b in ballots.values()) == len(union), "a microbatch was computed by two"
        assert sorted(union) == sorted(all_ids), "the union is not the step"
        await asyncio.sleep(self.fleet.rng.uniform(0.0, 0.01))  # some commit, then the others: one may die between
        groups = sorted((g for m in union.values() for g in m.groups), key=lambda g: g.group_id)
        content = f"{self.lineage}/{[(i, [g.group_id for g in union[i].groups]) for i in sorted(union)]}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.commit = CommitRecord(
            step=step,
            epoch=epoch,
            microbatch_ids=tuple(sorted(all_ids)),
            group_ids=tuple(g.group_id for g in groups),
            gradient_digest=digest,
            ledger=ledger,
        )
        self.lineage, self.computed = digest, {}
        self.fleet.optimizer.setdefault(step, {})[digest] = self.commit
        rewards = [s.reward for g in groups for s in g.samples]
        self.last = StepResult(
            replica=self.replica,
            incarnation=self.incarnation,
            commit=self.commit,
            loss=0.1,
            grad_norm=1.0,
            reward=sum(rewards) / len(rewards),
            num_tokens=sum(g.num_tokens for g in groups),
            seconds=0.1,
            my_microbatches=tuple(all_ids),
            log_ratio_max=0.0,
        )
        return self.last

    async def save_checkpoint(self, folder: str, keep: int) -> str:
        async with self._work:
            await asyncio.sleep(0.05)
            self.fleet.checkpoints[self.commit.step] = (self.commit, self.lineage)
            return f"{folder}/step-{self.commit.step:08d}"

    async def load_checkpoint(self, folder: str) -> LoadedCheckpoint:
        async with self._work:
            await asyncio.sleep(0.1)
            step = max(self.fleet.checkpoints, default=-1)
            self.commit, self.lineage = self.fleet.checkpoints.get(step, (first_commit(), "first"))
            self.has_state, self.computed = True, {}
            path = f"{folder}/step-{step:08d}" if step >= 0 else ""
            return LoadedCheckpoint(path=path, refused=())


@dataclass
class Held:
    """A request in a fake engine."""

    request: Request
    tokens: list[int]
    versions: list[int]
    since: float


class FakeRollout(_Body):
    """Generates `expected_tokens` at a fixed rate, under whatever version it holds."""

    def __init__(self, fleet: "Fleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.version, self.manifest_digest = -1, ""
        self.held: dict[str, Held] = {}
        self.bad_proofs = 0
        self.rate = TOKENS_PER_SECOND
        self.generated = 0

    def _catch_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for h in self.held.values():
            whole = expected_tokens(h.request.seed)
            count = min(len(whole) - len(h.tokens), int((now - h.since) * self.rate))
            if count > 0:
                start = len(h.tokens)
                h.tokens += whole[start : start + count]
                h.versions += [self.version] * count
                h.since += count / self.rate
                self.generated += count
                self.fleet.tokens_made[h.request.request_id] += count

    def _chunk(self, h: Held, offset: int) -> TokenChunk:
        finished = len(h.tokens) == len(expected_tokens(h.request.seed))
        return TokenChunk(
            request_id=h.request.request_id,
            offset=offset,
            tokens=tuple(h.tokens[offset:]),
            logprobs=(-1.0,) * len(h.tokens[offset:]),
            versions=tuple(h.versions[offset:]),
            finished=finished,
            finish_reason="stop" if finished else "",
        )

    def info(self) -> RolloutInfo:
        return RolloutInfo(
            replica=self.replica,
            incarnation=self.incarnation,
            pid=1,
            start_ticks=1,
            policy_version=self.version,
            holder=self.holder,
            num_requests=len(self.held),
            tokens_generated=self.generated,
        )

    def submit(self, incarnation: int, requests: Sequence[Request]) -> None:
        self._check(incarnation)
        assert self.version >= 0, "an engine without proven weights was given work"
        now = asyncio.get_running_loop().time()
        for r in requests:
            if len(r.prefix_tokens) < self.fleet.offsets_asked[r.request_id]:
                self.fleet.started_over.append(r.request_id)
            if r.request_id not in self.held:
                assert r.prefix_tokens == expected_tokens(r.seed)[: len(r.prefix_tokens)], "a prefix lost tokens"
                self.held[r.request_id] = Held(r, list(r.prefix_tokens), list(r.prefix_versions), now)

    def tokens_since(self, incarnation: int, offsets: Mapping[str, int]) -> PulledTokens:
        self._check(incarnation)
        self._catch_up()
        for request_id, offset in offsets.items():
            self.fleet.offsets_asked[request_id] = max(offset, self.fleet.offsets_asked[request_id])
        return PulledTokens(
            replica=self.replica,
            incarnation=self.incarnation,
            policy_version=self.version,
            chunks=tuple(self._chunk(self.held[r], o) for r, o in offsets.items() if r in self.held),
            unknown=tuple(r for r in offsets if r not in self.held),
        )

    def drain(self, incarnation: int, offsets: Mapping[str, int], seconds: float) -> PulledTokens:
        del seconds
        return self.tokens_since(incarnation, offsets)

    def ack(self, incarnation: int, request_ids: Sequence[str]) -> None:
        self._check(incarnation)
        for request_id in request_ids:
            self.held.pop(request_id, None)

    def list_requests(self, incarnation: int) -> list[tuple[Request, TokenChunk]]:
        self._check(incarnation)
        self._catch_up()
        return [(h.request, self._chunk(h, 0)) for h in self.held.values()]

    async def update_weights(
        self, incarnation: int, epoch: int, manifest: Manifest, holders: Sequence[Holder]
    ) -> Proof:
        self._check(incarnation)
        if not any(self.fleet.holds(h, manifest) for h in holders):
            raise WireError(f"no holder of version {manifest.policy_version} answers")
        await asyncio.sleep(UPDATE_SECONDS)
        self._catch_up()
        self.version, self.manifest_digest = manifest.policy_version, manifest.digest
        received = manifest.digest
        if self.bad_proofs:
            self.bad_proofs, received = self.bad_proofs - 1, "0" * 64
        return Proof(
            replica=self.replica,
            incarnation=self.incarnation,
            epoch=epoch,
            policy_version=manifest.policy_version,
            manifest_digest=manifest.digest,
            received_digest=received,
            storage_digest=received,
            covered=1,
            uncovered=(),
            canary_logprobs=manifest.canary_logprobs,
            holder=holders[0].replica,
            bytes_received=4,
            seconds=UPDATE_SECONDS,
        )


class FakeReward(_Body):
    def __init__(self, fleet: "Fleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.answers: list[Any] = []
        """Scripted: an exception to raise, or a wrong answer, for the next calls."""

    async def score(self, incarnation: int, groups: Sequence[Group]) -> list[list[float]]:
        self._check(incarnation)
        await asyncio.sleep(0.01)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]
        return [[expected_reward(s.tokens) for s in g.samples] for g in groups]


@dataclass(frozen=True)
class FakeVerdict:
    admitted: bool
    because: str
    part: str
    tensor: str


class FakeCertifier:
    """Part (a) of the real one is enough for tests of the loop."""

    def judge(
        self, manifest: Manifest, proof: Proof, *, incarnation: int | None = None, epoch: int | None = None
    ) -> FakeVerdict:
        fits = proof.received_digest == manifest.digest and (proof.incarnation, proof.epoch) == (incarnation, epoch)
        return FakeVerdict(admitted=fits, because="" if fits else "not the manifest's bytes", part="a", tensor="w")


BODIES: Mapping[str, Callable[["Fleet", Member], _Body]] = {
    "trainer": FakeTrainer,
    "rollout": FakeRollout,
    "reward": FakeReward,
}


class Fleet:
    """All fake processes, and who looks after them. Time in seconds of the simulated loop."""

    def __init__(self, job: JobConfig, journal: Journal, seed: int, *, recovers: bool = True) -> None:
        self.job, self.journal, self.rng = job, journal, random.Random(seed)
        self.recovers = recovers
        self.dead_seconds, self.hung_seconds, self.spawn_seconds = 0.2, 3.0, 1.0
        self.processes: dict[Member, Process] = {}
        self.collectives: dict[int, Collective] = {}
        self.checkpoints: dict[int, tuple[CommitRecord, str]] = {}
        self.optimizer: dict[int, dict[str, CommitRecord]] = {}
        """Step -> gradient digest -> commit: more than one digest only after going back to a checkpoint."""
        self.tokens_made: Counter[str] = Counter()
        """Request -> tokens generated for it by all engines: more than it has means that some were made again."""
        self.offsets_asked: Counter[str] = Counter()
        """Request -> tokens that a controller had of it when it asked for more."""
        self.started_over: list[str] = []
        """Requests that were submitted with fewer tokens than a controller had had of them."""
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

    def start(self, replica: ReplicaId, incarnation: int) -> Process:
        """A process that is READY at once, wanted by the border."""
        because = "" if incarnation == 1 else "replaced"
        self.journal.set_desired(
            Desired(replica=replica, incarnation=incarnation, node=NodeId("node-0"), because=because)
        )
        process = Process((replica, incarnation), None)
        self.processes[process.member] = process
        process.body = BODIES[split_replica(replica)[0]](self, process.member)
        self.journal.set_actual(self._actual(process.member, ReplicaState.READY))
        return process

    def _actual(self, member: Member, state: ReplicaState, because: str = "") -> Actual:
        return Actual(replica=member[0], incarnation=member[1], node=NodeId("node-0"), state=state, because=because)

    def newest(self, replica: str) -> Process:
        return max((p for m, p in self.processes.items() if m[0] == replica), key=lambda p: p.member[1])

    def kill(self, replica: str) -> Process:
        """SIGKILL."""
        process = self.newest(replica)
        process.dead.set()
        process.running.set()
        self.spawn(self._recover(process, self.dead_seconds))
        return process

    def hang(self, replica: str) -> Process:
        """SIGSTOP. Recovery, if it works, kills and replaces it after a while."""
        process = self.newest(replica)
        process.running.clear()
        self.spawn(self._recover(process, self.hung_seconds))
        return process

    async def _recover(self, process: Process, seconds: float) -> None:
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
            raise ReplicaGone(replica=record.replica, incarnation=record.incarnation, because="no such process")
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
            for n, sample in enumerate(group.samples):
                seed = request_seed_of(self.job.seed, sample.request_id)
                assert sample.request_id == f"{group.group_id}.{n}"
                assert sample.tokens == expected_tokens(seed), f"{sample.request_id}: tokens were lost or doubled"
                assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
                assert sample.reward == expected_reward(sample.tokens), f"{sample.request_id}: reward {sample.reward}"
                assert all(0 <= v <= step for v in sample.versions), f"{sample.versions} in step {step}"
                staleness = step - min(sample.versions)
                assert staleness <= self.job.runtime.staleness_max, f"staleness {staleness}"


def request_seed_of(job_seed: int, request_id: str) -> int:
    from rolecall.rl_runtime.supply import request_seed
    from rolecall.rl_runtime.task import group_number

    group, _, sample = request_id.rpartition(".")
    return request_seed(job_seed, group_number(group), int(sample))
