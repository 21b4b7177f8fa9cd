"""Is a collapsed policy told, how soon, and how often is a healthy one? On courses of real training.

    python -m benchmarks.detection.collapse make COURSES.jsonl              trains 70 policies, or those not yet there
    python -m benchmarks.detection.collapse make COURSES.jsonl --part 0/2   every second of them
    python -m benchmarks.detection.collapse report COURSES.jsonl...         the report, in benchmarks/results
    python -m benchmarks.detection.collapse keep COURSES.jsonl...           one of each kind, for the tests

All policies take half an hour of two CPUs. The tests read `tests/detector/courses.json`.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.detection.collapse.courses import Spec, course, specs
from rolecall.detector.live.stages.numbers import collapse as collapse_signs
from rolecall.detector.live.stages.numbers.collapse import (
    QUIET_STEPS,
    SIGNS,
    STEPS_KEPT,
    TrainingStepPoint,
    collapse_symptoms,
)

KEPT = common.ROOT / "tests" / "detector" / "courses.json"
SIGN_KINDS = (
    "reward_fell",
    "reward_dived",
    "length_collapsed",
    "entropy_collapsed",
    "policy_diverged",
    "engines_disagree",
)
UPPER_95 = 3.0
"""Of none seen in N: the 95 % bound on the rate is 3 / N, if they come independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the detector said of one course. Positions are rows, for a rollback repeats steps."""

    spec: Spec
    num_rows: int
    alarms: tuple[tuple[int, frozenset[str]], ...]  # of each finding: row, kinds of signs then and later

    @property
    def false_alarms(self) -> int:
        return sum(not self.spec.spoiled or at < self.spec.at for at, _ in self.alarms)

    @property
    def lawful_rows(self) -> int:
        return self.spec.at if self.spec.spoiled else self.num_rows

    @property
    def delay(self) -> int | None:
        """Steps made after the first spoiled one when it was told, that one included."""
        return next((at - self.spec.at + 1 for at, _ in self.alarms if at >= self.spec.at), None)


def judged(spec: Spec, rows: Sequence[dict[str, float]]) -> Judged:
    points: list[TrainingStepPoint] = []
    alarms: list[tuple[int, set[str]]] = []
    last = -QUIET_STEPS - 1
    for number, row in enumerate(rows):
        step = int(row["step"])
        points = [p for p in points if p.step < step][-STEPS_KEPT:]
        points.append(TrainingStepPoint(step, 0.0, {k: v for k, v in row.items() if k != "step"}))
        seen = {sign.kind for sign in collapse_symptoms(points)}
        if not seen:
            continue
        if number - last > QUIET_STEPS:
            alarms.append((number, set()))
        alarms[-1][1].update(seen)
        last = number
    return Judged(spec=spec, num_rows=len(rows), alarms=tuple((at, frozenset(kinds)) for at, kinds in alarms))


def read(paths: Iterable[Path]) -> list[tuple[Spec, list[dict[str, float]]]]:
    found = [line for path in paths for line in common.read_lines(path)]
    return sorted(((Spec(**f["spec"]), f["rows"]) for f in found), key=lambda x: x[0].seed)


def make(path: Path, part: int, parts: int) -> None:
    torch.set_num_threads(1)
    there = {_named(spec) for spec, _ in read([path])}
    for spec in specs()[part::parts]:
        if _named(spec) in there:
            continue
        rows = course(spec)
        common.add_line(path, {"spec": asdict(spec), "rows": rows})
        print(f"{spec.kind}, seed {spec.seed}: {len(rows)} steps, reward {rows[-1].get('reward')}", flush=True)


def _named(spec: Spec) -> str:
    return json.dumps(asdict(spec), sort_keys=True)


def report(found: Sequence[Judged], commit: str) -> list[str]:
    seeds = ", ".join(str(j.spec.seed) for j in found)
    config = (
        f"built-in task of 6 digits, model of width 64, settings of each algorithm as they are; level "
        f"{collapse_signs.LEVEL_STEPS} steps, recent {collapse_signs.RECENT_STEPS}, clear fall "
        f"{collapse_signs.CLEAR_SHARE}"
    )
    lines = common.header("Collapse of a policy, on courses of real training", config, seeds, commit)
    return [*lines, *_spoiled(found), "", *_healthy(found)]


def _spoiled(found: Sequence[Judged]) -> list[str]:
    kinds: dict[str, list[Judged]] = defaultdict(list)
    for j in found:
        if j.spec.spoiled:
            kinds[_kind(j.spec)].append(j)
    every = [j for of_kind in kinds.values() for j in of_kind]
    lines = [
        "## Spoiled",
        "",
        "| what was done | n | told | steps until told, median (worst) | signs |",
        "|---|---|---|---|---|",
    ]
    for name, of_kind in [*kinds.items(), ("all", every)]:
        delays = [float(j.delay) for j in of_kind if j.delay is not None]
        seen = [{k for at, names in j.alarms if at >= j.spec.at for k in names} for j in of_kind]
        signs_seen = ", ".join(f"{k} {n}" for k in SIGN_KINDS if (n := sum(k in s for s in seen)))
        lines.append(f"| {name} | {len(of_kind)} | {len(delays)} | {common.summary(delays, 0)} | {signs_seen} |")
    missed = [j for j in every if j.delay is None]
    return [*lines, "", *(f"Missed: {j.spec.kind}, seed {j.spec.seed}, factor {j.spec.factor:g}." for j in missed)]


def _healthy(found: Sequence[Judged]) -> list[str]:
    lines = ["## Healthy", "", "| course | n | steps | false alarms |", "|---|---|---|---|"]
    kinds: dict[str, list[Judged]] = defaultdict(list)
    lawful = [j for j in found if j.lawful_rows]
    for j in lawful:
        kinds["before a spoiled step" if j.spec.spoiled else j.spec.kind].append(j)
    for name, of_kind in kinds.items():
        rows, false = sum(j.lawful_rows for j in of_kind), sum(j.false_alarms for j in of_kind)
        lines.append(f"| {name} | {len(of_kind)} | {rows} | {false} |")
    rows, false = sum(j.lawful_rows for j in lawful), sum(j.false_alarms for j in lawful)
    lines += ["", f"{false} false alarms in {rows} steps: {1000 * false / rows:.2f} per 1,000 steps."]
    if not false:
        courses = min(1.0, UPPER_95 / len(lawful))
        lines.append(
            f"With 95 % confidence below {1000 * UPPER_95 / rows:.2f} if each step were a trial of its own; but the "
            f"steps of a course are alike, and the {len(lawful)} courses as trials only say that at most "
            f"{courses:.0%} of "
            f"courses have one."
        )
    lines.append("The thresholds were chosen with such courses at hand: another job may show more.")
    told = [j for j in found if j.false_alarms]
    return [*lines, *(f"Told: {j.spec.kind}, seed {j.spec.seed}, {j.alarms}." for j in told)]


def keep(found: Sequence[tuple[Spec, list[dict[str, float]]]]) -> None:
    """Three digits of one course of each kind, in columns: what the tests judge again."""
    kept: dict[str, Any] = {}
    for spec, rows in found:
        there = [k for k in ("step", *SIGNS) if any(k in row for row in rows)]
        columns = {k: [_short(row.get(k)) for row in rows] for k in there}
        kept.setdefault(_kind(spec), {"spec": asdict(spec), "columns": columns})
    KEPT.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n")


def _kind(spec: Spec) -> str:
    return f"{spec.kind} x{spec.factor:g}" if spec.kind == "lr" else spec.kind


def _short(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.3g}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "report", "keep"))
    parser.add_argument("courses", type=Path, nargs="+")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--commit", default="", help="that made the courses, if it is not the one checked out now")
    given = parser.parse_args(argv)
    if given.what == "make":
        part, _, parts = given.part.partition("/")
        make(given.courses[0], int(part), int(parts))
        return 0
    found = read(given.courses)
    if given.what == "keep":
        keep(found)
        return 0
    lines = report([judged(spec, rows) for spec, rows in found], given.commit)
    common.publish("collapse", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
