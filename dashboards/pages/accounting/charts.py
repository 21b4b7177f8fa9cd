"""Charts of the Accounting page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt

from rolecall.core.text import plain
from rolecall.dashboards.pages.accounting.lost_time import LostTimeShare, Slice

DAY_SECONDS = 86_400.0
SHORT_SECONDS = 600.0
"""Time labels of a shorter run include seconds."""


def ettr_chart(slices: Sequence[Slice]) -> Any:
    """ETTR of each time slice as a bar."""
    rows = [
        {
            "start": datetime.fromtimestamp(s.start, UTC).isoformat(),
            "end": datetime.fromtimestamp(s.end, UTC).isoformat(),
            # As text, because the browser formats tooltip times in its own time zone.
            "from (UTC)": datetime.fromtimestamp(s.start, UTC).strftime("%Y-%m-%d %H:%M"),
            "ETTR": s.ettr,
            "steps": s.num_steps,
            "incidents": s.num_incidents,
            "lost seconds": round(s.lost_seconds, 1),
        }
        for s in slices
        if s.ettr is not None
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("start:T", title="time (UTC)", scale=alt.Scale(type="utc"), axis=_times(slices)),
            x2="end:T",
            y=alt.Y("ETTR:Q", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            y2=alt.datum(0),
            tooltip=[
                "from (UTC):N",
                alt.Tooltip("ETTR:Q", format=".1%"),
                "steps:Q",
                "incidents:Q",
                "lost seconds:Q",
            ],
        )
        .properties(height=220)
    )


def _times(slices: Sequence[Slice]) -> Any:
    """24-hour labels; Vega's default is 12-hour."""
    span = slices[-1].end - slices[0].start if slices else 0.0
    form = "%m-%d %H:%M" if span > DAY_SECONDS else "%H:%M" if span > SHORT_SECONDS else "%H:%M:%S"
    return alt.Axis(format=form, tickCount=6, labelOverlap=True, labelFlush=True)


def lost_chart(lost: Sequence[LostTimeShare]) -> Any:
    """Lost seconds as a bar per name, longest first."""
    rows = [{"name": plain(part.name, 60), "seconds": round(part.seconds, 1)} for part in lost]
    base = alt.Chart(alt.Data(values=rows)).encode(
        # Every bar keeps its label, even if labels overlap.
        y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelOverlap=False, labelLimit=140, minExtent=60)),
        x=alt.X("seconds:Q", title="seconds of the whole run"),
        tooltip=["name:N", "seconds:Q"],
    )
    return base.mark_bar().properties(height=80 + 26 * len(rows))
