"""Engine processes without their server."""

import os
import subprocess
import sys
import time

import pytest

from rolecall.node.orphans import RunningProcess, find_orphans, running_processes
from tests.support import eventually


def process(pid: int, parent: int, name: str, title: str = "") -> RunningProcess:
    return RunningProcess(
        pid=pid, parent=parent, name=name, title=title or name, start_ticks=10 * pid, age_seconds=7200.0
    )


SYSTEMD = process(1, 0, "systemd", "/sbin/init")


def test_an_engine_core_that_init_has_inherited_is_an_orphan() -> None:
    core = process(40, 1, "VLLM::EngineCor", "VLLM::EngineCore")
    (found,) = find_orphans([SYSTEMD, core], {40: 115 << 30})
    assert (found.pid, found.gpu_bytes, found.adopted_by) == (40, 115 << 30, "systemd (1)")
    assert found.command == "rolecall node end 40 --start-ticks 400 --grace 10"


@pytest.mark.parametrize(
    "processes",
    [
        [SYSTEMD, process(9, 1, "vllm"), process(40, 9, "VLLM::EngineCor", "VLLM::EngineCore")],
        [process(1, 0, "vllm", "/usr/bin/python3"), process(40, 1, "VLLM::EngineCor", "VLLM::EngineCore")],
        [SYSTEMD, process(40, 1, "nginx")],
        [process(40, 1, "VLLM::EngineCor", "VLLM::EngineCore")],
    ],
    ids=["its server lives", "its server is the first process of a container", "no engine", "parent unknown"],
)
def test_no_other_process_is(processes: list[RunningProcess]) -> None:
    assert list(find_orphans(processes)) == []


def test_titles_and_parents_are_read_from_this_machine() -> None:
    title = "VLLM::EngineCore"
    with subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE) as child:
        found: list[RunningProcess] = []

        def listed() -> bool:
            found[:] = [p for p in running_processes(time.time()) if p.pid == child.pid and p.title == title]
            return bool(found)

        eventually(listed, "the child is listed")
        assert found[0].parent == os.getpid() and found[0].start_ticks > 0
        assert child.stdin is not None
        child.stdin.close()
