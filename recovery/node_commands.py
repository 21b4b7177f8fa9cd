"""What a person can say about a node: nothing new is placed there, all of it is moved away, it may take replicas again."""

from collections.abc import Mapping
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.errors import CommandRefused
from rolecall.recovery.place import Place


def quarantine(place: Place, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Nothing is placed on `node` any more; what runs there goes on."""
    raise CommandRefused("quarantine: not built yet")


def drain(place: Place, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Quarantines `node`, and asks for each replica that runs there to be replaced elsewhere."""
    raise CommandRefused("drain: not built yet")


def return_node(place: Place, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Ends a quarantine."""
    raise CommandRefused("return_node: not built yet")


def burned_in(place: Place, node: str, result: Mapping[str, Any], by: str, clock: Clock | None = None) -> str:
    """Records what a burn-in of `node` found."""
    raise CommandRefused("burned_in: not built yet")


def nodes(place: Place, clock: Clock | None = None) -> list[dict[str, Any]]:
    """Every node, repeat offenders first. Plain values."""
    return []
