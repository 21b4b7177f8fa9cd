"""Numbers of the suspect beside those of its peers, its threshold or its own past, from the values of the stored
evidence: what the Evidence tab draws where no series are stored. Pure.

A value is compared with one of the same evidence whose name says what it is: `peers_median`, `expected_...`,
`..._before`, `deadline_seconds`, `threshold`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.text import in_words, plain
from rolecall.dashboards.pages.incidents.charts import PADDING, PEER, SUSPECT

PEERS, EXPECTED, BEFORE = "peers_", "expected_", "_before"
LIMITS: Mapping[str, tuple[str, ...]] = {
    "deadline_seconds": ("stalled_seconds", "waited_seconds"),
    "threshold": ("cusum", "score"),
}
"""Name of a limit -> the values that it limits."""
BAR_PIXELS = 34
AXIS_PIXELS = 60
"""Height of title and axis labels."""
NUM_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    title: str
    bars: tuple[tuple[str, float], ...]  # (label, value), the suspect first


def comparisons(diagnosis: Diagnosis) -> tuple[Comparison, ...]:
    who = plain(diagnosis.suspects[0].name, 80) if diagnosis.suspects else "the job"
    found: dict[str, Comparison] = {}
    for evidence in diagnosis.evidence:
        for name, of, label in _pairs(evidence.values):
            bars = ((who, evidence.values[name]), (label, evidence.values[of]))
            if all(math.isfinite(value) for _, value in bars):
                found.setdefault(name, Comparison(title=plain(in_words(name), 80), bars=bars))
    return tuple(found.values())[:NUM_MAX]


def _pairs(values: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(name of the suspect's value, name of the one that it is compared with, label of that)."""
    plain_names = [n for n in values if not n.startswith((PEERS, EXPECTED)) and not n.endswith(BEFORE)]
    for name in values:
        if name.startswith(PEERS) and plain_names:
            yield plain_names[0], name, f"its peers, {in_words(name.removeprefix(PEERS))}"
        elif name.startswith(EXPECTED) and name.removeprefix(EXPECTED) in values:
            yield name.removeprefix(EXPECTED), name, "expected at this load"
        elif name.endswith(BEFORE) and name.removesuffix(BEFORE) in values:
            yield name.removesuffix(BEFORE), name, "before"
        for limited in LIMITS.get(name, ()):
            if limited in values:
                yield limited, name, in_words(name).removesuffix(" seconds")


def comparison_chart(found: Comparison) -> Any:
    rows = [{"who": who, "value": value, "is": n == 0} for n, (who, value) in enumerate(found.bars)]
    values = [value for _, value in found.bars]  # an explicit domain: Vega first draws without data, and warns
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("who:N", sort=None, title=None, axis=alt.Axis(labelLimit=260, ticks=False, domain=False)),
        x=alt.X(
            "value:Q",
            title=None,
            scale=alt.Scale(domain=[min(0.0, *values), max(0.0, *values) or 1.0]),
            axis=alt.Axis(tickCount=4, format="~s", gridOpacity=0.4),
        ),
    )
    colour = alt.Color("is:N", scale=alt.Scale(domain=[True, False], range=[SUSPECT, PEER]), legend=None)
    text = base.mark_text(align="left", dx=5, color=PEER, fontWeight="bold").encode(
        text=alt.Text("value:Q", format=",.5~g")
    )
    title = alt.TitleParams(found.title, anchor="start", frame="bounds", fontSize=12, fontWeight="normal", offset=4)
    height = BAR_PIXELS * len(rows) + AXIS_PIXELS
    bars = base.mark_bar(height=BAR_PIXELS / 2).encode(color=colour)
    chart = alt.layer(bars, text).properties(width="container", height=height, title=title)
    return chart.configure_view(stroke=None).configure(padding={**PADDING, "right": 80})
