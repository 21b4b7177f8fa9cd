"""Learning in one process, to compare algorithms in tests and benchmarks. No Ray, no controller, no faults.

    Writer      generates answers with the weights of some version: the library's model, or a real engine
    Source      input of a step: whole groups, informative groups, or windows of answers
    learn       steps of a real trainer replica, with samples of the requested staleness

The controller's part of an algorithm is reduced to its simplest form: uninformative groups are regenerated, slots of
finished answers are refilled at once, and a window continues after the tokens of the previous one.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import replica_id
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.algorithms.sampler import GroupSignal, classify_rewards, not_filled
from rolecall.rl_runtime.protocol.messages import (
    ComputedMicrobatch,
    EndReason,
    Microbatch,
    PromptGroup,
    StepResult,
    TrainingSample,
    UnusualMicrobatches,
)
from rolecall.rl_runtime.rollout.engine import EngineSettings, VllmEngine
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.tasks.task import Task, group_id
from rolecall.rl_runtime.trainer.band import LearnedBand
from rolecall.rl_runtime.trainer.model import load_model_folder
from rolecall.rl_runtime.trainer.trainer import TrainerReplica

TRAINER = replica_id("trainer", 0)
LEDGER = ChainHead(position=0, hash=GENESIS)
HELD_OUT = 10**9
"""Numbers of prompts for examinations: no run ever comes so far. Short prompts may be the same all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSequence:
    """A prompt and what has been written behind it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def continued(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> "GeneratedSequence":
        return GeneratedSequence(
            prompt=self.prompt,
            tokens=(*self.tokens, *tokens),
            logprobs=(*self.logprobs, *logprobs),
            versions=(*self.versions, *[version] * len(tokens)),
        )


class SequenceGenerator(Protocol):
    version: int

    def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None: ...

    def write(self, lines: Sequence[GeneratedSequence], upto: Sequence[int]) -> list[GeneratedSequence]:
        """Each line with more tokens: up to the end token, or until it has `upto` of them."""


class ModelSequenceGenerator:
    """The library's model, which has a cache. Lines of one length are written together."""

    def __init__(self, folder: Path, *, eos: int, seed: int) -> None:
        self.model = load_model_folder(folder)
        self.version = -1
        self._eos, self._rng = eos, torch.Generator().manual_seed(seed)

    def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)
        self.version = version

    @torch.no_grad()
    def write(self, lines: Sequence[GeneratedSequence], upto: Sequence[int]) -> list[GeneratedSequence]:
        alike: dict[tuple[int, int], list[int]] = {}
        for i, (line, limit) in enumerate(zip(lines, upto, strict=True)):
            alike.setdefault((len(line.prompt) + len(line.tokens), limit - len(line.tokens)), []).append(i)
        written = list(lines)
        for (_, more), rows in sorted(alike.items()):
            for i, (tokens, logprobs) in zip(rows, self._more([lines[i] for i in rows], more), strict=True):
                written[i] = lines[i].continued(tokens, logprobs, self.version)
        return written

    def _more(self, lines: Sequence[GeneratedSequence], limit: int) -> list[tuple[list[int], list[float]]]:
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in lines]
        going = list(range(len(lines)))
        tokens = torch.tensor([(*line.prompt, *line.tokens) for line in lines])
        cache: Any = None
        for _ in range(limit):
            out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            logprobs = torch.log_softmax(out.logits[:, -1].float(), dim=-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self._rng)
            for i, token, logprob in zip(
                going, tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist(), strict=True
            ):
                made[i][0].append(token)
                made[i][1].append(logprob)
            left = [k for k, i in enumerate(going) if made[i][0][-1] != self._eos]
            if not left:
                break
            if len(left) < len(going):
                rows = torch.tensor(left)
                cache.batch_select_indices(rows)
                tokens, going = tokens[rows], [going[k] for k in left]
        return made


