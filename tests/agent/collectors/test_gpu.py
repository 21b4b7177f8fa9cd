"""GPUs through the real pynvml and our stand-in library: lost, throttled, hanging, old drivers, XIDs."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.agent.collectors.gpu.collector import GpuCollector
from rolecall.agent.collectors.gpu.events import GpuEventsCollector
from rolecall.agent.collectors.gpu.faults import Conditions
from rolecall.agent.collectors.gpu.queries import fabric_numbers
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.telemetry import AgentEventKind
from tests.agent.nvml import NOT_SUPPORTED, NUM_LINKS, Machine, build
from tests.agent.nvml.record import record

NODE = NodeId("node-1")
OLD_DRIVER = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlGpmQueryDeviceSupport",
)


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), without=OLD_DRIVER)


@pytest.fixture
def events(library: Path, machine: Machine) -> Iterator[GpuEventsCollector]:
    collector = GpuEventsCollector(library=library, wait_seconds=0.02)
    yield collector
    collector.close()


def value(reading: CollectorReading, name: str, *labels: str) -> float | None:
    """Of `rolecall_gpu_<name>` of GPU `labels[0]`; None: there is no such series."""
    found = [v.value for v in reading.values if v.metric.name == f"rolecall_gpu_{name}" and v.labels == (NODE, *labels)]
    assert len(found) <= 1, "one series twice"
    return found[0] if found else None


def reported(reading: CollectorReading) -> list[tuple[AgentEventKind, str]]:
    return [(f.kind, f.detail["gpu"]) for f in reading.facts]


# --- numbers


def test_a_healthy_gpu_is_read_in_base_units(gpus: GpuCollector) -> None:
    gpus.read(100.0)
    reading = gpus.read(101.0)  # GPM needs two polls
    expected = {
        ("up",): 1.0,
        ("utilization_ratio",): 0.87,
        ("memory_used_bytes",): 60 << 30,
        ("memory_free_bytes",): 19 << 30,
        ("memory_reserved_bytes",): 1 << 30,
        ("power_watts",): pytest.approx(512.345),
        ("power_limit_watts",): 700.0,
        ("energy_joules_total",): pytest.approx(123456789.0),
        ("temperature_celsius",): 47,
        ("memory_temperature_celsius",): 51,
        ("sm_clock_hertz",): 1755e6,
        ("pcie_link_width",): 16,
        ("pcie_transmit_bytes_total",): 1e12,
        ("nvlinks",): NUM_LINKS,
        ("nvlinks_active",): NUM_LINKS,
        ("nvlink_transmit_bytes_total",): NUM_LINKS << 30,
        ("nvlink_errors_total", "crc_flit"): 0,
        ("ecc_lifetime_errors_total", "corrected"): 3,
        ("fabric_state", "completed"): 1,
        ("fabric_fault", "degraded_bandwidth"): 0,
        ("recovery_action", "none"): 1,
        ("throttle_active", "hw_thermal"): 0,
        ("sm_active_ratio",): pytest.approx(0.8),
        ("tensor_active_ratio",): pytest.approx(0.55),
        ("nvlink_transmit_bytes_per_second",): 2000 * 2**20,
        ("info", "GPU-00000000-0000-0000-0000-000000000001", "NVIDIA Stand-in 80GB", "575.57.08"): 1,
    }
    assert {key: value(reading, key[0], "1", *key[1:]) for key in expected} == expected
    assert reading.facts == ()
    assert value(reading, "nvlink_down", "1", "0") is None


def test_every_number_has_a_metric_with_these_labels(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"NvLinkState.2": 0, "NvLinkErrorCounter.3.2": 5}, gpu=0)
    gpus.read(100.0)
    for v in gpus.read(101.0).values:
        assert v.metric in GPU_METRICS
        assert len(v.labels) == len(v.metric.labels)


def test_dcgm_lines_come_with_the_reading(library: Path, machine: Machine) -> None:
    collector = GpuCollector(NODE, library=library, last_xid=lambda gpu: 13 * gpu)
    lines = collector.read(100.0).dcgm().splitlines()
    collector.close()
    labels = (
        'gpu="1",UUID="GPU-00000000-0000-0000-0000-000000000001",pci_bus_id="00000000:1A:00.0",device="nvidia1",'
        'modelName="NVIDIA Stand-in 80GB",hostname="node-1",DCGM_FI_DRIVER_VERSION="575.57.08"'
    )
    assert f"DCGM_FI_DEV_POWER_USAGE{{{labels}}} 512.345" in lines
    assert f'DCGM_FI_DEV_XID_ERRORS{{{labels},err_code="13",err_msg="graphics engine exception"}} 13' in lines


def test_dcgm_lines_are_valid_for_prometheus(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"NvLinkErrorCounter.3.2": 5}, gpu=0)
    gpus.read(100.0)
    text = gpus.read(101.0).dcgm()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert len(samples) == len([line for line in text.splitlines() if not line.startswith("#")])
    assert {s.labels["gpu"] for s in samples} == {"0", "1"}


def test_slow_calls_are_made_now_and_then_and_their_numbers_stay(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"PcieReplayCounter": 9, "PowerUsage": 1000})
    soon = gpus.read(101.0)
    assert (value(soon, "power_watts", "0"), value(soon, "pcie_replays_total", "0")) == (1.0, 0)
    assert value(gpus.read(110.0), "pcie_replays_total", "0") == 9


def test_slow_calls_of_several_gpus_are_made_in_different_polls(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"PcieReplayCounter": 9})
    renewed = [{g for g in "01" if value(gpus.read(100.0 + s), "pcie_replays_total", g) == 9} for s in (5, 10, 15)]
    assert renewed == [{"1"}, {"0", "1"}, {"0", "1"}]


def test_values_of_calls_that_answer_the_same_are_the_same_objects(gpus: GpuCollector, machine: Machine) -> None:
    first = gpus.read(100.0)
    before = {id(v) for v in first.values}
    machine.set({"PowerUsage": 1000, "gpm.2": 1.0})
    after = gpus.read(101.0)
    made = {v.metric.name for v in after.values if id(v) not in before}
    assert value(after, "power_watts", "0") == 1.0 and value(after, "sm_active_ratio", "0") == 0.01
    assert "rolecall_gpu_power_watts" in made and "rolecall_gpu_sm_active_ratio" in made
    assert not made & {"rolecall_gpu_throttle_active", "rolecall_gpu_fabric_fault", "rolecall_gpu_ecc_errors_total"}


def test_no_number_comes_from_two_calls(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    series = [(v.metric.name, v.labels) for v in gpus.read(101.0).values]
    assert len(series) == len(set(series))


def test_throttling_is_a_flag_and_a_time(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"CurrentClocksEventReasons": 0x44, "field.270": 3_500_000_000}, gpu=1)
    reading = gpus.read(100.0)
    assert value(reading, "throttle_active", "1", "hw_thermal") == 1
    assert value(reading, "throttle_active", "1", "sw_power_cap") == 1
    assert value(reading, "throttle_active", "0", "hw_thermal") == 0
    assert value(reading, "throttle_seconds_total", "1", "hw_thermal") == pytest.approx(3.5)


def test_processes_are_bounded(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"processes": ",".join(f"{pid}:{pid << 20}" for pid in range(1, 101))}, gpu=1)
    reading = gpus.read(100.0)
    assert value(reading, "processes", "1") == 100
    assert reading.gpu_pids == {0: (), 1: tuple(range(1, 65))}


# --- what a GPU or driver does not know


def test_unsupported_calls_are_skipped_for_that_gpu_and_logged_once(
    gpus: GpuCollector, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    machine.unset("PowerUsage")
    machine.set({"PowerUsage": 250_000}, gpu=1)
    machine.set({"field.82": NOT_SUPPORTED}, gpu=0)
    for at in (100.0, 101.0, 102.0):
        reading = gpus.read(at)
    assert value(reading, "power_watts", "0") is None
    assert value(reading, "power_watts", "1") == 250.0
    assert value(reading, "memory_temperature_celsius", "0") is None
    assert value(reading, "memory_temperature_celsius", "1") == 51
    assert (value(reading, "up", "0"), reading.facts) == (1, ())
    messages = [r.message for r in caplog.records if "nvmlDeviceGetPowerUsage" in r.message]
    assert messages == ["GPU 0: nvmlDeviceGetPowerUsage skipped: Not Supported"]
    skipped_0, skipped_1 = value(reading, "calls_unsupported", "0"), value(reading, "calls_unsupported", "1")
    assert skipped_0 is not None and skipped_1 is not None and skipped_0 == skipped_1 + 2


def test_a_field_that_is_unknown_number_gives_none(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"field.198": (1 << 64) - 1})
    assert value(gpus.read(100.0), "pcie_receive_bytes_total", "0") is None


def test_an_old_driver_without_the_newest_symbols(old_library: Path, machine: Machine) -> None:
    collector = GpuCollector(NODE, library=old_library)
    machine.set({"CurrentClocksThrottleReasons": 0x4})
    collector.read(100.0)
    reading = collector.read(101.0)
    collector.close()
    assert value(reading, "memory_used_bytes", "0") == 61 << 30  # what is reserved counts as used there
    assert value(reading, "memory_reserved_bytes", "0") is None
    assert value(reading, "temperature_celsius", "0") == 47
    assert value(reading, "throttle_active", "0", "sw_power_cap") == 1
    assert value(reading, "remapped_rows_pending", "0") is None
    assert value(reading, "sm_active_ratio", "0") is None
    assert value(reading, "power_watts", "0") == pytest.approx(512.345)
    assert reading.facts == ()


def test_a_driver_of_the_structures_before(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"GpuFabricInfoV.newest": 2, "GpuFabricInfoV.healthMask": 1})
    reading = gpus.read(100.0)
    assert value(reading, "fabric_state", "0", "completed") == 1
    assert value(reading, "fabric_fault", "0", "degraded_bandwidth") == 1


def test_an_nvidia_ml_py_older_than_a_call(
    gpus: GpuCollector, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvmlDeviceGetTemperatureV", "c_nvmlGpuFabricInfo_v3_t", "NVMLLibraryMismatchError"):
        monkeypatch.delattr(f"pynvml.{name}")
    reading = gpus.read(100.0)
    assert value(reading, "temperature_celsius", "0") == 47
    assert value(reading, "fabric_state", "0", "completed") == 1


def test_gpm_numbers_fail_independently(gpus: GpuCollector, machine: Machine) -> None:
    """Each has a return code: a failed one must not return uninitialized memory."""
    machine.unset("gpm.5")
    assert value(gpus.read(100.0), "sm_active_ratio", "0") is None
    reading = gpus.read(101.0)
    assert value(reading, "tensor_active_ratio", "0") is None
    assert value(reading, "sm_active_ratio", "0") == pytest.approx(0.8)


def test_gpm_asked_too_soon_keeps_its_numbers(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    gpus.read(101.0)
    machine.set({"gpm.2": 10.0})
    assert value(gpus.read(101.05), "sm_active_ratio", "0") == pytest.approx(0.8)
    assert value(gpus.read(102.0), "sm_active_ratio", "0") == pytest.approx(0.1)


def test_a_mig_parent_is_shown_without_its_activity(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"MigMode": 1, "error.nvmlDeviceGetUtilizationRates": 3, "error.nvmlGpmSampleGet": 3}, gpu=0)
    gpus.read(100.0)
    reading = gpus.read(101.0)
    assert (value(reading, "mig_enabled", "0"), value(reading, "mig_enabled", "1")) == (1, 0)
    assert value(reading, "utilization_ratio", "0") is None
    assert value(reading, "power_watts", "0") == pytest.approx(512.345)
    assert reading.facts == ()


def test_an_error_of_one_call_is_counted_and_retried(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"error.nvmlDeviceGetPowerUsage": 999}, gpu=0)
    gpus.read(100.0)
    reading = gpus.read(101.0)
    assert value(reading, "power_watts", "0") is None
    assert value(reading, "call_errors_total", "0", "unknown") == 2
    assert value(reading, "up", "0") == 1
    machine.unset("error.nvmlDeviceGetPowerUsage", gpu=0)
    assert value(gpus.read(102.0), "power_watts", "0") == pytest.approx(512.345)


# --- lost, and back


def test_a_lost_gpu_is_one_fact_and_the_others_continue(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"lost": 1}, gpu=0)
    readings = [gpus.read(101.0 + s) for s in range(20)]
    assert [reported(r) for r in readings if r.facts] == [[(AgentEventKind.GPU_LOST, "0")]]
    (fact,) = readings[0].facts
    assert fact.detail == {
        "gpu": "0",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "pci": "0000:10:00",
        "reason": "GPU is lost",
    }
    last = readings[-1]
    assert (value(last, "up", "0"), value(last, "up", "1")) == (0, 1)
    assert value(last, "power_watts", "0") is None
    assert value(last, "power_watts", "1") == pytest.approx(512.345)
    assert 'gpu="0"' not in last.dcgm() and 'gpu="1"' in last.dcgm()


def test_a_gpu_that_comes_back_is_reported_once(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"lost": 1}, gpu=0)
    gpus.read(101.0)
    machine.set({"lost": 0}, gpu=0)
    readings = [gpus.read(102.0 + s) for s in range(20)]
    assert [reported(r) for r in readings if r.facts] == [[(AgentEventKind.GPU_RECOVERED, "0")]]
    assert value(readings[-1], "power_watts", "0") == pytest.approx(512.345)


def test_a_gpu_that_was_lost_before_the_agent_came(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"lost": 1}, gpu=1)
    readings = [gpus.read(100.0 + s) for s in range(10)]
    assert [reported(r) for r in readings if r.facts] == [[(AgentEventKind.GPU_LOST, "1")]]
    machine.set({"lost": 0}, gpu=1)
    assert reported(gpus.read(120.0)) == [(AgentEventKind.GPU_RECOVERED, "1")]


@pytest.mark.parametrize("code", [999, 17], ids=["unknown error", "operating system"])
def test_a_gpu_on_which_every_call_fails_is_lost_whatever_the_code(
    gpus: GpuCollector, machine: Machine, code: int
) -> None:
    gpus.read(100.0)
    names = ["UtilizationRates", "MemoryInfo_v2", "PowerUsage", "TotalEnergyConsumption", "TemperatureV", "ClockInfo"]
    names += ["CurrentClocksEventReasons", "FieldValues"]
    machine.set({f"error.nvmlDeviceGet{name}": code for name in names} | {"error.nvmlGpmSampleGet": code}, gpu=0)
    assert reported(gpus.read(101.0)) == [(AgentEventKind.GPU_LOST, "0")]


# --- faults


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"RemappedRows.pending": 1}, {"what": "remapped_rows", "state": "pending"}),
        ({"RemappedRows.failure": 1}, {"what": "remapped_rows", "state": "failed"}),
        ({"SramEccErrorStatus.threshold": 1}, {"what": "ecc", "state": "sram_threshold_exceeded"}),
        ({"TotalEccErrors.1.0": 2}, {"what": "ecc", "state": "uncorrected", "count": "2"}),
        ({"NvLinkState.7": 0}, {"what": "nvlink", "state": "down", "link": "7"}),
        ({"GpuFabricInfoV.healthMask": 1}, {"what": "fabric", "state": "degraded_bandwidth"}),
        ({"GpuFabricInfoV.healthMask": 5 << 8}, {"what": "fabric", "state": "incorrect_configuration"}),
        ({"GpuFabricInfoV.status": 999}, {"what": "fabric", "state": "registration"}),
    ],
)
def test_a_fault_that_begins_is_reported_once(
    gpus: GpuCollector, machine: Machine, changes: dict[str, object], fault: dict[str, str]
) -> None:
    gpus.read(100.0)
    machine.set(changes, gpu=1)
    facts = [f for s in range(1, 30) for f in gpus.read(100.0 + s).facts]
    assert [f.kind for f in facts] == [AgentEventKind.GPU_FAULT]
    assert {k: v for k, v in facts[0].detail.items() if k not in ("uuid", "pci", "advice")} == {"gpu": "1", **fault}
    assert facts[0].detail["advice"]


def test_a_gpu_recovers_when_no_condition_is_active(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"RemappedRows.pending": 1, "field.230": 1}, gpu=1)
    assert {f.detail["what"] for f in gpus.read(100.0).facts} == {"remapped_rows", "recovery_action"}
    machine.set({"RemappedRows.pending": 0}, gpu=1)
    assert reported(gpus.read(115.0)) == []
    machine.set({"field.230": 0}, gpu=1)
    assert reported(gpus.read(116.0)) == [(AgentEventKind.GPU_RECOVERED, "1")]
    assert reported(gpus.read(130.0)) == []


def test_a_call_that_fails_temporarily_neither_ends_a_fault_nor_repeats_it(
    gpus: GpuCollector, machine: Machine
) -> None:
    machine.set({"RemappedRows.pending": 1}, gpu=1)
    assert reported(gpus.read(100.0)) == [(AgentEventKind.GPU_FAULT, "1")]
    for at, code in ((120.0, 999), (140.0, 0)):
        machine.set({"error.nvmlDeviceGetRemappedRows": code}, gpu=1)
        assert reported(gpus.read(at)) == []


def test_a_link_with_errors_has_a_series_and_the_sum_counts_it(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"NvLinkErrorCounter.3.2": 5, "NvLinkErrorCounter.4.2": 2}, gpu=0)
    reading = gpus.read(100.0)
    assert value(reading, "nvlink_errors_total", "0", "crc_flit") == 7
    assert value(reading, "nvlink_link_errors_total", "0", "3", "crc_flit") == 5
    assert value(reading, "nvlink_link_errors_total", "0", "5", "crc_flit") is None


def test_nvlink_5_counters_replace_the_older_ones(gpus: GpuCollector, machine: Machine) -> None:
    machine.set({"field.202": 1000, "field.221.3": 4, "field.221": 0})
    reading = gpus.read(100.0)
    assert value(reading, "nvlink_transmit_bytes_total", "0") == 1000 * NUM_LINKS
    assert value(reading, "nvlink_link_errors_total", "0", "3", "symbol") == 4


def test_the_first_poll_reports_conditions_not_counts_nor_unconnected_links() -> None:
    numbers = {
        ("remapped_rows_pending",): 1.0,
        ("ecc_errors_total", "uncorrected"): 5.0,
        ("nvlink_down", "17"): 1.0,
    }
    conditions = Conditions()
    found, _ = conditions.update(numbers)
    assert [(f["what"], f["state"]) for f in found] == [("remapped_rows", "pending")]
    assert conditions.update(numbers) == ([], False)
    assert conditions.update({("remapped_rows_pending",): 0.0}) == ([], True)


def test_a_link_that_goes_down_keeps_its_counts(gpus: GpuCollector, machine: Machine) -> None:
    """Else the sum would fall, which Prometheus takes for a counter that started anew."""
    gpus.read(100.0)
    machine.set({"NvLinkState.2": 0, "field.138.2": NOT_SUPPORTED}, gpu=0)
    reading = gpus.read(120.0)
    assert value(reading, "nvlinks_active", "0") == NUM_LINKS - 1
    assert value(reading, "nvlink_down", "0", "2") == 1
    assert value(reading, "nvlink_transmit_bytes_total", "0") == NUM_LINKS << 30


def test_a_fabric_that_a_gpu_has_not_is_no_fault() -> None:
    assert fabric_numbers(0, 999, 0xFFFFFFFF) == {("fabric_state", "not_supported"): 1.0}
    in_progress = fabric_numbers(2, 0, 0)
    assert in_progress == {("fabric_state", "in_progress"): 1.0}


# --- NVML itself


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "not loaded"), (18, "differ in version"), (12, "no libnvidia-ml"), (999, "initialization failed")],
)
def test_a_missing_driver_is_reported(
    gpus: GpuCollector, events: GpuEventsCollector, machine: Machine, code: int, reason: str
) -> None:
    machine.set({"init": code})
    with pytest.raises(CollectorUnavailable, match=reason):
        gpus.read(100.0)
    with pytest.raises(CollectorUnavailable, match=reason):
        events.read(100.0)
    machine.set({"init": 0})
    assert value(gpus.read(105.0), "up", "0") == 1


def test_a_missing_library_is_named(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match=r"nowhere\.so"):
        GpuCollector(NODE, library=tmp_path / "nowhere.so").read(100.0)


def test_a_driver_that_goes_away_and_comes_back_with_one_gpu_less(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"error.nvmlDeviceGetPowerUsage": 9, "init": 9})
    with pytest.raises(CollectorUnavailable, match="was unloaded"):
        gpus.read(101.0)
    with pytest.raises(CollectorUnavailable, match="not loaded"):
        gpus.read(106.0)
    machine.set({"error.nvmlDeviceGetPowerUsage": 0, "init": 0, "count": 1})
    reading = gpus.read(111.0)
    assert reported(reading) == [(AgentEventKind.GPU_LOST, "1")]
    assert value(reading, "up", "0") == 1
    assert gpus.read(112.0).facts == ()


def test_a_call_that_hangs_holds_its_own_thread_and_names_the_gpu(gpus: GpuCollector, machine: Machine) -> None:
    gpus.read(100.0)
    machine.set({"hang": 1}, gpu=1)
    readings: list[CollectorReading] = []
    thread = threading.Thread(target=lambda: readings.append(gpus.read(101.0)), daemon=True)
    thread.start()
    try:
        until(lambda: gpus.current_device == "GPU 1")
        assert not readings
    finally:
        machine.set({"hang": 0}, gpu=1)
        thread.join(30)
    assert value(readings[0], "power_watts", "1") == pytest.approx(512.345)


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread, at most half a minute."""
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come")


