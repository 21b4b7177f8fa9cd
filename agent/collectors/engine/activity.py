"""What an inference engine is doing, by its own metrics: for processes of jobs that report nothing themselves.

The newest poll of the engines' pages says how many requests each runs and how many tokens it has generated. With
running requests, an engine makes progress only by tokens: one whose server answers while its engine hangs is seen to
stand still (`detector.live.stages.progress.engine`). Values are as old as the poll, 5 s by default. vLLM counts tokens
as they are generated; SGLang only once a request ends, so that its counter does not serve here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolecall.agent.collectors.base import CollectorReading

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
    read_at: float
    tokens: int
    requests: int


class EngineActivity:
    """Mutable; `fields` is called from one thread. `newest()`: the newest poll of the engines and its start (node
    monotonic seconds)."""

    def __init__(self, newest: Callable[[], tuple[float, CollectorReading]]) -> None:
        self._newest = newest
        self._reading = CollectorReading()
        self._engines: dict[Place, _Engine] = {}

    def fields(self, replica: str, rank: int, now: float) -> dict[str, Any]:
        """Of a `telemetry.ProcessSample`; empty: this process is no engine whose metrics are read, or they are stale.
        A sleeping engine runs no requests."""
        at, reading = self._newest()
        if reading is not self._reading:
            self._reading = reading
            self._take(at, reading)
        engine = self._engines.get((replica, rank))
        if engine is None or now - engine.read_at > STALE_SECONDS:
            return {}
        return {"tokens": engine.tokens, "requests_active": engine.requests}

    def _take(self, at: float, reading: CollectorReading) -> None:
        seen: dict[Place, dict[str, float]] = {}
        for value in reading.values:
            if value.metric.name in (RUNNING, TOKENS, AWAKE):
                _, _, replica, rank = value.labels
                seen.setdefault((replica, int(rank)), {})[value.metric.name] = value.value
        for place, found in seen.items():
            if TOKENS in found and RUNNING in found:
                requests = int(found[RUNNING]) if found.get(AWAKE, 1.0) else 0
                self._engines[place] = _Engine(at, int(found[TOKENS]), requests)
