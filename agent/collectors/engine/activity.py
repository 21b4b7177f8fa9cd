"""What an inference engine is doing, by its own metrics: for processes of jobs that report nothing themselves.

The newest poll of the engines' pages says how many requests each runs and how many tokens it has generated. With
running requests, an engine makes progress only by tokens: one whose server answers while its engine hangs is seen to
stand still. Values are as old as the poll (5 s by default), and the detector learns its deadline from the gaps it sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolecall.agent.collectors.base import CollectorReading
from rolecall.core.telemetry import Phase

STALE_SECONDS = 30.0
"""Older values say nothing: the server does not answer, or no poll is made."""
RUNNING, TOKENS, AWAKE = (
    "rolecall_vllm_requests_running",
    "rolecall_vllm_generated_tokens_total",
    "rolecall_vllm_awake",
)
ENGINE_PROBES = ("vllm",)
Place = tuple[str, int]
"""(replica, rank)"""


@dataclass(slots=True)
class _Engine:
    read_at: float = 0.0
    tokens: int = 0
    progress_at: float = 0.0
    requests: int = 0
    phase: str = Phase.IDLE
    phase_since: float = 0.0
    phase_entries: int = 1


class EngineActivity:
    """Mutable; `fields` is called from one thread. `newest()`: the newest poll of the engines and its start (node
    monotonic seconds)."""

    def __init__(self, newest: Callable[[], tuple[float, CollectorReading]]) -> None:
        self._newest = newest
        self._reading = CollectorReading()
        self._engines: dict[Place, _Engine] = {}

    def fields(self, replica: str, rank: int, now: float) -> dict[str, Any]:
        """Of a `telemetry.ProcessSample`; empty: this process is no engine whose metrics are read, or they are
        stale."""
        at, reading = self._newest()
        if reading is not self._reading:
            self._reading = reading
            self._take(at, reading)
        engine = self._engines.get((replica, rank))
        if engine is None or now - engine.read_at > STALE_SECONDS:
            return {}
        return {
            "phase": engine.phase,
            "phase_since": engine.phase_since,
            "phase_entries": engine.phase_entries,
            "progress": engine.tokens,
            "progress_at": engine.progress_at,
            "tokens": engine.tokens,
            "requests_active": engine.requests,
        }

    def _take(self, at: float, reading: CollectorReading) -> None:
        seen: dict[Place, dict[str, float]] = {}
        for value in reading.values:
            if value.metric.name in (RUNNING, TOKENS, AWAKE):
                _, _, replica, rank = value.labels
                seen.setdefault((replica, int(rank)), {})[value.metric.name] = value.value
        for place, found in seen.items():
            if TOKENS not in found or RUNNING not in found:
                continue
            engine = self._engines.setdefault(place, _Engine(phase_since=at, progress_at=at))
            tokens, requests = int(found[TOKENS]), int(found[RUNNING])
            if tokens != engine.tokens:
                engine.tokens, engine.progress_at = tokens, at
            phase = Phase.GENERATE if requests else Phase.IDLE
            if found.get(AWAKE, 1.0) == 0.0:
                phase = Phase.SLEEP
            if phase != engine.phase:
                engine.phase, engine.phase_since = phase, at
                engine.phase_entries += 1
            engine.requests, engine.read_at = requests, at
