"""dcgm-exporter's and node_exporter's pages as rows of our catalogue.

Pages are written here from the names, labels and units that these projects document."""

import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.exporters.collector import NUM_GPUS_MAX, DcgmPage, ExporterCollector
from rolecall.agent.collectors.exporters.node_exporter import NodeExporterPage
from rolecall.agent.http.exposition import render
from rolecall.core.ids import NodeId
from rolecall.core.metrics.metric import MetricValue
from tests.agent.page_server import PageServer, http_page
from tests.support import eventually

NODE = NodeId("node-1")


def dcgm_exporter(url: str, hostname: str = "") -> ExporterCollector:
    return ExporterCollector(NODE, "dcgm_exporter", url, DcgmPage(NODE, hostname), dcgm=True)


def node_exporter(url: str, deadline_seconds: float = 2.0) -> ExporterCollector:
    return ExporterCollector(NODE, "node_exporter", url, NodeExporterPage(NODE), deadline_seconds=deadline_seconds)


def gpu_labels(gpu: int, host: str = "hostname", more: str = "") -> str:
    return (
        f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:{gpu:02X}:00.0",device="nvidia{gpu}",'
        f'modelName="NVIDIA H100 80GB HBM3",{host}="gpu-7",DCGM_FI_DRIVER_VERSION="580.65.06"{more}'
    )


SERIES = {
    "SM_CLOCK": ("1980", ("sm_clock_hertz",), 1.98e9),
    "MEM_CLOCK": ("2619", ("memory_clock_hertz",), 2.619e9),
    "MAX_SM_CLOCK": ("1980", ("sm_clock_max_hertz",), 1.98e9),
    "GPU_TEMP": ("41", ("temperature_celsius",), 41.0),
    "MEMORY_TEMP": ("52", ("memory_temperature_celsius",), 52.0),
    "POWER_USAGE": ("312.500000", ("power_watts",), 312.5),
    "ENFORCED_POWER_LIMIT": ("700", ("power_limit_watts",), 700.0),
    "TOTAL_ENERGY_CONSUMPTION": ("1234567890", ("energy_joules_total",), 1234567.89),
    "PCIE_REPLAY_COUNTER": ("3", ("pcie_replays_total",), 3.0),
    "PCIE_LINK_GEN": ("5", ("pcie_link_generation",), 5.0),
    "PCIE_LINK_WIDTH": ("16", ("pcie_link_width",), 16.0),
    "GPU_UTIL": ("37", ("utilization_ratio",), 0.37),
    "MEM_COPY_UTIL": ("11", ("memory_utilization_ratio",), 0.11),
    "ENC_UTIL": ("0", ("encoder_utilization_ratio",), 0.0),
    "DEC_UTIL": ("100", ("decoder_utilization_ratio",), 1.0),
    "FB_FREE": ("1024", ("memory_free_bytes",), 1024.0 * 2**20),
    "FB_USED": ("80000", ("memory_used_bytes",), 80000.0 * 2**20),
    "FB_TOTAL": ("81559", ("memory_total_bytes",), 81559.0 * 2**20),
    "FB_RESERVED": ("535", ("memory_reserved_bytes",), 535.0 * 2**20),
    "UNCORRECTABLE_REMAPPED_ROWS": ("1", ("remapped_rows_total", "uncorrected"), 1.0),
    "CORRECTABLE_REMAPPED_ROWS": ("2", ("remapped_rows_total", "corrected"), 2.0),
    "ROW_REMAP_FAILURE": ("0", ("remapped_rows_failed",), 0.0),
    "ROW_REMAP_PENDING": ("1", ("remapped_rows_pending",), 1.0),
    "ECC_SBE_VOL_TOTAL": ("4", ("ecc_errors_total", "corrected"), 4.0),
    "ECC_DBE_AGG_TOTAL": ("5", ("ecc_lifetime_errors_total", "uncorrected"), 5.0),
    "POWER_VIOLATION": ("2500000000", ("throttle_seconds_total", "sw_power_cap"), 2.5),
    "THERMAL_VIOLATION": ("1500000000", ("throttle_seconds_total", "thermal"), 1.5),
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": ("7000000", ("throttle_seconds_total", "hw_thermal"), 0.007),
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("6", ("nvlink_errors_total", "crc_flit"), 6.0),
}
PROFILING = {
    "GR_ENGINE_ACTIVE": ("0.9", ("graphics_active_ratio",), 0.9),
    "SM_ACTIVE": ("0.85", ("sm_active_ratio",), 0.85),
    "SM_OCCUPANCY": ("0.25", ("sm_occupancy_ratio",), 0.25),
    "PIPE_TENSOR_ACTIVE": ("0.5", ("tensor_active_ratio",), 0.5),
    "DRAM_ACTIVE": ("0.125", ("dram_active_ratio",), 0.125),
    "PIPE_FP16_ACTIVE": ("0.01", ("fp16_active_ratio",), 0.01),
    "PCIE_TX_BYTES": ("123456789", ("pcie_transmit_bytes_per_second",), 123456789.0),
    "NVLINK_RX_BYTES": ("5e9", ("nvlink_receive_bytes_per_second",), 5e9),
}
"""DCGM's name to its text, our metric with its labels, and our number."""
ALL = {f"DCGM_FI_DEV_{n}": v for n, v in SERIES.items()} | {f"DCGM_FI_PROF_{n}": v for n, v in PROFILING.items()}


