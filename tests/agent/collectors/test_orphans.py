"""Engine processes without their server: real processes whose parent is, or is not, an init process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.process.orphans import OrphansCollector, is_orphan
from rolecall.core.ids import process_start_ticks
from rolecall.core.telemetry import AgentEventKind
from tests.agent.processes import NODE
from tests.support import eventually

TITLE = "VLLM::EngineCore"
SERVER = """
import subprocess, sys
child = subprocess.Popen([sys.argv[1], "1000"], executable="/bin/sleep")
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@contextmanager
def adopted(folder: Path) -> Iterator[tuple[int, int]]:
    """(PID of a process named `tini`, PID of an engine's process that is its child), as after the death of its
    server."""
    tini = folder / "tini"
    tini.symlink_to(sys.executable)
    # The name of a process is that of the file that it was started by.
    pipe = subprocess.PIPE
    with subprocess.Popen([str(tini), "-S", "-c", SERVER, TITLE], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline())
        eventually(lambda: TITLE in Path(f"/proc/{pid}/cmdline").read_text(), "it has its title")
        try:
            yield parent.pid, pid
        finally:
            parent.stdin.close()


@pytest.fixture
def init(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """An orphan, and a /proc that has nothing but it and its parent: (/proc, its PID)."""
    proc = tmp_path / "proc"
    proc.mkdir()
    with adopted(tmp_path) as (parent, pid):
        for one in (parent, pid):
            (proc / str(one)).symlink_to(f"/proc/{one}")
        yield proc, pid


def test_an_orphan_is_reported_after_two_polls_and_once(init: tuple[Path, int]) -> None:
    proc, pid = init
    collector = OrphansCollector(NODE, proc=proc)
    assert collector.read(0.0).facts == (), "its server may just be starting again"
    (fact,) = collector.read(10.0).facts
    assert fact.kind is AgentEventKind.ORPHANED_ENGINE and fact.process is not None
    assert (fact.process.pid, fact.process.start_ticks) == (pid, process_start_ticks(pid))
    assert fact.detail["title"] == TITLE and fact.detail["adopted_by"].startswith("tini (")
    assert fact.detail["command"] == f"rolecall node end {pid} --start-ticks {process_start_ticks(pid)} --grace 10"
    assert collector.read(20.0).facts == ()
    os.kill(pid, 9)
    eventually(lambda: (Path(f"/proc/{pid}/stat").read_text().split()[2]) == "Z", "it has ended")
    (gone,) = collector.read(30.0).facts
    assert gone.kind is AgentEventKind.ORPHAN_GONE and gone.process == fact.process
    assert collector.read(40.0).facts == ()


def test_without_proc_the_probe_is_down(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable):
        OrphansCollector(NODE, proc=tmp_path / "none").read(0.0)


@pytest.mark.parametrize(
    ("title", "parent", "orphan"),
    [
        (TITLE, "systemd", True),
        ("VLLM::Worker_TP0", "tini", True),
        ("sglang::scheduler_TP0", "raylet", True),
        (TITLE, "bash", True),
        (TITLE, "ray", True),
        (TITLE, "ray::IDLE", False),
        (TITLE, "vllm", False),
        (TITLE, "python3", False),
        ("nginx: master", "systemd", False),
        ("my VLLM::EngineCore", "systemd", False),
    ],
)
def test_what_an_orphan_is(title: str, parent: str, orphan: bool) -> None:
    assert is_orphan(title, parent) is orphan
