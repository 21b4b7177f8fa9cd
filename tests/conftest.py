"""What every test gets: no environment of a run around it, one thread a library, and a seed that can be given.

pytest --seed 17 tests/recovery      # simulations and random tests use this seed, and print it when they fail
"""

import os
import random

import pytest
from hypothesis import settings

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
