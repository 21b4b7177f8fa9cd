"""The source `prometheus` against a small server that can be as bad as a test wants; the real one is in
tests/watch/test_panels.py."""

import itertools
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.detector.panels.panel import Machine, PanelTick
from rolecall.detector.panels.series import PanelPosition
from rolecall.detector.sources.prometheus import (
    Labels,
    MetricQuery,
    PrometheusSource,
    catalogue_queries,
    dcgm_queries,
    trusted_rate,
)
from rolecall.detector.sources.prometheus_api import Addresses, Client, PrometheusClientLimits, PrometheusUnavailable

Sample = Callable[[dict[str, str], float], object]


class FakeServer:
    """Answers `NAME{MATCHERS}` over series that it holds. `bad`: answers given first, one each, instead."""

    def __init__(self, clock: FakeClock, certificate: tuple[Path, Path] | None = None) -> None:
        self.clock, self.scheme = clock, "http"
        self.series: dict[str, list[tuple[dict[str, str], Sample]]] = {}
        self.points_max = self.series_max = 10**9
        self.bad: list[Any] = []
        self.bad_times: list[Any] = []  # for `time()`: a status, or seconds that its clock is ahead
        self.chunked = False
        self.asked: list[dict[str, str]] = []  # forms of range queries
        self.headers: list[str] = []
        self.released = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.answer(self, {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()})

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                fake.answer(self, {k: v[0] for k, v in form.items()})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*certificate)
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.scheme = "https"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, form: dict[str, str]) -> None:
        self.headers.append(handler.headers.get("Authorization", ""))
        path = urlsplit(handler.path).path
        bad = self.bad.pop(0) if self.bad and path.endswith("query_range") else None
        if bad == "drip":
            self.drip(handler)
            return
        status, value = self.value(path, form) if bad is None else (bad, {}) if isinstance(bad, int) else (200, bad)
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        if self.chunked:
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for at in range(0, len(body), 400):
                piece = body[at : at + 400]
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            handler.wfile.write(b"0\r\n\r\n")
            return
        handler.send_header("Content-Length", str(len(body) + (10 if bad == b"short" else 0)))
        if 300 <= status < 400:
            handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = handler.close_connection or bad == b"short"

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
        while not self.released.wait(0.02):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    def value(self, path: str, form: dict[str, str]) -> tuple[int, Any]:
        if path == "/api/v1/query":
            assert form["query"] == "time()"
            bad = self.bad_times.pop(0) if self.bad_times else 0.0
            if isinstance(bad, int):
                return bad, {"status": "error", "errorType": "timeout", "error": "query timed out"}
            now = self.clock.wall() + bad
            return 200, {"status": "success", "data": {"resultType": "scalar", "result": [now, str(now)]}}
        if path.startswith("/api/v1/label/"):
            name = path.split("/")[4]
            values = sorted({labels[name] for found in self.series.values() for labels, _ in found if name in labels})
            return 200, {"status": "success", "data": values}
        assert path == "/api/v1/query_range", path
        self.asked.append(form)
        start, end, step = (float(form[k]) for k in ("start", "end", "step"))
        times = [start + i * step for i in range(round((end - start) / step) + 1)]
        found = self.matching(form["query"])
        if len(times) > self.points_max:
            return 400, {"status": "error", "errorType": "bad_data", "error": "exceeded maximum resolution of 11,000"}
        if len(found) > self.series_max:
            reason = "query processing would load too many samples into memory in query execution"
            return 422, {"status": "error", "errorType": "execution", "error": reason}
        result = []
        for labels, sample in found:
            values = [[t, v] for t in times if (v := sample(labels, t)) is not None]
            if values:
                result.append({"metric": labels, "values": values})
        return 200, {"status": "success", "data": {"resultType": "matrix", "result": result}}

    def matching(self, expression: str) -> list[tuple[dict[str, str], Sample]]:
        name, _, matchers = expression.partition("{")
        found = self.series.get(name, [])
        for label, how, text in re.findall(r'(\w+)(=~|!~|=)"((?:[^"\\]|\\.)*)"', matchers):
            pattern = re.compile(json.loads(f'"{text}"') if how != "=" else re.escape(text))
            found = [s for s in found if bool(pattern.fullmatch(s[0].get(label, ""))) == (how != "!~")]
        return found

    def add(self, metric: str, sample: Sample, **labels: str) -> None:
        self.series.setdefault(metric, []).append(({"__name__": metric, **labels}, sample))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(now=1000.5)


