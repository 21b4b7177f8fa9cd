"""The collector over a ring like the kernel's and over files: restarts, overruns, rotation, truncation, no
permission."""

import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.agent.collectors.kernel.collector import NUM_FACTS_MAX, KernelLogCollector
from rolecall.agent.collectors.kernel.sources import LOOKBACK_BYTES, KernelLogSource, Kmsg, source
from rolecall.agent.identity import Registration
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEventKind

NODE = NodeId("gpu-7")
BOOT = "5f0c3b1e-0000-4000-8000-000000000001"
XID79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID31 = "NVRM: Xid (PCI:0000:86:00): 31, pid=4711, name=python3, Ch 00000010"
RSS = "total-vm:9096kB, anon-rss:8192kB, file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:72kB oom_score_adj:0"
OOM = f"Memory cgroup out of memory: Killed process 4711 (python3) {RSS}"
NOISE = "usb 1-1: new high-speed USB device number 2 using xhci_hcd"


class Ring:
    """Behaves like /dev/kmsg: numbered records, of which it keeps the newest `size`; every opening begins at the
    oldest."""

    def __init__(self, size: int = 100_000) -> None:
        self.records: deque[tuple[int, bytes]] = deque(maxlen=size)
        self.next = 0
        self.position: dict[int, int] = {}
        self.num_opened = 0

    def add(self, *messages: str, at: float = 0.0, priority: int = 4) -> None:
        for m in messages:
            self.records.append((self.next, f"{priority},{self.next},{int(at * 1e6)},-;{m}\n SUBSYSTEM=pci\n".encode()))
            self.next += 1

    def open(self, path: Path, flags: int) -> int:
        assert flags & os.O_NONBLOCK
        self.num_opened += 1
        self.position[self.num_opened] = self.records[0][0] if self.records else self.next
        return self.num_opened

    def read(self, descriptor: int, size: int) -> bytes:
        wanted = self.position[descriptor]
        oldest = self.records[0][0] if self.records else self.next
        if wanted < oldest:
            self.position[descriptor] = oldest
            raise BrokenPipeError(errno.EPIPE, "overrun")
        if wanted >= self.next:
            raise BlockingIOError(errno.EAGAIN, "nothing")
        self.position[descriptor] += 1
        return self.records[wanted - oldest][1]

    def close(self, descriptor: int) -> None:
        del self.position[descriptor]


class Node:
    """A node whose agent can be restarted: the ring or the file, the state file and the clock stay."""

    def __init__(self, tmp_path: Path, ring: Ring | None = None, file: Path | None = None) -> None:
        self.ring, self.file, self.state = ring, file, tmp_path / "state.json"
        self.clock = FakeClock(now=1000.0)
        self.boot = BOOT
        self.merger = XidMerger()
        self.processes: dict[int, Registration] = {}
        self.collector = self.start()

    def start(self) -> KernelLogCollector:
        self.collector = KernelLogCollector(
            node=NODE,
            merger=self.merger,
            path=self.file or Path("/dev/kmsg"),
            state_file=self.state,
            gpu_of={"0000:3b:00": 2}.get,
            process_of=self.processes.get,
            clock=self.clock,
            open_source=self._source if self.ring else source,
        )
        return self.collector

    def _source(self, path: Path, cursor: dict[str, Any], proc: Path) -> KernelLogSource:
        assert self.ring
        return Kmsg(path, cursor, self.boot, open_=self.ring.open, read=self.ring.read, close=self.ring.close)

    def read(self) -> CollectorReading:
        return self.collector.read(self.clock.monotonic())

    def reported(self) -> list[str]:
        """XIDs or events of the next poll, by their lines' last word."""
        return [f.detail["line"].rsplit(" ", 1)[-1] for f in self.read().facts]

    def values(self) -> dict[tuple[str, ...], float]:
        return {(v.metric.name, *v.labels[1:]): v.value for v in self.read().values}


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def node(tmp_path: Path, ring: Ring) -> Iterator[Node]:
    it = Node(tmp_path, ring)
    yield it
    it.collector.close()
    assert not ring.position, "a descriptor is left open"


def xids(*numbers: int) -> list[str]:
    return [f"{XID31} n{i}" for i in numbers]


# --- what is reported


