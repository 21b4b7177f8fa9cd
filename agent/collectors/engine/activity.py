"""What an inference engine is doing, by its own metrics: for processes of jobs that report nothing themselves.

The newest poll of the engines' pages says how many requests each runs and how many tokens it has generated. With
running requests, an engine makes progress only by tokens: one whose server answers while its engine hangs is seen to
stand still (`detector.live.stages.progress.engine`). Values are as old as the poll, 5 s by default.

Of vLLM only. SGLang's requests are those of its last log: an engine that is idle, or whose generation is paused for a
weight update, still exports requests while its tokens stand still, as one that hangs does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolecall.agent.collectors.base import CollectorReading
from rolecall.core.metrics.collectors import VLLM

STALE_SECONDS = 30.0
"""Older values say nothing: the server does not answer, or no poll is made."""
INFO, RUNNING, TOKENS, AWAKE = (
    "rolecall_engine_info",
    "rolecall_engine_requests_running",
    "rolecall_engine_generated_tokens_total",
    "rolecall_engine_awake",
)
ENGINE_PROBES = ("engines",)
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
        """Of a `telemetry.ProcessSample`; empty: this process is no vLLM engine whose metrics are read,
        or they are stale. A sleeping engine runs no requests."""
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
        of_vllm: set[Place] = set()
        for value in reading.values:
            if value.metric.name in (INFO, RUNNING, TOKENS, AWAKE):
                _, _, replica, rank, *server = value.labels
                seen.setdefault((replica, int(rank)), {})[value.metric.name] = value.value
                if server == [VLLM]:
                    of_vllm.add((replica, int(rank)))
        for place, found in seen.items():
            if place in of_vllm and TOKENS in found and RUNNING in found:
                requests = int(found[RUNNING]) if found.get(AWAKE, 1.0) else 0
                self._engines[place] = _Engine(at, int(found[TOKENS]), requests)
