"""`/metrics`, letter by letter, against a file that is reviewed as code.

Write it anew: python -m tests.agent.http.test_exposition > tests/agent/golden_metrics.txt
"""

import os
from pathlib import Path

from rolecall import __version__
from rolecall.agent.http.exposition import agent_value, all_values, build_info, render
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import HostSample, ProcessSample

GOLDEN = Path(__file__).parents[1] / "golden_metrics.txt"
NODE = NodeId("node-1")


def _text() -> str:
    process = ProcessSample(
        process=ProcessId(node=NODE, pid=5, start_ticks=50),
        role="rollout",
        replica="rollout/1",
        rank=0,
        incarnation=2,
        at=100.0,
        wall_at=1_700_000_100.0,
        alive=True,
        page_ok=True,
        phase="generate",
        phase_since=90.0,
        progress=12,
        progress_at=99.5,
        tokens=640,
        busy_seconds=1.25,
        work_units=12,
        reward=0.5,
        proc_state="S",
        cpu_seconds=3.5,
    )
    host = HostSample(
        node=NODE,
        at=100.0,
        wall_at=1_700_000_100.0,
        cpu_count=2,
        cpu_busy_seconds=1234.5,
        load_1m=0.5,
        memory_total_bytes=8 << 30,
        memory_available_bytes=4 << 30,
    )
    own = [build_info(NODE), agent_value("agent_events_total", 3, NODE, "exited")]
    return render(all_values([process], [host], own))[0].decode()


def _golden() -> str:
    return _text().replace(f'version="{__version__}"', 'version="VERSION"')


def test_the_exposition_is_as_it_was() -> None:
    assert _golden() == GOLDEN.read_text()


def test_unknown_values_are_absent_and_times_are_wall_times() -> None:
    lines = _text().splitlines()
    assert not [line for line in lines if line.startswith("rolecall_train_loss")]
    [since] = [line for line in lines if line.startswith("rolecall_process_phase_start_timestamp_seconds{")]
    assert float(since.split()[-1]) == 1_700_000_090.0


def test_a_phase_of_a_jobs_own_is_no_label() -> None:
    """A page may contain anything, a label is of a closed set."""
    process = ProcessId(node=NODE, pid=5, start_ticks=50)
    who = {"process": process, "role": "trainer", "replica": "trainer/0", "rank": 0, "incarnation": 1}
    odd = ProcessSample(**who, at=1.0, wall_at=2.0, alive=True, page_ok=True, phase="prompt 17 of the batch")
    text = render(all_values([odd], [], []))[0].decode()
    assert "prompt 17" not in text and 'phase="other",rank="0",' in text


def test_one_name_that_is_no_text_spoils_no_page() -> None:
    """Names of interfaces are bytes, and Python shows what is no UTF-8 as half of a pair."""
    nic = MetricValue(BY_NAME["rolecall_nic_up"], ("node-1", os.fsdecode(b"eth\xff")), 1.0)
    assert b'interface="eth?"' in render([nic])[0]


def test_prometheus_itself_can_read_it() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {f.name: f for f in text_string_to_metric_families(_text())}
    tokens = families["rolecall_process_tokens"]
    assert tokens.type == "counter"
    [sample] = tokens.samples
    assert sample.value == 640
    assert sample.labels == {"node": "node-1", "role": "rollout", "replica": "rollout/1", "rank": "0"}


if __name__ == "__main__":
    print(_golden(), end="")
