"""NICs as sysfs and their drivers show them, and TCP."""

import errno
import shutil
import struct
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.network.collector import (
    ETH_SS_STATS,
    ETHTOOL_GSSET_INFO,
    ETHTOOL_GSTATS,
    ETHTOOL_GSTRINGS,
    EthtoolStatistics,
    Ioctl,
    NetworkCollector,
    parse_tables,
    wanted,
)
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEventKind

NODE = NodeId("node-1")
SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens OutSegs RetransSegs
Tcp: 1 200 120000 -1 10 5000 12
"""
NETSTAT = """TcpExt: SyncookiesSent ListenDrops TCPTimeouts TCPSynRetrans
TcpExt: 0 2 5 3
IpExt: InNoRoutes
IpExt: 0
"""


def interface(root: Path, name: str, *, physical: bool = True, **files: int | str) -> Path:
    """An interface's files, written anew; statistics are those whose names begin with rx or tx."""
    folder = root / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    if physical:
        (folder / "device").mkdir(exist_ok=True)
    for key, value in {"operstate": "up", "carrier": 1, "speed": 100_000, "carrier_changes": 2, **files}.items():
        (folder / ("statistics" if key[:3] in ("rx_", "tx_") else ".") / key).write_text(f"{value}\n")
    return folder


class Driver:
    """Answers as drivers do; `extra` statistics come between the question how many and the answer."""

    def __init__(self, statistics: dict[str, int], extra: int = 0) -> None:
        self.statistics, self.extra = statistics, extra
        self.asked: list[int] = []

    def __call__(self, interface: str, request: bytearray) -> None:
        command = struct.unpack_from("=I", request)[0]
        self.asked.append(command)
        number = len(self.statistics)
        if command == ETHTOOL_GSSET_INFO:
            request[:] = struct.pack("=IIQI", command, 0, 1 << ETH_SS_STATS, number)
        elif command == ETHTOOL_GSTRINGS:
            struct.pack_into("=I", request, 8, number)
            for n, name in enumerate(self.statistics):
                struct.pack_into("32s", request, 12 + 32 * n, name.encode())
        else:
            written = number + self.extra
            struct.pack_into(f"=I{written}Q", request, 4, written, *self.statistics.values(), *range(self.extra))


class Refuses:
    def __call__(self, interface: str, request: bytearray) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def collector(tmp_path: Path, driver: Ioctl | None = None, *named: str) -> NetworkCollector:
    return NetworkCollector(
        NODE,
        interfaces=named,
        root=tmp_path / "net",
        proc_net=tmp_path / "proc",
        statistics=EthtoolStatistics(driver or Refuses()),
        driver_every_seconds=0.0,
    )


def values(reading: CollectorReading) -> dict[tuple[str, ...], float]:
    """By name without `rolecall_`, and labels without the node."""
    return {(v.metric.name.removeprefix("rolecall_"), *v.labels[1:]): v.value for v in reading.values}


