"""A trainer replica in a process of its own, driven over a pipe, that can be stopped at a named checkpoint.

The test is the controller. `stops={"bucket": 2}` makes the process report `("at", "bucket")` when it comes to its
second bucket, and wait there until `go_on`: a kill then comes at exactly that place, and the report proves that it did.
"""

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from rolecall.agent.reporter import reporter
from rolecall.core.config.job import DeviceName, JobConfig, parse_job
from rolecall.core.errors import RolecallError
from rolecall.core.ids import ReplicaId, replica_id
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.objective import Divisors
from rolecall.rl_runtime.protocol.messages import CommitRecord, EndReason, Microbatch, PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.task import Prompt, make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.ranks import Ranks
from rolecall.rl_runtime.trainer.reduce import LOOPBACK, EpochStore
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from tests.netns import Machine

LEDGER = ChainHead(position=0, hash=GENESIS)
BUCKET_BYTES = 32 << 10
DEADLINE_SECONDS = 60.0
GO_ON = "go on"
CUT = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0), "o_proj": 1, "down_proj": 1}
"""Layer -> dimension of its weight that tensor ranks share. Of its adapter, the matrix on that side is cut in the same
dimension; the other one is whole."""
WHOLE = {"lora_A": 0, "lora_B": 1}
"""Matrix of an adapter -> dimension that tensor ranks do not share."""
PRELOADED = [
    "tests.rl_runtime.trainer_process",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "rolecall.rl_runtime.trainer.sharding_exchanges",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "peft",
]
"""Imported once by the server that processes are forked from, not by each process: these are seconds of CPU each time.
One list for all tests: the server starts with the first test that needs it, and later changes of its list do nothing."""
START_SECONDS = 180.0
"""Deadline of a process's start, with imports, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trainer runs: on a machine of a test's network, under an agent. By default here, under none."""

    machine: Machine | None = None
    node_dir: str = ""  # of the agent that it registers with
    secret: str = ""
    rank: int = 0
    num_ranks: int = 1
    num_tensor: int = 1
    store: tuple[str, int] = ("", 0)  # where the ranks of the replica meet
    float64: bool = False
    device: DeviceName = "cpu"


def tiny_job(name: str = "grpo", *, algorithm: Mapping[str, Any] | None = None, **runtime: Any) -> JobConfig:
    """Four microbatches of one group of four samples; about 10 k parameters, three buckets. T-PPO: of four windows.

    `algorithm`: more settings of it; all other keywords are settings of section `runtime`.
    """
    own = {"groups_per_microbatch": 4, "window_tokens": 3} if name == "tppo" else {"group_size": 4}
    return parse_job(
        {
            "model": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_layers": 1,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 16,
            },
            "task": {"num_digits": 4},
            "algorithm": {
                "name": name,
                "microbatches_per_step": 4,
                "groups_per_microbatch": 1,
                "learning_rate": 1e-3,
                **own,
                **(algorithm or {}),
            },
            "runtime": runtime,
        }
    )


def make_microbatches(job: JobConfig, step: int, *, behind: int | None = None) -> tuple[Microbatch, ...]:
    """Groups with random answers and made-up log-probabilities: the gradient does not ask where they came from.

    Of T-PPO, every other window is cut, and has a token of context. `behind`: versions by which every token is older
    than the trained weights; None: up to two, at random.
    """
    vocab = vocabulary(job.model, job.task.name)
    task = make_task(job.task, vocab, job.seed)
    rng = random.Random(step)

    def sample(prompt: Prompt, index: int, cut: bool) -> TrainingSample:
        tokens = tuple(rng.randrange(vocab.size) for _ in range(rng.randint(2, task.max_response_tokens)))
        return TrainingSample(
            request_id=f"{prompt.group_id}.{index}",
            tokens=tokens,
            logprobs=tuple(rng.uniform(-3.0, -1.5) for _ in tokens),
            versions=tuple(max(0, step - (rng.randint(0, 2) if behind is None else behind)) for _ in tokens),
            reward=task.reward(prompt.tokens, tokens),
            end=EndReason.TRUNCATED if cut else EndReason.STOP,
            first_fresh=int(cut),
        )

    groups = []
    for number in range(step * job.algorithm.groups_per_step, (step + 1) * job.algorithm.groups_per_step):
        prompt = task.prompt(number)
        cut = job.algorithm.window_tokens is not None and number % 2 == 1
        samples = tuple(sample(prompt, index, cut) for index in range(job.algorithm.group_size))
        groups.append(PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples))
    return form_microbatches(step, groups, job.algorithm.microbatches_per_step)


