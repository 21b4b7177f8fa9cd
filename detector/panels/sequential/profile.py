"""What is usual among the healthy machines of one's own job, learned from recordings (`rolecall fit`) or by `watch`.

Of each panel (role, phase, interval) a profile holds, beside the shipped priors (`priors`):

- by metric, how far its machines stand apart: the log-likelihood of each spread in `SPREADS`, of the machines' places
  (`spread`) and of what remains of them after each one's usual offset (`drift`);
- by node and metric, the usual offset from the peers, in units of the metric's noise over time, which counts from
  two recordings on: one does not show how far offsets move;
- by channel, the mean of its scores' first block maxima, before there are averages to compare with.

A recording counts once, however long it is: its windows repeat the same offsets.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolecall.core.errors import UnreadableInput
from rolecall.detector.panels.panel import Machine, PanelShape
from rolecall.detector.panels.sequential.learned_places import LearnedPlaces
from rolecall.detector.panels.sequential.priors import SPREADS

FILE_BYTES_MAX = 256 << 20
INTERVAL_RATIO_MAX = 1.5
"""Noise and its averages depend on the interval: a profile applies to panels with about the same."""
RECORDINGS_MAX = 8.0
"""Earlier recordings count as at most so many: a job changes over the months."""
SURE_MAX = 8.0
"""Nats: no profile makes a spread less likely than this."""

Doubles = NDArray[np.float64]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
Grid = Annotated[list[Finite], Field(min_length=len(SPREADS), max_length=len(SPREADS))]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MetricProfile(_Part):
    """Log-likelihood of SPREADS, its maximum 0: `spread` of the places, `drift` of what remains after the offsets."""

    spread: Grid
    drift: Grid | None = None


class ScoreProfile(_Part):
    """Block maxima of a channel's first blocks: their mean, and their number (machines times blocks)."""

    mean: Annotated[Finite, Field(ge=0)]
    num: Annotated[Finite, Field(gt=0)]


class PanelProfile(_Part):
    """`offsets`: by node (`machine_key`) and metric; `recordings`: number that it was learned from."""

    role: str
    phase: str = ""
    further_ranks: bool = False
    interval_seconds: Annotated[Finite, Field(gt=0)]
    recordings: Annotated[Finite, Field(gt=0)]
    metrics: dict[str, MetricProfile]
    offsets: dict[str, dict[str, Finite]] = {}
    scores: dict[str, ScoreProfile] = {}

    def matches(self, shape: PanelShape) -> bool:
        ratio = shape.interval_seconds / self.interval_seconds
        alike = 1 / INTERVAL_RATIO_MAX <= ratio <= INTERVAL_RATIO_MAX
        own = self.role, self.phase, self.further_ranks
        return alike and own == (shape.role, shape.phase, shape.further_ranks)

    def offsets_of(self, shape: PanelShape) -> Doubles:
        """(M, N), NaN where unknown."""
        rows = [self.offsets.get(key, {}) for key in machine_keys(shape.machines)]
        return np.array([[row.get(m, math.nan) for row in rows] for m in shape.metrics])

    def log_likelihood(self, metrics: Iterable[str], *, drift: bool) -> Doubles:
        """(M, G); 0 where nothing is known."""
        found = []
        for name in metrics:
            metric = self.metrics.get(name)
            grid = None if metric is None else metric.drift if drift else metric.spread
            found.append(np.zeros(len(SPREADS)) if grid is None else np.array(grid))
        return np.array(found)


class Profile(_Part):
    """The file. `learned_from`: recordings, or the run, for the reader."""

    kind: Literal["rolecall profile"] = "rolecall profile"
    version: Literal[1] = 1
    learned_from: list[str] = []
    panels: list[PanelProfile]

    def of(self, shape: PanelShape) -> PanelProfile | None:
        return next((p for p in self.panels if p.matches(shape)), None)

    def replaced(self, panel: PanelProfile, shape: PanelShape) -> Self:
        """With `panel` in place of the one that matches `shape`."""
        others = [p for p in self.panels if not p.matches(shape)]
        return self.model_copy(update={"panels": [*others, panel]})

    def to_json(self) -> str:
        return self.model_dump_json(indent=1, exclude_defaults=False)


