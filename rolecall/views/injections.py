"""The fault injector's log, `injections.jsonl`: used only for evaluation, never by a detector. Pure."""

import json
from dataclasses import dataclass
from typing import Any

HELPER_KINDS = ("agent-", "watch-")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One line of the injector's log."""

    kind: str
    target: str  # replica
    injected_at: float  # wall seconds
    how: str = ""
    incarnation: int | None = None
    node: str = ""
    pid: int = 0
    start_ticks: int = 0
    met: bool = True  # injected at the intended moment
    targets: tuple[str, ...] = ()  # all replicas hit together; `target` is the first of them

    @property
    def hit(self) -> tuple[str, ...]:
        return self.targets or (self.target,)

    @property
    def of_helper(self) -> bool:
        """It hit one of rolecall's own processes, which is restarted and is no incident of the job."""
        return self.kind.startswith(HELPER_KINDS)

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "targets": list(self.hit)}


def parse_injections(text: str) -> list[InjectedFault]:
    """The injector's log, oldest first, without an incomplete last line.

    Raises:
        ValueError: a complete line is malformed.
    """
    faults = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            faults.append(_fault(json.loads(line)))
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"line {number} is not what the injector writes: {e!r}") from e
    return sorted(faults, key=lambda f: f.injected_at)


def _fault(d: Any) -> InjectedFault:
    if not isinstance(d, dict):
        raise TypeError("not a mapping")
    incarnation = d.get("incarnation")
    return InjectedFault(
        kind=str(d["kind"]),
        target=str(d["target"]),
        injected_at=float(d["injected_at"]),
        how=str(d.get("how") or ""),
        incarnation=None if incarnation is None else int(incarnation),
        node=str(d.get("node") or ""),
        pid=int(d.get("pid") or 0),
        start_ticks=int(d.get("start_ticks") or 0),
        met=d.get("met") is not False,
        targets=tuple(str(t) for t in d.get("targets") or ()),
    )
