"""Does the example with a real model learn, and what do losses of replicas cost it? (`examples/smollm2`)

    python -m benchmarks.learning.own_model                       three seeds, each without faults and with two
    python -m benchmarks.learning.own_model --seeds 0 --steps 3   a short trial, which makes no report
    python -m benchmarks.learning.own_model --report-only         the report again

Before: `examples/smollm2/prepare.py` has written the model's folder (`--model`). Each run is a whole `rolecall run` of
the example's job file; with faults, a rollout is killed after a third of the steps and a trainer after two thirds
(`rolecall inject`). Afterwards `rolecall export` writes the trained model. Initial and trained model answer the same
held-out prompts, of which none is in the training data: greedily, and with samples as in training; with vLLM, in a
process of its own.

Each run is a line of `results/own_model.jsonl` as soon as it is over. What is there at this commit is not done again.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.config.job import JobConfig, load_job, parse_job
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import StepCommitted

EXAMPLE = common.ROOT / "examples" / "smollm2"
RECORDS = common.RESULTS / "own_model.jsonl"
SEEDS = (0, 1, 2)
NUM_HELD_OUT = 100
NUM_SAMPLES = 4
"""Of each held-out prompt, as sampled in training."""
FAULTS = (("rollout-kill", 1 / 3), ("trainer-kill", 2 / 3))
"""Kind, and the share of the steps after which it is injected."""
INJECTION_SECONDS = 600.0
"""A kill waits for the moment in its target's work that it is meant for."""
COMMAND_SECONDS = 600.0
POLL_SECONDS = 5.0
BOOTSTRAP_ROUNDS = 10_000
DIGITS = 4
WAYS = ("greedy", "sampled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    seed: int
    faults: bool
    steps: int
    model: str
    trainers: int = 0  # 0: the example's

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {'two faults' if self.faults else 'no fault'}"


def job_of(run: Run, data: Path, held_out: Path | None) -> JobConfig:
    """The example's job for this run. Without `held_out` it evaluates nothing."""
    value = load_job(EXAMPLE / "job.yaml").model_dump(mode="json")
    value |= {"seed": run.seed, "num_steps": run.steps, "injection_allowed": run.faults}
    value["model"]["path"], value["data"]["path"] = run.model, str(data)
    value["evaluation"] = {**value["evaluation"], "path": str(held_out)} if held_out is not None else None
    value["roles"]["trainer"] = run.trainers or value["roles"]["trainer"]
    value["checkpoint"]["every_steps"] = min(value["checkpoint"]["every_steps"], run.steps)
    return parse_job(value)


def write_data(folder: Path, num_held_out: int) -> tuple[Path, Path]:
    """(training file, held-out file): the example's own questions."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "held-out.jsonl"
    argv = [sys.executable, str(EXAMPLE / "data.py"), str(train), str(held_out), "100", str(num_held_out)]
    subprocess.run(argv, check=True, timeout=COMMAND_SECONDS, stdout=subprocess.DEVNULL)
    seen = {json.loads(line)["question"] for line in train.read_text().splitlines()}
    shared = [line for line in held_out.read_text().splitlines() if json.loads(line)["question"] in seen]
    assert not shared, "held-out prompts are disjoint from the training data"
    return train, held_out


# Answers of a model.


@cache
def evaluate(folder: Path, held_out: Path, model: str) -> dict[str, list[float]]:
    """`answer`, in a process of its own."""
    argv = [
        sys.executable,
        "-m",
        "benchmarks.learning.own_model",
        "--answer",
        str(folder),
        str(held_out),
        "--model",
        model,
    ]
    done = subprocess.run(
        argv, cwd=common.ROOT, capture_output=True, text=True, timeout=2 * COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"no answers of {folder}: {done.stderr[-2000:]}")
    rewards: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return rewards


def answer(folder: Path, held_out: Path, model: str) -> dict[str, list[float]]:
    """Reward of each held-out prompt's greedy answer, and mean reward of its `NUM_SAMPLES` sampled ones. With the job's
    own template, length, sampling and reward function.
    """
    import torch
    from safetensors.torch import load_file

    from rolecall.core.config.data import SamplingConfig
    from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
    from rolecall.rl_runtime.rollout.engine import EngineSettings, VllmEngine
    from rolecall.rl_runtime.tasks.dataset_task import DatasetTask

    job = job_of(Run(seed=0, faults=False, steps=1, model=model), held_out, None)
    assert job.data is not None
    job = job.model_copy(update={"data": job.data.model_copy(update={"shuffle": False})})
    task = DatasetTask(job)
    weights = {name: t.to(torch.float32) for name, t in load_file(folder / "model.safetensors").items()}

    def answered(sampling: SamplingConfig, num_samples: int) -> list[float]:
        engine = VllmEngine(EngineSettings(model_dir=str(folder), max_model_len=job.max_tokens, sampling=sampling))
        engine.load(weights)
        prompts = [task.prompt(n) for n in range(task.num_rows)]
        tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            assert not prompt.unusable, prompt.unusable
            for sample in range(num_samples):
                seed = num_samples * number + sample
                engine.add(f"{number}.{sample}", prompt.tokens, num_new_max=job.max_response_tokens, seed=seed)
        while engine.num_in_flight:
            for new in engine.step():
                tokens.setdefault(new.request_id, []).extend(new.tokens)
        engine.close()
        rewards = []
        for number, prompt in enumerate(prompts):
            made = [(name, tuple(tokens[name])) for name in (f"{number}.{n}" for n in range(num_samples))]
            samples = tuple(
                TrainingSample(request_id=name, tokens=t, logprobs=(0.0,) * len(t), versions=(0,) * len(t), reward=0.0)
                for name, t in made
            )
            group = PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples)
            rewards.append(statistics.fmean(task.rewards(group)))
        return rewards

    return {"greedy": answered(SamplingConfig(top_k=1), 1), "sampled": answered(job.sampling, NUM_SAMPLES)}


# One run.


def carried_out(run: Run, folder: Path, *, commit: str, num_held_out: int, minutes: float) -> dict[str, Any]:
    """The record of a run. Raises SystemExit: it does not start, or takes longer than `minutes`."""
    train, held_out = write_data(folder, num_held_out)
    job = job_of(run, train, held_out)
    job_file = folder / "job.yaml"
    job_file.write_text(json.dumps(job.model_dump(mode="json"), indent=1))  # JSON is YAML
    run_id = f"own-model-{run.seed}-{'faults' if run.faults else 'plain'}-{int(time.time())}"
    before = evaluate(Path(run.model), held_out, run.model)
    print(f"{run.name}: before {_told(before)}", flush=True)
    load_before, injected = os.getloadavg()[0], list[dict[str, Any]]()
    argv = [sys.executable, "-m", "rolecall", "run", str(job_file), "--id", run_id, "--runs", str(common.RUNS)]
    with (folder / f"{run_id}.log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, "--minutes-max", str(minutes)], cwd=common.ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            code = _watched(
                process, run, common.RUNS / run_id, injected, time.monotonic() + 60 * minutes + COMMAND_SECONDS
            )
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(COMMAND_SECONDS)
    report = json.loads((common.RUNS / run_id / "report.json").read_text())
    trained = folder / f"{run_id}-model"
    exported = json.loads(_rolecall("export", run_id, "--out", str(trained), "--dtype", "float32", "--json"))
    after = evaluate(trained, held_out, run.model)
    print(f"{run.name}: after {_told(after)}", flush=True)
    return {
        "commit": commit,
        "seed": run.seed,
        "faults": run.faults,
        "steps": run.steps,
        "run_id": run_id,
        "exit_code": code,
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "step_exported": exported["step"],
        "before": {how: _short(rewards) for how, rewards in before.items()},
        "after": {how: _short(rewards) for how, rewards in after.items()},
        "rewards": _short([s["reward"] for s in report["steps"]]),
        "committed_at": [s["at"] for s in report["steps"]],
        "step_seconds": _short([s["seconds"] for s in report["steps"]]),
        "injected": injected,
        "incidents": [_cost(i) for i in report["incidents"]],
        "audit": report["audit"]["ok"],
        "config": job.model_dump(
            mode="json", exclude={"model": {"path"}, "data": {"path"}, "reward": {"function"}, "evaluation": {"path"}}
        ),
    }


def _watched(
    process: subprocess.Popen[bytes], run: Run, path: Path, injected: list[dict[str, Any]], ends: float
) -> int:
    """Prints the steps and injects the faults, until the run is over. Returns its exit code."""
    faults = [(kind, max(1, round(share * run.steps))) for kind, share in FAULTS] if run.faults else []
    journal: Journal | None = None
    told = 0
    try:
        while process.poll() is None:
            if time.monotonic() > ends:
                raise SystemExit(f"{run.name}: not over in time")
            time.sleep(POLL_SECONDS)
            if journal is None:
                if not (path / "journal.db").exists():
                    continue
                journal = Journal(f"sqlite:///{path / 'journal.db'}", create=False)
            steps = journal.events(kinds=[EventKind.STEP_COMMITTED])
            for event in steps[told:]:
                step = event.payload
                assert isinstance(step, StepCommitted)
                reward = "unknown" if step.reward is None else f"{step.reward:.3f}"
                print(f"{run.name}: step {step.step}, reward {reward}, {step.seconds:.1f} s", flush=True)
            told = len(steps)
            if faults and told >= faults[0][1]:
                kind, step_number = faults.pop(0)
                record = json.loads(_rolecall("inject", run_id := path.name, "--kind", kind, "--seed", str(run.seed)))
                injected.append({"kind": kind, "after_steps": step_number, "at": record["injected_at"]})
                print(f"{run.name}: {kind} of {record['target']} in {run_id}", flush=True)
    finally:
        if journal is not None:
            journal.close()
    return process.wait(COMMAND_SECONDS)


def _rolecall(*args: str) -> str:
    argv = [sys.executable, "-m", "rolecall", *args, "--runs", str(common.RUNS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INJECTION_SECONDS, cwd=common.ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"rolecall {' '.join(args)}: exit code {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def _cost(incident: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("detected_seconds", "serving_seconds", "step_committed_seconds", "closed_seconds", "action", "outcome")
    fault = incident["fault"]
    return {"fault": fault["kind"] if fault else None, **{name: incident[name] for name in kept}}


def _told(rewards: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{how} {statistics.mean(r):.3f}" for how, r in rewards.items())


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [v if v is None else float(f"{v:.{DIGITS}g}") for v in values]


# The report.


def bootstrap(
    gains: Sequence[Sequence[float]], rng: random.Random, rounds: int = BOOTSTRAP_ROUNDS
) -> tuple[float, float]:
    """95 % interval of the mean gain, seeds and prompts both drawn with replacement. `gains`: by seed, then prompt."""
    num_prompts = len(gains[0])
    means = []
    for _ in range(rounds):
        prompts = rng.choices(range(num_prompts), k=num_prompts)
        seeds = rng.choices(gains, k=len(gains))
        means.append(statistics.fmean(statistics.fmean([one[p] for p in prompts]) for one in seeds))
    means.sort()
    return means[int(0.025 * rounds)], means[int(0.975 * rounds)]


def gains_of(records: Sequence[Mapping[str, Any]], how: str) -> list[list[float]]:
    """Reward after minus before, of each prompt, by run; of greedy or of sampled answers."""
    return [[a - b for a, b in zip(r["after"][how], r["before"][how], strict=True)] for r in records]


def training_seconds(record: Mapping[str, Any]) -> float:
    """From the first commit to the last."""
    at: list[float] = record["committed_at"]
    return at[-1] - at[0]


def fault_costs(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each seed: how much longer the same number of steps took with faults, in seconds."""
    by = {(r["seed"], r["faults"]): training_seconds(r) for r in records}
    return [by[seed, True] - by[seed, False] for seed, faults in sorted(by) if faults and (seed, False) in by]


def report(records: Sequence[Mapping[str, Any]], measured: str) -> list[str]:
    first = records[0]
    config = json.dumps({k: first["config"][k] for k in ("algorithm", "data", "sampling", "roles", "optimizer")})
    seeds = sorted({r["seed"] for r in records})
    lines = common.header("A real model learns", config, ", ".join(map(str, seeds)), measured)
    lines += [
        (
            f"SmolLM2-135M-Instruct, {first['steps']} steps of the example's job. Mean reward of the answers to "
            f"{len(first['before']['greedy'])} held-out prompts, none of them trained on: one greedy answer, and "
            f"{NUM_SAMPLES} with the temperature of training. Right: share of greedy answers with the whole reward."
        ),
        "",
        (
            "| seed | faults | greedy before | after | right before | after | sampled before | after | s a step "
            "| minutes | audit, exit code |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(records, key=lambda r: (r["faults"], r["seed"])):
        at = r["committed_at"]
        middle, low, high = common.middle_and_spread([b - a for a, b in pairwise(at)] or [0.0])
        right = [sum(x >= 1.0 for x in r[when]["greedy"]) / len(r[when]["greedy"]) for when in ("before", "after")]
        mean = {(how, when): statistics.fmean(r[when][how]) for how in WAYS for when in ("before", "after")}
        lines.append(
            f"| {r['seed']} | {', '.join(f['kind'] for f in r['injected']) or 'none'} | "
            f"{mean['greedy', 'before']:.3f} | {mean['greedy', 'after']:.3f} | {right[0]:.3f} | {right[1]:.3f} | "
            f"{mean['sampled', 'before']:.3f} | {mean['sampled', 'after']:.3f} | "
            f"{middle:.1f} ({low:.1f} to {high:.1f}) | {training_seconds(r) / 60:.1f} | "
            f"{'ok' if r['audit'] else '**not ok**'}, {r['exit_code']} |"
        )
    lines.append("")
    for faults, how in product((False, True), WAYS):
        those = [r for r in records if r["faults"] == faults]
        if not those:
            continue
        gains = gains_of(those, how)
        low, high = bootstrap(gains, random.Random(0))
        gain = statistics.fmean(map(statistics.fmean, gains))
        verdict = "excludes 0: met" if low > 0 else "**does not exclude 0: not met**"
        lines.append(
            f"- {'with faults' if faults else 'without faults'}, {how}: reward up by {gain:+.3f}, 95 % interval "
            f"{low:+.3f} to {high:+.3f} (bootstrap over {len(gains)} seeds and {len(gains[0])} prompts), {verdict}"
        )
    if costs := fault_costs(records):
        lines.append(
            f"- both faults together cost {common.summary(costs, 0)} s of training: the same seed without them"
        )
    for kind, _ in FAULTS:
        found = [i for r in records for i in r["incidents"] if i["fault"] == kind]
        for what, name in (("detected", "detected_seconds"), ("serving again, after that", "serving_seconds")):
            lines.append(f"- {kind}, {what}: {common.summary([i[name] for i in found if i[name] is not None], 1)} s")
    early = [r["run_id"] for r in records if r["step_exported"] != r["steps"] - 1]
    if early:
        lines.append(f"- **not the last step** was exported of {', '.join(early)}")
    load = [one for r in records for one in r["load"]]
    lines += [
        "- prompt, lengths, temperature and learning rate were chosen on trials with seed 0, and not changed after",
        f"- load average at begin and end of the runs: {common.summary(load, 1)}; beside them ran work of low priority",
        "",
        "Reward of the training steps, mean of each quarter of the run:",
        "",
    ]
    for r in sorted(records, key=lambda r: (r["faults"], r["seed"])):
        known = [x for x in r["rewards"] if x is not None]
        size = max(1, len(known) // 4)
        quarters = [statistics.fmean(known[i : i + size]) for i in range(0, size * (len(known) // size), size)]
        lines.append(
            f"- seed {r['seed']}{', faults' if r['faults'] else ''}: {', '.join(f'{x:.3f}' for x in quarters)}"
        )
    return lines


def read(path: Path, commit: str) -> list[dict[str, Any]]:
    """Records of this commit, the last one of a run that was repeated."""
    found = [r for r in common.read_lines(path) if r["commit"] == commit]
    return list({(r["seed"], r["faults"], r["steps"]): r for r in found}.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model", help="folder that prepare.py wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: the example's")
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT, help="prompts")
    parser.add_argument("--trainers", type=int, default=0, help="of each run; 0: the example's")
    parser.add_argument("--without-faults", action="store_true", help="only the runs without faults")
    parser.add_argument("--minutes", type=float, default=240.0, help="after which no further run begins")
    parser.add_argument("--run-minutes", type=float, default=60.0, help="after which a run is stopped")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--commit", default="", help="of which the report is, if not of the one checked out")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--answer", type=Path, nargs=2, metavar=("FOLDER", "HELD_OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    model = str(args.model.resolve())
    if args.answer:
        answered, held_out = args.answer
        print(json.dumps(answer(answered, held_out, model)))
        return 0
    commit = args.commit or common.commit()
    full = load_job(EXAMPLE / "job.yaml").num_steps
    steps = args.steps or full
    ends = time.monotonic() + 60 * args.minutes
    runs = [
        Run(seed=seed, faults=faults, steps=steps, model=model, trainers=args.trainers)
        for seed in args.seeds
        for faults in ((False,) if args.without_faults else (False, True))
    ]
    folder = common.RUNS / "own-model"
    there = {(r["seed"], r["faults"], r["steps"]) for r in read(args.records, commit)}
    left = [run for run in runs if (run.seed, run.faults, run.steps) not in there and not args.report_only]
    for run in list(left):
        if time.monotonic() > ends:
            break
        record = carried_out(run, folder, commit=commit, num_held_out=args.held_out, minutes=args.run_minutes)
        with args.records.open("a") as out:
            out.write(json.dumps(record, separators=(",", ":")) + "\n")
        left.remove(run)
    records = [r for r in read(args.records, commit) if r["steps"] == steps]
    if not records:
        print(f"{args.records}: no record of {commit} with {steps} steps", file=sys.stderr)
        return 2
    lines = report(records, commit)
    print("\n".join(lines))
    if steps == full:
        common.write("own_model", lines)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