@pytest.fixture
def server(clock: FakeClock) -> Iterator[FakeServer]:
    it = FakeServer(clock)
    yield it
    it.close()


def a_load(labels: dict[str, str], at: float) -> str:
    """Another value for each machine and time."""
    return repr(int(labels["node"][1:]) + at % 1000)


QUERY = MetricQuery(metric="load", expression="load{$match}")
QUICK = PrometheusClientLimits(answer_seconds=0.4, patience_seconds=0.0)


def source(
    server: FakeServer,
    *queries: MetricQuery,
    history: float = 0.0,
    match: str = "",
    limits: PrometheusClientLimits | None = None,
) -> PrometheusSource:
    client = Client(server.url, server.clock, limits=limits)
    return PrometheusSource(
        client, queries or (QUERY,), server.clock, interval_seconds=10.0, history_seconds=history, match=match
    )


def patience() -> Callable[[], bool]:
    """Ends a source that never gives a tick: the clock is not real, so it asks and asks."""
    asked = itertools.count()
    return lambda: next(asked) > 20_000


def first(it: PrometheusSource, number: int) -> list[PanelTick]:
    """The first ticks; each is there after at most a few intervals."""
    ticks = it.ticks(patience())
    try:
        return [next(ticks) for _ in range(number)]
    finally:
        ticks.close()  # type: ignore[attr-defined]


def test_series_become_ticks_on_the_grid(server: FakeServer) -> None:
    server.add("load", a_load, node="n1", role="trainer", replica="trainer/1", rank="0")
    server.add("load", a_load, node="n0", role="trainer", replica="trainer/0", rank="0")
    ticks = first(source(server, history=30.0), 5)
    begun = 1_700_001_000.0 - 10.0  # a lag of one interval behind the clock, which stood at 1,000.5
    assert [t.at for t in ticks] == [begun + 10.0 * i for i in range(-2, 3)]
    [shape] = {id(t.shape): t.shape for t in ticks}.values()
    assert shape.role == "trainer" and shape.interval_seconds == 10.0 and shape.metrics == ("load",)
    assert shape.machines == tuple(Machine(node=f"n{i}", replica=f"trainer/{i}", rank=0) for i in (0, 1))
    for tick in ticks:
        assert tick.values.tolist() == [[tick.at % 1000, 1 + tick.at % 1000]]


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-Inf", "1e300", None])
def test_a_value_that_is_no_number_is_missing(server: FakeServer, text: str | None) -> None:
    server.add("load", lambda labels, t: text if t % 20 else "1", node="n0")
    server.add("load", lambda labels, t: "2", node="n1")
    values = np.array([t.values[0] for t in first(source(server, history=40.0), 4)])
    assert np.isfinite(values).tolist() == [[True, True], [False, True]] * 2


def test_a_machine_that_goes_is_missing_and_one_that_comes_is_added(server: FakeServer, clock: FakeClock) -> None:
    turn = clock.wall() + 30.0
    server.add("load", lambda labels, t: "1" if t < turn else None, node="n0")
    server.add("load", lambda labels, t: "1", node="n1")
    server.add("load", lambda labels, t: "1" if t >= turn else None, node="n2")
    ticks = first(source(server), 10)
    assert [len(t.shape.machines) for t in ticks] == [2] * 5 + [3] * 5
    assert all(np.isnan(t.values[0, 0]) and t.values[0, 1:].tolist() == [1, 1] for t in ticks[5:])


def test_roles_ranks_and_gpus_make_panels_of_their_own(server: FakeServer) -> None:
    for labels in ({"role": "a"}, {"role": "b"}, {"role": "b", "rank": "1"}, {"role": "b", "gpu": "1"}):
        server.add("load", lambda labels, t: "1", node="n0", **labels)
    shapes = [t.shape for t in first(source(server), 4)]
    assert len({t.at for t in first(source(server), 4)}) == 1
    assert sorted((s.role, s.machines[0].rank or 0, s.machines[0].gpu or 0) for s in shapes) == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("b", 0, 1),
        ("b", 1, 0),
    ]


