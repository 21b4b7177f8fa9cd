"""Slowness named live, and hours without a finding: the slow test and the panels of `watch`, on real runs.

    python -m benchmarks.detection.live slowed --count 20         one demo, slowed again and again: 25 to 45 minutes
    python -m benchmarks.detection.live healthy --minutes 60      a demo without faults
    python -m benchmarks.detection.live replaced --minutes 60     a demo in which two rollouts and its watch are killed
    python -m benchmarks.detection.live torchrun --minutes 60     a torchrun job that reports nothing, beside other load
    python -m benchmarks.detection.live report [--commit NAMES]   the report again

A slowdown is drawn by the seed: role, how, factor (log-uniform) and replica. It lasts until its process is replaced, at
most `SLOWED_SECONDS`; the next one follows `CALM_SECONDS` later. A finding that names anything but the process that was
hit last counts as wrong. Runs are recorded like those of the soak. One JSON line a run is added to
`results/live.jsonl`; the report names the commits from whose lines it is made, and the kinds of runs that there are.

Each call says when it ends at the latest: a run that is not over by itself is ended from outside, and what was injected
by then is reported.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.intervals import poisson_upper
from benchmarks.recovery.soak import run as soak
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentOpened, IncidentUpdated
from rolecall.core.rundir import RunDir
from rolecall.detector.base.findings import PANEL
from rolecall.session.session import HOLD_FLAG, read_injections

LINES = common.RESULTS / "live.jsonl"
ME = ("-m", "benchmarks.detection.live")
KINDS = tuple(
    (f"{role}-slow", how)
    for role, hows in (("rollout", ("duty", "quota", "delay")), ("trainer", ("duty", "quota")))
    for how in hows
)
FACTORS = (1.5, 4.0)
START_SECONDS = 120.0
"""For the first step of a demo."""
FIRST_SECONDS = 120.0
"""Run time, from the first step on, before the first slowdown."""
SLOWED_SECONDS, CALM_SECONDS = 75.0, 30.0
INJECTING_SECONDS = 15.0
"""For an injection to begin, beside what it lasts."""
NAMED_SECONDS_MAX = 60.0
NUM_RANKS = 4
LOAD_SECONDS = (5.0, 60.0)
"""Between two changes of the load beside a torchrun job."""
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    wait_seconds: float
    """After the first step, or after the end of the injection before."""
    kind: str
    how: str
    factor: float = 0.0
    seed: int = 0

    def command(self, run: Path) -> list[str]:
        argv = [sys.executable, "-m", "rolecall", "inject", str(run), "--kind", self.kind, "--how", self.how]
        argv += ["--factor", str(self.factor), "--seconds", str(SLOWED_SECONDS)] if self.factor else []
        return [*argv, "--seed", str(self.seed)]


def slowdowns(seed: int, count: int) -> Iterator[Injection]:
    rng = random.Random(f"live-{seed}")
    for number in range(count):
        kind, how = rng.choice(KINDS)
        factor = round(FACTORS[0] * (FACTORS[1] / FACTORS[0]) ** rng.random(), 2)
        wait = CALM_SECONDS if number else FIRST_SECONDS
        yield Injection(wait_seconds=wait, kind=kind, how=how, factor=factor, seed=rng.randrange(2**31))


def kills(minutes: float) -> Iterator[Injection]:
    """Two replacements and a restart of `watch`, evenly over a run."""
    for number, kind in enumerate(("rollout-kill", "rollout-kill", "watch-kill")):
        yield Injection(wait_seconds=minutes * 60 / 4, kind=kind, how="kill", seed=number)


def perform(plan: Sequence[Injection], run: Path, over: threading.Event, *, ends: bool = False) -> None:
    """Injects one after the other until `over`. `ends`: the run may end when all are done."""
    while not over.wait(1.0) and not soak.has_trained(run):
        pass
    for number, injection in enumerate(plan, 1):
        if over.wait(injection.wait_seconds):
            return
        began = time.monotonic()
        done = subprocess.run(injection.command(run), check=False, capture_output=True, text=True)
        said = done.stderr.strip() if done.returncode else f"over after {time.monotonic() - began:.0f} s"
        print(f"{number} of {len(plan)}: {injection.kind}, {injection.how}: {said}", file=sys.stderr, flush=True)
    if ends and not over.wait(CALM_SECONDS):
        with closing(Journal(RunDir(run).database_url)) as journal:
            journal.set_flag(HOLD_FLAG, None)


def findings(run: Path) -> list[dict[str, Any]]:
    """Each diagnosis of an incident of the run, and each change of one, oldest first."""
    with closing(Journal(RunDir(run).database_url, create=False)) as journal:
        events = journal.events(kinds=[EventKind.INCIDENT_OPENED, EventKind.INCIDENT_UPDATED])
    return [
        {
            "incident": e.incident_id,
            "at": e.wall_at,
            "fault_class": str(e.payload.diagnosis.fault_class),
            "detectors": list(e.payload.diagnosis.detectors),
            "suspects": [s.name for s in e.payload.diagnosis.suspects],
            "because": e.payload.diagnosis.because,
        }
        for e in events
        if isinstance(e.payload, IncidentOpened | IncidentUpdated)
    ]


def judged(faults: Sequence[Line], found: Sequence[Line]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each fault with the first finding that names its process alone (`seconds`: None if there is none before the next
    fault); and the other findings, each incident once."""
    begins = [*(f["injected_at"] for f in faults), float("inf")]
    told, others = [], [f for f in found if f["at"] < begins[0]]
    for fault, (since, until) in zip(faults, pairwise(begins), strict=True):
        during = [f for f in found if since <= f["at"] < until]
        right = [f for f in during if f["suspects"] == [f"{fault['target']}#{fault['incarnation']}"]]
        beside = [f for f in during if f not in right]
        others += beside
        told.append(
            {name: fault.get(name) for name in ("kind", "how", "factor", "target", "incarnation", "injected_at")}
            | {
                "seconds": round(right[0]["at"] - since, 2) if right else None,
                "detectors": right[0]["detectors"] if right else [],
                "because": right[0]["because"] if right else "",
                "wrong": len({f["incident"] for f in beside}),
            }
        )
    return told, [dict(f) for i, f in enumerate(others) if f["incident"] not in {o["incident"] for o in others[:i]}]


