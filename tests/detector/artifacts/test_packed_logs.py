"""Kernel logs as people keep them: packed, rotated, exported from the journal; cut short, damaged, and bombs."""

import bz2
import gzip
import importlib.util
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.kernel_log import logs as kernel_logs
from rolecall.detector.base import packed_files as packed
from rolecall.diagnose import diagnose as diagnosing

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
NOISE = "usb 1-1: new high-speed USB device number 2 using xhci_hcd"
T = 1_795_334_400.0  # 2026-11-22T08:00:00Z
TEXT = "".join(f"2026-11-22T08:00:0{i}.000000+00:00 gpu-7 kernel: {line}\n" for i, line in enumerate((NOISE, XID)))
HAS_ZSTD = bool(importlib.util.find_spec("zstandard")) or bool(importlib.util.find_spec("compression"))


def reported(path: Path) -> list[Diagnosis]:
    return diagnosing.diagnose([path], []).diagnoses


# --- packed


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("kern.log.2.gz", gzip.compress),
        ("kern.log-20261115.xz", lzma.compress),
        ("kern.log.3.bz2", bz2.compress),
        ("whatever", gzip.compress),  # the content tells, no name does
        ("two.gz", lambda data: gzip.compress(data[:30]) + gzip.compress(data[30:])),
        ("two.xz", lambda data: lzma.compress(data[:30]) + b"\0" * 8 + lzma.compress(data[30:])),
    ],
)
def test_packed_logs_are_read(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    path.write_bytes(pack(TEXT.encode()))
    [d] = reported(path)
    assert "XID 79" in d.because and d.suspects[0].node == "gpu-7" and d.detected_at == T + 1


def test_zstd_is_read_where_python_can(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "kern.log.zst").write_bytes(zstandard.ZstdCompressor().compress(TEXT.encode()))
    [d] = reported(tmp_path / "kern.log.zst")
    assert "XID 79" in d.because


@pytest.mark.skipif(HAS_ZSTD, reason="this Python has a module for it")
@pytest.mark.parametrize("name", ["kern.log.1.zst", "anything"])
def test_zstd_without_a_module_gives_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    with pytest.raises(UnreadableInput, match=r"unpack it first \(zstd -d "):
        reported(tmp_path / name)


def test_a_log_of_a_folder_that_cannot_be_unpacked_is_a_remark(tmp_path: Path) -> None:
    (tmp_path / "kern.log").write_text(TEXT)
    (tmp_path / "kern.log.1.gz").write_bytes(gzip.compress(TEXT.encode())[:8] + b"\xff" * 40)
    answer = diagnosing.diagnose([tmp_path], [])
    assert len(answer.diagnoses) == 1 and any("it is damaged" in r for r in answer.inputs[0].remarks)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_truncated_files_are_read_up_to_their_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    noise = "".join(f"2026-11-22T08:00:00.{i:06d}+00:00 gpu-7 kernel: {i * 7919} {NOISE}\n" for i in range(20_000))
    data = pack((TEXT + noise).encode())
    (tmp_path / "kern.log.1").write_bytes(data[: len(data) // 2])
    answer = diagnosing.diagnose([tmp_path / "kern.log.1"], [])
    assert len(answer.diagnoses) == 1 and any(": truncated" in r for r in answer.inputs[0].remarks)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_damaged_file_is_reported_as_damaged(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    data = pack(TEXT.encode() * 50)
    behind = len(data) - 8 if pack is gzip.compress else len(data) // 2  # of gzip: the check sum
    (tmp_path / "kern.log.gz").write_bytes(data[:behind] + bytes(b ^ 0x55 for b in data[behind:]))
    with pytest.raises(UnreadableInput, match="damaged"):
        reported(tmp_path / "kern.log.gz")


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress, bytes])
def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    monkeypatch.setattr(kernel_logs, "LOG_BYTES_MAX", 1 << 20)
    (tmp_path / "kern.log.gz").write_bytes(pack(TEXT.encode() * 2000 + b"\0" * (2 << 20)))
    with pytest.raises(UnreadableInput, match="cut it"):
        reported(tmp_path / "kern.log.gz")


def test_a_bomb_in_a_bomb_costs_no_memory_at_its_head(tmp_path: Path) -> None:
    (tmp_path / "it.gz").write_bytes(gzip.compress(b"\0" * (64 << 20)))
    assert len(packed.head(tmp_path / "it.gz", 1000)) == 1000
    assert not kernel_logs.is_log(tmp_path / "it.gz")


def test_an_xz_that_wants_gigabytes_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
    packer = lzma.LZMACompressor(format=lzma.FORMAT_XZ, filters=filters)
    (tmp_path / "kern.log.xz").write_bytes(packer.compress(TEXT.encode()) + packer.flush())
    with pytest.raises(UnreadableInput, match="more memory to unpack"):
        reported(tmp_path / "kern.log.xz")


# --- rotated


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("gpu-3/kern.log.1", "gpu-3"),
        ("gpu-3/dmesg.0.gz", "gpu-3"),
        ("gpu-3/messages-20261115.xz", "gpu-3"),
        ("x/dmesg-gpu9.txt", "gpu9"),
        ("x/kernel-vm.log", "vm"),
        ("x/gpu-9.log", "gpu-9"),
        ("x/gpu-9.log.2.gz", "gpu-9"),
        ("x/kern.log-gpu9.old", "gpu9"),
    ],
)
def test_the_name_of_a_rotated_log_is_no_node(tmp_path: Path, name: str, node: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(f"[  160.000001] {XID}\n")
    [d] = reported(path)
    assert d.suspects[0].node == node


def test_a_line_that_two_files_hold_is_one(tmp_path: Path) -> None:
    (tmp_path / "kern.log").write_text(TEXT)
    (tmp_path / "messages").write_text(f"2026-11-22T08:00:01+00:00 gpu-7 kernel: {XID}\n")
    [d] = reported(tmp_path)
    assert ", fatal, once" in d.because
    (tmp_path / "messages").write_text(f"2026-11-22T08:00:03+00:00 gpu-7 kernel: {XID}\n")
    [d] = reported(tmp_path)
    assert "2 times" in d.because


PROLOGUE = """____________________________________________

Start of NVIDIA bug report log file.  Please include this file, along
with a detailed description of your problem, when reporting a graphics
driver bug.

nvidia-bug-report.sh Version: 31831145

Date: Sun Nov 22 08:10:00 AM UTC 2026
uname: Linux GPU-7 6.8.0-1-generic #1 SMP x86_64 GNU/Linux
command line flags:

____________________________________________

"""


def report(*sections: tuple[str, str]) -> bytes:
    """As nvidia-bug-report.sh writes it: each section a gzip of its own."""
    texts = [
        PROLOGUE,
        *(f"*** {name}\n{text}\n____________________________________________\n" for name, text in sections),
    ]
    return b"".join(gzip.compress(text.encode()) for text in texts)


def test_repeated_lines_of_a_bug_report_count_once(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-bug-report.log.gz"
    dmesg = f"[    1.000000] {NOISE}\n[ 5160.000001] {XID}\n"
    syslog = f"Nov 22 08:00:01 gpu-7 kernel: [ 5160.000001] {XID}\nNov 22 08:05:01 gpu-7 kernel: {XID}\n"
    other = "H/W path  Device  Class\n\x00\x01 lspci\n" * 500
    path.write_bytes(report(("lshw", other), ("dmesg", dmesg), ("journalctl -b", TEXT), ("/var/log/syslog", syslog)))
    os.utime(path, (T + 600, T + 600))
    answer = diagnosing.diagnose([path], [])
    [d] = answer.diagnoses
    assert "2 times in 5 min" in d.because and d.suspects[0].node == "gpu-7" and d.detected_at == T + 1
    assert not any("since boot" in r for r in answer.inputs[0].remarks)
    path.write_bytes(report(("lshw", other), ("dmesg", dmesg)))
    [d] = reported(path)
    assert ", fatal, once" in d.because and d.suspects[0].node == "gpu-7", "the host of its uname"


# --- exports of the journal


def entry(message: object, **more: object) -> dict[str, object]:
    return {
        "__CURSOR": "s=1;i=2",
        "__REALTIME_TIMESTAMP": "1795334401500000",
        "_SOURCE_MONOTONIC_TIMESTAMP": "160000001",
        "_HOSTNAME": "gpu-7",
        "_TRANSPORT": "kernel",
        "SYSLOG_FACILITY": "0",
        "SYSLOG_IDENTIFIER": "kernel",
        "PRIORITY": "3",
        "MESSAGE": message,
    } | more


def as_json(*entries: dict[str, object]) -> bytes:
    return "".join(json.dumps(e) + "\n" for e in entries).encode()


def as_export(*entries: dict[str, object]) -> bytes:
    lines = []
    for e in entries:
        for key, value in e.items():
            if isinstance(value, bytes):
                lines.append(key.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n")
            else:
                lines.append(f"{key}={value}\n".encode())
        lines.append(b"\n")
    return b"".join(lines)


@pytest.mark.parametrize("name", ["it", "journal.export", "journal.json.gz"])
@pytest.mark.parametrize("write", [as_json, as_export])
def test_exports_of_the_journal_are_read(tmp_path: Path, name: str, write: Callable[..., bytes]) -> None:
    data = write(entry(NOISE), entry(XID), entry(NOISE))
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    answer = diagnosing.diagnose([tmp_path / name], [])
    [d] = answer.diagnoses
    assert "XID 79" in d.because and d.suspects[0].node == "gpu-7" and d.detected_at == T + 1.5
    assert "3 kernel lines" in answer.inputs[0].content


def test_when_it_happened_comes_before_when_the_journal_got_it(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(as_json(entry(XID, _SOURCE_REALTIME_TIMESTAMP="1795334400000000")))
    assert reported(tmp_path / "it")[0].detected_at == T


@pytest.mark.parametrize("write", [as_json, as_export])
@pytest.mark.parametrize(
    "other",
    [
        {"_TRANSPORT": "stdout"},  # a program quotes the kernel
        {"_TRANSPORT": "syslog", "SYSLOG_IDENTIFIER": "kernel"},
        {"SYSLOG_FACILITY": "1"},  # a process wrote to /dev/kmsg
    ],
)
def test_entries_of_other_programs_are_not_the_kernels(
    tmp_path: Path, write: Callable[..., bytes], other: dict[str, object]
) -> None:
    (tmp_path / "it").write_bytes(write(entry(NOISE), entry(XID, **other)))
    assert reported(tmp_path / "it") == []


@pytest.mark.parametrize(
    "data",
    [
        as_json(entry(list(XID.encode() + b"\xff"))),
        b"\x1e" + as_json(entry(XID)),
        as_json(entry(None), entry(7), entry([None, "x", 999]), entry(XID, __REALTIME_TIMESTAMP="1795334401500000")),
        as_json(entry(NOISE)) + b"{torn\n[1]\n" + as_json(entry(XID)),
        as_json(entry(NOISE, __REALTIME_TIMESTAMP="x")) + as_json(entry(XID)),
        as_export(entry(XID.encode() + b"\nmore\xff")),
        as_export(entry(NOISE, COREDUMP=b"\0" * 5000), entry(XID)),
        as_export(entry(NOISE), entry(XID))[:-1],
        as_export(entry(NOISE), entry(XID), entry(b"x" * 50))[:-30],
    ],
)
def test_odd_entries_hide_no_other(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "it").write_bytes(data)
    [d] = reported(tmp_path / "it")
    assert "XID 79" in d.because


def test_an_export_with_a_wrong_length_is_refused(tmp_path: Path) -> None:
    data = as_export(entry(NOISE)) + b"MESSAGE\n" + (1 << 60).to_bytes(8, "little") + b"x\n\n"
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(UnreadableInput, match="no proper length"):
        reported(tmp_path / "it")


@pytest.mark.parametrize(
    "data",
    [
        b'{"seq": 1, "kind": "xid", "node": "a", "wall_at": 1.0, "at": 1.0}\n',
        b'{"MESSAGE": "NVRM: Xid (PCI:0000:3b:00): 79, x"}\n',
        b"[]\n",
        b"CURSOR=1\n\n",
        b"{" * 5000,
    ],
)
def test_other_files_are_not_exports(data: bytes) -> None:
    assert kernel_logs.export_kind(data) == ""


def test_a_deadline_ends_the_unpacking_of_one_file(tmp_path: Path) -> None:
    """16 MiB of a few kilobytes: it is looked at for each 64 KiB."""
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 5:
            raise UnreadableInput(where="it", reason="the time is over")

    path = tmp_path / "dmesg.gz"
    path.write_bytes(gzip.compress(b"[    1.000000] usb 1-1: new device\n" * (16 << 20 >> 5)))
    with pytest.raises(UnreadableInput, match="the time is over"):
        kernel_logs.read(path, check)
    assert len(looks) == 5
