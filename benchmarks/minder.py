"""Minder and the baselines: ablations on a simulated fleet, scores on real recordings, time of one call.

    python benchmarks/minder.py                      all parts (about an hour on one core)
    python benchmarks/minder.py --parts call,real    some of: denoisers, own-kind, ablations, real, call
    python benchmarks/minder.py --fit-built-in       trains the denoisers and the priority that minder ships with

The built-in model is fitted on simulated tasks of seed `FIT_SEED`; all else runs on tasks of other seeds. Minder's own
kind of case is what its paper describes; then one thing at a time is as in the fleet. What the ablations vary: no
continuity (the same thresholds, named at once), RAW, CON, INT (Minder, section 6.4), fewer and more metrics. Right and
wrong alarms are counted as in `benchmarks/fleet.py`. Real recordings: `asd` and `exathlon` of `../shared/data`, by the
event protocol of its `score.py`, with default settings; the part is left out where the folder is absent.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: the pool already uses every core

import common
import numpy as np
from fleet import score, watch
from fleet_report import table
from minder_own_kind import own_kind, share_told

from rolecall.detector.panels.baselines import BASELINES as METHODS
from rolecall.detector.panels.minder import detector as minder
from rolecall.detector.panels.minder import fit as minder_fit
from rolecall.detector.panels.minder.detector import Minder, Variant, Weights
from rolecall.detector.panels.minder.fit import LabelledFault
from rolecall.detector.panels.panel import (
    FALSE_ALARMS_PER_1000_MACHINE_DAYS,
    Floats,
    Machine,
    Panel,
    PanelDetector,
    PanelShape,
    findings,
)
from rolecall.detector.panels.registry import BASELINES, detector
from rolecall.detector.simulation.fleet import METRICS, Onset, SimulatedFault, SimulatedTask, fleet, panel
from rolecall.detector.sources import recording

DATA = common.ROOT.parent / "shared" / "data"
FIT_SEED, FIT_TASKS, FIT_MACHINES_MAX = 1001, 60, 32
PARTS = ("denoisers", "own-kind", "ablations", "real", "call")
NUM_STARTS_SMOOTH = 4
NUM_FEWER_METRICS = 3
CALL_MACHINES, CALL_TICKS, CALL_METRICS = 1500, 900, 7
PAPER_CALL_SECONDS = 3.6
MSE_BAR = 1e-4


def fit_panels(num: int) -> tuple[list[Panel], list[list[LabelledFault]]]:
    """Simulated tasks to learn from, with their labels."""
    panels, faults = [], []
    for task in fleet(seed=FIT_SEED, num_tasks=num, num_healthy=0, num_machines_max=FIT_MACHINES_MAX):
        assert task.fault
        panels.append(panel(task))
        node = task.shape.machines[task.fault.machine].node
        faults.append([LabelledFault(node=node, onset=task.fault.onset, end=task.fault.end)])
        print(f"fit: task {len(panels)} of {num}", file=sys.stderr, flush=True)
    return panels, faults


def fit_built_in(num_tasks: int, num_steps: int) -> list[str]:
    panels, faults = fit_panels(num_tasks)
    any_metric = minder_fit.train(smooth(1, 8192), seed=0, num_steps=2 * num_steps, num_starts=NUM_STARTS_SMOOTH)
    print(f"any metric: mse {minder_fit.mean_squared_error(any_metric, smooth(2, 2000))}", file=sys.stderr, flush=True)
    fitted = minder_fit.fit(panels, faults, any_metric=any_metric, seed=0, num_steps=num_steps)
    about = f"simulated fleet, seed {FIT_SEED}: {fitted.model.about}"
    minder_fit.write(minder.BUILT_IN, replace(fitted.model, about=about))
    lines = [f"{m}: mse {fitted.mse[m]:.1e}, variance {fitted.spread[m]:.1e}" for m in fitted.mse]
    return [*lines, f"priority: {' > '.join(fitted.model.priority)}"]


def smooth(seed: int, num: int) -> Floats:
    """(8, 1, 1, num): levels and waves slower than the window with 0.3 % noise, the kind of data behind the paper's
    bar."""
    rng = np.random.default_rng(seed)
    wave = np.sin(rng.uniform(0.02, 0.2, num) * np.arange(8)[:, None] + rng.uniform(0, 2 * np.pi, num))
    values = 0.5 + rng.uniform(0, 0.4, num) * wave + rng.uniform(-0.1, 0.1, num)
    values += 0.003 * rng.standard_normal(values.shape)
    return values.astype(np.float32)[:, None, None]


def denoisers(args: argparse.Namespace) -> list[str]:
    model = minder.read(minder.BUILT_IN)
    rows = [["smooth synthetic", *_errors(model.weights.taken(model.rows([minder.ANY_METRIC])), smooth(2, 2000))]]
    tasks = fleet(seed=args.seed, num_tasks=4, num_healthy=0, num_machines_max=FIT_MACHINES_MAX)
    rng = np.random.default_rng(0)
    panels = [panel(t) for t in tasks]
    cut = np.concatenate([minder_fit.windows_of(p, [], rng) for p in panels], axis=2)
    for m, name in enumerate(panels[0].shape.metrics):
        windows = cut[:, m][:, np.isfinite(cut[:, m]).all(axis=0)][:, None, None]
        rows.append([name, *_errors(model.weights.taken(model.rows([name])), windows)])
    if (DATA / "asd-unlabelled").is_dir():
        real = recording.read(DATA / "asd-unlabelled" / "recording.parquet").panels[0]
        windows = minder_fit.windows_of(real, [], rng)
        kept = np.isfinite(windows).all(axis=(0, 1))
        fitted = minder_fit.train(windows[:, :, None, kept][..., : kept.sum() // 2], seed=0, num_steps=args.steps)
        held = windows[:, :, None, kept][..., kept.sum() // 2 :]
        errors = minder_fit.mean_squared_error(fitted, held)
        spread = held.var(axis=(0, 2, 3))
        told = f"{np.median(errors):.1e} (median of {len(errors)} metrics)"
        rows.append(
            ["asd-unlabelled, fitted on half", told, f"{np.median(spread):.1e}", f"{(errors < MSE_BAR).mean():.0%}"]
        )
    head = ("windows, scaled to 0..1", "mean squared error", "variance", f"below {MSE_BAR:g}")
    return ["## Denoisers", "", "On windows that they were not trained on.", "", *table(head, rows)]


def _errors(weights: Weights, windows: Floats) -> list[str]:
    error = float(minder_fit.mean_squared_error(weights, windows)[0])
    return [f"{error:.1e}", f"{windows.var():.1e}", "yes" if error < MSE_BAR else "no"]


# --- ablations ----------------------------------------------------------------------------------------------------


def integrated_weights(num_tasks: int, num_steps: int) -> Weights:
    """INT: one denoiser for all metrics together."""
    panels, faults = fit_panels(num_tasks)
    rng = np.random.default_rng(0)
    cut = [minder_fit.windows_of(p, f, rng) for p, f in zip(panels, faults, strict=True)]
    windows = np.concatenate(cut, axis=2)
    order = minder.read(minder.BUILT_IN).order(panels[0].shape.metrics, minder.NUM_METRICS)
    windows = windows[:, order][:, :, np.isfinite(windows).all(axis=(0, 1))]
    windows = windows[:, :, rng.permutation(windows.shape[2])[: minder_fit.NUM_WINDOWS_MAX]]
    return minder_fit.train(windows[:, None], seed=0, num_steps=num_steps)


def variants(asked: float, integrated: Weights) -> dict[str, Minder]:
    full = minder.make(asked)
    return {
        f"minder ({minder.NUM_METRICS} metrics)": full,
        "no continuity": replace(full, continuity_ticks=1),
        "RAW: no denoiser": replace(full, variant=Variant.RAW),
        "CON: windows of all metrics joined": replace(full, variant=Variant.CONCATENATED),
        "INT: one denoiser for all": replace(
            full, variant=Variant.INTEGRATED, model=replace(full.model, weights=integrated)
        ),
        f"fewer metrics ({NUM_FEWER_METRICS})": replace(full, num_metrics=NUM_FEWER_METRICS),
        "more metrics (all 21)": replace(full, num_metrics=None),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Alarms of one variant in one task. `own_kind`: a fault as the paper describes them, see `of_its_kind`."""

    effect_sigmas: float | None
    own_kind: bool
    found: bool
    delay_seconds: float | None
    num_false: int
    machine_days: float


