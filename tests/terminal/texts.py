"""What a pipe gets of the commands' renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.terminal import recovery
from rolecall.terminal.console import as_text

NOW = 1_700_000_000.0


def status_text(value: Mapping[str, Any], now: float = NOW) -> str:
    return as_text(recovery.status(value, now, "my-run"))


def incidents_text(value: Sequence[Mapping[str, Any]], now: float = NOW) -> str:
    return as_text(recovery.incidents(value, now, "my-run"))
