"""What every test gets: no environment of a run around it, one thread a library, and a seed that can be given.

pytest --seed 17 tests/recovery      # simulations and random tests use this seed, and print it when they fail
"""

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from rolecall.core.rundir import RunDir
from tests.fake_run import FakeRun

# Two cores are shared by everything: a library that starts a thread per core makes timings erratic (design section 8).
# Set before any test imports torch.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("rolecall", deadline=None, print_blob=True)
settings.load_profile("rolecall")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of simulations and random tests")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    value = request.config.getoption("--seed")
    assert isinstance(value, int)
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(autouse=True)
def _outside_of_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test must not find itself inside a run, because somebody started pytest from one."""
    for name in [n for n in os.environ if n.startswith("ROLECALL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def _built_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FakeRun(tmp_path_factory.mktemp("built")).build().path


@pytest.fixture
def fake_run(_built_run: Path, tmp_path: Path) -> RunDir:
    """A finished run with three faults, all cured; each test has a copy of its own."""
    path = tmp_path / "runs" / _built_run.name
    shutil.copytree(_built_run, path)
    return RunDir(path)
