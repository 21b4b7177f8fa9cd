"""Whether the agent stays as it is over many looks: `python -m benchmarks.agent.ticks`.

The node of `node.py` (8 GPUs of our stand-in, 8 NICs, 16 ranks), looked at by the agent's own parts in this process:
every collector at its pace, the processes, the host, housekeeping, a reader of samples each second and a scrape every
fifteen. The clock is a fake that moves by a second a tick, so that a day and more passes in minutes: what is slow by
design (every 5, 10 or 15 s) comes as often per tick as in life. Numbers of GPUs and NICs move, lines come into the
kernel log, ranks end and others take their places; the log of events is full from the beginning, as on an old node.
Printed at 10^3, 10^4 and 10^5
ticks: resident memory, open files, CPU a tick by part.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from benchmarks import common
from benchmarks.agent import node as full
from rolecall.agent.collectors.gpu.events import GpuEventsCollector
from rolecall.agent.collectors.gpu.samples import GpuSamples
from rolecall.agent.collectors.kernel.collector import KernelLogCollector
from rolecall.agent.collectors.process.exits import ExitWatch
from rolecall.agent.collectors.process.host import HostProbe
from rolecall.agent.collectors.runner import DOWN_INTERVAL_SECONDS, Probe
from rolecall.agent.events import NUM_KEPT, EventLog
from rolecall.agent.http.exposition import all_values, render
from rolecall.agent.registry import Registry
from rolecall.agent.samples import Sampler, SampleRing
from rolecall.agent.settings import collectors_of, load_agent_file
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, process_start_ticks
from rolecall.core.rundir import registration_secret
from tests.agent.nvml import read_time

T = TypeVar("T")
MARKS = (1_000, 10_000, 100_000)
SCRAPE_EVERY, LINE_EVERY, EXIT_EVERY = 15, 10, 1_000
"""Ticks between two scrapes, two lines of the kernel log, two ends of a rank."""


@dataclass(slots=True)
class Mark:
    """What stands after so many ticks. `seconds`: CPU by part of the ticks since the mark before."""

    num_ticks: int
    num_since: int
    resident_bytes: int
    num_files: int
    num_objects: int
    loop_seconds: float
    standin_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)


LOOP = """
import json, statistics, time
def loop():
    began = time.thread_time()
    json.loads(json.dumps([{"key": str(n), "value": float(n)} for n in range(20_000)]))
    return time.thread_time() - began