# --- events


def xids(facts: tuple[Fact, ...]) -> list[tuple[str, str]]:
    return [(f.detail["gpu"], f.detail["xid"]) for f in facts if f.kind is AgentEventKind.XID]


def test_an_xid_is_a_fact_of_the_read_that_waits(library: Path, machine: Machine) -> None:
    """The event comes while the read waits, and ends it: it would wait for a minute."""
    collector = GpuEventsCollector(library=library, wait_seconds=60.0)
    machine.event(gpu=0, data=63)  # there before the collector: none of its events
    readings: list[CollectorReading] = []
    thread = threading.Thread(target=lambda: readings.append(collector.read(100.0)), daemon=True)
    thread.start()
    try:
        until(lambda: bool(collector._gpus))  # the set is made
    finally:
        machine.event(gpu=1, data=94)
        thread.join(30)
    collector.close()
    (fact,) = readings[0].facts
    assert fact.kind is AgentEventKind.XID
    assert fact.detail == {
        "xid": "94",
        "gpu": "1",
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
        "pci": "0000:1a:00",
        "mnemonic": "ROBUST_CHANNEL_CONTAINED_ERROR",
        "action": "RESTART_APP",
        "source": "nvml",
    }


def test_the_same_xid_twice_is_reported_twice(events: GpuEventsCollector, machine: Machine) -> None:
    events.read(100.0)
    for at in (101.0, 102.0):
        machine.event(gpu=1, data=31)
        reading = events.read(at)
        assert xids(reading.facts) == [("1", "31")]
    assert (events.last_xid(1), events.last_xid(0)) == (31, 0)
    assert xids(events.read(103.0).facts) == []