def minutes_of(count: int) -> float:
    """Length of a run with so many slowdowns, if each lasts as long as it may: usually its process is replaced long
    before, and the run ends when the last one is over."""
    return (START_SECONDS + FIRST_SECONDS + count * (SLOWED_SECONDS + CALM_SECONDS + INJECTING_SECONDS)) / 60


def minutes_max(what: str, minutes: float) -> float:
    """When a call is over at the latest; its run is ended from outside then."""
    return minutes + (0.0 if what == "torchrun" else soak.RUN_MINUTES_MAX) + soak.END_SECONDS / 60


def demo(kind: str, seed: int, plan: Sequence[Injection], minutes: float, commit: str, settings: Sequence[str]) -> Line:
    beside = partial(perform, plan, ends=kind == "slowed") if plan else None
    line = soak.one_run(
        seed,
        "none",
        commit=commit,
        steps=60,
        minutes=minutes + soak.RUN_MINUTES_MAX,
        hold=minutes,
        settings=[*soak.SETTINGS, *settings],
        record=True,
        beside=beside,
    )
    run = common.RUNS / line["run_id"]
    faults, wrong = judged(read_injections(RunDir(run)), findings(run))
    kept = ("commit", "run_id", "seed", "settings", "exit_code", "wall_seconds", "output_tail")
    return {
        "kind": kind,
        **{k: line[k] for k in kept if k in line},
        "wanted": len(plan),
        "faults": faults,
        "wrong": wrong,
    }


