"""A torchrun job whose code knows nothing of rolecall, beside `rolecall exec`: is the faulty rank named, and how soon?

    python -m benchmarks.beside_jobs.torchrun faults --ranks 4 --count 9   one case of each of nine faults: 5 minutes
    python -m benchmarks.beside_jobs.torchrun healthy --minutes 15         eight jobs without faults, all at once
    python -m benchmarks.beside_jobs.torchrun faults --scale 300           the same with steps of 39 s
    python -m benchmarks.beside_jobs.torchrun healthy --only generation --scale 100   RL with steps of half a minute
    python -m benchmarks.beside_jobs.torchrun report [--commit NAMES]      the report again

Each case is a job of its own (`torchrun_job.py`), with an agent and a watch that see nothing else. One rank meets one
fault after 30 steps or a few more (6 to 9 with `--scale`); rank, step and place in the step are drawn by the seed:

    stop           SIGSTOP                              lock           its main thread waits at a lock for ever
    gil            C code that keeps the interpreter    skip           it leaves one collective out
    kill           SIGKILL                              oom            the kernel's OOM killer (needs a memory cgroup)
    raise          an exception                         slow compute   forward and backward pass take twice as long
    slow loader    its batches take twice as long

A collective that is left out is told as a fault of the code, with the rank that left it out: gloo aborts another rank
then, whose collective has another size.

Right: an incident of the fitting class names that rank alone, its text has the kind of the fault, and no incident names
another rank, until `SETTLE_SECONDS` later. `cannot tell` names nobody. A healthy job is right if it has no incident.
Each case is a line of `results/beside_job.jsonl`. Several seeds can run at once: that loads the host, and each line has
its load average.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import IncidentOpened, IncidentUpdated
from rolecall.testing.watched_job import WatchedJob

LINES = common.RESULTS / "beside_job.jsonl"
JOB = Path(__file__).with_name("torchrun_job.py")
PLACES = ("load", "forward", "backward", "between")
FIRST_STEPS, FIRST_LONG_STEPS = (30, 60), (6, 10)
STEP_SECONDS = 0.13
START_SECONDS, OOM_SECONDS = 180.0, 60.0
SETTLE_SECONDS = 4.0
"""After the right finding: for wrong ones beside it."""
BUSY_LOAD = 4.0
"""Of a host with two cores."""
OOM_LIMIT_BYTES = 64 << 20
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class Expected:
    """How a fault is told. `text`: what the finding says of its kind. `bar`: seconds. `wait`: after so long it counts
    as not found."""

    fault_class: FaultClass
    text: str
    bar: float
    wait: float


FAULTS = {
    "stop": Expected(FaultClass.HANG, r"process stopped", 5.0, 40.0),
    "lock": Expected(FaultClass.HANG, r"blocked on a lock", 5.0, 40.0),
    "gil": Expected(FaultClass.HANG, r"holds the interpreter", 5.0, 40.0),
    "skip": Expected(FaultClass.USER_CODE, r"left out a collective", 5.0, 40.0),
    "kill": Expected(FaultClass.CRASH, r"signal (9|SIGKILL)", 1.0, 20.0),
    "oom": Expected(FaultClass.CRASH, r"OOM", 1.0, 20.0),
    "raise": Expected(FaultClass.CRASH, r"device-side assert triggered on this rank alone", 1.0, 20.0),
    "slow compute": Expected(FaultClass.SLOW, r"slow", 30.0, 90.0),
    "slow loader": Expected(FaultClass.SLOW, r"slow", 30.0, 90.0),
}
SHAPES = (*("evaluation", "checkpoint", "lengths", "warm-up", "accumulation", "two optimizers", "epochs", "compile"),)
LONG_SHAPES = ("generation",)
"""Asked for by name only."""
WAIT_STEPS = 16
"""A fault counts as not found after this many steps, if that is longer than its wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    number: int
    fault: str
    rank: int
    at: int
    place: str


def cases(seed: int, ranks: int, first_steps: tuple[int, int] = FIRST_STEPS) -> Iterator[Case]:
    """Each fault once in random order, then again; the same for the same seed, however many are taken."""
    rng = random.Random(f"beside-{seed}-{ranks}")
    number = 0
    while True:
        for fault in rng.sample(list(FAULTS), len(FAULTS)):
            rank, at, place = rng.randrange(ranks), rng.randrange(*first_steps), rng.choice(PLACES)
            yield Case(number=number, fault=fault, rank=rank, at=at, place=place)
            number += 1