def test_an_xid_that_another_source_reported_is_not_reported_again(library: Path, machine: Machine) -> None:
    merger = XidMerger()
    collector = GpuEventsCollector(library=library, wait_seconds=0.02, merger=merger)
    collector.read(100.0)
    merger.merge(101.0, 0, 79, "kernel")
    machine.event(gpu=0, data=79)
    reading = collector.read(101.0)
    collector.close()
    assert reading.facts == ()
    assert not merger.merge(101.0, 0, 79, "another source"), "it was reported under this GPU and code"
    assert collector.last_xid(0) == 79


def test_the_kernel_logs_merger_fits(library: Path, machine: Machine) -> None:
    merger = XidMerger()
    collector = GpuEventsCollector(library=library, wait_seconds=0.02, merger=merger)
    collector.read(100.0)
    merger.merge(101.0, 0, 79, "kernel")
    for data in (79, 94):
        machine.event(gpu=0, data=data)
        collector.read(101.5)
    collector.close()
    assert {key: count.number for key, count in merger.counts().items()} == {("0", 79): 1, ("0", 94): 1}


def test_the_drivers_recovery_action_is_reported_once_by_the_first_source(
    library: Path, events: GpuEventsCollector, machine: Machine
) -> None:
    gpus = GpuCollector(NODE, library=library, reported_action=events.reported_action)
    events.read(100.0)
    gpus.read(100.0)
    machine.set({"field.230": 4}, gpu=1)
    machine.event(gpu=1, data=0, event_type=0x8000)
    (fact,) = events.read(100.1).facts
    assert fact.kind is AgentEventKind.GPU_FAULT
    assert (fact.detail["gpu"], fact.detail["what"], fact.detail["action"]) == (
        "1",
        "recovery_action",
        "drain_and_reset",
    )
    assert gpus.read(101.0).facts == ()
    machine.set({"field.230": 2}, gpu=1)  # with no event, as older drivers do
    assert events.read(101.1).facts == ()
    assert [f.detail["action"] for f in gpus.read(102.0).facts] == ["node_reboot"]
    machine.set({"field.230": 0}, gpu=1)
    assert reported(gpus.read(103.0)) == [(AgentEventKind.GPU_RECOVERED, "1")]
    gpus.close()


