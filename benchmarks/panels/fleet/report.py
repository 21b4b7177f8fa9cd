"""What the outcomes say together: recall and delay by effect and kind, calibration, precision, a picture.

`__main__.py` says what counts as right. Intervals are exact ones of 95 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.common import table
from benchmarks.intervals import binomial_interval, poisson_interval
from rolecall.detector.simulation.fleet import NUM_MACHINES_MAX, NUM_MACHINES_MIN, SimulatedTask

SECONDS_PER_DAY = 86_400.0
BANDS = ((1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (8.0, 20.0))
"""Of effects, peer standard deviations."""
SUMS = ((4.0, 20.0), (2.0, 20.0), (1.0, 20.0))
MINDER_FAULTS_PER_DAY = 2.0
"""Faults a day and task: Minder (NSDI 2025), abstract."""
BASE_RATE_PER_1000_MACHINE_DAYS = 4.2
"""584 faults of 400 servers in 349 days (InfiniteHBD trace, ../shared/data/base-rates)."""
PRECISION_BAR = 0.97
CURVE_BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One detector's watch over one task. `asked`: false alarms per 1,000 machine-days.

    `false_healthy`: alarms in `healthy_machine_seconds`, where nothing is wrong anywhere in the task. `false_faulty`:
    wrong ones from the onset on; `false_victims` of them name a neighbour that the fault reached.
    """

    task: SimulatedTask
    detector: str
    asked: float
    delay_seconds: float | None
    false_healthy: int
    healthy_machine_seconds: float
    false_faulty: int
    false_victims: int
    cpu_seconds: float


def delay_quantile(delays: Sequence[float | None], q: float) -> float:
    """Of all faults, the missed ones at infinity: the smallest delay that a share `q` of them keeps."""
    ordered = sorted(math.inf if d is None else d for d in delays)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def told(seconds: float) -> str:
    return "missed" if math.isinf(seconds) else f"{seconds:.0f} s"


def recall_told(mine: Sequence[Outcome]) -> str:
    n, k = len(mine), sum(o.delay_seconds is not None for o in mine)
    if not n:
        return "-"
    low, high = binomial_interval(k, n)
    return f"{k / n:.3f} [{low:.3f}, {high:.3f}]"


def effect_of(o: Outcome) -> float:
    assert o.task.fault
    return o.task.fault.effect_sigmas


def by_effect(mine: Sequence[Outcome]) -> list[str]:
    rows = []
    for low, high in (*BANDS, *SUMS):
        some = [o for o in mine if o.task.fault and low <= effect_of(o) < high]
        delays = [o.delay_seconds for o in some]
        times = [told(delay_quantile(delays, q)) if some else "-" for q in (0.5, 0.95)]
        found = str(sum(d is not None for d in delays))
        rows.append([f"{low:g} to {high:g} sigma", str(len(some)), found, recall_told(some), *times])
    return table(("effect", "n", "found", "recall [95 %]", "delay P50", "delay P95"), rows)


def by_kind(mine: Sequence[Outcome]) -> list[str]:
    """Effects of 2 sigma and more, by how the fault began, by mix, and by how its kind spreads."""

    def traits(o: Outcome) -> tuple[str, ...]:
        fault = o.task.fault
        assert fault
        hit = "victims" if fault.victims else "no victim"
        return f"onset: {fault.how}", f"mix: {o.task.mix}", f"spreads: {hit}", f"metrics hit: {len(fault.metrics)}"

    some = [o for o in mine if o.task.fault and effect_of(o) >= SUMS[1][0]]
    rows = []
    for trait in sorted({t for o in some for t in traits(o)}):
        those = [o for o in some if trait in traits(o)]
        times = [told(delay_quantile([o.delay_seconds for o in those], q)) for q in (0.5, 0.95)]
        wrong = sum(o.false_faulty for o in those)
        victims = sum(o.false_victims for o in those)
        rows.append([trait, str(len(those)), recall_told(those), *times, f"{wrong} ({victims})"])
    head = (
        "faults of 2 sigma and more",
        "n",
        "recall [95 %]",
        "delay P50",
        "delay P95",
        "false from onset on (victims)",
    )
    return table(head, rows)