def test_a_physical_interface_and_tcp(tmp_path: Path) -> None:
    interface(tmp_path / "net", "eth0", rx_bytes=1000, tx_bytes=2000, rx_packets=10, tx_packets=20, rx_crc_errors=3)
    interface(tmp_path / "net", "veth7", physical=False)
    (tmp_path / "net" / "bonding_masters").write_text("\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "snmp").write_text(SNMP)
    (tmp_path / "proc" / "netstat").write_text(NETSTAT)
    assert values(collector(tmp_path).read(0.0)) == {
        ("tcp_segments_sent_total",): 5000.0,
        ("tcp_retransmits_total",): 12.0,
        ("tcp_timeouts_total",): 5.0,
        ("tcp_syn_retransmits_total",): 3.0,
        ("tcp_listen_drops_total",): 2.0,
        ("nic_up", "eth0"): 1.0,
        ("nic_downs_total", "eth0"): 0.0,
        ("nic_speed_bytes_per_second", "eth0"): 12.5e9,
        ("nic_carrier_changes_total", "eth0"): 2.0,
        ("nic_received_bytes_total", "eth0"): 1000.0,
        ("nic_sent_bytes_total", "eth0"): 2000.0,
        ("nic_received_packets_total", "eth0"): 10.0,
        ("nic_sent_packets_total", "eth0"): 20.0,
        ("nic_errors_total", "eth0", "rx_crc_errors"): 3.0,
    }


def test_a_virtual_interface_is_read_if_it_is_named(tmp_path: Path) -> None:
    interface(tmp_path / "net", "bond0", physical=False)
    assert ("nic_up", "bond0") in values(collector(tmp_path, None, "bond0").read(0.0))
    assert values(collector(tmp_path).read(0.0)) == {}


@pytest.mark.parametrize("speed", [-1, 0, 4294967295, "fast"])
def test_an_unknown_speed_is_absent(tmp_path: Path, speed: int | str) -> None:
    interface(tmp_path / "net", "eth0", speed=speed)
    assert ("nic_speed_bytes_per_second", "eth0") not in values(collector(tmp_path).read(0.0))


@pytest.mark.parametrize(
    ("operstate", "carrier", "up"), [("up", "1", 1.0), ("unknown", "1", 1.0), ("down", "0", 0.0), ("up", "0", 0.0)]
)
def test_up_needs_a_carrier(tmp_path: Path, operstate: str, carrier: str, up: float) -> None:
    interface(tmp_path / "net", "eth0", operstate=operstate, carrier=carrier)
    assert values(collector(tmp_path).read(0.0))["nic_up", "eth0"] == up


def test_priority_flow_control_of_several_drivers(tmp_path: Path) -> None:
    interface(tmp_path / "net", "eth0")
    driver = Driver(
        {
            "rx_prio3_pause": 5,
            "tx_prio3_pause": 6,
            "rx_prio3_pause_duration": 2_500_000,
            "tx_prio3_pause_duration": 1,
            "rx_prio3_packets": 99,
            "rx_pfc_ena_frames_pri4": 7,
            "tx_priority_5_xoff.nic": 8,
            "rx_pause_ctrl_phy": 9,
            "rx_discards_phy": 10,
            "rx_symbol_err_phy": 0,
            "rx0_packets": 1,
        }
    )
    found = {k: v for k, v in values(collector(tmp_path, driver).read(0.0)).items() if "pause" in k[0] or "err" in k[0]}
    assert found == {
        ("nic_pauses_received_total", "eth0", "3"): 5.0,
        ("nic_pauses_sent_total", "eth0", "3"): 6.0,
        ("nic_paused_seconds_total", "eth0", "3"): 2.5,
        ("nic_pauses_received_total", "eth0", "4"): 7.0,
        ("nic_pauses_sent_total", "eth0", "5"): 8.0,
        ("nic_pauses_received_total", "eth0", "link"): 9.0,
        ("nic_errors_total", "eth0", "rx_discards_phy"): 10.0,
    }
    assert ETHTOOL_GSTATS in driver.asked


def test_counters_of_a_driver_that_is_reloaded_continue(tmp_path: Path) -> None:
    driver = Driver({"rx_prio3_pause": 50})
    it = collector(tmp_path, driver)
    seen = []
    for at, number in enumerate([50, 60, 4, 5]):
        interface(tmp_path / "net", "eth0", rx_bytes=10 * number)
        driver.statistics["rx_prio3_pause"] = number
        found = values(it.read(float(at)))
        seen.append((found["nic_received_bytes_total", "eth0"], found["nic_pauses_received_total", "eth0", "3"]))
    assert seen == [(500, 50), (600, 60), (640, 64), (650, 65)]


def test_statistics_whose_number_changes_during_a_read_are_ignored() -> None:
    driver = Driver({"rx_prio3_pause": 5}, extra=2)
    it = EthtoolStatistics(driver)
    assert it.read("eth0", wanted) == {}
    driver.extra = 0
    assert it.read("eth0", wanted) == {"rx_prio3_pause": 5}
    driver.statistics = {"queue": 1, "rx_prio3_pause": 6}
    assert it.read("eth0", wanted) == {"rx_prio3_pause": 6}


def test_a_driver_that_refuses_or_has_none() -> None:
    assert EthtoolStatistics(Refuses()).read("eth0", wanted) == {}
    assert EthtoolStatistics(Driver({})).read("eth0", wanted) == {}


def test_the_kernel_itself_answers_or_refuses() -> None:
    it = EthtoolStatistics()
    for name in ("lo", "no-such-nic", *(p.name for p in Path("/sys/class/net").iterdir())):
        assert all(isinstance(v, int) for v in it.read(name, lambda _: True).values())


def test_links_that_flap_are_facts(tmp_path: Path) -> None:
    net = tmp_path / "net"
    interface(net, "eth0", carrier_down_count=1)
    it = collector(tmp_path)
    assert it.read(0.0).facts == ()
    interface(net, "eth0", carrier=0, operstate="down", carrier_down_count=2)
    [down] = it.read(1.0).facts
    assert down.kind is AgentEventKind.LINK_DOWN
    assert down.detail == {"interface": "eth0", "what": "down", "flaps": "1"}
    interface(net, "eth0", carrier_down_count=2)
    assert [f.kind for f in it.read(2.0).facts] == [AgentEventKind.LINK_UP]
    interface(net, "eth0", carrier_down_count=3)  # between two polls
    assert [f.detail["flaps"] for f in it.read(3.0).facts] == ["2", "2"]


def test_an_interface_that_is_gone(tmp_path: Path) -> None:
    net = tmp_path / "net"
    interface(net, "eth0")
    it = collector(tmp_path)
    it.read(0.0)
    shutil.rmtree(net / "eth0")
    readings = [it.read(float(at)) for at in (1, 2, 3, 4)]
    assert [[f.detail["what"] for f in reading.facts] for reading in readings] == [[], [], ["gone"], []]
    assert values(readings[-1])["nic_up", "eth0"] == 0.0
    interface(net, "eth0")
    assert [f.detail["what"] for f in it.read(5.0).facts] == ["back"]


def test_nothing_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="net"):
        collector(tmp_path).read(0.0)