def test_a_gpu_on_which_calls_hang_does_not_block_the_others(events: GpuEventsCollector, machine: Machine) -> None:
    events.read(100.0)
    machine.set({"hang": 1}, gpu=0)
    machine.event(gpu=1, data=31)
    readings: list[CollectorReading] = []
    thread = threading.Thread(target=lambda: readings.append(events.read(110.0)), daemon=True)
    thread.start()
    thread.join(30)
    machine.set({"hang": 0}, gpu=0)
    assert xids(readings[0].facts) == [("1", "31")]


def test_other_events_are_faults_of_the_gpu(events: GpuEventsCollector, machine: Machine) -> None:
    events.read(100.0)
    machine.event(gpu=0, data=0, event_type=0x2)
    (fact,) = events.read(100.1).facts
    assert (fact.kind, fact.detail["what"], fact.detail["state"]) == (
        AgentEventKind.GPU_FAULT,
        "ecc",
        "double_bit_error",
    )


def test_a_lost_gpu_does_not_block_the_others(events: GpuEventsCollector, machine: Machine) -> None:
    """NVML's wait fails at once, each time, while a lost GPU is in its set."""
    events.read(100.0)
    machine.set({"lost": 1}, gpu=0)
    events.read(101.0)  # learns of it
    events.read(102.0)  # listens to the others
    machine.event(gpu=1, data=31)
    assert xids(events.read(103.0).facts) == [("1", "31")]
    machine.set({"lost": 0}, gpu=0)
    events.read(110.0)  # listens to both again
    machine.event(gpu=0, data=94)
    assert xids(events.read(111.0).facts) == [("0", "94")]


