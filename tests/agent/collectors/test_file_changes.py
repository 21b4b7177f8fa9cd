"""A poll of the kernel log that waits until a line is written to any of its files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.agent.collectors.kernel.collector import KernelLogCollector
from rolecall.agent.collectors.kernel.sources import FileChanges, Kmsg
from rolecall.core.ids import NodeId
from tests.support import PATIENCE_SECONDS

LINE = "Nov 22 10:00:00 n kernel: [  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off"
FOR_EVER = 2.0 * PATIENCE_SECONDS


def woken(wait: Callable[[], object], cause: Callable[[], object]) -> bool:
    """Whether `wait` in a thread comes back, when `cause` has happened after its begin or before."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    cause()
    thread.join(PATIENCE_SECONDS)
    return not thread.is_alive()


def write(path: Path, text: str) -> None:
    with path.open("a") as f:
        f.write(text)


def test_a_file_that_grows_and_a_file_that_comes(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    write(path, "old\n")
    descriptor = os.open(path, os.O_RDONLY)
    changes = FileChanges(descriptor, path)
    changes.wait(0.0)  # no change: it returns without an error
    assert woken(lambda: changes.wait(FOR_EVER), lambda: write(path, "line\n"))
    assert woken(lambda: changes.wait(FOR_EVER), lambda: path.rename(tmp_path / "kern.log.1"))
    assert woken(lambda: changes.wait(FOR_EVER), lambda: write(tmp_path / "kern.log.1", "late\n")), "the same file"
    assert woken(lambda: changes.wait(FOR_EVER), lambda: write(path, "another file\n"))
    os.close(descriptor)
    changes.close()


def test_a_missing_file_watch_is_reported_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        FileChanges(0, tmp_path / "no folder" / "file")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def collector(path: Path) -> KernelLogCollector:
    return KernelLogCollector(node=NodeId("node-1"), merger=XidMerger(), path=path, wait_seconds=FOR_EVER)


def test_a_poll_waits_for_a_line(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    write(path, LINE + "\n")
    it, found = collector(path), list[CollectorReading]()
    assert len(it.read(0.0).facts) == 1, "what is there already is not waited for"
    it.read(0.0)  # nor is anything before there is a watch
    assert woken(lambda: found.append(it.read(0.0)), lambda: write(path, LINE.replace("79", "48") + "\n"))
    assert [f.detail["xid"] for f in found[0].facts] == ["48"]
    it.close()


def test_a_poll_continues_with_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    write(path, LINE + "\n")
    it, found = collector(path), list[CollectorReading]()
    for _ in range(2):
        it.read(0.0)

    def rotate() -> None:
        write(tmp_path / "kern.log.new", LINE.replace("79", "48") + "\n")
        path.rename(tmp_path / "kern.log.1")
        (tmp_path / "kern.log.new").rename(path)

    def follow() -> None:
        while not any(r.facts for r in found):
            found.append(it.read(0.0))

    assert woken(follow, rotate)
    assert [f.detail["xid"] for r in found for f in r.facts] == ["48"]
    it.close()


def test_a_record_of_the_kernel_wakes() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    kmsg = Kmsg(Path("/dev/kmsg"), {}, "boot", open_=lambda *_: reading)
    kmsg.wait(FOR_EVER)  # not open yet: it would never come back
    assert list(kmsg.poll()) == []
    assert woken(lambda: kmsg.wait(FOR_EVER), lambda: os.write(writing, b"4,1,100,-;NVRM: a line\n"))
    kmsg.close()
    os.close(writing)
