"""A simulated fleet in one process, for tests of the controller: scripted deaths, hangs and slow replies in simulated
time.

`SimulatedFleet` stands in for Ray (calls that die, hang or lose replies), the supervisor and recovery (replaces dead
and hung replicas) around the controller's real code, a real journal and a real ledger. The fake replicas of each role
check their requests and record what tests compare: which microbatches entered the optimizer, which tokens and rewards
were trained on. Their tokens are a function of the seed, so that a lost or duplicated token shows."""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import (
    CheckpointCorrupt,
    CheckpointUnwritable,
    NonFiniteMicrobatch,
    PeerLost,
    StaleIncarnation,
    WireError,
)
from rolecall.core.ids import GroupId, NodeId, ReplicaId, replica_id, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.protocol import messages as protocol
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo, WrittenCheckpoint
from rolecall.rl_runtime.protocol.clients import ReplicaExited
from rolecall.rl_runtime.protocol.messages import (
    CheckVerdict,
    CommitRecord,
    ComparedMicrobatch,
    ComputedMicrobatch,
    EndReason,
    Holder,
    Manifest,
    Microbatch,
    MicrobatchNumbers,
    PromptGroup,
    UnusualMicrobatches,
)
from rolecall.rl_runtime.protocol.policy_health import HealthSums, health
from rolecall.rl_runtime.tasks.task import group_start, is_held_out
from rolecall.rl_runtime.weights.proof import ProofDecision, ProofVerifier
from tests.rl_runtime.scripted_responses import (
    ScriptedConversations,
    ScriptedResponses,
    expected_logprob,
    request_seed_of,
)

Member = tuple[ReplicaId, int]
TOKENS_PER_SECOND = 40.0
MICROBATCH_SECONDS = 0.04
UPDATE_SECONDS = 0.05


