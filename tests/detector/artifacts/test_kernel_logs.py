"""`rolecall diagnose` over kernel logs: recognised by content, one diagnosis for each thing that is ill, near-misses
none."""

import json
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.kernel_log import diagnosis as kernel_findings
from rolecall.detector.artifacts.kernel_log import logs as kernel_logs
from rolecall.detector.artifacts.kernel_log.logs import KernelLog, KernelLogFact
from rolecall.diagnose import diagnose as diagnosing
from rolecall.formats.kernel_log.messages import FAULTS, HardwareError, KernelFault, KernelLinkChange
from rolecall.formats.xid.xid import ADVICE, XIDS, XidAction, xid

UUID = "GPU-5a1b2c3d-0011-2233-4455-66778899aabb"
NOISE = "usb 1-1: new high-speed USB device number 2 using xhci_hcd"
GPU, OTHER = "0000:3b:00", "0000:86:00"
T = 1_795_334_400.0  # 2026-11-22T08:00:00Z
RSS = "total-vm:9096kB, anon-rss:8388608kB, file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:72kB oom_score_adj:0"


def of_xid(code: int, text: str = "text", pci: str = GPU, process: str = "pid=4711, name=python3, ") -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, {process}{text}"


def iso(seconds: float, message: str, host: str = "gpu-7") -> str:
    """A line of rsyslog, `seconds` after eight o'clock."""
    minutes, rest = divmod(seconds, 60)
    days, minutes = divmod(int(minutes), 1440)
    clock = f"{8 + minutes // 60:02d}:{minutes % 60:02d}:{rest:09.6f}"
    return f"2026-11-{22 + days:02d}T{clock}+00:00 {host} kernel: {message}"


def reported(tmp_path: Path, *lines: tuple[float, str] | str) -> tuple[list[Diagnosis], tuple[str, ...]]:
    """Diagnoses and remarks of a log with these lines."""
    path = tmp_path / "kern.log"
    path.write_text("".join(f"{line if isinstance(line, str) else iso(*line)}\n" for line in lines))
    answer = diagnosing.diagnose([path], [])
    [looked] = answer.inputs
    assert looked.kind == "kernel logs"
    return answer.diagnoses, looked.remarks


# --- kinds of log

