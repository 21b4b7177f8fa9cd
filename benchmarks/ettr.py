"""What does a fault cost when one replica is replaced, and what when the whole job is restarted?

    python benchmarks/ettr.py                                   all arms, three seeds; hours
    python benchmarks/ettr.py --steps 20 --microbatches 8 --percent 10 --seeds 1    a trial
    python benchmarks/ettr.py --report-only                     the report again

Arms, each with the same job, seed and schedule of kills:

    none   no faults: the seconds to N steps to compare with
    role   the replica is replaced (recovery.scope: replica)
    warm   the job is restarted from its newest checkpoint on the running cluster (recovery.scope: job)
    cold   mode observe: once the fault is found everything is ended (supervisor killed, `rolecall down`) and started
           again (`rolecall up`), the cluster too

PERCENT of the steps meet a fault, as in RobustRL's sweep (arXiv 2512.22492): with 10, one falls into each ten steps, at
a random one of them and a random moment of it, killing a trainer, a rollout, or either. ETTR is the project's own
accounting (rolecall/views/ettr.py): by the paper's formula, and with lost rollouts counted too. Work that is trained
again counts as effective in both, so seconds to N steps are the honest number.

Arms take turns within a seed. Each run is a line of `results/ettr.jsonl`; what is there for this commit and these
settings is not run again. No run begins after --minutes.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import common

from rolecall.core.clock import SystemClock
from rolecall.core.errors import InjectionRefused, JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import StepCommitted
from rolecall.core.rundir import RunDir
from rolecall.detector.sources.agents import AgentsSource
from rolecall.rl_runtime.faults.injector import inject
from rolecall.simulate.faults import StageSeconds
from rolecall.simulate.measured import MeasuredFault, MeasuredRun, simulate_measured
from rolecall.simulate.settings import ARMS as SIMULATOR_ARMS
from rolecall.simulate.simulator import Account
from rolecall.views.ettr import Loss, ettr, losses, steps, training_began
from rolecall.views.incidents import InjectedFault, parse_injections, summarize_incidents
from rolecall.views.lifetimes import IncarnationRecord, Key, incarnation_records
from rolecall.views.phases import PHASES, Commits, recovery_phases
from rolecall.watch.run import agent_urls

LINES = common.RESULTS / "ettr.jsonl"
RUNS = common.ROOT / "runs"
ARMS = ("none", "role", "warm", "cold")
ROLES = {"trainer": ("trainer",), "rollout": ("rollout",), "both": ("trainer", "rollout")}
NUM_TRAINERS, NUM_ROLLOUTS = 2, 3
TRIES_MAX = 2
"""A run that fails is tried once more."""
POLL_SECONDS = 0.25
FIND_SECONDS = 120.0
"""A fault that is not found in time is left to the run's own end."""
TARGET_SECONDS = 300.0
"""A replica that is not at work for so long is not hit: the fault is counted as skipped."""
END_SECONDS = 60.0
SIMULATED = {"role": "replica", "warm": "restart_warm", "cold": "restart_cold"}
"""Arm here -> arm of the simulator."""
JOB = """
name: ettr
seed: {seed}
num_steps: {steps}
injection_allowed: true
roles: {{trainer: {trainers}, rollout: {rollouts}, reward: 1}}
algorithm: {{microbatches_per_step: {microbatches}}}
model: {{hidden_size: 384, intermediate_size: 1024, num_layers: 6, num_heads: 6, num_kv_heads: 3, head_dim: 64}}
checkpoint: {{every_steps: {checkpoint_every}}}
runtime: {{standbys: {standbys}, nodes: {nodes}, startup_timeout_seconds: 300}}
recovery: {{mode: {mode}, scope: {scope}, evictions_per_hour_max: 1000, retries_per_replica_max: 100}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One fault of the schedule: once `step` is committed, `share` of a step later."""

    step: int
    share: float
    role: str
    index: int


def schedule(seed: int, num_steps: int, percent: float, roles: str) -> list[Kill]:
    """A kill for each `100 / percent` steps; the same for the same arguments. None falls into the first step, or so
    late that the run could end before it."""
    rng = random.Random(f"ettr-{seed}-{num_steps}-{percent:g}-{roles}")
    width = max(2, round(100 / percent))
    kills = []
    for first in range(0, num_steps - width + 1, width):
        role = rng.choice(ROLES[roles])
        number = NUM_TRAINERS if role == "trainer" else NUM_ROLLOUTS
        step = rng.randrange(first, first + max(1, width - 2))
        kills.append(Kill(step=step, share=rng.random(), role=role, index=rng.randrange(number)))
    return kills


