"""Fixtures: the stand-in for NVML's library, built once, with two healthy GPUs; the ID of a thread."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.collectors.gpu.collector import GpuCollector
from tests.agent.nvml import Machine, build, shown_by
from tests.agent.processes import NODE


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Two GPUs, healthy."""
    with shown_by(Machine(tmp_path / "state", num_gpus=2)) as shown:
        yield shown


@pytest.fixture
def gpus(library: Path, machine: Machine) -> Iterator[GpuCollector]:
    collector = GpuCollector(NODE, library=library, slow_seconds=10.0)
    yield collector
    collector.close()


@pytest.fixture
def thread_id() -> Iterator[int]:
    """Of a thread of this process; no process has it as its PID."""
    ended = threading.Event()
    it = threading.Thread(target=ended.wait)
    it.start()
    assert it.native_id is not None
    yield it.native_id
    ended.set()
    it.join()
