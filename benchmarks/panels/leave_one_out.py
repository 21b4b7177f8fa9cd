"""Do the priors carry over to data of a kind that they were not fitted to?

    python -m benchmarks.panels.leave_one_out [--data ../shared/data]

For each kind of data that `fit_priors.py` uses, and `straggler`, which it does not: priors are fitted without it, and
the detector with them is judged on it; beside it, the shipped priors on the same. `asd` and `exathlon` by the protocol
of `../shared/data/score.py`, whole and cut (`recordings.cuts`); the own recordings as `own_job/recordings.py` does;
regimes of 4 and 12 machines, 2 and 21 metrics (`regimes.py`, effects of 6 spreads and more). What is chosen by hand,
the forms of tests and tails, was tuned on public data, and the table does not judge it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import common
from benchmarks.common import table
from benchmarks.panels import fit_priors, recordings
from benchmarks.panels.fleet.report import delay_quantile
from benchmarks.panels.own_job import recordings as own_recordings
from benchmarks.panels.own_job.job import Case
from benchmarks.panels.regimes import judge_with
from rolecall.detector.live.fusion import merged
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS as ASKED
from rolecall.detector.panels.panel import Panel, findings
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.priors import Priors, shipped
from rolecall.detector.panels.step_time import StepTime
from rolecall.detector.simulation import regimes
from rolecall.detector.sources import recording

SEED = 2
NUM_FAULTY, NUM_HEALTHY = 6, 5
HEAD = ("judged on", "priors", "faults", "named", "wrong", "precision", "recall", "F1", "delay P50", "healthy flagged")


def alarms(priors: Priors, panels: Sequence[Panel]) -> list[tuple[float, str]]:
    """(seconds, node), as `rolecall diagnose` names them."""
    found = [f for p in panels for each in (Sequential(priors=priors), StepTime()) for f in findings(each, p)]
    return sorted((d.detected_at, s.node) for d in merged(found) for s in d.suspects)


def score_public(priors: Priors, case: recordings.Case, data: Path) -> dict[str, Any]:
    np.seterr(all="ignore")
    row: dict[str, Any] = recordings.scorer(data).score_case(case[1], alarms(priors, case[2]))
    return row


def score_own(priors: Priors, case: Case, panel: Panel) -> own_recordings.Verdict:
    named = [own_recordings.Alarm(node=n, seconds=at - float(panel.at[0])) for at, n in alarms(priors, [panel])]
    return own_recordings.verdict(case, named)


def _row(label: str, whose: str, faults: int, named: int, wrong: int, delay: str, flagged: str) -> list[str]:
    precision, recall = named / (named + wrong) if named + wrong else 0.0, named / faults if faults else 0.0
    f1 = 2 * precision * recall / (precision + recall) if named else 0.0
    numbers = [f"{x:.2f}" for x in (precision, recall, f1)] if faults else ["-"] * 3
    return [label, whose, str(faults), str(named), str(wrong), *numbers, delay, flagged]


def of_public(pool: ProcessPoolExecutor, priors: Priors, whose: str, label: str, cases: Any, data: Path) -> list[str]:
    rows = list(pool.map(score_public, [priors] * len(cases), cases, [data] * len(cases)))
    s = recordings.scorer(data).summary(rows)
    delay = s["delay_median_seconds"]
    named, wrong = s["found"], s["false_alarms"]
    shown = "-" if delay is None else f"{delay:.0f} s"
    return _row(label, whose, s["events"], named, wrong, shown, s["healthy_cases_flagged"])


def of_own(pool: ProcessPoolExecutor, priors: Priors, whose: str) -> list[str]:
    cases = own_recordings.read_cases(fit_priors.OWN / own_recordings.CASES)
    # Read here: polars does not work in a forked process.
    panels = [recording.read(fit_priors.OWN / f"{case.name}.parquet").panels[0] for case in cases]
    verdicts = list(pool.map(score_own, [priors] * len(cases), cases, panels))
    faulty, healthy = ([v for v in verdicts if v.case.fault.is_healthy is is_healthy] for is_healthy in (False, True))
    named = [v for v in faulty if v.delay_seconds is not None]
    middle = delay_quantile([v.delay_seconds for v in faulty], 0.5)
    wrong = sum(len(v.wrong) for v in verdicts)
    flagged = f"{sum(bool(v.wrong) for v in healthy)}/{len(healthy)}"
    return _row("own", whose, len(faulty), len(named), wrong, f"{middle:.0f} s", flagged)


def of_regimes(pool: ProcessPoolExecutor, priors: Priors, whose: str) -> list[str]:
    cases: list[regimes.RegimeCase] = []
    for regime in regimes.REGIMES:
        if regime.num_machines in (4, 12) and regime.num_metrics in (2, 21):
            cases += regimes.cases(regime, seed=SEED, num_faulty=NUM_FAULTY, num_healthy=NUM_HEALTHY)
    results = list(pool.map(judge_with, cases, [Sequential(priors=priors)] * len(cases)))
    faulty, healthy = [r for r in results if r.case.fault], [r for r in results if not r.case.fault]
    middle = delay_quantile([r.delay for r in faulty], 0.5)
    named, wrong = sum(r.delay is not None for r in faulty), sum(r.num_wrong for r in results)
    flagged = f"{sum(r.num_wrong > 0 for r in healthy)}/{len(healthy)}"
    return _row("regimes", whose, len(faulty), named, wrong, f"{middle:.0f} ticks", flagged)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=common.PUBLIC_DATA)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", default="asd,exathlon,straggler,own,regimes", help="left out in turn")
    parser.add_argument("--dry", action="store_true", help="print the report, do not write it")
    args = parser.parse_args()
    if not (args.data / "score.py").exists():
        print(f"skipped: no recordings in {args.data}", file=sys.stderr)
        return 2
    panels = fit_priors.healthy_panels(args.data)
    rows: list[list[str]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for left_out in args.kinds.split(","):
            fitted = Priors.from_dict(fit_priors.fit({k: p for k, p in panels.items() if k != left_out}))
            judges: list[Callable[[Priors, str], list[str]]] = []
            if left_out == "own":
                judges.append(lambda priors, whose: of_own(pool, priors, whose))
            elif left_out == "regimes":
                judges.append(lambda priors, whose: of_regimes(pool, priors, whose))
            else:
                whole = recordings.cases(args.data, left_out)
                parts = {left_out: whole, f"{left_out}, cut": recordings.cuts(whole, SEED)}
                for label, cases in parts.items():
                    if cases:
                        judges.append(
                            lambda priors, whose, label=label, cases=cases: of_public(  # type: ignore[misc]
                                pool, priors, whose, label, cases, args.data
                            )
                        )
            for judge in judges:
                for whose, priors in ((f"without {left_out}", fitted), ("shipped", shipped())):
                    rows.append(judge(priors, whose))
                    print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    config = f"asked {ASKED:g}; regimes of 4 and 12 machines, 2 and 21 metrics, {NUM_FAULTY} + {NUM_HEALTHY} each"
    lines = [*common.header("Priors, a kind of data left out", config, str(SEED)), *table(HEAD, rows)]
    print("\n".join(lines))
    if not args.dry:
        print(f"written: {common.write('leave_one_out', lines)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
