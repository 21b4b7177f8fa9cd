"""The default detector on real recordings, settings as they are: `python -m benchmarks.panels.recordings [--data DIR]`.

Reads `../shared/data` (its README tells the sets and the protocol of `score.py`) and prints, for each set, found
events, false alarms, precision, recall and F1 at the published operating point, and beside it the whole curve over
asked rates of false alarms: asked against observed with its exact Poisson interval, over all healthy machine-time.
Rows marked `cut` are of seeded pieces of the same recordings: of one day at 5 minutes, of five minutes at one second.
False alarms on random pairs of metrics show whether the detector needs many metrics. Exit code 2 where the data are not
there.
"""

import argparse
import importlib.util
import json
import math
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.intervals import poisson_interval
from rolecall.detector.live.fusion import merged
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS, Panel, PanelShape, findings
from rolecall.detector.panels.registry import DEFAULT, NAMES, detector, with_step_time
from rolecall.detector.sources import recording

SETS = ("asd", "exathlon", "straggler")
ASKED = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
NUM_PAIRS = 60
SECONDS_PER_DAY = 86_400.0
CUT_SECONDS = ((2.0, 300.0), (60.0, 7200.0), (600.0, SECONDS_PER_DAY))
"""Intervals up to the first have pieces as long as the second: the public recordings at one second last a quarter of an
hour."""
NUM_CUTS = 3
LEFT_TICKS = 3
"""An event of which less is left in a piece does not count."""
PAIRS_MAX = 0.2
"""The bar: false alarms per 1,000 machine-samples."""

Case = tuple[str, dict[str, Any], tuple[Panel, ...]]
Alarm = tuple[float, str]


