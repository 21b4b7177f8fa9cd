"""What is usual among healthy machines anywhere? Fits `detector/panels/sequential/priors.json`.

    python -m benchmarks.panels.fit_priors [--data ../shared/data] [--without exathlon] [--out FILE]

Healthy panels of four kinds: `asd` (the labelled halves of its healthy recordings), `exathlon`, the own recordings
(`benchmarks/data/own`), and the simulated regimes (`detector/simulation/regimes.py`). Each kind weighs the same, and
each panel within its kind.

- Of each kind of metric (`panels/metric_kinds.py`), median and width of the log-normal spread that make the machines'
  places most likely, pulled towards those of all metrics.
The tails of scores (`SCORES`) are chosen by hand: a location fitted to the first block maxima, by the median or the
calmest kind of data, did worse on the kind left out (benchmarks/diaries/evidence_without_history.md). Novelty's are of
25 unlabelled days of `asd` (docs/decisions/0019).
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import common
from rolecall.detector.panels.metric_kinds import ANY_KIND, has_equal_levels, kind
from rolecall.detector.panels.panel import Panel
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.priors import SHIPPED, SPREADS, SpreadPrior
from rolecall.detector.simulation import regimes
from rolecall.detector.sources import recording

OWN = common.ROOT / "benchmarks" / "data" / "own"
SIMULATED = (3, 4, 12, 79)
NUM_METRICS = (2, 21)
SEED = 900
"""Of the simulated panels; no report uses it."""
MEDIANS, WIDTHS, UNIFORM = np.geomspace(0.1, 30, 40), np.linspace(0.5, 2.5, 17), 0.02
NEAR_MEDIAN, NEAR_WIDTH = 0.7, 0.3
"""Kinds differ from all metrics by about so much, standard deviations of the logs."""
PANELS_WEIGHT = 30.0
"""What a kind of data counts for, in panels: metrics of one panel are not independent."""
MARGIN = 3.0
"""Shipped medians are so many times the fitted ones: with 1, 12 of 144 healthy simulated recordings are flagged, with
3, 8."""
SCORES = {
    "single": {"location": 5.0, "beta": 2.0, "weight": 256, "young_beta": 5.0},
    "several": {"location": 10.0, "beta": 3.3, "weight": 256, "young_beta": 10.0},
    "distance": {"location": 4.0, "beta": 1.0, "weight": 64, "young_beta": 0.6},
    "novelty": {"location": 0.12, "beta": 0.08, "weight": 64},
}
Array = NDArray[np.float64]


def healthy_panels(data: Path) -> dict[str, list[Panel]]:
    """By kind of data; a kind that is not there is left out."""
    found: dict[str, list[Panel]] = {}
    for name in ("asd", "exathlon"):
        for path in sorted((data / name).glob("*/label.json")):
            label = json.loads(path.read_text())
            if label["healthy"]:
                for panel in recording.read(path.parent / "recording.parquet").panels:
                    here = panel.at >= label["score_from"]
                    labelled = Panel(shape=panel.shape, at=panel.at[here], values=panel.values[:, here])
                    found.setdefault(name, []).append(labelled)
    for path in sorted(OWN.glob("*-none-*.parquet")):
        found.setdefault("own", []).extend(recording.read(path).panels)
    for regime in regimes.REGIMES:
        if regime.num_machines in SIMULATED and regime.num_metrics in NUM_METRICS:
            (case,) = regimes.cases(regime, seed=SEED, num_faulty=0, num_healthy=1)
            found.setdefault("regimes", []).append(regimes.panel(case))
    return found


def fit(panels: Mapping[str, Sequence[Panel]]) -> dict[str, Any]:
    """The body of priors.json, without its provenance."""
    grids: dict[str, list[tuple[float, Array]]] = {}
    for of_kind in panels.values():
        for panel in of_kind:
            tracker = Sequential(healthy=True).track(panel.shape)
            for at, values in panel.ticks():
                tracker.tick(at, values)
            learned = tracker.learned()
            if learned is None:
                continue
            used = [name for name in learned.metrics if has_equal_levels(name)]
            for name in used:
                weight = PANELS_WEIGHT / len(of_kind) / len(used)
                grids.setdefault(kind(name), []).append((weight, np.array(learned.metrics[name].spread)))
    everything = [g for some in grids.values() for g in some]
    widest = _spread(everything, None)
    spreads = {ANY_KIND: widest} | {k: _spread(some, widest) for k, some in sorted(grids.items()) if k != ANY_KIND}
    as_json = {
        k: {"median": round(MARGIN * s.median, 2), "width": s.width, "uniform": s.uniform} for k, s in spreads.items()
    }
    return {"spreads": as_json, "scores": SCORES}


def _spread(weighted: Sequence[tuple[float, Array]], near: SpreadPrior | None) -> SpreadPrior:
    best, found = -math.inf, SpreadPrior(median=1.0, width=1.0, uniform=UNIFORM)
    for median in MEDIANS:
        for width in WIDTHS:
            tried = SpreadPrior(median=round(float(median), 2), width=round(float(width), 2), uniform=UNIFORM)
            log_prior = tried.log_prior()
            total = sum(w * float(np.logaddexp.reduce(log_prior + grid)) for w, grid in weighted)
            if near is not None:
                total -= 0.5 * (math.log(tried.median / near.median) / NEAR_MEDIAN) ** 2
                total -= 0.5 * (math.log(tried.width / near.width) / NEAR_WIDTH) ** 2
            if total > best:
                best, found = total, tried
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=common.PUBLIC_DATA)
    parser.add_argument("--without", default="", help="kind of data that is left out")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    panels = {k: p for k, p in healthy_panels(args.data).items() if k != args.without}
    if missing := {"asd", "exathlon", "own", "regimes"} - {args.without} - set(panels):
        print(f"not there: {', '.join(sorted(missing))}", file=sys.stderr)
        return 2
    provenance = {
        "made_by": "benchmarks/panels/fit_priors.py",
        "panels": {k: len(p) for k, p in panels.items()},
        "sources": "asd: InterFusion (KDD 2021), MIT; exathlon: Exathlon (VLDB 2021), Apache-2.0; own: "
        "benchmarks/data/own; regimes: detector/simulation/regimes.py",
        "grid": [round(float(SPREADS[0]), 3), round(float(SPREADS[-1]), 3), len(SPREADS)],
    }
    args.out.write_text(json.dumps({"provenance": provenance, **fit(panels)}, indent=1) + "\n")
    print(args.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
