"""Rows of the metric catalogue: vLLM engines, by replica.

Of an engine with several cores (data parallel) or models the sum; of the KV cache the fullest. Times are sums, each
with the number of its events: the ratio of their increases is the mean over any window.
"""

from rolecall.core.metrics.metric import RANK, MetricScope, rows

VLLM_METRICS = rows(
    MetricScope.VLLM,
    RANK,
    {
        "vllm_up": "1 if the engine's metrics could be read in the newest poll, 0 if not",
        "vllm_awake": "0 while the engine sleeps (its weights or KV cache are given up), 1 while it does not",
        "vllm_requests_running": "Requests that the engine is processing",
        "vllm_requests_waiting": "Requests waiting in the engine's queue",
        "vllm_requests_finished_total{reason}": "Requests finished, by vLLM's reason: stop, length, abort, error, "
        "repetition, other",
        "vllm_kv_cache_used_ratio": "Blocks of the KV cache that are in use",
        "vllm_preemptions_total": "Requests preempted to free KV cache, which are recomputed",
        "vllm_prompt_tokens_total": "Prompt tokens processed",
        "vllm_generated_tokens_total": "Tokens generated",
        "vllm_prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
        "vllm_prefix_cache_hits_total": "Of these, tokens found",
        "vllm_first_token_seconds_total": "Time from a request's arrival to its first token, summed",
        "vllm_first_tokens_total": "Requests in that sum",
        "vllm_token_gap_seconds_total": "Time between a token and the next of the same request, summed",
        "vllm_token_gaps_total": "Gaps in that sum",
        "vllm_queue_seconds_total": "Time that requests waited before the engine took them, summed",
        "vllm_queue_waits_total": "Requests in that sum",
    },
)