def torchrun(seed: int, minutes: float, commit: str) -> Line:
    """A job found by the rules of `rolecall agent`, and watched by `rolecall watch agents`."""
    run_id = f"live-torchrun-{seed}-{int(time.time())}"
    run, data = common.RUNS / run_id, common.RUNS / f"{run_id}-agent"
    data.mkdir(parents=True)
    rolecall = [sys.executable, "-m", "rolecall"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    commands = [
        [*rolecall, "agent", "--node", "bench", "--port", "0", "--data-dir", str(data)],
        [*ranks, *ME, "rank", "--seed", str(seed)],
        [sys.executable, *ME, "load", "--seed", str(seed)],
    ]
    began = time.monotonic()
    with ExitStack() as stack, (data / "log").open("wb") as log:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, cwd=common.ROOT, stdout=log, stderr=log))
            stack.callback(process.terminate)
        address = data / "agent.json"
        while not address.exists():
            if time.monotonic() - began > soak.END_SECONDS:
                raise RuntimeError(f"no agent serves: see {data / 'log'}")
            time.sleep(0.5)
        watch = [*rolecall, "watch", "agents", json.loads(address.read_text())["url"], "--id", run_id]
        done = subprocess.run(
            [*watch, "--for", str(minutes * 60)],
            check=False,
            cwd=common.ROOT,
            capture_output=True,
            text=True,
            timeout=minutes_max("torchrun", minutes) * 60,
        )
    wrong = judged([], findings(run))[1]
    line = {
        "kind": "torchrun",
        "commit": commit,
        "run_id": run_id,
        "seed": seed,
        "settings": [],
        "faults": [],
        "wrong": wrong,
    }
    code = 0 if done.returncode == bool(wrong) else done.returncode or 1  # 1: there are findings
    tail = {"output_tail": done.stderr[-2000:].replace(f"{common.ROOT}/", "")} if code else {}
    return {**line, "exit_code": code, "wall_seconds": round(time.monotonic() - began, 1), "wanted": 0, **tail}