# --- one run ----------------------------------------------------------------------------------------------------------


class TokenCounter:
    """Tokens that the engines of a run generated, as its agents report them; those of dead engines stay counted."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._stop = run, threading.Event()
        self._tokens: dict[tuple[str, int, int], int] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        source = AgentsSource(lambda: agent_urls(self._run), SystemClock(), poll_seconds=1.0)
        source.start()
        try:
            while not self._stop.wait(1.0):
                for batch in source.poll(0.0).batches:
                    for sample in batch.processes:
                        if sample.role in ("rollout", "standby"):
                            process = sample.process
                            key = (str(process.node), process.pid, process.start_ticks)
                            self._tokens[key] = max(self._tokens.get(key, 0), sample.tokens)
        finally:
            source.close()

    def total(self) -> int:
        self._stop.set()
        self._thread.join(END_SECONDS)
        return sum(self._tokens.values())


def rolecall(*argv: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        command = [sys.executable, "-m", "rolecall", *argv]
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=common.ROOT)


class Driver:
    """One run: its process, its faults at their time, and in the cold arm its restarts."""

    def __init__(self, arm: str, job: Path, name: str, kills: Sequence[Kill], minutes_max: float) -> None:
        self._arm, self._name, self._kills = arm, name, list(kills)
        self._log = RUNS / f"{name}.log"
        self._minutes = f"{minutes_max:g}"
        self._ends_at = time.monotonic() + 60 * minutes_max + END_SECONDS
        self.run = RunDir(RUNS / name)
        self.killed_at: list[float] = []  # cold restarts, wall seconds
        self.num_skipped = 0
        argv = ("run", str(job), "--id", name, "--runs", str(RUNS), "--minutes-max", self._minutes)
        self._process = rolecall(*argv, log=self._log)

    def drive(self) -> int:
        """Exit code of the run, with its end."""
        try:
            while self._process.poll() is None and time.monotonic() < self._ends_at:
                if self._kills and self._committed() >= self._kills[0].step:
                    self._strike(self._kills.pop(0))
                time.sleep(POLL_SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(END_SECONDS)
        self.num_skipped += len(self._kills)
        return self._process.returncode or 0

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        with closing(Journal(self.run.database_url, create=False)) as journal:
            yield journal

    def _committed(self) -> int:
        """The last committed step; -1: none."""
        try:
            with self.journal() as journal:
                last = journal.last(EventKind.STEP_COMMITTED)
        except (JournalError, OSError):
            return -1  # the run is being created
        return last.as_(StepCommitted).step if last is not None else -1

    def _step_seconds(self) -> float:
        with self.journal() as journal:
            at = [e.wall_at for e in journal.events(kinds=[EventKind.STEP_COMMITTED])]
        return statistics.median(b - a for a, b in pairwise(at)) if len(at) > 1 else 0.0

    def _strike(self, kill: Kill) -> None:
        time.sleep(kill.share * self._step_seconds())
        deadline = time.monotonic() + TARGET_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                record = inject(self.run, f"{kill.role}-kill", f"{kill.role}/{kill.index}")
            except InjectionRefused:
                time.sleep(POLL_SECONDS)
                continue
            if self._arm == "cold":
                self._restart_cold(float(record["injected_at"]))
            return
        self.num_skipped += 1

    def _restart_cold(self, injected_at: float) -> None:
        deadline = time.monotonic() + FIND_SECONDS
        while not self._is_found(injected_at):
            if self._process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS / 5)
        self.killed_at.append(time.time())
        self._process.kill()
        self._process.wait(END_SECONDS)
        rolecall("down", self._name, "--runs", str(RUNS), log=self._log).wait(END_SECONDS)
        argv = ("up", self._name, "--runs", str(RUNS), "--minutes-max", self._minutes)
        self._process = rolecall(*argv, log=self._log)

    def _is_found(self, injected_at: float) -> bool:
        with self.journal() as journal:
            opened = journal.last(EventKind.INCIDENT_OPENED)
        return opened is not None and opened.wall_at > injected_at


def one_run(
    arm: str, seed: int, percent: float, roles: str, microbatches: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs the job once; returns what was measured."""
    name = f"ettr-{arm}-{seed}-{int(time.time())}"
    RUNS.mkdir(exist_ok=True)
    job = RUNS / f"{name}.yaml"
    job.write_text(
        JOB.format(
            seed=seed,
            steps=options.steps,
            trainers=NUM_TRAINERS,
            rollouts=NUM_ROLLOUTS,
            microbatches=microbatches,
            checkpoint_every=options.checkpoint_every,
            standbys=options.standbys,
            nodes=1 + NUM_TRAINERS + NUM_ROLLOUTS + options.standbys,
            mode="observe" if arm == "cold" else "act",
            scope="job" if arm == "warm" else "replica",
        )
    )
    kills = schedule(seed, options.steps, percent, roles) if arm != "none" else []
    driver = Driver(arm, job, name, kills, options.run_minutes)
    counter = TokenCounter(driver.run)
    began = time.monotonic()
    line: dict[str, Any] = {"run_id": name, "exit_code": driver.drive(), "num_faults_wanted": len(kills)}
    line |= {"seconds": round(time.monotonic() - began, 1), "num_skipped": driver.num_skipped}
    line["tokens_generated"] = counter.total()
    report = driver.run.path / "report.json"
    if report.exists():
        found = json.loads(report.read_text())
        line |= {"audit_ok": found["audit"]["ok"], "outcome": found["outcome"]}
    # Not the exit code: where nothing acts, incidents may be open at the end.
    line["ok"] = line.get("outcome") == "completed" and line["audit_ok"]
    if not report.exists():
        return line  # it did not start
    with driver.journal() as journal:
        events, actual = journal.events(), journal.actual()
    injections = driver.run.injections_path
    faults = parse_injections(injections.read_text()) if injections.exists() else []
    return line | measured(events, incarnation_records(events, actual), faults, driver.killed_at)