class Spied(TrainerReplica):
    """Keeps the gradients that its optimizers were given, by step and parameter: divided, not yet clipped."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        apply = self.state.apply

        def spy(sums: torch.Tensor, by: Divisors, commit: Any, band: Any, *draft: Any) -> float:
            state, start = self.state, 0
            found = self.gradients[commit.step] = {}
            for network, divisor in ((state.policy, by.policy), (state.critic, by.value)):
                if network is None:
                    continue
                for name, p in zip(network.names, network.masters, strict=True):
                    found[f"{network.prefix}{name}"] = sums[start : start + p.numel()].view(p.shape) / divisor
                    start += p.numel()
            assert start == sums.numel()
            return apply(sums, by, commit, band, *draft)

        self.state.apply = spy  # type: ignore[assignment, method-assign]

    def gradient_of(self, step: int) -> dict[str, Any]:
        return {n: g.cpu().numpy() for n, g in self.gradients[step].items()}

    def exported(self, whole: bool = False) -> tuple[dict[str, Any], str]:
        tensors, meta = self.state.export(whole=whole)
        return {n: t.numpy() for n, t in tensors.items()}, meta

    def commit_record(self) -> CommitRecord:
        return self.state.commit

    def computed(self, step: int) -> tuple[str, ...]:
        return self._partial.computed(step)

    def policy_tensors(self, version: int) -> dict[str, torch.Tensor]:
        return self.state.policy_tensors(version)

    def previous_rows(self, version: int) -> dict[str, Any]:
        return {n: t.float().numpy() for n, t in self.state.previous[version].items()}

    def take(self, tensors: dict[str, Any], meta: str, whole: bool = False) -> None:
        self.load_state({n: torch.from_numpy(t) for n, t in tensors.items()}, meta, whole=whole)

    def corrupt_weight(self, network: str = "policy", by: float = 1.0) -> None:
        """One weight differs, and so does this replica's digest."""
        with torch.no_grad():
            getattr(self.state, network).masters[0].view(-1)[-1] += by
        self.state.weights_digest = self.state._digest_weights()


def serve(
    conn: Connection,
    replica: ReplicaId,
    job: JobConfig,
    stops: dict[str, int],
    raises: dict[str, int],
    has_state: bool,
    place: Place,
) -> None:
    """Body of the process: obeys (method, args) until the pipe closes."""
    if place.machine is not None:
        place.machine.enter()  # before there is a second thread
    if place.node_dir:
        reporter.start(replica=replica, rank=place.rank, incarnation=1, secret=place.secret, node_dir=place.node_dir)
    ranks = Ranks(
        place.rank,
        place.num_ranks,
        tensor=place.num_tensor,
        host=place.store[0],
        port=place.store[1],
        seconds=DEADLINE_SECONDS,
        device=place.device,
    )
    seen: Counter[str] = Counter()

    def next_message() -> Any:
        try:
            return conn.recv()
        except (EOFError, OSError):
            os._exit(0)

    def at(name: str) -> None:
        seen[name] += 1
        if stops.get(name) == seen[name]:
            conn.send(("at", name))
            assert next_message() == GO_ON
        if raises.get(name) == seen[name]:
            raise ValueError("a mistake in user code")

    trainer = Spied(
        replica=replica,
        incarnation=1,
        job=job,
        has_state=has_state,
        bucket_bytes=BUCKET_BYTES,
        address=place.machine.address if place.machine is not None else LOOPBACK,
        dtype=torch.float64 if place.float64 else torch.float32,
        ranks=ranks,
        on_microbatch=lambda: at("microbatch"),
        on_bucket=lambda: at("bucket"),
        on_stage=at,
        on_publish=lambda version: at("publish"),
    )
    conn.send(("ready", os.getpid()))
    while True:
        method, args = next_message()
        if method == "stop_at":
            name, times = args
            stops[name] = seen[name] + times
            conn.send(("ok", None))
            continue
        try:
            conn.send(("ok", getattr(trainer, method)(*args)))
        except (RolecallError, ValueError) as e:
            conn.send(("error", e))


