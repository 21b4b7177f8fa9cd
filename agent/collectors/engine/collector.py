"""Metrics of inference engines: the pages of this node's vLLM and SGLang servers, labelled with the replica of each.

Names: "Production Metrics" in the documentation of vLLM (0.5 to 0.32) and of SGLang, and the source of SGLang 0.5.10.
SGLang serves them with `--enable-metrics` only. Where a name changed, both are supported; the newer one wins where a
version exports both. The engine's API server renders the page in the loop that serves requests: it is scraped rarely.

SGLang writes its gauges at each prefill, after every `decode_log_interval` decode batches, every 30 s while it is idle,
and not at all while its generation is paused. It counts tokens at each decode batch; earlier versions do so as rarely
as they write the gauges, or at the end of a request."""

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
from rolecall.core.metrics.collectors import ENGINE_METRICS, SGLANG, VLLM
from rolecall.core.metrics.metric import Metric, MetricValue

logger = logging.getLogger(__name__)

NUM_ENGINES_MAX = 64
INTERVAL_SECONDS = 5.0
ENGINE_SECONDS = 1.0
"""Deadline of one engine's page. A server busy with long prompts responds slowly."""
POLL_SECONDS = 4.0
"""For all engines together: less than the time after which a read counts as hung. Engines that failed come last."""

_BY_NAME = {m.name: m for m in ENGINE_METRICS}
_UP = _BY_NAME["rolecall_engine_up"]
_INFO = _BY_NAME["rolecall_engine_info"]
_AWAKE = _BY_NAME["rolecall_engine_awake"]
_FINISHED = _BY_NAME["rolecall_engine_requests_finished_total"]
_SLEEP_STATE, _SUCCESS = "vllm:engine_sleep_state", "vllm:request_success_total"
_REALTIME = "sglang:realtime_tokens_total"
_BY_PRIORITY = frozenset({"sglang:num_running_reqs", "sglang:num_queue_reqs"})
"""With priority scheduling also exported by priority, beside their total, whose `priority` is empty."""
_SAME_REQUESTS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of SGLang's schedulers that process the same requests; each may export them."""
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
    """`names`: of vLLM, then of SGLang, newest first; `join`: combines several values of one page."""

    metric: Metric
    names: tuple[str, ...]
    join: Callable[[Iterable[float]], float]


def _row(name: str, *names: str, join: Callable[[Iterable[float]], float] = sum) -> _Row:
    return _Row(_BY_NAME[f"rolecall_engine_{name}"], names, join)


def _mean(seconds: str, count: str, *histograms: str) -> tuple[_Row, _Row]:
    return _row(seconds, *(f"{h}_sum" for h in histograms)), _row(count, *(f"{h}_count" for h in histograms))


_ROWS = (
    _row("requests_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
    _row("requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    _row(
        "kv_cache_used_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", join=max
    ),
    _row("preemptions_total", "vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    _row("prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    _row("generated_tokens_total", "vllm:generation_tokens_total", _REALTIME, "sglang:generation_tokens_total"),
    _row("prefix_cache_queries_total", "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    _row("prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    *_mean(
        "first_token_seconds_total",
        "first_tokens_total",
        *("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ),
    *_mean(
        "token_gap_seconds_total",
        "token_gaps_total",
        *("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        *("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    ),
    *_mean(
        "queue_seconds_total",
        "queue_waits_total",
        *("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    ),
)
WANTED = frozenset({n for row in _ROWS for n in row.names} | {_SLEEP_STATE, _SUCCESS})


def engine_values(samples: Iterable[Sample], rank: tuple[str, ...]) -> Iterator[MetricValue]:
    """Metric values from one engine's page, without those it lacks. `rank`: node, role, replica, rank."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    finished: dict[str, float] = {}
    server = VLLM
    for name, labels, value, *_ in samples:
        if name.startswith("sglang:"):
            server = SGLANG
        if not math.isfinite(value):
            continue
        if name == _SUCCESS:
            reason = labels.get("finished_reason", OTHER)
            reason = reason if reason in REASONS else OTHER
            finished[reason] = finished.get(reason, 0.0) + value
        elif not (
            (name == _SLEEP_STATE and labels.get("sleep_state") != "awake")
            or (name == _REALTIME and labels.get("mode") != "decode")
            or (name in _BY_PRIORITY and labels.get("priority"))
        ):
            series = found.setdefault(name, {})
            key = frozenset(item for item in labels.items() if item[0] not in _SAME_REQUESTS)
            series[key] = max(series.get(key, value), value)
    yield MetricValue(_INFO, (*rank, server), 1.0)
    for row in _ROWS:
        for name in row.names:
            if name in found:
                yield MetricValue(row.metric, rank, float(row.join(found[name].values())))
                break
    if awake := found.get(_SLEEP_STATE):
        yield MetricValue(_AWAKE, rank, min(awake.values()))
    for reason, number in finished.items():
        yield MetricValue(_FINISHED, (*rank, reason), number)


class EngineCollector:
    """`engines`: those of this node. A failing one has `up` 0, and each reason is logged once."""

    name = "engines"

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
                        raise CollectorUnavailable(f"{engine.url}: no metric of vLLM or SGLang on this page")
                    values += engine_values(samples, rank)
                    self._failed_at.pop(engine, None)
                except (CollectorUnavailable, ValueError) as e:  # ValueError: an invalid address in the job's settings
                    why, self._failed_at[engine] = str(e), at
            values.append(MetricValue(_UP, rank, float(not why)))
            if why:
                down[engine] = why
                if self._down.get(engine) != why:
                    logger.warning("engine of %s: %s", engine.replica, why)
        self._down = down
        return CollectorReading((*values, *self._scraper.counts()))

    def close(self) -> None:
        pass