def healthy_rate(mine: Sequence[Outcome]) -> tuple[int, float]:
    """(false alarms, thousands of machine-days) where nothing is wrong."""
    seconds = sum(o.healthy_machine_seconds for o in mine)
    return sum(o.false_healthy for o in mine), seconds / SECONDS_PER_DAY / 1000


CALIBRATION_HEAD = ("", "machine-days", "expected", "observed", "observed rate [95 %]", "asked is")
SIZES = ((NUM_MACHINES_MIN, 16), (17, 64), (65, 256), (257, NUM_MACHINES_MAX))


def calibration_row(label: str, asked: float, observed: int, days: float) -> list[str]:
    """`asked`: per 1,000 machine-days. `days`: thousands of machine-days."""
    low, high = (x / days for x in poisson_interval(observed))
    inside = "inside" if low <= asked <= high else ("fewer" if high < asked else "more")
    rate = f"{observed / days:,.1f} [{low:,.1f}, {high:,.1f}]"
    return [label, f"{1000 * days:,.0f}", f"{asked * days:,.1f}", str(observed), rate, inside]


def calibration(runs: Sequence[Sequence[Outcome]]) -> list[str]:
    """By asked rate, and by size of task within each."""
    rows = []
    for mine in runs:
        asked = mine[0].asked
        rows.append(calibration_row(f"{asked:g} asked", asked, *healthy_rate(mine)))
        for low, high in SIZES:
            some = [o for o in mine if low <= o.task.num_machines <= high]
            if some:
                rows.append(calibration_row(f"{asked:g}, {low} to {high} machines", asked, *healthy_rate(some)))
    return table(CALIBRATION_HEAD, rows)


def precision(right: float, false: float, false_healthy: float) -> float:
    return right / (right + false + false_healthy) if right else 0.0


MACHINES_MEAN = (NUM_MACHINES_MAX - NUM_MACHINES_MIN) / math.log(NUM_MACHINES_MAX / NUM_MACHINES_MIN)
"""Of Minder's tasks, taken as log-uniform."""
PRECISION_SAID = (
    f"Minder's: {MINDER_FAULTS_PER_DAY:g} faults a day in a task of {MACHINES_MEAN:.0f} machines, the mean of "
    f"{NUM_MACHINES_MIN} "
    f"to {NUM_MACHINES_MAX:,} log-uniform; base rate: {BASE_RATE_PER_1000_MACHINE_DAYS:g} faults per 1,000 "
    "machine-days. Wrong per fault: all false alarms from a fault's onset to 2 minutes after its end, on tasks of "
    "the sizes "
    "simulated here."
)


def precision_table(runs: Sequence[Sequence[Outcome]]) -> list[str]:
    """Right over all alarms per day, from recall, wrong alarms per fault and the rate of false ones in healthy time."""
    places = (  # faults and machine-days in a stretch of time
        ("Minder's", MINDER_FAULTS_PER_DAY, MACHINES_MEAN),
        ("base rate", BASE_RATE_PER_1000_MACHINE_DAYS, 1000.0),
    )
    rows = []
    for mine in runs:
        faults = [o for o in mine if o.task.fault]
        if not faults:
            continue
        recall = sum(o.delay_seconds is not None for o in faults) / len(faults)
        wrong = sum(o.false_faulty for o in faults) / len(faults)
        k, days = healthy_rate(mine)
        high = poisson_interval(k)[1] / days / 1000
        for name, num_faults, machine_days in places:
            right, false = num_faults * recall, num_faults * wrong

            gives = (right / PRECISION_BAR - right - false) / machine_days * 1000
            rows.append(
                [
                    f"{mine[0].asked:g}",
                    name,
                    f"{recall:.3f}",
                    f"{wrong:.3f}",
                    (
                        f"{precision(right, false, k / days / 1000 * machine_days):.3f} (at least "
                        f"{precision(right, false, high * machine_days):.3f})"
                    ),
                    f"{precision(right, false, mine[0].asked / 1000 * machine_days):.3f}",
                    f"{gives:.2f}" if gives > 0 else "none",
                ]
            )
    head = (
        "asked",
        "faults at",
        "recall",
        "wrong per fault",
        "precision, observed rate (upper limit of it)",
        "precision, asked rate",
        f"rate that gives {PRECISION_BAR}",
    )
    return table(head, rows)