class TrainerProcess:
    """The test's handle on one process."""

    def __init__(
        self,
        index: int,
        job: JobConfig,
        *,
        stops: Mapping[str, int],
        raises: Mapping[str, int],
        has_state: bool,
        place: Place,
    ) -> None:
        self.replica = replica_id("trainer", index)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self.replica, job, dict(stops), dict(raises), has_state, place), daemon=True
        )
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        assert self._receive(START_SECONDS) == ("ready", self._process.pid)

    def send(self, method: str, *args: Any) -> None:
        self._conn.send((method, args))

    def answer(self, seconds: float = DEADLINE_SECONDS) -> Any:
        """The result of what was reported first. Raises what the trainer raised."""
        kind, value = self._receive(seconds)
        if kind == "error":
            raise value
        assert kind == "ok", (kind, value)
        return value

    def ask(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.answer()

    def arrives_at(self, name: str) -> None:
        assert self._receive() == ("at", name)

    def stop_at(self, name: str, times: int) -> None:
        """From now on it stops when it comes to `name` for the `times`-th time."""
        self.ask("stop_at", name, times)

    def go_on(self) -> None:
        """Continues from its checkpoint."""
        self._conn.send(GO_ON)

    def arrives_somewhere(self) -> None:
        assert self._receive()[0] == "at"

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(DEADLINE_SECONDS)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self._conn.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join(DEADLINE_SECONDS)
        self._process.close()

    def _receive(self, seconds: float = DEADLINE_SECONDS) -> tuple[str, Any]:
        if not self._conn.poll(seconds):
            raise AssertionError(f"{self.replica} gave no answer within {seconds} s")
        kind, value = self._conn.recv()
        return kind, value


class RankedReplica:
    """A replica of several ranks, each a process; answers like one."""

    def __init__(
        self,
        team: "Team",
        index: int,
        ranks: int,
        *,
        tensor: int = 1,
        float64: bool = False,
        node_dir: str = "",
        **of_the_last: Any,
    ) -> None:
        self.replica, self._tensor = replica_id("trainer", index), tensor
        self._store = EpochStore(LOOPBACK, DEADLINE_SECONDS)
        at = (self._store.host, self._store.port)
        self.ranks = [
            team.start(
                index,
                place=Place(
                    rank=rank, num_ranks=ranks, num_tensor=tensor, store=at, float64=float64, node_dir=node_dir
                ),
                **(of_the_last if rank == ranks - 1 else {}),
            )
            for rank in range(ranks)
        ]

    def ready(self) -> None:
        for rank in self.ranks:
            rank.ready()

    def send(self, method: str, *args: Any) -> None:
        for rank in self.ranks:
            rank.send(method, *args)

    def answers(self) -> list[Any]:
        """Of all ranks. Raises what the first one raised, after all have answered; all raise the same."""
        found: list[Any] = []
        errors: list[RolecallError] = []
        for rank in self.ranks:
            try:
                found.append(rank.answer())
            except RolecallError as e:
                errors.append(e)
        if errors:
            assert not found and len({str(e) for e in errors}) == 1, (found, errors)
            raise errors[0]
        return found

    def answer(self) -> Any:
        return self.answers()[0]

    def ask(self, method: str, *args: Any) -> Any:
        if method == "open_store":
            return self.ranks[0].ask(method, *args)
        self.send(method, *args)
        return self.answer()

    def gathered(self, method: str, *args: Any) -> dict[str, Any]:
        """Tensors of all ranks, put together: by rows, then what tensor ranks have cut. What each of these has must be the
        same, bit for bit."""
        self.send(method, *args)
        found = self.answers()
        return {name: self._whole(name, [of_rank[name] for of_rank in found]) for name in found[0]}

    def _whole(self, name: str, parts: list[Any]) -> Any:
        whole = [np.concatenate(parts[index :: self._tensor]) for index in range(self._tensor)]
        of_name = name.split(".")
        cut = next((CUT[part] for part in of_name if part in CUT), whole[0].ndim)
        if any(WHOLE.get(part) == cut for part in of_name):
            cut = whole[0].ndim
        if cut < whole[0].ndim:  # the bias of a row-wise layer is whole
            return np.concatenate(whole, axis=cut) if self._tensor > 1 else whole[0]
        assert all(np.array_equal(whole[0], other) for other in whole), name
        return whole[0]


class Team:
    """A controller's part, as small as a test needs it."""

    def __init__(self, job: JobConfig) -> None:
        self.job, self.epoch = job, 0
        self.members: list[TrainerProcess | RankedReplica] = []
        self.all: list[TrainerProcess] = []

    def start(
        self,
        index: int,
        *,
        stops: Mapping[str, int] | None = None,
        raises: Mapping[str, int] | None = None,
        has_state: bool = True,
        place: Place | None = None,
    ) -> TrainerProcess:
        process = TrainerProcess(
            index, self.job, stops=stops or {}, raises=raises or {}, has_state=has_state, place=place or Place()
        )
        self.all.append(process)
        return process

    def join(self, members: Sequence["TrainerProcess | RankedReplica"]) -> None:
        """Makes the next epoch of these."""
        self.tell_join(members)
        for member in members:
            member.answer()

    def tell_join(self, members: Sequence["TrainerProcess | RankedReplica"]) -> None:
        self.epoch += 1
        self.members = list(members)
        host, port = members[0].ask("open_store", self.epoch) if len(members) > 1 else ("127.0.0.1", 0)
        for rank, member in enumerate(members):
            member.send("join", 1, self.epoch, rank, len(members), host, port)

    def tell_step(self, step: int, shares: Mapping[Any, list[int]], *, behind: int | None = None) -> None:
        microbatches = make_microbatches(self.job, step, behind=behind)
        ids = [m.microbatch_id for m in microbatches]
        names = [m.replica for m in self.members]
        for member, numbers in shares.items():
            mine = [microbatches[n] for n in numbers]
            member.send("train_step", 1, self.epoch, step, mine, ids, LEDGER, names)

    def close(self) -> None:
        for process in self.all:
            process.close()
