"""Disks, file systems and pressure, from `/proc` and statvfs."""

import os
import threading
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.process.host import parse_stalls
from rolecall.agent.collectors.storage.collector import (
    NUM_MOUNTS_MAX,
    Mount,
    StorageCollector,
    chosen,
    parse_diskstats,
    parse_mounts,
)
from rolecall.core.ids import NodeId

NODE = NodeId("node-1")
DISKSTATS = """ 259       0 nvme0n1 100 5 2000 300 200 6 4000 700 3 500 1000 0 0 0 0 9 8
 259       1 nvme0n1p1 90 5 1900 300 200 6 4000 700 0 500 1000 0 0 0 0
   7       0 loop0 1 0 2 0 0 0 0 0 0 0 0
   8       0 sda 1 2 x 4 5 6 7 8 9 10 11
   8      16 sdb 1 2 3
"""
MOUNTS = """proc /proc proc rw 0 0
overlay / overlay ro,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /run tmpfs rw 0 0
/dev/nvme0n1p1 /data/with\\040space ext4 rw 0 0
/dev/nvme0n1p1 /bind ext4 rw 0 0
server:/home /home nfs4 rw 0 0
"""


def result(*, blocks: int = 1000, available: int = 250, files: int = 64) -> os.statvfs_result:
    """Blocks of 4096 bytes; read-only, as a container sees it."""
    numbers = (4096, 4096, blocks, available + 10, available, files, files // 2, files // 2, os.ST_RDONLY, 255)
    return os.statvfs_result(numbers)


def proc(tmp_path: Path, **files: str) -> Path:
    """`pressure_io` is `pressure/io`."""
    for name, text in files.items():
        path = tmp_path / "proc" / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc"


def values(reading: CollectorReading) -> dict[tuple[str, ...], float]:
    """By name without `rolecall_`, and labels without the node."""
    return {(v.metric.name.removeprefix("rolecall_"), *v.labels[1:]): v.value for v in reading.values}


def test_physical_disks_and_those_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "block" / "nvme0n1" / "device").mkdir(parents=True)
    (tmp_path / "block" / "loop0").mkdir()
    it = StorageCollector(NODE, proc=proc(tmp_path, diskstats=DISKSTATS), block=tmp_path / "block")
    assert values(it.read(0.0)) == {
        ("disk_reads_total", "nvme0n1"): 100.0,
        ("disk_read_bytes_total", "nvme0n1"): 2000 * 512.0,
        ("disk_read_seconds_total", "nvme0n1"): 0.3,
        ("disk_writes_total", "nvme0n1"): 200.0,
        ("disk_written_bytes_total", "nvme0n1"): 4000 * 512.0,
        ("disk_write_seconds_total", "nvme0n1"): 0.7,
        ("disk_busy_seconds_total", "nvme0n1"): 0.5,
        ("disk_requests_active", "nvme0n1"): 3.0,
    }
    named = StorageCollector(NODE, disks=["loop0"], proc=tmp_path / "proc", block=tmp_path / "block")
    assert ("disk_reads_total", "loop0") in values(named.read(0.0))


def test_milliseconds_that_go_round_continue(tmp_path: Path) -> None:
    line = " 8 0 sda 0 0 0 {} 0 0 0 0 0 0 0\n"
    it = StorageCollector(NODE, disks=["sda"], proc=proc(tmp_path, diskstats=line.format(2**32 - 1000)))
    before = values(it.read(0.0))["disk_read_seconds_total", "sda"]
    proc(tmp_path, diskstats=line.format(500))
    assert values(it.read(1.0))["disk_read_seconds_total", "sda"] == pytest.approx(before + 1.5)


def test_pressure_that_the_host_reading_leaves_out(tmp_path: Path) -> None:
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    root = proc(
        tmp_path,
        pressure_cpu="some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n",  # before Linux 5.13
        pressure_memory=text.format(1_000_000, 500_000),
        pressure_io=text.format(3_000_000, 2_000_000),
    )
    assert values(StorageCollector(NODE, proc=root).read(0.0)) == {
        ("host_io_stall_seconds_total",): 3.0,
        ("host_full_stall_seconds_total", "memory"): 0.5,
        ("host_full_stall_seconds_total", "io"): 2.0,
    }


def test_file_systems(tmp_path: Path) -> None:
    asked = list[str]()

    def statvfs(path: str) -> os.statvfs_result:
        asked.append(path)
        if path == "/dev/shm":
            raise PermissionError(13, "Permission denied")
        return result(files=0) if path == "/" else result()

    it = StorageCollector(NODE, proc=proc(tmp_path, mounts=MOUNTS), statvfs=statvfs)
    assert values(it.read(0.0)) == {
        ("filesystem_up", "/"): 1.0,
        ("filesystem_size_bytes", "/"): 4096_000.0,
        ("filesystem_available_bytes", "/"): 1024_000.0,
        ("filesystem_readonly", "/"): 1.0,
        ("filesystem_up", "/dev/shm"): 0.0,
        ("filesystem_up", "/bind"): 1.0,
        ("filesystem_size_bytes", "/bind"): 4096_000.0,
        ("filesystem_available_bytes", "/bind"): 1024_000.0,
        ("filesystem_readonly", "/bind"): 0.0,
        ("filesystem_files", "/bind"): 64.0,
        ("filesystem_files_free", "/bind"): 32.0,
    }
    it.read(14.0)
    assert len(asked) == 3
    it.read(15.0)
    assert len(asked) == 6


