"""Minder's denoisers: fitted on simulated tasks, and their error on windows that they were not trained on."""

import argparse
import sys
from dataclasses import replace

import numpy as np

from benchmarks.common import PUBLIC_DATA, table
from rolecall.detector.panels.minder import detector as minder
from rolecall.detector.panels.minder import fit as minder_fit
from rolecall.detector.panels.minder.detector import Weights
from rolecall.detector.panels.minder.fit import LabelledFault
from rolecall.detector.panels.panel import Floats, Panel
from rolecall.detector.simulation.fleet import fleet, panel
from rolecall.detector.sources import recording

FIT_SEED, FIT_TASKS, FIT_MACHINES_MAX = 1001, 60, 32
NUM_STARTS_SMOOTH = 4
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
    found: Floats = values.astype(np.float32)[:, None, None]
    return found


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
    if (PUBLIC_DATA / "asd-unlabelled").is_dir():
        real = recording.read(PUBLIC_DATA / "asd-unlabelled" / "recording.parquet").panels[0]
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