@pytest.mark.parametrize(("points_max", "series_max"), [(7, 100), (100, 6), (3, 2)])
def test_a_server_with_limits_gives_the_same_in_pieces(server: FakeServer, points_max: int, series_max: int) -> None:
    for i in range(20):
        server.add("load", a_load, node=f"n{i}")
    server.add("load", lambda labels, t: "7", node='n20"\\|.*')
    whole = first(source(server, history=200.0), 20)
    server.asked.clear()
    server.points_max, server.series_max = points_max, series_max
    server.clock.sleep(-(server.clock.monotonic() - 1000.5))
    it = source(server, history=200.0)
    pieces = first(it, 20)
    assert [t.at for t in pieces] == [t.at for t in whole]
    assert pieces[0].shape == whole[0].shape and len(whole[0].shape.machines) == 21
    assert np.array_equal([t.values for t in pieces], [t.values for t in whole])


def test_the_pieces_that_worked_are_remembered_and_new_machines_are_in_one(server: FakeServer) -> None:
    for i in range(8):
        server.add("load", lambda labels, t: "1", node=f"n{i}")
    server.series_max = 5
    it = source(server)
    ticks = it.ticks(patience())
    next(ticks)
    server.add("load", lambda labels, t: "1", node="late")
    server.asked.clear()
    assert len(next(ticks).shape.machines) == 9
    assert len(server.asked) == 3, "two halves, and those in neither"
    ticks.close()  # type: ignore[attr-defined]


def test_an_answer_too_large_is_asked_for_in_halves(server: FakeServer) -> None:
    for i in range(4):
        server.add("load", a_load, node=f"n{i}")
    small = PrometheusClientLimits(answer_bytes_max=1000)
    ticks = first(source(server, history=160.0, limits=small), 16)
    assert len({t.at for t in ticks}) == 16 and all(np.isfinite(t.values).all() for t in ticks)
    assert len(server.asked) >= 7


def test_the_rest_of_an_answer_too_large_does_not_hinder_the_next(server: FakeServer) -> None:
    for i in range(4):
        server.add("load", a_load, node=f"n{i}")
    server.chunked = True
    small = PrometheusClientLimits(answer_bytes_max=1000, patience_seconds=0.0)
    assert len(first(source(server, history=160.0, limits=small), 16)) == 16


def test_a_query_that_cannot_be_split_gives_advice(server: FakeServer) -> None:
    for i in range(4):
        server.add("load", a_load, node=f"n{i}")
    server.series_max = 3
    with pytest.raises(UnreadableInput, match=r"too many samples.*\$match"):
        first(source(server, MetricQuery(metric="load", expression="load{}")), 1)
    server.series_max = 0
    with pytest.raises(UnreadableInput, match="single machine"):
        first(source(server), 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (302, "redirects elsewhere"),
        (401, "credentials"),
        (403, "credentials"),
        (404, "is this a Prometheus server"),
        (400, "status 400"),
        (422, "status 422"),
        (500, "status 500"),
        (503, "status 503"),
        (b"<html>", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"short", "cut short"),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, "no matrix"),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"node": "n"}}]}},
            "invalid response",
        ),
        ({"status": "success", "data": {"resultType": "matrix", "result": [[]]}}, "invalid response"),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"node": 3}, "values": []}]}},
            "invalid response",
        ),
        (
            {
                "status": "success",
                "data": {"resultType": "matrix", "result": [{"metric": {"node": "n"}, "values": [[5, "1"]]}]},
            },
            "not requested",
        ),
        ("drip", "no whole answer within"),
    ],
)
def test_a_bad_answer_at_the_start_is_reported(server: FakeServer, bad: Any, reason: str) -> None:
    server.add("load", a_load, node="n0")
    server.bad = [bad]
    with pytest.raises(UnreadableInput, match=reason) as reported:
        first(source(server, limits=QUICK), 1)
    assert server.url in reported.value.where


def test_a_server_that_is_away_for_a_moment_is_asked_again(server: FakeServer) -> None:
    server.add("load", a_load, node="n0")
    server.bad = [503, 429, b"<html>", b"short"]
    assert len(first(source(server), 1)) == 1 and not server.bad


