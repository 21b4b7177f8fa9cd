"""ByteRobust's rule for warm standbys, with the numbers of its table 5."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.simulate.faults import ROLLOUT, TRAINER
from rolecall.simulate.settings import FaultSettings, SimulationSettings
from rolecall.simulate.standbys import daily_failure_probability, standby_pool, standbys

MACHINES = (128, 256, 512, 1024)


@pytest.mark.parametrize(("machines", "pool"), [*zip(MACHINES, (2, 2, 3, 4), strict=True)])
def test_the_published_pools(machines: int, pool: int) -> None:
    assert standby_pool(machines, 0.0012) == pool


def test_no_probability_far_from_it_gives_the_published_pools() -> None:
    fitting = [p / 1e5 for p in range(1, 400) if [standby_pool(n, p / 1e5) for n in MACHINES] == [2, 2, 3, 4]]
    assert 0.00115 <= min(fitting) <= 0.0012 <= max(fitting) <= 0.00127


@given(n=st.integers(0, 300), p=st.floats(0, 1), quantile=st.floats(0.01, 0.99))
def test_the_pool_is_the_quantile(n: int, p: float, quantile: float) -> None:
    def at_most(k: int) -> float:
        import math

        return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    k = standby_pool(n, p, quantile)
    assert 0 <= k <= n
    assert at_most(k) >= quantile - 1e-9 and (k == 0 or at_most(k - 1) < quantile + 1e-9)


@pytest.mark.parametrize(("n", "p", "quantile"), [(-1, 0.1, 0.9), (1, 1.1, 0.9), (1, 0.1, 1.0)])
def test_numbers_out_of_range_are_refused(n: int, p: float, quantile: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        standby_pool(n, p, quantile)


def test_the_probability_follows_from_rate_and_bursts() -> None:
    alone = FaultSettings(machine_share=0.5, burst_sizes={1: 1.0})
    assert daily_failure_probability(alone, 1e-5, 8) == pytest.approx(1e-5 * 8 * 24 * 0.5, rel=1e-3)
    pairs = FaultSettings(machine_share=0.5, burst_sizes={1: 0.5, 3: 0.5})
    assert daily_failure_probability(pairs, 1e-5, 8) == pytest.approx(2 * 1e-5 * 8 * 24 * 0.5, rel=2e-3)


def test_configured_standbys_come_before_the_rule() -> None:
    given_ones = SimulationSettings.model_validate({"machines": {"trainer_standbys": 7}})
    assert (
        standbys(given_ones)[TRAINER] == 7 and standbys(given_ones)[ROLLOUT] == standbys(SimulationSettings())[ROLLOUT]
    )
