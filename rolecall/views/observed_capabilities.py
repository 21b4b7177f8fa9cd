"""What a watch can see, name, replace and end in the job that it watches, and why not the rest, as it last saw it.

Its watch keeps it in one flag of the journal, for ranks that can the same together (`rolecall/watch/visibility.py`).
"""

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

FLAG = "observed_capabilities"
GROUPS_MAX = 400
YES, PARTLY, NO, NONE = "yes", "partly", "no", "none"
"""As `watch.capabilities.Can`."""


@dataclass(frozen=True, slots=True)
class ObservedCapability:
    """`about`: seen, named, replaced or ended. `can`: one of the four above. `because`: by what, or why not. `fix`:
    what the user can do; empty: nothing. `ranks`: whose it is, as `trainer/0 0-3`."""

    about: str
    name: str
    can: str
    because: str
    fix: str
    ranks: str
    num_ranks: int


def to_json(found: Iterable[ObservedCapability]) -> str:
    return json.dumps([astuple(one) for one in list(found)[:GROUPS_MAX]], separators=(",", ":"))


def from_json(text: str | None) -> tuple[ObservedCapability, ...]:
    """Empty for a text that is none of `to_json`."""
    try:
        return tuple(map(_capability, json.loads(text or "[]")))
    except (ValueError, TypeError, KeyError):
        return ()


def _capability(row: list[Any]) -> ObservedCapability:
    about, name, can, because, fix, ranks, num_ranks = row
    return ObservedCapability(str(about), str(name), str(can), str(because), str(fix), str(ranks), int(num_ranks))