def test_an_outage_is_survived_and_caught_up(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.add("load", a_load, node="n0")
    it = source(server, limits=PrometheusClientLimits(answer_seconds=0.4, patience_seconds=5.0))
    ticks = it.ticks(patience())
    begun = next(ticks).at
    server.bad = [503] * 30
    later = [next(ticks).at for _ in range(5)]
    assert later == [begun + 10.0 * (i + 1) for i in range(5)], "no tick is lost"
    assert [r.message.split(": ")[0].split(",")[0].removeprefix(server.url) for r in caplog.records] == [
        " does not answer",
        " answers again",
    ]
    assert it.failing == ""
    ticks.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [400, 413, 422, 503])
def test_an_overloaded_server_is_queried_again_for_its_time(server: FakeServer, status: int) -> None:
    server.add("load", a_load, node="n0")
    server.bad_times = [status]
    with pytest.raises(UnreadableInput, match="no answer: query timed out"):
        first(source(server), 1)
    it = source(server)
    ticks = it.ticks(patience())
    begun = next(ticks).at
    server.bad_times = [status] * 3
    assert next(ticks).at == begun + 10.0
    ticks.close()  # type: ignore[attr-defined]


def test_a_clock_that_was_wrong_for_a_moment_costs_no_tick(server: FakeServer) -> None:
    server.add("load", lambda labels, t: "1" if t < server.clock.wall() else None, node="n0")
    it = source(server)
    ticks = it.ticks(patience())
    begun = next(ticks).at
    server.bad_times = [50 * 365 * 86_400.0]
    assert [next(ticks).at for _ in range(3)] == [begun + 10.0, begun + 20.0, begun + 30.0]
    ticks.close()  # type: ignore[attr-defined]


def test_stopping_does_not_wait_for_all_queries(server: FakeServer) -> None:
    server.add("load", a_load, node="n0")
    queries = [MetricQuery(metric=f"m{n}", expression="load{$match}") for n in range(50)]
    assert list(source(server, *queries).ticks(lambda: len(server.asked) >= 3)) == []
    assert len(server.asked) == 3