def test_gpus_without_events_cannot_be_waited_for(events: GpuEventsCollector, machine: Machine) -> None:
    machine.set({"error.nvmlDeviceRegisterEvents": 3})
    with pytest.raises(CollectorUnavailable, match="no GPU supports events"):
        events.read(100.0)


# --- real hardware


def test_a_recorded_machine_reads_like_the_one_it_was_recorded_from(
    library: Path, gpus: GpuCollector, machine: Machine, tmp_path: Path
) -> None:
    """The recorder (`tests/agent/nvml/record.py`) runs on GPUs; here on the stand-in, whose state it must give back."""
    machine.set({"NvLinkErrorCounter.3.2": 5, "MigMode": 1, "field.82": NOT_SUPPORTED}, gpu=1)
    machine.unset("PowerUsage")
    state = record(library, FakeClock())
    gpus.read(100.0)
    original = gpus.read(101.0)
    machine.show(state)
    again = GpuCollector(NODE, library=library)
    again.read(100.0)
    replayed = again.read(101.0)
    again.close()

    def numbers(reading: CollectorReading) -> dict[tuple[str, tuple[str, ...]], float]:
        return {(v.metric.name, v.labels): v.value for v in reading.values}

    assert numbers(replayed) == numbers(original)
    assert replayed.dcgm() == original.dcgm()


