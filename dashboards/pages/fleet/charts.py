"""Charts of the Fleet page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt

from rolecall.core.text import plain
from rolecall.recovery.incidents.incident import Incident

SPARE_SECONDS = 60.0
"""Padding before the first and after the last incident; a single incident is centred in two minutes."""


def incidents_chart(found: Sequence[Incident]) -> Any:
    """A node's incidents over time, one row per fault class. Row and shape encode the class; colour repeats it."""
    rows = [
        {
            "at": datetime.fromtimestamp(i.opened_at, UTC).isoformat(),
            # As text, because the browser formats tooltip times in its own time zone.
            "opened (UTC)": datetime.fromtimestamp(i.opened_at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "class": str(i.diagnosis.fault_class),
            "outcome": str(i.outcome or "open"),
            "what": plain(i.diagnosis.because, 300),
            "incident": plain(i.incident_id),
        }
        for i in found
    ]
    times = [i.opened_at for i in found]
    spare = max(SPARE_SECONDS, (max(times) - min(times)) / 20)
    between = [datetime.fromtimestamp(at, UTC).isoformat() for at in (min(times) - spare, max(times) + spare)]
    axis = alt.Axis(format="%m-%d %H:%M:%S", tickCount=4, labelOverlap=True, labelFlush=True, grid=True)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=90, opacity=0.8)
        .encode(
            x=alt.X("at:T", title="opened at (UTC)", scale=alt.Scale(type="utc", domain=between), axis=axis),
            y=alt.Y("class:N", title=None),
            shape=alt.Shape("class:N", legend=None),
            color=alt.Color("class:N", legend=None),
            tooltip=["incident:N", "outcome:N", "what:N", "opened (UTC):N"],
        )
        .properties(height=90 + 34 * len({r["class"] for r in rows}))
    )
