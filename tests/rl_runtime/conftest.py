"""Fixtures that several tests of the runtime share."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall.rl_runtime.device import device_of, found_hardware
from rolecall.rl_runtime.weights.port import TensorServer
from tests.rl_runtime.rollout_rig import Rig
from tests.rl_runtime.weight_port import TOKEN, Start
from tests.support import eventually


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and device_of(None, found_hardware()) == "cpu":
        pytest.skip("needs an NVIDIA GPU and a CUDA build of torch")


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes weight servers; in the end they are closed, and none of their threads may be left."""
    servers: list[TensorServer] = []

    def make(**options: object) -> TensorServer:
        servers.append(TensorServer(TOKEN, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("weight")], "threads have ended")


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.scripted.hold.set()
        rig.replica.close()
        rig.trainer.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()
