"""Does "slower than its peers" separate on this machine? From recordings of real runs (`recording.py`).

    python -m benchmarks.recovery.soak                            ten seeds, each with one slowdown of a rollout
    python -m benchmarks.recovery.soak --healthy 3 --minutes 20   three failure-free runs
    python -m benchmarks.detection.slowness                       this report, of all recorded runs of a commit
    python -m benchmarks.detection.slowness runs/A runs/B         of these runs

Printed: how far healthy peers lie apart, by measure and window; how well each measure separates slowed from healthy
windows, by kind of slowness; how the slow test's residual is distributed in healthy time; and what other thresholds
would have found, and when. The report and a picture go to benchmarks/results/.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks import common
from benchmarks.detection.slowness import measures, recording
from benchmarks.detection.slowness.measures import DISTURBED, HEALTHY, MEASURES, ROLES, Slowdown, Stride, Window
from benchmarks.pictures import distributions
from rolecall.core.config.job import DetectorConfig, parse_job
from rolecall.core.rundir import RunDir
from rolecall.detector.live.stages.progress import slow

WINDOW_SECONDS = (1.0, 5.0, 10.0, 30.0)
PICTURE_SECONDS = 5.0
SIGMAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Assumed deviations whose thresholds are compared."""
PEERS_APART_MAX = 2.0
"""The design's question: healthy peers that differ by more than this over 10 s call for CPU-normalised rates."""
NAMES = {
    "busy": "busy s per token",
    "cpu": "CPU s per token",
    "delay": "run delay share",
    "effective": "(busy - starved) s per unit",
}


@dataclass
class Gathered:
    """What was taken from all runs."""

    runs: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    config: DetectorConfig = field(default_factory=DetectorConfig)
    windows: dict[float, list[Window]] = field(default_factory=lambda: defaultdict(list))
    strides: list[Stride] = field(default_factory=list)
    faults: list[tuple[str, Slowdown]] = field(default_factory=list)
    recorder_shares: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)  # CPUs in use, by run


def gather(paths: Iterable[Path]) -> Gathered:
    found = Gathered()
    for path in paths:
        heard = recording.read(path / recording.FILE_NAME)
        job = parse_job(RunDir(path).read()["config"])
        faults = measures.slowdowns(path, heard)
        found.runs.append(path.name)
        found.seeds.append(job.seed)
        found.config = job.detector
        found.faults += [(path.name, f) for f in faults]
        for seconds in WINDOW_SECONDS:
            found.windows[seconds] += measures.windows(heard, faults, seconds)
        found.strides += measures.strides(heard, faults, job.detector)
        if heard.cost:
            found.recorder_shares.append(heard.cost_share)
        found.busiest.append(_cpus_in_use(heard))
    return found


def _cpus_in_use(heard: recording.Recording) -> float:
    """Mean over the run: the node agents share one machine, so that any of them tells of all of it."""
    if len(heard.hosts) < 2:
        return math.nan
    node = heard.hosts[0].node
    row = [h for h in heard.hosts if h.node == node]
    return (row[-1].cpu_busy_seconds - row[0].cpu_busy_seconds) / max(1e-9, row[-1].at - row[0].at)


def peers_apart(found: Gathered) -> Iterator[str]:
    yield "## Healthy peers: largest over smallest, in the same window"
    yield ""
    yield "| role | measure | window, s | n | median | P95 | P99 | largest |"
    yield "|---|---|---|---|---|---|---|---|"
    for role in ROLES:
        for measure in MEASURES:
            for seconds in WINDOW_SECONDS:
                ratios = measures.peer_ratios(found.windows[seconds], role, measure)
                if measure == "delay" or not ratios:
                    continue
                numbers = [
                    statistics.median(ratios),
                    common.quantile(ratios, 0.95),
                    common.quantile(ratios, 0.99),
                    max(ratios),
                ]
                told = " | ".join(f"{x:.2f}" for x in numbers)
                yield f"| {role} | {NAMES[measure]} | {seconds:.0f} | {len(ratios)} | {told} |"
    yield ""
    ratios = measures.peer_ratios(found.windows[10.0], "rollout", "busy")
    if ratios:
        share = sum(r > PEERS_APART_MAX for r in ratios) / len(ratios)
        yield (
            f"Healthy rollouts differ by more than {PEERS_APART_MAX:.0f}x in busy seconds per token in "
            f"{100 * share:.1f} % "
            f"of windows of 10 s."
        )
        yield ""


