"""Innovations as normal scores: what the past foretells is no news, whatever the tails; what stays is."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rolecall.detector.panel import Floats
from rolecall.detector.whitening import SCORE_MAX, Whitening

MACHINES = 12
TICKS = 1500


def fading(seed: int, *, phi: float, dof: float, white: float = 0.0) -> Floats:
    """(T, 1, N): an AR(1) process with Student-t innovations, and white noise on top."""
    rng = np.random.default_rng(seed)
    z = np.zeros((TICKS, 1, MACHINES), dtype=np.float32)
    pushed = rng.standard_t(dof, z.shape).astype(np.float32)
    for t in range(1, TICKS):
        z[t] = phi * z[t - 1] + pushed[t]
    z += white * rng.standard_normal(z.shape).astype(np.float32)
    return np.asarray(z / np.median(np.abs(z)) * 0.6745, dtype=np.float32)


def scores(z: Floats, known: NDArray[np.bool_] | None = None) -> Floats:
    whitening, everyone = Whitening(1, MACHINES), np.ones(MACHINES, dtype=np.bool_)
    there = np.ones(z.shape, dtype=np.bool_) if known is None else known
    return np.stack([whitening.tick(z[t], there[t], everyone) for t in range(len(z))])[:, 0]


def correlation(x: Floats) -> float:
    late = x[TICKS // 2 :]
    return float((late[1:] * late[:-1]).mean() / (late * late).mean())


@pytest.mark.parametrize(
    ("phi", "dof", "white"), [(0.0, 30.0, 0.0), (0.6, 3.0, 0.0), (0.94, 2.5, 0.0), (0.94, 3.0, 1.0)]
)
def test_scores_of_a_healthy_metric_are_like_white_noise_of_variance_one(phi: float, dof: float, white: float) -> None:
    z = fading(1, phi=phi, dof=dof, white=white)
    x = scores(z)
    assert abs(correlation(x)) < 0.15 and (phi < 0.5 or correlation(z[:, 0]) > 0.4)
    assert 0.7 < (x[TICKS // 2 :] ** 2).mean() < 1.3
    assert np.abs(x).max() <= SCORE_MAX


def test_a_step_stays_news_for_longer_than_an_outlier_that_fades() -> None:
    phi, at = 0.93, 1200
    quiet = fading(2, phi=phi, dof=3.0)
    since = np.arange(TICKS - at, dtype=np.float32)
    step, outlier = quiet.copy(), quiet.copy()
    step[at:, 0, 3] += 12.0
    outlier[at:, 0, 3] += 12.0 * phi**since
    of_step, of_outlier = scores(step)[at + 1 : at + 21, 3], scores(outlier)[at + 1 : at + 21, 3]
    usual = scores(quiet)[at + 1 : at + 21, 3]
    assert of_step.mean() - usual.mean() > 0.8
    assert abs(of_outlier.mean() - usual.mean()) < 0.4


def test_a_lone_outlier_of_white_noise_leaves_no_trace() -> None:
    at = 1200
    quiet = fading(3, phi=0.0, dof=30.0)
    hit = quiet.copy()
    hit[at, 0, 5] += 40.0
    x, usual = scores(hit), scores(quiet)
    assert x[at, 5] > 3
    assert np.abs(x[at + 2 : at + 30, 5] - usual[at + 2 : at + 30, 5]).max() < 0.3


def test_no_sample_has_no_score_and_the_first_after_a_gap_neither() -> None:
    z = fading(4, phi=0.9, dof=3.0)
    known = np.ones(z.shape, dtype=np.bool_)
    known[1000:1030, 0, 2] = False
    z[1030, 0, 2] += 30.0
    x = scores(z, known)
    assert (x[1000:1031, 2] == 0).all() and (x[1031:1060, 2] != 0).mean() > 0.9
    assert np.abs(x[1031:1060, 2]).mean() < 2.0


def test_an_outlier_that_stands_does_not_teach_that_outliers_stand_until_it_is_over() -> None:
    z = fading(5, phi=0.0, dof=30.0)
    z[1200:1300, 0, 4] += 15.0
    whitening, everyone, all_known = (
        Whitening(1, MACHINES),
        np.ones(MACHINES, np.bool_),
        np.ones((1, MACHINES), np.bool_),
    )
    taught = []
    for t in range(TICKS):
        whitening.tick(z[t], all_known, everyone)
        taught.append(float(whitening.rho_far[0, 0]))
    assert max(taught[1200:1300]) < 0.2
    assert min(taught[1310:1400]) > 0.6


def test_an_outlier_that_became_an_alarm_teaches_nothing() -> None:
    z = fading(5, phi=0.0, dof=30.0)
    z[1200:1300, 0, 4] += 15.0
    whitening, all_known = Whitening(1, MACHINES), np.ones((1, MACHINES), np.bool_)
    for t in range(TICKS):
        counted = np.ones(MACHINES, np.bool_)
        counted[4] = not 1210 <= t < 1330
        whitening.tick(z[t], all_known, counted)
    assert float(whitening.rho_far[0, 0]) < 0.2
