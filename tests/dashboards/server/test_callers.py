"""Who may ask the dashboard's server: every header that a browser would send for a page of somebody else."""

import asyncio
from http import HTTPStatus
from typing import Any

import pytest

from rolecall.dashboards.server.serving import HEADERS, OriginMiddleware, known, rejection_reason

LOOPBACK = known("http://127.0.0.1:8501", ("https://dash.example",))
SIGNED_IN = known("http://node-1:8501", (), sign_in=True)


def asked(
    names: Any = LOOPBACK,
    *,
    kind: str = "http",
    method: str = "GET",
    path: str = "/",
    host: str = "127.0.0.1:8501",
    origin: str | None = None,
) -> int:
    return rejection_reason(names, kind=kind, method=method, path=path, host=host, origin=origin)[0]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8501", "localhost:8501", "LOCALHOST", "[::1]:8501", "10.1.2.3", "dash.example", "Dash.Example.:443"],
)
def test_our_names_and_addresses(host: str) -> None:
    assert asked(host=host) == 0


@pytest.mark.parametrize(
    "host",
    ["evil.example:8501", "127.0.0.1.evil.example", "localhost.evil.example", "", "a@127.0.0.1", "127.0.0.1:x", "127.0.0.1/x",
     "dash.example.evil.example", "2130706433.evil", "[::1"],
)  # fmt: skip
def test_a_foreign_name_that_leads_here_is_no_name_of_ours(host: str) -> None:
    """DNS rebinding: the foreign page and its Host agree, so that Streamlit would take them for the same origin."""
    assert asked(host=host) == HTTPStatus.MISDIRECTED_REQUEST
    assert asked(kind="websocket", host=host, origin=f"http://{host}") == HTTPStatus.MISDIRECTED_REQUEST


def test_where_everybody_signs_in_any_name_leads_to_the_form() -> None:
    assert asked(SIGNED_IN, host="dashboard.cluster.local") == 0
    assert asked(SIGNED_IN, kind="websocket", host="a.b", origin="http://a.b") == 0
    assert asked(SIGNED_IN, kind="websocket", host="a.b", origin="http://evil.example") == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize(
    ("origin", "let_in"),
    [
        (None, True),
        ("http://127.0.0.1:8501", True),
        ("https://dash.example", True),
        ("https://dash.example:443", True),
        ("http://127.0.0.1:3000", False),  # whatever else runs on this machine
        ("http://localhost:8501", False),
        ("http://evil.example", False),
        ("http://dash.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_a_websocket_is_for_our_own_page(origin: str | None, let_in: bool) -> None:
    assert (asked(kind="websocket", origin=origin) == 0) is let_in


@pytest.mark.parametrize("path", ["/_stcore/metrics", "/_stcore/agent/interact", "/auth/login", "/oauth2callback"])
def test_doors_that_no_one_needs_are_closed(path: str) -> None:
    assert asked(path=path) == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_nothing_is_uploaded(method: str) -> None:
    assert asked(method=method, path="/_stcore/upload_file/a/b") == HTTPStatus.METHOD_NOT_ALLOWED


async def _app(scope: Any, _receive: Any, send: Any) -> None:
    start = {"http": "http.response.start", "websocket": "websocket.accept"}[scope["type"]]
    await send({"type": start, "status": 200, "headers": [(b"X-Frame-Options", b"ALLOWALL")]})


def sent(kind: str, host: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        found.append(message)

    scope = {"type": kind, "path": "/", "method": "GET", "headers": [(b"host", host.encode())]}
    asyncio.run(OriginMiddleware(_app, known=LOOPBACK)(scope, None, send))
    return found


def test_every_answer_carries_the_headers_and_no_weaker_ones() -> None:
    for host, status in (("localhost", 200), ("evil.example", HTTPStatus.MISDIRECTED_REQUEST)):
        first = sent("http", host)[0]
        assert first["status"] == status
        assert {k: v for k, v in first["headers"] if k in HEADERS} == HEADERS
        assert b"ALLOWALL" not in dict(first["headers"]).values()


def test_a_refused_websocket_is_closed_before_it_is_accepted() -> None:
    assert [m["type"] for m in sent("websocket", "localhost")] == ["websocket.accept"]
    assert [m["type"] for m in sent("websocket", "evil.example")] == ["websocket.close"]


@pytest.mark.parametrize(
    ("path", "accept", "is_there"),
    [
        ("/", "text/html,*/*", True),
        ("/incidents", "text/html,*/*", True),
        ("/incidents/_stcore/health", "*/*", True),
        ("/static/js/index.js", "*/*", True),
        ("/nope", "text/html,*/*", False),
        ("/nope/fleet", "text/html,*/*", False),
    ],
)
def test_a_page_that_does_not_exist_is_not_found(path: str, accept: str, is_there: bool) -> None:
    """Streamlit would draw the Overview page below a dialog, whose text is replaced by that of a lost server."""
    status, _ = rejection_reason(
        LOOPBACK, kind="http", method="GET", path=path, host="localhost", origin=None, accept=accept
    )
    assert status == (0 if is_there else HTTPStatus.NOT_FOUND)