def separation(found: Gathered) -> Iterator[str]:
    yield "## Slowed windows against healthy ones, each relative to its peers"
    yield ""
    yield "AUC: how often a slowed window looks slower than a healthy one. d': distance in standard deviations."
    yield ""
    yield "| role, kind | measure | window, s | n slowed | n healthy | times slower (median) | AUC | d' |"
    yield "|---|---|---|---|---|---|---|---|"
    for role in ROLES:
        for seconds in WINDOW_SECONDS:
            for measure in MEASURES:
                told = measures.against_peers(found.windows[seconds], role, measure)
                healthy = told.pop(HEALTHY, [])
                for how, slowed in sorted(told.items()):
                    if len(healthy) < 2 or len(slowed) < 2:
                        continue
                    middle = statistics.median(slowed)
                    shown = f"{math.exp(middle):.2f}" if measure in measures.LOGARITHMIC else f"{middle:+.2f} (share)"
                    yield (
                        f"| {role}, {how} | {NAMES[measure]} | {seconds:.0f} | {len(slowed)} | {len(healthy)} | "
                        f"{shown} | "
                        f"{measures.auc(healthy, slowed):.3f} | {measures.d_prime(healthy, slowed):.2f} |"
                    )
        by_label = _by_label(s for s in found.strides if s.role == role)
        healthy = by_label.pop(HEALTHY, [])
        for how, slowed in sorted(by_label.items()):
            if len(healthy) > 1 and len(slowed) > 1:
                yield (
                    f"| {role}, {how} | **slow test's x** | stride | {len(slowed)} | {len(healthy)} | "
                    f"{math.exp(statistics.median(slowed)):.2f} | {measures.auc(healthy, slowed):.3f} | "
                    f"{measures.d_prime(healthy, slowed):.2f} |"
                )
    yield ""


def residuals(found: Gathered) -> Iterator[str]:
    yield "## The slow test's x in healthy time"
    yield ""
    yield (
        f"sigma is the standard deviation widened for the autocorrelation; the test assumes at least {slow.SIGMA_MIN}. "
        "S is Page's sum, begun anew with each healthy stretch; h its threshold at the assumed sigma."
    )
    yield ""
    yield "| role | strides | hours | mean | sd | lag-1 | sigma | P95 | P99 | P99.9 | largest x | largest S | h |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    drift, per_alarm = _drift(found.config), _strides_between_alarms(found.config)
    for role in ROLES:
        row = [s for s in found.strides if s.role == role]
        healthy = [s for s in row if s.label == HEALTHY]
        if len(healthy) < 3:
            continue
        xs = [s.x for s in healthy]
        sd, rho = statistics.pstdev(xs), measures.autocorrelation(row)
        wide = sd * math.sqrt((1 + max(0.0, rho)) / (1 - min(0.9, max(0.0, rho))))
        tails = " | ".join(f"{common.quantile(xs, q):.2f}" for q in (0.95, 0.99, 0.999))
        h = slow.threshold(max(slow.SIGMA_MIN, wide), drift, per_alarm)
        parts = _healthy_parts(measures.rows_of(row))
        largest = max(measures.largest_sum(part, drift) for part in parts)
        yield (
            f"| {role} | {len(xs)} | {_hours(row, HEALTHY):.2f} | {statistics.fmean(xs):.3f} | {sd:.3f} | {rho:.2f} | "
            f"{wide:.3f} | {tails} | {max(xs):.2f} | {largest:.2f} | {h:.2f} |"
        )
    yield ""


def _hours(row: Sequence[Stride], label: str) -> float:
    """Time under that label, of all processes together."""
    total = 0.0
    for one in measures.rows_of(row):
        total += sum(min(b.wall_at - a.wall_at, 5.0) for a, b in pairwise(one) if b.label == label)
    return total / 3600


def thresholds(found: Gathered) -> Iterator[str]:
    yield "## What other thresholds would have found"
    yield ""
    yield (
        "| role | sigma assumed | h | alarms in healthy time (hours) | of slowdowns found | seconds to the alarm | "
        "strides to it |"
    )
    yield "|---|---|---|---|---|---|---|"
    drift, per_alarm = _drift(found.config), _strides_between_alarms(found.config)
    for role in ROLES:
        rows = measures.rows_of(s for s in found.strides if s.role == role)
        faults = [(run, f) for run, f in found.faults if f.is_slow and f.process[0].startswith(f"{role}/")]
        flat = [s for row in rows for s in row]
        if not flat:
            continue
        for sigma in SIGMAS:
            h = slow.threshold(sigma, drift, per_alarm)
            false = sum(len(measures.alarms(part, drift, h)) for part in _healthy_parts(rows))
            after = [_first_alarm(rows, run, f, drift, h) for run, f in faults]
            hit = [a for a in after if a is not None]
            yield (
                f"| {role} | {sigma:.1f} | {h:.2f} | {false} ({_hours(flat, HEALTHY):.2f}) | {len(hit)} of "
                f"{len(faults)} | "
                f"{common.summary([s for s, _ in hit], 1)} | {common.summary([float(n) for _, n in hit], 0)} |"
            )
    yield ""


