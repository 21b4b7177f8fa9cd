"""What noise do machines have of their own? Fits constants of `detector/simulation/fleet.py` to healthy recordings.

    python -m benchmarks.panels.fit_noise [--data ../shared/data]

Residual: a machine's value less the median of the other machines at the same tick, less its own mean over the recording
(the offset). Of each metric of each healthy recording:

- offset: standard deviation of the offsets over machines, in standard deviations of the residual over machines and
time;
- scale: standard deviation over machines of the log of each one's own scale (interquartile range);
- autocorrelation: the variance of means over k seconds, times k, over the variance (1 for white noise), pooled over
  machines; to its growth with k is fitted (1 - share) AR(1) + share wander, a second AR(1) of half a minute to ten
  minutes. Means, since work that comes in batches of 5 s, as in exathlon, makes single lags say little;
- tails: maximum-likelihood Student-t degrees of freedom of the innovations r_t - phi r_{t-1}, and the largest residual.

Left out are metrics that stand still in more than half of all ticks on most machines: they say nothing of noise.
Printed are quantiles over metrics (those of each recording count once each), of each set and of both with equal weight.
From both the simulation takes autocorrelation, wander and tails, by tick: exathlon is sampled each second and holds
rates, nearly white once the work is taken out; asd every 5 minutes, and moves slowly: gauges like it are found in any
fleet sampled each second, so its coefficients are taken over per tick. Offsets are exathlon's (asd came normalised by
machine), scales asd's (twelve servers of one service; exathlon's four nodes do unequal work).
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from benchmarks import common
from rolecall.detector.panels.panel import Panel
from rolecall.detector.sources import recording

SETS = {"exathlon": "healthy-*", "asd": "day0[06]"}
"""Healthy recordings of machines: set -> folders."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
PRINTED = ("offset_sigmas", "scale_spread", "phi", "wander_share", "wander_seconds", "dof", "largest_sigmas")
SPANS = (2, 5, 10, 20, 30, 60)
"""Ticks over which means are taken; longer ones are too few in a quarter of an hour."""
STILL_MAX = 0.5
WANDER_SECONDS = (30.0, 60.0, 120.0, 300.0, 600.0)
"""Time constants tried for the slow part."""
TAIL_SAMPLES_MAX = 4000
DOF_MAX = 50.0
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One metric of one recording; for the fields see above. `grown`: at SPANS."""

    recording: str
    metric: str
    offset_sigmas: float
    scale_spread: float
    grown: tuple[float, ...]
    phi: float
    wander_share: float
    wander_seconds: float
    dof: float
    largest_sigmas: float


def residuals(values: Array) -> Array:
    """(T, N): values less the median of the others at the same tick; NaN where missing. Offsets are still in."""
    others = np.empty_like(values)
    for n in range(values.shape[1]):
        others[:, n] = np.nanmedian(np.delete(values, n, axis=1), axis=1)
    return values - others


def growth(r: Array, span: int) -> float:
    """Variance of means over `span` ticks, times `span`, over the variance; of residuals (T, N) with mean 0."""
    there = np.isfinite(r)
    filled = np.where(there, r, 0.0)
    sums, counts = (np.cumsum(np.vstack([np.zeros(r.shape[1]), x]), axis=0) for x in (filled, there))
    total, count = sums[span:] - sums[:-span], counts[span:] - counts[:-span]
    means = total[count > 0] / count[count > 0]
    return float(np.mean(means**2) * span / np.nanmean(r**2))


def growth_of_ar1(phi: float, span: int) -> float:
    j = np.arange(1, span)
    return float(1 + 2 * np.sum((1 - j / span) * phi**j))


def wander_fit(grown: Array) -> tuple[float, float, float]:
    """(phi, share, seconds) of the sum of two AR(1) nearest to the growth at SPANS, by logarithms."""
    best = (np.inf, 0.0, 0.0, 0.0)
    for seconds in WANDER_SECONDS:
        slow = np.array([growth_of_ar1(float(np.exp(-1 / seconds)), k) for k in SPANS])

        def miss(x: Array, slow: Array = slow) -> Array:
            fast = np.array([growth_of_ar1(float(x[0]), k) for k in SPANS])
            missed: Array = np.log((1 - x[1]) * fast + x[1] * slow) - np.log(grown)
            return missed

        found = optimize.least_squares(miss, [0.3, 0.1], bounds=([0.0, 0.0], [0.95, 0.95]))
        if found.cost < best[0]:
            best = (float(found.cost), float(found.x[0]), float(found.x[1]), seconds)
    return best[1:]


def dof_fit(innovations: Array) -> float:
    """Maximum-likelihood degrees of freedom of a Student-t about 0, scale free."""
    x = innovations[np.isfinite(innovations)]
    x = x[:: max(1, len(x) // TAIL_SAMPLES_MAX)]
    x = x / np.std(x)

    def loss(p: Array) -> float:
        return -float(np.sum(stats.t.logpdf(x, np.exp(p[0]), scale=np.exp(p[1]))))

    found = optimize.minimize(loss, [1.0, -0.3], method="Nelder-Mead", options={"xatol": 0.01, "fatol": 0.1})
    return float(min(np.exp(found.x[0]), DOF_MAX))


def fits(name: str, panel: Panel) -> Iterable[Fit]:
    for m, metric in enumerate(panel.shape.metrics):
        values = panel.values[m].astype(np.float64)
        still = np.mean(np.diff(values, axis=0) == 0, axis=0)
        if np.median(still) > STILL_MAX or values.shape[1] < 3:
            continue
        r = residuals(values)
        offsets = np.nanmean(r, axis=0)
        r = r - offsets
        own = np.nanstd(r, axis=0)
        if not (own > 0).all():
            continue
        sigma = float(np.sqrt(np.mean(own**2)))
        grown = np.array([growth(r, k) for k in SPANS])
        phi, share, seconds = wander_fit(grown)
        z = r / own
        lag1 = float(np.nanmean(z[1:] * z[:-1]))
        quartiles = np.nanpercentile(r, [25, 75], axis=0)
        width = quartiles[1] - quartiles[0]
        yield Fit(
            recording=name,
            metric=metric,
            offset_sigmas=float(np.std(offsets, ddof=1)) / sigma,
            scale_spread=float(np.std(np.log(width[width > 0]), ddof=1)) if (width > 0).sum() > 1 else 0.0,
            grown=tuple(float(x) for x in grown),
            phi=phi,
            wander_share=share,
            wander_seconds=seconds,
            dof=dof_fit((z[1:] - lag1 * z[:-1]).ravel()),
            largest_sigmas=float(np.nanmax(np.abs(r)) / sigma),
        )


def report(title: str, found: list[Fit], weights: list[float]) -> None:
    print(f"\n{title}: {len(found)} metrics of {len({f.recording for f in found})} recordings")
    print("quantile over metrics        " + "".join(f"{q:>9g}" for q in QUANTILES))
    rows = {name: [getattr(f, name) for f in found] for name in PRINTED}
    rows |= {f"growth of means of {span}": [f.grown[i] for f in found] for i, span in enumerate(SPANS)}
    for name, values in rows.items():
        quantiles = np.quantile(values, QUANTILES, weights=weights, method="inverted_cdf")
        print(f"{name:<29}" + "".join(f"{v:>9.3f}" for v in quantiles))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=common.PUBLIC_DATA)
    args = parser.parse_args()
    everything: list[Fit] = []
    weights: list[float] = []
    for set_name, pattern in SETS.items():
        paths = sorted((args.data / set_name).glob(f"{pattern}/recording.parquet"))
        paths = [p for p in paths if json.loads((p.parent / "label.json").read_text())["healthy"]]
        if not paths:
            print(f"{args.data / set_name}: no healthy recordings here", file=sys.stderr)
            return 2
        found = [f for p in paths for panel in recording.read(p).panels for f in fits(p.parent.name, panel)]
        report(set_name, found, [1.0] * len(found))
        everything += found
        weights += [1 / len(found)] * len(found)
    report("both, of equal weight", everything, weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