FORMS = {
    "dmesg": "[  160.000001] {}",
    "dmesg -T": "[Sun Nov 22 08:00:00 2026] {}",
    "dmesg -x": "kern  :err   : [  160.000001] {}",
    "dmesg -r": "<3>[  160.000001] {}",
    "dmesg --time-format iso": "2026-11-22T08:00:00,000000+00:00 {}",
    "journalctl -k": "Nov 22 08:00:00 gpu-7 kernel: {}",
    "journalctl -k -o short-precise": "Nov 22 08:00:00.000000 gpu-7 kernel: {}",
    "journalctl -k -o short-iso": "2026-11-22T08:00:00+00:00 gpu-7 kernel: {}",
    "journalctl -k -o short-iso-precise": "2026-11-22T08:00:00.000000+00:00 gpu-7 kernel: {}",
    "journalctl -k -o short-full": "Sun 2026-11-22 08:00:00 UTC gpu-7 kernel: {}",
    "journalctl -k -o short-unix": "1795334400.000000 gpu-7 kernel: {}",
    "journalctl -k -o short-monotonic": "[  160.000001] gpu-7 kernel: {}",
    "kern.log": "Nov 22 08:00:00 gpu-7 kernel: [  160.000001] {}",
    "kmsg": "3,1234,160000001,-;{}",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognised_and_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / "gpu-7" / "anything.bin"
    path.parent.mkdir()
    head = "-- Journal begins at Sat 2026-11-21 08:00:00 UTC. --\n" if form.startswith("journal") else ""
    lines = [NOISE, of_xid(79, "GPU has fallen off the bus."), NOISE]
    path.write_text(head + "".join(FORMS[form].format(line) + "\n" for line in lines))
    answer = diagnosing.diagnose([tmp_path], [])
    [d] = answer.diagnoses
    assert (d.fault_class, d.advice) == (FaultClass.GPU, "drain the machine and reboot it")
    assert d.suspects[0].node in ("gpu-7", "anything"), "the host of the line, else a name"
    assert "XID 79 (GPU has fallen off the bus), fatal" in d.because and f"GPU {GPU}" in d.because
    undated = ("160.000001" in FORMS[form] and "Nov" not in form and "Nov" not in FORMS[form]) or form == "kmsg"
    assert d.detected_at == (pytest.approx(160.0, abs=0.01) if undated else _wall(d, form))
    assert answer.inputs[0].content.startswith("1 file: 3 kernel lines")


def _wall(d: Diagnosis, form: str) -> float:
    """Without a year it is the latest eight o'clock of this day that had passed when the file was written."""
    if FORMS[form].startswith("Nov"):
        assert d.detected_at % 86_400 == 8 * 3600
        return d.detected_at
    return T


@pytest.mark.parametrize(
    "content",
    [
        f"2026-11-22 08:00:00,123 INFO trainer: {of_xid(79)}\n",
        f"2026-11-22T08:00:00+00:00 gpu-7 gpud[812]: {of_xid(79)}\n" * 5,
        "[12.5] step 3 loss 0.25\n[13.5] step 4 loss 0.24\n",
        f"[  160.000001] {NOISE}\n" + "a line of something else\n" * 9,
        "\0\0\0\0",
        "",
    ],
)
def test_near_misses_are_not_matched(tmp_path: Path, content: str) -> None:
    (tmp_path / "it").write_text(content)
    assert not kernel_logs.is_log(tmp_path / "it")
    with pytest.raises(UnreadableInput):
        diagnosing.diagnose([tmp_path / "it"], [])


def test_an_xid_that_was_copied_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "pasted.txt").write_text("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    [d] = diagnosing.diagnose([tmp_path / "pasted.txt"], []).diagnoses
    assert "XID 79 (GPU has fallen off the bus), fatal, once" in d.because
    assert d.because.startswith(f"GPU {GPU} of node ")


@pytest.mark.parametrize("uptime", ["[1234.5]", "[ 1234.500]", "[ 1234.500000]"])
def test_an_uptime_of_any_precision_hides_no_xid(tmp_path: Path, uptime: str) -> None:
    [d], _ = reported(tmp_path, f"Nov 22 08:00:00 gpu-7 kernel: {uptime} {of_xid(94)}")
    assert "XID 94" in d.because


@pytest.mark.parametrize(
    "line",
    [
        f"Nov 22 08:00:00 gpu-7 kernel: (1234.5) {of_xid(94)}",
        f"Nov 22 08:00:00 gpu-7 gpud[812]: {of_xid(94)}",
        "Nov 22 08:00:00 gpu-7 kernel: NVRM: Xid (PCI:0000:3b:00) 94: a form to come",
    ],
)
def test_a_log_with_an_xid_that_cannot_be_read_is_never_healthy(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kern.log"
    path.write_text(f"Nov 22 08:00:00 gpu-7 kernel: {NOISE}\n{line}\n")
    answer = diagnosing.diagnose([path], [])
    assert (answer.verdict, answer.diagnoses) == ("cannot_tell", [])
    assert any("1 line with an XID could not be read" in because for _, because in answer.open_ends)


@pytest.mark.parametrize("num_characters", [0, 385, 395, 600])
def test_an_xid_behind_a_long_prefix_is_quoted(tmp_path: Path, num_characters: int) -> None:
    path = tmp_path / "kern.log"
    shipped = f"2026-11-22T08:00:00+00:00 gpu-7 shipper[812]: {'x' * num_characters} {of_xid(94)}"
    path.write_text(f"Nov 22 08:00:00 gpu-7 kernel: {NOISE}\n{shipped}\n")
    [(_, because)] = diagnosing.diagnose([path], []).open_ends
    assert "1 line with an XID could not be read" in because and of_xid(94) in because


def test_a_program_that_repeats_an_xid_of_the_kernel_leaves_nothing_open(tmp_path: Path) -> None:
    _, remarks = reported(tmp_path, (0, of_xid(43)), f"2026-11-22T08:00:00+00:00 gpu-7 gpud[812]: {of_xid(43)}")
    assert not any("cannot tell" in remark for remark in remarks)


@pytest.mark.parametrize("name", ["k/dmesg.txt", "k/x31.txt", "k/pasted.log"])
def test_a_name_that_is_no_hosts_is_not_taken_for_a_node(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(f"[  160.000001] {of_xid(79)}\n")
    [d] = diagnosing.diagnose([path], []).diagnoses
    assert d.because.startswith(f"GPU {GPU} of node unknown (file {path.name}): ")


def test_the_kernels_lines_among_those_of_other_programs(tmp_path: Path) -> None:
    others = [f"Nov 22 08:00:{i:02d} gpu-7 systemd[1]: Started Session {i} of user root." for i in range(40)]
    quoting = f"Nov 22 08:00:41 gpu-7 gpud[7]: {of_xid(31, pci=OTHER)}"
    path = tmp_path / "messages"
    path.write_text("\n".join([*others, quoting, f"Nov 22 08:00:50 gpu-7 kernel: {of_xid(79)}"]) + "\n")
    [d] = diagnosing.diagnose([path], []).diagnoses
    assert GPU in d.because


def test_a_folder_of_logs_names_its_nodes(tmp_path: Path) -> None:
    for name in ("node-3/dmesg", "dmesg-gpu9.txt", "h100-4.log"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[  160.000001] {of_xid(79)}\n")
    answer = diagnosing.diagnose([tmp_path], [])
    assert sorted(d.suspects[0].node for d in answer.diagnoses) == ["gpu9", "h100-4", "node-3"]
    assert any("seconds since boot" in r for r in answer.inputs[0].remarks)


@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        (("hosts_20261122/gpu7/dmesg.txt", "hosts_20261122/gpu8/dmesg.txt"), ["gpu7", "gpu8"]),
        (("node-logs-2026-11-22/gpu7.log", "node-logs-2026-11-22/gpu8.log"), ["gpu7", "gpu8"]),
        (("logs-2026-11-22/a.log", "logs-2026-11-22/b.log"), ["unknown (file a.log)", "unknown (file b.log)"]),
        (("host-1122/gpu7/dmesg-20261122.txt",), ["gpu7"]),
        (("incident-7/dmesg-alpha.txt", "incident-7/dmesg-beta.txt"), ["alpha", "beta"]),
        (("node-3/dmesg2.txt", "node-4/var/log/kern.log", "node=m5/dmesg"), ["m5", "node-3", "node-4"]),
        (("node-6.cluster.local/dmesg",), ["node-6.cluster.local"]),
    ],
    ids=lambda names: names[0],
)
def test_a_folder_of_collected_logs_is_no_node(tmp_path: Path, files: tuple[str, ...], nodes: list[str]) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[  160.000001] {of_xid(31)}\n")
    diagnoses = diagnosing.diagnose([tmp_path], []).diagnoses
    assert sorted({s.node for d in diagnoses for s in d.suspects}) == nodes
    assert not any("recurred" in d.because for d in diagnoses)


UPTIME, LOCAL_DMESG, LOCAL_SYSLOG = (
    "[  160.000001] {}",
    "[Sun Nov 22 10:00:02 2026] {}",
    "Nov 22 10:00:00 gpu7 kernel: {}",
)
"""Of the same moment as `FORMS["journalctl -k -o short-iso"]`, on a machine two hours east of UTC."""


def on_two_clocks(tmp_path: Path, form: str, message: str, in_journal: str = "") -> tuple[Diagnosis, str]:
    """What a node's log in this form and its journal come to, and the description of the input."""
    (tmp_path / "gpu7").mkdir(exist_ok=True)
    (tmp_path / "gpu7" / "dmesg.txt").write_text(f"{form.format(NOISE)}\n{form.format(message)}\n")
    stamp = FORMS["journalctl -k -o short-iso"].replace("gpu-7", "gpu7.cluster")
    (tmp_path / "gpu7" / "journal.txt").write_text(stamp.format(in_journal or message) + "\n")
    answer = diagnosing.diagnose([tmp_path], [])
    [d] = answer.diagnoses
    return d, answer.inputs[0].content


@pytest.mark.parametrize("form", [UPTIME, LOCAL_DMESG, LOCAL_SYSLOG])
@pytest.mark.parametrize("code", [13, 31, 79])
def test_an_event_that_two_clocks_tell_of_is_one(tmp_path: Path, form: str, code: int) -> None:
    message = of_xid(code, "Graphics SM Warp Exception on (GPC 0, TPC 3, SM 0): Out Of Range Address")
    d, content = on_two_clocks(tmp_path, form, message)
    assert d.fault_class == xid(code).fault_class and ", once" in d.because
    assert (d.suspects[0].node, d.onset, d.detected_at) == ("gpu7.cluster", T, T)
    assert content.endswith("1 event on 1 node, 1 XID")


def test_on_a_machine_in_utc_a_log_without_zone_tells_of_later_events_too(tmp_path: Path) -> None:
    """The first one, which both logs have, shows that the zone is right."""
    message = of_xid(79)
    syslog = "Nov 22 08:0{}:00 gpu-7 kernel: {}\n"
    (tmp_path / "kern.log").write_text(syslog.format(0, message) + syslog.format(5, message))
    (tmp_path / "journal.txt").write_text(FORMS["journalctl -k -o short-iso"].format(message) + "\n")
    [d] = diagnosing.diagnose([tmp_path], []).diagnoses
    assert "2 times in 5 min" in d.because and d.onset == T


@pytest.mark.parametrize("form", [UPTIME, LOCAL_DMESG])
def test_times_of_two_clocks_are_not_compared(tmp_path: Path, form: str) -> None:
    message = of_xid(13, "Graphics SM Warp Exception on (GPC 0, TPC 3, SM 0): Out Of Range Address")
    d, _ = on_two_clocks(tmp_path, form, message, message.replace("4711", "4712"))
    assert d.fault_class == FaultClass.USER_CODE and "2 times, over an unknown period" in d.because
    assert d.onset == T, "the time of the better clock"


@pytest.mark.parametrize("form", [LOCAL_DMESG, LOCAL_SYSLOG, "2026-11-22T10:00:00 gpu7 kernel: {}"])
def test_a_time_without_zone_is_said_to_be_taken_as_utc(tmp_path: Path, form: str) -> None:
    _, remarks = reported(tmp_path, form.format(of_xid(79)))
    assert "some lines have no zone: UTC is assumed, and without a year as late as the file allows" in remarks
    assert (
        reported(tmp_path, *(FORMS[f"journalctl -k -o short-{how}"].format(of_xid(79)) for how in ("full", "iso")))[1]
        == ()
    )


def test_machines_of_two_clusters_with_one_short_name_are_two(tmp_path: Path) -> None:
    lines = [iso(i, of_xid(94), host=host) for i, host in enumerate(("gpu7.east", "gpu7.west", "gpu7"))]
    diagnoses, _ = reported(tmp_path, *lines)
    assert sorted(d.suspects[0].node for d in diagnoses) == ["gpu7", "gpu7.east", "gpu7.west"]


# --- what XIDs come to


def test_every_code_is_reported_with_class_meaning_and_action(tmp_path: Path) -> None:
    """Each on a GPU of its own."""
    addresses = {f"0000:{code:02x}:00": code for code in XIDS}
    diagnoses, remarks = reported(tmp_path, *((0, of_xid(code, pci=pci)) for pci, code in addresses.items()))
    by_code = {int(d.evidence[0].values["xid"]): d for d in diagnoses}
    said = " ".join([*remarks, *(e.text for d in diagnoses for e in d.evidence)])
    for pci, code in addresses.items():
        known = xid(code)
        assert f"XID {code} {known.mnemonic}: {known.meaning}; class {known.fault_class}; NVIDIA's catalogue: " in said
        if known.immediate is XidAction.IGNORE or code == 154:
            assert code not in by_code
            continue
        d = by_code[code]
        assert d.because.startswith(f"GPU {pci} of node gpu-7: XID {code} ({known.meaning}), ")
        assert d.fault_class == known.fault_class and d.advice and (", fatal" in d.because) == known.fatal
        assert f"NVIDIA's catalogue: {ADVICE[known.immediate]}" in d.evidence[0].text
        assert str(known.immediate) in d.evidence[0].text
        assert ("gpud rates it" in d.evidence[0].text) == bool(known.second_opinion)


def test_several_xids_of_one_gpu_are_one_diagnosis_named_by_the_worst(tmp_path: Path) -> None:
    [d], _ = reported(
        tmp_path,
        (0, f"NVRM: GPU at PCI:{GPU}: {UUID}"),
        (1, of_xid(13, "Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): Out Of Range Address")),
        (2, of_xid(95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No")),
        (3, of_xid(45, "Ch 00000010")),
        (4, of_xid(94, "Contained: CE User Channel (0x9). RST: No, D-RST: No")),
    )
    assert d.because.startswith(f"GPU {GPU} ({UUID}) of node gpu-7: XID 95 (uncontained memory error), fatal, once")
    assert (d.onset, d.detected_at) == (T + 1, T + 2) and "reset it" in d.advice
    codes = [e.values["xid"] for e in d.evidence if e.kind == "xid"]
    assert codes == [13, 95, 45, 94]
    assert any("follows another XID; in process python3 (4711)" in e.text for e in d.evidence)


def test_a_lost_gpu_collapses(tmp_path: Path) -> None:
    [d], _ = reported(
        tmp_path,
        (0, of_xid(79, "GPU has fallen off the bus.", process="pid='<unknown>', name=<unknown>, ")),
        (0, f"NVRM: GPU {GPU}.0: GPU has fallen off the bus."),
        *((i, of_xid(code)) for i, code in enumerate((45, 119, 120, 119, 62), 1)),
    )
    assert "XID 79 (GPU has fallen off the bus), fatal, once; the GPU is lost, with 5 later lines" in d.because
    assert d.fault_class == FaultClass.GPU and "reboot" in d.advice


def test_a_gpu_lost_in_three_lines_without_an_xid(tmp_path: Path) -> None:
    [d], _ = reported(
        tmp_path,
        (0, "NVRM: The NVIDIA GPU 0000:3b:00.0"),
        (0, "NVRM: (PCI ID: 10de:2330) installed in this system has"),
        (0, "NVRM: fallen off the bus and is not responding to commands."),
    )
    assert "XID 79" in d.because and GPU in d.because


LOST = (
    "NVRM: The NVIDIA GPU 0000:3b:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)
"""One record of three lines (kernel-open/nvidia/nv.c of NVIDIA's open driver)."""
FORMS_OF_LINES = FORMS | {"dmesg -H": "[Nov22 08:00] {}", "dmesg -H within a minute": "[  +0.000012] {}"}
ESCAPED = {"kmsg": "\\x0a", "kern.log": "#012"}


@pytest.mark.parametrize("form", FORMS_OF_LINES)
def test_a_record_of_several_lines_is_one_of_the_kernel(tmp_path: Path, form: str) -> None:
    stamp = FORMS_OF_LINES[form]
    path = tmp_path / "gpu-7" / "dmesg.txt"
    path.parent.mkdir()
    if form in ESCAPED:
        record = stamp.format(ESCAPED[form].join(LOST))
    else:  # dmesg and journalctl
        record = ("\n" + " " * len(stamp.format(""))).join((stamp.format(LOST[0]), *LOST[1:]))
    path.write_text("\n".join((stamp.format(NOISE), record, stamp.format(NOISE))) + "\n")
    answer = diagnosing.diagnose([tmp_path], [])
    [d] = answer.diagnoses
    assert d.suspects[0].node == "gpu-7" and "XID 79" in d.because and GPU in d.because


def test_dmesg_h_counts_from_its_minute(tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_text(f"[Nov22 08:00] {NOISE}\n[  +1.500000] {NOISE}\n[  +2.000000] {of_xid(79)}\n")
    [d] = diagnosing.diagnose([tmp_path], []).diagnoses
    assert d.detected_at % 86_400 == 8 * 3600 + 3.5


@pytest.mark.parametrize(
    "lines",
    [
        (f"2026-11-22T08:00:00+00:00 gpu-7 gpud[812]: {LOST[0]}", f"    {LOST[1]}", f"    {LOST[2]}"),
        (f"[  160.000001] {NOISE}", f"    {LOST[0]}", f"    {LOST[2]}"),
        ("[  160.000001] INFO: task a", "   Oops: 0002:12 blocked for more than 120 seconds."),
        (f"3,1,160000001,-;{LOST[0]}", f" {LOST[2]}"),
    ],
    ids=["of another program", "of another message", "a process with a line break in its name", "properties of kmsg"],
)
def test_indented_lines_that_are_not_the_kernels(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "dmesg").write_text("\n".join((f"[  100.000001] {NOISE}", *lines)) + "\n")
    assert diagnosing.diagnose([tmp_path], []).diagnoses == []


BOOT = ("Linux version 6.8.0-49-generic (buildd@lcy02) (gcc 13.2.0)", "Command line: BOOT_IMAGE=/vmlinuz ro")


@pytest.mark.parametrize(("name", "head"), [("anything.txt", BOOT), ("dmesg", ()), ("it", (NOISE,) * 9)])
def test_dmesg_t_is_recognised_and_its_times_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, head: tuple[str, ...]
) -> None:
    down, up = (f"mlx5_core 0000:41:00.0 ens1f0np0: Link {state}" for state in ("down", "up"))
    (tmp_path / name).write_text("\n".join((*head, NOISE, *LOST, down, up, down, up)) + "\n")
    answer = diagnosing.diagnose([tmp_path], [])
    [d] = answer.diagnoses
    assert "XID 79" in d.because, "flaps need times"
    remarks = " ".join(r for i in answer.inputs for r in i.remarks)
    assert "have no time (dmesg -t)" in remarks and "2 times, over an unknown period" in remarks
    assert main(["diagnose", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "at an unknown time gpu: " in said and "the log has no time for it" in said and "at 0 s" not in said


@pytest.mark.parametrize("decimals", ["456", "456789", "456789123"])
def test_stamps_of_any_precision_and_one_odd_line_are_read(tmp_path: Path, decimals: str) -> None:
    lines = [f"[  123.{decimals}] {NOISE}", "and a line that somebody added", f"[  124.{decimals}] {of_xid(79)}"]
    (tmp_path / "it").write_text("\n".join(lines) + "\n")
    [d] = diagnosing.diagnose([tmp_path / "it"], []).diagnoses
    assert "XID 79" in d.because and d.detected_at == float(f"124.{decimals}")


def test_a_process_without_a_name_is_its_pid(tmp_path: Path) -> None:
    lines = [f"[  123.456789] {line}" for line in ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault", NOISE)]
    (tmp_path / "it").write_text("\n".join(lines) + "\n")
    answer = diagnosing.diagnose([tmp_path / "it"], [])
    assert "in process 1234;" in str(answer.diagnoses)
    assert answer.inputs[0].content == "1 file: 2 kernel lines, 1 event on 1 node, 1 XID"


def test_other_text_without_stamps_is_no_kernel_log(tmp_path: Path) -> None:
    for name, content in (
        ("dmesg", "dmesg: read kernel buffer failed: Operation not permitted\n"),
        ("out.txt", "INFO:root:step 1\n" * 20),
        ("notes.txt", of_xid(79) + "\n" + "we looked at the node and found this line\n" * 20),
    ):
        (tmp_path / name).write_text(content)
        assert not kernel_logs.is_log(tmp_path / name), name


def test_gpus_are_distinguished(tmp_path: Path) -> None:
    diagnoses, _ = reported(tmp_path, (0, of_xid(95)), (1, of_xid(95, pci=OTHER)), iso(2, of_xid(95), host="gpu-8"))
    assert len({d.because for d in diagnoses}) == 3 and len({d.key for d in diagnoses}) == 3


def test_45_alone_is_the_fabric_managers(tmp_path: Path) -> None:
    [d], _ = reported(tmp_path, (0, of_xid(45)))
    assert "no other XID with it" in d.because and d.advice == "restart the fabric manager"


def verdict(a: int, b: int) -> str:
    return of_xid(154, f"GPU recovery action changed from 0x{a:x} (a) to 0x{b:x} (b)", process="")


def test_the_drivers_verdict_is_the_advice_where_it_asks_for_more(tmp_path: Path) -> None:
    [d], _ = reported(tmp_path, (0, of_xid(94)), (1, verdict(0, 2)))
    assert "XID 94" in d.because and "the driver requests: RESTART_BM" in d.because
    assert d.advice == "drain the machine and reboot it"
    [d], _ = reported(tmp_path, (0, of_xid(95)), (1, verdict(0, 2)), (2, verdict(2, 0)))
    assert "reset it" in d.advice, "it was taken back"
    [d], _ = reported(tmp_path, (0, verdict(0, 4)))
    assert "XID 154" in d.because and "requests RESET_GPU" in d.because
    diagnoses, remarks = reported(tmp_path, (0, verdict(0, 1)), (9, verdict(1, 0)))
    assert diagnoses == [] and "XID 154" in remarks[0]


def test_48_with_63_is_drained_first(tmp_path: Path) -> None:
    [d], _ = reported(tmp_path, (0, of_xid(48)), (1, of_xid(63)), (1, of_xid(172)))
    assert "XID 48" in d.because and d.advice.startswith("drain the GPU and reset it")
    assert any("detail of XID 48" in e.text for e in d.evidence)


@pytest.mark.parametrize(
    ("name", "lines", "fault_class", "words"),
    [
        ("once", [(0, GPU)], FaultClass.USER_CODE, ", once"),
        ("one burst", [(0, GPU), (60, GPU), (120, GPU)], FaultClass.USER_CODE, "3 times"),
        ("twice a day", [(0, GPU), (3600, GPU)], FaultClass.GPU, "on this GPU alone"),
        ("two GPUs", [(0, GPU), (3600, GPU), (1, OTHER)], FaultClass.USER_CODE, "the application is the cause"),
        ("two days apart", [(0, GPU), (2 * 86_400, GPU)], FaultClass.USER_CODE, "2 times"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_31_is_the_application_unless_one_gpu_alone_repeats_it(
    tmp_path: Path, name: str, lines: list[tuple[float, str]], fault_class: FaultClass, words: str
) -> None:
    diagnoses, _ = reported(tmp_path, *((at, of_xid(31, pci=pci)) for at, pci in lines))
    [d] = [d for d in diagnoses if GPU in d.because]
    assert d.fault_class == fault_class and words in d.because


@pytest.mark.parametrize(
    ("places", "fault_class"),
    [(["GPC 1, TPC 4", "GPC 1, TPC 4"], FaultClass.GPU), (["GPC 1, TPC 4", "GPC 2, TPC 4"], FaultClass.USER_CODE)],
)
def test_13_at_one_place_of_the_chip_is_the_gpus(tmp_path: Path, places: list[str], fault_class: FaultClass) -> None:
    [d], _ = reported(
        tmp_path, *((3600 * i, of_xid(13, f"Warp Exception on ({p}, SM 0): x")) for i, p in enumerate(places))
    )
    assert d.fault_class == fault_class


def test_a_fatal_code_that_keeps_coming_back_is_for_support(tmp_path: Path) -> None:
    [d], _ = reported(tmp_path, *((3600 * i, of_xid(119)) for i in range(4)))
    assert "reset it" in d.advice
    [d], _ = reported(tmp_path, *((3600 * i, of_xid(119)) for i in range(5)))
    assert "support" in d.advice and "5 or more times within a day" in d.because


def test_an_nvlink_finding_states_links_and_severity(tmp_path: Path) -> None:
    line = "NETIR_LINK_EVT  {}   XC0 i0 Link 09 (0x025525c6 0x00000000 0x00000000 0x0 0x0 0x0)"
    [d], _ = reported(tmp_path, (0, of_xid(149, line.format("Fatal"), process="")))
    assert d.fault_class == FaultClass.NETWORK and "other end of the link" in d.advice
    assert ", fatal" in d.because and any("NVLink 9, NETIR_LINK_EVT" in e.text for e in d.evidence)
    assert "NVIDIA's table (driver before R575): RESET_GPU, link fatal, to investigate INVESTIGATE_PEER" in d.because
    [d], _ = reported(tmp_path, (0, of_xid(149, line.format("Nonfatal"), process="")))
    assert ", fatal" in d.because and "but the line says not fatal: the more severe one counts" in d.because
    [d], _ = reported(tmp_path, (0, of_xid(149, line.replace("025525c6", "003525c6").format("Fatal"), process="")))
    assert ", fatal" in d.because and "NVIDIA's table has no entry for it: the line (fatal) decides" in d.because


def test_ignorable_nvlink_errors_are_remarks(tmp_path: Path) -> None:
    counted = "NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x00000013 0x00000001 0x0 0x0 0x0 0x0)"
    diagnoses, remarks = reported(
        tmp_path,
        (0, of_xid(149, counted, process="")),
        (
            1,
            of_74(6, "0x40000001"),
        ),
        (2, of_xid(63)),
    )
    assert diagnoses == [] and len(remarks) == 3
    assert "IGNORE, non-fatal, to investigate INVESTIGATE_LINK_SI_AND_CABLES" in remarks[0]
    [d], _ = reported(tmp_path, (0, of_xid(149, counted, process="")), (1, of_xid(94)))
    assert "XID 94" in d.because, "what is to be ignored leads nothing"


def of_74(link: int, *registers: str) -> str:
    words = ", ".join([*registers, *["0x0"] * (7 - len(registers))])
    return of_xid(74, f"NVLink: fatal error detected on link {link}({words})", process="")


@pytest.mark.parametrize(
    ("lines", "words", "advice"),
    [
        ([(0, of_74(6, "0x200000"))], "its registers report: signal integrity", "mechanical connections"),
        ([(0, of_74(6, "0x0", "0x0", "0x10000"))], "matters when it repeats", "field diagnostics"),
        ([(i, of_74(6, "0x10")) for i in range(2)], "ECC or parity error", "reset the GPU"),
        ([(i, of_74(6, "0x10")) for i in range(3)], "ECC or parity error, 3 times on link 6", "support"),
        ([(i, of_74(i, "0x10")) for i in range(3)], "ECC or parity error", "reset the GPU"),
        ([(0, of_74(6, "0x2"))], "and no other error came with it", "support"),
        ([(0, of_74(6, "0x2")), (1, of_xid(45))], "a consequence of another error", "follow the error"),
        ([(0, of_74(6, "0x0", "0x0", "0x0", "0x40000"))], "the fabric is to be reset", "reset the fabric"),
        ([(0, of_74(6, "0x200001"))], "its registers report: signal integrity", "mechanical connections"),
        ([(0, of_xid(74, "NVLink: something", process=""))], "XID 74 (NVLink error", "reset the GPU"),
    ],
)
def test_of_74_the_registers_decide(tmp_path: Path, lines: list[tuple[float, str]], words: str, advice: str) -> None:
    [d], _ = reported(tmp_path, *lines)
    assert words in d.because and advice in d.advice and d.fault_class == FaultClass.NETWORK


SXID = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {}, {}, Link 32 text"


def test_a_fatal_sxid_explains_the_nvlink_errors_beside_it(tmp_path: Path) -> None:
    diagnoses, _ = reported(
        tmp_path,
        (0, SXID.format(20034, "Fatal")),
        (0, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Data {0x00140004, 0x00100000}"),
        (1, of_xid(74, process="")),
        (2, of_xid(74, pci=OTHER, process="")),
        (3, of_xid(95, pci="0000:af:00")),
    )
    switch, gpu = diagnoses
    assert switch.fault_class == FaultClass.NETWORK and gpu.fault_class == FaultClass.GPU
    assert "NVSwitch 3 of node gpu-7: SXid 20034" in switch.because and "on link 32" in switch.because
    assert "the NVLink errors of 2 GPUs are its consequence" in switch.because
    assert "every GPU on that link" in switch.advice and "0000:af:00" in gpu.because
    long_after, _ = reported(tmp_path, (0, SXID.format(20034, "Fatal")), (1000, of_xid(74, process="")))
    assert len(long_after) == 2


def test_an_sxid_is_as_severe_as_the_worse_of_line_and_table(tmp_path: Path) -> None:
    diagnoses, remarks = reported(tmp_path, (0, SXID.format(11012, "Non-fatal")))
    assert diagnoses == [] and "SXid 11012" in remarks[0] and "not fatal" in remarks[0]
    assert len(reported(tmp_path, (0, SXID.format(11012, "Fatal")))[0]) == 1
    assert len(reported(tmp_path, (0, SXID.format(12020, "Non-fatal")))[0]) == 1


@pytest.mark.parametrize("code", [10004, 11004, 12028, 19084, 20009, 20012])
def test_sxids_that_require_a_reset_are_faults_even_if_the_line_is_non_fatal(tmp_path: Path, code: int) -> None:
    [d], remarks = reported(tmp_path, (0, SXID.format(code, "Non-fatal")))
    assert d.fault_class == FaultClass.NETWORK and remarks == ()
    assert "the line says non-fatal" in d.because and "reset its GPUs and NVSwitches" in d.advice


# --- the rest of the machine


def test_oom_kills_of_a_node_are_one_diagnosis(tmp_path: Path) -> None:
    kill = "{}: Killed process {} (python3) " + RSS
    [d], _ = reported(
        tmp_path,
        (0, kill.format("Memory cgroup out of memory", 812)),
        (1, kill.format("Memory cgroup out of memory", 813)),
        (2, "oom_reaper: reaped process 813 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB"),
    )
    assert d.fault_class == FaultClass.RESOURCE_EXHAUSTED
    assert "the kernel killed python3 (812, 8.0 GiB), python3 (813, 8.0 GiB): its cgroup's memory limit" in d.because


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("down for good", [(0, "down")], "stayed down"),
        ("a single flap", [(0, "down"), (3, "up")], ""),
        (
            "two flaps in five minutes",
            [(0, "down"), (3, "up"), (200, "down"), (203, "up")],
            "2 times down within 5 min",
        ),
        ("two flaps in an hour", [(0, "down"), (3, "up"), (3000, "down"), (3003, "up")], ""),
        ("boot", [(0, "up")], ""),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_links(tmp_path: Path, name: str, changes: list[tuple[float, str]], words: str) -> None:
    lines = [(at, f"mlx5_core 0000:41:00.0 ens1f0np0: Link {state}") for at, state in changes]
    diagnoses, remarks = reported(tmp_path, *lines)
    if words:
        assert [d.fault_class for d in diagnoses] == [FaultClass.NETWORK] and words in diagnoses[0].because
    else:
        assert diagnoses == [] and any("single flap" in r for r in remarks) == (name != "boot")


class CountedSeconds(float):
    """Counts comparisons."""

    num = 0

    def __le__(self, other: float) -> bool:
        CountedSeconds.num += 1
        return float(self) <= float(other)

    def __lt__(self, other: float) -> bool:
        CountedSeconds.num += 1
        return float(self) < float(other)

    def __add__(self, other: float) -> "CountedSeconds":
        return CountedSeconds(float(self) + other)


def test_each_flap_of_a_link_is_not_compared_with_all_others() -> None:
    num = 500
    down, up = (KernelLinkChange(interface="eth0", up=state) for state in (False, True))
    pairs = [
        (KernelLogFact(node="n1", at=CountedSeconds(10 * n), dated=True, fact=fact, text="line"), fact)
        for n in range(num)
        for fact in (down, up)
    ]
    CountedSeconds.num = 0
    found = kernel_findings.link_finding("n1", "eth0", pairs)
    assert found is not None and "flaps: 31 times down within 5 min" in found.because
    assert CountedSeconds.num < 50 * num


def test_hardware_errors(tmp_path: Path) -> None:
    diagnoses, remarks = reported(
        tmp_path,
        (0, "EDAC MC1: 1 UE memory scrubbing error on CPU_SrcID#1_MC#1_Chan#0_DIMM#0"),
        (1, "mce: [Hardware Error]: Machine check events logged"),
        (2, "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0"),
        (3, of_xid(79)),
    )
    assert [d.fault_class for d in diagnoses] == [FaultClass.NODE_LOST, FaultClass.GPU], "PCIe of the GPU is the GPU's"
    assert "an uncorrected memory error at MC1" in diagnoses[0].because
    assert any("1 line of corrected hardware errors (machine_check)" in r for r in remarks)


def test_an_nfs_server_that_answers_again_is_a_remark(tmp_path: Path) -> None:
    gone, back = "nfs: server {} not responding, still trying", "nfs: server {} OK"
    diagnoses, remarks = reported(tmp_path, (0, gone.format("a")), (60, back.format("a")))
    assert diagnoses == [] and "a, once; it is over" in remarks[0]
    [d], _ = reported(tmp_path, (0, gone.format("a")), (1, gone.format("b")), (60, back.format("a")))
    assert d.fault_class == FaultClass.NETWORK and ": b, once" in d.because
    [d], _ = reported(tmp_path, (0, gone.format("a")), (60, back.format("a")), (90, gone.format("a")))
    assert ": a, once" in d.because


def test_every_other_fault_has_its_words() -> None:
    facts = [KernelFault(what=what, pid=7, name="python3") for what in FAULTS]
    errors = [HardwareError(what=what, corrected=False) for what in ("machine_check", "memory", "pcie", "firmware")]
    seen = [
        KernelLogFact(node="n1", at=float(i), dated=False, fact=f, text="line") for i, f in enumerate([*facts, *errors])
    ]
    found = kernel_findings.diagnose([KernelLog(path="x", seen=seen)])
    assert len(found) == len(seen) - len(kernel_findings.REMARKED) and len({f.because for f in found}) == len(found)


def test_a_slot_that_gives_little_power_is_a_remark(tmp_path: Path) -> None:
    """Some healthy machines say so at every boot."""
    line = (
        "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe slot (27W)."
    )
    diagnoses, remarks = reported(tmp_path, (0, line))
    assert diagnoses == [] and "too little power: 0000:5c:00.0, once; compare the NIC's bandwidth" in remarks[0]


def test_a_healthy_log_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dmesg").write_text(f"[    0.000000] Linux version 6.8.0\n[  160.000001] {NOISE}\n")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "healthy" in capsys.readouterr().out


def test_the_answer_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kern.log").write_text(iso(0, of_xid(79)) + "\n")
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    [d] = json.loads(capsys.readouterr().out)["diagnoses"]
    assert d["fault_class"] == "gpu" and d["suspects"][0]["node"] == "gpu-7" and d["detectors"] == ["kernel-log"]
    assert d["advice"] == "drain the machine and reboot it"


# --- bad input


def test_a_storm_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_logs, "NUM_FACTS_MAX", 50)
    [d], remarks = reported(tmp_path, *((i, of_xid(31)) for i in range(80)))
    assert "50 times" in d.because and any("30 lines" in r for r in remarks)
    assert len(d.evidence) < 20


def test_bytes_that_are_no_text_stop_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_bytes(
        iso(0, NOISE).encode() + b"\n\xff\xfe\x80 \x1b[2J\n" + iso(1, of_xid(79)).encode() + b"\n" + b"x" * 99_999
    )
    log = kernel_logs.read(path)
    assert log.num_lines == 2 and len(log.seen) == 1
