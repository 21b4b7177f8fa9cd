"""Runs: what each is, and one of them carried out. Records are lines of JSON, one a run.

Settings come from the algorithms' defaults, so a run is what a job file that says only `algorithm.name` would do. All
samples are as stale as a default job allows (`STALENESS`): the hardest that a real run does.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from rolecall.core.config.algorithm import FILTERS, AlgorithmName
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import BatchNotFilled
from rolecall.rl_runtime.protocol.messages import EndReason
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.trainer.model import write_model_folder
from tests.rl_runtime.learning import (
    EngineSequenceGenerator,
    LearningCurvePoint,
    ModelSequenceGenerator,
    examine,
    learn,
)

SEEDS = (0, 1, 2, 3, 4)
"""Of the measurement. Settings were tuned on seeds from 100 on."""
STALENESS = 2
"""Versions: what a default job's `runtime.staleness_max` allows."""
EXAM_PROMPTS = 256
DIGITS = 4
"""Significant digits of what is kept."""
CURVES, SMALLER, PARTS, RACE = "curves", "smaller", "parts", "race"
SMALL = {"hidden_size": 64, "intermediate_size": 128}
"""Model of all parts but `curves`: a step costs a third, so that an hour of two CPUs is enough for five seeds of
everything."""
SMALLER_DIGITS, SMALLER_WINDOW = 8, 10
"""Of digit_parity: a right answer has 9 tokens, the longest 12. By T-PPO's default no window would be cut there."""
PARTS_DIGITS, RACE_DIGITS = 6, 12
"""Most places of a number: answers have 3 to 13 and 3 to 25 tokens. In the race a sixth are longer than a window of
16."""
NOT_FILLED = "not filled: "
"""How `ended` begins where dynamic sampling found no full batch, in most cases because everything is solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy trained from random weights. It ends with its steps or its seconds, whichever comes first."""

    part: str
    name: str  # of its line in the tables
    seed: int
    job: Mapping[str, Any]
    steps_max: int
    seconds_max: float  # of generating and training, without examinations: by the clock with an engine, else of CPU
    with_engine: bool = False
    exam_every: int = 0  # steps; 0: only at the end

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def curves(*, steps: int, seconds: float, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """GRPO, DAPO, PPO and T-PPO on the default job."""
    return [
        Run(
            part=CURVES,
            name=name,
            seed=seed,
            job={"algorithm": {"name": name}},
            steps_max=steps,
            seconds_max=seconds,
        )
        for seed in seeds
        for name in ("grpo", "dapo", "ppo", "tppo")
    ]


def smaller(*, steps: int, seconds: float, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """GRPO, DAPO, PPO and T-PPO on a smaller model and shorter answers."""
    job = {"task": {"num_digits": SMALLER_DIGITS}, "model": SMALL}
    cut = {"algorithm": {"name": str(AlgorithmName.TPPO), "window_tokens": SMALLER_WINDOW}}
    return [
        replace(run, part=SMALLER, job={**job, **(cut if run.name == AlgorithmName.TPPO else run.job)})
        for run in curves(steps=steps, seconds=seconds, seeds=seeds)
    ]


def dapo_parts() -> dict[str, dict[str, Any]]:
    """Line of the table -> section `algorithm`, each one part more than the one before; the last one is DAPO."""
    dapo = settings_of(AlgorithmName.DAPO)
    without = {
        "aggregation": "sample",
        "clip_high": dapo["clip_low"],
        "overlong_buffer_tokens": 0,
        "dynamic_sampling": False,
    }
    settings = {**{k: v for k, v in dapo.items() if k not in FILTERS}, **without, "name": "grpo"}
    found = {"GRPO": settings}
    for part, keys in (
        ("+ clip-higher", ("clip_high",)),
        ("+ token-level loss", ("aggregation",)),
        ("+ overlong punishment", ("overlong_buffer_tokens",)),
        ("+ dynamic sampling", ("dynamic_sampling", *FILTERS)),
    ):
        settings = {**settings, **{k: dapo[k] for k in keys}}
        found[part] = settings
    return found


def addition(num_digits: int) -> dict[str, Any]:
    return {"name": "long_addition", "num_digits": num_digits}


def settings_of(name: AlgorithmName) -> dict[str, Any]:
    """All that a job file which says only this name stands for."""
    return parse_job({"algorithm": {"name": str(name)}}).algorithm.model_dump(mode="json")


def parts(*, steps: int, seconds: float, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """DAPO's four parts, switched on one by one, where lengths vary."""
    return [
        Run(
            part=PARTS,
            name=name,
            seed=seed,
            job={"task": addition(PARTS_DIGITS), "model": SMALL, "algorithm": settings},
            steps_max=steps,
            seconds_max=seconds,
        )
        for seed in seeds
        for name, settings in dapo_parts().items()
    ]


def race(*, seconds: float, exam_every: int, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """PPO and T-PPO with a real engine and the same time: T-PPO's settings, without the window for PPO.

    So PPO's answers of a step are each to a prompt of its own, and it has as many of them as T-PPO has windows.
    """
    tppo = {k: v for k, v in settings_of(AlgorithmName.TPPO).items() if k != "window_tokens"}  # its task says it
    ppo = {k: v for k, v in tppo.items() if k not in ("truncation_value", "prefixes")} | {
        "name": str(AlgorithmName.PPO)
    }
    return [
        Run(
            part=RACE,
            name=str(settings["name"]),
            seed=seed,
            job={"task": addition(RACE_DIGITS), "model": SMALL, "algorithm": settings},
            steps_max=100_000,
            seconds_max=seconds,
            with_engine=True,
            exam_every=exam_every,
        )
        for seed in seeds
        for settings in (ppo, tppo)
    ]


def row_of(point: LearningCurvePoint) -> dict[str, float | None]:
    """What is kept of a step. Lengths and rewards are of all answers that ended, those of filtered groups too."""
    made, health = point.generated, point.result.health
    over = len(made.over)
    return {
        "reward": point.reward,
        "exact": point.exact,
        "over": over,
        "length": sum(len(s.tokens) for s in made.over) / over if over else None,
        "truncated": sum(s.end is EndReason.LENGTH for s in made.over) / over if over else None,
        "groups": made.num_groups,
        "filtered": made.num_filtered,
        "samples": sum(len(g.samples) for g in made.groups),
        "tokens": made.num_tokens,
        "context": sum(len(g.prompt_tokens) + s.first_fresh for g in made.groups for s in g.samples),
        "entropy": health.entropy,
        "clipped_low": health.clip_fraction_low,
        "clipped_high": health.clip_fraction_high,
        "write_seconds": point.write_seconds,
        "train_seconds": point.train_seconds,
    }


def writer_of(job: JobConfig, folder: Path, *, with_engine: bool) -> ModelSequenceGenerator | EngineSequenceGenerator:
    write_model_folder(folder, job.model, 0, job.task.name)
    if with_engine:
        return EngineSequenceGenerator(folder, seed=job.seed, num_seqs_max=job.algorithm.groups_per_step)
    return ModelSequenceGenerator(folder, eos=task_of(job).vocab.eos, seed=job.seed)


def carried_out(run: Run, commit: str) -> dict[str, Any]:
    """The record of a run."""
    torch.set_num_threads(1)
    job = parse_job({**run.job, "seed": run.seed})
    load_before, rows, exams, seconds = os.getloadavg()[0], list[dict[str, float | None]](), list[list[float]](), 0.0
    ended = "steps"
    with tempfile.TemporaryDirectory() as folder:
        writer = writer_of(job, Path(folder), with_engine=run.with_engine)
        task = task_of(job)
        with contextlib.closing(learn(job, writer, num_steps=run.steps_max, staleness=STALENESS)) as points:  # type: ignore[type-var]
            while True:
                cpu, forwards = time.process_time(), _forwards(writer)
                try:
                    point = next(points, None)
                except BatchNotFilled as e:
                    ended = f"{NOT_FILLED}{e}"
                    break
                if point is None:
                    break
                cpu_seconds = time.process_time() - cpu
                spent = {"cpu_seconds": cpu_seconds, "forwards": _forwards(writer) - forwards}
                rows.append({**row_of(point), **spent})
                seconds += point.write_seconds + point.train_seconds if run.with_engine else cpu_seconds
                if run.exam_every and point.step % run.exam_every == run.exam_every - 1:
                    exams.append([point.step + 1, seconds, *examine(writer, task, num_prompts=EXAM_PROMPTS)])
                if seconds >= run.seconds_max:
                    ended = "time"
                    break
        final = examine(writer, task, num_prompts=EXAM_PROMPTS)
        if isinstance(writer, EngineSequenceGenerator):
            writer.engine.close()
    return {
        "commit": commit,
        "run": asdict(run),
        "algorithm": job.algorithm.model_dump(mode="json"),
        "ended": ended,
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "final": _short(final),
        "exams": [_short(exam) for exam in exams],
        "columns": {name: _short(row[name] for row in rows) for name in (rows[0] if rows else ())},
    }


def _forwards(writer: ModelSequenceGenerator | EngineSequenceGenerator) -> int:
    return writer.num_steps if isinstance(writer, EngineSequenceGenerator) else 0


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [v if v is None or isinstance(v, int) else float(f"{v:.{DIGITS}g}") for v in values]


def read(path: Path, commits: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Records of these commits, or all; of a run that was repeated the last one."""
    found = [record for record in common.read_lines(path) if record["commit"] in commits or not commits]
    return list({Run(**r["run"]).key: r for r in found}.values())


def missing(runs: Iterable[Run], records: Iterable[Mapping[str, Any]]) -> list[Run]:
    there = {Run(**record["run"]).key for record in records}
    return [run for run in runs if run.key not in there]