def test_native_histograms_are_left_out(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.add("load", a_load, node="n0")
    it = source(server, QUERY, MetricQuery(metric="buckets", expression="load{$match}"))
    ticks = it.ticks(patience())
    next(ticks)
    series = [{"metric": {"node": "n0"}, "histograms": [[server.clock.wall(), {"count": "1"}]]}]
    server.bad = [{"status": "success", "data": {"resultType": "matrix", "result": series}}]
    values = next(ticks).values
    assert np.isfinite(values[:, 0]).tolist() == [True, False]
    assert "native histograms are left out" in caplog.text
    ticks.close()  # type: ignore[attr-defined]


def test_names_that_cannot_be_written_are_left_out(server: FakeServer) -> None:
    """Also where a server lists them as names of machines to ask for one by one."""
    for name in ("n0", "n1", "n\ud800", "n" * 300, "n\u00e9"):
        server.add("load", lambda labels, t: "1", node=name)
    server.series_max = 3
    [tick] = first(source(server), 1)
    assert [m.node for m in tick.shape.machines] == ["n0", "n1", "n\u00e9"]


def test_no_server_at_all_is_reported(clock: FakeClock) -> None:
    client = Client("http://127.0.0.1:1", clock, limits=PrometheusClientLimits(patience_seconds=0.5))
    it = PrometheusSource(client, [QUERY], clock, interval_seconds=1.0)
    with pytest.raises(UnreadableInput, match=r"no answer: Connection refused"):
        next(it.ticks(patience()))


def test_one_query_that_fails_later_leaves_the_others(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.add("load", a_load, node="n0")
    server.add("other", a_load, node="n0")
    it = source(server, QUERY, MetricQuery(metric="other", expression="other{$match}"))
    ticks = it.ticks(patience())
    assert next(ticks).values.shape == (2, 1)
    server.bad = [422]  # for the first of the queries
    values = next(ticks).values
    assert np.isnan(values[0, 0]) and np.isfinite(values[1, 0])
    assert "left out" in caplog.text
    assert np.isfinite(next(ticks).values).all()
    ticks.close()  # type: ignore[attr-defined]


def test_a_server_that_refuses_everything_later_is_asked_on(server: FakeServer) -> None:
    server.add("load", a_load, node="n0")
    it = source(server)
    seen: list[str] = []
    ticks = it.ticks(lambda: bool(seen.append(it.failing)))
    begun = next(ticks).at
    server.bad = [401]
    assert [next(ticks).at for _ in range(2)] == [begun + 10.0, begun + 20.0]
    assert any("requires credentials" in reason for reason in seen)
    ticks.close()  # type: ignore[attr-defined]


def test_of_two_series_for_one_machine_the_first_counts(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.add("load", lambda labels, t: "1" if t % 20 else None, node="n0", instance="a")
    server.add("load", lambda labels, t: "2", node="n0", instance="b")
    assert [t.values.item() for t in first(source(server), 4)] == [1.0, 2.0, 1.0, 2.0]
    assert len([r for r in caplog.records if "several series" in r.message]) == 1


def test_the_selector_reaches_every_query(server: FakeServer) -> None:
    server.add("load", lambda labels, t: "1", node="n0", cluster="a")
    server.add("load", lambda labels, t: "1", node="n1", cluster="b")
    [tick] = first(source(server, match='{cluster="b"}'), 1)
    assert [m.node for m in tick.shape.machines] == ["n1"]
    with pytest.raises(ConfigError, match="odd: its expression has no"):
        source(server, MetricQuery(metric="odd", expression="load"), match='cluster="b"')


def test_credentials_are_sent_and_never_shown(server: FakeServer, clock: FakeClock) -> None:
    server.add("load", lambda labels, t: "1", node="n0")
    client = Client(server.url, clock, authorization="Bearer s3cret")
    it = PrometheusSource(client, [QUERY], clock, interval_seconds=10.0)
    first(it, 1)
    assert set(server.headers) == {"Bearer s3cret"}
    server.bad = [401]
    with pytest.raises(UnreadableInput) as reported:
        first(PrometheusSource(client, [QUERY], clock, interval_seconds=10.0), 1)
    assert "s3cret" not in f"{reported.value!r} {reported.value} {client!r} {it!r}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:9090",
        "ftp://host",
        "http://",
        "http://h:port",
        "http://h/?a=b",
        "http://h/#x",
        "file:///etc/passwd",
        "http://h/p\u00e4th",
        "http://" + "a" * 64 + ".example",
        "http://a..b",
    ],
)
def test_only_http_urls(url: str, clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url, clock)


@pytest.mark.parametrize("seconds", [0.0, 0.05, float("nan"), float("inf"), 1e6])
def test_no_such_interval(seconds: float, clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match=r"--interval: must be within 0\.1 and 86400 s"):
        PrometheusSource(Client("http://h", clock), [QUERY], clock, interval_seconds=seconds)


@pytest.mark.parametrize("url", ["http://user:hunter2@host:9090", "http://hunter2@host", "https://u:hunter2@h:port"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str, clock: FakeClock) -> None:
    with pytest.raises(ConfigError) as reported:
        Client(url, clock)
    assert "hunter2" not in str(reported.value)


def test_a_certificate_must_be_trusted(tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    argv = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += [
        "-subj",
        "/CN=test",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    server = FakeServer(clock, (certificate, key))
    try:
        server.add("load", a_load, node="n0")
        with pytest.raises(UnreadableInput, match="certificate is not trusted"):
            first(source(server), 1)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert len(first(source(server), 2)) == 2
    finally:
        server.close()


def test_a_server_that_never_shakes_hands(clock: FakeClock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        it = PrometheusSource(Client(url, clock, limits=QUICK), [QUERY], clock, interval_seconds=1.0)
        with pytest.raises(UnreadableInput, match="no whole answer within"):
            next(it.ticks(patience()))


def test_a_name_lookup_that_hangs_is_reported_and_started_once(server: FakeServer, clock: FakeClock) -> None:
    """Each try would else leave a thread behind that waits for the resolver."""
    asked: list[object] = []
    answer = threading.Event()

    def hangs(host: str, port: int, **kind: object) -> Addresses:
        asked.append((host, port))
        assert answer.wait(30.0)
        return socket.getaddrinfo("127.0.0.1", int(server.url.rpartition(":")[2]))

    limits = PrometheusClientLimits(connect_seconds=0.05, patience_seconds=0.0)
    client = Client("http://prometheus.example:9090", clock, limits=limits, resolve=hangs)
    for _ in range(2):
        with pytest.raises(PrometheusUnavailable, match=r"no address of prometheus\.example within 0\.05 s"):
            client.now(lambda: False)
    answer.set()
    for _ in range(100):  # it is back as soon as the thread is done
        with suppress(PrometheusUnavailable):
            assert client.now(lambda: False) == pytest.approx(clock.wall(), abs=60.0)
            break
    else:
        pytest.fail("the look-up has ended, and no one took its answer")
    assert asked == [("prometheus.example", 9090)]
    client.close()


def test_a_name_that_does_not_exist_is_reported(clock: FakeClock) -> None:
    def fails(host: str, port: int, **kind: object) -> Addresses:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    client = Client("http://nowhere.example", clock, limits=QUICK, resolve=fails)
    for _ in range(2):
        with pytest.raises(PrometheusUnavailable, match="not known"):
            client.now(lambda: False)


def test_of_several_addresses_the_first_that_answers_is_taken(server: FakeServer, clock: FakeClock) -> None:
    def two(host: str, port: int, **kind: object) -> Addresses:
        return [*socket.getaddrinfo("127.0.0.1", 1, **kind), *socket.getaddrinfo("127.0.0.1", port, **kind)]  # type: ignore[arg-type]

    client = Client(server.url, clock, limits=QUICK, resolve=two)
    assert client.now(lambda: False) > 0
    client.close()


def test_any_number_of_addresses_that_do_not_answer_ends_in_time(clock: FakeClock) -> None:
    tried: list[int] = []
    with socket.socket() as full, ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):  # beyond its queue no one is answered
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        def many(host: str, port: int, **kind: object) -> Addresses:
            for n in range(1000):
                tried.append(n)
                yield (socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname())

        limits = PrometheusClientLimits(answer_seconds=0.2, connect_seconds=0.05, patience_seconds=0.0)
        client = Client("http://many.example", clock, limits=limits, resolve=many)
        with pytest.raises(PrometheusUnavailable, match=r"no whole answer within 0\.2 s"):
            client.now(lambda: False)
    assert 1 < len(tried) < 100


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        (
            {"role": "trainer", "replica": "trainer/1", "node": "n1", "rank": "3", "phase": "compute"},
            PanelPosition(role="trainer", machine=Machine(node="n1", replica="trainer/1", rank=3), phase="compute"),
        ),
        ({"Hostname": "h1", "gpu": "7"}, PanelPosition(role="machine", machine=Machine(node="h1", gpu=7))),
        (
            {"node": "", "instance": "10.0.0.1:9100"},
            PanelPosition(role="machine", machine=Machine(node="10.0.0.1:9100")),
        ),
        ({"role": "trainer"}, None),
        ({"node": "n", "rank": "-1"}, None),
        ({"node": "n", "rank": "x"}, None),
        ({"node": "n", "gpu": "9999999999"}, None),
        ({"node": "n" * 257}, None),
    ],
)
def test_labels_name_a_machine(labels: dict[str, str], place: PanelPosition | None) -> None:
    assert Labels().place(labels) == place


def test_the_default_queries_are_what_peers_can_be_compared_in() -> None:
    queries = {q.metric: q for q in (*catalogue_queries(), *dcgm_queries())}
    assert len(queries) == len(catalogue_queries()) + len(dcgm_queries())
    tokens = queries["rolecall_process_tokens_per_second"].expression
    assert tokens.startswith(trusted_rate("rolecall_process_tokens_total"))
    assert queries["rolecall_host_load1"].expression == "rolecall_host_load1{$match}"
    assert {"rolecall_process_busy_ratio", "rolecall_process_busy_seconds_per_work_unit"} < queries.keys()
    for odd in ("phase", "incarnation", "step", "progress_timestamp_seconds", "up"):
        assert f"rolecall_process_{odd}" in BY_NAME and f"rolecall_process_{odd}" not in queries
    assert all("$match" in q.expression for q in queries.values())
