"""What every test gets: no environment of a run around it, one thread a library, and a seed that can be given.

pytest --seed 17 tests/recovery      # simulations and random tests use this seed, and print it when they fail
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
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


E2E_FOLDERS = tuple(Path(__file__).parent / folder for folder in ("e2e", "rl_runtime/cluster"))
"""`make test` looks for end-to-end tests there only."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("e2e") and not any(item.path.is_relative_to(folder) for folder in E2E_FOLDERS):
        raise pytest.UsageError(f"{item.nodeid}: `make test` would not run this e2e test: not in its E2E folders")


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


MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 1 << 30


@pytest.fixture(scope="session")
def _folder_in_memory() -> Iterator[Path | None]:
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    if not roomy:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rolecall-tests-", dir=MEMORY, ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, _folder_in_memory: Path | None) -> Iterator[Path]:
    """In memory where there is room: a journal waits for the disk at every commit, and simulations commit a hundred
    thousand times. On a disk that others use, too, that is two thirds of their time. End-to-end tests stay on the disk,
    as runs do."""
    if _folder_in_memory is None or request.node.get_closest_marker("e2e") is not None:
        yield request.getfixturevalue("tmp_path")  # pytest's own, which this one takes the place of
        return
    path = Path(tempfile.mkdtemp(dir=_folder_in_memory))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def _built_run(tmp_path_factory: pytest.TempPathFactory, _folder_in_memory: Path | None) -> Path:
    return FakeRun(_folder_in_memory or tmp_path_factory.mktemp("built")).build().path


@pytest.fixture
def fake_run(_built_run: Path, tmp_path: Path) -> RunDir:
    """A finished run with three faults, all resolved; each test has a copy of its own."""
    path = tmp_path / "runs" / _built_run.name
    shutil.copytree(_built_run, path)
    return RunDir(path)
