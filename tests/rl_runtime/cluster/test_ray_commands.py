"""Ray is started by command lines of one version: any other is refused before anything is started."""

import tomllib
from pathlib import Path

import pytest

from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.cluster.ray_commands import RAY_VERSION, check_ray

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["2.60.0", "2.60.3", "2.60"])
def test_the_supported_version_is_accepted(version: str) -> None:
    check_ray(version)


@pytest.mark.parametrize("version", ["2.61.0", "2.6.0", "2.600.0", "3.60.0", "none"])
def test_any_other_version_is_refused_with_the_required_one(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs Ray 2\.60, found {version}; install it with: pip install"):
        check_ray(version)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lock_and_the_extra_install_that_version(device: str) -> None:
    check_ray()
    lines = (ROOT / "requirements" / f"linux-{device}.txt").read_text().splitlines()
    (locked,) = [line for line in lines if line.startswith("ray==")]
    check_ray(locked.removeprefix("ray=="))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"ray>={RAY_VERSION},<2.61" in extras["runtime-base"]
