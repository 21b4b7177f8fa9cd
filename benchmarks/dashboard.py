"""How quick the dashboard is on a large cluster's journal: `python -m benchmarks.dashboard`.

1,000 replicas and 10,000 incidents of about ten events each (tests/dashboards/big_journal.py). `rolecall dashboard`
serves it as an operator would have it, a headless Chromium opens each page. First paint: from the beginning of the
navigation until the page's own content stands (not its heading), with nothing in the browser's cache. Cold: the very
first page of a server that has just told its address, while it still reads the history; Accounting then says that it
still computes. Warm: a server that has read all of it. At rest: CPU of the server with one page open and nothing
happening; memory when the history is read. The bar holds for the 95th percentile of each page; single paints above it
are counted.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, TimeoutError, sync_playwright

from benchmarks import common
from rolecall.core.clock import SystemClock
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from tests.dashboards.big_journal import BigJournal

INCIDENT = "/incidents?incident="
"""Address of one incident's page; the id follows."""
CONTENT = {
    "Overview": ("/", ".rc-role"),
    "Incidents": ("/incidents", ":text-matches('[0-9] incidents?')"),
    "Incidents, the table": ("/incidents", "[data-testid=stDataFrame]"),
    "One incident": (INCIDENT, "[role=tabpanel]"),
    "Fleet": ("/fleet", ":text-matches('[0-9] (healthy|faulty|suspect|ended)')"),
    "Fleet, the table": ("/fleet", "[data-testid=stDataFrame]"),
    "Accounting": ("/accounting", "[data-testid=stMetric], [data-testid=stAlert], :text('The audit is running')"),
    "Operations": ("/operations", "[data-testid=stExpander]"),
}
"""Address of each page, and what of it is content: it is there only when the journal was read. A table comes later than
the rest of its page, because the browser loads more code for it."""
BAR_SECONDS = 2.0
WAIT_SECONDS = 400.0
PAINT_SECONDS_MAX = 20.0
"""A page without content for so long has none: its figure is infinite, and the report says so."""
CHROMIUM = "/usr/bin/chromium"


