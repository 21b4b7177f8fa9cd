"""Lines of `/metrics/dcgm`: names, label order, units and formatting of dcgm-exporter."""

from rolecall.agent.collectors.gpu.dcgm import SERIES, GpuNumbers, label_text, render
from rolecall.agent.collectors.gpu.nvml import GpuId

LABELS = label_text(
    GpuId(index=0, uuid="GPU-5f", pci_bus_id="00000000:1A:00.0", minor=3, name='NVIDIA "H100"'), "node-1", "575.57.08"
)


def test_labels_have_the_exporters_order_and_spelling() -> None:
    assert LABELS == (
        'gpu="0",UUID="GPU-5f",pci_bus_id="00000000:1A:00.0",device="nvidia3",modelName="NVIDIA \\"H100\\"",'
        'hostname="node-1",DCGM_FI_DRIVER_VERSION="575.57.08"'
    )


def test_base_units_become_those_of_dcgm() -> None:
    numbers = {
        ("sm_clock_hertz",): 1755e6,
        ("energy_joules_total",): 123456789.012,
        ("utilization_ratio",): 0.55,  # 0.55 * 100 is not quite 55
        ("memory_used_bytes",): float(60 << 30),
        ("throttle_seconds_total", "sw_power_cap"): 12.000000001,
        ("tensor_active_ratio",): 0.123,
        ("nvlink_transmit_bytes_per_second",): 2 * 1048576.0,
        ("nvlink_receive_bytes_per_second",): 1048576.0,
    }
    lines = render([GpuNumbers("L", numbers)]).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "DCGM_FI_DEV_SM_CLOCK{L} 1755",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{L} 123456789012",
        "DCGM_FI_DEV_GPU_UTIL{L} 55",
        "DCGM_FI_DEV_FB_USED{L} 61440",
        "DCGM_FI_DEV_POWER_VIOLATION{L} 12000000001",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{L} 0.123",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{L} 3",
        'DCGM_FI_DEV_XID_ERRORS{L,err_code="0",err_msg="No Error"} 0',
    ]
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter" in lines


def test_a_series_has_one_head_and_a_line_for_each_gpu_that_has_it() -> None:
    text = render(
        [GpuNumbers("A", {("power_watts",): 1.5}), GpuNumbers("B", {}), GpuNumbers("C", {("power_watts",): 2})]
    )
    power = [line for line in text.splitlines() if "POWER_USAGE" in line]
    assert power == [
        "# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).",
        "# TYPE DCGM_FI_DEV_POWER_USAGE gauge",
        "DCGM_FI_DEV_POWER_USAGE{A} 1.5",
        "DCGM_FI_DEV_POWER_USAGE{C} 2",
    ]


def test_links_show_only_where_they_counted_errors() -> None:
    key = "nvlink_link_errors_total"
    text = render([GpuNumbers("A", {(key, "4", "crc_flit"): 7, (key, "5", "crc_flit"): 0, (key, "4", "symbol"): 2})])
    assert [line for line in text.splitlines() if "_L" in line and not line.startswith("#")] == [
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L4{A} 7"
    ]


def test_the_last_xid_carries_its_code_and_text() -> None:
    text = render([GpuNumbers("A", {}, xid=79, xid_text="GPU has fallen off the bus")])
    assert 'DCGM_FI_DEV_XID_ERRORS{A,err_code="79",err_msg="GPU has fallen off the bus"} 79' in text


def test_no_gpus_no_text() -> None:
    assert render([]) == ""


def test_every_series_is_named_once() -> None:
    names = [s.name for s in SERIES]
    assert len(set(names)) == len(names)