# --- what was measured ------------------------------------------------------------------------------------------------


def measured(
    events: Sequence[Event],
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    killed_at: Sequence[float],
) -> dict[str, Any]:
    """Numbers of one run. `killed_at`: cold restarts, wall seconds; what is reported of a cluster that was ended on
    purpose is no false alarm. Empty if no step was committed."""
    committed, began = steps(events), training_began(events)
    if not committed or began is None:
        return {}
    end = committed[-1].at
    joined = summarize_incidents(events, known, faults)
    lost = cold_losses(known, faults, killed_at, end) if killed_at else losses(joined, end)
    every = [e.as_(StepCommitted) for e in events if e.kind is EventKind.STEP_COMMITTED]
    sizes = {"num_rollouts": NUM_ROLLOUTS, "num_trainers": NUM_TRAINERS}
    gaps = [b.at - a.at for a, b in pairwise(committed)]
    pace = statistics.median(gaps) if gaps else end - began
    commits_at = [(e.wall_at, e.as_(StepCommitted).step) for e in events if e.kind is EventKind.STEP_COMMITTED]
    alarms = [s.incident for s in joined.summaries if s.incident.incident_id in joined.false_alarms]
    alarms = [a for a in alarms if not any(kill <= a.opened_at <= kill + END_SECONDS for kill in killed_at)]
    commits, recoveries = Commits(events), []
    for fault in faults:
        summary = next((s for s in joined.summaries if s.fault == fault), None)
        if summary is None:
            continue
        kill = next((at for at in killed_at if at > fault.injected_at), None)
        started = kill if kill is not None else summary.incident.action_started_at
        made = (
            [r for r in summary.replacements if r.replica.partition("/")[0] in ("trainer", "rollout")]
            if kill is None
            else [r for r in known.values() if _is_made_after(r, kill, killed_at)]
        )
        phases = recovery_phases(
            began_at=fault.injected_at,
            detected_at=summary.detected_at,
            started_at=started,
            made=made,
            commits=commits,
        )
        role, _, index = fault.target.partition("/")
        recovery = {"role": role, "replica": int(index), "step": position(began, commits_at, pace, fault.injected_at)}
        served = [r.serving_at - started for r in made if r.serving_at is not None] if started is not None else []
        recovery["away"] = round(statistics.fmean(served), 3) if served else None
        recoveries.append(recovery | phases.seconds | {"whole": phases.whole})
    return {
        "num_steps": len(committed),
        "seconds_to_n": end - began,
        "ettr": ettr(began, end, lost, **sizes, count_rollouts=False),
        "ettr_with_rollouts": ettr(began, end, lost, **sizes),
        "step_seconds": pace,
        "tokens_trained": sum(s.num_tokens for s in committed),
        "tokens_trained_again": sum(c.tokens for c in every) - sum(s.num_tokens for s in committed),
        "steps_trained_again": len(every) - len(committed),
        "num_faults": len(faults),
        "num_missed": len(joined.missed),
        "false_alarms": len(alarms),
        "false_alarms_about": [a.diagnosis.because[:80] for a in alarms],
        "killed_at": list(killed_at),
        "recoveries": recoveries,
    }


