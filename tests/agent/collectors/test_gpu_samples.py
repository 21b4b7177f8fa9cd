"""Samples of GPUs: of our NVML reader on the stand-in library and of dcgm-exporter's page, and by a real agent."""

import gzip
import json
import random
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.exporters.collector import DcgmPage
from rolecall.agent.collectors.gpu.collector import GpuCollector
from rolecall.agent.collectors.gpu.samples import GpuSamples
from rolecall.agent.http.server import GZIP_LEVEL
from rolecall.agent.identity import Registration
from rolecall.core.ids import ProcessId
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import GpuSample, SampleBatch
from tests.agent.nvml import NOT_SUPPORTED, STATE_VARIABLE, Machine
from tests.agent.processes import NODE, AgentProcess, Child
from tests.support import eventually

WALL_OFFSET = 1_700_000_000.0


class Source:
    """The newest poll of the probes, and the live ranks."""

    def __init__(self, proc: Path) -> None:
        self.at, self.reading, self.ranks = 0.0, CollectorReading(), list[Registration]()
        self.samples = GpuSamples(NODE, lambda: (self.at, self.reading), lambda: self.ranks, proc)

    def take(self) -> tuple[GpuSample, ...]:
        return self.samples.take(self.at + 0.25, WALL_OFFSET + self.at + 0.25)

    def poll(self, collector: GpuCollector, at: float) -> tuple[GpuSample, ...]:
        self.at, self.reading = at, collector.read(at)
        return self.take()

    def values(self) -> dict[tuple[str, ...], float]:
        return {(v.metric.name.removeprefix("rolecall_gpu_"), *v.labels[1:]): v.value for v in self.samples.values}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    for pid in (10, 11):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python) S 1 {'0 ' * 20}")
    return Source(tmp_path)


def ranks(*pids: int) -> list[Registration]:
    return [
        Registration(
            process=ProcessId(node=NODE, pid=pid, start_ticks=1),
            role="trainer",
            replica="trainer/0",
            rank=n,
            incarnation=1,
        )
        for n, pid in enumerate(pids)
    ]


def test_a_poll_becomes_one_sample_per_gpu_with_its_ranks(source: Source, gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"processes": "10:1000"}, gpu=0)
    machine.set({"processes": "10:1000,11:1000,4000000:1000"}, gpu=1)
    source.ranks = ranks(10, 11)
    source.poll(gpus, 100.0)
    machine.set({"field.269": 2_000_000_000, "field.270": 500_000_000, "field.74": 7_000_000_000}, gpu=1)
    machine.set({"field.197": 2 * 10**12})
    zero, one = source.poll(gpus, 101.0)
    assert (zero.node, zero.gpu, zero.at, zero.wall_at) == (NODE, 0, 101.0, WALL_OFFSET + 101.0)
    assert (zero.pids, one.pids, one.joined_by) == ((10,), (10, 11), "nvml")
    assert one.uuid == "GPU-00000000-0000-0000-0000-000000000001"
    assert (one.utilization_ratio, one.sm_active_ratio, one.tensor_active_ratio) == (0.87, 0.8, 0.55)
    assert (one.memory_used_bytes, one.power_watts, one.sm_clock_hertz) == (60 << 30, 512.3, 1755e6)
    assert (one.temperature_celsius, one.memory_temperature_celsius) == (47, 51)
    assert (one.thermal_throttle_seconds, one.power_throttle_seconds) == (2.5, 7.0)
    assert one.nvlink_transmit_bytes_per_second == pytest.approx(2000 * 2**20, rel=1e-3)
    assert one.pcie_transmit_bytes_per_second == pytest.approx(100 * 2**20, rel=1e-3), "GPM's, not the counter's"
    assert (zero.thermal_throttle_seconds, zero.power_throttle_seconds) == (0, 0)
    assert source.take() == (), "one poll, one sample"


def test_metrics_join_gpus_with_ranks(source: Source, gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"processes": "10:1000,11:1000", "field.270": 3_000_000_000}, gpu=1)
    source.ranks = ranks(10, 11)
    source.poll(gpus, 100.0)
    assert source.values() == {
        ("rank", "1", "trainer", "trainer/0", "0"): 1,
        ("rank", "1", "trainer", "trainer/0", "1"): 1,
        ("thermal_throttle_seconds_total", "0"): 0,
        ("power_throttle_seconds_total", "0"): 0,
        ("thermal_throttle_seconds_total", "1"): 3.0,
        ("power_throttle_seconds_total", "1"): 0,
    }
    source.reading = CollectorReading()  # the probe is down
    assert source.take() == () and source.values() == {}


def test_unknown_values_are_absent_and_a_lost_gpu_has_no_sample(
    source: Source, gpus: GpuCollector, machine: Machine
) -> None:
    machine.set(
        {
            "gpm": 0,
            "field.269": NOT_SUPPORTED,
            "field.270": NOT_SUPPORTED,
            "field.75": 4_000_000_000,
            "field.82": NOT_SUPPORTED,
        }
    )
    (first, _) = source.poll(gpus, 100.0)
    assert not {"tensor_active_ratio", "memory_temperature_celsius"} & first.to_dict().keys()
    assert first.thermal_throttle_seconds == 4.0, "older drivers have one counter"
    machine.set({"lost": 1}, gpu=0)
    assert [s.gpu for s in source.poll(gpus, 101.0)] == [1]


