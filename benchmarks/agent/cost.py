"""What the agent of a large node costs, and how fast it is: `python -m benchmarks.agent.cost`.

A node of 8 GPUs, 8 InfiniBand NICs and 16 ranks: the GPUs are our stand-in for NVML (tests/agent/nvml, built with gcc,
so that the real nvidia-ml-py runs through ctypes), the NICs a tree of files, the ranks processes that report ten times
a second. `rolecall agent` runs from an agent.yaml as an operator would have it, and looks once a second. Measured: a
scrape, over one kept connection; CPU by collector and memory; what a poller reads a second; how long an event takes
from its cause to who waits at `/v1/events`; a call of the reporter inside the training process. Memory over many looks:
`ticks.py`.
"""

import argparse
import gzip
import http.client
import json
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.agent.node import NUM_GPUS, NUM_NICS, NUM_RANKS, REPLICA, TOKEN, Node, node
from rolecall.agent.reporter import reporter
from rolecall.core.rundir import registration_secret
from tests.agent.nvml import read_time

BATCH = 50
SCRAPE_SECONDS = 15.0
STANDIN = "(stand-in)"
ALONE = "exception, by itself"


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> bytes:
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body[:200]
    return gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body


def scrapes(n: Node, number: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """(seconds of each scrape, bytes) by path."""
    took: dict[str, list[float]] = {"/metrics": [], "/metrics/dcgm": []}
    sizes: dict[str, int] = {}
    connection = n.connect()
    for _ in range(number):
        for path, times in took.items():
            began = time.perf_counter()
            sizes[path] = len(get(connection, path))
            times.append(time.perf_counter() - began)
        time.sleep(0.1)
    return took, sizes


def cost(n: Node, seconds: float) -> tuple[float, dict[str, float], float]:
    """(share of a core of the agent, by collector, resident bytes) while one reader asks for samples each second, and
    another scrapes every SCRAPE_SECONDS. Of the stand-in for NVML: its C code, which is within the collectors'
    share."""

    def now() -> tuple[float, dict[str, float], float]:
        text = get(n.connect(), "/metrics").decode()
        by = {
            m[1]: float(m[2]) for m in re.finditer(r'rolecall_probe_cpu_seconds_total\{.*probe="(\w+)"\} (\S+)', text)
        }
        whole = re.search(r"rolecall_agent_cpu_seconds_total\{\S+ (\S+)", text)
        memory = re.search(r"rolecall_agent_resident_memory_bytes\{\S+ (\S+)", text)
        assert whole and memory
        by[STANDIN] = read_time(n.files.standin_time)
        return float(whole[1]), by, float(memory[1])

    before, by_before, _ = now()
    began, scraped = time.monotonic(), 0
    connection, since = n.connect(), 0
    while time.monotonic() < began + seconds:
        since = json.loads(get(connection, f"/v1/samples?since={since}", **{"Accept-Encoding": "gzip"}))["cursor"]
        if time.monotonic() >= began + scraped * SCRAPE_SECONDS:
            scraped += 1
            for path in ("/metrics", "/metrics/dcgm"):
                get(connection, path)
        time.sleep(1.0)
    lasted = time.monotonic() - began
    after, by_after, memory = now()
    return (after - before) / lasted, {k: (v - by_before.get(k, 0)) / lasted for k, v in by_after.items()}, memory


def sample_bytes(n: Node, number: int) -> tuple[list[int], list[int]]:
    """(on the wire, unpacked) of what a poller reads a second."""
    connection, since = n.connect(), 0
    wire, plain = [], []
    for _ in range(number + 1):
        connection.request("GET", f"/v1/samples?since={since}", headers={"Accept-Encoding": "gzip"})
        body = connection.getresponse().read()
        unpacked = gzip.decompress(body)
        since = json.loads(unpacked)["cursor"]
        wire.append(len(body))
        plain.append(len(unpacked))
        time.sleep(1.0)
    return wire[1:], plain[1:]  # the first held a minute


def waits(n: Node, number: int) -> dict[str, list[float]]:
    """Seconds from a cause to its event at a reader that waits."""
    connection = n.connect()
    newest = json.loads(get(connection, "/v1/events?after=0"))["newest"]
    found: dict[str, list[float]] = {"XID in the kernel log": [], "XID of NVML": [], "exit of a rank": []}

    def until(kind: str, cause: Any, pid: int = 0) -> float:
        """`pid`: of the process that it is about; others of the machine may be found and end, too."""
        nonlocal newest
        arrived = threading.Event()
        at = [0.0]

        def listen() -> None:
            nonlocal newest
            while not arrived.is_set():
                batch = json.loads(get(connection, f"/v1/events?after={newest}&wait=20"))
                if batch["events"]:
                    newest = batch["events"][-1]["seq"]
                if any(e["kind"] == kind and (e["process"] or {}).get("pid", 0) == pid for e in batch["events"]):
                    at[0] = time.perf_counter()
                    arrived.set()

        thread = threading.Thread(target=listen)
        thread.start()
        time.sleep(0.3)
        began = time.perf_counter()
        cause()
        if not arrived.wait(20):
            raise SystemExit(f"no event {kind} within 20 s")
        thread.join()
        return at[0] - began

    for i in range(number):
        found["XID in the kernel log"].append(until("xid", lambda i=i: n.files.kernel_line(i)))
        time.sleep(2.1)  # what two sources say within 2 s is one event
        found["XID of NVML"].append(until("xid", lambda i=i: n.files.xid(i % NUM_GPUS, 48)))
        time.sleep(2.1)
    for rank in n.ranks[: min(number, NUM_RANKS)]:
        found["exit of a rank"].append(until("exited", lambda rank=rank: rank.send_signal(signal.SIGKILL), rank.pid))
    return found


def failed(depth: int) -> Exception:
    """An error that went through so many frames."""

    def fail(n: int) -> None:
        if n > 1:
            fail(n - 1)
        raise ValueError("loss is not finite at step 12")

    try:
        fail(depth)
    except ValueError as e:
        return e
    raise AssertionError


def reporter_calls(number: int, data: Path) -> dict[str, list[float]]:
    """Seconds of a call, the mean of BATCH, because a single one is shorter than the clock is sure of; an exception
    also by itself, after the others. `data`: of the agent, which takes this process for one more rank."""
    error = failed(5)
    secret = registration_secret(TOKEN, REPLICA, NUM_RANKS, 1)
    calls: dict[str, Callable[[], None]] = {
        "progress": lambda: reporter.progress(1, tokens=10),
        "set_step": lambda: reporter.set_step(7),
        "enter_phase": lambda: reporter.enter_phase("compute"),
        "update of a loss": lambda: reporter.update(loss=1.25),
        "update of loss, gradient norm and reward": lambda: reporter.update(loss=1.25, grad_norm=0.5, reward=0.75),
        ALONE: lambda: reporter.exception(error),
        "exception": lambda: reporter.exception(error),
        "(an empty call)": lambda: None,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    reporter.start(replica=REPLICA, rank=NUM_RANKS, incarnation=1, secret=secret, node_dir=str(data))
    for _ in range(number):
        for name, call in calls.items():
            timed = range(1 if name == ALONE else BATCH)
            began = time.perf_counter()
            for _ in timed:
                call()
            found[name].append((time.perf_counter() - began) / len(timed))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="over which CPU is measured")
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args(argv)
    with node() as n:
        time.sleep(15)  # ranks start, the slow calls of NVML are made once
        took, sizes = scrapes(n, args.scrapes)
        cores, by, memory = cost(n, args.seconds)
        wire, plain = sample_bytes(n, 10)
        delays = waits(n, args.events)
        calls = reporter_calls(1000, n.files.data)
    no_agent = reporter_calls(1000, n.files.data)
    calls["exception, without an agent"] = no_agent["exception"]
    config = f"{NUM_GPUS} GPUs (stand-in), {NUM_NICS} NICs, {NUM_RANKS} ranks, 1 Hz; {args.scrapes} scrapes"
    lines = common.header("The node agent", config, "none: nothing is drawn")
    lines += ["| what | measured | bar |", "|---|---|---|"]
    for path, limit in (("/metrics", 200), ("/metrics/dcgm", 300)):
        times = took[path]
        lines.append(
            f"| scrape of `{path}` | P50 {1e3 * statistics.median(times):.1f} ms, P99 "
            f"{1e3 * common.quantile(times, 0.99):.1f} ms"
            f" (n={len(times)}) | P99 60 ms |"
        )
        lines.append(f"| size of `{path}` | {sizes[path] / 1024:.0f} KiB | {limit} KiB |")
    lines.append(
        f"| `/v1/samples`, a second of them | {statistics.median(wire) / 1024:.1f} KiB on the wire (worst "
        f"{max(wire) / 1024:.1f}), {statistics.median(plain) / 1024:.1f} KiB unpacked | 4 KiB |"
    )
    lines.append(f"| agent's CPU | {100 * cores:.1f} % of a core | 2 % |")
    lines.append(f"| agent's memory | {memory / 2**20:.0f} MiB | 80 MiB |")
    for what, values in delays.items():
        lines.append(
            f"| {what}, to `/v1/events` | P50 {1e3 * statistics.median(values):.0f} ms, worst "
            f"{1e3 * max(values):.0f} ms (n={len(values)}) | 300 ms |"
        )
    for name, values in calls.items():
        bar = "5 us" if name.startswith("exception") else "" if name.startswith("(") else "1 us"
        lines.append(
            f"| reporter: `{name}` | median {1e6 * statistics.median(values):.2f} us, P99 "
            f"{1e6 * common.quantile(values, 0.99):.2f} us (n={len(values)}) | {bar} |"
        )
    standin = by.pop(STANDIN)
    rest = cores - sum(by.values())
    lines += ["", f"CPU, share of a core, with a scrape of both pages every {SCRAPE_SECONDS:.0f} s:", ""]
    lines += ["| collector | % |", "|---|---|"]
    lines += [f"| {name} | {100 * share:.2f} |" for name, share in sorted(by.items(), key=lambda x: -x[1])]
    lines.append(f"| all else: ranks, samples, scrapes | {100 * rest:.2f} |")
    lines += [
        "",
        f"Of `gpu` and `gpu_events`, {100 * standin:.2f} is the C code of the stand-in (timed inside of it).",
        "",
    ]
    print("\n".join(lines))
    if not args.no_file:
        name = f"agent_{common.hardware()}_{time.strftime('%Y%m')}.md"
        (common.RESULTS / name).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
