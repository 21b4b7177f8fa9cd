"""When a disk counts as full, when as having room again, and which disks are one."""

import os
from pathlib import Path

import pytest

from rolecall.agent.disk_space import FULL_BYTES, DiskSpace, DiskWatch, disk_space
from rolecall.core.telemetry import AgentEventKind
from tests.full_disk import small_disk

GIB = 1 << 30
FULL, FREE = AgentEventKind.DISK_FULL, AgentEventKind.DISK_FREE


def space(available: int, size: int = 100 * GIB, files_free: int | None = 1000) -> DiskSpace:
    return DiskSpace(path="/d", number="8:1", available_bytes=available, size_bytes=size, files_free=files_free)


@pytest.mark.parametrize(
    ("of", "full", "room"),
    [
        (space(0), True, False),
        (space(FULL_BYTES - 1), True, False),
        (space(FULL_BYTES), False, False),
        (space(2 * FULL_BYTES), False, True),
        (space(5 * GIB), False, True),  # 5 %: a warning is enough
        (space(5 * GIB, files_free=0), True, False),
        (space(5 * GIB, files_free=None), False, True),  # it counts no inodes
        (space(8 << 10, size=1 << 20), True, False),  # a small one: 1 %
        (space(32 << 10, size=1 << 20), False, True),
    ],
)
def test_a_disk_is_full_when_nothing_can_be_written(of: DiskSpace, full: bool, room: bool) -> None:
    assert (of.is_full, of.has_room) == (full, room)


def test_a_change_is_told_once_and_a_disk_on_the_edge_does_not_alternate() -> None:
    watch = DiskWatch()
    polls = [space(5 * GIB), space(0), space(0), space(FULL_BYTES), None, space(0), space(5 * GIB), space(5 * GIB)]
    assert [watch.poll(s) for s in polls] == [None, FULL, None, None, None, None, FREE, None]


def test_a_real_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk.path / "agent"
        folder.mkdir()
        before = disk_space(folder)
        disk.fill()
        full = disk_space(folder)
        disk.free()
        after = disk_space(folder)
    assert before is not None and full is not None and after is not None
    assert (before.is_full, full.is_full, after.has_room) == (False, True, True)
    assert full.detail["path"] == str(folder) and full.detail["available_bytes"] == "0"
    assert before.device == full.device
    other = disk_space(tmp_path)
    assert other is not None and other.device != before.device


def test_what_cannot_be_asked_is_unknown(tmp_path: Path) -> None:
    assert disk_space(tmp_path / "not there") is None


def test_a_network_file_system_is_the_same_disk_on_every_host(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    devices = set[str]()
    for host, (mounted, kind) in enumerate((("/home", "nfs4"), ("/mnt/home", "nfs4"), ("/", "ext4"), ("/", "ext4"))):
        proc = tmp_path / f"proc-{host}"
        (proc / "self").mkdir(parents=True)
        line = f"30 1 {os.major(number)}:{os.minor(number)} / {mounted} rw,noatime shared:1 - {kind} server:/home rw\n"
        (proc / "self/mountinfo").write_text("22 1 0:1 / /proc rw - proc proc rw\n" + line)
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(f"boot-{host}\n")
        found = disk_space(tmp_path, proc)
        assert found is not None
        devices.add(found.device)
    assert len(devices) == 3 and "server:/home" in devices, "two hosts have the first, and the others have their own"