def dcgm_page(*gpus: int, host: str = "hostname", more: str = "") -> str:
    """As dcgm-exporter writes it: each series with its head, all GPUs under it."""
    return "".join(
        f"# HELP {name} What it is (in its unit).\n# TYPE {name} gauge\n"
        + "".join(f"{name}{{{gpu_labels(gpu, host, more)}}} {text}\n" for gpu in gpus)
        for name, (text, _, _) in ALL.items()
    )


def of_gpu(values: tuple[MetricValue, ...], gpu: int = 0) -> dict[tuple[str, ...], float]:
    return {
        (v.metric.name.removeprefix("rolecall_gpu_"), *v.labels[2:]): v.value
        for v in values
        if v.labels[:2] == (NODE, str(gpu))
    }


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer(http_page(dcgm_page(0)))
    yield server
    server.close()


EXPECTED = {key: number for _, key, number in ALL.values()} | {
    ("up",): 1.0,
    ("info", "GPU-0", "NVIDIA H100 80GB HBM3", "580.65.06"): 1.0,
}


@pytest.mark.parametrize("host", ["hostname", "Hostname"])
def test_each_series_of_dcgm_in_our_units(server: PageServer, host: str) -> None:
    server.show(dcgm_page(0, host=host))
    found = of_gpu(dcgm_exporter(server.url).read(0.0).values)
    assert found.keys() == EXPECTED.keys()
    assert found == {k: pytest.approx(v, rel=1e-12) for k, v in EXPECTED.items()}


def test_each_gpu_has_its_own(server: PageServer) -> None:
    server.show(dcgm_page(*range(8)))
    values = dcgm_exporter(server.url).read(0.0).values
    for gpu in range(8):
        assert len(of_gpu(values, gpu)) == len(EXPECTED)
    assert len({(v.metric.name, v.labels) for v in values}) == len(values)


def test_the_page_continues_unchanged(server: PageServer) -> None:
    page = dcgm_page(0, 1) + 'DCGM_FI_OF_SOMEBODY{gpu="0"} 7\n'
    server.show(page)
    assert dcgm_exporter(server.url).read(0.0).dcgm() == page


def test_throttle_reasons_of_both_names(server: PageServer) -> None:
    for name in ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"):
        server.show(f"{name}{{{gpu_labels(0)}}} {0x4 | 0x40}\n")
        found = of_gpu(dcgm_exporter(server.url).read(0.0).values)
        assert {k[1] for k, v in found.items() if k[0] == "throttle_active" and v} == {"sw_power_cap", "hw_thermal"}
        assert found["throttle_active", "idle"] == 0.0


@pytest.mark.parametrize("text", ["2147483632", "2147483634", "9223372036854775794", "140737488355328.000000", "NaN"])
def test_blank_numbers_of_dcgm_are_no_numbers(server: PageServer, text: str) -> None:
    server.show(f"DCGM_FI_DEV_GPU_TEMP{{{gpu_labels(0)}}} {text}\nDCGM_FI_DEV_GPU_UTIL{{{gpu_labels(0)}}} 5\n")
    found = of_gpu(dcgm_exporter(server.url).read(0.0).values)
    assert ("temperature_celsius",) not in found and found["utilization_ratio",] == 0.05