class EngineSequenceGenerator:
    """A real engine in this process: it computes all lines together, whatever their lengths."""

    def __init__(self, folder: Path, *, seed: int, num_seqs_max: int = 128) -> None:
        self.engine = VllmEngine(EngineSettings(model_dir=str(folder), num_seqs_max=num_seqs_max, seed=seed))
        self.version = -1
        self.num_steps = 0  # forward passes of the engine so far
        self._seed, self._num_written = seed, 0

    def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self.engine.load(weights)
        self.version = version

    def write(self, lines: Sequence[GeneratedSequence], upto: Sequence[int]) -> list[GeneratedSequence]:
        for i, (line, limit) in enumerate(zip(lines, upto, strict=True)):
            self._num_written += 1
            seed = (self._seed * 1_000_003 + self._num_written) % 2**31
            tokens = (*line.prompt, *line.tokens)
            self.engine.add(str(i), tokens, num_new_max=limit - len(line.tokens), seed=seed)
        written = list(lines)
        while self.engine.num_in_flight:
            self.num_steps += 1
            for new in self.engine.step():
                i = int(new.request_id)
                written[i] = written[i].continued(new.tokens, new.logprobs, self.version)
        return written


def sample_of(request_id: str, line: GeneratedSequence, task: Task, *, first_fresh: int = 0) -> TrainingSample:
    """A line as the trainer wants it; its reward, if it is over."""
    end = EndReason.TRUNCATED
    if line.tokens[-1] == task.vocab.eos:
        end = EndReason.STOP
    elif len(line.tokens) >= task.max_response_tokens:
        end = EndReason.LENGTH
    return TrainingSample(
        request_id=request_id,
        tokens=line.tokens,
        logprobs=line.logprobs,
        versions=line.versions,
        reward=0.0 if end is EndReason.TRUNCATED else task.reward(line.prompt, line.tokens),
        end=end,
        first_fresh=first_fresh,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """The groups of one step, and what was generated for it."""

    groups: tuple[PromptGroup, ...]
    over: tuple[TrainingSample, ...]  # all answers that ended, those of filtered groups too
    num_groups: int
    num_filtered: int
    num_tokens: int

    @property
    def reward(self) -> float | None:
        """Mean over the answers that ended, as the task gave it."""
        return sum(s.reward for s in self.over) / len(self.over) if self.over else None


class BatchGenerator:
    """Gives each step exactly its groups. The same for the same writer."""

    def __init__(self, job: JobConfig, task: Task, writer: SequenceGenerator) -> None:
        self._task, self._writer, self._algorithm = task, writer, job.algorithm
        self._step = self._number = 0
        self._open: dict[int, GeneratedSequence] = {}  # prompt number -> an answer that its next window continues with

    def generate(self) -> GeneratedBatch:
        """For one step.

        Raises:
            BatchNotFilled: dynamic sampling found too few informative groups.
        """
        a, step = self._algorithm, self._step
        self._step += 1
        if a.window_tokens is not None:
            kept = made = self._windows(a.window_tokens)
        elif a.dynamic_sampling:
            kept, made = self._filtered(step)
        else:
            kept = made = self._groups(a.groups_per_step)
        samples = [s for g in made for s in g.samples]
        return GeneratedBatch(
            groups=tuple(kept),
            over=tuple(s for s in samples if s.is_over),
            num_groups=len(made),
            num_filtered=len(made) - len(kept),
            num_tokens=sum(len(s.tokens) - s.first_fresh for s in samples),
        )

    def _filtered(self, step: int) -> tuple[list[PromptGroup], list[PromptGroup]]:
        """(those of the step, all that were generated for it)."""
        a, made, kept, spare = self._algorithm, list[PromptGroup](), list[PromptGroup](), list[PromptGroup]()
        verdicts = Counter[GroupSignal]()
        while (missing := a.groups_per_step - len(kept)) > 0:
            room = a.refills_max * a.groups_per_step - len(made)
            if room == 0 and a.at_refill_limit == "fail":
                raise not_filled(a, step, accepted=len(kept), verdicts=verdicts)
            if room == 0:
                return [*kept, *spare[-missing:]], made
            for group in self._groups(min(missing, room)):
                verdict = classify_rewards([s.reward for s in group.samples], a.filter_by)
                made.append(group)
                (kept if verdict is GroupSignal.INFORMATIVE else spare).append(group)
                verdicts[verdict] += verdict is not GroupSignal.INFORMATIVE
        return kept, made

    def _next(self, count: int) -> Iterator[int]:
        for _ in range(count):
            yield self._number
            self._number += 1

    def _groups(self, count: int) -> list[PromptGroup]:
        size = self._algorithm.group_size
        prompts = [self._task.prompt(n) for n in self._next(count)]
        lines = [GeneratedSequence(prompt=p.tokens) for p in prompts for _ in range(size)]
        written = self._writer.write(lines, [self._task.max_response_tokens] * len(lines))
        groups = []
        for i, prompt in enumerate(prompts):
            own = enumerate(written[i * size : (i + 1) * size])
            samples = tuple(sample_of(f"{prompt.group_id}.{k}", line, self._task) for k, line in own)
            groups.append(PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples))
        return groups

    def _windows(self, window_tokens: int) -> list[PromptGroup]:
        for number in self._next(self._algorithm.groups_per_step - len(self._open)):
            self._open[number] = GeneratedSequence(prompt=self._task.prompt(number).tokens)
        before, longest = list(self._open.items()), self._task.max_response_tokens
        upto = [min(longest, len(line.tokens) + window_tokens) for _, line in before]
        groups = []
        for (number, old), line in zip(before, self._writer.write([x for _, x in before], upto), strict=True):
            start = len(old.tokens)
            name = group_id(number, start)
            sample = sample_of(f"{name}.0", line, self._task, first_fresh=start)
            groups.append(PromptGroup(group_id=name, prompt_tokens=line.prompt, samples=(sample,)))
            self._open[number] = line
            if sample.is_over:
                del self._open[number]
        return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurvePoint:
    """One step of a learning curve."""

    step: int
    reward: float | None  # of the answers that ended, as the task gave it; None: none did
    exact: float | None  # share of them that are exact
    generated: GeneratedBatch
    result: StepResult
    band: LearnedBand  # after the step
    write_seconds: float
    train_seconds: float


