"""A GPU that is cut into MIG instances, through the real pynvml and our stand-in library."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.gpu.collector import GpuCollector
from rolecall.agent.collectors.gpu.events import GpuEventsCollector
from rolecall.agent.collectors.gpu.mig import INSTANCES_MAX, POLL_SECONDS, MigInstances, profile_of
from rolecall.agent.collectors.gpu.nvml import close_nvml, open_nvml
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import MIG_METRICS
from tests.agent.nvml import Machine, build, shown_by

NODE = NodeId("node-1")
GIB = 1 << 30
LABELS = (
    'gpu="0",UUID="GPU-00000000-0000-0000-0000-000000000000",pci_bus_id="00000000:10:00.0",device="nvidia0",'
    'modelName="NVIDIA Stand-in 80GB"'
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """GPU 0 is cut: `3g.40gb` with two compute instances, `1g.10gb`, and a hole between their numbers. GPU 1 is
    whole."""
    with shown_by(Machine(tmp_path / "state", num_gpus=2)) as shown:
        shown.set(
            {
                "MigMode": 1,
                "error.nvmlDeviceGetUtilizationRates": 3,
                "error.nvmlGpmSampleGet": 3,
                "mig.0": "1:0:2c.3g.40gb",
                "mig.1": "1:1:1c.3g.40gb",
                "mig.4": "9:0:1g.10gb",
                "mig.0.MemoryInfo.total": 40 * GIB,
                "mig.0.MemoryInfo.used": 30 * GIB,
                "mig.0.processes": "4711:0,4712:0",
                "mig.4.MemoryInfo.total": 10 * GIB,
                "mig.4.MemoryInfo.used": GIB,
                "gpm.mig.1.2": 90.0,
                "gpm.mig.1.5": 45.0,
                "gpm.mig.9.2": 5.0,
                "gpm.mig.9.60": 1000.0,
            },
            gpu=0,
        )
        yield shown


def of_instances(reading: CollectorReading) -> dict[tuple[str, ...], float]:
    """(metric, gpu, gpu instance, compute instance, ..) -> value."""
    known = {m.name: m.name.removeprefix("rolecall_gpu_instance_") for m in MIG_METRICS}
    return {(known[v.metric.name], *v.labels[1:]): v.value for v in reading.values if v.metric.name in known}


def test_each_instance_has_series_of_its_own(gpus: GpuCollector) -> None:
    gpus.read(100.0)
    found = of_instances(gpus.read(100.0 + POLL_SECONDS))  # GPM needs two polls
    expected = {
        ("info", "0", "1", "0", "MIG-00000000-0000-0000-0000-000000000000", "3g.40gb"): 1.0,
        ("info", "0", "1", "1", "MIG-00000000-0000-0000-0000-000000000001", "3g.40gb"): 1.0,
        ("info", "0", "9", "0", "MIG-00000000-0000-0000-0000-000000000004", "1g.10gb"): 1.0,
        ("memory_total_bytes", "0", "1", "0"): 40.0 * GIB,
        ("memory_used_bytes", "0", "1", "0"): 30.0 * GIB,
        ("memory_free_bytes", "0", "1", "0"): 10.0 * GIB,
        ("memory_used_bytes", "0", "9", "0"): 1.0 * GIB,
        ("processes", "0", "1", "0"): 2.0,
        ("processes", "0", "9", "0"): 0.0,
        ("sm_active_ratio", "0", "1", "0"): pytest.approx(0.9),
        ("sm_active_ratio", "0", "1", "1"): pytest.approx(0.9),
        ("tensor_active_ratio", "0", "1", "0"): pytest.approx(0.45),
        ("sm_active_ratio", "0", "9", "0"): pytest.approx(0.05),
    }
    assert {key: found.get(key) for key in expected} == expected
    assert {key[1] for key in found} == {"0"}, "GPU 1 is whole"
    assert len(found) == 3 * 5 + 2 * 2 + 1, "and no key that is none of an instance's"


def test_instances_are_read_now_and_then_and_go_when_they_are_destroyed(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.unset("mig.4", gpu=0)
    machine.set({"mig.0.MemoryInfo.used": 0}, gpu=0)
    before = of_instances(gpus.read(101.0))
    assert ("memory_used_bytes", "0", "9", "0") in before
    after = of_instances(gpus.read(100.0 + POLL_SECONDS))
    assert after[("memory_used_bytes", "0", "1", "0")] == 0.0
    assert {key[2] for key in after} == {"1"}
    machine.set({"MigMode": 0}, gpu=0)  # read with the slow calls
    assert of_instances(gpus.read(130.0)) == {}
    machine.set({"MigMode": 1, "mig.4": "9:0:1g.10gb"}, gpu=0)
    assert {key[2] for key in of_instances(gpus.read(150.0))} == {"1", "9"}


def test_handles_of_an_instance_are_released_with_it(library: Path, machine: Machine) -> None:
    nvml = open_nvml(library)
    gpu, mig = nvml.nvmlDeviceGetHandleByIndex(0), MigInstances()
    mig.poll(nvml, gpu, 100.0, enabled=True)
    assert sorted(mig.gpms) == [1, 9]
    machine.unset("mig.4", gpu=0)
    mig.poll(nvml, gpu, 100.0 + POLL_SECONDS, enabled=True)
    assert sorted(mig.gpms) == [1]
    mig.poll(nvml, gpu, 200.0, enabled=False)
    assert (mig.gpms, mig.instances) == ({}, [])
    close_nvml(nvml)


def test_a_failing_instance_is_left_out_and_affects_no_other(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"mig.0.error.nvmlDeviceGetMemoryInfo": 3, "mig.1.error.nvmlDeviceGetName": 999, "gpm": 0}, gpu=0)
    gpus.read(100.0)
    reading = gpus.read(100.0 + POLL_SECONDS)
    found = of_instances(reading)
    assert {(key[2], key[3]) for key in found} == {("1", "0"), ("9", "0")}
    assert {key[0] for key in found} == {"info", "processes"}, "one refusal is enough; and no GPM here"
    assert reading.facts == ()
    up = [v.value for v in reading.values if v.metric.name == "rolecall_gpu_up"]
    assert up == [1.0, 1.0]


def test_an_old_driver_without_the_calls_has_no_instances(tmp_path: Path, machine: Machine) -> None:
    library = build(tmp_path, without=("nvmlDeviceGetMaxMigDeviceCount", "nvmlGpmMigSampleGet"))
    collector = GpuCollector(NODE, library=library)
    reading = collector.read(100.0)
    collector.close()
    assert of_instances(reading) == {}
    assert [v.value for v in reading.values if v.metric.name == "rolecall_gpu_mig_enabled"] == [1.0, 0.0]


def test_labels_are_bounded(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"MaxMigDeviceCount": 100} | {f"mig.{n}": f"{n}:0:1g.10gb" for n in range(100)}, gpu=0)
    found = of_instances(gpus.read(100.0))
    assert len({key[2] for key in found}) == INSTANCES_MAX


def test_a_lost_gpu_loses_its_instances_and_gets_them_back(gpus: GpuCollector, machine: Machine) -> None:
    assert of_instances(gpus.read(100.0))
    machine.set({"lost": 1}, gpu=0)
    assert of_instances(gpus.read(101.0)) == {}
    machine.unset("lost", gpu=0)
    assert of_instances(gpus.read(110.0))


def test_dcgm_names_an_instance_as_its_exporter_does(gpus: GpuCollector) -> None:
    gpus.read(100.0)
    text = gpus.read(100.0 + POLL_SECONDS).dcgm()
    lines = text.splitlines()
    tail = 'hostname="node-1",DCGM_FI_DRIVER_VERSION="575.57.08"'
    assert f'DCGM_FI_DEV_FB_USED{{{LABELS},GPU_I_PROFILE="3g.40gb",GPU_I_ID="1",{tail}}} 30720' in lines
    assert f'DCGM_FI_PROF_SM_ACTIVE{{{LABELS},GPU_I_PROFILE="1g.10gb",GPU_I_ID="9",{tail}}} 0.05' in lines
    assert f"DCGM_FI_DEV_GPU_TEMP{{{LABELS},{tail}}} 47" in lines, "what the whole has stays the whole's"
    memory = [line for line in lines if line.startswith("DCGM_FI_DEV_FB_USED{")]
    assert len(memory) == 3 and sum('gpu="0"' in line for line in memory) == 2, (
        "once an instance, and never the whole too"
    )
    xids = [line for line in lines if line.startswith("DCGM_FI_DEV_XID_ERRORS{")]
    assert len(xids) == 2 and not any("GPU_I_ID" in line for line in xids)


def test_an_xid_of_an_instance_names_it(library: Path, machine: Machine) -> None:
    collector = GpuEventsCollector(library=library, wait_seconds=0.02)
    collector.read(100.0)
    machine.set({"event_gpu_instance": 9, "event_compute_instance": 0}, gpu=0)
    machine.event(0, 94)
    machine.event(1, 94)
    facts = {f.detail["gpu"]: f.detail for n in range(5) for f in collector.read(101.0 + n).facts}
    collector.close()
    assert (facts["0"]["gpu_instance"], facts["0"]["compute_instance"]) == ("9", "0")
    assert "gpu_instance" not in facts["1"], "of the whole"


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "1g.10gb+me"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("", ""),
    ],
)
def test_profiles_by_name(name: str, profile: str) -> None:
    assert profile_of(name) == profile
