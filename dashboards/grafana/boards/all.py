"""All dashboards, in the order in which on-call uses them during an incident."""

from typing import Any
from urllib.parse import urlsplit

from rolecall.core.errors import ConfigError
from rolecall.dashboards.grafana.board import document, incidents
from rolecall.dashboards.grafana.boards.health import health
from rolecall.dashboards.grafana.boards.node import gpus, network
from rolecall.dashboards.grafana.boards.replicas import replica, roles
from rolecall.dashboards.grafana.boards.run import overview, training


def documents(incidents_at: str = "") -> list[dict[str, Any]]:
    """JSON documents. `incidents_at`: URL of `rolecall dashboard` to link to; "" for none. Raises ConfigError."""
    if incidents_at:
        _checked(incidents_at)
    links = incidents(incidents_at)
    boards = (overview(links), training(), roles(), replica(links), gpus(), network(), health())
    return [document(board) for board in boards]


def _checked(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError([f"--incidents-at: expected http://HOST[:PORT][/PATH], got {address!r}"])
    if parts.username or parts.password:
        raise ConfigError(["--incidents-at: a link that everyone can see must not contain a password"])
