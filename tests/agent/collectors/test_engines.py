"""Engine processes below a registered one: real processes with the titles of vLLM, and what is no engine of it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rolecall.agent import evidence
from rolecall.agent.collectors.process.engines import EngineProcess, engine_processes
from rolecall.agent.evidence import EvidenceUnavailable, Stacks
from rolecall.core.clock import FakeClock
from tests.support import eventually

TREE = """
import os, subprocess, sys
title, *below = [*sys.argv[1:], ""]
if title:
    command = [title, "-S", "-c", os.environ["TREE"], *(name for name in below if name)]
    child = subprocess.Popen(command, executable=os.environ["PYTHON"], stdin=subprocess.PIPE)
sys.stdin.read()
"""
"""Each process starts the next one, which ends with it."""
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker_TP0"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A server, its helper, the core that this one started, and the core's worker."""
    command = [sys.executable, "-S", "-c", TREE, "forkserver", CORE, "VLLM::DPCoordinator", WORKER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**os.environ, "TREE": TREE, "PYTHON": sys.executable}
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def engines_of(server: subprocess.Popen[bytes]) -> list[EngineProcess]:
    found: list[EngineProcess] = []

    def complete() -> bool:
        found[:] = engine_processes(server.pid)
        return [e.title for e in found] == [CORE, WORKER]

    eventually(complete, "core and worker have their titles")
    return found


def test_the_core_and_its_workers_are_found_with_what_each_works_for(server: subprocess.Popen[bytes]) -> None:
    core, worker = engines_of(server)
    assert (core.title, core.parent) == (CORE, server.pid)
    assert (worker.title, worker.parent) == (WORKER, core.pid)
    assert engine_processes(worker.pid) == []


def test_their_stacks_come_with_those_of_the_server_as_far_as_there_is_time_and_room(
    server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, worker = engines_of(server)
    asked: list[int] = []
    clock = FakeClock()

    def threads(_: Stacks, pid: int, seconds: float) -> list[dict[str, object]]:
        if seconds <= 0:
            raise EvidenceUnavailable("no time was left")
        asked.append(pid)
        clock.advance(spent)
        return [{"thread_id": pid, "frames": []}]

    monkeypatch.setattr(Stacks, "_threads", threads)
    stacks, spent = Stacks(clock), 1.0
    answer = stacks.dump(server.pid)
    assert asked == [server.pid, core.pid, worker.pid]
    assert [(e["pid"], e["parent"], len(e["threads"])) for e in answer["engines"]] == [
        (core.pid, server.pid, 1),
        (worker.pid, core.pid, 1),
    ]
    spent = evidence.DUMP_SECONDS_MAX / 2
    assert [e.get("missing") for e in stacks.dump(server.pid)["engines"]] == [None, "no time was left"]
    spent = 0.0
    monkeypatch.setattr(evidence, "ENGINES_BYTES_MAX", 60)
    late = stacks.dump(server.pid)["engines"][1]
    assert late["threads"] == [] and "more than 60 bytes" in late["missing"]