def rank(seed: int) -> None:
    """A rank of the torchrun job, until it is ended."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rng = random.Random(f"{seed} {dist.get_rank()}")
    layer, gradient = torch.randn(512, 512), torch.zeros(1 << 20)
    while True:
        for _ in range(rng.randint(8, 12)):
            torch.tanh(layer @ layer)
        time.sleep(rng.uniform(0.05, 0.15))  # where a real job would wait for its accelerator
        dist.all_reduce(gradient)


def load(seed: int) -> None:
    """Other work on the CPUs that comes and goes, until it is ended."""
    rng = random.Random(f"load {seed}")
    while True:
        until = time.monotonic() + rng.uniform(*LOAD_SECONDS)
        while time.monotonic() < until:
            pass
        time.sleep(rng.uniform(*LOAD_SECONDS))


def detector_of(fault: Line) -> str:
    names = fault["detectors"]
    return "-" if not names else "panel" if names[0].startswith(PANEL) else "slow test"


def named(lines: Sequence[Line]) -> Iterator[str]:
    """Slowdowns by kind and by factor."""
    faults = [f for line in lines if line["kind"] == "slowed" for f in line["faults"]]
    groups = {"all": faults}
    for f in sorted(faults, key=lambda f: (f["kind"], f["how"])):
        groups.setdefault(f"{f['kind']}, {f['how']}", []).append(f)
    for low, high in ((1.5, 2.0), (2.0, 3.0), (3.0, 4.01)):
        groups[f"{low:g} to {high:.0f} times"] = [f for f in faults if low <= f["factor"] < high]
    bar = f"named right within {NAMED_SECONDS_MAX:.0f} s"
    yield f"| slowdowns | {bar} | named right, seconds: n | median | spread (P25 to P75) | worst | by |"
    yield "|---|---|---|---|---|---|---|"
    for name, group in groups.items():
        seconds = [f["seconds"] for f in group if f["seconds"] is not None]
        in_time = sum(s <= NAMED_SECONDS_MAX for s in seconds)
        met = "" if in_time == len(group) else ", **missed**"
        middle = "- | - | -"
        if seconds:
            median, low, high = common.middle_and_spread(seconds)
            middle = f"{median:.1f} | {low:.1f} to {high:.1f} | {max(seconds):.1f}"
        by = ", ".join(sorted({detector_of(f) for f in group} - {"-"})) or "-"
        yield f"| {name} | {in_time} of {len(group)}{met} | {len(seconds)} | {middle} | {by} |"
    wanted = sum(line["wanted"] for line in lines if line["kind"] == "slowed")
    if wanted != len(faults):
        yield f"\n**{wanted - len(faults)} of {wanted} slowdowns could not be injected.**"


def each(lines: Sequence[Line]) -> Iterator[str]:
    yield "| seed | target | how | factor | seconds | by | wrong findings beside |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        for f in line["faults"] if line["kind"] == "slowed" else ():
            seconds = "**missed**" if f["seconds"] is None else f"{f['seconds']:.1f}"
            where = f"{f['target']}#{f['incarnation']} | {f['how']} | {f['factor']:.2f}"
            yield f"| {line['seed']} | {where} | {seconds} | {detector_of(f)} | {f['wrong']} |"


def quiet(lines: Sequence[Line]) -> Iterator[str]:
    """Findings in which nothing was at fault, or something else."""
    yield "| runs | number | with exit code 0 | hours | replicas killed | wrong findings | 95 % upper bound, per hour |"
    yield "|---|---|---|---|---|---|---|"
    for kind in ("healthy", "torchrun", "replaced", "all three", "slowed"):
        chosen = [x for x in lines if x["kind"] == kind or (kind == "all three" and x["kind"] != "slowed")]
        if not chosen:
            continue
        hours = sum(x["wall_seconds"] for x in chosen) / 3600
        count = sum(len(x["wrong"]) for x in chosen)
        killed = sum(f["how"] == "kill" and f["kind"] != "watch-kill" for x in chosen for f in x["faults"])
        bound = f"{poisson_upper(count) / hours:.2f}" if hours else "-"
        good = sum(not x["exit_code"] for x in chosen)
        yield f"| {kind} | {len(chosen)} | {good} | {hours:.2f} | {killed} | {count} | {bound} |"
    yield ""
    for x in lines:
        for f in x["wrong"]:
            yield f"- {x['kind']}, {x['run_id']}: {f['fault_class']}, {', '.join(f['detectors'])}: {f['because']}"


def configuration(lines: Sequence[Line]) -> str:
    parts = []
    kinds = {x["kind"] for x in lines}
    if kinds - {"torchrun"}:
        settings = sorted({s for x in lines for s in x["settings"]})
        parts.append(", ".join(["rolecall demo", *settings]))
    if "slowed" in kinds:
        low, high = FACTORS
        lasting = f"for {SLOWED_SECONDS:g} s at most, {CALM_SECONDS:g} s apart"
        parts.append(f"slowdowns of {low:g} to {high:g} times {lasting}")
    if "torchrun" in kinds:
        parts.append(f"torchrun of {NUM_RANKS}")
    return "; ".join(parts)


def write_report(commits: Sequence[str]) -> Sequence[Line]:
    lines = [x for x in common.read_lines(LINES) if x["commit"] in commits]
    if not lines:
        print(f"no run of commit {', '.join(commits)}", file=sys.stderr)
        return lines
    several = len(commits) > 1
    seeds = ", ".join(f"{x['kind']} {x['seed']}" + f" of {x['commit']}" * several for x in lines)
    text = common.header("Slowness and quiet, live", configuration(lines), seeds, ", ".join(commits))
    if any(x["kind"] == "slowed" for x in lines):
        text += ["## Slowdowns", "", *named(lines), "", "## Each slowdown", "", *each(lines), ""]
    text += ["## Findings without their fault", "", *quiet(lines), ""]
    common.publish("live", text)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("slowed", "healthy", "replaced", "torchrun", "report", "rank", "load"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="slowdowns")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of a run without slowdowns")
    parser.add_argument("--commit", default="", help="whose lines to report; one or more, by commas")
    args = parser.parse_args()
    if args.what in ("rank", "load"):
        {"rank": rank, "load": load}[args.what](args.seed)
    commit = common.commit()
    if args.what == "slowed":
        args.minutes = minutes_of(args.count)
    if args.what != "report":
        seconds = minutes_max(args.what, args.minutes) * 60
        ends = time.strftime("%H:%M", time.gmtime(time.time() + seconds))
        print(f"commit {commit}, seed {args.seed}: ends by {ends} UTC ({seconds / 60:.0f} minutes)", flush=True)
    if args.what == "torchrun":
        line = torchrun(args.seed, args.minutes, commit)
    elif args.what == "slowed":
        plan = list(slowdowns(args.seed, args.count))
        line = demo("slowed", args.seed, plan, args.minutes, commit, soak.UNGUARDED)
    elif args.what != "report":
        plan = list(kills(args.minutes)) if args.what == "replaced" else []
        line = demo(args.what, args.seed, plan, args.minutes, commit, ())
    if args.what != "report":
        common.add_line(LINES, line)
    lines = write_report(args.commit.split(",") if args.commit else [commit])
    return 0 if lines and not any(x["exit_code"] for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