def position(began: float, commits: Sequence[tuple[float, int]], step_seconds: float, at: float) -> float:
    """Steps done at `at`: 20.5 is the middle of step 20, counted from 0. `commits`: (wall seconds, step) of all, those
    of steps that were undone later included."""
    last, done = max(((t, step + 1) for t, step in commits if t <= at), default=(began, 0))
    return round(done + min(0.99, (at - last) / step_seconds), 3)


def _is_made_after(record: IncarnationRecord, kill: float, killed_at: Sequence[float]) -> bool:
    following = min((at for at in killed_at if at > kill), default=float("inf"))
    return record.role in ("trainer", "rollout") and kill < (record.starting_at or 0.0) < following


def cold_losses(
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    killed_at: Sequence[float],
    end: float,
) -> list[Loss]:
    """From a fault to the kill the replica is lost, as in the project's accounting; then every replica until it serves
    again."""
    replicas = [f"trainer/{n}" for n in range(NUM_TRAINERS)] + [f"rollout/{n}" for n in range(NUM_ROLLOUTS)]
    found = []
    for kill in killed_at:
        hit = [f for f in faults if f.injected_at < kill][-1:]
        found += [Loss(replica=r, since=f.injected_at, until=kill, stalled_until=kill) for f in hit for r in f.hit]
        for replica in replicas:
            at = [r.serving_at for r in known.values() if r.replica == replica and r.serving_at is not None]
            until = min((t for t in at if kill < t < end), default=end)
            found.append(Loss(replica=replica, since=kill, until=until, stalled_until=until, by_restart=True))
    return found


# --- the report -------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """`median (least to most)`; of one value, itself."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    least, most = (f"{v:.{digits}f}" for v in (min(known), max(known)))
    return f"{statistics.median(known):.{digits}f} ({least} to {most})"


def simulated(line: Mapping[str, Any], free: Mapping[str, Any]) -> Account | None:
    """The run as the simulator computes it from the run without faults, the moments of the faults and the times of the
    recoveries' stages. None: a stage was not measured.

    A restart of the job leaves trainers without trajectories: `fill` is what the interrupted step took longer after it
    than a step takes. Both sides count as the report does: after a trainer's fault no trainer until the commit (the
    cold arm: until it serves again).
    """
    arm, step_seconds = line["arm"], free["seconds_to_n"] / free["num_steps"]
    faults = []
    for r in line["recoveries"]:
        if None in (r["detect"], r["decide"], r["restart"], r["reconnect"], r["away"], r["whole"]):
            return None
        restart = r["restart"] + r["reconnect"] if arm == "role" else r["away"]
        fill = 0.0 if arm == "role" else max(0.0, r["whole"] - r["detect"] - r["decide"] - restart - step_seconds)
        stages = StageSeconds(detect=r["detect"], decide=r["decide"], restart=restart, fill=fill)
        fault = MeasuredFault(
            step=r["step"], role=r["role"], replica=r["replica"], stages=stages, until_commit=arm != "cold"
        )
        faults.append(fault)
    run = MeasuredRun(
        num_steps=line["num_steps"],
        step_seconds=step_seconds,
        num_trainers=NUM_TRAINERS,
        num_rollouts=NUM_ROLLOUTS,
        faults=faults,
        checkpoint_every_steps=line["settings"]["checkpoint_every"],
    )
    return simulate_measured(run, SIMULATOR_ARMS[SIMULATED[arm]])


def step_of(lines: Sequence[Mapping[str, Any]], like: Mapping[str, Any]) -> float | None:
    """Seconds of a step without faults, of the runs with these settings."""
    free = [x["step_seconds"] for x in lines if x["arm"] == "none" and x["settings"] == like["settings"]]
    return statistics.median(free) if free else None


