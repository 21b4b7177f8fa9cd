"""Messages of the kernel beside near-misses, the stamps before them, and any bytes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.formats.kernel_log.messages import (
    FAULTS,
    HardwareError,
    KernelFault,
    KernelLinkChange,
    KernelReader,
    OomKill,
    parse_message,
)
from rolecall.formats.kernel_log.nvidia import GpuLost, GpuNamed, NvLink5, SxidLine, XidLine, normal_pci
from rolecall.formats.kernel_log.timestamps import parse_line, parse_record, wall_of_local
from rolecall.formats.xid.nvlink import assess_line
from rolecall.formats.xid.xid import RecoveryAction, XidAction

UUID = "GPU-5a1b2c3d-0011-2233-4455-66778899aabb"


def xid_line(message: str) -> XidLine:
    fact = parse_message(message)
    assert isinstance(fact, XidLine), message
    return fact


# --- XID


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE "
            "GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"),
            ("0000:3b:00", 31, 4711, "python3", ""),
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", ("0000:03:00", 14, None, "", "")),
        (
            "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            ("0000:05:00", 79, None, "", ""),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: CE User Channel (0x9). RST: No",
            ("0000:01:00", 94, 7194, "", "GPU-I:05 GPU-CI:00"),
        ),
        ("NVRM: Xid (PCI:0018:01:00): 119, pid=1234, name=pt_main_thread, Timeout after 6s", ("0018:01:00", 119, 1234, "pt_main_thread", "")),
        ("NVRM: Xid (PCI:10000:01:00): 48", ("10000:01:00", 48, None, "", "")),
    ],
)  # fmt: skip
def test_xid_lines_of_both_generations(message: str, wanted: tuple[str, int, int | None, str, str]) -> None:
    fact = xid_line(message)
    assert (fact.pci, fact.code, fact.pid, fact.name, fact.partition) == wanted
    assert fact.instance == ({"gpu_instance": "5", "compute_instance": "0"} if fact.partition else {})


@pytest.mark.parametrize(
    "message",
    [
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: Xid (PCI:0000:66:00): , pid=2280636",
        "NVRM: Xid (PCI:0000:66:00): 0, nothing",
        "NVRM: Xid (PCI:0000:66:00): 31x, pid=1",
        "NVRM: Xid (PCI:0000:66): 31, pid=1",
        "NVRM: Xid (PCI:0000:66:00) 31, pid=1",
        "NVRM: Xid 31 on GPU 3",
        "nvrm: xid (PCI:0000:66:00): 31, pid=1",
        "monitor: NVRM: Xid (PCI:0000:66:00): 31, pid=1",  # quotes one
        " NVRM: Xid (PCI:0000:66:00): 31, pid=1",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  575.57.08",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter done",
        "NVRM: GPU 0000:3b:00.0: GPU will fall off the bus",
        "NVRM: nvidia-bug-report.sh as root to collect this data before the NVIDIA kernel module is unloaded.",
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 234",
        "nvidia 0000:3b:00.0: enabling device (0000 -> 0003)",
        "NVRM: Xid (PCI:0000:66:00): 31 , pid=1",
        "NVRM: Xid (PCI:0000:66:00): -31, pid=1",
        "NVRM: Xid (PCI:0000:66:00): 031, pid=1",
        "NVRM: Xid (PCI:0000:66:00): 31.5, pid=1",
        "NVRM: Xid (PCI:0000:66:00): 31; pid=1",
        "NVRM: Xid (PCI:0000:66:00): 0x31, pid=1",
        "NVRM: Xid (PCI:0000:66:00): 12345, pid=1",
        "NVRM: Xid (PCI:0000:66:00): 3\u0661, digits of another script",
        "NVRM: Xid (PCI:0000:66:00)): 31, pid=1",
        "NVRM: Xid (PCI:0000:zz:00): 31, pid=1",
        "NVRM: Xid (PCI:0000:66:00 GPU-X:05): 31, pid=1",
        f"NVRM: Xid ({UUID}): 31, pid=1",
        "NVRM: XID (PCI:0000:66:00): 31, pid=1",
        "NVRM: Xids (PCI:0000:66:00): 31, pid=1",
        "NVRM:  Xid (PCI:0000:66:00): 31, pid=1",
        "NVRM: NVRM: Xid (PCI:0000:66:00): 31, pid=1",
        "NVRM: nvAssertFailedNoLog: Xid (PCI:0000:66:00): 31, pid=1",
        "NVRM: GPU at PCI:0000:3b:00: GPU-5a1b2c3d",
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).",
        "message repeated 2 times: [ NVRM: Xid (PCI:0000:66:00): 31, pid=1]",
        "NVRM: Xid (0000[4711]: segfault at 0 ip 0 sp 0 error 4 in libc.so.6",  # its name is "NVRM: Xid (0000"
    ],
)
def test_lines_like_an_xid_that_are_none(message: str) -> None:
    assert parse_message(message) is None


NVLINK5 = (
    "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000010 0x0 0x0 0x0 0x0)"
)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (NVLINK5, NvLink5(unit="NETIR_LINK_EVT", fatal=True, link=9, subcode=37, interrupt=0x025525C6, status=0x10)),
        (
            "NVRM: Xid (PCI:0000:00:1e): 149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]",
            NvLink5(unit="NETIR_LINK_EVT", fatal=True, link=1, subcode=0, interrupt=10, status=0),
        ),
        (
            "NVRM: Xid (PCI:0000:00:1e): 150, MSE Degraded Fatal XC0 i0 Link -1 (0x00000000 0xffffffff 0x00000000)",
            NvLink5(unit="MSE Degraded", fatal=True, link=None, subcode=0, interrupt=0, status=0xFFFFFFFF),
        ),
        (
            (
                "NVRM: Xid (PCI:0018:01:00): 145, pid=812, name=python3, RLW_REMAP/ADDR Nonfatal XC0 i0 Link 00 "
                "(0x00000004 0x80000000 0x00000000 0x00000000 0x00000000 0x00000000)"
            ),
            NvLink5(unit="RLW_REMAP/ADDR", fatal=False, link=0, subcode=0, interrupt=4, status=0x80000000),
        ),
        ("NVRM: Xid (PCI:0018:01:00): 149, link went down", None),
        (NVLINK5.replace(": 149,", ": 143,"), None),
    ],
)
def test_nvlink5(message: str, wanted: NvLink5 | None) -> None:
    line = xid_line(message)
    assert (line.nvlink and replace(line.nvlink, assessment=None)) == wanted
    if line.nvlink is not None:
        assert line.nvlink.assessment == assess_line(
            line.code, line.nvlink.unit, line.nvlink.interrupt, line.nvlink.status
        )


@pytest.mark.parametrize("code", range(144, 151))
def test_every_nvlink5_code_has_its_sub_code(code: int) -> None:
    nvlink = xid_line(NVLINK5.replace(": 149,", f": {code},")).nvlink
    assert nvlink is not None and nvlink.subcode == 37


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", RecoveryAction.GPU_RESET),
        ("from 0x0 (None) to 0x1 (PF FLR)", RecoveryAction.GPU_RESET),  # names differ, numbers do not
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", RecoveryAction.NODE_REBOOT),
        ("from 0x0 (None) to 0x2 (OS Reboot)", RecoveryAction.NODE_REBOOT),
        ("from 0x0 (None) to 0x3 (Drain P2P)", RecoveryAction.DRAIN_P2P),
        ("from 0x0 (None) to 0x4 (Drain and Reset)", RecoveryAction.DRAIN_AND_RESET),
        ("from 0x1 (GPU Reset Required) to 0x0 (None)", RecoveryAction.NONE),
        ("from 0x0 (None) to 0x63 (Something later)", RecoveryAction.UNKNOWN),
        ("to something", None),
    ],
)
def test_154_names_the_recovery_action(change: str, wanted: RecoveryAction | None) -> None:
    assert xid_line(f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed {change}").recovery is wanted


NVLINK5_SHORT = "NVRM: Xid (PCI:0018:01:00): {}, {} {} XC0 i0 Link 09 ({:#010x} {:#010x} 0x00000000)"


@pytest.mark.parametrize(
    ("line", "action", "fatal", "words"),
    [
        ((149, "NETIR_LINK_EVT", "Fatal", 0x004505C6, 0), "RESET_GPU", True, "signal integrity"),
        ((149, "NETIR_LINK_DOWN", "Fatal", 0x02600011, 0), "WORKFLOW_NVLINK5_ERR", True, "software that uses NVLink"),
        ((149, "NETIR_LINK_DOWN", "Nonfatal", 0x02600011, 0), "WORKFLOW_NVLINK5_ERR", True, "reset the GPU"),
        ((145, "RLW_REMAP", "Nonfatal", 0x4, 0x40), "RESET_GPU", True, "reset it"),  # the table is the worse
        ((145, "RLW_REMAP", "Fatal", 0x4, 0x100), "WORKFLOW_NVLINK5_ERR", True, "says Fatal"),  # the line is
        ((145, "RLW_REMAP", "Nonfatal", 0x4, 0x4), "XID_154_EVAL", False, "XID 154 next to it"),
        ((147, "TREX", "Nonfatal", 0xE, 0x80000000), "IGNORE", False, "nothing"),
        ((147, "SOMETHING_LATER", "Fatal", 0xE, 0x1), "WORKFLOW_NVLINK5_ERR", True, "says Fatal"),
        ((147, "SOMETHING_LATER", "Nonfatal", 0xE, 0x1), "IGNORE", False, "nothing"),
    ],
)
def test_of_144_to_150_line_and_table_decide(
    line: tuple[int, str, str, int, int], action: str, fatal: bool, words: str
) -> None:
    fact = xid_line(NVLINK5_SHORT.format(*line))
    assert (fact.action, fact.fatal) == (XidAction(action), fatal) and words in fact.advice


@pytest.mark.parametrize(
    ("registers", "action", "fatal", "words"),
    [
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", "WORKFLOW_NVLINK_ERR", True, "field diagnostics"),
        ("0x40000001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "IGNORE", False, "nothing"),
        ("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", "IGNORE", False, "go on"),
        ("0x0, 0xffffffff, 0x0, 0x0, 0x0, 0xffffffff, 0xffffffff", "WORKFLOW_NVLINK_ERR", True, "reset the GPU"),
    ],
)
def test_of_74_the_registers_decide(registers: str, action: str, fatal: bool, words: str) -> None:
    fact = xid_line(f"NVRM: Xid (PCI:0003:00:00): 74, NVLink: fatal error detected on link 14({registers})")
    assert fact.link == 14 and (fact.action, fact.fatal) == (XidAction(action), fatal) and words in fact.advice


def test_13_names_its_place_and_74_its_registers() -> None:
    thirteen = xid_line(
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=9, name=a, Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): Out Of "
        "Range"
    )
    assert thirteen.place == "GPC 1, TPC 4"
    link = xid_line(
        "NVRM: Xid (PCI:0000:c1:00): 74, pid=5, name=x, NVLink: fatal error detected on link 6(0x200010, 0x0, 0x0, 0x0)"
    )
    assert link.registers == (0x200010, 0, 0, 0) and link.link == 6
    assert link.nvlink_register_errors == ("signal", "ecc")


# --- GPUs that are gone, SXid


def test_a_gpu_that_fell_off_the_bus_in_one_line_or_three() -> None:
    lost = GpuLost(pci="0000:0b:00")
    assert parse_message("NVRM: GPU 0000:0b:00.0: GPU has fallen off the bus.") == lost
    assert parse_message("NVRM: GPU at PCI:0000:0b:00: GPU has fallen off the bus.") == lost
    three = (
        "NVRM: The NVIDIA GPU 0000:0b:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    reader = KernelReader()
    assert [reader.take(line) for line in three] == [None, None, lost]
    assert reader.take(three[2]) is None, "said of no GPU"
    assert KernelReader().take("\n".join(three)) == lost, "one record of /dev/kmsg"


def test_three_lines_are_not_joined_over_a_distance() -> None:
    reader = KernelReader()
    reader.take("NVRM: The NVIDIA GPU 0000:0b:00.0")
    for _ in range(5):
        reader.take("usb 1-1: new high-speed USB device number 2 using xhci_hcd")
    assert reader.take("NVRM: fallen off the bus and is not responding to commands.") is None


def test_addresses_get_their_uuids() -> None:
    reader = KernelReader()
    assert parse_message(f"NVRM: GPU at PCI:0000:3b:00: {UUID}") == GpuNamed(pci="0000:3b:00", uuid=UUID)
    assert reader.take(f"NVRM: GPU at PCI:0000:3b:00: {UUID}") is None
    assert reader.uuids == {"0000:3b:00": UUID}


def test_normal_addresses() -> None:
    for written in ("0000:3b:00", "PCI:0000:3b:00", "PCI:3b:00", "3B:00.0", "00000000:3B:00.0", "0000:3B:00.0"):
        assert normal_pci(written) == "0000:3b:00"
    assert normal_pci("00010000:01:00") == "10000:01:00"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            (3, "0000:c1:00", 12028, False, 32, "egress non-posted PRIV error (First)"),
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 30 sourcetrack timeout error",
            (0, "0000:c3:00", 24007, True, 30, "sourcetrack timeout error"),
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 11001, Fatal, ingress invalid command",
            (0, "0000:00:00", 11001, True, None, "ingress invalid command"),
        ),
    ],
)
def test_sxid(message: str, wanted: tuple[int, str, int, bool, int | None, str]) -> None:
    fact = parse_message(message)
    assert isinstance(fact, SxidLine)
    assert (fact.switch, fact.pci, fact.code, fact.fatal, fact.link, fact.text) == wanted


@pytest.mark.parametrize(
    "message",
    [
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Data {0x00140004, 0x00100000, 0x00140004, 0x00000000}",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Severity 0 Engine instance 61 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal",
        "nvidia-nvswitch3: open (major=508)",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatality, Link 32 text",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028 Fatal, Link 32 text",
        "nvidia-nvswitch: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 text",
        "nvidia-nvswitch3: SXid: 12028, Fatal, Link 32 text",
        "nvidia-nvswitch3: Xid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 text",
    ],
)
def test_lines_after_an_sxid_belong_to_it(message: str) -> None:
    assert parse_message(message) is None


# --- memory, links, hardware, other faults

RSS = "total-vm:9096kB, anon-rss:8192kB, file-rss:4kB, shmem-rss:0kB, UID:1000 pgtables:72kB oom_score_adj:0"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (f"Out of memory: Killed process 812 (python3) {RSS}", OomKill(pid=812, name="python3", of_cgroup=False, rss_bytes=8 << 20)),
        (f"Memory cgroup out of memory: Killed process 813 (ray::Trainer.st) {RSS}", OomKill(pid=813, name="ray::Trainer.st", of_cgroup=True, rss_bytes=8 << 20)),
        (f"Killed process 814 (python3) {RSS}", OomKill(pid=814, name="python3", of_cgroup=False, rss_bytes=8 << 20)),
        (f"Out of memory (oom_kill_allocating_task): Killed process 815 (a) b) c) {RSS}", OomKill(pid=815, name="a) b) c", of_cgroup=False, rss_bytes=8 << 20)),
        ("Killed process 816 (java), UID 1000, total-vm:16kB, anon-rss:1kB, file-rss:0kB", OomKill(pid=816, name="java", of_cgroup=False, rss_bytes=1024)),
        ("mlx5_core 0000:41:00.0 ens1f0np0: Link down", KernelLinkChange(up=False, interface="ens1f0np0", nic="0000:41:00.0")),
        ("mlx5_core 0000:41:00.1 ens1f1np1: Link up", KernelLinkChange(up=True, interface="ens1f1np1", nic="0000:41:00.1")),
        ("igb 0000:07:00.0 eth0: igb: eth0 NIC Link is Down", KernelLinkChange(up=False, interface="eth0", nic="0000:07:00.0")),
        ("ice 0000:17:00.0 ens1f0: NIC Link is up 100 Gbps, Requested FEC: RS-FEC", KernelLinkChange(up=True, interface="ens1f0", nic="0000:17:00.0")),
        ("bnxt_en 0000:19:00.0 eno1: NIC Link is Down", KernelLinkChange(up=False, interface="eno1", nic="0000:19:00.0")),
        ("tg3 0000:02:00.0 eth0: Link is down", KernelLinkChange(up=False, interface="eth0", nic="0000:02:00.0")),
        ("e1000e: eth0 NIC Link is Up 1000 Mbps Full Duplex", KernelLinkChange(up=True, interface="eth0")),
        ("mlx4_en: eth2: Link Down", KernelLinkChange(up=False, interface="eth2")),
        ("IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready", KernelLinkChange(up=True, interface="ib0")),
        ("mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400", HardwareError(what="machine_check", corrected=False, device="bank 7")),
        ("mce: [Hardware Error]: Machine check events logged", HardwareError(what="machine_check", corrected=True)),
        (("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 " "page:0x3f)"), HardwareError(what="memory", corrected=True, device="MC0")),
        ("EDAC MC1: 1 UE memory scrubbing error on CPU_SrcID#1_MC#1_Chan#0_DIMM#0", HardwareError(what="memory", corrected=False, device="MC1")),
        ("{1}[Hardware Error]: event severity: fatal", HardwareError(what="firmware", corrected=False)),
        ("{7}[Hardware Error]: event severity: corrected", HardwareError(what="firmware", corrected=True)),
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0", HardwareError(what="pcie", corrected=False, device="0000:01:00.0")),
        ("pcieport 0000:00:01.0: AER: Multiple Correctable error message received from 0000:3b:00.0", HardwareError(what="pcie", corrected=True, device="0000:3b:00.0")),
        ("Memory failure: 0x3f2a1: recovery action for dirty LRU page: Recovered", HardwareError(what="memory", corrected=False, device="0x3f2a1")),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:1234]", KernelFault(what="soft_lockup", pid=1234, name="python3", device="CPU#3")),
        ("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [kworker/3:1:99]", KernelFault(what="soft_lockup", pid=99, name="kworker/3:1", device="CPU#3")),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 5", KernelFault(what="hard_lockup", device="cpu 5")),
        ("INFO: task python3:4711 blocked for more than 120 seconds.", KernelFault(what="hung_task", pid=4711, name="python3")),
        ("rcu: INFO: rcu_sched self-detected stall on CPU", KernelFault(what="rcu_stall")),
        ("Kernel panic - not syncing: Fatal machine check", KernelFault(what="panic")),
        ("BUG: unable to handle page fault for address: ffffb2", KernelFault(what="oops")),
        (("pt_main_thread[2536443]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in " "libnccl.so.2[7f7c7ac00000+d3d3000]"), KernelFault(what="segfault", pid=2536443, name="pt_main_thread", device="libnccl.so.2")),
        ("blk_update_request: I/O error, dev nvme0n1, sector 123456 op 0x0:(READ)", KernelFault(what="disk_error", device="nvme0n1")),
        ("nvme nvme1: I/O 258 (I/O Cmd) QID 4 timeout, aborting", KernelFault(what="disk_error", device="nvme1")),
        ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python3", KernelFault(what="filesystem_error", device="sda1")),
        ("EXT4-fs (sda1): Remounting filesystem read-only", KernelFault(what="filesystem_error", device="sda1")),
        ("mlx5_core 0000:9a:00.0: poll_health:1021:(pid 0): Fatal error 1 detected", KernelFault(what="nic_fault", device="0000:9a:00.0")),
        ("mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged", KernelFault(what="nic_cable", device="0000:9a:00.0")),
        ("mlx5_core 0000:5c:00.0: mlx5_port_module_event:1131:(pid 0): Port module event[error]: module 0, Cable error, High Temperature", KernelFault(what="nic_cable", device="0000:5c:00.0")),
        # The next three as drivers/net/ethernet/mellanox/mlx5/core/events.c and cmd.c write them; the first also in gpud.
        ("mlx5_core 0000:5c:00.0: wait_func:1234:(pid 5): ACCESS_REG(0x805) timeout. Will cause a leak of a command resource", KernelFault(what="nic_fault", device="0000:5c:00.0")),
        ("mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe slot (27W).", KernelFault(what="nic_power", device="0000:5c:00.0")),
        ("mlx5_core 0000:41:00.1: temp_warn:170:(pid 0): High temperature on sensors with bit set 0 1", KernelFault(what="nic_hot", device="0000:41:00.1")),
        ("mlx5_core 0000:41:00.0: mlx5_cmd_out_err:808:(pid 1234): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3), syndrome (0x1c0da7), err(-22)", KernelFault(what="nic_register_error", device="0000:41:00.0")),
        # nvidia-peermem.c (peer_err), and gpud
        ("nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing", KernelFault(what="gpu_peer_memory")),
        # kernel_nvlink.c and kernel_nvlinkcorelib_gh100.c of the open driver; from R555 on it names the GPU
        ("NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!", KernelFault(what="nvlink_detect_failed")),
        ("NVRM: GPU3 knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!", KernelFault(what="nvlink_detect_failed", device="GPU3")),
        # drivers/md/raid1.c, raid5.c, raid10.c
        ("md/raid1:md0: Disk failure on nvme1n1, disabling device.\nmd/raid1:md0: Operation continuing on 1 devices.", KernelFault(what="raid_degraded", device="md0")),
        ("md/raid:md127: Cannot continue operation (2/5 failed).", KernelFault(what="raid_degraded", device="md127")),
        ("md/raid:md127: raid level 5 active with 2 out of 3 devices, algorithm 2", KernelFault(what="raid_degraded", device="md127")),
        ("md/raid1:md0: active with 1 out of 2 mirrors", KernelFault(what="raid_degraded", device="md0")),
        # drivers/nvme/host/multipath.c
        ("block nvme0n1: no usable path - requeuing I/O", KernelFault(what="nvme_no_path", device="nvme0n1")),
        ("block nvme0n1: no available path - failing I/O", KernelFault(what="nvme_no_path", device="nvme0n1")),
        # fs/buffer.c, fs/file_table.c, net/sunrpc/clnt.c
        ("Buffer I/O error on dev sdb1, logical block 0, async page read", KernelFault(what="buffer_io_error", device="sdb1")),
        ("VFS: file-max limit 1048576 reached", KernelFault(what="file_max")),
        ("nfs: server storage-1 not responding, still trying", KernelFault(what="nfs_server", device="storage-1")),
        ("nfs: server 10.0.0.7 not responding, timed out", KernelFault(what="nfs_server", device="10.0.0.7")),
        ("nfs: server storage-1 OK", KernelFault(what="nfs_server", device="storage-1", over=True)),
        ("NETDEV WATCHDOG: eth0 (ixgbe): transmit queue 3 timed out 5120 ms", KernelFault(what="nic_fault", device="eth0")),
        ("pcieport 0000:00:1c.0: pciehp: Slot(4): Link Down", KernelFault(what="pcie_link_down", device="0000:00:1c.0")),
        ("mce: CPU3: Package temperature above threshold, cpu clock throttled (total events = 1)", KernelFault(what="cpu_throttled", device="CPU3")),
        ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2401)", KernelFault(what="gpu_init_failed", device="0000:3b:00")),
    ],
)  # fmt: skip
def test_other_messages(message: str, wanted: object) -> None:
    assert parse_message(message) == wanted
    if isinstance(wanted, KernelFault):
        assert wanted.what in FAULTS


@pytest.mark.parametrize(
    "message",
    [
        "Out of memory: Kill process 812 (python3) score 900 or sacrifice child",  # the kill itself has its own line
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python3,pid=812,uid=0",
        "oom_reaper: reaped process 812 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "Tasks in /kubepods/pod1 are going to be killed due to memory.oom.group set",
        f"worker said: Out of memory: Killed process 812 (python3) {RSS}",
        "ata1: SATA link down (SStatus 0 SControl 300)",
        "bond0: (slave ens1f0): link status definitely down, disabling slave",  # the slave's driver said so itself
        "IPv6: ADDRCONF(NETDEV_UP): ib0: link is not ready",
        "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        "mlx5_core 0000:41:00.0: PCIe slot advertised sufficient power (75W).",
        "mlx5_core 0000:41:00.0: Port module event: module 0, Cable plugged",
        "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:808:(pid 1): CREATE_QP(0x500) op_mod(0x0) failed, status limits exceeded",
        "md/raid1:md0: active with 2 out of 2 mirrors",
        "md/raid:md0: raid level 5 active with 3 out of 3 devices, algorithm 2",
        "nvidia-peermem: loaded",
        "nfs: server storage-1 OKAY",
        "block nvme0n1: the capability attribute has been deprecated.",
        "mce: CPU0: Package temperature/speed normal",
        "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: 9020000000000000",  # corrected: reported as "logged"
        "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0",
        "EDAC MC: Ver: 3.0.0",
        "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4",
        "pcieport 0000:00:01.0: AER: enabled with IRQ 26",
        "pcieport 0000:00:01.0: AER: device recovery successful",
        "watchdog: Enabling NMI watchdog",
        "INFO: task python3:4711 is blocked on a mutex likely owned by task b:12.",
        "rcu: Hierarchical RCU implementation.",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "nvme nvme0: pci function 0000:01:00.0",
        "python3[12]: regfault at 0",
        "",
    ],
)
def test_near_misses(message: str) -> None:
    assert parse_message(message) is None


# A process chooses its own name, 15 characters of it.
NAMES = ("EDAC MC0: 1 UE ", "Oops: 0002", "kernel BUG at m", "igb: a Link Up", "NVRM: Xid (0000", "Out of memory: ")


@pytest.mark.parametrize("name", NAMES)
def test_a_process_cannot_write_the_kernels_lines_by_its_name(name: str) -> None:
    line = f"{name}[4711]: segfault at 7f79 ip 00007f sp 00007f error 4 in libc.so.6[7f7c7ac00000+d3d3000]"
    assert parse_message(line) == KernelFault(what="segfault", pid=4711, name=name, device="libc.so.6")
    assert parse_message(f"{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0") is None


# --- stamps

T = 1_795_334_400.0  # 2026-11-22T08:00:00Z


@pytest.mark.parametrize(
    ("line", "host", "wall_at", "uptime_seconds"),
    [
        ("4,1234,5678901234,-;hello: x", "", None, 5678.901234),
        ("[ 5678.901234] hello: x", "", None, 5678.901234),
        ("[ 5678.901234][    T7] hello: x", "", None, 5678.901234),
        ("<4>[ 5678.901234] hello: x", "", None, 5678.901234),
        ("kern  :err   : [ 5678.901234] hello: x", "", None, 5678.901234),
        ("[Sun Nov 22 08:00:00 2026] hello: x", "", T, None),
        ("2026-11-22T08:00:00,250000+00:00 hello: x", "", T + 0.25, None),
        ("2026-11-22T09:00:00.250000+01:00 gpu-7 kernel: hello: x", "gpu-7", T + 0.25, None),
        ("2026-11-22T08:00:00+0000 gpu-7 kernel: [ 12.000001] hello: x", "gpu-7", T, None),
        ("2026-11-22T08:00:00Z gpu-7.example kernel: hello: x", "gpu-7.example", T, None),
        ("Sun 2026-11-22 08:00:00 UTC gpu-7 kernel: hello: x", "gpu-7", T, None),
        ("1795334400.000000 gpu-7 kernel: hello: x", "gpu-7", T, None),
        ("[ 5678.901234] gpu-7 kernel: hello: x", "gpu-7", None, 5678.901234),
    ],
)
def test_stamps(line: str, host: str, wall_at: float | None, uptime_seconds: float | None) -> None:
    stamped = parse_line(line + "\n")
    assert stamped is not None and stamped.message == "hello: x"
    assert (stamped.host, stamped.wall_at, stamped.uptime_seconds) == (host, wall_at, uptime_seconds)


def test_a_stamp_without_a_year_takes_the_latest_that_has_passed() -> None:
    stamped = parse_line("Nov 22 08:00:00.5 gpu-7 kernel: [    5.123456] hello")
    assert stamped is not None and stamped.local == (11, 22, 8, 0, 0.5) and stamped.message == "hello"
    assert wall_of_local(stamped.local, T + 10) == T + 0.5
    assert wall_of_local(stamped.local, T - 7 * 86_400) == T + 0.5 - 365 * 86_400
    assert wall_of_local((2, 29, 0, 0, 0.0), T) == 1_709_164_800.0  # 2024


@pytest.mark.parametrize(
    "line",
    [
        "Nov 22 08:00:00 gpu-7 gpud[812]: NVRM: Xid (PCI:0000:3b:00): 79, quoted",
        "2026-11-22T08:00:00.1+00:00 gpu-7 python3[1]: NVRM: Xid (PCI:0000:3b:00): 79, quoted",
        "2026-11-22T08:00:00+00:00 NVRM: Xid (PCI:0000:3b:00): 79, an application's log",
        "12,1234,5678901234,-;NVRM: Xid (PCI:0000:3b:00): 79, written by a process",
        "<12>[ 5678.901234] NVRM: Xid (PCI:0000:3b:00): 79, written by a process",
        "user  :warn  : [ 5678.901234] NVRM: Xid (PCI:0000:3b:00): 79, written by a process",
        "Feb 31 08:00:00 gpu-7 kernel: no such day",
        "2026-13-22T08:00:00Z gpu-7 kernel: no such month",
        "[Sun Nov 31 08:00:00 2026] no such day",
        "hello world",
        "",
    ],
)
def test_lines_that_are_not_the_kernels(line: str) -> None:
    assert parse_line(line) is None


def test_records_of_kmsg() -> None:
    record = parse_record("6,339,5140900,-;NVRM: a\\x0ab\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
    assert record is not None
    assert (record.sequence, record.uptime_seconds, record.facility, record.message) == (339, 5.1409, 0, "NVRM: a\nb")
    assert parse_record("6,339,5140900,-,caller=T1;x") is not None
    assert parse_record("6,339;x") is None and parse_record("") is None


# --- any bytes

_SEEDS = (
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, text",
    NVLINK5,
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 x",
    f"Out of memory: Killed process 812 (python3) {RSS}",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:1234]",
    "Nov 22 08:00:00 gpu-7 kernel: [    5.123456] hello",
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real line with a piece replaced by anything."""
    text = draw(st.sampled_from(_SEEDS))
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, len(text)))
    return text[:begin] + draw(st.text(max_size=30)) + text[end:]


@settings(max_examples=300, deadline=None)
@given(st.one_of(damaged(), st.binary(max_size=200).map(lambda b: b.decode("utf-8", "replace"))))
def test_nothing_raises(text: str) -> None:
    KernelReader().take(text)
    parse_record(text)
    if (stamped := parse_line(text)) is not None:
        KernelReader().take(stamped.message)


@pytest.mark.parametrize("text", ["NVRM: " + "(" * 100_000, "[" + " " * 100_000, "a" * 100_000 + "[1]: segfault at 0"])
def test_long_lines_are_cut(text: str) -> None:
    assert KernelReader().take(text) is None and parse_line(text) is None