def renewed(
    before: PanelProfile | None, shape: PanelShape, places: LearnedPlaces, scores: dict[str, ScoreProfile]
) -> PanelProfile:
    """With what one more recording of this shape has shown. What it does not show is kept."""
    recordings = 0.0 if before is None else before.recordings
    weight = min(recordings, RECORDINGS_MAX)
    fade = weight / recordings if recordings else 0.0
    metrics = {} if before is None else dict(before.metrics)
    new_spread, new_drift = places.spread, places.drift
    for m in np.flatnonzero(places.num_spreads):
        name = shape.metrics[m]
        old = metrics.get(name)
        drift = new_drift[m] if places.num_drifts[m] else None
        if old is not None and old.drift is not None:
            drift = fade * np.array(old.drift) + (0 if drift is None else drift)
        spread = new_spread[m] + (0 if old is None else fade * np.array(old.spread))
        metrics[name] = MetricProfile(spread=_grid(spread), drift=None if drift is None else _grid(drift))
    offsets = {} if before is None else {key: dict(row) for key, row in before.offsets.items()}
    found = places.offsets
    for n, key in enumerate(machine_keys(shape.machines)):
        row = offsets.setdefault(key, {})
        for m in np.flatnonzero(np.isfinite(found[:, n])):
            name, new = shape.metrics[m], float(found[m, n])
            row[name] = round((weight * row[name] + new) / (weight + 1) if name in row else new, 3)
    both = {} if before is None else dict(before.scores)
    for name, score in scores.items():
        old_score = both.get(name)
        if old_score is not None:
            num = fade * old_score.num + score.num
            score = ScoreProfile(mean=(fade * old_score.num * old_score.mean + score.num * score.mean) / num, num=num)
        both[name] = score
    return PanelProfile(
        role=shape.role,
        phase=shape.phase,
        further_ranks=shape.further_ranks,
        interval_seconds=shape.interval_seconds if before is None else before.interval_seconds,
        recordings=weight + 1,
        metrics=metrics,
        offsets=offsets,
        scores=both,
    )


def _grid(log_likelihood: Doubles) -> list[float]:
    return [max(round(float(x), 3), -1e6) for x in log_likelihood - log_likelihood.max()]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualPlaces:
    """Where the healthy machines of a panel stand, in units of the noise. Of SPREADS, (M, G): `prior`, and the
    log-likelihoods of this job's earlier recordings, of the places (`spread`) and of what remains after `offsets`
    (`drift`). `offsets`, `learned_offsets` (M, N): NaN where unknown; the former also where their drift is."""

    prior: Doubles
    spread: Doubles
    drift: Doubles
    offsets: Doubles
    learned_offsets: Doubles

    @classmethod
    def of(cls, shape: PanelShape, prior: Doubles, profile: PanelProfile | None) -> Self:
        nothing, unknown = np.zeros_like(prior), np.full((len(shape.metrics), len(shape.machines)), math.nan)
        if profile is None:
            return cls(prior=prior, spread=nothing, drift=nothing, offsets=unknown, learned_offsets=unknown)
        drifts = np.array([m in profile.metrics and profile.metrics[m].drift is not None for m in shape.metrics])
        offsets = profile.offsets_of(shape)
        return cls(
            prior=prior,
            spread=np.maximum(profile.log_likelihood(shape.metrics, drift=False), -SURE_MAX),
            drift=np.maximum(profile.log_likelihood(shape.metrics, drift=True), -SURE_MAX),
            offsets=np.where(drifts[:, None], offsets, unknown),
            learned_offsets=offsets,
        )


def machine_keys(machines: Sequence[Machine]) -> list[str]:
    """What stays the same when a replica is replaced on its node: node, rank and GPU; the replica only where several
    share a node."""
    times = Counter((m.node, m.rank, m.gpu) for m in machines)
    keys = []
    for machine in machines:
        parts = [machine.node]
        parts += [machine.replica] if times[machine.node, machine.rank, machine.gpu] > 1 else []
        parts += [f"rank {machine.rank}"] if machine.rank is not None else []
        parts += [f"gpu {machine.gpu}"] if machine.gpu is not None else []
        keys.append(" ".join(parts))
    return keys


def read(path: Path) -> Profile:
    """Raises UnreadableInput: missing, too large, not a profile, of another version."""
    where = str(path)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UnreadableInput(where=where, reason=f"a profile has at most {FILE_BYTES_MAX:,} bytes")
        body = json.loads(path.read_bytes())
    except OSError as e:
        raise UnreadableInput(where=where, reason=e.strerror or str(e)) from e
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UnreadableInput(where=where, reason=f"not a profile, since it is not JSON: {e}") from e
    if not isinstance(body, dict) or body.get("kind") != "rolecall profile":
        raise UnreadableInput(where=where, reason="not a profile: `rolecall fit` writes one")
    try:
        return Profile.model_validate(body)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UnreadableInput(where=where, reason=f"{place}: {first['msg']}") from e
