"""Policy health on the Overview page: health metrics over the steps of the run, each with its normal range.

The charts are side by side, because a rising reward means learning only while entropy, lengths and dropped samples
stay healthy. A run whose steps have no health metrics shows a note instead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from rolecall.dashboards.data.progress import Bucket
from rolecall.dashboards.pages import charts

COLUMNS = 3
NO_METRICS = "The steps of this run have no policy health metrics (entropy, clipping, response lengths)."


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHealthChart:
    """Health metrics on one axis."""

    title: str
    lines: tuple[tuple[str, str], ...]  # (metric of core/policy_health.py, legend)
    normal: str
    figures: str = "~g"
    zero: bool = True


PANELS = (
    PolicyHealthChart(
        title="entropy, nats per token",
        lines=(("entropy", "entropy"),),
        normal="Falls slowly while the policy learns, to nearly 0 when it has converged. Nearly 0 at a low reward: "
        "the policy has collapsed and learns nothing more.",
    ),
    PolicyHealthChart(
        title="response length, tokens",
        lines=(("response_length", "mean"), ("response_length_max", "longest")),
        normal="Depends on the task. A drop to a few tokens or a rise to the limit: the policy exploits the reward.",
        figures="~s",
    ),
    PolicyHealthChart(
        title="unused responses, groups, tokens",
        lines=(
            ("truncated_fraction", "truncated"),
            ("filtered_fraction", "filtered"),
            ("stale_fraction", "stale"),
        ),
        normal="Truncated responses: few, more at the start. Filtered groups: many at the start (all wrong) and at "
        "the end (all right). Stale tokens: nearly none.",
        figures=".1~%",
    ),
    PolicyHealthChart(
        title="clipped tokens",
        lines=(("clip_fraction_low", "from below"), ("clip_fraction_high", "from above")),
        normal="A few percent, more in the first steps. Persistently more: the policy has diverged from the sampler.",
        figures=".1~%",
    ),
    PolicyHealthChart(
        title="importance ratios",
        lines=(("ratio_mean", "mean"), ("ratio_std", "spread")),
        normal="Of the policy to the sampler, per token. Mean close to 1; spread well below 1, larger with staleness.",
    ),
    PolicyHealthChart(
        title="KL to sampler, nats per token",
        lines=(("kl_sampler", "KL"),),
        normal="Below 0.1 after the first steps, including stale tokens. A lasting rise: the policy diverges from "
        "its engines.",
    ),
    PolicyHealthChart(
        title="trainer and engine mismatch, nats",
        lines=(("log_ratio_max", "largest log-ratio"),),
        normal="For the same weights only rounding, below 0.01 at equal precision. More: one of the two computes "
        "wrong values. No value for steps whose tokens all come from weights that no trainer holds any more.",
        figures=".1~e",
    ),
    PolicyHealthChart(
        title="critic explained variance",
        lines=(("explained_variance", "explained variance"),),
        normal="Rises towards 1. At 0 the critic predicts no better than the mean; below 0, worse.",
        zero=False,
    ),
    PolicyHealthChart(
        title="critic loss",
        lines=(("value_loss", "loss"),),
        normal="Falls at first, then follows the rewards.",
    ),
)


Lines = dict[str, list[dict[str, float]]]


def _value_of(metric: str) -> Callable[[Bucket], float]:
    return lambda bucket: bucket.signs.get(metric, math.nan)


def drawn(curve: Sequence[Bucket]) -> list[tuple[PolicyHealthChart, Lines]]:
    """The panels that have data, with their lines: a run without a critic has no critic panels."""
    found = []
    for panel in PANELS:
        lines = {name: charts.rows(curve, _value_of(metric)) for metric, name in panel.lines}
        known = {name: points for name, points in lines.items() if points}
        if known:
            found.append((panel, known))
    return found


def show(curve: Sequence[Bucket]) -> None:
    """Draws the panels; nothing before the first committed step."""
    if not curve:
        return
    st.subheader("Policy health")
    panels = drawn(curve)
    across = curve[0].last_step, curve[-1].last_step
    if not panels:
        st.caption(NO_METRICS)
    for row in range(0, len(panels), COLUMNS):
        for column, (panel, lines) in zip(st.columns(COLUMNS), panels[row : row + COLUMNS], strict=False):
            with column:
                st.vega_lite_chart(
                    charts.line_columns(lines),
                    charts.curves(lines, panel.title, across=across, figures=panel.figures, zero=panel.zero),
                    width="stretch",
                )
                st.caption(panel.normal)
