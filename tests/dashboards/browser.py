"""A real headless Chromium on a served dashboard: its console errors, and the hosts that it contacts."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response, sync_playwright

from tests.support import eventually

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60.0
"""For the server to import Streamlit and the browser to come up, on a machine at work."""
WAIT_MILLISECONDS = 45_000
"""For anything on a page: a deadline, not an expectation."""
ADDRESS = re.compile(r"https?://\S+")
WIDTHS = {"desktop": (1440, 900), "phone": (390, 844)}
PROBES = ("/_stcore/health", "/_stcore/host-config")
"""Streamlit does not know below which path it is served: on a page that is opened by its own address it asks for these
two below the page first, gets 404, and finds them at the root. No other 404 is allowed, and none of the root."""


@dataclass
class Visit:
    """One page of a browser, with its errors."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # requests to other hosts
    path: str = ""  # of the page that was opened; empty: the root

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not self._is_probe(str(message.location.get("url", ""))):
            self.complaints.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(self.origin).netloc:
            self.foreign.append(request.url)

    def _response(self, response: Response) -> None:
        if response.status >= 400 and not (response.status == 404 and self._is_probe(response.url)):
            self.complaints.append(f"{response.status}: {response.url}")

    def _is_probe(self, url: str) -> bool:
        return url in {f"{self.origin}{self.path}{probe}" for probe in PROBES if self.path}

    def open(self, path: str = "/") -> None:
        self.path = urlsplit(path).path.rstrip("/")
        self.page.goto(self.origin + path, wait_until="load", timeout=WAIT_MILLISECONDS)
        self.settled()

    def settled(self) -> None:
        """Until the page has been drawn: its heading stands, and no part of it is being drawn for the first time."""
        self.page.locator("h1").first.wait_for(timeout=WAIT_MILLISECONDS)
        self.page.wait_for_function(
            "() => !document.querySelector('[data-testid=\"stSkeleton\"]')", timeout=WAIT_MILLISECONDS
        )

    def text(self) -> str:
        return self.page.locator("body").inner_text()

    def faultless(self) -> None:
        """Nothing on the page is an exception, nothing in its console an error, and no other host was contacted."""
        assert self.page.locator('[data-testid="stException"]').count() == 0, self.text()[-3000:]
        assert self.complaints == []
        assert self.foreign == []


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Skips where there is no Chromium."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        # Root has no sandbox; the pages are our own, and nothing else is opened.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def profile(of: Browser, *, size: str = "desktop", dark: bool = False) -> Iterator[BrowserContext]:
    """A browser's window size, color scheme, cookies and cache."""
    width, height = WIDTHS[size]
    context = of.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        is_mobile=size == "phone",
        reduced_motion="reduce",
        timezone_id="UTC",
    )
    context.set_default_timeout(WAIT_MILLISECONDS)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def tab(of: BrowserContext, origin: str) -> Iterator[Visit]:
    page = of.new_page()
    try:
        yield Visit(page=page, origin=origin)
    finally:
        page.close()


@contextmanager
def visit(of: Browser, origin: str, *, size: str = "desktop", dark: bool = False) -> Iterator[Visit]:
    """In a profile of its own."""
    with profile(of, size=size, dark=dark) as context, tab(context, origin) as found:
        yield found


@contextmanager
def served(folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[str]:
    """`rolecall dashboard` with `args` on a port of its own; gives its address. Its output is
    `folder`/dashboard.log."""
    log = folder / "dashboard.log"
    argv = [sys.executable, "-m", "rolecall", "dashboard", *args, "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
    try:

        def said() -> re.Match[str] | None:
            text = log.read_text(errors="replace")
            assert process.poll() is None, text[-3000:]
            return ADDRESS.search(text)

        eventually(said, "the dashboard's address", seconds=START_SECONDS)
        found = said()
        assert found is not None
        yield found.group().rstrip("/.,")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