def test_mig_instances_are_not_mixed_up_with_the_gpu(server: PageServer) -> None:
    instances = [gpu_labels(0, more=f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{i}"') for i in (3, 4)]
    server.show(
        "".join(f"DCGM_FI_DEV_FB_USED{{{i}}} 100\n" for i in instances)
        + f"DCGM_FI_DEV_GPU_TEMP{{{gpu_labels(0)}}} 40\n"
    )
    found = of_gpu(dcgm_exporter(server.url).read(0.0).values)
    assert ("memory_used_bytes",) not in found
    assert (found["mig_enabled",], found["temperature_celsius",]) == (1.0, 40.0)


def test_a_gpu_shared_by_pods_is_reported_once(server: PageServer) -> None:
    pods = [gpu_labels(0, more=f',namespace="a",pod="p-{i}",container="c"') for i in range(3)]
    server.show("".join(f"DCGM_FI_DEV_GPU_UTIL{{{p}}} 50\n" for p in pods))
    values = dcgm_exporter(server.url).read(0.0).values
    assert [v.value for v in values if v.metric.name == "rolecall_gpu_utilization_ratio"] == [0.5]


def test_a_gpu_that_leaves_the_page_is_down(server: PageServer) -> None:
    server.show(dcgm_page(0, 1))
    collector = dcgm_exporter(server.url)
    collector.read(0.0)
    server.show(dcgm_page(0))
    values = collector.read(5.0).values
    assert of_gpu(values, 1) == {("up",): 0.0}
    assert of_gpu(values, 0)["up",] == 1.0


def test_a_page_of_several_hosts(server: PageServer) -> None:
    far = dcgm_page(0).replace('"gpu-7"', '"gpu-8"').replace("} 37\n", "} 99\n")
    server.show(far + dcgm_page(0))
    with pytest.raises(
        CollectorUnavailable, match=r"the page has 2 hosts \(gpu-7, gpu-8\), none of which is node-1: set `hostname`"
    ):
        dcgm_exporter(server.url).read(0.0)
    found = of_gpu(dcgm_exporter(server.url, hostname="gpu-7").read(0.0).values)
    assert found["utilization_ratio",] == 0.37


def test_numbers_of_gpus_are_bounded(server: PageServer) -> None:
    server.show("".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="{i}"}} 40\n' for i in [*range(200), "x", "1000", "\u0661", "-1"]))
    values = dcgm_exporter(server.url).read(0.0).values
    assert len({v.labels[1] for v in values if v.metric.name == "rolecall_gpu_up"}) == NUM_GPUS_MAX


def test_malformed_lines_are_counted_and_the_rest_is_kept(server: PageServer) -> None:
    server.show(f"DCGM_FI_DEV_GPU_TEMP{{gpu=0}} 40\n\n= 3\nDCGM_FI_DEV_GPU_UTIL{{{gpu_labels(0)}}} 50\n")
    values = dcgm_exporter(server.url).read(0.0).values
    assert of_gpu(values)["utilization_ratio",] == 0.5
    (malformed,) = (v for v in values if v.metric.name == "rolecall_probe_lines_malformed_total")
    assert (malformed.labels, malformed.value) == (("node-1", "dcgm_exporter"), 2.0)


def test_an_exporter_that_is_down_is_reported_by_address_and_comes_back(server: PageServer) -> None:
    server.answer = http_page("", "503 Service Unavailable")
    collector = dcgm_exporter(server.url)
    with pytest.raises(CollectorUnavailable, match=f"{server.url}: answers with status 503"):
        collector.read(0.0)
    server.show(dcgm_page(0))
    assert of_gpu(collector.read(5.0).values)["up",] == 1.0


@pytest.mark.parametrize("page", ["", "up 1\n", 'DCGM_FI_DEV_GPU_TEMP{nvswitch="0"} 3\n'])
def test_a_page_without_gpus_cannot_be_read(server: PageServer, page: str) -> None:
    server.show(page)
    with pytest.raises(CollectorUnavailable, match=f"{server.url}: no series of a GPU on this page"):
        dcgm_exporter(server.url).read(0.0)


def test_an_address_beyond_this_node_is_refused() -> None:
    with pytest.raises(ValueError, match="is no address of this node"):
        dcgm_exporter("http://192.0.2.1:9400/metrics")


# --- node_exporter

NODE_PAGE = """# HELP node_cpu_seconds_total Seconds the CPUs spent in each mode.
node_cpu_seconds_total{cpu="0",mode="idle"} 1e+06
node_network_carrier{device="eth0"} 1
node_network_carrier{device="eth1"} 0
node_network_up{device="eth0"} 0
node_network_up{device="eth1"} 0
node_network_up{device="eth2"} 0
node_network_up{device="lo"} 0
node_network_speed_bytes{device="eth0"} 1.25e+09
node_network_speed_bytes{device="eth1"} -125000
node_network_speed_bytes{device="eth2"} 5.36870911875e+14
node_network_receive_bytes_total{device="eth0"} 1.5e+10
node_network_receive_bytes_total{device="veth1a2b"} 7
node_network_transmit_bytes_total{device="eth0"} 2.5e+10
node_network_receive_errs_total{device="eth0"} 3
node_network_transmit_errs_total{device="eth0"} 0
node_netstat_Tcp_RetransSegs 17
node_netstat_TcpExt_ListenDrops 2
node_infiniband_state_id{device="mlx5_0",port="1"} 4
node_infiniband_state_id{device="mlx5_1",port="1"} 1
node_infiniband_physical_state_id{device="mlx5_0",port="1"} 5
node_infiniband_physical_state_id{device="mlx5_1",port="1"} 99
node_infiniband_rate_bytes_per_second{device="mlx5_0",port="1"} 5e+10
node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 4e+12
node_infiniband_link_downed_total{device="mlx5_0",port="1"} 0
node_infiniband_port_constraint_errors_received_total{device="mlx5_0",port="1"} 0
node_infiniband_port_transmit_wait_total{device="mlx5_0",port="1"} 8
node_disk_io_now{device="nvme0n1"} 2
node_disk_read_bytes_total{device="nvme0n1"} 4096
node_disk_io_time_seconds_total{device="nvme0n1"} 1.5
node_filesystem_size_bytes{device="/dev/nvme0n1p1",fstype="ext4",mountpoint="/data"} 1e+12
node_filesystem_avail_bytes{device="/dev/nvme0n1p1",fstype="ext4",mountpoint="/data"} 5e+11
node_filesystem_files{device="/dev/nvme0n1p1",fstype="ext4",mountpoint="/data"} 100
node_filesystem_files_free{device="/dev/nvme0n1p1",fstype="ext4",mountpoint="/data"} 0
node_filesystem_device_error{device="/dev/nvme0n1p1",fstype="ext4",mountpoint="/data"} 0
node_filesystem_device_error{device="srv:/home",fstype="nfs4",mountpoint="/home"} 1
node_filesystem_files{device="/dev/sdb",fstype="btrfs",mountpoint="/b"} 0
node_filesystem_files_free{device="/dev/sdb",fstype="btrfs",mountpoint="/b"} 0
node_filesystem_size_bytes{device="tmpfs",fstype="tmpfs",mountpoint="/run/user/0"} 1
node_filesystem_size_bytes{device="tmpfs",fstype="tmpfs",mountpoint="/dev/shm"} 64
node_pressure_io_waiting_seconds_total 12.5
node_pressure_io_stalled_seconds_total 3.5
node_pressure_memory_stalled_seconds_total 0.5
"""

NODE_EXPECTED = {
    ("nic_up", "eth0"): 1.0,  # a driver without an operational state: the carrier counts
    ("nic_up", "eth1"): 0.0,
    ("nic_up", "eth2"): 0.0,  # shut down: it has no carrier to be read
    ("nic_downs_total", "eth0"): 0.0,  # since the first page
    ("nic_downs_total", "eth1"): 0.0,
    ("nic_downs_total", "eth2"): 0.0,
    ("nic_speed_bytes_per_second", "eth0"): 1.25e9,
    ("nic_received_bytes_total", "eth0"): 1.5e10,
    ("nic_sent_bytes_total", "eth0"): 2.5e10,
    ("nic_errors_total", "eth0", "rx_errors"): 3.0,
    ("tcp_retransmits_total",): 17.0,
    ("tcp_listen_drops_total",): 2.0,
    ("infiniband_up", "mlx5_0", "1"): 1.0,
    ("infiniband_up", "mlx5_1", "1"): 0.0,
    ("infiniband_downs_total", "mlx5_0", "1"): 0.0,
    ("infiniband_downs_total", "mlx5_1", "1"): 0.0,
    ("infiniband_physical_state", "mlx5_0", "1", "LinkUp"): 1.0,
    ("infiniband_physical_state", "mlx5_1", "1", "unknown"): 1.0,
    ("infiniband_rate_bytes_per_second", "mlx5_0", "1"): 5e10,
    ("infiniband_received_bytes_total", "mlx5_0", "1"): 4e12,
    ("infiniband_events_total", "mlx5_0", "1", "link_downed"): 0.0,
    ("infiniband_events_total", "mlx5_0", "1", "port_xmit_wait"): 8.0,
    ("disk_requests_active", "nvme0n1"): 2.0,
    ("disk_read_bytes_total", "nvme0n1"): 4096.0,
    ("disk_busy_seconds_total", "nvme0n1"): 1.5,
    ("filesystem_size_bytes", "/data"): 1e12,
    ("filesystem_available_bytes", "/data"): 5e11,
    ("filesystem_files", "/data"): 100.0,
    ("filesystem_files_free", "/data"): 0.0,  # full, and not without a limit
    ("filesystem_up", "/data"): 1.0,
    ("filesystem_up", "/home"): 0.0,
    ("filesystem_size_bytes", "/dev/shm"): 64.0,
    ("host_io_stall_seconds_total",): 12.5,
    ("host_full_stall_seconds_total", "io"): 3.5,
    ("host_full_stall_seconds_total", "memory"): 0.5,
}


def of_node(values: tuple[MetricValue, ...]) -> dict[tuple[str, ...], float]:
    return {
        (v.metric.name.removeprefix("rolecall_"), *v.labels[1:]): v.value
        for v in values
        if "probe" not in v.metric.name
    }


def test_series_of_node_exporter(server: PageServer) -> None:
    server.show(NODE_PAGE)
    reading = node_exporter(server.url).read(0.0)
    assert of_node(reading.values) == NODE_EXPECTED
    assert reading.dcgm() == ""


def test_order_on_the_page_does_not_matter(server: PageServer) -> None:
    server.show("\n".join(reversed(NODE_PAGE.splitlines())))
    assert of_node(node_exporter(server.url).read(0.0).values) == NODE_EXPECTED


def test_number_of_interfaces_is_bounded(server: PageServer) -> None:
    server.show("".join(f'node_network_up{{device="eth{i}"}} 1\n' for i in range(1000)))
    found = of_node(node_exporter(server.url).read(0.0).values)
    assert sorted({name for name, _ in found}) == ["nic_downs_total", "nic_up"] and len(found) == 2 * 64


LINK_PAGE = """node_network_carrier{{device="eth0"}} {up}
node_network_carrier_down_changes_total{{device="eth0"}} {downs}
node_infiniband_state_id{{device="mlx5_0",port="1"}} {state}
node_infiniband_link_downed_total{{device="mlx5_0",port="1"}} {downs}
"""


def test_downs_of_links_are_counted_from_the_agents_start(server: PageServer) -> None:
    collector = node_exporter(server.url)

    def downs(up: bool, num: int) -> tuple[float, float]:
        server.show(LINK_PAGE.format(up=int(up), downs=num, state=4 if up else 1))
        found = of_node(collector.read(0.0).values)
        assert found["nic_up", "eth0"] == found["infiniband_up", "mlx5_0", "1"] == up
        assert found["infiniband_events_total", "mlx5_0", "1", "link_downed"] == num
        return found["nic_downs_total", "eth0"], found["infiniband_downs_total", "mlx5_0", "1"]

    assert downs(True, 7) == (0, 0)  # seven before
    assert downs(False, 8) == (1, 1)
    assert downs(True, 8) == (1, 1)
    assert downs(True, 11) == (4, 4)  # between two pages
    assert downs(True, 0) == (4, 4)  # the driver was loaded again


def test_labels_that_lack_cost_only_their_series(server: PageServer) -> None:
    names = sorted({line.split("{")[0].split()[0] for line in NODE_PAGE.splitlines() if not line.startswith("#")})
    server.show("".join(f'{n}{{other="x"}} 1\n' for n in names) + "node_netstat_Tcp_OutSegs 5\n")
    found = of_node(node_exporter(server.url).read(0.0).values)
    assert found["tcp_segments_sent_total",] == 5.0
    assert {k[0].split("_")[0] for k in found} == {"tcp", "host"}  # what is of the whole node needs no label


def test_a_page_of_another_process(server: PageServer) -> None:
    server.show(dcgm_page(0))
    with pytest.raises(CollectorUnavailable, match="no series of node_exporter on this page"):
        node_exporter(server.url).read(0.0)


def test_values_pass_into_the_exposition(server: PageServer) -> None:
    server.show(NODE_PAGE)
    values = node_exporter(server.url).read(0.0).values
    text = render(values)[0].decode()
    assert 'rolecall_infiniband_up{nic="mlx5_0",node="node-1",port="1"} 1.0\n' in text


def test_promtool_accepts_the_values_of_both(server: PageServer) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    values = list(dcgm_exporter(server.url).read(0.0).values)
    server.show(NODE_PAGE)
    values += node_exporter(server.url).read(0.0).values
    text = render(values)[0]
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_real_node_exporter() -> None:
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        pytest.skip("node_exporter is not installed (Debian: prometheus-node-exporter)")
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = subprocess.Popen(
        [program, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        collector = node_exporter(f"http://localhost:{port}/metrics", deadline_seconds=10.0)
        found: dict[tuple[str, ...], float] = {}

        def answered() -> bool:
            try:
                found.update(of_node(collector.read(0.0).values))
            except CollectorUnavailable:
                return False
            return True

        eventually(answered, "node_exporter answers")
    finally:
        process.kill()
        process.wait()
    assert found["tcp_segments_sent_total",] > 0
