"""Addresses of the dashboard's pages. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import urlencode

INCIDENT = "incident"
"""URL parameter with an incident id, which selects the page of that incident."""


def href(incident_id: str, run: Mapping[str, str] = MappingProxyType({})) -> str:
    """Link to the page of one incident, from any page of the dashboard. `run`: the parameter of the chosen run."""
    return f"incidents?{urlencode({INCIDENT: incident_id, **run})}"
