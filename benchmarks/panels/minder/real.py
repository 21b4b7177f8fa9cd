"""Minder and the baselines on real recordings, by the protocol that comes with them."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import PUBLIC_DATA, table
from benchmarks.panels.recordings import scorer
from rolecall.detector.panels.baselines import BASELINES as METHODS
from rolecall.detector.panels.minder import detector as minder
from rolecall.detector.panels.minder import fit as minder_fit
from rolecall.detector.panels.minder.detector import Minder
from rolecall.detector.panels.panel import PanelDetector, findings
from rolecall.detector.sources import recording


def fitted_on_unlabelled(asked: float, num_steps: int) -> Minder:
    panels = list(recording.read(PUBLIC_DATA / "asd-unlabelled" / "recording.parquet").panels)
    model = minder_fit.fit(panels, [[] for _ in panels], seed=0, num_steps=num_steps).model
    return Minder(false_alarms_per_1000_machine_days=asked, model=model)


def real(args: argparse.Namespace) -> list[str]:
    if not (PUBLIC_DATA / "asd").is_dir():
        return ["## Real recordings", "", f"Left out: there is no folder {PUBLIC_DATA.name}.", ""]
    fitted = fitted_on_unlabelled(args.asked, args.steps)
    rows = []
    for factor in REAL_FACTORS:
        asked = factor * args.asked
        made: dict[str, PanelDetector] = {"minder": minder.make(asked)}
        made |= {name: method(asked) for name, method in METHODS.items()}
        made[FITTED] = replace(fitted, false_alarms_per_1000_machine_days=asked)
        for name, method in made.items():
            for kind in ("asd", "exathlon") if name != FITTED else ("asd",):
                began = time.process_time()
                s = scorer(PUBLIC_DATA).summary([_case(method, p) for p in sorted((PUBLIC_DATA / kind).iterdir())])
                spent = time.process_time() - began
                shown = [s["events"], s["found"], s["false_alarms"], s["precision"], s["recall"], s["f1"]]
                shown += [s["delay_median_seconds"], s["healthy_cases_flagged"], f"{spent:.0f}"]
                rows.append([name, f"{asked:g}", kind, *("-" if x is None else str(x) for x in shown)])
                print(f"real: {rows[-1]}", file=sys.stderr, flush=True)
    head = ("detector", "asked", "set", "events", "found", "false", "precision", "recall", "F1", "median delay, s")
    return [
        "## Real recordings",
        "",
        (
            "Default settings; asked: false alarms per 1,000 machine-days. Event F1 of these methods tuned on these "
            "very days: Mahalanobis 0.34, robust z 0.25, isolation forest 0.23, neighbours 0.21, PCA and pairwise "
            "distances 0.19."
        ),
        "",
        *table((*head, "healthy flagged", "CPU s"), rows),
    ]


FITTED = "minder fitted on asd-unlabelled"
REAL_FACTORS = (1, 10, 100)
"""The asked rate, and the curve beside it."""


def _case(method: PanelDetector, folder: Path) -> dict[str, Any]:
    label = json.loads((folder / "label.json").read_text())
    alarms = [
        (f.detected_at, s.node)
        for p in recording.read(folder / "recording.parquet").panels
        for f in findings(method, p)
        for s in f.suspects
    ]
    case: dict[str, Any] = scorer(PUBLIC_DATA).score_case(label, sorted(alarms))
    return case
