"""vLLM's metrics: the pages of this node's engines, labelled with the replica of each engine.

Names: vLLM's documentation, "Production Metrics", versions 0.5 to 0.32. Where a name changed, both are supported; the
newer one wins where a version exports both. The engine's API server renders the page in the loop that serves requests,
so it is scraped rarely."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.samples import Sample

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.exporters.scrape import Scraper, parse_address
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.collectors import VLLM_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue

logger = logging.getLogger(__name__)

NUM_ENGINES_MAX = 64
INTERVAL_SECONDS = 5.0
ENGINE_SECONDS = 1.0
"""Deadline of one engine's page. A server busy with long prompts responds slowly."""
POLL_SECONDS = 4.0
"""For all engines together: less than the time after which a read counts as hung. Engines that failed come last."""

_BY_NAME = {m.name: m for m in VLLM_METRICS}
_UP = _BY_NAME["rolecall_vllm_up"]
_AWAKE = _BY_NAME["rolecall_vllm_awake"]
_FINISHED = _BY_NAME["rolecall_vllm_requests_finished_total"]
_SLEEP_STATE, _SUCCESS = "vllm:engine_sleep_state", "vllm:request_success_total"
REASONS = frozenset({"stop", "length", "abort", "error", "repetition"})
OTHER = "other"


class EngineEndpoint(NamedTuple):
    """An engine's metrics page and its rank. `url`: `http://host:port[/metrics]`."""

    url: str
    role: str
    replica: str
    rank: int


@dataclass(frozen=True, slots=True)
class _Row:
    """`names`: vLLM's names, newest first; `join`: combines several values of one page."""

    metric: Metric
    names: tuple[str, ...]
    join: Callable[[Iterable[float]], float]


def _row(name: str, *names: str, join: Callable[[Iterable[float]], float] = sum) -> _Row:
    return _Row(_BY_NAME[f"rolecall_vllm_{name}"], tuple(f"vllm:{n}" for n in names), join)


_ROWS = (
    _row("requests_running", "num_requests_running"),
    _row("requests_waiting", "num_requests_waiting"),
    _row("kv_cache_used_ratio", "kv_cache_usage_perc", "gpu_cache_usage_perc", join=max),
    _row("preemptions_total", "num_preemptions_total"),
    _row("prompt_tokens_total", "prompt_tokens_total"),
    _row("generated_tokens_total", "generation_tokens_total"),
    _row("prefix_cache_queries_total", "prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    _row("prefix_cache_hits_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    _row("first_token_seconds_total", "time_to_first_token_seconds_sum"),
    _row("first_tokens_total", "time_to_first_token_seconds_count"),
    _row("token_gap_seconds_total", "inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
    _row("token_gaps_total", "inter_token_latency_seconds_count", "time_per_output_token_seconds_count"),
    _row("queue_seconds_total", "request_queue_time_seconds_sum"),
    _row("queue_waits_total", "request_queue_time_seconds_count"),
)
WANTED = frozenset({n for row in _ROWS for n in row.names} | {_SLEEP_STATE, _SUCCESS})


def engine_values(samples: Iterable[Sample], rank: tuple[str, ...]) -> Iterator[MetricValue]:
    """Metric values from one engine's page, without those it lacks. `rank`: node, role, replica, rank."""
    found: dict[str, list[float]] = {}
    finished: dict[str, float] = {}
    for name, labels, value, *_ in samples:
        if not math.isfinite(value):
            continue
        if name == _SUCCESS:
            reason = labels.get("finished_reason", OTHER)
            reason = reason if reason in REASONS else OTHER
            finished[reason] = finished.get(reason, 0.0) + value
        elif name != _SLEEP_STATE or labels.get("sleep_state") == "awake":
            found.setdefault(name, []).append(value)
    for row in _ROWS:
        for name in row.names:
            if name in found:
                yield MetricValue(row.metric, rank, float(row.join(found[name])))
                break
    if awake := found.get(_SLEEP_STATE):
        yield MetricValue(_AWAKE, rank, min(awake))
    for reason, number in finished.items():
        yield MetricValue(_FINISHED, (*rank, reason), number)


class VllmCollector:
    """`engines`: those of this node. A failing one has `up` 0, and each reason is logged once."""

    name = "vllm"

    def __init__(
        self,
        node: NodeId,
        engines: Iterable[EngineEndpoint],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        engine_seconds: float = ENGINE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._node, self._engines = node, list(dict.fromkeys(engines))[:NUM_ENGINES_MAX]
        self._clock, self._poll_seconds = clock or SystemClock(), poll_seconds
        self._scraper = Scraper(node, self.name, WANTED, clock=self._clock, deadline_seconds=engine_seconds)
        self._down: dict[EngineEndpoint, str] = {}  # reasons of the previous poll's failures
        self._failed_at: dict[EngineEndpoint, float] = {}  # time of the last failure

    def read(self, at: float) -> CollectorReading:
        """Never raises CollectorUnavailable: `up` reports it per engine."""
        values: list[MetricValue] = []
        down: dict[EngineEndpoint, str] = {}
        end = self._clock.monotonic() + self._poll_seconds
        for engine in sorted(self._engines, key=lambda e: self._failed_at.get(e, -math.inf)):
            rank = (self._node, engine.role, engine.replica, str(engine.rank))
            why = "not scraped: the other engines used up the time limit" if self._clock.monotonic() >= end else ""
            if not why:
                try:
                    _, samples = self._scraper.scrape(parse_address(engine.url))
                    if not samples:
                        raise CollectorUnavailable(f"{engine.url}: no vLLM metric on this page")
                    values += engine_values(samples, rank)
                    self._failed_at.pop(engine, None)
                except (CollectorUnavailable, ValueError) as e:  # ValueError: an invalid address in the job's settings
                    why, self._failed_at[engine] = str(e), at
            values.append(MetricValue(_UP, rank, float(not why)))
            if why:
                down[engine] = why
                if self._down.get(engine) != why:
                    logger.warning("vLLM of %s: %s", engine.replica, why)
        self._down = down
        return CollectorReading((*values, *self._scraper.counts()))

    def close(self) -> None:
        pass
