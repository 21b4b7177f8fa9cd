"""All dashboards, in the order in which on-call uses them during an incident."""

from typing import Any
from urllib.parse import urlsplit

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.core.errors import ConfigError
from rolecall.dashboards.grafana.board import document
from rolecall.dashboards.grafana.boards.gpus import gpus
from rolecall.dashboards.grafana.boards.health import health
from rolecall.dashboards.grafana.boards.network import network
from rolecall.dashboards.grafana.boards.overview import overview
from rolecall.dashboards.grafana.boards.replica import replica
from rolecall.dashboards.grafana.boards.roles import roles
from rolecall.dashboards.grafana.boards.training import training
from rolecall.dashboards.grafana.links import incidents


def dashboards(incidents_at: str = "") -> list[Dashboard]:
    """`incidents_at`: URL of `rolecall dashboard` to link to; "" for none. Raises ConfigError."""
    if incidents_at:
        _checked(incidents_at)
    links = incidents(incidents_at)
    return [overview(links), training(), roles(), replica(links), gpus(), network(), health()]


def documents(incidents_at: str = "") -> list[dict[str, Any]]:
    """The same as JSON documents."""
    return [document(dashboard) for dashboard in dashboards(incidents_at)]


def _checked(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError([f"--incidents-at: expected http://HOST[:PORT][/PATH], got {address!r}"])
    if parts.username or parts.password:
        raise ConfigError(["--incidents-at: a link that everyone can see must not contain a password"])