class Server:
    """`rolecall dashboard` in a process of its own. `started_seconds`: until it told its address."""

    def __init__(self, run: RunDir, log: Path) -> None:
        self._log = log
        began = time.monotonic()
        argv = [sys.executable, "-m", "rolecall", "dashboard", str(run.path), "--port", "0"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(argv, cwd=common.ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        while not (found := re.search(r"http://\S+", log.read_text())):
            if self._process.poll() is not None or time.monotonic() > began + WAIT_SECONDS:
                raise SystemExit(f"the dashboard did not start: {log.read_text()[-2000:]}")
            time.sleep(0.01)
        self.url, self.started_seconds = found[0], time.monotonic() - began

    def cpu_seconds(self) -> float:
        return common.cpu_seconds(self._process.pid)

    def resident_bytes(self) -> int:
        return common.resident_bytes(self._process.pid)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def server(run: RunDir, folder: Path) -> Iterator[Server]:
    found = Server(run, folder / "dashboard.log")
    try:
        yield found
    finally:
        found.close()


def paint(browser: Browser, url: str, name: str, incident_id: str) -> tuple[float, Any]:
    """(seconds from the navigation to content, the page, still open)."""
    path, content = CONTENT[name]
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(url + path + (incident_id if path == INCIDENT else ""), wait_until="commit", timeout=WAIT_SECONDS * 1e3)
    try:
        shown = page.locator("[data-testid=stMain]").locator(content).locator("visible=true").first
        shown.wait_for(timeout=PAINT_SECONDS_MAX * 1e3)
    except TimeoutError as e:
        print(f"{name}: no content: {e.message.splitlines()[0]}: {page.inner_text('body')[:300]!r}", file=sys.stderr)
        return math.inf, page
    return time.perf_counter() - began, page


def cold(
    browser: Browser, run: RunDir, folder: Path, incident_ids: Sequence[str]
) -> tuple[dict[str, list[float]], list[float]]:
    """(first paint by page, seconds to start): a fresh server for each."""
    found: dict[str, list[float]] = {name: [] for name in CONTENT}
    starts = []
    for name, took in found.items():
        for incident_id in incident_ids:
            with server(run, folder) as s:
                seconds, page = paint(browser, s.url, name, incident_id)
                took.append(seconds)
                starts.append(s.started_seconds)
                page.context.close()
    return found, starts


def read_whole(browser: Browser, s: Server) -> float:
    """Seconds until the notice that the history is being read is gone, from now."""
    began = time.perf_counter()
    _, page = paint(browser, s.url, "Overview", "")
    page.wait_for_function("() => !document.body.innerText.includes('Loading history')", timeout=WAIT_SECONDS * 1e3)
    page.context.close()
    return time.perf_counter() - began


def warm(browser: Browser, s: Server, incident_ids: Sequence[str]) -> dict[str, list[float]]:
    """Each paint of an incident's page is of another incident: the server has not computed it yet."""
    found: dict[str, list[float]] = {name: [] for name in CONTENT}
    for incident_id in incident_ids:
        for name, took in found.items():
            seconds, page = paint(browser, s.url, name, incident_id)
            took.append(seconds)
            page.context.close()
    return found


def at_rest(browser: Browser, s: Server, name: str | None, seconds: float, incident_id: str) -> float:
    """Share of a core that the server uses, with one page open or none."""
    page = paint(browser, s.url, name, incident_id)[1] if name else None
    time.sleep(5)
    before, began = s.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    share = (s.cpu_seconds() - before) / (time.monotonic() - began)
    if page is not None:
        page.context.close()
    return share


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incidents", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=20, help="of each page on a warm server")
    parser.add_argument("--cold-runs", type=int, default=3, help="fresh servers for each page")
    parser.add_argument("--seconds", type=float, default=30.0, help="over which CPU at rest is measured")
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        now = SystemClock().wall()
        big = BigJournal(folder, num_incidents=args.incidents, num_replicas=args.replicas, ends_at=now)
        run = big.build()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        version = browser.version
        closed = [str(line["incident_id"]) for line in big.lines if line["kind"] == EventKind.INCIDENT_CLOSED]
        newest_first = list(islice(cycle(reversed(closed)), max(args.runs, args.cold_runs)))
        colds, starts = cold(browser, run, folder, newest_first[: args.cold_runs])
        with server(run, folder) as s:
            whole = read_whole(browser, s)
            memory = s.resident_bytes()
            warms = warm(browser, s, newest_first[: args.runs])
            rest = {name: at_rest(browser, s, name, args.seconds, closed[-1]) for name in (None, *CONTENT)}
            grown = s.resident_bytes()
        browser.close()
    size = (len(big.lines), sum(len(line["body"]) for line in big.lines))
    report(args, version, size, colds, starts, warms, whole, (memory, grown), rest, load)
    return 0


def report(
    args: argparse.Namespace,
    chromium: str,
    size: tuple[int, int],
    colds: dict[str, list[float]],
    starts: list[float],
    warms: dict[str, list[float]],
    whole: float,
    memory: tuple[int, int],
    rest: dict[str | None, float],
    load: float,
) -> None:
    config = (
        f"{args.replicas:,} replicas, {args.incidents:,} incidents, {size[0]:,} events ({size[1] / 2**20:.0f} MiB of "
        f"bodies), SQLite; Chromium {chromium}, headless, empty cache, on the same machine"
    )
    lines = common.header("The dashboard", config, "7 (the journal)")
    lines += ["First paint, seconds from navigation to content: median, 95th percentile and worst of n (bar: P95 2 s):"]
    lines += ["", "| page | warm server | cold server |", "|---|---|---|"]
    lines += [f"| {name} | {paints(warms[name])} | {paints(colds[name])} |" for name in CONTENT]
    every = [(name, took) for found in (warms, colds) for name, took in found.items()]
    over = sorted({name for name, took in every if percentile_95(took) > BAR_SECONDS})
    single = [seconds > BAR_SECONDS for _, took in every for seconds in took]
    lines += [
        "",
        f"Over the bar: {', '.join(over) or 'none'}. Single paints over it: {sum(single)} of {len(single)}.",
        "",
    ]
    lines += ["| what | measured |", "|---|---|"]
    lines.append(f"| load average of the machine before, 1 min | {load:.1f} |")
    lines.append(f"| start of the server until it tells its address | {spread(starts)} |")
    lines.append(f"| until the whole history is read, a page open | {whole:.1f} s |")
    lines.append(
        f"| memory, history read; after all pages | {memory[0] / 2**20:.0f} MiB; {memory[1] / 2**20:.0f} MiB |"
    )
    for name, share in rest.items():
        lines.append(f"| CPU at rest, {name or 'no page'} open | {100 * share:.1f} % of a core |")
    lines.append("")
    print("\n".join(lines))
    if not args.no_file:
        common.write("dashboard", lines)


def percentile_95(values: Sequence[float]) -> float:
    """By nearest rank: of fewer than 20 values the worst."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def paints(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.2f} s (P95 {percentile_95(values):.2f}, worst {max(values):.2f}, n={len(values)})"


def spread(values: Sequence[float]) -> str:
    middle, low, high = common.middle_and_spread(values)
    return f"{middle:.2f} s ({low:.2f} to {high:.2f}, worst {max(values):.2f}, n={len(values)})"


if __name__ == "__main__":
    sys.exit(main())
