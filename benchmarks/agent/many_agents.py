"""A thousand agents read by one watcher: `python -m benchmarks.agent.many_agents`.

Stand-ins in processes of their own speak the agents' protocol over loopback: each has a port, a round of samples a
second (so many ranks, and the host) that it keeps until it is asked for, and holds a request for events until it times
out. The reader is `AgentsSource` alone, then all of `rolecall watch agents`. Measured: CPU of the reading process, how
old each agent's newest sample is whenever the reader polls, and that no agent is ever told as unreachable.
"""

import argparse
import asyncio
import gc
import gzip
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks import common
from rolecall.agent.http.routes import EARLY_INTERVALS, SAMPLE_SECONDS
from rolecall.agent.http.server import GZIP_LEVEL
from rolecall.core.clock import SystemClock
from rolecall.core.columns import HOSTS, PROCESSES
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import WIRE_VERSION, HostSample, ProcessSample
from rolecall.detector.base.observation import Observation
from rolecall.detector.sources.agents import AgentsSource
from rolecall.watch import run as watching
from rolecall.watch.agents import observing_run

CPU_CORES_MAX, AGE_SECONDS_MAX = 1.0, 3.0
ROUNDS_MAX = 60
WARM_SECONDS = 10.0
"""Connections are made one after the other."""
ENDS_SECONDS = 20.0