def test_without_gpm_traffic_comes_of_counters(source: Source, gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"gpm": 0})
    (first, _) = source.poll(gpus, 100.0)
    assert "pcie_transmit_bytes_per_second" not in first.to_dict()
    machine.set({"field.197": 10**12 + 6_000_000_000}, gpu=0)
    zero, one = source.poll(gpus, 102.0)
    assert zero.pcie_transmit_bytes_per_second == 3e9
    assert "pcie_transmit_bytes_per_second" not in one.to_dict(), "nothing was received or read"
    machine.set({"field.197": 5}, gpu=0)  # counts anew
    (zero, _) = source.poll(gpus, 103.0)
    assert "pcie_transmit_bytes_per_second" not in zero.to_dict()


def test_dcgm_exporters_page_replaces_nvml_and_environments_identify_the_ranks(source: Source, tmp_path: Path) -> None:
    for pid, local_rank in ((10, 1), (11, 0)):
        (tmp_path / str(pid) / "environ").write_bytes(f"LOCAL_RANK={local_rank}\0".encode())
    source.ranks = ranks(10, 11)
    page = DcgmPage(NODE, NODE)
    series = [
        ("DCGM_FI_DEV_SM_CLOCK", 1410.0),
        ("DCGM_FI_PROF_SM_ACTIVE", 0.5),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS", 2e9),
    ]
    rows = [Sample(name, {"gpu": str(g), "UUID": f"GPU-{g}"}, value + g) for name, value in series for g in (0, 1)]
    source.at, source.reading = 50.0, CollectorReading(tuple(page.values(rows)))
    zero, one = source.take()
    assert (zero.sm_clock_hertz, one.sm_clock_hertz, zero.sm_active_ratio) == (1.41e9, 1.411e9, 0.5)
    assert (zero.thermal_throttle_seconds, zero.uuid) == (2.0, "GPU-0")
    assert (zero.pids, one.pids, zero.joined_by) == ((11,), (10,), "environment")


def test_a_node_of_eight_gpus_fits_into_its_share_of_an_answer(source: Source) -> None:
    """4 KiB a node and second, compressed, of which sixteen ranks and the host need less than half."""
    rng = random.Random(3)
    usual = {"ratio": 0.7, "bytes": 6e10, "watts": 550.0, "celsius": 60.0, "hertz": 1.8e9, "bytes_per_second": 5e9}
    rows = []
    for gpu in range(8):
        uuid = f"GPU-{rng.getrandbits(128):032x}"
        rows.append(MetricValue(BY_NAME["rolecall_gpu_info"], (NODE, str(gpu), uuid, "H100", "580.1"), 1.0))
        for reason in ("sw_thermal", "hw_thermal", "sw_power_cap", "hw_power_brake"):
            labels = (NODE, str(gpu), reason)
            rows.append(MetricValue(BY_NAME["rolecall_gpu_throttle_seconds_total"], labels, rng.uniform(0, 1e5)))
        for metric in GPU_METRICS:
            if metric.source and metric.unit in usual:
                value = usual[metric.unit] * rng.gauss(1.0, 0.05)
                rows.append(MetricValue(metric, (NODE, str(gpu)), value))
    source.reading = CollectorReading(tuple(rows), gpu_pids={g: (10, 11) for g in range(8)})
    source.ranks = ranks(10, 11)
    found = source.take()
    assert len(found) == 8 and all(len(s.to_dict()) == len(GpuSample.__dataclass_fields__) for s in found)
    body = json.dumps([s.to_dict() for s in found], separators=(",", ":")).encode()
    assert len(gzip.compress(body, GZIP_LEVEL)) < 2048


# --- end to end


def test_an_agent_joins_ranks_and_gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real agent on the stand-in library, and two real processes that it shows on the GPUs."""
    node_dir = tmp_path / "node-1"
    node_dir.mkdir()
    machine = Machine(tmp_path / "state", num_gpus=2)
    monkeypatch.setenv(STATE_VARIABLE, str(machine.path))
    off = {name: {"enabled": False} for name in ("kernel_log", "network", "infiniband", "storage", "nccl_ras", "jobs")}
    config = {"gpu": {"library": str(library), "events": False, "interval_seconds": 0.2}, **off}
    (tmp_path / "agent.yaml").write_text(json.dumps(config))
    children = [Child(node_dir), Child(node_dir)]
    try:
        for n, child in enumerate(children):
            machine.set({"processes": f"{child.pid}:1000", "ClockInfo.sm": 1000 + n}, gpu=n)
        agent = AgentProcess(node_dir, "--config", str(tmp_path / "agent.yaml"))
        try:
            for n, child in enumerate(children):
                child.start(f"trainer/{n}")
            seen: dict[int, GpuSample] = {}

            def joined() -> bool:
                batch = SampleBatch.from_dict(agent.get("/v1/samples?since=0")[1])
                seen.update({s.gpu: s for s in batch.gpus})
                return len(seen) == 2 and all(s.pids for s in seen.values())

            eventually(joined, "both GPUs are joined")
            assert [(s.pids, s.sm_clock_hertz) for _, s in sorted(seen.items())] == [
                ((child.pid,), (1000 + n) * 1e6) for n, child in enumerate(children)
            ]
            text = agent.get("/metrics")[1]
            assert 'rolecall_gpu_rank{gpu="1",node="node-1",rank="0",replica="trainer/1",role="trainer"} 1.0' in text
            assert 'rolecall_gpu_thermal_throttle_seconds_total{gpu="0",node="node-1"}' in text
        finally:
            agent.close()
    finally:
        for child in children:
            child.close()