def test_an_xid_is_an_event_with_meaning_and_action(node: Node, ring: Ring) -> None:
    node.read()
    ring.add(NOISE, XID79)
    [fact] = node.read().facts
    assert fact.kind is AgentEventKind.XID
    assert fact.detail | {"record": ""} == {
        "xid": "79",
        "gpu": "2",
        "pci": "0000:3b:00",
        "mnemonic": "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS",
        "meaning": "GPU has fallen off the bus",
        "action": "RESTART_BM",
        "advice": "drain the machine and reboot it",
        "class": "gpu",
        "fatal": "yes",
        "second_opinion": "REBOOT+HW_INSPECT / Fatal",
        "line": XID79,
        "record": "",
    }
    assert fact.detail["record"] == f"{BOOT[:8]}:1"


def test_an_unknown_gpu_is_named_by_its_address(node: Node, ring: Ring) -> None:
    ring.add(XID31)
    [fact] = node.read().facts
    assert "gpu" not in fact.detail and fact.detail["pci"] == "0000:86:00"
    assert ("0000:86:00", 31) in node.merger.counts()


def test_154_names_the_drivers_verdict_and_nvlink_its_sub_code(node: Node, ring: Ring) -> None:
    ring.add(
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Nonfatal   XC0 i0 Link 09 (0x025525c6 0x00000000 0x0 0x0)",
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x00000013 0x00000001 0x0 0x0)",
        "NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error detected on link 14(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 32 LTSSM Fault Up",
    )
    verdict, link, errors, old, switch = node.read().facts
    assert (verdict.detail["recovery"], verdict.detail["action"]) == ("node_reboot", "RESTART_BM")
    assert (link.detail["unit"], link.detail["link"], link.detail["subcode"]) == ("NETIR_LINK_EVT", "9", "37")
    assert (link.detail["fatal"], link.detail["severity"]) == ("yes", "link fatal"), (
        "NVIDIA's table is worse than the line"
    )
    assert (link.detail["action"], link.detail["investigate"]) == ("RESET_GPU", "INVESTIGATE_PEER_DEVICE")
    assert (errors.detail["fatal"], errors.detail["severity"], errors.detail["action"]) == ("no", "non-fatal", "IGNORE")
    assert (old.detail["fatal"], old.detail["registers"], old.detail["link"]) == ("no", "harmless", "14")
    assert (switch.detail["sxid"], switch.detail["device"], switch.detail["fatal"]) == ("20034", "nvswitch3", "yes")
    assert node.values()["rolecall_nvswitch_errors_total", "nvswitch3", "20034"] == 1


def test_an_oom_kill_names_its_replica(node: Node, ring: Ring) -> None:
    node.read()
    process = ProcessId(node=NODE, pid=4711, start_ticks=9)
    node.processes[4711] = Registration(process=process, replica="trainer/1", role="trainer", rank=3, incarnation=2)
    ring.add(OOM, OOM.replace("4711", "99"))
    ours, other = node.read().facts
    assert ours == Fact(
        kind=AgentEventKind.OOM_KILL,
        detail=ours.detail,
        process=process,
        role="trainer",
        replica="trainer/1",
        rank=3,
        incarnation=2,
    )
    assert (ours.detail["pid"], ours.detail["name"], ours.detail["out_of_memory"]) == ("4711", "python3", "cgroup")
    assert other.process is None and other.detail["pid"] == "99"
    assert node.values()[("rolecall_kernel_oom_kills_total",)] == 2


def test_links_hardware_errors_and_faults(node: Node, ring: Ring) -> None:
    ring.add(
        "mlx5_core 0000:41:00.0 ens1f0np0: Link down",
        "mlx5_core 0000:41:00.0 ens1f0np0: Link up",
        "EDAC MC1: 1 UE memory scrubbing error on CPU_SrcID#1",
        "EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#1",
        "INFO: task python3:4711 blocked for more than 120 seconds.",
    )
    facts = node.read().facts
    assert [str(f.kind) for f in facts] == ["link_down", "link_up", "machine_check", "kernel"]
    assert facts[0].detail["interface"] == "ens1f0np0" and facts[3].detail["what"] == "hung_task"
    values = node.values()
    assert values["rolecall_kernel_link_downs_total", "ens1f0np0"] == 1
    assert values["rolecall_kernel_hardware_errors_total", "memory", "corrected"] == 1
    assert values["rolecall_kernel_hardware_errors_total", "memory", "uncorrected"] == 1
    assert values["rolecall_kernel_faults_total", "hung_task"] == 1
    assert values[("rolecall_kernel_log_lines_total",)] == 5