class StandIn:
    """One node's agent: what it would answer now. It takes a look each second, as `rolecall agent` does, at a moment of
    the second that is its own, and keeps what was not asked for yet."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.node, self.phase = NodeId(f"node-{number}"), number % 997 / 997
        self.role = "trainer" if number % 2 else "rollout"
        self.whose = [ProcessId(node=self.node, pid=1000 + n, start_ticks=5) for n in range(num_ranks)]
        self.random = random.Random(number)
        self.busy = [0.0] * num_ranks
        self.made = math.floor(time.monotonic() - self.phase)
        self.rounds: deque[tuple[int, list[ProcessSample], HostSample]] = deque(maxlen=ROUNDS_MAX)

    def body(self, path: str) -> bytes:
        query = {k: v[0] for k, v in parse_qs(urlsplit(path).query).items()}
        now = math.floor(time.monotonic() - self.phase)
        for second in range(max(self.made, now - ROUNDS_MAX) + 1, now + 1):
            self.rounds.append((second, *self._look(second + self.phase, second)))
        self.made = now
        newer = [r for r in self.rounds if r[0] > int(query.get("since", 0))][-int(query.get("rounds", 0)) :]
        said = {"version": WIRE_VERSION, "node": self.node, "agent_pid": 7, "newest": 0, "lost": 0, "events": []}
        said |= {"at": time.monotonic(), "wall_at": time.time(), "cursor": now, "samples_lost": 0}
        if newer:
            said["processes"] = PROCESSES.encode([p for r in newer for p in r[1]])
            said["hosts"] = HOSTS.encode([r[2] for r in newer])
        return gzip.compress(json.dumps(said, separators=(",", ":")).encode(), GZIP_LEVEL)

    def until_a_look(self, seconds: float) -> float:
        """As `Routes._until_a_look`."""
        since = (time.monotonic() - self.phase) % 1.0 + seconds
        return seconds - since + math.ceil(since - EARLY_INTERVALS) + SAMPLE_SECONDS

    def _look(self, at: float, second: int) -> tuple[list[ProcessSample], HostSample]:
        wall = time.time() + at - time.monotonic()
        processes = []
        for rank, process in enumerate(self.whose):
            self.busy[rank] += 0.9 + self.random.gauss(0, 0.02)
            processes.append(
                ProcessSample(
                    process=process,
                    role=self.role,
                    replica=f"{self.role}/{self.node.removeprefix('node-')}",
                    rank=rank,
                    incarnation=1,
                    at=at,
                    wall_at=wall,
                    alive=True,
                    page_ok=True,
                    phase="compute" if self.role == "trainer" else "generate",
                    phase_since=at - 0.5,
                    phase_entries=second,
                    step=second % 10_000,
                    progress=second,
                    progress_at=at - 0.1,
                    beats=10 * second,
                    busy_seconds=self.busy[rank],
                    work_units=second,
                    tokens=second * 1000,
                    proc_state="S",
                    cpu_seconds=self.busy[rank] * 0.7,
                    rss_bytes=(1 << 30) + self.random.randrange(1 << 20),
                    num_threads=12,
                )
            )
        host = HostSample(
            node=self.node,
            at=at,
            wall_at=wall,
            cpu_count=96,
            cpu_busy_seconds=second * 40.0,
            load_1m=30.0,
            memory_total_bytes=1 << 40,
            memory_available_bytes=1 << 39,
        )
        return processes, host


class Protocol(asyncio.Protocol):
    def __init__(self, agent: StandIn) -> None:
        self.agent, self.buffer = agent, b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            query = parse_qs(urlsplit(path).query)
            wait = self.agent.until_a_look(float(query.get("wait", ["0"])[0]))
            asyncio.get_running_loop().call_later(wait, self.answer, path)

    def answer(self, path: str) -> None:
        if not self.transport.is_closing():
            body = self.agent.body(path)
            head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def serve(first: int, num_agents: int, num_ranks: int, tell: Connection) -> None:
    # looking for cycles in half a million samples would hold up 500 agents at once, which real ones never are
    gc.disable()

    async def main() -> None:
        loop, urls = asyncio.get_running_loop(), {}
        for number in range(first, first + num_agents):
            agent = StandIn(number, num_ranks)
            server = await loop.create_server(lambda a=agent: Protocol(a), "127.0.0.1", 0)  # type: ignore[misc]
            urls[agent.node] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tell.send(urls)
        await asyncio.Event().wait()

    asyncio.run(main())


class Measured(AgentsSource):
    """As `watch` uses it. Measures from `WARM_SECONDS` after its start on: CPU of this process, and how old each
    agent's newest sample is whenever somebody polls."""

    last: "Measured"

    def start(self) -> None:
        type(self).last = self
        self.newest: dict[str, float] = {}
        self.ages: list[float] = []
        self.unreachable = self.samples = self.polls = 0
        self.began = self.used = 0.0
        self.warm = time.monotonic() + WARM_SECONDS
        super().start()

    def poll(self, timeout_seconds: float) -> Observation:
        seen = super().poll(timeout_seconds)
        at = time.monotonic()
        for batch in seen.batches:
            if batch.hosts:
                self.newest[str(batch.node)] = max(h.at for h in batch.hosts)
        if at >= self.warm:
            if not self.began:
                self.began, self.used = at, _cpu_seconds()
            self.samples += sum(len(batch.processes) for batch in seen.batches)
            self.ages += [at - newest for newest in self.newest.values()]
            self.unreachable += len(seen.unreachable)
            self.polls += 1
        return seen

    @property
    def cores(self) -> float:
        return (_cpu_seconds() - self.used) / (time.monotonic() - self.began)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Figures:
    cores: float
    ages: list[float]
    unreachable: int
    samples_per_second: float
    polls_per_second: float
    heard: int  # agents
    mebibytes: float


def figures(source: Measured) -> Figures:
    seconds = time.monotonic() - source.began
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rates = source.samples / seconds, source.polls / seconds
    return Figures(source.cores, sorted(source.ages), source.unreachable, *rates, len(source.newest), rss)


def read(urls: dict[str, str], seconds: float, poll_seconds: float, tell: Connection) -> None:
    """The source alone."""
    source = Measured(lambda: urls, SystemClock(), poll_seconds)
    source.start()
    while time.monotonic() < source.warm + seconds:
        source.poll(poll_seconds)
    tell.send(figures(source))
    source.close()


