"""Numbers of the suspect beside those that stored evidence has to compare them with."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import Evidence
from rolecall.dashboards.pages.incidents.comparisons import comparison_chart, comparisons
from tests.dashboards.acting_world import diagnosis


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ({"progress": 2100.0, "peers_median": 2112.0}, (2100.0, ("its peers, median", 2112.0))),
        ({"seconds_per_unit": 2.0, "expected_seconds_per_unit": 1.0}, (2.0, ("expected at this load", 1.0))),
        ({"reward": 0.1, "reward_before": 0.9}, (0.1, ("before", 0.9))),
        ({"stalled_seconds": 2.6, "deadline_seconds": 2.5}, (2.6, ("deadline", 2.5))),
        ({"cpu_seconds": 0.02}, None),
        ({"progress": float("nan"), "peers_median": 2.0}, None),
    ],
)
def test_a_value_stands_beside_what_it_is_compared_with(
    values: dict[str, float], bars: tuple[float, tuple[str, float]] | None
) -> None:
    found = comparisons(
        replace(diagnosis("trainer/1", "slow"), evidence=(Evidence(kind="k", text="t", values=values),))
    )
    assert [c.bars for c in found] == ([] if bars is None else [(("trainer/1#1", bars[0]), bars[1])])
    for comparison in found:
        assert comparison_chart(comparison).to_dict()
