"""A thousand agents read by one watcher: `python benchmarks/many_agents.py`.

Stand-ins in processes of their own speak the agents' protocol over loopback: each has a port, a round of samples a second
(so many ranks, and the host) that it keeps until it is asked for, and holds a request for events until it times out. The
reader is what `watch` uses (`AgentsSource`), polled each half second; what detectors then do with it is not part of this. Measured: CPU of the reading process, how old each agent's newest sample
is when it reaches the detector, and that no agent is ever told as unreachable.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common

from rolecall.core.clock import SystemClock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import HostSample, ProcessSample
from rolecall.detector.source import AgentsSource

CPU_CORES_MAX, AGE_SECONDS_MAX = 1.0, 3.0
ROUNDS_MAX = 60
WARM_SECONDS = 10.0
"""Connections are made one after the other."""


_dumps = json.JSONEncoder(separators=(",", ":")).encode


class StandIn:
    """One node's agent: what it would answer now."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.node, self.num_ranks, self.made = f"node-{number}", num_ranks, 0
        self.rounds: deque[tuple[int, str, str]] = deque(maxlen=ROUNDS_MAX)  # number, processes, hosts

    def body(self, path: str) -> bytes:
        if path.startswith("/v1/events"):
            head = {"node": self.node, "agent_pid": 7, "newest": 0, "lost": 0, "at": time.monotonic()}
            return json.dumps({**head, "wall_at": time.time(), "events": []}).encode()
        now = int(time.monotonic())
        for second in range(max(self.made, now - ROUNDS_MAX) + 1 if self.made else now, now + 1):
            self.rounds.append((second, *self._round(second)))
        self.made = now
        since = int(path.partition("since=")[2] or 0)
        newer = [r for r in self.rounds if r[0] > since]
        head = {"node": self.node, "agent_pid": 7, "cursor": now, "lost": 0, "at": time.monotonic()}
        processes, hosts = ",".join(r[1] for r in newer), ",".join(r[2] for r in newer)
        said = json.dumps({**head, "wall_at": time.time()})[:-1]
        return f'{said},"processes":[{processes}],"hosts":[{hosts}]}}'.encode()

    def _round(self, now: int) -> tuple[str, str]:
        """Processes and host, as JSON without the brackets of a list."""
        at, wall = time.monotonic(), time.time()
        processes = [
            ProcessSample(
                process=ProcessId(node=NodeId(self.node), pid=1000 + n, start_ticks=5),
                role="trainer",
                replica=f"trainer/{self.node.removeprefix('node-')}",
                rank=n,
                incarnation=1,
                at=at,
                wall_at=wall,
                alive=True,
                page_ok=True,
                phase="compute",
                phase_since=at - 0.5,
                step=now % 10_000,
                progress=now,
                progress_at=at - 0.1,
                busy_seconds=now * 0.9,
                work_units=now,
                tokens=now * 1000,
                proc_state="S",
                cpu_seconds=now * 0.7,
                rss_bytes=1 << 30,
                num_threads=12,
            ).to_dict()
            for n in range(self.num_ranks)
        ]
        host = HostSample(
            node=NodeId(self.node),
            at=at,
            wall_at=wall,
            cpu_count=96,
            cpu_busy_seconds=now * 40.0,
            load_1m=30.0,
            memory_total_bytes=1 << 40,
            memory_available_bytes=1 << 39,
        ).to_dict()
        return _dumps(processes)[1:-1], _dumps(host)


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
            wait = float(path.partition("wait=")[2] or 0) if "wait=" in path else 0.0
            asyncio.get_running_loop().call_later(wait, self.answer, path)

    def answer(self, path: str) -> None:
        if not self.transport.is_closing():
            body = self.agent.body(path)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)


def serve(first: int, num_agents: int, num_ranks: int, tell: Connection) -> None:
    async def main() -> None:
        loop, urls = asyncio.get_running_loop(), {}
        for number in range(first, first + num_agents):
            agent = StandIn(number, num_ranks)
            server = await loop.create_server(lambda a=agent: Protocol(a), "127.0.0.1", 0)  # type: ignore[misc]
            urls[agent.node] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tell.send(urls)
        await asyncio.Event().wait()

    asyncio.run(main())


def read(urls: dict[str, str], seconds: float, poll_seconds: float) -> tuple[float, list[float], int, int]:
    """(cores used, age of each agent's newest sample at each poll, agents unreachable, samples)."""
    source = AgentsSource(lambda: urls, SystemClock(), poll_seconds)
    source.start()
    newest: dict[str, float] = {}
    ages: list[float] = []
    unreachable = samples = 0
    begun = time.monotonic()
    warm = begun + WARM_SECONDS
    used = began_at = 0.0
    while (now := time.monotonic()) < warm + seconds:
        if now >= warm and not began_at:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            began_at, used = now, usage.ru_utime + usage.ru_stime
        seen = source.poll(0.5)
        for batch in seen.batches:
            samples += len(batch.processes) if began_at else 0
            if batch.hosts:
                newest[str(batch.node)] = max(h.at for h in batch.hosts)
        if began_at:
            at = time.monotonic()
            ages += [at - newest.get(node, begun) for node in urls]
            unreachable += len(seen.unreachable)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cores = (usage.ru_utime + usage.ru_stime - used) / (time.monotonic() - began_at)
    source.close()
    return cores, ages, unreachable, samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between two looks at an agent")
    args = parser.parse_args(argv)
    servers, urls = [], {}
    context = multiprocessing.get_context("fork")
    for first in range(0, args.agents, 500):
        mine, theirs = context.Pipe()
        server = context.Process(target=serve, args=(first, min(500, args.agents - first), args.ranks, theirs))
        server.start()
        servers.append(server)
        urls |= mine.recv()
    try:
        cores, ages, unreachable, samples = read(urls, args.seconds, args.poll)
    finally:
        for server in servers:
            server.kill()
            server.join()
    ages.sort()
    late = ages[-1]
    config = f"{args.agents} stand-ins of {args.ranks} ranks, each asked every {args.poll:g} s for {args.seconds:g} s"
    lines = common.header("Many agents, one watcher", config, "none: nothing is drawn")
    lines += [
        "| what | measured | bar |",
        "|---|---|---|",
        f"| CPU of the reader | {cores:.2f} cores | {CPU_CORES_MAX:g} |",
        f"| age of an agent's newest sample, median | {statistics.median(ages):.2f} s | |",
        f"| ..., 99th percentile | {ages[int(0.99 * len(ages))]:.2f} s | |",
        f"| ..., worst of {len(ages):,} | {late:.2f} s | {AGE_SECONDS_MAX:g} s |",
        f"| agents told as unreachable | {unreachable} | 0 |",
        f"| samples of ranks read | {samples / args.seconds:,.0f} a second | |",
        "",
        "The stand-ins share the machine's cores with the reader: ages are if anything too high.",
    ]
    met = cores <= CPU_CORES_MAX and late <= AGE_SECONDS_MAX and not unreachable
    lines += ["", "All bars are met." if met else "NOT all bars are met."]
    print("\n".join(lines))
    if args.agents == parser.get_default("agents"):
        (common.RESULTS / f"many_agents_{common.hardware()}_{time.strftime('%Y%m')}.md").write_text(
            "\n".join(lines) + "\n"
        )
    return 0


if __name__ == "__main__":
    assert Path("/proc").is_dir() and os.name == "posix"
    sys.exit(main())
