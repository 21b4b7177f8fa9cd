"""Metrics of vLLM and SGLang servers: names of several versions, several engines on a node, and engines that are gone or
hang.

Pages are written here from the names that vLLM documents ("Production Metrics") and its logger declares, and from those
that SGLang documents under that title and its 0.5.10 declares. No SGLang server was run."""

import logging
from collections.abc import Iterator

import pytest

from rolecall.agent.collectors.engine.collector import ENGINE_SECONDS, POLL_SECONDS, EngineCollector, EngineEndpoint
from rolecall.agent.collectors.runner import HANG_SECONDS
from rolecall.agent.http.exposition import render
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.metric import MetricValue
from tests.agent.page_server import PageServer, http_page

NODE = NodeId("node-1")
RANK = ("node-1", "rollout", "rollout/0", "0")

NEW = """# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 1.2e+04
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="weights_offloaded"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 5000.0
vllm:generation_tokens_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 900.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="of a later version",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.5
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 40.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.0
vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 41.0
vllm:time_per_output_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 9.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.125
"""
"""Two cores behind one server. Both names of the gap between tokens are there, as in the versions of the change."""

OLD = """vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 5.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
vllm:gpu_prefix_cache_queries_total{model_name="m"} 11.0
vllm:time_per_output_token_seconds_count{model_name="m"} 41.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 1.5
"""