def watch(urls: dict[str, str], seconds: float, poll_seconds: float, tell: Connection) -> None:
    """`rolecall watch agents`: with detectors, panels, journal."""
    del poll_seconds  # its own
    setattr(watching, "AgentsSource", Measured)  # noqa: B010 it is not exported, and this replaces it
    told = threading.Timer(WARM_SECONDS + seconds, lambda: tell.send(figures(Measured.last)))
    with tempfile.TemporaryDirectory() as root:
        run = observing_run(Path(root), "many", urls)
        told.start()
        logging.disable(logging.INFO)  # of each event of the journal
        watching.watch_run(run, WARM_SECONDS + seconds + 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--poll", type=float, default=0.25, help="of the source alone: as `watch` polls")
    parser.add_argument("--watch-seconds", type=float, default=90.0, help="as long the whole watch is measured")
    args = parser.parse_args(argv)
    servers: list[Any] = []
    urls: dict[str, str] = {}
    context = multiprocessing.get_context("fork")
    for first in range(0, args.agents, 500):
        mine, theirs = context.Pipe()
        server = context.Process(target=serve, args=(first, min(500, args.agents - first), args.ranks, theirs))
        server.start()
        servers.append(server)
        urls |= mine.recv()
    found: dict[str, Figures] = {}
    try:
        for name, target, seconds in (("read", read, args.seconds), ("watch", watch, args.watch_seconds)):
            print(f"{name}: {WARM_SECONDS + seconds:.0f} s ...", file=sys.stderr)
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(urls, seconds, args.poll, theirs))
            process.start()
            if not mine.poll(WARM_SECONDS + seconds + ENDS_SECONDS):
                raise SystemExit(f"{name}: no figures")
            found[name] = mine.recv()
            process.join(ENDS_SECONDS)
            process.kill()
    finally:
        for server in servers:
            server.kill()
            server.join()
    alone, whole = found["read"], found["watch"]
    config = (
        f"{args.agents} stand-ins of {args.ranks} ranks that look once a second; the source alone, polled each "
        f"{args.poll:g} s, for {args.seconds:g} s; then `rolecall watch agents` for {args.watch_seconds:g} s"
    )
    lines = common.header("Many agents, one watcher", config, "the number of each stand-in seeds its noise")

    def row(what: str, of: Callable[[Figures], str], bar: str) -> str:
        return f"| {what} | {of(alone)} | {of(whole)} | {bar} |"

    def worst(f: Figures) -> float:
        return f.ages[-1] if f.ages else math.inf

    lines += [
        "| what | the source alone | the whole watch | bar |",
        "|---|---|---|---|",
        row("CPU", lambda f: f"{f.cores:.2f} cores", f"{CPU_CORES_MAX:g}"),
        row("age of an agent's newest sample, median", lambda f: f"{statistics.median(f.ages):.2f} s", ""),
        row("..., 99th percentile", lambda f: f"{f.ages[int(0.99 * len(f.ages))]:.2f} s", ""),
        row("..., worst", lambda f: f"{worst(f):.2f} s", f"{AGE_SECONDS_MAX:g} s"),
        row("ages taken", lambda f: f"{len(f.ages):,}", ""),
        row("agents heard", lambda f: f"{f.heard:,}", f"{args.agents:,}"),
        row("told as unreachable", lambda f: f"{f.unreachable}", "0"),
        row("samples of ranks read a second", lambda f: f"{f.samples_per_second:,.0f}", ""),
        row("polls a second", lambda f: f"{f.polls_per_second:.1f}", ""),
        row("resident at most", lambda f: f"{f.mebibytes:,.0f} MiB", ""),
        "",
        "The stand-ins share the machine's cores with the reader: ages are if anything too high.",
    ]
    for name, f in found.items():
        met = f.cores <= CPU_CORES_MAX and worst(f) <= AGE_SECONDS_MAX and not f.unreachable and f.heard == args.agents
        lines += ["", f"{name}: {'all bars are met' if met else 'NOT all bars are met'}."]
    print("\n".join(lines))
    if args.agents == parser.get_default("agents"):
        common.write("many_agents", lines)
    return 0


if __name__ == "__main__":
    assert Path("/proc").is_dir() and os.name == "posix"
    sys.exit(main())