def test_of_nvlinks_codes_and_154_the_line_is_reported_after_nvml_and_counted_once(node: Node, ring: Ring) -> None:
    node.read()
    for code in (149, 154, 74):
        assert node.merger.merge(node.clock.monotonic(), 2, code, "nvml")
    ring.add(
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x00000013 0x00000001 0x0 0x0)",
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error detected on link 14(0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    )
    found = [(f.detail["xid"], f.detail["fatal"], f.detail["adds_to"]) for f in node.read().facts]
    assert found == [("149", "no", "nvml"), ("154", "yes", "nvml"), ("74", "yes", "nvml")]
    assert [node.merger.counts()["2", code].number for code in (149, 154, 74)] == [1, 1, 1]
    ring.add("NVRM: Xid (PCI:0000:3b:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x00000013 0x00000001 0x0 0x0)")
    (again,) = node.read().facts
    assert "adds_to" not in again.detail and node.merger.counts()["2", 149].number == 2


def test_an_xid_from_nvml_is_not_repeated_but_a_second_one_is_reported(node: Node, ring: Ring) -> None:
    node.read()
    assert node.merger.merge(node.clock.monotonic(), 2, 79, "nvml")
    ring.add(XID79, "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.")
    assert node.read().facts == ()
    ring.add(XID79)
    assert len(node.read().facts) == 1
    assert node.merger.counts()["2", 79].number == 2


