"""What is assumed of a panel before it has shown itself: `priors.json`, fitted by
`benchmarks/panels/fit_priors.py`, which writes down from what.

- How far healthy machines stand apart, omega, by kind of metric: log-normal in units of the metric's noise over time,
  and a uniform share for metrics unlike the others.
- The tail of each channel's scores (`tails.Prior`).

Panels overrule both as they show themselves, and a profile (`profile`) of one's own job comes between the two.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.metric_kinds import ANY_KIND, kind
from rolecall.detector.panels.sequential.tails import Prior

Doubles = NDArray[np.float64]

SHIPPED = Path(__file__).with_name("priors.json")
SPREADS = np.geomspace(0.05, 1e4, 24)
"""Values of omega, in units of the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPrior:
    """Of omega: log-normal around `median` with `width` as standard deviation of the log; `uniform` is the share that
    is uniform."""

    median: float
    width: float
    uniform: float

    def log_prior(self) -> Doubles:
        """Of SPREADS, (G,)."""
        weight = np.exp(-0.5 * (np.log(SPREADS / self.median) / self.width) ** 2)
        share = (1 - self.uniform) * weight / weight.sum() + self.uniform / len(SPREADS)
        return np.asarray(np.log(share), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """`spreads`: by kind of metric, with `ANY_KIND` for those that have none. `scores`: by channel."""

    spreads: Mapping[str, SpreadPrior]
    scores: Mapping[str, Prior]

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Priors":
        spreads = {
            name: SpreadPrior(median=s["median"], width=s["width"], uniform=s["uniform"])
            for name, s in body["spreads"].items()
        }
        return cls(spreads=spreads, scores={name: Prior(**s) for name, s in body["scores"].items()})

    def log_spreads(self, metrics: Iterable[str]) -> Doubles:
        """(M, G)."""
        return np.array([self.spreads.get(kind(m), self.spreads[ANY_KIND]).log_prior() for m in metrics])


@cache
def shipped() -> Priors:
    return Priors.from_dict(json.loads(SHIPPED.read_text()))