ON_HARDWARE = """
import json, time
from rolecall.agent.collectors.gpu.collector import GpuCollector
from rolecall.agent.collectors.gpu.events import GpuEventsCollector

gpus, events = GpuCollector("node-1"), GpuEventsCollector()
gpus.read(time.monotonic())
time.sleep(0.5)
begun = time.process_time()
reading = gpus.read(time.monotonic())
seconds = time.process_time() - begun
heard = events.read(time.monotonic())
processes = {str(i): len(p) for i, p in reading.gpu_pids.items()}
gpus.close()
events.close()
values = [[v.metric.name.removeprefix("rolecall_gpu_"), v.labels[1:], v.value] for v in reading.values]
facts = [[f.kind, dict(f.detail)] for f in reading.facts + heard.facts]
print(json.dumps(dict(values=values, facts=facts, dcgm=reading.dcgm(), seconds=seconds, processes=processes)))
"""
"""In a process of its own: this one has loaded the stand-in."""


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver here (/dev/nvidiactl)")
def test_a_real_gpu() -> None:
    run = subprocess.run([sys.executable, "-c", ON_HARDWARE], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout)
    values = {(name, *labels): number for name, labels, number in found["values"]}
    indices = [key[1] for key in values if key[0] == "up"]
    assert indices
    for i in indices:
        assert values["up", i] == 1
        assert 1 << 30 < values["memory_total_bytes", i] < 1 << 42
        assert 0 <= values["memory_used_bytes", i] <= values["memory_total_bytes", i]
        assert 1 < values["power_watts", i] < 3000
        assert 1 < values["temperature_celsius", i] < 120
        assert 1e8 < values["sm_clock_hertz", i] < 1e10
        assert values["throttle_active", i, "idle"] in (0, 1)
    assert not [key for key in values if key[0] == "call_errors_total"]
    assert all(0 <= number <= 1.01 for key, number in values.items() if key[0].endswith("_ratio"))
    assert found["facts"] == []
    assert found["dcgm"].count("DCGM_FI_DEV_POWER_USAGE{") == len(indices)
