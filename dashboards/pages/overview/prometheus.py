"""What a Prometheus server adds to the page Now: machines and GPUs, now. A thread of its own asks, so that a server that
is slow or away costs a page nothing: it shows the last answer and its age.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import streamlit as st

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.style import banner, figures
from rolecall.dashboards.settings import Settings
from rolecall.detector.sources.prometheus_api import (
    Client,
    PrometheusClientLimits,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
)

LIMITS = PrometheusClientLimits(answer_bytes_max=1 << 20, connect_seconds=2.0, answer_seconds=4.0, patience_seconds=0.0)
ASK_SECONDS = 10.0
"""Between two rounds of questions: servers are scraped every 15 s or so."""
FIRST_SECONDS = 0.3
QUESTIONS: Mapping[str, str] = {
    "targets that answer": "count(up == 1)",
    "targets that do not": "count(up == 0)",
    "GPUs": "count(rolecall_gpu_up == 1) or count(DCGM_FI_DEV_GPU_TEMP)",
    "GPUs that do not answer": "count(rolecall_gpu_up == 0)",
    "GPU busy, mean": "avg(rolecall_gpu_utilization_ratio) * 100 or avg(DCGM_FI_DEV_GPU_UTIL)",
    "hottest GPU": "max(rolecall_gpu_temperature_celsius) or max(DCGM_FI_DEV_GPU_TEMP)",
    "power of all GPUs": "sum(rolecall_gpu_power_watts) or sum(DCGM_FI_DEV_POWER_USAGE)",
}
UNITS = {"GPU busy, mean": " %", "hottest GPU": " °C", "power of all GPUs": " W"}
ADVICE = (
    "The rest of this page comes from the journal and is whole. Is the server running, and is `--prometheus` right?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSnapshot:
    """What the server said last; `because`: why it said nothing newer."""

    values: Mapping[str, float] = field(default_factory=dict)
    at: float | None = None
    because: str = ""


class PrometheusPoller:
    """Thread-safe; asks only when somebody looks."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self._changed = threading.Condition()
        self._last = PrometheusSnapshot()
        self._due = -math.inf
        self._busy = False

    def answers(self) -> PrometheusSnapshot:
        """The last answers; begins to ask for newer ones when they are due."""
        with self._changed:
            if not self._busy and self._clock.monotonic() >= self._due:
                self._busy = True
                threading.Thread(target=self._ask, name="dashboard prometheus", daemon=True).start()
                self._changed.wait_for(lambda: not self._busy, FIRST_SECONDS)
            return self._last

    def _ask(self) -> None:
        values, because = {}, ""
        try:
            for name, expression in QUESTIONS.items():
                value = _number(self._client.ask("query", {"query": expression}, lambda: True))
                if value is not None:
                    values[name] = value
        except (PrometheusUnavailable, PrometheusResponseTooLarge, UnreadableInput) as e:
            because = str(e)
        except Exception as e:  # noqa: BLE001 - whatever it is, the page says so
            because = repr(e)
        with self._changed:
            if because:
                self._last = replace(self._last, because=because)
            else:
                self._last = PrometheusSnapshot(values=values, at=self._clock.wall())
            self._due, self._busy = self._clock.monotonic() + ASK_SECONDS, False
            self._changed.notify_all()


def _number(data: object) -> float | None:
    """The one value of an instant query; None where there is none."""
    try:
        value = float(data["result"][0]["value"][1])  # type: ignore[index]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


_askers: dict[Settings, PrometheusPoller | str] = {}
_lock = threading.Lock()


def _asker(settings: Settings) -> PrometheusPoller | str:
    with _lock:
        if settings not in _askers:
            _askers.clear()
            clock = SystemClock()
            try:
                client = Client(
                    settings.prometheus_url, clock, authorization=settings.prometheus_authorization, limits=LIMITS
                )
                _askers[settings] = PrometheusPoller(client, clock)
            except ConfigError as e:
                _askers[settings] = str(e)
        return _askers[settings]


def show(reader: Reader) -> None:
    """Draws what the server says; nothing where none was named."""
    if not reader.settings.prometheus_url:
        return
    asker = _asker(reader.settings)
    answers = PrometheusSnapshot(because=asker) if isinstance(asker, str) else asker.answers()
    st.subheader("Machines")
    if answers.because:
        old = "" if answers.at is None else f"What is shown is {seconds(reader.now() - answers.at)} old."
        st.html(banner("warn", "Prometheus does not answer.", plain(answers.because, 300), old, advice=ADVICE))
    elif answers.at is None:
        st.caption("Prometheus is being asked.")
    elif not answers.values:
        st.html(
            banner("note", "Prometheus knows no target of ours.", "docs/reference/dashboard.md says what to scrape.")
        )
    if answers.values:
        st.html(figures(told(answers.values)))


def told(values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """What, how much, a word on it."""
    return [(name, f"{value:,.0f}{UNITS.get(name, '')}", "") for name, value in values.items()]