def examine(writer: SequenceGenerator, task: Task, *, num_prompts: int) -> tuple[float, float]:
    """(mean reward, share of exact answers) of whole answers to prompts of numbers that no step ever had."""
    prompts = [task.prompt(HELD_OUT + n).tokens for n in range(num_prompts)]
    written = writer.write([GeneratedSequence(prompt=p) for p in prompts], [task.max_response_tokens] * num_prompts)
    rewards = [task.reward(line.prompt, line.tokens) for line in written]
    return sum(rewards) / num_prompts, sum(r == 1.0 for r in rewards) / num_prompts


def train_alone(trainer: TrainerReplica, step: int, work: Sequence[Microbatch], *, epoch: int = 1) -> StepResult:
    """A step of the only trainer. As under a controller, unusual microbatches are computed once more."""
    ids, first = [m.microbatch_id for m in work], tuple[ComputedMicrobatch, ...]()
    while True:
        try:
            return trainer.train_step(1, epoch, step, work, ids, LEDGER, [trainer.replica], first)
        except UnusualMicrobatches as e:
            first = e.microbatches  # only these are considered


def learn(
    job: JobConfig, writer: SequenceGenerator, *, num_steps: int, staleness: int, clock: Clock | None = None
) -> Iterator[LearningCurvePoint]:
    """Trains one replica, step by step; samples are made by the weights of `staleness` versions ago.

    Between two points `writer` holds the weights that made the last one's samples.
    """
    clock = clock or SystemClock()
    source = BatchGenerator(job, task_of(job), writer)
    trainer = TrainerReplica(replica=TRAINER, incarnation=1, job=job)
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    versions = deque([(0, trainer.state.policy_tensors(0))], maxlen=staleness + 1)
    try:
        for step in range(num_steps):
            began = clock.monotonic()
            if writer.version != versions[0][0]:
                writer.load(*versions[0])
            made = source.generate()
            written = clock.monotonic()
            longest = job.task.max_response_tokens
            statistics = step_statistics(made.groups, job.algorithm, longest=longest)
            work = form_microbatches(step, made.groups, job.algorithm.microbatches_per_step, statistics)
            result = train_alone(trainer, step, work)
            versions.append((step + 1, trainer.state.policy_tensors(step + 1)))
            exact = sum(s.reward == 1.0 for s in made.over) / len(made.over) if made.over else None
            yield LearningCurvePoint(
                step=step,
                reward=made.reward,
                exact=exact,
                generated=made,
                result=result,
                band=trainer.state.band,
                write_seconds=written - began,
                train_seconds=clock.monotonic() - written,
            )
    finally:
        trainer.close()