def free_of(lines: Sequence[dict[str, Any]], like: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run without faults of the same seed and settings."""
    same = (x for x in lines if x["arm"] == "none")
    return next((x for x in same if (x["seed"], x["settings"]) == (like["seed"], like["settings"])), None)


def report(lines: Sequence[dict[str, Any]], of_commit: str) -> list[str]:
    shared = {name: value for name, value in lines[0]["settings"].items() if name != "microbatches"}
    config = ", ".join(f"{name} {value:g}" for name, value in shared.items())
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    sizes = sorted({x["settings"].get("microbatches", 0) for x in lines})
    about = f"{NUM_TRAINERS} trainers, {NUM_ROLLOUTS} rollouts, {config}, microbatches {', '.join(map(str, sizes))}"
    text = common.header("ETTR: a replica replaced, or the whole job restarted", about, seeds, of_commit)
    good = [x for x in lines if x["ok"]]
    text += [
        (
            "Median (least to most) over runs. Step: without faults. ETTR: the paper's formula; with rollouts: a lost "
            "rollout counts too. Tokens beyond: generated beyond the same seed's run without faults. Trained again: "
            "counts as effective."
        ),
        "",
        (
            "| step, s | steps with a fault | of | arm | runs | faults | ETTR | with rollouts | s to N steps "
            "| longer than without, % | tokens beyond | tokens trained again | steps trained again |"
        ),
        "|---" * 13 + "|",
    ]
    for percent, roles, arm, group in _groups(good):
        pairs = [(x, free) for x in group if (free := free_of(good, x)) is not None]
        longer = [100 * (x["seconds_to_n"] / free["seconds_to_n"] - 1) for x, free in pairs]
        beyond = [x["tokens_generated"] - free["tokens_generated"] for x, free in pairs]
        step = step_of(good, group[0])
        text.append(
            f"| {'-' if step is None else f'{step:.1f}'} | {f'{percent:g} %' if percent else '-'} | {roles or '-'} "
            f"| {arm} | {len(group)} "
            f"| {sum(x['num_faults'] for x in group)} | {spread([x['ettr'] for x in group], 3)} "
            f"| {spread([x['ettr_with_rollouts'] for x in group], 3)} | {spread([x['seconds_to_n'] for x in group])} "
            f"| {spread(longer)} | {spread(beyond, 0)} | {spread([x['tokens_trained_again'] for x in group], 0)} "
            f"| {spread([x['steps_trained_again'] for x in group], 0)} |"
        )
    text += _recoveries(good) + _simulations(good)
    for what, key in (("Faults not hit in time", "num_skipped"), ("Faults not found", "num_missed")):
        text += ["", f"{what}: {sum(x[key] for x in good)}."]
    about_what = sorted({words for x in good for words in x.get("false_alarms_about", ())})
    text += [
        "",
        f"False alarms: {sum(x['false_alarms'] for x in good)}{': ' if about_what else ''}{'; '.join(about_what)}.",
    ]
    text += ["", f"Audit holds in {sum(bool(x.get('audit_ok')) for x in good)} of {len(good)} runs."]
    failures = [x for x in lines if not x["ok"]]
    return text + [line for x in failures for line in ("", f"Failed: {x['run_id']}, exit code {x['exit_code']}.")]


def _recoveries(good: Sequence[dict[str, Any]]) -> list[str]:
    text = [
        "",
        "## Recoveries",
        "",
        "Seconds. Whole: from the fault until the step that it interrupted is committed.",
        "",
        "| step, s | arm | killed | n | " + " | ".join(PHASES) + " | whole | whole / step |",
        "|---" * (len(PHASES) + 6) + "|",
    ]
    steps = sorted({step for x in good if (step := step_of(good, x)) is not None})
    for step in steps:
        for arm in ARMS[1:]:
            for role in ROLES["both"]:
                runs = [x for x in good if x["arm"] == arm and step_of(good, x) == step]
                found = [r for x in runs for r in x["recoveries"] if r["role"] == role]
                if found:
                    whole = [r["whole"] for r in found]
                    ratio = [w / step for w in whole if w is not None]
                    cells = [spread([r[phase] for r in found], 2) for phase in PHASES]
                    text.append(
                        f"| {step:.1f} | {arm} | {role} | {len(found)} | {' | '.join(cells)} | {spread(whole)} "
                        f"| {spread(ratio, 2)} |"
                    )
    return text


def _simulations(good: Sequence[dict[str, Any]]) -> list[str]:
    """Each run beside what the simulator makes of its faults and stage times."""
    rows = []
    for x in sorted(good, key=lambda x: (x["settings"].get("microbatches", 0), x["seed"], ARMS.index(x["arm"]))):
        free = free_of(good, x)
        account = simulated(x, free) if free is not None and x["arm"] != "none" else None
        if account is not None and free is not None:
            points = 100 * (account.ettr_of_paper - x["ettr"])
            rows.append(
                f"| {free['step_seconds']:.1f} | {x['percent']:g} % | {x['seed']} | {x['arm']} | {x['ettr']:.3f} "
                f"| {account.ettr_of_paper:.3f} | {points:+.1f} | {x['seconds_to_n']:.1f} | {account.seconds:.1f} |"
            )
    if not rows:
        return []
    return [
        "",
        "## The simulator on these runs",
        "",
        (
            "`rolecall simulate` with the step time of the run without faults, the moments of the faults and the "
            "measured times of the stages (of a restart also how long trainers wait for the first trajectories)."
        ),
        "",
        "| step, s | percent | seed | arm | ETTR measured | simulated | points | s to N steps measured | simulated |",
        "|---" * 9 + "|",
        *rows,
    ]


def _groups(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[float, str, str, list[dict[str, Any]]]]:
    found: dict[tuple[float, float, str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        size = line["settings"].get("microbatches", 0)
        found[size, -line["percent"], line["roles"], ARMS.index(line["arm"])].append(line)
    for (_, percent, roles, arm), group in sorted(found.items()):
        yield -percent, roles, ARMS[arm], group


# --- all runs ---------------------------------------------------------------------------------------------------------


def planned(options: argparse.Namespace) -> Iterator[tuple[str, int, float, str]]:
    """(arm, seed, percent, roles) of every run: arms take turns, and none is always first."""
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        if "none" in options.arms:
            yield "none", seed, 0.0, ""
        arms = [arm for arm in options.arms if arm != "none"]
        for number, percent in enumerate(options.percent):
            for arm in arms[(seed + number) % len(arms) :] + arms[: (seed + number) % len(arms)] if arms else []:
                yield arm, seed, percent, options.roles


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(text) for text in LINES.read_text().splitlines()] if LINES.exists() else []


def run_all(options: argparse.Namespace, settings: Mapping[str, float], of_commit: str, ends_at: float) -> None:
    for arm, seed, percent, roles in planned(options):
        key = {"commit": of_commit, "arm": arm, "seed": seed, "percent": percent, "roles": roles, "settings": settings}
        before = [x for x in read_lines() if {name: x[name] for name in key} == key]
        if any(x["ok"] for x in before) or len(before) >= TRIES_MAX:
            continue
        if time.monotonic() > ends_at:
            print("out of time: call again to go on", flush=True)
            return
        line = key | one_run(arm, seed, percent, roles, int(settings["microbatches"]), options)
        with LINES.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {name: line.get(name) for name in ("ok", "exit_code", "seconds", "seconds_to_n", "ettr", "num_faults")}
        print(f"{arm}, seed {seed}, {percent:g} % {roles}: {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[24], help="of a step: set how long it takes")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps")
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--percent", type=float, nargs="+", default=[10.0, 5.0, 2.0])
    parser.add_argument("--roles", choices=ROLES, default="both", help="what is killed")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--run-minutes", type=float, default=240.0, help="limit of one run")
    parser.add_argument("--minutes", type=float, default=1440.0, help="no run begins after so long")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--commit", default="", help="whose lines to report")
    options = parser.parse_args()
    of_commit = options.commit or common.commit()
    names = ("steps", "microbatches", "checkpoint_every", "standbys")
    every = [{**{name: getattr(options, name) for name in names}, "microbatches": n} for n in options.microbatches]
    ends_at = time.monotonic() + 60 * options.minutes
    for settings in every if not options.report_only else ():
        run_all(options, settings, of_commit, ends_at)
    lines = [x for x in read_lines() if x["commit"] == of_commit and x["settings"] in every]
    if not lines:
        print("no run of this commit with these settings")
        return 1
    print(common.write("ettr", report(lines, of_commit)))
    return 0 if all(x["ok"] for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