SGLANG = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",priority="1",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="1",priority="",tp_rank="1"} 2.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",priority="",tp_rank="2"} 4.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.25
sglang:token_usage{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="2"} 0.75
sglang:num_retracted_requests_total{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",model_name="m",pp_rank="0",tp_rank="0"} 5000.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",model_name="m",pp_rank="1",tp_rank="1"} 5000.0
sglang:realtime_tokens_total{dp_rank="1",mode="decode",model_name="m",pp_rank="0",tp_rank="2"} 500.0
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute",model_name="m",pp_rank="0",tp_rank="0"} 900.0
sglang:queue_time_seconds_count{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 9.0
sglang:queue_time_seconds_sum{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 0.125
sglang:prompt_tokens_total{engine_type="unified",model_name="m",priority="1"} 1000.0
sglang:prompt_tokens_total{engine_type="unified",model_name="m",priority="2"} 200.0
sglang:generation_tokens_total{engine_type="unified",model_name="m"} 4000.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",le="0.1",model_name="m"} 0.0
sglang:time_to_first_token_seconds_count{engine_type="unified",model_name="m"} 10.0
sglang:time_to_first_token_seconds_sum{engine_type="unified",model_name="m"} 2.5
sglang:inter_token_latency_seconds_count{engine_type="unified",model_name="m"} 40.0
sglang:inter_token_latency_seconds_sum{engine_type="unified",model_name="m"} 1.0
"""
"""Two data-parallel schedulers, the first with two pipeline ranks, which run the same requests."""

OLD_SGLANG = """sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
sglang:time_per_output_token_seconds_count{model_name="m"} 41.0
sglang:time_per_output_token_seconds_sum{model_name="m"} 1.5
"""


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer(http_page(NEW))
    yield server
    server.close()


def endpoint(url: str, index: int = 0) -> EngineEndpoint:
    return EngineEndpoint(url, "rollout", f"rollout/{index}", 0)


def by_name(values: tuple[MetricValue, ...], labels: tuple[str, ...] = RANK) -> dict[str, float]:
    """Of one rank, without `rolecall_engine_`."""
    return {
        ":".join((v.metric.name.removeprefix("rolecall_engine_"), *v.labels[4:])): v.value
        for v in values
        if v.labels[:4] == labels
    }


def poll(*endpoints: EngineEndpoint) -> tuple[MetricValue, ...]:
    return EngineCollector(NODE, endpoints).read(0.0).values


def test_an_engine_of_today(server: PageServer) -> None:
    assert by_name(poll(endpoint(server.url))) == {
        "up": 1.0,
        "info:vllm": 1.0,
        "awake": 0.0,  # one of the two sleeps
        "requests_running": 7.0,
        "requests_waiting": 1.0,
        "kv_cache_used_ratio": 0.75,  # the fullest
        "preemptions_total": 2.0,
        "prompt_tokens_total": 1000.0,
        "generated_tokens_total": 5500.0,
        "prefix_cache_queries_total": 900.0,
        "prefix_cache_hits_total": 300.0,
        "requests_finished_total:stop": 8.0,
        "requests_finished_total:length": 2.0,
        "requests_finished_total:other": 1.0,
        "first_tokens_total": 10.0,
        "first_token_seconds_total": 2.5,
        "token_gaps_total": 40.0,
        "token_gap_seconds_total": 1.0,
        "queue_waits_total": 9.0,
        "queue_seconds_total": 0.125,
    }


def test_names_of_older_versions(server: PageServer) -> None:
    server.show(OLD)
    assert by_name(poll(endpoint(server.url))) == {
        "up": 1.0,
        "info:vllm": 1.0,
        "requests_running": 2.0,
        "requests_waiting": 5.0,
        "kv_cache_used_ratio": 0.5,
        "prefix_cache_queries_total": 11.0,
        "token_gaps_total": 41.0,
        "token_gap_seconds_total": 1.5,
    }


def test_an_engine_of_sglang(server: PageServer) -> None:
    server.show(SGLANG)
    assert by_name(poll(endpoint(server.url))) == {
        "up": 1.0,
        "info:sglang": 1.0,
        "requests_running": 7.0,
        "requests_waiting": 1.0,
        "kv_cache_used_ratio": 0.75,
        "preemptions_total": 2.0,
        "prompt_tokens_total": 1200.0,
        "generated_tokens_total": 5500.0,
        "first_tokens_total": 10.0,
        "first_token_seconds_total": 2.5,
        "token_gaps_total": 40.0,
        "token_gap_seconds_total": 1.0,
        "queue_waits_total": 9.0,
        "queue_seconds_total": 0.125,
    }


def test_names_of_older_versions_of_sglang(server: PageServer) -> None:
    server.show(OLD_SGLANG)
    assert by_name(poll(endpoint(server.url))) == {
        "up": 1.0,
        "info:sglang": 1.0,
        "requests_running": 2.0,
        "requests_waiting": 5.0,
        "kv_cache_used_ratio": 0.5,
        "prompt_tokens_total": 8128902.0,
        "generated_tokens_total": 7557572.0,
        "token_gaps_total": 41.0,
        "token_gap_seconds_total": 1.5,
    }


def test_values_go_to_the_replica_that_the_engine_serves(server: PageServer) -> None:
    other = PageServer(http_page(OLD))
    values = poll(endpoint(server.url, 0), endpoint(other.url, 3))
    other.close()
    assert by_name(values)["requests_running"] == 7.0
    assert by_name(values, ("node-1", "rollout", "rollout/3", "0"))["requests_running"] == 2.0
    text = render(values)[0].decode()
    assert 'rolecall_engine_up{node="node-1",rank="0",replica="rollout/3",role="rollout"} 1.0\n' in text


def test_a_missing_engine_affects_no_other_and_is_logged_once(
    server: PageServer, caplog: pytest.LogCaptureFixture
) -> None:
    gone = PageServer()
    gone.close()
    collector = EngineCollector(NODE, [endpoint(gone.url, 0), endpoint(server.url, 1)])
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            values = collector.read(float(at)).values
    assert by_name(values) == {"up": 0.0}
    assert by_name(values, ("node-1", "rollout", "rollout/1", "0"))["up"] == 1.0
    (message,) = caplog.messages
    assert message == f"engine of rollout/0: {gone.url}: Connection refused"


@pytest.mark.parametrize(
    ("page", "reason"),
    [("up 1\n", "no metric of vLLM or SGLang on this page"), ("", "no metric of vLLM or SGLang on this page")],
)
def test_another_server_at_its_port(
    server: PageServer, caplog: pytest.LogCaptureFixture, page: str, reason: str
) -> None:
    server.show(page)
    assert by_name(poll(endpoint(server.url))) == {"up": 0.0}
    assert reason in caplog.text


@pytest.mark.parametrize("url", ["http://192.0.2.3:8000", "nonsense", "http://[", "http://a:b@localhost/"])
def test_an_address_that_is_none(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert by_name(poll(endpoint(url))) == {"up": 0.0}
    assert "engine of rollout/0" in caplog.text


def test_engines_that_hang_take_a_bounded_time_and_are_asked_last(server: PageServer) -> None:
    clock = FakeClock()
    hanging = PageServer(lambda connection: clock.advance(10.0))  # all its time passes, and nothing comes
    engines = [endpoint(f"{hanging.url}?{i}", i) for i in range(4)] + [endpoint(server.url, 9)]
    collector = EngineCollector(NODE, engines, engine_seconds=10.0, poll_seconds=25.0, clock=clock)
    nine = ("node-1", "rollout", "rollout/9", "0")
    first = by_name(collector.read(0.0).values, nine)
    assert first == {"up": 0.0} and len(hanging.heads) == 3  # the time was up before its turn
    second = by_name(collector.read(5.0).values, nine)
    hanging.close()
    assert second["requests_running"] == 7.0
    assert sorted(head.split()[1][-1:] for head in hanging.heads) == [b"0", b"0", b"1", b"1", b"2", b"3"]
    assert POLL_SECONDS + ENGINE_SECONDS <= HANG_SECONDS


def test_malformed_lines_are_counted(server: PageServer) -> None:
    server.show(
        'vllm:num_requests_running{engine="0" 1\nvllm:num_requests_waiting 2\n???\nvllm:prompt_tokens_total NaN\n'
    )
    collector = EngineCollector(NODE, [endpoint(server.url)])
    collector.read(0.0)
    values = collector.read(1.0).values
    assert by_name(values) == {"up": 1.0, "info:vllm": 1.0, "requests_waiting": 2.0}
    counts = {v.metric.name: (v.labels, v.value) for v in values if "probe" in v.metric.name}
    assert counts == {
        "rolecall_probe_lines_malformed_total": (("node-1", "engines"), 4.0),
        "rolecall_probe_series_dropped_total": (("node-1", "engines"), 0.0),
    }


def test_an_engine_named_twice_is_asked_once(server: PageServer) -> None:
    poll(endpoint(server.url), endpoint(server.url))
    assert len(server.heads) == 1


def test_names_are_those_that_the_installed_vllm_declares() -> None:
    """Read from its source: to import it takes ten seconds."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    from rolecall.agent.collectors.engine.collector import _ROWS

    for row in _ROWS:
        name = row.names[0]
        bare = name.removesuffix("_total").removesuffix("_sum").removesuffix("_count")
        assert f'name="{bare}"' in source, name