@cache
def scorer(data: Path) -> ModuleType:
    """The protocol that comes with the recordings."""
    spec = importlib.util.spec_from_file_location("score", data / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(data: Path, name: str) -> list[Case]:
    found = []
    for label in sorted((data / name).glob("*/label.json")):
        read = recording.read(label.parent / "recording.parquet")
        found.append((label.parent.name, json.loads(label.read_text()), read.panels))
    return found


def alarms(panels: Sequence[Panel], name: str, asked: float) -> list[Alarm]:
    told = []
    for panel in panels:
        chosen = detector(name, false_alarms_per_1000_machine_days=asked)
        told += [f for each in with_step_time(chosen, asked) for f in findings(each, panel)]
    return sorted((d.detected_at, s.node) for d in merged(told) for s in d.suspects)


def machine_days(case: Case) -> float:
    """From `score_from` on: where an alarm counts."""
    _, label, panels = case
    total = 0.0
    for panel in panels:
        scored = (panel.at >= label["score_from"]).sum()
        total += float(scored) * len(panel.shape.machines) * panel.shape.interval_seconds / SECONDS_PER_DAY
    return total


def cuts(cases_: Sequence[Case], seed: int) -> list[Case]:
    """Pieces of the recordings, as long as `CUT_SECONDS` says: at seeded starts, the first in the middle of a fault
    where there is one. They score from their first sample, or where the labels begin. What is shorter than a piece is
    left out."""
    rng = random.Random(seed)
    found: list[Case] = []
    for name, label, panels in cases_:
        for number in range(NUM_CUTS):
            pieces, start = [], math.nan
            for panel in panels:
                interval = panel.shape.interval_seconds
                seconds = next((length for up_to, length in CUT_SECONDS if interval <= up_to), 0.0)
                first, latest = float(panel.at[0]), float(panel.at[-1]) - seconds
                if not seconds or latest <= first:
                    continue
                if math.isnan(start):
                    start = rng.uniform(first, max(latest, label["score_from"]))
                    lasting = [e for e in label["events"] if e["end"] - e["onset"] > 2 * LEFT_TICKS * interval]
                    if number == 0 and lasting:
                        event = rng.choice(lasting)
                        start = rng.uniform(event["onset"], event["end"] - LEFT_TICKS * interval)
                here = (panel.at >= start) & (panel.at <= start + seconds)
                pieces.append(Panel(shape=panel.shape, at=panel.at[here], values=panel.values[:, here]))
            if pieces:
                end = max(float(p.at[-1]) for p in pieces)
                events, ignored = [], list(label["ignore"])
                for event in label["events"]:
                    left = min(event["end"], end) - max(event["onset"], start)
                    if left >= LEFT_TICKS * pieces[0].shape.interval_seconds:
                        events.append(event)
                    elif left > -label["grace_seconds"]:  # its rest is too short to be found
                        ignored.append({"nodes": [event["node"]], "from": event["onset"], "to": event["end"]})
                scored = {**label, "score_from": max(start, label["score_from"]), "events": events, "ignore": ignored}
                found.append((f"{name}-{number}", scored, tuple(pieces)))
    return found


def of_metrics(panel: Panel, chosen: Sequence[int]) -> Panel:
    s = panel.shape
    shape = PanelShape(
        job=s.job,
        role=s.role,
        phase=s.phase,
        metrics=tuple(s.metrics[m] for m in chosen),
        machines=s.machines,
        interval_seconds=s.interval_seconds,
    )
    return Panel(shape=shape, at=panel.at, values=panel.values[list(chosen)])


def pairs(asd: Sequence[Case], score: ModuleType, name: str, seed: int) -> tuple[int, float]:
    """(false alarms, machine-samples) of random pairs of metrics on random days, at the published operating point."""
    rng = random.Random(seed)
    false, samples = 0, 0.0
    for _ in range(NUM_PAIRS):
        _, label, panels = asd[rng.randrange(len(asd))]
        panel = of_metrics(panels[0], rng.sample(range(len(panels[0].shape.metrics)), 2))
        row = score.score_case(label, alarms([panel], name, FALSE_ALARMS_PER_1000_MACHINE_DAYS))
        false += row["false"]
        samples += float((panel.at >= label["score_from"]).sum()) * len(panel.shape.machines)
    return false, samples


def report(args: argparse.Namespace, data: dict[str, list[Case]], score: ModuleType) -> list[str]:
    lines = common.header(
        "Real recordings", f"{args.detector}, asked {FALSE_ALARMS_PER_1000_MACHINE_DAYS:g}", str(args.seed)
    )
    lines += ["| set | cases | events | found | false | precision | recall | F1 | delay P50 | healthy cases flagged |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    cut = {f"{name}, cut": found for name in data if (found := cuts(data[name], args.seed))}
    for name, of_set in (data | cut).items():
        rows = [score.score_case(c[1], alarms(c[2], args.detector, FALSE_ALARMS_PER_1000_MACHINE_DAYS)) for c in of_set]
        s = score.summary(rows)
        delay = "-" if s["delay_median_seconds"] is None else f"{s['delay_median_seconds']:.0f} s"
        lines.append(
            f"| {name} | {s['cases']} | {s['events']} | {s['found']} | {s['false_alarms']} | {s['precision']} | "
            f"{s['recall']} | {s['f1']} | {delay} | {s['healthy_cases_flagged']} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", "## Asked and observed", ""]
    lines += ["| set | asked | machine-days | false | observed per 1,000 machine-days [95 %] | asked is | found | F1 |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name in ("asd", "exathlon"):
        days = sum(machine_days(c) for c in data[name])
        for asked in ASKED:
            rows = [score.score_case(c[1], alarms(c[2], args.detector, asked)) for c in data[name]]
            false, found = sum(r["false"] for r in rows), sum(r["found"] for r in rows)
            low, high = (1000 * x / days for x in poisson_interval(false))
            inside = "inside" if low <= asked <= high else "outside"
            f1 = score.summary(rows)["f1"]
            lines.append(
                f"| {name} | {asked:g} | {days:.1f} | {false} | {1000 * false / days:.0f} [{low:.0f}, {high:.0f}] | "
                f"{inside} | {found} | {'-' if f1 is None else f1} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    false, samples = pairs(data["asd"], score, args.detector, args.seed)
    rate = 1000 * false / samples
    met = "met" if rate <= PAIRS_MAX else "**not met**"
    lines += [
        "",
        (
            f"{NUM_PAIRS} random pairs of `asd` metrics: {false} false alarms in {samples:.0f} machine-samples, "
            f"{rate:.3f} per 1,000; bar {PAIRS_MAX}: {met}."
        ),
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=common.PUBLIC_DATA)
    parser.add_argument("--detector", choices=NAMES, default=DEFAULT)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.data / "score.py").exists():
        print(f"skipped: no recordings in {args.data}", file=sys.stderr)
        return 2
    np.seterr(all="ignore")
    data = {name: cases(args.data, name) for name in SETS}
    lines = report(args, data, scorer(args.data))
    common.publish("recordings" if args.detector == DEFAULT else f"recordings-{args.detector}", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
