"""Hosts and GPUs on the Overview page, from a Prometheus server. A background thread queries it, so a slow or
unreachable server does not delay the page, which shows the last response and its age.
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
"""Poll interval; targets are scraped about every 15 s."""
FIRST_SECONDS = 0.3
QUERIES: Mapping[str, str] = {
    "targets up": "count(up == 1)",
    "targets down": "count(up == 0)",
    "GPUs": "count(rolecall_gpu_up == 1) or count(DCGM_FI_DEV_GPU_TEMP)",
    "GPUs down": "count(rolecall_gpu_up == 0)",
    "GPU utilization, mean": "avg(rolecall_gpu_utilization_ratio) * 100 or avg(DCGM_FI_DEV_GPU_UTIL)",
    "hottest GPU": "max(rolecall_gpu_temperature_celsius) or max(DCGM_FI_DEV_GPU_TEMP)",
    "GPU power, total": "sum(rolecall_gpu_power_watts) or sum(DCGM_FI_DEV_POWER_USAGE)",
}
UNITS = {"GPU utilization, mean": " %", "hottest GPU": " °C", "GPU power, total": " W"}
ADVICE = (
    "The rest of this page comes from the journal and is complete. Check that the server runs and "
    "`--prometheus` is right."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSnapshot:
    """The latest response; `because`: why there is no newer one."""

    values: Mapping[str, float] = field(default_factory=dict)
    at: float | None = None
    because: str = ""


class PrometheusPoller:
    """Thread-safe; queries only while a page is open."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self._changed = threading.Condition()
        self._last = PrometheusSnapshot()
        self._due = -math.inf
        self._busy = False

    def latest(self) -> PrometheusSnapshot:
        """The latest response; starts a new poll when it is due."""
        with self._changed:
            if not self._busy and self._clock.monotonic() >= self._due:
                self._busy = True
                threading.Thread(target=self._ask, name="dashboard prometheus", daemon=True).start()
                self._changed.wait_for(lambda: not self._busy, FIRST_SECONDS)
            return self._last

    def _ask(self) -> None:
        values, because = {}, ""
        try:
            for name, expression in QUERIES.items():
                value = _number(self._client.ask("query", {"query": expression}, lambda: True))
                if value is not None:
                    values[name] = value
        except (PrometheusUnavailable, PrometheusResponseTooLarge, UnreadableInput) as e:
            because = str(e)
        except Exception as e:  # noqa: BLE001 - any error is shown on the page
            because = repr(e)
        with self._changed:
            if because:
                self._last = replace(self._last, because=because)
            else:
                self._last = PrometheusSnapshot(values=values, at=self._clock.wall())
            self._due, self._busy = self._clock.monotonic() + ASK_SECONDS, False
            self._changed.notify_all()


def _number(data: object) -> float | None:
    """The value of an instant query; None if it has none."""
    try:
        value = float(data["result"][0]["value"][1])  # type: ignore[index]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


_pollers: dict[Settings, PrometheusPoller | str] = {}
_lock = threading.Lock()


def _poller(settings: Settings) -> PrometheusPoller | str:
    with _lock:
        if settings not in _pollers:
            _pollers.clear()
            clock = SystemClock()
            try:
                client = Client(
                    settings.prometheus_url, clock, authorization=settings.prometheus_authorization, limits=LIMITS
                )
                _pollers[settings] = PrometheusPoller(client, clock)
            except ConfigError as e:
                _pollers[settings] = str(e)
        return _pollers[settings]


def show(reader: Reader) -> None:
    """Draws the response; nothing if no server is configured."""
    if not reader.settings.prometheus_url:
        return
    poller = _poller(reader.settings)
    answers = PrometheusSnapshot(because=poller) if isinstance(poller, str) else poller.latest()
    st.subheader("Hosts and GPUs")
    if answers.because:
        old = "" if answers.at is None else f"The data shown is {seconds(reader.now() - answers.at)} old."
        st.html(banner("warn", "Prometheus is not responding.", plain(answers.because, 300), old, advice=ADVICE))
    elif answers.at is None:
        st.caption("Querying Prometheus.")
    elif not answers.values:
        st.html(
            banner("note", "Prometheus has no rolecall targets.", "docs/reference/dashboard.md lists what to scrape.")
        )
    if answers.values:
        st.html(figures(metric_figures(answers.values)))


def metric_figures(values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(name, value, comment) of each metric."""
    return [(name, f"{value:,.0f}{UNITS.get(name, '')}", "") for name, value in values.items()]
