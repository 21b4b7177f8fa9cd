"""Innovations: what the past foretells is no news, whatever the tails; what stays is. And how rare they are."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.whitening import FREEDOMS, QUANTILES, STUDENT, Whitening

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


def innovations(
    z: Floats,
    known: NDArray[np.bool_] | None = None,
    counted: NDArray[np.bool_] | None = None,
    slack: float = 0.0,
) -> tuple[Floats, Floats, Whitening]:
    """Sizes in units and rarities, (T, N) each, and the model at the end."""
    whitening, edge = Whitening(1, MACHINES), np.zeros((1, 1), dtype=np.bool_)
    there = np.ones(z.shape, dtype=np.bool_) if known is None else known
    count = np.ones((len(z), MACHINES), dtype=np.bool_) if counted is None else counted
    sizes, rare = [], []
    for t in range(len(z)):
        sizes.append(whitening.tick(z[t] - slack, z[t] + slack, there[t], count[t], edge).size[0])
        rare.append(whitening.rarity[0])
    return np.array(sizes), np.array(rare), whitening


def correlation(x: Floats) -> float:
    late = np.clip(x[TICKS // 2 :], -3, 3)
    return float((late[1:] * late[:-1]).mean() / (late * late).mean())


@pytest.mark.parametrize(
    ("phi", "dof", "white"), [(0.0, 30.0, 0.0), (0.6, 3.0, 0.0), (0.94, 2.5, 0.0), (0.94, 3.0, 1.0)]
)
def test_innovations_of_a_healthy_metric_are_white_and_as_rare_as_reported(
    phi: float, dof: float, white: float
) -> None:
    z = fading(1, phi=phi, dof=dof, white=white)
    x, rare, _ = innovations(z)
    assert abs(correlation(x)) < 0.15 and (phi < 0.5 or correlation(z[:, 0]) > 0.4)
    late = rare[TICKS // 2 :]
    for share in (0.1, 0.01):
        assert 0.4 * share < (late > -np.log(share)).mean() < 2 * share


@pytest.mark.parametrize("dof", [2.5, 4.0, 30.0])
def test_the_distribution_of_innovations_is_learned(dof: float) -> None:
    x, _, w = innovations(fading(7, phi=0.0, dof=dof))
    assert 0.6 * dof < float(w.freedom[0, 0]) < 2.5 * dof
    late = np.abs(x[TICKS // 2 :])
    reported = stats.t.ppf(0.9, float(w.freedom[0, 0])) * float(w.width[0, 0])
    assert 0.15 < (late > reported).mean() < 0.26  # 0.2 is reported
    [[near, far]] = w.surprise(np.array([[0.5, 5.0]], dtype=np.float32))
    expected = stats.t.logpdf(np.array([0.5, 5.0]) / w.width[0, 0], float(w.freedom[0, 0]))
    assert far - near == pytest.approx(expected[0] - expected[1], rel=1e-3)


def test_the_table_of_student_quantiles_is_true() -> None:
    for dof, row in zip(FREEDOMS, STUDENT, strict=True):
        assert row == pytest.approx([stats.t.ppf(0.5 + q / 2, dof) for q in QUANTILES], rel=1e-3)


def test_a_step_stays_news_for_longer_than_an_outlier_that_fades() -> None:
    phi, at = 0.93, 1200
    quiet = fading(2, phi=phi, dof=3.0)
    since = np.arange(TICKS - at, dtype=np.float32)
    step, outlier = quiet.copy(), quiet.copy()
    step[at:, 0, 3] += 12.0
    outlier[at:, 0, 3] += 12.0 * phi**since
    x = [np.clip(innovations(z)[0][at + 1 : at + 21, 3], -4, 4).mean() for z in (quiet, step, outlier)]
    assert x[1] - x[0] > 0.8
    assert abs(x[2] - x[0]) < 0.4


def test_a_lone_outlier_of_white_noise_leaves_no_trace() -> None:
    at = 1200
    quiet = fading(3, phi=0.0, dof=30.0)
    hit = quiet.copy()
    hit[at, 0, 5] += 40.0
    x, usual = innovations(hit)[0], innovations(quiet)[0]
    assert x[at, 5] > 20
    assert np.abs(x[at + 2 : at + 30, 5] - usual[at + 2 : at + 30, 5]).max() < 0.3


def test_what_is_explained_later_foretells_nothing() -> None:
    at, z = 1200, fading(3, phi=0.8, dof=30.0)
    hit = z.copy()
    hit[at, 0, 5] += 2.5
    after = []
    for series, taken in ((z, 0.0), (hit, 2.5), (hit, 0.0)):
        w, everyone, edge = Whitening(1, MACHINES), np.ones(MACHINES, np.bool_), np.zeros((1, 1), np.bool_)
        for t in range(at + 2):
            if t == at + 1:
                amount = np.zeros((1, MACHINES), dtype=np.float32)
                amount[0, 5] = taken
                w.correct(amount)
            new = w.tick(series[t], series[t], np.ones((1, MACHINES), np.bool_), everyone, edge)
        after.append(float(new.size[0, 5]))
    assert abs(after[1] - after[0]) < 0.1
    assert abs(after[2] - after[0]) > 0.5


def test_within_what_is_left_unexplained_nothing_is_news() -> None:
    x, _, _ = innovations(fading(4, phi=0.0, dof=30.0), slack=1.0)
    wide, _, _ = innovations(fading(4, phi=0.0, dof=30.0), slack=100.0)
    assert (wide == 0).all() and 0.5 < (x[100:] == 0).mean() < 0.9


def test_no_sample_is_no_news_and_the_first_after_a_gap_is_not_rare() -> None:
    z = fading(4, phi=0.9, dof=3.0)
    known = np.ones(z.shape, dtype=np.bool_)
    known[1000:1030, 0, 2] = False
    z[1030, 0, 2] += 30.0
    x, rare, _ = innovations(z, known)
    assert (x[1000:1030, 2] == 0).all() and (rare[1000:1031, 2] == 0).all()
    assert (rare[1031:1060, 2] > 0).mean() > 0.9


def test_an_outlier_that_stands_does_not_teach_that_outliers_stand_until_it_is_over() -> None:
    z = fading(5, phi=0.0, dof=30.0)
    z[1200:1300, 0, 4] += 15.0
    whitening, everyone = Whitening(1, MACHINES), np.ones(MACHINES, np.bool_)
    all_known, edge = np.ones((1, MACHINES), np.bool_), np.zeros((1, 1), np.bool_)
    taught = []
    for t in range(TICKS):
        whitening.tick(z[t], z[t], all_known, everyone, edge)
        taught.append(float(whitening.rho_far[0, 0]))
    assert max(taught[1200:1300]) < 0.2
    assert min(taught[1310:1400]) > 0.6


def test_an_outlier_that_became_an_alarm_teaches_nothing() -> None:
    z = fading(5, phi=0.0, dof=30.0)
    z[1200:1300, 0, 4] += 15.0
    counted = np.ones((TICKS, MACHINES), np.bool_)
    counted[1210:1330, 4] = False
    _, _, whitening = innovations(z, counted=counted)
    assert float(whitening.rho_far[0, 0]) < 0.2