def _healthy_parts(rows: Iterable[Sequence[Stride]]) -> Iterator[list[Stride]]:
    """Unbroken healthy stretches."""
    for row in rows:
        part: list[Stride] = []
        for s in row:
            if s.label == HEALTHY:
                part.append(s)
            elif part:
                yield part
                part = []
        if part:
            yield part


def _first_alarm(
    rows: Iterable[Sequence[Stride]], run: str, fault: Slowdown, drift: float, h: float
) -> tuple[float, int] | None:
    """(seconds, strides) from the fault to the first alarm of its process; None when there was none by its end."""
    for row in rows:
        if row[0].run == run and row[0].process == fault.process:
            during = [s for s in row if fault.since <= s.wall_at <= fault.until]
            told = measures.alarms(during, drift, h)
            if told:
                return told[0] - fault.since, sum(s.wall_at <= told[0] for s in during)
    return None


def each_slowdown(found: Gathered) -> Iterator[str]:
    yield "## Each slowdown, stride by stride"
    yield ""
    yield "| run | target, kind | lasted, s | strides | times slower by stride | S at the end |"
    yield "|---|---|---|---|---|---|"
    for run, fault in found.faults:
        if not fault.is_slow:
            continue
        during = [
            s
            for s in found.strides
            if s.run == run and s.process == fault.process and fault.since <= s.wall_at <= fault.until
        ]
        ratios = " ".join(f"{math.exp(s.x):.1f}" for s in during[:20])
        end = f"{during[-1].cusum:.2f}" if during else "-"
        yield (
            f"| {run} | {fault.process[0]}#{fault.process[1]}, {fault.how} | {fault.until - fault.since:.1f} | "
            f"{len(during)} | {ratios} | {end} |"
        )
    yield ""


def _drift(config: DetectorConfig) -> float:
    return math.log(config.slow_ratio) / 2


def _strides_between_alarms(config: DetectorConfig) -> float:
    return slow.SECONDS_PER_DAY / config.slow_stride_seconds / config.slow_false_alarms_per_day


def report(found: Gathered, measured: str) -> list[str]:
    lines = common.header(
        "Slower than its peers, on shared CPUs",
        f"rolecall demo; slow_ratio {found.config.slow_ratio}, stride {found.config.slow_stride_seconds:g} s, "
        f"{found.config.slow_false_alarms_per_day:g} false alarms per day wanted",
        ", ".join(str(s) for s in sorted(set(found.seeds))),
        measured,
    )
    disturbed = sum(w.label == DISTURBED for w in found.windows[1.0])
    lines += [
        f"- {len(found.runs)} runs: {', '.join(found.runs)}",
        f"- {len(found.windows[1.0])} windows of 1 s, {disturbed} of them beside a fault and left out",
        f"- CPUs in use, mean of each run: {common.summary(found.busiest)}",
    ]
    if found.recorder_shares:
        lines.append(f"- the recorder used {common.summary([100 * s for s in found.recorder_shares], 1)} % of a CPU")
    lines.append("")
    for part in (peers_apart, separation, residuals, thresholds, each_slowdown):
        lines += part(found)
    return lines


def recorded_runs(wanted: str) -> list[Path]:
    """Runs of the soak at that commit that were recorded."""
    lines = common.read_lines(common.RESULTS / "soak.jsonl")
    found = [common.RUNS / x["run_id"] for x in lines if x["commit"] == wanted and x.get("run_id")]
    return [p for p in found if (p / recording.FILE_NAME).exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="recorded run directories")
    parser.add_argument("--commit", default="", help="the commit at which the runs were made, if not this one")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    measured = args.commit or common.commit()
    paths = args.runs or recorded_runs(measured)
    if not paths:
        print(f"no recorded run of {measured}: name run directories, or run the soak first", file=sys.stderr)
        return 2
    found = gather(paths)
    lines = report(found, measured)
    print("\n".join(lines))
    if not args.no_write:
        told = {
            NAMES[m]: measures.against_peers(found.windows[PICTURE_SECONDS], "rollout", m)
            for m in MEASURES
            if m in measures.LOGARITHMIC
        }
        told["slow test, one stride (x)"] = _by_label(s for s in found.strides if s.role == "rollout")
        path = common.write("slowness", lines)
        path.with_suffix(".svg").write_text(distributions(told))
        print(f"written to {path.relative_to(common.ROOT)} and .svg")
    return 0


def _by_label(row: Iterable[Stride]) -> dict[str, list[float]]:
    told: dict[str, list[float]] = defaultdict(list)
    for s in row:
        if s.label != DISTURBED:
            told[s.label].append(s.x)
    return told


if __name__ == "__main__":
    sys.exit(main())
