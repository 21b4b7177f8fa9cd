"""From the first minute on, in panels of every size, interval and length: who finds the faulty machine, and how soon?

    python -m benchmarks.panels.regimes                        the default detector, all regimes
        --detectors sequential,minder,mahalanobis              side by side, on the same recordings
        --machines 3,4,12 --faulty 6 --healthy 6               a short one
        --faulty 0 --small 0 --healthy 60 --name regimes_calibration    false alarms alone

The recordings are those of `detector/simulation/regimes.py`. Every detector sees them tick by tick, as a live one
would. An alarm is a machine named. It is right when it names the faulty machine between the onset (or the first sample)
and `GRACE_TICKS` after the fault's end. Every other alarm is wrong. Delays are ticks from the onset or the first
sample; a fault that is missed is later than all others. A regime counts as met when the fault is named in 85 % of its
recordings, and at most one machine is named wrongly in 20 healthy ones.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: the pool already uses every core

from benchmarks import common
from benchmarks.common import table
from benchmarks.intervals import binomial_interval
from benchmarks.panels.fleet.report import CALIBRATION_HEAD, SECONDS_PER_DAY, calibration_row, delay_quantile
from rolecall.detector.panels.panel import Panel, PanelDetector
from rolecall.detector.simulation import regimes
from rolecall.detector.simulation.regimes import (
    EFFECTS_LARGE,
    EFFECTS_SMALL,
    NUM_MACHINES,
    NUM_METRICS,
    REGIMES,
    SCHEDULES,
    OnsetTime,
    Regime,
    RegimeCase,
)

GRACE_TICKS = 24
RECALL_BAR, DELAY_BAR, WRONG_BAR, WRONG_RECORDINGS = 0.85, 24, 1, 20
PICTURE = common.ROOT / "docs" / "images" / "regimes.svg"
WITHIN_TICKS = (16, 24, 48, 96, 192, 900)
DRAWN_TICKS = (*range(0, 100, 4), *range(100, 901, 20))
RUN_SECONDS_MAX = 12 * 3600.0
SMALL_BOUNDS = (2.0, 2.6, 3.5, 4.6, 6.0)
By = list[tuple[str, Callable[[RegimeCase], str], list[str]]]
"""What cases are grouped by: its name, the group of a case, and the groups in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one detector on one recording. `delay`: ticks, None if missed; `num_wrong`: machines named wrongly."""

    case: RegimeCase
    delay: int | None
    num_wrong: int
    cpu_seconds: float


def judge(case: RegimeCase, names: Sequence[str], asked: float) -> list[Result]:
    """What a worker does with one recording."""
    panel = regimes.panel(case)
    return [judge_with(case, _made(name, asked), panel) for name in names]


def judge_with(case: RegimeCase, chosen: PanelDetector, panel: Panel | None = None) -> Result:
    """`panel`: of the case, if it was made already."""
    panel = panel or regimes.panel(case)
    fault = case.fault
    culprit = panel.shape.machines[fault.machine].node if fault else ""
    tracker = chosen.track(panel.shape)
    began = time.process_time()
    delay: int | None = None
    wrong = set()
    for tick, (at, values) in enumerate(panel.ticks()):
        for finding in tracker.tick(at, values):
            for node in {s.node for s in finding.suspects}:
                if fault and node == culprit and fault.start <= tick <= fault.end + GRACE_TICKS:
                    delay = tick - fault.start if delay is None else delay
                else:
                    wrong.add(node)
    return Result(case=case, delay=delay, num_wrong=len(wrong), cpu_seconds=time.process_time() - began)


@cache
def _made(name: str, asked: float) -> PanelDetector:
    from rolecall.detector.panels.registry import detector

    return detector(name, false_alarms_per_1000_machine_days=asked)


def run(
    cases: Sequence[RegimeCase], names: Sequence[str], asked: float, workers: int, say: Callable[[str], None]
) -> list[list[Result]]:
    """Results by detector."""
    total, done, began = regimes.num_values(cases), 0, time.monotonic()
    found: list[list[Result]] = []
    with ProcessPoolExecutor(workers) as pool:
        # The largest first: at the end small ones fill all cores.
        waiting = {
            pool.submit(judge, c, names, asked): c for c in sorted(cases, key=lambda c: -regimes.num_values([c]))
        }
        try:
            for future in as_completed(waiting, timeout=RUN_SECONDS_MAX):
                found.append(future.result())
                done += regimes.num_values([waiting[future]])
                if len(found) % 50 == 0:
                    seconds = time.monotonic() - began
                    say(
                        f"{len(found)}/{len(cases)} recordings, {100 * done / total:.0f} % of the work, {seconds:.0f} s"
                    )
        except BaseException:  # also an interrupt: hours of waiting work must not be finished first
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [[of_case[i] for of_case in found] for i in range(len(names))]


def calibration(names: Sequence[str], runs: Sequence[Sequence[Result]], by: By, asked: float) -> list[str]:
    """Machines named wrongly in healthy recordings, per machine-day: a machine counts once in a recording."""

    def row(label: str, mine: Sequence[Result]) -> list[str]:
        seconds = sum(c.regime.num_machines * c.regime.schedule.seconds for c in (r.case for r in mine))
        return calibration_row(label, asked, sum(r.num_wrong for r in mine), seconds / SECONDS_PER_DAY / 1000)

    rows = []
    for name, mine in zip(names, runs, strict=True):
        healthy = [r for r in mine if not r.case.fault]
        parts = [(name, healthy)]
        for what, key, values in by:
            parts += [(f"{name}, {what}: {v}", [r for r in healthy if key(r.case) == v]) for v in values]
        rows += [row(label, part) for label, part in parts if part]
    return table(CALIBRATION_HEAD, rows)


def report(names: Sequence[str], runs: Sequence[Sequence[Result]], asked: float) -> list[str]:
    lines: list[str] = []
    large = [[r for r in mine if not r.case.fault or r.case.fault.effect_spreads >= EFFECTS_LARGE[0]] for mine in runs]
    lines += ["## Effects of 6 spreads and more, and healthy recordings", ""]
    lines += table(_HEAD, [_row(name, mine) for name, mine in zip(names, large, strict=True)])
    by: By = [
        ("machines", lambda c: str(c.regime.num_machines), [str(n) for n in NUM_MACHINES]),
        ("metrics", lambda c: str(c.regime.num_metrics), [str(n) for n in NUM_METRICS]),
        ("schedule", lambda c: c.regime.schedule.name, [s.name for s in SCHEDULES]),
    ]
    for what, key, values in by:
        lines += ["", f"### By {what}", ""]
        rows = []
        for name, mine in zip(names, large, strict=True):
            for value in values:
                part = [r for r in mine if key(r.case) == value]
                rows += [_row(f"{name}, {value}", part)] if part else []
        lines += table(_HEAD, rows)
    lines += ["", "### By onset", ""]
    rows = []
    for name, mine in zip(names, large, strict=True):
        for onset in OnsetTime:
            rows.append(_row(f"{name}, {onset}", [r for r in mine if r.case.fault and r.case.fault.onset is onset]))
    lines += table(_HEAD, rows)
    lines += ["", f"### Calibration at {asked:g} asked: machines named in healthy recordings", ""]
    lines += calibration(names, runs, by, asked)
    lines += ["", "### Named within so many ticks of the onset or the first sample", ""]
    rows = []
    for name, mine in zip(names, large, strict=True):
        for num in NUM_MACHINES:
            part = [r for r in mine if r.case.fault and r.case.regime.num_machines == num]
            shares = [f"{_share_within(part, ticks):.2f}" for ticks in WITHIN_TICKS]
            rows += [[f"{name}, {num} machines", str(len(part)), *shares]] if part else []
    lines += table(("", "faults", *map(str, WITHIN_TICKS)), rows)
    lines += ["", "## Each regime", ""]
    for name, mine in zip(names, large, strict=True):
        rows = []
        for regime in REGIMES:
            part = [r for r in mine if r.case.regime == regime]
            if part:
                rows.append([*_row(regime.name, part), _met(part)])
        lines += [f"### {name}: {sum(r[-1] == 'yes' for r in rows)} of {len(rows)} met", ""]
        lines += [*table((*_HEAD, "met"), rows), ""]
    lines += ["## Effects of 2 to 6 spreads", ""]
    rows = []
    for name, every in zip(names, runs, strict=True):
        for low, high in pairwise(SMALL_BOUNDS):
            part = [r for r in every if r.case.fault and low <= r.case.fault.effect_spreads < high]
            rows += [_row(f"{name}, {low:g} to {high:g}", part)] if part else []
    return lines + table(_HEAD, rows)


def _share_within(faulty: Sequence[Result], ticks: int) -> float:
    return sum(r.delay is not None and r.delay <= ticks for r in faulty) / max(1, len(faulty))


def picture(mine: Sequence[Result]) -> str:
    """SVG: share of faults named against ticks since the onset, of one detector, by number of machines."""
    import altair as alt
    import vl_convert

    faulty = [r for r in mine if r.case.fault and r.case.fault.effect_spreads >= EFFECTS_LARGE[0]]
    rows = []
    for num in sorted({r.case.regime.num_machines for r in faulty}):
        part = [r for r in faulty if r.case.regime.num_machines == num]
        rows += [
            {"ticks": ticks, "share named": _share_within(part, ticks), "machines": f"{num} machines"}
            for ticks in DRAWN_TICKS
        ]
    x = alt.X(
        "ticks:Q",
        scale=alt.Scale(type="symlog", constant=16),
        axis=alt.Axis(values=[0, 10, 30, 100, 300, 1000]),  # the default labels touch each other
        title="ticks since the onset or the first sample",
    )
    y = alt.Y("share named:Q", scale=alt.Scale(domain=[0, 1]), title="share of faults named")
    order = [f"{n} machines" for n in NUM_MACHINES]
    colour = alt.Color("machines:N", title=None, sort=order)
    lines = alt.Chart(alt.Data(values=rows)).mark_line(interpolate="step-after")
    dash = alt.StrokeDash("machines:N", title=None, sort=order, legend=None)
    chart = lines.encode(x=x, y=y, color=colour, strokeDash=dash)
    return vl_convert.vegalite_to_svg(chart.properties(width=460, height=260).to_dict())


_HEAD = (
    "",
    "faults",
    "named",
    "recall [95 %]",
    "delay P50, ticks",
    "wrong beside",
    "healthy",
    "flagged",
    "wrong",
    "CPU s",
)


def _row(label: str, mine: Sequence[Result]) -> list[str]:
    faulty, healthy = [r for r in mine if r.case.fault], [r for r in mine if not r.case.fault]
    named = [r for r in faulty if r.delay is not None]
    recall = "-"
    if faulty:
        low, high = binomial_interval(len(named), len(faulty))
        recall = f"{len(named) / len(faulty):.2f} [{low:.2f}, {high:.2f}]"
    middle = delay_quantile([r.delay for r in faulty], 0.5) if faulty else float("nan")
    return [
        label,
        str(len(faulty)),
        str(len(named)),
        recall,
        "missed" if middle == float("inf") else f"{middle:.0f}" if faulty else "-",
        str(sum(r.num_wrong for r in faulty)),
        str(len(healthy)),
        str(sum(r.num_wrong > 0 for r in healthy)),
        str(sum(r.num_wrong for r in healthy)),
        f"{sum(r.cpu_seconds for r in mine):.0f}",
    ]


def _met(mine: Sequence[Result]) -> str:
    faulty, healthy = [r for r in mine if r.case.fault], [r for r in mine if not r.case.fault]
    recall = sum(r.delay is not None for r in faulty) / max(1, len(faulty))
    delay = delay_quantile([r.delay for r in faulty], 0.5) if faulty else float("inf")
    wrong = sum(r.num_wrong for r in healthy)
    few = wrong <= WRONG_BAR * max(1.0, len(healthy) / WRONG_RECORDINGS)
    # With three machines, recall is reported and has no bar; without faults there is none.
    finds = (recall >= RECALL_BAR and delay <= DELAY_BAR) or mine[0].case.regime.num_machines < 4 or not faulty
    return "yes" if finds and few else "no"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detectors", default="sequential")
    parser.add_argument("--asked", type=float, default=100.0, help="false alarms per 1,000 machine-days")
    parser.add_argument("--machines", default=",".join(map(str, NUM_MACHINES)), help="of these sizes only")
    parser.add_argument("--metrics", default=",".join(map(str, NUM_METRICS)), help="with these numbers only")
    parser.add_argument("--faulty", type=int, default=21, help="recordings of each regime with a large effect")
    parser.add_argument("--small", type=int, default=6, help="recordings of each regime with a small effect")
    parser.add_argument("--healthy", type=int, default=20, help="healthy recordings of each regime")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--name", default="regimes", help="of the report")
    parser.add_argument("--dry", action="store_true", help="print the report, do not write it")
    args = parser.parse_args()
    names = args.detectors.split(",")
    for name in names:
        _made(name, args.asked)  # a name that does not exist is an error before hours of work
    sizes, metrics = ({int(x) for x in text.split(",")} for text in (args.machines, args.metrics))
    chosen: list[Regime] = [r for r in REGIMES if r.num_machines in sizes and r.num_metrics in metrics]
    cases: list[RegimeCase] = []
    for r in chosen:
        cases += regimes.cases(r, seed=args.seed, num_faulty=args.faulty, num_healthy=args.healthy)
        cases += regimes.cases(r, seed=args.seed, num_faulty=args.small, num_healthy=0, effects=EFFECTS_SMALL)
    runs = run(cases, names, args.asked, args.workers, lambda line: print(line, file=sys.stderr, flush=True))
    config = (
        f"{args.detectors}; asked {args.asked:g}; {len(chosen)} regimes with {args.faulty} + {args.small} faulty and "
        f"{args.healthy} healthy recordings each"
    )
    lines = [*common.header("Regimes", config, str(args.seed)), *report(names, runs, args.asked)]
    print("\n".join(lines))
    if not args.dry:
        path = common.write(args.name, lines)
        print(f"written: {path}", file=sys.stderr)
        if args.name == "regimes":  # another report is of other regimes
            PICTURE.write_text(picture(runs[0]))
            print(f"written: {PICTURE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
