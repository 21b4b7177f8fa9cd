"""A real Prometheus that holds the metrics of a real demo run (`metrics/demo.om.gz`, made by
tools/record_demo_metrics.py).

    def test_a_panel_has_data(demo_prometheus: DemoPrometheus) -> None:
        series = demo_prometheus.query_range('rate(rolecall_run_tokens_total[1m])')
        assert series and any(value > 0 for one in series for _, value in one.points)

`demo_prometheus` is started once a session (a second or two) and comes from tests/dashboards/conftest.py; tests that
use it are skipped, saying so, where `prometheus` or `promtool` is not installed.

- `query(expr, at=None)`: an instant query, by default at `.end`; `query_range(expr, start=None, end=None, step=5)`: by
  default over all of the data. Both raise `QueryFailed` with the server's words.
- `.start`, `.end`: first and last scrape, seconds since 1970. `.names()`: every metric name stored. `.url`: its API.
- `prometheus_of(folder, without={"name"})` is another server on the same data without some metrics: for tests that must
  fail when a metric is missing.

Backfilled data has no staleness: a series that ended goes on for `LOOKBACK`, which here is longer than the data, so
that an instant query at the end finds whatever there ever was. A range query therefore shows an incident for longer
than it was open. Scrapes are 5 s apart: `rate` wants [15s] and more, `$__rate_interval` is 20s or longer.
"""

import contextlib
import functools
import gzip
import http.client
import json
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.prometheus_server import prometheus
from tests.support import PATIENCE_SECONDS

FILE = Path(__file__).with_name("metrics") / "demo.om.gz"
LOOKBACK = "30m"
RETENTION = "100y"
SCRAPE_SECONDS = 5.0


class QueryFailed(Exception):
    """What the server said of an expression."""


@dataclass(frozen=True, slots=True)
class Value:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]  # (seconds since 1970, value)


class DemoPrometheus:
    def __init__(self, netloc: str, start: float, end: float) -> None:
        self.netloc, self.start, self.end = netloc, start, end

    @property
    def url(self) -> str:
        return f"http://{self.netloc}"

    def query(self, expr: str, at: float | None = None) -> list[Value]:
        found = self.get("/api/v1/query", query=expr, time=self.end if at is None else at)
        if found["resultType"] == "scalar":
            return [Value({}, float(found["result"][1]))]
        return [Value(row["metric"], float(row["value"][1])) for row in found["result"]]

    def query_range(
        self, expr: str, start: float | None = None, end: float | None = None, step: float = SCRAPE_SECONDS
    ) -> list[Series]:
        since, until = self.start if start is None else start, self.end if end is None else end
        found = self.get("/api/v1/query_range", query=expr, start=since, end=until, step=step)
        return [
            Series(row["metric"], tuple((float(at), float(value)) for at, value in row["values"]))
            for row in found["result"]
        ]

    def names(self) -> frozenset[str]:
        return frozenset(self.get("/api/v1/label/__name__/values", start=self.start, end=self.end))

    def get(self, path: str, **parameters: object) -> Any:
        """`data` of an answer of the API."""
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", f"{path}?{urlencode(parameters, quote_via=quote)}")
            value = json.loads(connection.getresponse().read())
        if value["status"] != "success":
            raise QueryFailed(f"{parameters.get('query', path)}: {value['error']}")
        return value["data"]


@contextlib.contextmanager
def prometheus_of(folder: Path, without: Collection[str] = (), file: Path = FILE) -> Iterator[DemoPrometheus]:
    """A server of its own on the recorded metrics, all but those named `without`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    text = _text(file)
    source, data = folder / "metrics.om", folder / "data"
    source.write_text(_without(text, frozenset(without)) if without else text)
    argv = [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(source), str(data)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    source.unlink()
    start, end = _span(text)
    options = (f"--query.lookback-delta={LOOKBACK}", f"--storage.tsdb.retention.time={RETENTION}")
    with prometheus(folder, *options) as server:
        yield DemoPrometheus(server.netloc, start, end)


@functools.cache
def _text(file: Path) -> str:
    return gzip.decompress(file.read_bytes()).decode()


def _without(text: str, names: frozenset[str]) -> str:
    families = {name.removesuffix("_total") for name in names}

    def stays(line: str) -> bool:
        if line.startswith("# TYPE "):
            return line.split(" ", 3)[2] not in families
        return line.partition("{")[0] not in names

    return "".join(line for line in text.splitlines(keepends=True) if stays(line))


def _span(text: str) -> tuple[float, float]:
    """First and last scrape."""
    times = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("up{")]
    return min(times), max(times)


@pytest.fixture(scope="session")
def demo_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPrometheus]:
    with prometheus_of(tmp_path_factory.mktemp("prometheus-of-demo")) as server:
        yield server
