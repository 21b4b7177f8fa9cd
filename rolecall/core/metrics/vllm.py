"""Rows of the metric catalogue: vLLM engines, by replica.

Of an engine with several cores (data parallel) or models the sum; of the KV cache the fullest. Times are sums, with the
number of what was timed beside them: their ratio of growth is the mean over any window.
"""

from rolecall.core.metrics.metric import RANK, Metric, MetricScope, MetricType

_G, _C = MetricType.GAUGE, MetricType.COUNTER


def _vllm(name: str, type_: MetricType, unit: str, help_: str, *labels: str) -> Metric:
    full = f"rolecall_vllm_{name}"
    return Metric(name=full, type=type_, unit=unit, help=help_, labels=(*RANK, *labels), subject=MetricScope.VLLM)


VLLM_METRICS: tuple[Metric, ...] = (
    _vllm("up", _G, "", "1 if the engine's metrics could be read in the newest poll, 0 if not"),
    _vllm("awake", _G, "", "0 while the engine sleeps (its weights or KV cache are given up), 1 while it does not"),
    _vllm("requests_running", _G, "", "Requests that the engine is processing"),
    _vllm("requests_waiting", _G, "", "Requests waiting in the engine's queue"),
    _vllm(
        "requests_finished_total",
        _C,
        "",
        "Requests finished, by vLLM's reason: stop, length, abort, error, repetition, other",
        "reason",
    ),
    _vllm("kv_cache_used_ratio", _G, "ratio", "Blocks of the KV cache that are in use"),
    _vllm("preemptions_total", _C, "", "Requests preempted to free KV cache, which are recomputed"),
    _vllm("prompt_tokens_total", _C, "", "Prompt tokens processed"),
    _vllm("generated_tokens_total", _C, "", "Tokens generated"),
    _vllm("prefix_cache_queries_total", _C, "", "Prompt tokens looked up in the prefix cache"),
    _vllm("prefix_cache_hits_total", _C, "", "Of these, tokens found"),
    _vllm("first_token_seconds_total", _C, "seconds", "Time from a request's arrival to its first token, summed"),
    _vllm("first_tokens_total", _C, "", "Requests in that sum"),
    _vllm("token_gap_seconds_total", _C, "seconds", "Time between a token and the next of the same request, summed"),
    _vllm("token_gaps_total", _C, "", "Gaps in that sum"),
    _vllm("queue_seconds_total", _C, "seconds", "Time that requests waited before the engine took them, summed"),
    _vllm("queue_waits_total", _C, "", "Requests in that sum"),
)