def of_its_kind(fault: SimulatedFault | None, tried: Sequence[str]) -> bool:
    """Lasting (Minder: mostly more than 5 minutes), not intermittent, far out, and to be seen in a metric that it
    tries."""
    return (
        fault is not None
        and fault.how != Onset.INTERMITTENT
        and fault.end - fault.onset >= OWN_KIND_SECONDS_MIN
        and fault.effect_sigmas >= OWN_KIND_SIGMAS_MIN
        and any(METRICS[m].name in tried for m in fault.metrics)
    )


OWN_KIND_SECONDS_MIN, OWN_KIND_SIGMAS_MIN = 300.0, 4.0


def judge(task: SimulatedTask, asked: float, integrated: Weights) -> dict[str, Count]:
    made = variants(asked, integrated)
    counts = {}
    for (name, _), (alarms, _) in zip(made.items(), watch(task, list(made.values())), strict=True):
        o = score(task, alarms, detector=name, asked=asked)
        counts[name] = Count(
            effect_sigmas=task.fault.effect_sigmas if task.fault else None,
            own_kind=of_its_kind(task.fault, made[next(iter(made))].model.priority[: minder.NUM_METRICS]),
            found=o.delay_seconds is not None,
            delay_seconds=o.delay_seconds,
            num_false=o.false_healthy + o.false_faulty,
            machine_days=task.num_machines * task.num_ticks / 86_400,
        )
    return counts


