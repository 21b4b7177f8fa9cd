"""How the policy does, on the page Now: signs of its health over the steps of the run, each with what is normal in words.

Small charts beside each other, so that entropy, lengths and what was thrown away are seen together: a reward that rises
while one of them runs away is not learning. A run of before there were signs says so in one sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from rolecall.dashboards.data.progress import Bucket
from rolecall.dashboards.pages import charts

COLUMNS = 3
UNTOLD = (
    "Of the policy's health (entropy, clipping, lengths of answers) this run's journal says nothing: it was written before "
    "steps told of it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHealthChart:
    """Some signs on one axis."""

    title: str
    lines: tuple[tuple[str, str], ...]  # (sign of core/policy_health.py, what its line is called)
    normal: str
    figures: str = "~g"
    zero: bool = True


PANELS = (
    PolicyHealthChart(
        title="entropy, nats a token",
        lines=(("entropy", "entropy"),),
        normal="Falls slowly while the policy learns, to nearly 0 when it has. Nearly 0 while the reward is low: it says one "
        "thing only, and can learn no more.",
    ),
    PolicyHealthChart(
        title="answers, tokens",
        lines=(("response_length", "mean"), ("response_length_max", "longest")),
        normal="What the task needs. A fall to a few tokens, or a rise to the limit: the reward is being played with.",
        figures="~s",
    ),
    PolicyHealthChart(
        title="shares of answers, groups and tokens",
        lines=(
            ("truncated_fraction", "cut off"),
            ("filtered_fraction", "filtered"),
            ("stale_fraction", "too old"),
        ),
        normal="Answers cut off: few, more at the start. Groups filtered: many at the start (all wrong) and at the end (all "
        "right). Tokens too old: nearly none.",
        figures=".1~%",
    ),
    PolicyHealthChart(
        title="tokens clipped",
        lines=(("clip_fraction_low", "from below"), ("clip_fraction_high", "from above")),
        normal="A few per cent, more in the first steps. Much more for long: the policy is far from who made its tokens.",
        figures=".1~%",
    ),
    PolicyHealthChart(
        title="importance ratios",
        lines=(("ratio_mean", "mean"), ("ratio_std", "spread")),
        normal="Of the policy to the one that made each token. Mean close to 1; spread well below 1, more with staleness.",
    ),
    PolicyHealthChart(
        title="KL to the sampler, nats a token",
        lines=(("kl_sampler", "KL"),),
        normal="Below 0.1 after the first steps, stale tokens counted. A rise that stays: the policy runs away from its engines.",
    ),
    PolicyHealthChart(
        title="trainer and engine disagree by",
        lines=(("log_ratio_max", "largest log-ratio"),),
        normal="Of the very same weights: rounding only, below 0.01 in one precision. More: one of the two computes wrong. "
        "A step whose tokens were all made by weights that no trainer holds any more tells none.",
        figures=".1~e",
    ),
    PolicyHealthChart(
        title="explained variance of the critic",
        lines=(("explained_variance", "explained variance"),),
        normal="Rises towards 1. At 0 the critic knows no more than the mean; below, less.",
        zero=False,
    ),
    PolicyHealthChart(
        title="loss of the critic",
        lines=(("value_loss", "loss"),),
        normal="Falls at first, then follows the rewards.",
    ),
)


Lines = dict[str, list[dict[str, float]]]


def drawn(curve: Sequence[Bucket]) -> list[tuple[PolicyHealthChart, Lines]]:
    """The panels that have something to show, with their lines: a run without a critic has no panel of one."""
    found = []
    for panel in PANELS:
        lines = {name: charts.rows(curve, lambda b, s=sign: b.signs.get(s, float("nan"))) for sign, name in panel.lines}  # type: ignore[misc]
        known = {name: points for name, points in lines.items() if points}
        if known:
            found.append((panel, known))
    return found


def show(curve: Sequence[Bucket]) -> None:
    """Draws them; nothing while no step is committed."""
    if not curve:
        return
    st.subheader("The policy's health")
    panels = drawn(curve)
    across = curve[0].last_step, curve[-1].last_step
    if not panels:
        st.caption(UNTOLD)
    for row in range(0, len(panels), COLUMNS):
        for column, (panel, lines) in zip(st.columns(COLUMNS), panels[row : row + COLUMNS], strict=False):
            with column:
                st.vega_lite_chart(
                    charts.line_columns(lines),
                    charts.curves(lines, panel.title, across=across, figures=panel.figures, zero=panel.zero),
                    width="stretch",
                )
                st.caption(panel.normal)
