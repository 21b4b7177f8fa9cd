"""Fitting the priors: healthy panels whose spreads are known give them back."""

import numpy as np
import pytest

from benchmarks.panels import fit_priors
from rolecall.detector.panels.metric_kinds import ANY_KIND
from rolecall.detector.panels.panel import Machine, Panel, PanelShape
from rolecall.detector.panels.sequential.priors import Priors


def healthy(seed: int, spreads: dict[str, float]) -> Panel:
    """Eight machines; each metric's machines stand so many times its noise apart."""
    rng = np.random.default_rng(seed)
    size = (len(spreads), 1, 8)
    apart = np.array(list(spreads.values()))[:, None, None] * rng.standard_normal(size)
    values = 1000 + apart + rng.standard_normal((len(spreads), 120, 8))
    shape = PanelShape(
        role="trainer",
        metrics=tuple(spreads),
        machines=tuple(Machine(node=f"m{n}") for n in range(8)),
        interval_seconds=1.0,
    )
    return Panel(shape=shape, at=np.arange(120.0), values=values.astype(np.float32))


def test_spreads_are_fitted_by_kind_of_metric() -> None:
    spreads = {f"disk{i}_read_bytes": 8.0 for i in range(6)} | {f"cpu{i}_util": 0.3 for i in range(6)}
    body = fit_priors.fit({"one": [healthy(seed, spreads) for seed in range(6)]})
    priors = Priors.from_dict(body)
    far, near = (priors.spreads[kind].median / fit_priors.MARGIN for kind in ("traffic", "usage"))
    assert 4 < far < 16 and 0.1 < near < 0.9
    assert priors.spreads[ANY_KIND].width > priors.spreads["traffic"].width, "all kinds together differ more"
    assert set(priors.scores) == {"single", "several", "distance", "novelty"}


def test_levels_that_cannot_be_compared_are_left_out() -> None:
    body = fit_priors.fit({"one": [healthy(1, {"a": 1.0, "b": 1.0, "MEM_cached": 500.0})]})
    assert "state" not in body["spreads"] and body["spreads"][ANY_KIND]["median"] < 5 * fit_priors.MARGIN


def test_each_kind_of_data_counts_the_same() -> None:
    near, far = ([healthy(seed, {"a": s, "b": s}) for seed in range(n)] for n, s in ((1, 0.2), (8, 12.0)))
    medians = [
        fit_priors.fit(panels)["spreads"][ANY_KIND]["median"]
        for panels in ({"near": near, "far": far}, {"near": near[:1], "far": far[:1]})
    ]
    assert medians[0] == pytest.approx(medians[1], rel=1.0)
    assert fit_priors.fit({"far": far})["spreads"][ANY_KIND]["median"] > medians[0]