class _FakeReplica:
    """Base of all fakes."""

    def __init__(self, fleet: "SimulatedFleet", member: Member) -> None:
        self.fleet, self.replica, self.incarnation = fleet, *member
        self.info_raises: list[Exception] = []
        """Scripted: what the next questions for `info` or `ready` meet."""
        self.holder = protocol.Holder(
            replica=self.replica, incarnation=self.incarnation, host="fake", port=self.incarnation
        )

    def ready(self) -> tuple[int, int]:
        self._may_answer()
        return 1, 1

    def die(self) -> None:
        """Its last moment."""

    def _may_answer(self) -> None:
        if self.info_raises:
            raise self.info_raises.pop(0)

    def _check(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise StaleIncarnation(replica=self.replica, wanted=f"#{self.incarnation}", got=f"#{incarnation}")


def _start(group: GroupId) -> int:
    return 0 if is_held_out(group) else group_start(group)


def fake_manifest(version: int, lineage: str) -> protocol.Manifest:
    digest = hashlib.sha256(f"{version}/{lineage}".encode()).hexdigest()
    entry = protocol.TensorEntry(name="w", dtype="float32", shape=(1,), digest=digest)
    return protocol.Manifest(policy_version=version, tensors=(entry,), canary_logprobs=(0.0,), digest=digest)


def checkpoint_path(folder: str, step: int) -> str:
    return f"{folder}/step-{step:08d}"


def step_of(path: str) -> int:
    return int(path.rpartition("step-")[2])


class Collective:
    """The process group of one epoch: a barrier that fails for all when one of them is gone."""

    def __init__(self, fleet: "SimulatedFleet", epoch: int, size: int) -> None:
        self.fleet, self.epoch, self.size = fleet, epoch, size
        self.joined: dict[Member, SimulatedProcess] = {}
        self.left: set[Member] = set()
        self._arrived: dict[str, dict[Member, Any]] = {}

    async def meet(self, what: str, member: Member, value: Any) -> dict[Member, Any]:
        """The contributions of all members.

        Raises:
            PeerLost: one is dead or has left, or the group's timeout ran out.
        """
        arrived = self._arrived.setdefault(what, {})
        arrived[member] = value
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.fleet.job.runtime.group_timeout_seconds
        while len(arrived) < self.size or self.fleet.unreachable & self.joined.keys():
            gone = [m for m, p in self.joined.items() if p.dead.is_set() or m in self.left]
            if gone:
                raise PeerLost(epoch=self.epoch, because=f"connection closed by {gone[0]}")
            if loop.time() > deadline:
                raise PeerLost(epoch=self.epoch, because=f"timeout in {what}")
            await asyncio.sleep(0.01)
        return arrived


class FakeTrainer(_FakeReplica):
    """Keeps gradients of an interrupted step, reduces in a collective, commits when all agree."""

    def __init__(self, fleet: "SimulatedFleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.commit, self.has_state = protocol.first_commit(), member[1] == 1
        self.lineage = "first"
        self.computed: dict[str, protocol.Microbatch] = {}
        self.num_computed = 0
        self.group: Collective | None = None
        self.joined_epoch = -1
        self.last: protocol.StepResult | None = None
        self._work = asyncio.Lock()
        self.raises: list[Exception] = []
        self.snapshot: tuple[CommitRecord, str] | None = None
        self.writing = False

    def info(self) -> protocol.TrainerInfo:
        self._may_answer()
        return protocol.TrainerInfo(
            replica=self.replica,
            incarnation=self.incarnation,
            has_state=self.has_state,
            commit=self.commit,
            holder=self.holder,
            computed=tuple(sorted(self.computed)),
            num_computed=self.num_computed,
            joined_epoch=self.joined_epoch,
        )

    def commit_record(self) -> protocol.CommitRecord:
        return self.commit

    def last_result(self) -> protocol.StepResult | None:
        return self.last

    def open_store(self, epoch: int) -> tuple[str, int]:
        return "fake", epoch

    def reset_step(self, step: int) -> None:
        self.computed = {}

    def manifest(self, policy_version: int) -> protocol.Manifest:
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

    async def copy_from(self, holder: protocol.Holder) -> None:
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
        mine: Sequence[protocol.Microbatch],
        all_ids: Sequence[str],
        ledger: ChainHead,
        members: Sequence[ReplicaId],
        first: Sequence[ComputedMicrobatch] = (),
    ) -> protocol.StepResult:
        self._check(incarnation)
        async with self._work:
            if epoch != self.joined_epoch or step != self.commit.step + 1:
                raise StaleIncarnation(replica=self.replica, wanted=f"{self.joined_epoch}", got=f"{epoch}/{step}")
            assert self.group is not None and self.group.size == len(members)
            started = asyncio.get_running_loop().time()
            plan = {m.microbatch_id: m for m in mine}
            if any(plan.get(i) != m for i, m in self.computed.items()):
                self.computed = {}
            for microbatch in mine:
                if microbatch.microbatch_id not in self.computed:
                    if self.raises:
                        self._leave()
                        raise self.raises.pop(0)
                    await asyncio.sleep(self.fleet.microbatch_seconds(self.replica))
                    self.fleet.check_microbatch(step, microbatch)
                    self.fleet.check_hybrids()
                    self.computed[microbatch.microbatch_id] = microbatch
                    self.num_computed += 1
            result = await self._commit(epoch, step, list(all_ids), ledger, first)
            self.last = replace(result, seconds=asyncio.get_running_loop().time() - started)
            return self.last

    async def _commit(
        self, epoch: int, step: int, all_ids: list[str], ledger: ChainHead, first: Sequence[ComputedMicrobatch]
    ) -> protocol.StepResult:
        assert self.group is not None
        me = (self.replica, self.incarnation)
        ballots = await self.group.meet(f"step {step}", me, dict(self.computed))
        union = {i: m for ballot in ballots.values() for i, m in ballot.items()}
        assert sum(len(b) for b in ballots.values()) == len(union), "a microbatch was computed by two"
        assert sorted(union) == sorted(all_ids), "the union is not the step"
        await asyncio.sleep(self.fleet.rng.uniform(0.0, 0.01))  # some commit, then the others: one may die between
        groups = sorted((g for m in union.values() for g in m.groups), key=lambda g: g.group_id)
        content = f"{self.lineage}/{[(i, [g.group_id for g in union[i].groups]) for i in sorted(union)]}"
        for (replica, _), ballot in sorted(ballots.items()):
            for bad in (m for i, m in sorted(ballot.items()) if self.fleet.spoils(replica, i)):
                if replica == self.replica:
                    self.computed = {}
                self._leave()
                raise NonFiniteMicrobatch(
                    replica=replica,
                    step=step,
                    microbatch_id=bad.microbatch_id,
                    group_ids=[g.group_id for g in bad.groups],
                )
        owners = {i: member for member, ballot in ballots.items() for i in ballot}
        unusual = [self._computed(owners[i], union[i]) for i in sorted(union) if self.fleet.unusual(owners[i][0], i)]
        if unusual and not first and len({u.replica for u in unusual}) == 1:
            if unusual[0].replica == self.replica:
                self.computed = {}
            self._leave()
            raise UnusualMicrobatches(step=step, microbatches=unusual)
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.commit = protocol.CommitRecord(
            step=step,
            epoch=epoch,
            microbatch_ids=tuple(sorted(all_ids)),
            group_ids=tuple(g.group_id for g in groups),
            gradient_digest=digest,
            ledger=ledger,
        )
        self.fleet.parents[digest] = self.lineage
        self.lineage, self.computed = digest, {}
        self.fleet.optimizer.setdefault(step, {})[digest] = self.commit
        rewards = [s.reward for g in groups for s in g.samples if s.is_over]
        num_tokens = sum(g.num_tokens for g in groups)
        return protocol.StepResult(
            replica=self.replica,
            incarnation=self.incarnation,
            commit=self.commit,
            loss=0.1,
            grad_norm=1.0,
            reward=sum(rewards) / len(rewards) if rewards else None,
            num_tokens=num_tokens,
            health=health(HealthSums(tokens=num_tokens, entropy=float(num_tokens), ratio=float(num_tokens))),
            seconds=0.0,
            my_microbatches=tuple(sorted(ballots[me])),
            log_ratio_max=0.0,
            compared=tuple(self._compared(u, owners[u.microbatch_id][0]) for u in first)
            or tuple(ComparedMicrobatch(first=u, by="", again=None, verdict=CheckVerdict.SEVERAL) for u in unusual),
        )

    def _computed(self, by: Member, microbatch: Microbatch) -> ComputedMicrobatch:
        return ComputedMicrobatch(
            replica=by[0],
            incarnation=by[1],
            microbatch_id=microbatch.microbatch_id,
            group_ids=tuple(g.group_id for g in microbatch.groups),
            numbers=MicrobatchNumbers(loss=0.1, grad_norm=800.0),
            because="gradient norm 800, usually 1",
        )

    def _compared(self, first: ComputedMicrobatch, by: ReplicaId) -> ComparedMicrobatch:
        same = self.fleet.unusual(by, first.microbatch_id)
        again = first.numbers if same else MicrobatchNumbers(loss=0.1, grad_norm=1.0)
        verdict = CheckVerdict.SAME if same else CheckVerdict.WRONG
        return ComparedMicrobatch(first=first, by=by, again=again, verdict=verdict)

    async def take_snapshot(self) -> int:
        async with self._work:
            if self.writing:
                raise CheckpointUnwritable(path="the checkpoint", reason="an earlier one is still being written")
            self.snapshot = self.commit, self.lineage
            return self.commit.step

    async def write_checkpoint(self, folder: str, step: int) -> WrittenCheckpoint:
        (commit, lineage), self.snapshot = self.snapshot or (self.commit, ""), None
        if self.writing or not lineage or commit.step != step:
            raise StaleIncarnation(replica=self.replica, wanted=f"a snapshot of step {step}", got=f"{commit.step}")
        writing = self.fleet.spawn(self._write(folder, commit, lineage))
        await (asyncio.shield(writing) if self.fleet.writes_survive else writing)
        return WrittenCheckpoint(path=checkpoint_path(folder, step), found=self.list_checkpoints(folder))

    async def _write(self, folder: str, commit: CommitRecord, lineage: str) -> None:
        self.writing = True
        try:
            await asyncio.sleep(self.fleet.write_seconds())
            there = self.fleet.checkpoints.get(commit.step)
            if self.fleet.write_fails() or (there and there[0].ledger.position > commit.ledger.position):
                raise CheckpointUnwritable(path=folder, reason="No space left on device")
            self.fleet.checkpoints[commit.step] = commit, lineage
        finally:
            self.writing = False

    def remove_checkpoints(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.fleet.checkpoints.pop(step_of(path), None)

    def list_checkpoints(self, folder: str) -> tuple[CheckpointInfo, ...]:
        if (failure := self.fleet.list_fails(folder)) is not None:
            raise failure
        found = sorted(self.fleet.checkpoints.items())
        return tuple(CheckpointInfo(path=checkpoint_path(folder, s), step=s, commit=c) for s, (c, _) in found if s >= 0)

    async def load_checkpoint(self, path: str) -> None:
        async with self._work:
            await asyncio.sleep(0.1)
            if (failure := self.fleet.load_fails(path)) is not None:
                raise failure
            if path and step_of(path) not in self.fleet.checkpoints:
                raise CheckpointCorrupt(path=path, reason="No such file or directory")
            stored = self.fleet.checkpoints[step_of(path)] if path else (protocol.first_commit(), "first")
            self.commit, self.lineage = stored
            self.has_state, self.computed = True, {}


@dataclass
class FakeRequest:
    """A request in a fake engine."""

    request: protocol.GenerationRequest
    answer: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    since: float

    @property
    def whole(self) -> tuple[int, ...]:
        """Its final state."""
        return self.answer[: self.request.max_response_tokens]


@dataclass(frozen=True)
class FakeWeightPull:
    """Weights that a rollout took over."""

    version: int
    replica: ReplicaId
    holder: ReplicaId
    begun: float  # seconds of the simulated loop
    seconds: float = UPDATE_SECONDS


class FakeRollout(_FakeReplica):
    """Generates the fleet's `answers` at a fixed rate, under whatever version it holds."""

    def __init__(self, fleet: "SimulatedFleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.version, self.manifest_digest = -1, ""
        self.held: dict[str, FakeRequest] = {}
        self.bad_proofs = self.bad_updates = 0
        self.bad_logprob: float | None = None
        """Reported for every token in place of the correct number."""
        self.rate = TOKENS_PER_SECOND
        self.drain_seconds = self.sleep_seconds = 0.0
        self.asleep, self.num_sleeps, self.update_seconds = False, 0, UPDATE_SECONDS
        self._updating = asyncio.Lock()
        self.generated = 0

    def die(self) -> None:
        """Tokens that were never pulled were generated nevertheless."""
        self._catch_up()

    def _catch_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for h in self.held.values():
            whole = h.whole
            count = 0 if self.asleep else min(len(whole) - len(h.tokens), int((now - h.since) * self.rate))
            if count > 0:
                start = len(h.tokens)
                h.tokens += whole[start : start + count]
                h.logprobs += [expected_logprob(self.version, n) for n in range(start, start + count)]
                h.versions += [self.version] * count
                h.since += count / self.rate
                self.generated += count
                self.fleet.tokens_made[h.request.request_id] += count
                context = min(count, max(0, _start(h.request.group_id) - start))
                self.fleet.context_made[h.request.request_id] += context

    def _chunk(self, h: FakeRequest, offset: int) -> protocol.TokenChunk:
        finished = len(h.tokens) == len(h.whole)
        ends = len(h.tokens) == len(h.answer)
        return protocol.TokenChunk(
            request_id=h.request.request_id,
            offset=offset,
            tokens=tuple(h.tokens[offset:]),
            logprobs=tuple(
                h.logprobs[offset:] if self.bad_logprob is None else [self.bad_logprob] * len(h.tokens[offset:])
            ),
            versions=tuple(h.versions[offset:]),
            finished=finished,
            finish_reason=("stop" if ends else "length") if finished else "",
        )

    def info(self) -> protocol.RolloutInfo:
        self._may_answer()
        return protocol.RolloutInfo(
            replica=self.replica,
            incarnation=self.incarnation,
            policy_version=self.version,
            holder=self.holder,
            num_requests=len(self.held),
            tokens_generated=self.generated,
            asleep=self.asleep,
        )

    def submit(self, incarnation: int, requests: Sequence[protocol.GenerationRequest]) -> None:
        self._check(incarnation)
        assert self.version >= 0, "an engine without proven weights was given work"
        assert not self.asleep, f"{self.replica} was given work in its sleep"
        now = asyncio.get_running_loop().time()
        if not is_held_out(requests[0].group_id):
            self.fleet.first_work.setdefault(self.version, now)
        for r in requests:
            if len(r.prefix_tokens) < self.fleet.offsets_asked[r.request_id]:
                self.fleet.started_over.append(r.request_id)
            if len(r.prefix_tokens) < _start(r.group_id):
                self.fleet.contexts_lost.append(r.request_id)
            held, start = self.held.get(r.request_id), len(r.prefix_tokens)
            if held is None or (len(held.tokens) == len(held.whole) and start > len(held.tokens)):
                answer = self.fleet.answers.tokens(r.seed)
                assert r.prefix_tokens == answer[:start], "a prefix lost tokens"
                written = self.fleet.answers.written(r.seed)
                assert start not in written, "the environment's turn was given to an engine"
                answer = answer[: self.fleet.answers.turn_end(r.seed, start)]
                self.held[r.request_id] = FakeRequest(
                    r, answer, list(r.prefix_tokens), list(r.prefix_logprobs), list(r.prefix_versions), now
                )

    def tokens_since(self, incarnation: int, offsets: Mapping[str, int]) -> protocol.PulledTokens:
        self._check(incarnation)
        self._catch_up()
        for request_id, offset in offsets.items():
            self.fleet.offsets_asked[request_id] = max(offset, self.fleet.offsets_asked[request_id])
        return protocol.PulledTokens(
            replica=self.replica,
            incarnation=self.incarnation,
            policy_version=self.version,
            chunks=tuple(self._chunk(self.held[r], o) for r, o in offsets.items() if r in self.held),
            unknown=tuple(r for r in offsets if r not in self.held),
        )

    async def drain(self, incarnation: int, offsets: Mapping[str, int], seconds: float) -> protocol.PulledTokens:
        del seconds
        await asyncio.sleep(self.drain_seconds)
        return self.tokens_since(incarnation, offsets)

    async def sleep(self, incarnation: int, offsets: Mapping[str, int], seconds: float) -> protocol.PulledTokens:
        del seconds
        async with self._updating:
            await asyncio.sleep(self.sleep_seconds)
            pulled = self.tokens_since(incarnation, offsets)
            self.asleep, self.num_sleeps = True, self.num_sleeps + 1
            return pulled

    def _wake(self) -> None:
        self._catch_up()
        if self.asleep:
            self.asleep = False
            for h in self.held.values():
                h.since = asyncio.get_running_loop().time()

    def ack(self, incarnation: int, request_ids: Sequence[str]) -> None:
        self._check(incarnation)
        for request_id in request_ids:
            self.held.pop(request_id, None)

    def list_requests(self, incarnation: int) -> list[tuple[protocol.GenerationRequest, protocol.TokenChunk]]:
        self._check(incarnation)
        self._catch_up()
        return [(h.request, self._chunk(h, 0)) for h in self.held.values()]

    async def update_weights(
        self, incarnation: int, epoch: int, manifest: protocol.Manifest, holders: Sequence[protocol.Holder]
    ) -> protocol.WeightProof:
        self._check(incarnation)
        if self.bad_updates:
            self.bad_updates -= 1
            raise ValueError("the canary is longer than the context")
        if not any(self.fleet.holds(h, manifest) for h in holders):
            raise WireError(f"no holder of version {manifest.policy_version} answers")
        begun = asyncio.get_running_loop().time()
        async with self._updating:
            seconds = self.update_seconds
            await asyncio.sleep(seconds)
            pull = FakeWeightPull(manifest.policy_version, self.replica, holders[0].replica, begun, seconds)
            self.fleet.pulls.append(pull)
            self._wake()
        self.version, self.manifest_digest = manifest.policy_version, manifest.digest
        received = manifest.digest
        if self.bad_proofs:
            self.bad_proofs, received = self.bad_proofs - 1, "0" * 64
        return protocol.WeightProof(
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


class FakeReward(_FakeReplica):
    def __init__(self, fleet: "SimulatedFleet", member: Member) -> None:
        super().__init__(fleet, member)
        self.answers: list[Any] = []
        """Scripted: an exception to raise, or a wrong answer, for the next calls."""
        self.added = 0.0
        """Added to every reward, without an error."""

    async def score(
        self, incarnation: int, groups: Sequence[protocol.PromptGroup], waited_seconds: float
    ) -> list[list[float]]:
        self._check(incarnation)
        await asyncio.sleep(0.01)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]
        return [[self.fleet.answers.reward(s.tokens) + self.added for s in g.samples] for g in groups]

    async def observe(
        self, incarnation: int, conversations: Sequence[protocol.Conversation]
    ) -> list[protocol.Observation]:
        self._check(incarnation)
        await asyncio.sleep(0.02)
        self.fleet.turns_asked.append((self.replica, tuple(c.request_id for c in conversations)))
        return [self._observation(c) for c in conversations]

    def _observation(self, asked: protocol.Conversation) -> protocol.Observation:
        script = self.fleet.answers
        assert isinstance(script, ScriptedConversations)
        scripted = self.fleet.environment_fails(self, asked)
        if scripted is not None:
            return scripted
        seed, start = request_seed_of(self.fleet.job.seed, asked.request_id), len(asked.tokens)
        assert asked.tokens == script.tokens(seed)[:start], "a conversation lost tokens"
        marked = {at for at, v in enumerate(asked.versions) if v == protocol.ENVIRONMENT_VERSION}
        assert marked == {at for at in script.written(seed) if at < start}, "marks of other tokens"
        tokens = script.observation(seed, start)
        return protocol.Observation(done=True) if tokens is None else protocol.Observation(tokens=tokens)


class FakeCertifier(ProofVerifier):
    """Part (a) of the real one is enough for tests of the loop."""

    def judge(
        self,
        manifest: protocol.Manifest,
        proof: protocol.WeightProof,
        *,
        incarnation: int | None = None,
        epoch: int | None = None,
    ) -> ProofDecision:
        fits = proof.received_digest == manifest.digest and (proof.incarnation, proof.epoch) == (incarnation, epoch)
        return ProofDecision(admitted=fits, because="" if fits else "not the manifest's bytes", part="a", tensor="w")


@dataclass(eq=False)
class SimulatedProcess:
    """One incarnation's process."""

    member: Member
    body: Any
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0
    is_replaced: bool = False

    def __post_init__(self) -> None:
        self.running.set()


class FakeClient:
    """Calls that take a moment, hang with their process, and lose their answer when it dies."""

    def __init__(self, fleet: "SimulatedFleet", process: SimulatedProcess, on_effect: Callable[[str], None]) -> None:
        self.replica, self.incarnation = process.member
        self._fleet, self._process, self._on_effect = fleet, process, on_effect

    async def call(self, method: str, *args: Any) -> Any:
        self._on_effect(f"before {self.replica} {method}")
        # A call continues at the replica even when the caller dies: so it is the fleet's task, not the caller's.
        answer = await asyncio.shield(self._fleet.spawn(self._served(method, args)))
        self._on_effect(f"after {self.replica} {method}")
        return answer

    async def timed_call(self, method: str, *args: Any) -> tuple[Any, float]:
        now = asyncio.get_running_loop().time
        asked_at = now()
        return await self.call(method, *args), now() - asked_at

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
        try:
            if (failure := self._fleet.fails(self._process.member, method)) is not None:
                raise failure
            result = getattr(self._process.body, method)(*args)
            return await result if asyncio.iscoroutine(result) else result
        finally:
            await self._process.running.wait()  # a stopped process sends neither answer nor error


BODIES: Mapping[str, Callable[["SimulatedFleet", Member], FakeTrainer | FakeRollout | FakeReward]] = {
    "trainer": FakeTrainer,
    "rollout": FakeRollout,
    "reward": FakeReward,
}


class SimulatedFleet:
    """All fake processes and their supervisor. Times are seconds of the simulated loop."""

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
        self.microbatch_seconds: Callable[[ReplicaId], float] = lambda replica: MICROBATCH_SECONDS
        self.checkpoints: dict[int, tuple[CommitRecord, str]] = {}
        """Step -> commit, lineage."""
        self.write_seconds: Callable[[], float] = lambda: 0.05
        self.write_fails: Callable[[], bool] = lambda: False
        self.writes_survive = False
        """Whether a write goes on when its process is dead for the others: it is cut off, the file system is not."""
        self.load_fails: Callable[[str], Exception | None] = lambda path: None
        """What a trainer raises that is to load a checkpoint; the path is empty for the initial state."""
        self.fails: Callable[[Member, str], Exception | None] = lambda member, method: None
        """The exception of a process's own code in a call."""
        self.unreachable: set[Member] = set()
        """Trainers that no process group reaches."""
        self.list_fails: Callable[[str], Exception | None] = lambda folder: None
        self.parents: dict[str, str] = {}
        """Gradient digest -> that of the step before, on whose state it was computed; `first`: none."""
        self.optimizer: dict[int, dict[str, CommitRecord]] = {}
        """Step -> gradient digest -> commit: more than one digest only after going back to a checkpoint."""
        self.tokens_made: Counter[str] = Counter()
        """Request -> tokens generated for it by all engines: more than it has means that some were made again."""
        self.context_made: Counter[str] = Counter()
        """Of these, tokens before the request's window: their engine was lost, and the controller with
        it."""
        self.offsets_asked: Counter[str] = Counter()
        """Request -> tokens that a controller had of it when it asked for more."""
        self.pulls: list[FakeWeightPull] = []
        self.started_over: list[str] = []
        """Requests that were submitted with fewer tokens than a controller had had of them."""
        self.contexts_lost: list[str] = []
        """Windows submitted without all their predecessors."""
        self.turns_asked: list[tuple[ReplicaId, tuple[str, ...]]] = []
        """Conversations that were shown to an environment in one call."""
        self.environment_fails: Callable[[FakeReward, protocol.Conversation], protocol.Observation | None]
        self.environment_fails = lambda worker, asked: None
        """A failure in place of what the environment answers."""
        self.used: dict[GroupId, tuple[int, int, EndReason]] = {}
        """Group -> which tokens of its (last) sample were fresh when it was last trained on, and how they end."""
        self.off_policy: list[str] = []
        """Samples trained on in a step with another version than that of their tokens."""
        self.first_work: dict[int, float] = {}
        """Version -> when an engine first got requests to generate with it, seconds of the simulated loop."""
        self.problems: list[str] = []
        self.spoils: Callable[[ReplicaId, str], bool] = lambda replica, microbatch: False
        """Whether a microbatch is not finite at a trainer."""
        self.unusual: Callable[[ReplicaId, str], bool] = lambda replica, microbatch: False
        """Whether its numbers are outside the learned band there."""
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
        """A process that is READY at once, as the desired record asks."""
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

    def trainers(self) -> list[SimulatedProcess]:
        return [p for p in self.processes.values() if isinstance(p.body, FakeTrainer)]

    def rollouts(self) -> list[SimulatedProcess]:
        return [p for p in self.processes.values() if isinstance(p.body, FakeRollout)]

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
        """SIGCONT: it continues, and answers pending requests."""
        self.newest(replica).running.set()

    async def _recover(self, process: SimulatedProcess, seconds: float) -> None:
        replica, incarnation = process.member
        if not self.recovers:
            return
        await asyncio.sleep(seconds * self.rng.uniform(0.5, 1.5))
        if process.running.is_set() and not process.dead.is_set():
            return  # it came to itself
        if process.is_replaced:
            return  # it was killed while it hung
        process.is_replaced = True
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
                written = self.answers.written(seed)
                made = [v for at, v in enumerate(sample.versions) if at not in written]
                assert all(0 <= v <= step for v in made), f"{sample.versions} in step {step}"
                if any(v != step for v in made):
                    self.off_policy.append(f"{sample.request_id} in step {step}: {sample.versions}")
                assert sample.versions.count(protocol.ENVIRONMENT_VERSION) == len(sample.versions) - len(made)
                assert sample.first_fresh == group_start(group.group_id)
                self.used[group.group_id] = (sample.first_fresh, len(sample.tokens), sample.end)

    def check_hybrids(self) -> None:
        """While a step is trained, the engine beside each trainer sleeps, or has nothing to do yet."""
        for n in range(self.job.num_hybrids):
            engine = self.newest(f"rollout/{n}")
            is_fenced = self.journal.current()[engine.member[0]].state is ReplicaState.LOST
            if not is_fenced and not engine.dead.is_set() and engine.running.is_set():
                assert engine.body.asleep or not engine.body.held, f"rollout/{n} works beside its trainer"

    def check_filter(self, group: PromptGroup) -> None:
        """With dynamic sampling no group is trained on that teaches nothing."""
        algorithm = self.job.algorithm
        if algorithm.dynamic_sampling and algorithm.at_refill_limit == "fail":
            rewards = {s.reward for s in group.samples}
            assert len(rewards) > 1, f"{group.group_id}: trained on, although all rewards are {rewards}"