def start(job: WatchedJob, ranks: int, plan: dict[str, Any]) -> None:
    """Agent, job and watch."""
    job.start_agent()
    common.until("the agent serves", START_SECONDS, lambda: job.agent_url or None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job.start([sys.executable, "-m", "rolecall", "exec", "--", *torchrun, str(JOB), json.dumps(plan)])
    job.start_watch("recovery: {mode: observe}\n")


def one(case: Case, ranks: int, seed: int, scale: float) -> dict[str, Any]:
    expected, step_seconds = FAULTS[case.fault], STEP_SECONDS * scale
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolecall-beside-")))
        mark = folder / "fault"
        job = WatchedJob(folder / "job", (), environment={"OMP_NUM_THREADS": "1"})
        stack.callback(job.close)
        planned = {k: v for k, v in asdict(case).items() if k != "number"}
        seconds = START_SECONDS + 2 * case.at * step_seconds
        start(job, ranks, {**planned, "seed": seed, "scale": scale, "mark": str(mark)})
        if case.fault == "oom":
            stack.callback(limit_memory(mark, seconds))
        until = time.monotonic() + seconds
        while not mark.exists():
            if time.monotonic() > until:
                log = (job.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{case}: no fault within {seconds:.0f} s:\n{log}")
            time.sleep(0.05)
        load = round(os.getloadavg()[0], 1)
        began = json.loads(mark.read_text())["at"]
        deadline = began + max(expected.wait, WAIT_STEPS * step_seconds)
        while time.time() < deadline:
            found = judged(case, began, findings(job))
            if found["found_seconds"] is not None:
                deadline = min(deadline, began + found["found_seconds"] + SETTLE_SECONDS)
            time.sleep(0.25)
        return {"load": load, **judged(case, began, findings(job))}


def limit_memory(mark: Path, seconds: float) -> Any:
    """Once the rank is ready, within `seconds`, it may take `OOM_LIMIT_BYTES` more; the returned function removes its
    cgroup. Raises OSError: none can be made here."""
    cgroup = MEMORY_CGROUPS / f"rolecall-beside-{time.time_ns()}"
    cgroup.mkdir()
    ready = Path(f"{mark}.pid")
    pid = common.until("the rank is ready", seconds, lambda: ready.read_text() if ready.exists() else None)
    (cgroup / "memory.limit_in_bytes").write_text(str(OOM_LIMIT_BYTES))
    (cgroup / "cgroup.procs").write_text(pid)
    Path(f"{mark}.go").touch()

    def remove() -> None:
        with suppress(OSError):
            cgroup.rmdir()

    return remove


def findings(job: WatchedJob) -> list[dict[str, Any]]:
    """Each diagnosis of an incident and each change of one, oldest first."""
    events = job.events(EventKind.INCIDENT_OPENED) + job.events(EventKind.INCIDENT_UPDATED)
    found = []
    for e in sorted(events, key=lambda e: e.seq):
        payload = e.payload
        assert isinstance(payload, IncidentOpened | IncidentUpdated)
        diagnosis = payload.diagnosis
        found.append(
            {
                "at": e.wall_at,
                "incident": e.incident_id,
                "class": str(diagnosis.fault_class),
                "ranks": sorted({s.rank for s in diagnosis.suspects if s.rank is not None}),
                "because": diagnosis.because.replace(f"{common.ROOT}/", ""),
            }
        )
    return found


def judged(case: Case, began: float, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    expected = FAULTS[case.fault]
    named = [f for f in found if f["class"] != FaultClass.CANNOT_TELL]
    right = [f for f in named if f["at"] >= began and f["ranks"] == [case.rank] and f["class"] == expected.fault_class]
    fitting = [f for f in right if re.search(expected.text, f["because"])]
    wrong = [f for f in named if f["ranks"] != [case.rank] or f["at"] < began]
    undecided = [f for f in found if f["class"] == FaultClass.CANNOT_TELL]
    return {
        "right": bool(fitting) and not wrong,
        "rank_named": bool(right),
        "found_seconds": round(right[0]["at"] - began, 2) if right else None,
        "undecided_seconds": round(undecided[0]["at"] - began, 2) if undecided else None,
        "because": (fitting or right)[0]["because"] if right else "",
        "wrong": [f"{f['at'] - began:.1f} s, {f['class']}, ranks {f['ranks']}: {f['because']}" for f in wrong],
        "undecided": [f["because"] for f in undecided[:2]],
    }


def healthy(seed: int, minutes: float, shapes: Sequence[str], scale: float) -> Iterator[dict[str, Any]]:
    """All shapes at once, two ranks each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolecall-beside-")))
        jobs = {}
        for shape in shapes:
            jobs[shape] = WatchedJob(folder / shape, (), environment={"OMP_NUM_THREADS": "1"})
            stack.callback(jobs[shape].close)
            start(jobs[shape], 2, {"shape": shape, "seconds": minutes * 60, "seed": seed, "scale": scale})
        began, until = time.monotonic(), time.monotonic() + minutes * 60 + START_SECONDS
        running = dict(jobs)
        while running and time.monotonic() < until:
            time.sleep(2.0)
            for shape in [s for s, job in running.items() if job.exit_code(1) is not None]:
                del running[shape]
        for shape, job in jobs.items():
            code = job.exit_code(1)
            yield {
                "shape": shape,
                "minutes": round((time.monotonic() - began) / 60, 1),
                "exit_code": code,
                "findings": [f"{f['class']}, ranks {f['ranks']}: {f['because']}" for f in findings(job)],
                "log": (job.folder / "log").read_text(errors="replace")[-600:] if code else "",
            }


def report(lines: Sequence[dict[str, Any]]) -> list[str]:
    commits = ", ".join(dict.fromkeys(x["commit"] for x in lines))
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    about = "torchrun, gloo, one host, `rolecall exec`, mode observe; steps mostly sleep"
    text = common.header("Beside a torchrun job whose code was not touched", about, seeds, commits)
    text += [
        "Seconds from the fault to the finding that names the rank. Right: class, kind and rank; nobody else is named.",
        f"Busy: the host's load average was above {BUSY_LOAD:g} at the fault, since several seeds ran at once.",
        "",
        "| step, s | ranks | host | fault | n | right | rank named | in the bar | median | P25 to P75 | worst | bar |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    faults = [x for x in lines if x["kind"] == "fault"]
    groups: dict[tuple[float, int, bool, str], list[dict[str, Any]]] = defaultdict(list)
    for x in faults:
        groups[x.get("scale", 1.0), x["ranks"], x.get("load", 0.0) > BUSY_LOAD, x["fault"]].append(x)
    order = list(FAULTS)
    for (scale, ranks, busy, fault), group in sorted(groups.items(), key=lambda g: (*g[0][:3], order.index(g[0][3]))):
        expected = FAULTS[fault]
        seconds = [x["found_seconds"] for x in group if x["found_seconds"] is not None]
        in_bar = sum(s <= expected.bar for s in seconds)
        middle = "- | - | -"
        if seconds:
            median, low, high = common.middle_and_spread(seconds)
            middle = f"{median:.2f} | {low:.2f} to {high:.2f} | {max(seconds):.2f}"
        right, named = sum(x["right"] for x in group), sum(x["rank_named"] for x in group)
        about = f"{scale * STEP_SECONDS:.3g} | {ranks} | {'busy' if busy else 'quiet'} | {fault}"
        text.append(f"| {about} | {len(group)} | {right} | {named} | {in_bar} | {middle} | {expected.bar:g} |")
    text += [""]
    loads = [x["load"] for x in faults if x.get("load", 0.0) > BUSY_LOAD]
    if loads:
        text += [f"Load average when busy: median {statistics.median(loads):.1f}, worst {max(loads):.1f}.", ""]
    for x in faults:
        if not x["right"]:
            told = x["wrong"] or [x["because"]] if x["rank_named"] else (x["wrong"] or x["undecided"] or ["nothing"])
            about = f"{x['fault']} at {x['place']}, {x['ranks']} ranks, seed {x['seed']}, case {x['number']}"
            text.append(f"- Not right: {about}: {'; '.join(told)[:400]}")
    quiet = [x for x in lines if x["kind"] == "healthy"]
    if quiet:
        minutes = sum(x["minutes"] for x in quiet)
        text += ["", f"Without faults, {minutes:.0f} minutes of jobs together:", ""]
        text += ["| shape | jobs | minutes | with exit code 0 | findings |", "|---|---|---|---|---|"]
        for shape in (*SHAPES, *LONG_SHAPES):
            group = [x for x in quiet if x["shape"] == shape]
            if group:
                ended = sum(x["exit_code"] == 0 for x in group)
                total, each = sum(len(x["findings"]) for x in group), statistics.fmean(x["minutes"] for x in group)
                text.append(f"| {shape} | {len(group)} | {each * len(group):.0f} | {ended} | {total} |")
        text += ["", *(f"- {x['shape']}: {f}" for x in quiet for f in x["findings"])]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "healthy", "report"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=len(FAULTS))
    parser.add_argument("--only", nargs="*", default=[], help="these faults or shapes only")
    parser.add_argument("--scale", type=float, default=1.0, help="steps take so many times as long")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--commit", nargs="*", default=[], help="of the lines in the report; none: the newest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left running
    of_commit = common.commit()
    key = {"commit": of_commit, "seed": options.seed, "host": common.hardware(), "scale": options.scale}
    if options.what == "faults":
        first_steps = FIRST_STEPS if options.scale == 1 else FIRST_LONG_STEPS
        drawn = cases(options.seed, options.ranks, first_steps)
        chosen = [next(drawn) for _ in range(options.first + options.count)][options.first :]
        for case in chosen:
            if options.only and case.fault not in options.only:
                continue
            found = one(case, options.ranks, options.seed, options.scale)
            add({"kind": "fault", **key, "ranks": options.ranks, **asdict(case), **found})
    elif options.what == "healthy":
        for line in healthy(options.seed, options.minutes, options.only or SHAPES, options.scale):
            add({"kind": "healthy"} | key | line)
    lines = common.read_lines(LINES)
    wanted = options.commit or [lines[-1]["commit"]] if lines else []
    shown = [x for x in lines if x["commit"] in wanted]
    if not shown:
        print("no case was run")
        return 1
    print(common.write("beside_job", report(shown)))
    return 0


def add(line: dict[str, Any]) -> None:
    print(line, flush=True)
    common.add_line(LINES, line)


if __name__ == "__main__":
    sys.exit(main())