def test_a_lost_gpu_without_an_xid_is_79(node: Node, ring: Ring) -> None:
    ring.add(
        "NVRM: The NVIDIA GPU 0000:3b:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    [fact] = node.read().facts
    assert (fact.kind, fact.detail["xid"], fact.detail["gpu"]) == (AgentEventKind.XID, "79", "2")


LOST = (
    "NVRM: The NVIDIA GPU 0000:86:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def test_a_record_of_several_lines_is_read_to_its_last(node: Node, ring: Ring) -> None:
    ring.add("\\x0a".join(LOST))
    ring.add(r"md/raid1:md0: a first line\x0amd/raid1:md0: Disk failure on sda1, disabling device.")
    lost, degraded = node.read().facts
    assert (lost.detail["xid"], degraded.detail["what"]) == ("79", "raid_degraded")


def test_an_nfs_server_that_answers_again_is_no_fault(node: Node, ring: Ring) -> None:
    ring.add("nfs: server a not responding, still trying", "nfs: server a OK")
    assert [fact.detail["what"] for fact in node.read().facts] == ["nfs_server"]


def test_lines_that_processes_wrote_to_the_device_are_not_the_kernels(node: Node, ring: Ring) -> None:
    ring.add(XID79, priority=12)
    assert node.read().facts == ()
    assert node.values()[("rolecall_kernel_log_lines_total",)] == 0


def test_old_events_have_their_age(node: Node, ring: Ring) -> None:
    node.processes[4711] = Registration(
        process=ProcessId(node=NODE, pid=4711, start_ticks=9),
        replica="trainer/1",
        role="trainer",
        rank=0,
        incarnation=0,
    )
    ring.add(OOM, at=400.0)
    [past] = node.read().facts
    assert past.detail["seconds_ago"] == "600" and past.process is None, "its PID may be another's now"
    # Of what comes from now on the kernel's clock is not asked: it drifts.
    ring.add(OOM, at=400.0)
    [live] = node.read().facts
    assert "seconds_ago" not in live.detail and live.replica == "trainer/1"


def test_names_that_a_process_chose_carry_no_control_characters(node: Node, ring: Ring) -> None:
    ring.add(f"Out of memory: Killed process 7 (a\\x1b[2Jb) {RSS}")
    [fact] = node.read().facts
    assert fact.detail["name"] == "a?[2Jb" and "\x1b" not in fact.detail["line"]


# --- the ring


def test_nothing_is_lost_or_repeated_over_restarts(node: Node, ring: Ring) -> None:
    ring.add(*xids(1, 2))
    assert node.reported() == ["n1", "n2"]
    ring.add(*xids(3))
    assert node.reported() == ["n3"]
    node.collector.close()
    ring.add(NOISE, *xids(4, 5))
    node.start()
    assert node.reported() == ["n4", "n5"] and node.reported() == []
    node.collector.close()
    node.start()
    assert node.reported() == []


def test_after_a_kill_only_the_last_poll_is_repeated(node: Node, ring: Ring) -> None:
    ring.add(*xids(1))
    assert node.reported() == ["n1"]
    ring.add(*xids(2))
    assert node.reported() == ["n2"]
    ring.position.clear()  # SIGKILL: nothing was closed
    node.start()
    assert node.reported() == ["n2"], "it may not have reached the event log"


def test_counts_continue_over_a_restart_and_agree_with_the_cursor(node: Node, ring: Ring) -> None:
    corrected = "mce: [Hardware Error]: Machine check events logged"
    ring.add(OOM, corrected, XID31)
    before = node.values()
    assert before[("rolecall_kernel_oom_kills_total",)] == 1 and before[("rolecall_kernel_log_lines_total",)] == 3
    node.collector.close()
    assert node.start() and node.values() == before  # and shown at once, with no new line
    saved = node.state.read_bytes()
    ring.add(OOM)
    assert node.values()[("rolecall_kernel_oom_kills_total",)] == 2
    if node.collector._source is not None:
        node.collector._source.close()  # SIGKILL: the last poll is not on disk
    node.state.write_bytes(saved)
    node.start()
    assert node.values()[("rolecall_kernel_oom_kills_total",)] == 2  # the line came again, and counts once
    node.boot = "another boot"
    node.collector.close()
    ring.records.clear()
    ring.next = 0
    ring.add(OOM)
    node.start()
    assert node.values()[("rolecall_kernel_oom_kills_total",)] == 3


@pytest.mark.parametrize(
    "row",
    [
        ["rolecall_kernel_oom_kills_total", ["other-node"], 7],
        ["rolecall_kernel_oom_kills_total", ["gpu-7", "more"], 7],
        ["rolecall_kernel_oom_kills_total", ["gpu-7"], -7],
        ["rolecall_kernel_oom_kills_total", ["gpu-7"], "7"],
        ["rolecall_kernel_oom_kills_total", "gpu-7", 7],
        ["rolecall_up", ["gpu-7"], 7],
        [["x"], [], {}],
        7,
    ],
)
def test_counts_that_make_no_sense_are_left_out(node: Node, ring: Ring, row: object) -> None:
    good = ["rolecall_kernel_link_downs_total", ["gpu-7", "eth0"], 4]
    node.state.write_text(json.dumps({"path": "/dev/kmsg", "counts": [row, good]}))
    node.start()
    assert node.values() == {
        ("rolecall_kernel_oom_kills_total",): 0.0,
        ("rolecall_kernel_log_lines_total",): 0.0,
        ("rolecall_kernel_log_lines_lost_total",): 0.0,
        ("rolecall_kernel_link_downs_total", "eth0"): 4.0,
    }


def test_a_new_boot_is_read_from_its_beginning(node: Node, ring: Ring) -> None:
    ring.add(NOISE, NOISE, *xids(1))
    assert node.reported() == ["n1"]
    node.collector.close()
    ring.records.clear()
    ring.next, node.boot = 0, "another"
    ring.add(*xids(2))
    node.start()
    assert node.reported() == ["n2"]
    assert node.values()[("rolecall_kernel_log_lines_lost_total",)] == 0


def test_numbers_that_restarted_under_the_same_boot_id(node: Node, ring: Ring) -> None:
    ring.add(NOISE, NOISE, NOISE, *xids(1))
    assert node.reported() == ["n1"]
    node.collector.close()
    ring.records.clear()
    ring.next = 0
    ring.add(*xids(2))
    node.start()
    assert [node.reported(), node.reported(), node.reported()] == [[], ["n2"], []]


def test_an_overrun_is_counted_and_the_remaining_lines_are_reported(tmp_path: Path) -> None:
    ring = Ring(size=4)
    node = Node(tmp_path, ring)
    ring.add(*xids(1))
    assert node.reported() == ["n1"]
    ring.add(*xids(*range(2, 12)))  # ten more, of which the ring keeps four
    assert node.reported() == ["n8", "n9", "n10", "n11"]
    assert node.values()[("rolecall_kernel_log_lines_lost_total",)] == 6
    node.collector.close()
    ring.add(*xids(*range(12, 18)))
    node.start()
    assert node.reported() == ["n14", "n15", "n16", "n17"]
    assert node.values()[("rolecall_kernel_log_lines_lost_total",)] == 6 + 2
    node.collector.close()


def test_lines_overwritten_before_the_first_start_are_not_counted_as_lost(tmp_path: Path) -> None:
    ring = Ring(size=2)
    ring.add(*xids(1, 2, 3))
    node = Node(tmp_path, ring)
    assert node.reported() == ["n2", "n3"]
    assert node.values()[("rolecall_kernel_log_lines_lost_total",)] == 0
    node.collector.close()


def test_a_poll_is_bounded_and_the_next_one_continues(node: Node, ring: Ring) -> None:
    ring.add(*xids(*range(150)))
    reported = [node.reported() for _ in range(4)]
    assert [len(t) for t in reported] == [NUM_FACTS_MAX, NUM_FACTS_MAX, 150 - 2 * NUM_FACTS_MAX, 0]
    assert [n for t in reported for n in t] == [f"n{i}" for i in range(150)]
    ring.add(*[NOISE] * 5000, *xids(999))
    assert [node.reported() for _ in range(3)] == [[], [], ["n999"]]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"next": "x"}', '{"path": "/dev/kmsg", "next": "7"}'])
def test_a_damaged_cursor_reads_all(node: Node, ring: Ring, damage: str) -> None:
    ring.add(*xids(1))
    node.state.write_text(damage)
    node.start()
    assert node.reported() == ["n1"]


def test_a_device_that_breaks_is_reopened(node: Node, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    ring.add(*xids(1))
    assert node.reported() == ["n1"]
    read = ring.read

    def broken(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(ring, "read", broken)
    node.collector.close()
    node.start()
    with pytest.raises(CollectorUnavailable, match="Input/output error"):
        node.read()
    monkeypatch.setattr(ring, "read", read)
    node.start()
    ring.add(*xids(2))
    assert node.reported()[-1] == "n2"


def test_a_missing_permission_is_reported_with_the_fix(tmp_path: Path) -> None:
    def refused(path: Path, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def open_source(path: Path, cursor: dict[str, Any], proc: Path) -> KernelLogSource:
        return Kmsg(path, cursor, BOOT, open_=refused)

    collector = KernelLogCollector(node=NODE, merger=XidMerger(), open_source=open_source)
    for _ in range(2):
        with pytest.raises(CollectorUnavailable, match=r"/dev/kmsg: no permission: .*CAP_SYSLOG"):
            collector.read(1.0)
    collector.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="no kernel log")
def test_the_real_device_is_read_without_waiting() -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        pytest.skip("the kernel refuses")
    collector = KernelLogCollector(node=NODE, merger=XidMerger())
    collector.read(1.0)
    lines = {v.metric.name: v.value for v in collector.read(2.0).values}
    collector.close()
    assert lines["rolecall_kernel_log_lines_lost_total"] == 0 <= lines["rolecall_kernel_log_lines_total"]


# --- files


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kern.log"
    path.touch()
    return path


@pytest.fixture
def host(tmp_path: Path, log: Path) -> Iterator[Node]:
    it = Node(tmp_path, file=log)
    yield it
    it.collector.close()


def write(path: Path, *messages: str, end: str = "\n") -> None:
    with path.open("a") as f:
        f.write("".join(f"2026-11-22T08:00:00.123456+00:00 gpu-7 kernel: [ 12.000001] {m}{end}" for m in messages))


def test_a_file_is_followed_over_restarts(host: Node, log: Path) -> None:
    write(log, *xids(1))
    assert host.reported() == ["n1"]
    write(log, NOISE, *xids(2, 3))
    assert host.reported() == ["n2", "n3"]
    host.collector.close()
    write(log, *xids(4))
    host.start()
    assert [host.reported(), host.reported()] == [["n4"], []]


def test_lines_of_other_programs_are_not_the_kernels(host: Node, log: Path) -> None:
    log.write_text(f"2026-11-22T08:00:00.123456+00:00 gpu-7 gpud[12]: {XID79}\nnonsense\n\x00\xff\n")
    reading = host.read()
    assert reading.facts == () and host.values()[("rolecall_kernel_log_lines_total",)] == 0


def test_further_lines_of_a_record_in_a_file(host: Node, log: Path) -> None:
    write(log, LOST[0])
    with log.open("a") as file:
        file.write(f"      {LOST[1]}\n      {LOST[2]}\n")
    assert [fact.detail["xid"] for fact in host.read().facts] == ["79"]


def test_a_line_counts_when_it_is_finished(host: Node, log: Path) -> None:
    write(log, f"{XID31} n", end="")
    assert host.reported() == []
    with log.open("a") as f:
        f.write("1\n")
    assert host.reported() == ["n1"]


def test_a_renamed_file_is_read_to_its_end_first(host: Node, log: Path) -> None:
    write(log, *xids(1))
    assert host.reported() == ["n1"]
    old = log.rename(log.with_name("kern.log.1"))
    assert host.reported() == []  # between rename and creation
    log.touch()
    write(old, *xids(2))  # its writer has not turned to the new one yet
    assert host.reported() == ["n2"]
    write(old, f"{XID31} n3", end="")
    write(log, *xids(4))
    assert host.reported() == ["n3", "n4"]
    write(log, *xids(5))
    assert host.reported() == ["n5"]


def test_a_file_that_was_renamed_while_the_agent_was_away(host: Node, log: Path) -> None:
    write(log, *xids(1))
    assert host.reported() == ["n1"]
    host.collector.close()
    write(log, *xids(2))
    log.rename(log.with_name("kern.log-20261122"))
    write(log, *xids(3))
    host.start()
    assert [host.reported(), host.reported()] == [["n2", "n3"], []]


def test_a_file_that_was_rotated_out_of_sight(host: Node, log: Path) -> None:
    write(log, *xids(1))
    assert host.reported() == ["n1"]
    host.collector.close()
    other = log.with_name("new")
    write(other, *xids(2))
    other.replace(log)
    host.start()
    assert [host.reported(), host.reported()] == [["n2"], []]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("longer", [False, True])
def test_a_truncated_file_is_read_from_its_beginning(host: Node, log: Path, longer: bool, away: bool) -> None:
    write(log, *xids(1, 2))
    assert host.reported() == ["n1", "n2"]
    if away:
        host.collector.close()
    os.truncate(log, 0)
    new = xids(*range(13, 19)) if longer else xids(3)
    write(log, *new)
    if away:
        host.start()
    assert host.reported() == [m.rsplit(" ", 1)[-1] for m in new]
    assert host.reported() == []


def test_of_a_long_history_the_newest_part_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    line = f"2026-11-22T08:00:00.123456+00:00 gpu-7 kernel: [ 12.000001] {NOISE}\n"
    log.write_text(line * (LOOKBACK_BYTES // len(line) + 100))
    write(log, *xids(1))
    node = Node(tmp_path, file=log)
    reported = [t for _ in range(10) for t in node.reported()]
    lines = node.values()[("rolecall_kernel_log_lines_total",)]
    node.collector.close()
    assert reported == ["n1"] and LOOKBACK_BYTES // len(line) - 1 <= lines <= LOOKBACK_BYTES // len(line) + 1


def test_a_line_without_an_end_is_no_endless_wait(host: Node, log: Path) -> None:
    log.write_bytes(b"x" * 300_000 + b"\n")
    write(log, *xids(1))
    assert host.reported() == ["n1"]


def test_an_unreadable_log_is_reported_with_the_reason(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "does not exist"), (tmp_path, "neither a device nor a file")):
        with pytest.raises(CollectorUnavailable, match=reason):
            KernelLogCollector(node=NODE, merger=XidMerger(), path=path).read(1.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CollectorUnavailable, match="neither"):
        KernelLogCollector(node=NODE, merger=XidMerger(), path=tmp_path / "pipe").read(1.0)


def test_another_log_restarts(tmp_path: Path, host: Node, log: Path) -> None:
    write(log, *xids(1))
    host.reported()
    host.collector.close()
    host.file = tmp_path / "other.log"
    write(host.file, *xids(2))
    host.start()
    assert host.reported() == ["n2"]
