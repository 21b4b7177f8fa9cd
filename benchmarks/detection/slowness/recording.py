"""Writes down what the agents of a running job say, and gives it back as what a detector would have seen.

    python -m benchmarks.detection.slowness.recording runs/ID   until SIGTERM, or until the run's agents are gone

Everything is kept: each sample at the agents' own rate, each event, each agent that did not answer, as one JSON line
a round in `runs/ID/samples.jsonl.gz`. The detector's own source reads, so that a recording holds what `watch` may see
and nothing else; agents hold a minute of samples, so that a round every few seconds misses none and costs little.
`replayed` cuts a recording into looks as long as those of `watch`: what is tried on it runs as it does live. The last
line says what the recorder itself cost.
"""

import argparse
import gzip
import json
import signal
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.core.clock import SystemClock
from rolecall.core.ids import NodeId
from rolecall.core.rundir import RunDir
from rolecall.core.telemetry import HostSample, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.sources.agents import AgentsSource
from rolecall.watch.run import agent_urls

FILE_NAME = "samples.jsonl.gz"
ROUND_SECONDS = 4.0
"""How often agents are asked. They keep a minute: more often would cost more and record the same."""
WAIT_SECONDS = 300.0
"""A run may take this long until its first agent answers."""
GONE_SECONDS = 60.0
"""No agent has answered for so long: the run is over."""
COMPRESSION = 3
"""Of gzip: 6 makes the file a tenth smaller for twice the CPU."""


def record(run: RunDir, stop: threading.Event) -> dict[str, float]:
    """Records until `stop` is set or the run's agents are gone; returns what it cost."""
    clock, began, cpu = SystemClock(), time.monotonic(), time.process_time()
    source = AgentsSource(lambda: agent_urls(run), clock, poll_seconds=ROUND_SECONDS)
    heard_at, heard, num_samples = began, False, 0
    source.start()
    try:
        with gzip.open(run.path / FILE_NAME, "wb", compresslevel=COMPRESSION) as out:
            while not stop.is_set() and time.monotonic() - heard_at < (GONE_SECONDS if heard else WAIT_SECONDS):
                # Sampled in this rhythm whatever events come: `poll` would return at each of them.
                stop.wait(ROUND_SECONDS)
                observation = source.poll(0.0)
                num = sum(len(b.processes) for b in observation.batches)
                if num or observation.events:
                    out.write(json.dumps(observation.to_dict(), separators=(",", ":")).encode() + b"\n")
                    out.flush()
                    heard_at, heard = time.monotonic(), True
                    num_samples += num
            seconds = time.monotonic() - began
            used = time.process_time() - cpu
            cost = {"seconds": seconds, "cpu_seconds": used, "num_samples": float(num_samples)}
            out.write(json.dumps({"cost": cost}).encode() + b"\n")
    finally:
        source.close()
    return cost


@dataclass
class Recording:
    """One run as its agents told it. Samples and events are in the order of their wall time."""

    run: str
    samples: list[ProcessSample] = field(default_factory=list)
    hosts: list[HostSample] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)  # as read: events and silences are taken from here
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def cost_share(self) -> float:
        """Of one CPU, used by the recorder."""
        return self.cost["cpu_seconds"] / self.cost["seconds"] if self.cost else float("nan")


def read(path: Path) -> Recording:
    """A recording, or as much of it as was written before its recorder was killed.

    Raises:
        OSError: there is none.
    """
    found = Recording(path.parent.name)
    for value in _lines(path):
        if "cost" in value:
            found.cost = value["cost"]
            continue
        observation = Observation.from_dict(value)
        found.observations.append(observation)
        for batch in observation.batches:
            found.samples += batch.processes
            found.hosts += batch.hosts
    found.samples.sort(key=lambda s: s.wall_at)
    found.hosts.sort(key=lambda h: h.wall_at)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") as lines:
        try:
            for line in lines:
                yield json.loads(line)
        except (EOFError, zlib.error, ValueError):
            return  # the recorder was killed: a member without its end, or half a line


def replayed(recording: Recording, look_seconds: float) -> Iterator[Observation]:
    """The recording as `watch` would have seen it, one observation each `look_seconds`."""
    events = sorted((e for o in recording.observations for e in o.events), key=lambda e: e.wall_at)
    everything: list[tuple[float, Any]] = [(s.wall_at, s) for s in recording.samples]
    everything += [(h.wall_at, h) for h in recording.hosts] + [(e.wall_at, e) for e in events]
    everything.sort(key=lambda pair: pair[0])
    for number, group in groupby(everything, key=lambda pair: int(pair[0] / look_seconds)):
        until = (number + 1) * look_seconds
        rows = [row for _, row in group]
        looked = [r for r in rows if isinstance(r, (ProcessSample, HostSample))]
        told = tuple(r for r in rows if not isinstance(r, (ProcessSample, HostSample)))
        yield Observation(wall_at=until, batches=tuple(_batches(looked, until)), events=told)


def _batches(rows: Iterable[ProcessSample | HostSample], wall_at: float) -> Iterator[SampleBatch]:
    by_node: dict[str, tuple[list[ProcessSample], list[HostSample]]] = defaultdict(lambda: ([], []))
    for row in rows:
        if isinstance(row, ProcessSample):
            by_node[row.process.node][0].append(row)
        else:
            by_node[row.node][1].append(row)
    for node, (samples, hosts) in sorted(by_node.items()):
        at = max([s.at for s in samples] + [h.at for h in hosts])
        yield SampleBatch(
            node=NodeId(node),
            agent_pid=0,
            cursor=0,
            lost=0,
            at=at,
            wall_at=wall_at,
            processes=tuple(samples),
            hosts=tuple(hosts),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory; may be about to be made")
    args = parser.parse_args()
    stop = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    deadline = time.monotonic() + WAIT_SECONDS
    while not (args.run / "nodes").is_dir():
        if stop.wait(0.2) or time.monotonic() > deadline:
            print(f"{args.run}: no run begins here", file=sys.stderr)
            return 1
    cost = record(RunDir(args.run.resolve()), stop)
    share = 100 * cost["cpu_seconds"] / cost["seconds"]
    print(f"recorded {cost['num_samples']:.0f} samples in {cost['seconds']:.0f} s with {share:.1f} % of a CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
