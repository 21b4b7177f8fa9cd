"""The report on simulated fleets: its tables and its picture, from a few runs."""

from benchmarks.simulation import fleet_ettr as benchmark
from rolecall.simulate.settings import SimulationSettings
from rolecall.simulate.study import accounts

FLEET = SimulationSettings.model_validate({"days": 2})


def test_the_best_period_loses_least() -> None:
    arm = FLEET.arms["restart_warm"]
    best = benchmark.best_period(FLEET, arm, 2)
    lost = {
        n: sum(a.lost_gpu_seconds for a in accounts(FLEET, arm.model_copy(update={"checkpoint_every_steps": n}), 2))
        for n in benchmark.EVERY_STEPS
    }
    assert lost[best.checkpoint_every_steps] == min(lost.values())


def test_every_row_of_a_table_has_all_columns() -> None:
    curves = benchmark.across(FLEET, 2, (0.0, 60.0), lambda _: FLEET)
    for lines in (list(benchmark.table("title", "x", curves)), list(benchmark.robustrl(2))):
        rows = [line for line in lines if line.startswith("|")]
        assert len(rows) > 3 and len({row.count("|") for row in rows}) == 1


def test_a_band_holds_its_middle() -> None:
    found = {100.0: accounts(FLEET, FLEET.arms["role"], 5)}
    band = benchmark.band("role", found, lambda a: a.goodput)
    assert band.wide[0][0] <= band.narrow[0][0] <= band.middle[0] <= band.narrow[1][0] <= band.wide[1][0]