def test_damaged_tables_are_passed_over() -> None:
    tables = ("Tcp", "Udp")
    assert parse_tables("Tcp: A B\nUdp: 1 2\nTcp: A B\nTcp: x 4\n", tables) == {("Tcp", "B"): 4}
    assert parse_tables("Tcp: A\nTcp: 1\nIcmp: A\nIcmp: 1\nUdp: A B\nUdp: 2\n", tables) == {
        ("Tcp", "A"): 1,
        ("Udp", "A"): 2,
    }
    assert parse_tables("Tcp: A", tables) == {}


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        ("rx_prio0_pause", True),
        ("tx_prio7_pause_duration", True),
        ("port.rx_priority_3_xoff", True),
        ("tx_pause_storm_warning_events", True),
        ("rx_prio0_pause_transition", False),
        ("rx_prio0_bytes", False),
        ("xrx_prio0_pause", False),
    ],
)
def test_wanted_statistics(name: str, is_wanted: bool) -> None:
    assert wanted(name) is is_wanted


def test_this_machine_is_read_without_harm() -> None:
    it = NetworkCollector(NODE, interfaces=["lo"])
    for at in (0.0, 1.0):
        reading = it.read(at)
        assert ("nic_up", "lo") in values(reading)
        assert all(len(v.labels) == len(v.metric.labels) for v in reading.values)
        series = [(v.metric.name, v.labels) for v in reading.values]
        assert len(series) == len(set(series))
