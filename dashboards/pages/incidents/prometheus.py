"""Series of suspects and peers from a Prometheus server, for incidents whose telemetry window has none.

All queries together have a deadline of a few seconds; an unreachable server results in a message.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.text import plain
from rolecall.dashboards.pages.incidents.signals import (
    Point,
    Signal,
    SignalLine,
    Signals,
    SignalSpec,
    band_of,
    kinds_for,
    limit_of,
)
from rolecall.dashboards.pages.incidents.timeline import TimelineRange
from rolecall.detector.sources.prometheus_api import (
    Client,
    PrometheusClientLimits,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
)

LIMITS = PrometheusClientLimits(answer_bytes_max=8 << 20, connect_seconds=2.0, answer_seconds=3.0, patience_seconds=2.0)
NUM_POINTS = 240
STEP_SECONDS_MIN = 1.0
WINDOW_STEPS = 4
"""Window of a rate in steps, and at least 20 s: four scrapes at a 5 s interval."""
WINDOW_SECONDS_MIN = 20.0
SPAN_SECONDS_MAX = 24 * 3600.0
"""Longest range; for longer incidents the first day."""


def from_prometheus(url: str, authorization: str, d: Diagnosis, axis: TimelineRange, clock: Clock) -> Signals:
    """Signals of the suspects and of the other replicas of their roles."""
    roles = sorted({s.role for s in d.suspects if s.role})
    selector = ",".join(_selector(d.suspects, roles))
    if not selector:
        return Signals(missing="the diagnosis names neither a role nor a node to query in Prometheus")
    try:
        client = Client(url, clock, authorization=authorization, limits=LIMITS)
    except ConfigError as e:
        return Signals(missing=plain(f"Prometheus: {e}", 300))
    end = min(axis.end, axis.begin + SPAN_SECONDS_MAX, clock.wall())
    step = max(STEP_SECONDS_MIN, (end - axis.begin) / NUM_POINTS)
    window = f"{max(WINDOW_SECONDS_MIN, WINDOW_STEPS * step):.0f}s"
    drawn: list[Signal] = []
    try:
        for kind in kinds_for(d):
            if kind.promql:
                expression = kind.promql.replace("$match", selector).replace("$window", window)
                signal = _signal(kind, client.matrix(expression, axis.begin, end, step, lambda: False), d)
                drawn += [signal] if signal else []
    except (PrometheusUnavailable, PrometheusResponseTooLarge, UnreadableInput) as e:
        if not drawn:
            return Signals(missing=plain(f"Prometheus at {client.where} query failed: {e}", 300))
    finally:
        client.close()
    missing = "" if drawn else plain(f"Prometheus at {client.where} has no series of the suspects for that time", 300)
    return Signals(signals=tuple(drawn), missing=missing, source=f"Prometheus at {plain(client.where, 100)}")


def _selector(suspects: Sequence[Suspect], roles: Sequence[str]) -> list[str]:
    if roles:
        return [f"role=~{_quoted('|'.join(_literal(r) for r in roles))}"]
    nodes = sorted({str(s.node) for s in suspects if s.node})
    return [f"node=~{_quoted('|'.join(_literal(n) for n in nodes))}"] if nodes else []


def _literal(name: str) -> str:
    """A name, escaped for an RE2 regular expression."""
    return "".join(c if c.isalnum() or c in "_-/" else f"\\x{{{ord(c):x}}}" for c in name)


def _quoted(text: str) -> str:
    """A PromQL string literal."""
    return json.dumps(text, ensure_ascii=False)


def _signal(kind: SignalSpec, result: Sequence[Any], d: Diagnosis) -> Signal | None:
    lines, peers = [], []
    for series in result:
        labels, points = _read(series)
        if not points:
            continue
        if any(_is(labels, s) for s in d.suspects):
            name = f"{labels.get('replica') or labels.get('node', '')} ({labels.get('node', '')})"
            lines.append(SignalLine(name=plain(name, 100), points=tuple(points)))
        else:
            peers.append(points)
    if not lines:
        return None
    return Signal(
        key=kind.key,
        title=kind.title,
        unit=kind.unit,
        lines=tuple(lines[:4]),
        band=band_of(peers),
        num_peers=len(peers),
        limit=limit_of(kind, d),
    )


def _read(series: Any) -> tuple[Mapping[str, str], list[Point]]:
    try:
        labels = {str(k): str(v) for k, v in series["metric"].items()}
        points = [(float(t), float(v)) for t, v in series["values"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}, []
    return labels, [(t, v) for t, v in points if math.isfinite(v)]


def _is(labels: Mapping[str, str], s: Suspect) -> bool:
    """Labels do not contain incarnations, so a replica's line continues with its replacement."""
    if s.replica:
        return labels.get("replica") == s.replica and (s.rank is None or labels.get("rank", str(s.rank)) == str(s.rank))
    return labels.get("node") == s.node