COLOURS = ("#1f6fb2", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#16a085", "#555555")
WIDTH, HEIGHT, MARGIN = 560, 300, 50
EFFECT_TICKS = (1, 2, 4, 8, 16)


def curve(runs: Sequence[Sequence[Outcome]]) -> str:
    """Recall against effect, in bins of equal ratio, with exact intervals. SVG."""
    low, high = BANDS[0][0], BANDS[-1][1]
    edges = np.geomspace(low, high, CURVE_BINS + 1)

    def x(effect: float) -> float:
        return MARGIN + math.log(effect / low) / math.log(high / low) * WIDTH

    def y(share: float) -> float:
        return MARGIN + (1 - share) * HEIGHT

    size = f'width="{WIDTH + 2 * MARGIN}" height="{HEIGHT + 2 * MARGIN}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#333333">',
        f'<rect {size} fill="#ffffff"/>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cccccc"/>',
        (
            f'<text x="{MARGIN}" y="{MARGIN - 14}" font-weight="bold">Recall against effect (bars: exact 95 % '
            f"intervals)</text>"
        ),
        (
            f'<text x="{MARGIN + WIDTH / 2}" y="{MARGIN + HEIGHT + 34}" text-anchor="middle">effect, peer standard '
            f"deviations</text>"
        ),
    ]
    for tick in EFFECT_TICKS:
        parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y(0)}" y2="{y(1)}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{y(0) + 16}" text-anchor="middle">{tick}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{MARGIN - 6}" y="{y(share) + 4}" text-anchor="end">{100 * share:.0f} %</text>')
    for i, mine in enumerate(runs):
        colour, points = COLOURS[i % len(COLOURS)], []
        for left, right in pairwise(edges):
            some = [o for o in mine if o.task.fault and left <= effect_of(o) < right]
            if not some:
                continue
            k = sum(o.delay_seconds is not None for o in some)
            at = x(math.sqrt(left * right)) + 3 * (i - (len(runs) - 1) / 2)
            below, above = binomial_interval(k, len(some))
            points.append(f"{at:.1f},{y(k / len(some)):.1f}")
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(below):.1f}" y2="{y(above):.1f}" stroke="{colour}"/>'
            )
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        name = f"{mine[0].detector}, {mine[0].asked:g} asked"
        parts.append(
            f'<text x="{MARGIN + WIDTH - 8}" y="{y(0) - 10 - 15 * i}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def report(runs: Sequence[Sequence[Outcome]]) -> list[str]:
    """`runs`: outcomes of one detector at one asked rate each, of all tasks."""
    tasks = [o.task for o in runs[0]]
    sizes = sorted(t.num_machines for t in tasks)
    days = sum(t.num_machines * t.num_ticks for t in tasks) / SECONDS_PER_DAY
    num_faults = sum(t.fault is not None for t in tasks)
    what = (
        f"{num_faults} faults in as many tasks, {len(tasks) - num_faults} healthy tasks; {sizes[0]} to {sizes[-1]} "
        f"machines (median {sizes[len(sizes) // 2]}), {days:,.0f} machine-days. A missed fault is later than every "
        f"found one. "
        "What is simulated, and from which source: `detector/simulation/fleet.py`; what counts as right: "
        "`benchmarks/panels/fleet/`."
    )
    lines = [what, ""]
    for name in dict.fromkeys(mine[0].detector for mine in runs):
        of_name = [mine for mine in runs if mine[0].detector == name]
        lines += [f"## {name}", ""]
        for mine in of_name:
            cpu = sum(o.cpu_seconds for o in mine) / sum(o.task.num_machines * o.task.num_ticks for o in mine)
            lines += [
                f"### {mine[0].asked:g} false alarms per 1,000 machine-days asked",
                "",
                f"{1e6 * cpu:.1f} us of CPU a machine and second.",
                "",
                *by_effect(mine),
                *by_kind(mine),
            ]
        lines += ["### Calibration: false alarms per 1,000 machine-days, in healthy time", "", *calibration(of_name)]
        lines += ["### Precision", "", PRECISION_SAID, "", *precision_table(of_name)]
    return lines
