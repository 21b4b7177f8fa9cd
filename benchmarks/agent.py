"""What the agent of a large node costs, and how fast it is: `python benchmarks/agent.py`.

A node of 8 GPUs, 8 InfiniBand NICs and 16 ranks: the GPUs are our stand-in for NVML (tests/agent/nvml, built with gcc, so
that the real nvidia-ml-py runs through ctypes), the NICs a tree of files, the ranks processes that report ten times a
second. `rolecall agent` runs from an agent.yaml as an operator would have it, and looks once a second. Measured: a scrape,
over one kept connection; CPU by collector and memory; what a poller reads a second; how long an event takes from its cause
to who waits at `/v1/events`; a call of the reporter inside the training process; memory over many looks.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT))

from rolecall.agent import reporter
from rolecall.core.rundir import registration_secret
from tests.agent.nvml import STATE_VARIABLE, Machine, build

NUM_GPUS, NUM_NICS, NUM_RANKS = 8, 8, 16
TOKEN = "benchmark"
BATCH = 50
KERNEL_LINE = (
    "Nov 22 10:00:00 node-1 kernel: [  100.000000] NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus.\n"
)
RANK = """
import sys, time
from rolecall.agent import reporter
folder, rank, secret = sys.argv[1:]
reporter.start(replica="trainer/0", rank=int(rank), incarnation=1, secret=secret, node_dir=folder)
reporter.enter_phase("compute")
step = 0
while True:
    step += 1
    reporter.set_step(step)
    reporter.progress(1, busy_seconds=0.09, tokens=100)
    time.sleep(0.1)
"""
COUNTERS = [
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
]
HW_COUNTERS = [
    "duplicate_request",
    "implied_nak_seq_err",
    "lifespan",
    "local_ack_timeout_err",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "req_cqe_error",
    "req_cqe_flush_error",
    "req_remote_access_errors",
    "req_remote_invalid_request",
    "resp_cqe_error",
    "resp_cqe_flush_error",
    "resp_local_length_error",
    "resp_remote_access_errors",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "roce_slow_restart_cnps",
    "roce_slow_restart_trans",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "rx_atomic_requests",
    "rx_icrc_encapsulated",
    "rx_read_requests",
    "rx_write_requests",
]


def infiniband(root: Path) -> None:
    for n in range(NUM_NICS):
        port = root / f"mlx5_{n}" / "ports" / "1"
        for folder, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
            (port / folder).mkdir(parents=True)
            for name in names:
                (port / folder / name).write_text("123456\n")
        for name, text in (
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("link_layer", "InfiniBand"),
        ):
            (port / name).write_text(text + "\n")


class Node:
    """A running agent and its node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.machine = Machine(folder / "machine", NUM_GPUS)
        self.kernel_log = folder / "kern.log"
        self.kernel_log.write_text("")
        infiniband(folder / "sys" / "class" / "infiniband")
        (folder / "token").write_text(TOKEN)
        library = build(folder)
        (folder / "agent.yaml").write_text(
            f"node: node-1\nport: 0\ndata_dir: {self.data}\ntoken_file: {folder}/token\nsys: {folder}/sys\n"
            f"gpu: {{library: {library}}}\nkernel_log: {{path: {self.kernel_log}}}\n"
        )
        command = [sys.executable, "-m", "rolecall.agent", "--config", str(folder / "agent.yaml")]
        with (folder / "agent.log").open("w") as log:
            environ = {**os.environ, STATE_VARIABLE: str(self.machine.path)}
            self.process = subprocess.Popen(command, stderr=log, env=environ)
        deadline = time.monotonic() + 30
        while not (self.data / "agent.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the agent does not start:\n{(folder / 'agent.log').read_text()}")
            time.sleep(0.05)
        url = json.loads((self.data / "agent.json").read_text())["url"]
        self.netloc = url.removeprefix("http://")
        self.ranks = [self._rank(n) for n in range(NUM_RANKS)]

    def _rank(self, n: int) -> subprocess.Popen[bytes]:
        secret = registration_secret(TOKEN, "trainer/0", n, 1)
        return subprocess.Popen([sys.executable, "-c", RANK, str(self.data), str(n), secret])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.netloc, timeout=60)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def node() -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="agent-bench-"))
    made = None
    try:
        made = Node(folder)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(folder)


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> bytes:
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body[:200]
    return zlib.decompress(body) if answer.headers.get("Content-Encoding") == "deflate" else body


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


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
    """(share of a core of the agent, by collector, resident bytes) while one reader asks for samples each second."""

    def now() -> tuple[float, dict[str, float], float]:
        text = get(n.connect(), "/metrics").decode()
        by = {
            m[1]: float(m[2]) for m in re.finditer(r'rolecall_probe_cpu_seconds_total\{.*probe="(\w+)"\} (\S+)', text)
        }
        whole = re.search(r"rolecall_agent_cpu_seconds_total\{\S+ (\S+)", text)
        memory = re.search(r"rolecall_agent_resident_memory_bytes\{\S+ (\S+)", text)
        assert whole and memory
        return float(whole[1]), by, float(memory[1])

    before, by_before, _ = now()
    began = time.monotonic()
    connection, since = n.connect(), 0
    while time.monotonic() < began + seconds:
        since = json.loads(get(connection, f"/v1/samples?since={since}", **{"Accept-Encoding": "deflate"}))["cursor"]
        time.sleep(1.0)
    lasted = time.monotonic() - began
    after, by_after, memory = now()
    return (after - before) / lasted, {k: (v - by_before.get(k, 0)) / lasted for k, v in by_after.items()}, memory