def ablations(args: argparse.Namespace) -> list[str]:
    integrated = integrated_weights(args.fit_tasks, args.steps)
    tasks = fleet(seed=args.seed, num_tasks=args.tasks, num_healthy=args.healthy, num_machines_max=args.machines_max)
    counts: list[dict[str, Count]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for found in pool.map(partial(judge, asked=args.asked, integrated=integrated), tasks):
            counts.append(found)
            print(f"ablations: task {len(counts)} of {len(tasks)}", file=sys.stderr, flush=True)
    head = ("variant", "faults", "n", "precision [95 %]", "recall [95 %]", "false alarms", "delay P50 of the found")
    sizes = sorted(t.num_machines for t in tasks)
    return [
        "## Ablations, simulated fleet",
        "",
        (
            f"{args.tasks} faults, {args.healthy} healthy tasks, {sizes[0]} to {sizes[-1]} machines, seed {args.seed}; "
            f"{sum(c[next(iter(c))].machine_days for c in counts):.1f} machine-days; asked {args.asked:g} false "
            "alarms per 1,000 machine-days. The first row of each variant counts the false alarms of all tasks, the "
            "others those in "
            f"theirs. Of its kind: steps and ramps of {OWN_KIND_SIGMAS_MIN:g} sigma and more that last "
            f"{OWN_KIND_SECONDS_MIN:g} "
            f"s and show in one of the first {minder.NUM_METRICS} metrics. Simulated faults show in 1 to 3 of 21 "
            f"metrics; the paper's "
            "show in more. The paper: precision 0.904, recall 0.883; 0.757 precision without continuity; RAW has the "
            "worst recall."
        ),
        "",
        *table(head, compared(counts)),
    ]


def compared(counts: Sequence[dict[str, Count]]) -> list[list[str]]:
    """Rows of the ablations' table, from the counts of each task by variant."""
    rows = []
    for name in counts[0]:
        mine = [c[name] for c in counts]
        groups = {
            "all": [c for c in mine if c.effect_sigmas is not None],
            "4 sigma and more": [c for c in mine if c.effect_sigmas is not None and c.effect_sigmas >= 4],
            "of its kind": [c for c in mine if c.own_kind],
        }
        for which, faults in groups.items():
            right = sum(c.found for c in faults)
            false = sum(c.num_false for c in (mine if which == "all" else faults))
            delays = [c.delay_seconds for c in faults if c.delay_seconds is not None]
            middle = f"{np.median(delays):.0f} s" if delays else "-"
            shares = share_told(right, right + false), share_told(right, len(faults))
            rows.append([name, which, str(len(faults)), *shares, str(false), middle])
    return rows


@cache
def scoring() -> ModuleType:
    """The protocol that comes with the recordings."""
    spec = importlib.util.spec_from_file_location("score_of_recordings", DATA / "score.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fitted_on_unlabelled(asked: float, num_steps: int) -> Minder:
    panels = list(recording.read(DATA / "asd-unlabelled" / "recording.parquet").panels)
    model = minder_fit.fit(panels, [[] for _ in panels], seed=0, num_steps=num_steps).model
    return Minder(false_alarms_per_1000_machine_days=asked, model=model)


def real(args: argparse.Namespace) -> list[str]:
    if not (DATA / "asd").is_dir():
        return ["## Real recordings", "", f"Left out: there is no folder {DATA.name}.", ""]
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
                s = scoring().summary([_case(method, p) for p in sorted((DATA / kind).iterdir())])
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
    case: dict[str, Any] = scoring().score_case(label, sorted(alarms))
    return case


def call(args: argparse.Namespace) -> list[str]:
    """One call of the paper: 15 minutes of 1,500 machines, 7 metrics, from memory to verdict; every tick is judged."""
    rng = np.random.default_rng(args.seed)
    values = rng.standard_normal((CALL_METRICS, CALL_TICKS, CALL_MACHINES), dtype=np.float32)
    values[rng.random(values.shape, dtype=np.float32) < 0.02] = np.nan
    shape = PanelShape(
        role="trainer",
        metrics=tuple(f"m{m}" for m in range(CALL_METRICS)),
        machines=tuple(Machine(node=f"n{n:04d}") for n in range(CALL_MACHINES)),
        interval_seconds=1.0,
    )
    whole = Panel(shape=shape, at=np.arange(CALL_TICKS, dtype=np.float64), values=values)
    rows = []
    for name, method in (
        ("minder", replace(minder.make(args.asked), num_metrics=None)),
        *((n, detector(n, false_alarms_per_1000_machine_days=args.asked)) for n in BASELINES),
    ):
        began, cpu = time.perf_counter(), time.process_time()
        findings(method, whole)
        wall, spent = time.perf_counter() - began, time.process_time() - cpu
        rows.append([name, f"{spent:.1f}", f"{wall:.1f}", f"{1000 * spent / CALL_TICKS:.1f}"])
    head = ("detector", "CPU s, one core", "wall s", "ms a tick")
    return [
        "## One call",
        "",
        (
            f"15 minutes (900 ticks) of {CALL_MACHINES:,} machines, {CALL_METRICS} metrics, 2 % missing, one thread, "
            f"n = 1. The paper: {PAPER_CALL_SECONDS} s on 128 cores, fetching included. Minder's pairwise distances "
            f"cost the "
            "square of the machines."
        ),
        "",
        *table(head, rows),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--machines-max", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--asked", type=float, default=FALSE_ALARMS_PER_1000_MACHINE_DAYS)
    parser.add_argument("--steps", type=int, default=minder_fit.NUM_STEPS)
    parser.add_argument("--fit-tasks", type=int, default=FIT_TASKS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--fit-built-in", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print only, write no report")
    args = parser.parse_args()
    if args.fit_built_in:
        print("\n".join(fit_built_in(args.fit_tasks, args.steps)))
        return 0
    known: dict[str, Callable[[argparse.Namespace], list[str]]] = {
        "denoisers": denoisers,
        "own-kind": own_kind,
        "ablations": ablations,
        "real": real,
        "call": call,
    }
    chosen = [p for p in args.parts.split(",") if p]
    if unknown := [p for p in chosen if p not in known]:
        parser.error(f"no such part: {', '.join(unknown)}")
    config = " ".join(f"{k}={v}" for k, v in vars(args).items())
    lines = common.header("Minder and the baselines", config, f"fleet {args.seed}, fitting {FIT_SEED}")
    for part in chosen:
        told = known[part](args)
        print("\n".join(told), flush=True)
        lines += told
    if not args.dry:
        print(common.write("minder", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