def test_a_network_file_system_is_asked_only_if_named_and_may_hang(tmp_path: Path) -> None:
    release, asked = threading.Event(), threading.Semaphore(0)

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/home":
            asked.release()
            assert release.wait(60)
        return result()

    it = StorageCollector(
        NODE,
        mounts=["/home", "/data/with space", "/nowhere"],
        proc=proc(tmp_path, mounts=MOUNTS),
        statvfs=statvfs,
        file_systems_every_seconds=1.0,
    )
    first = values(it.read(0.0))
    assert asked.acquire(timeout=60)
    assert first["filesystem_up", "/home"] == 0.0
    assert first["filesystem_up", "/data/with space"] == 1.0  # the others answer
    assert first["filesystem_up", "/nowhere"] == 0.0
    assert values(it.read(1.0))["filesystem_up", "/home"] == 0.0
    assert not asked.acquire(blocking=False)  # no second thread behind one that hangs
    [hanging] = [t for t in threading.enumerate() if t.name == "statvfs-/home"]
    release.set()
    hanging.join(60)
    assert values(it.read(2.0))["filesystem_up", "/home"] == 1.0
    for thread in [t for t in threading.enumerate() if t.name == "statvfs-/home"]:
        thread.join(60)


def test_in_a_container_the_host_is_asked_by_the_hosts_names(tmp_path: Path) -> None:
    """`mounts` of a mounted /proc would be of who reads it: the mounts of the host are those of its first process."""
    asked = list[str]()

    def statvfs(path: str) -> os.statvfs_result:
        asked.append(path)
        return result()

    root = proc(tmp_path, mounts="overlay / overlay rw 0 0\n/dev/sdz /etc/hosts ext4 rw 0 0\n")
    (root / "1").mkdir()
    (root / "1" / "mounts").write_text("/dev/vda1 / ext4 rw 0 0\n/dev/vdb /data xfs ro 0 0\nnas:/x /nas nfs4 rw 0 0\n")
    it = StorageCollector(NODE, mounts=["/nas"], proc=root, rootfs=Path("/host/root"), statvfs=statvfs)
    shown = values(it.read(0.0))
    assert sorted(asked) == ["/host/root", "/host/root/data", "/host/root/nas"]
    assert {k[1]: v for k, v in shown.items() if k[0] == "filesystem_readonly"} == {"/": 0.0, "/data": 1.0, "/nas": 0.0}


def test_mounts_are_chosen_once_a_device_and_bounded() -> None:
    many = [Mount(f"/dev/sd{n}", f"/disk/{n}", "xfs") for n in range(2 * NUM_MOUNTS_MAX)]
    assert len(chosen(many, [])) == NUM_MOUNTS_MAX
    assert chosen(many, ["/disk/60"])[0].path == "/disk/60"
    root = Mount("/dev/vda", "/", "ext4")
    assert chosen([Mount("/dev/vda", "/run/netns", "ext4"), root], []) == [root]
    remote = [Mount("server:/", "/", "nfs"), Mount("s3", "/bucket", "fuse.s3fs"), Mount("fs", "/scratch", "lustre")]
    assert chosen(remote, []) == []  # not even as the root
    assert chosen(remote, ["/scratch"]) == remote[2:]
    hidden = [Mount("/dev/sda", "/data", "ext4"), Mount("server:/x", "/data", "nfs")]
    assert chosen(hidden, []) == []  # the hidden mount cannot be queried


def test_formats_with_damage() -> None:
    assert set(parse_diskstats(DISKSTATS)) == {"nvme0n1", "nvme0n1p1", "loop0"}
    assert parse_diskstats("") == {}
    assert parse_mounts("short\n/dev/sda /a xfs\n\n/dev/sda /a\\011b ext4 rw 0 0\n") == [
        Mount("/dev/sda", "/a\tb", "ext4")
    ]
    assert parse_stalls("some total=x\nfull total=2000000\nwhat total=1\n") == {"full": 2.0}


def test_nothing_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable):
        StorageCollector(NODE, proc=tmp_path / "proc", block=tmp_path / "block").read(0.0)


def test_this_machine_is_read_without_harm() -> None:
    it = StorageCollector(NODE)
    for at in (0.0, 20.0):
        reading = it.read(at)
        assert ("filesystem_up", "/") in values(reading)
        assert all(len(v.labels) == len(v.metric.labels) for v in reading.values)