def sample_bytes(n: Node, number: int) -> tuple[list[int], list[int]]:
    """(on the wire, unpacked) of what a poller reads a second."""
    connection, since = n.connect(), 0
    wire, plain = [], []
    for _ in range(number + 1):
        connection.request("GET", f"/v1/samples?since={since}", headers={"Accept-Encoding": "deflate"})
        body = connection.getresponse().read()
        unpacked = zlib.decompress(body)
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

    def until(kind: str, cause: Any) -> float:
        nonlocal newest
        arrived = threading.Event()
        at = [0.0]

        def listen() -> None:
            nonlocal newest
            while not arrived.is_set():
                batch = json.loads(get(connection, f"/v1/events?after={newest}&wait=20"))
                if batch["events"]:
                    newest = batch["events"][-1]["seq"]
                if any(e["kind"] == kind for e in batch["events"]):
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

    def line() -> None:
        with n.kernel_log.open("a") as f:
            f.write(KERNEL_LINE)

    for i in range(number):
        found["XID in the kernel log"].append(until("xid", line))
        time.sleep(2.1)  # what two sources say within 2 s is one event
        found["XID of NVML"].append(until("xid", lambda i=i: n.machine.event(i % NUM_GPUS, 48)))
        time.sleep(2.1)
    for rank in n.ranks[: min(number, NUM_RANKS)]:
        found["exit of a rank"].append(until("exited", lambda rank=rank: rank.send_signal(signal.SIGKILL)))
    return found


def reporter_calls(number: int) -> dict[str, list[float]]:
    """Mean seconds of a call in batches of BATCH, without an agent: a single one is shorter than the clock is sure of."""
    found: dict[str, list[float]] = {"progress": [], "set_step": [], "enter_phase": [], "exception": []}
    folder = Path(tempfile.mkdtemp(prefix="reporter-bench-"))
    error = ValueError("x")
    try:
        reporter.start(replica="trainer/0", rank=0, incarnation=1, secret="none", node_dir=str(folder))
        for _ in range(number):
            for name, call in (
                ("progress", lambda: reporter.progress(1, tokens=10)),
                ("set_step", lambda: reporter.set_step(7)),
                ("enter_phase", lambda: reporter.enter_phase("compute")),
                ("exception", lambda: reporter.exception(error)),
                ("(an empty call)", lambda: None),
            ):
                began = time.perf_counter()
                for _ in range(BATCH):
                    call()
                found.setdefault(name, []).append((time.perf_counter() - began) / BATCH)
    finally:
        shutil.rmtree(folder)
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
    calls = reporter_calls(1000)
    config = f"{NUM_GPUS} GPUs (stand-in), {NUM_NICS} NICs, {NUM_RANKS} ranks, 1 Hz; {args.scrapes} scrapes"
    lines = common.header("The node agent", config, "none: nothing is drawn")
    lines += ["| what | measured | bar |", "|---|---|---|"]
    for path, limit in (("/metrics", 200), ("/metrics/dcgm", 300)):
        times = took[path]
        lines.append(
            f"| scrape of `{path}` | P50 {1e3 * statistics.median(times):.1f} ms, P99 {1e3 * quantile(times, 0.99):.1f} ms"
            f" (n={len(times)}) | P99 20 ms |"
        )
        lines.append(f"| size of `{path}` | {sizes[path] / 1024:.0f} KiB | {limit} KiB |")
    lines.append(
        f"| `/v1/samples`, a second of them | {statistics.median(wire) / 1024:.1f} KiB on the wire (worst "
        f"{max(wire) / 1024:.1f}), {statistics.median(plain) / 1024:.1f} KiB unpacked | 4 KiB |"
    )
    lines.append(f"| agent's CPU | {100 * cores:.1f} % of a core | 2 % |")
    lines.append(f"| agent's memory | {memory / 2**20:.0f} MiB | 60 MiB |")
    for what, values in delays.items():
        lines.append(
            f"| {what}, to `/v1/events` | P50 {1e3 * statistics.median(values):.0f} ms, worst "
            f"{1e3 * max(values):.0f} ms (n={len(values)}) | 300 ms |"
        )
    for name, values in calls.items():
        bar = {"exception": "5 us", "(an empty call)": ""}.get(name, "1 us")
        lines.append(
            f"| reporter: `{name}` | median {1e6 * statistics.median(values):.2f} us, P99 "
            f"{1e6 * quantile(values, 0.99):.2f} us (n={len(values)}) | {bar} |"
        )
    lines += ["", "The stand-in's own work is part of the CPU of `gpu` and `gpu_events`."]
    lines += ["", "CPU by collector, share of a core:", "", "| collector | % |", "|---|---|"]
    lines += [f"| {name} | {100 * share:.2f} |" for name, share in sorted(by.items(), key=lambda x: -x[1])]
    rest = cores - sum(by.values())
    lines += [f"| all else: ranks, samples, scrapes | {100 * rest:.2f} |", ""]
    print("\n".join(lines))
    if not args.no_file:
        name = f"agent_{common.hardware()}_{time.strftime('%Y%m')}.md"
        (common.RESULTS / name).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