print(statistics.median(loop() for _ in range(5)))
"""


def machine_speed() -> float:
    """Seconds of CPU for work that is always the same: what else runs on the machine makes a core slower, too. In a
    process of its own, whose memory is not ours."""
    return float(subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True).stdout)


class Looking:
    """The agent's parts, driven from here. One tick is one second of the fake clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, FakeClock()
        self.files = full.NodeFiles(folder)
        os.environ |= self.files.environ
        node = NodeId("node-1")
        data = self.files.data
        (data / "pages").mkdir(parents=True)
        self.events = EventLog(data / "events.jsonl", node, self.clock)
        self.exits = ExitWatch()
        self.exits.start()
        host = HostProbe(node)
        self.registry = Registry(
            node=node, data_dir=data, token=full.TOKEN, events=self.events, exits=self.exits, clock=self.clock
        )
        self.ring = SampleRing(node, os.getpid(), self.clock)
        collectors = collectors_of(load_agent_file(self.files.config), node, data, self.registry)
        for collector in collectors:
            if isinstance(collector, (GpuEventsCollector, KernelLogCollector)):
                collector.wait_seconds = 0.0  # they would wait for real
        self.probes = [Probe(c, self.events, self.clock) for c in collectors]
        gpus = next(p for p in self.probes if p.collector.name == "gpu")
        self.gpus = GpuSamples(node, gpus.newest, self.registry.registrations)
        self.sampler = Sampler(self.registry, host, self.ring, self.clock, self.gpus.take)
        self.due = dict.fromkeys(self.probes, self.clock.monotonic())
        self.cursor = self.num_ticks = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._standin_before = read_time(self.files.standin_time)
        for second in range(NUM_KEPT):  # the log of events is full before the first mark: it grows no more
            self.files.kernel_line(second)
        self.ranks = [full.start_rank(data, n) for n in range(full.NUM_RANKS)]
        self.files.uses([rank.pid for rank in self.ranks])
        for n, rank in enumerate(self.ranks):
            self._register(n, rank, 1)

    def _register(self, n: int, rank: subprocess.Popen[bytes], incarnation: int) -> None:
        """What the agent's socket would take, once the rank has made its page."""
        start_ticks = process_start_ticks(rank.pid)
        page = self.files.data / "pages" / f"{rank.pid}-{start_ticks}.page"
        while not page.exists():
            time.sleep(0.01)
        secret = registration_secret(full.TOKEN, full.REPLICA, n, incarnation)
        who = {"pid": rank.pid, "start_ticks": start_ticks, "replica": full.REPLICA, "rank": n, "secret": secret}
        self.registry.register(rank.pid, {**who, "incarnation": incarnation})

    def tick(self) -> None:
        """Only the agent's own work is timed."""
        number = self.num_ticks = self.num_ticks + 1
        self.files.live(number)
        if number % LINE_EVERY == 0:
            self.files.kernel_line(number)
        if number % EXIT_EVERY == 0:
            self._replace(number // EXIT_EVERY % full.NUM_RANKS, 1 + number // EXIT_EVERY)
        ends = self.clock.monotonic() + 1.0
        while True:  # every look that is due within this second, in its order
            probe = min(self.probes, key=self.due.__getitem__)
            if self.due[probe] >= ends:
                break
            self.clock.advance(max(0.0, self.due[probe] - self.clock.monotonic()))
            read = self._timed(probe.collector.name, probe.once)
            interval = probe.collector.interval_seconds
            if probe.collector.name == "gpu_events":
                interval = 1.0  # of which it spends nearly all waiting
            self.due[probe] += interval if read else max(interval, DOWN_INTERVAL_SECONDS)
        self.clock.advance(ends - self.clock.monotonic())
        self._timed("ranks, host and samples of GPUs", self.sampler.round)
        self._timed("housekeeping", self._keep_house)
        answer = self._timed("samples", lambda: self.ring.since_json(self.cursor))
        self.cursor = json.loads(answer)["cursor"]
        if number % SCRAPE_EVERY == 0:
            self._timed("scrape", self.scrape)

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        done = work()
        self.seconds[part] += time.thread_time() - began
        return done

    def _keep_house(self) -> None:
        for probe in self.probes:
            probe.check_hang(self.clock.monotonic())
        self.events.sync()

    def scrape(self) -> bytes:
        readings = [p.newest()[1] for p in self.probes]
        processes, hosts = self.ring.newest()
        values = all_values(processes, hosts, (*(v for r in readings for v in r.values), *self.gpus.values))
        return render(values)[0] + "".join(r.dcgm() for r in readings).encode()

    def _replace(self, n: int, incarnation: int) -> None:
        self.ranks[n].kill()
        self.ranks[n].wait()
        self.ranks[n] = full.start_rank(self.files.data, n, incarnation)
        self.files.uses([rank.pid for rank in self.ranks])
        self._register(n, self.ranks[n], incarnation)

    def mark(self, before: "Mark | None") -> Mark:
        gc.collect()
        standin_now = read_time(self.files.standin_time)
        standin, self._standin_before = standin_now - self._standin_before, standin_now
        made = Mark(
            num_ticks=self.num_ticks,
            num_since=self.num_ticks - (before.num_ticks if before else 0),
            resident_bytes=common.resident_bytes(),
            num_files=len(os.listdir("/proc/self/fd")),
            num_objects=len(gc.get_objects()),
            loop_seconds=machine_speed(),
            seconds=dict(self.seconds),
            standin_seconds=standin,
        )
        self.seconds.clear()
        return made

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for probe in self.probes:
            probe.collector.close()
        self.exits.stop()
        self.events.close()


def measured(num_ticks: int, seconds_max: float) -> list[Mark]:
    """Marks at MARKS and at the end."""
    marks: list[Mark] = []
    with TemporaryDirectory(prefix="agent-ticks-") as folder:
        looking = Looking(Path(folder))
        try:
            began = time.monotonic()
            while looking.num_ticks < num_ticks and time.monotonic() - began < seconds_max:
                looking.tick()
                if looking.num_ticks in MARKS:
                    marks.append(looking.mark(marks[-1] if marks else None))
            if not marks or marks[-1].num_ticks != looking.num_ticks:
                marks.append(looking.mark(marks[-1] if marks else None))
        finally:
            looking.close()
    return marks


def report(marks: Sequence[Mark]) -> list[str]:
    lines = ["| ticks | resident, MiB | open files | objects | CPU a tick, ms | the same loop of Python, ms |"]
    lines.append("|---|---|---|---|---|---|")
    for m in marks:
        cpu = 1e3 * sum(m.seconds.values()) / m.num_since
        lines.append(
            f"| {m.num_ticks} | {m.resident_bytes / 2**20:.1f} | {m.num_files} | {m.num_objects} | {cpu:.2f} |"
            f" {1e3 * m.loop_seconds:.1f} |"
        )
    lines += ["", "The last column is of the machine alone: where it grows, others were at work."]
    lines += ["", "CPU a tick by part, ms:", "", "| part |" + "".join(f" to {m.num_ticks} |" for m in marks)]
    lines.append("|---|" + "---|" * len(marks))
    parts = sorted({p for m in marks for p in m.seconds}, key=lambda p: -marks[-1].seconds.get(p, 0.0))
    for part in parts:
        cells = "".join(f" {1e3 * m.seconds.get(part, 0.0) / m.num_since:.3f} |" for m in marks)
        lines.append(f"| {part} |{cells}")
    cells = "".join(f" {1e3 * m.standin_seconds / m.num_since:.3f} |" for m in marks)
    lines.append(f"| of these the C code of NVML's stand-in |{cells}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=MARKS[-1])
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so long, whatever was reached")
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args(argv)
    began = time.monotonic()
    marks = measured(args.ticks, 60 * args.minutes)
    config = (
        f"{full.NUM_GPUS} GPUs (stand-in), {full.NUM_NICS} NICs, {full.NUM_RANKS} ranks; {marks[-1].num_ticks} ticks "
        f"of a second each, of {args.ticks} asked for, in {time.monotonic() - began:.0f} s"
    )
    lines = common.header("The node agent over many looks", config, "none: nothing is drawn") + report(marks)
    print("\n".join(lines))
    if not args.no_file:
        common.write("agent_ticks", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
