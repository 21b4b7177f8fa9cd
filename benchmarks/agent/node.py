"""The large node of the agent's benchmarks: 8 GPUs, 8 InfiniBand NICs and 16 ranks.

The GPUs are our stand-in for NVML (tests/agent/nvml, built with gcc, so that the real nvidia-ml-py runs through ctypes;
it times its own C code), the NICs a tree of files, the ranks processes that report ten times a second. Numbers of GPUs
and NICs move each second.
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolecall.core.rundir import registration_secret
from tests.agent.nvml import STATE_VARIABLE, TIME_VARIABLE, Machine, build

NUM_GPUS, NUM_NICS, NUM_RANKS = 8, 8, 16
TOKEN = "benchmark"
REPLICA = "trainer/0"
KERNEL_LINE = (
    "Nov 22 10:00:00 node-1 kernel: [{stamp:13.6f}] NVRM: Xid (PCI:0000:1a:00): {code}, pid='<unknown>', "
    "name=<unknown>, GPU has fallen off the bus.\n"
)
RANK = """
import sys, time
from rolecall.agent.reporter import reporter
folder, replica, rank, incarnation, secret = sys.argv[1:]
reporter.start(replica=replica, rank=int(rank), incarnation=int(incarnation), secret=secret, node_dir=folder)
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


class NodeFiles:
    """What a node shows: its GPUs, NICs and kernel log, which `live` moves on, and the agent's configuration."""

    def __init__(self, folder: Path) -> None:
        self.data, self.config = folder / "data", folder / "agent.yaml"
        self.machine = Machine(folder / "machine", NUM_GPUS)
        self._lock = threading.Lock()  # its state is one file
        self.kernel_log = folder / "kern.log"
        self.kernel_log.write_text("")
        self._nics = folder / "sys" / "class" / "infiniband"
        infiniband(self._nics)
        (folder / "token").write_text(TOKEN)
        library = build(folder, timed=True)
        self.standin_time = folder / "standin_time"
        self.standin_time.write_bytes(bytes(8))
        self.environ = {STATE_VARIABLE: str(self.machine.path), TIME_VARIABLE: str(self.standin_time)}
        self.config.write_text(
            f"node: node-1\nport: 0\ndata_dir: {self.data}\ntoken_file: {folder}/token\nsys: {folder}/sys\n"
            f"gpu: {{library: {library}}}\nkernel_log: {{path: {self.kernel_log}}}\n"
        )

    def live(self, second: int) -> None:
        """Another second: what moves on a node that trains, moves."""
        moved: dict[str, object] = {
            "PowerUsage": 500_000 + 997 * (second % 97),
            "TotalEnergyConsumption": 10**11 + 512_345 * second,
            "UtilizationRates": 80 + second % 20,
            "Temperature": 45 + second % 7,
            "field.74": 10**6 * second,
            "field.197": 10**12 + 10**9 * second,
            "field.198": 10**12 + 10**9 * second,
            "field.138": 10**6 * second,
            "field.139": 10**6 * second,
            "gpm.2": 70.0 + second % 13,
            "gpm.5": 50.0 + second % 11,
        }
        with self._lock:
            self.machine.set(moved)
        for name in ("port_rcv_data", "port_xmit_data", "port_rcv_packets", "port_xmit_packets"):
            port = self._nics / f"mlx5_{second % NUM_NICS}" / "ports" / "1"
            (port / "counters" / name).write_text(f"{123_456 + 10**6 * second}\n")

    def uses(self, pids: Sequence[int]) -> None:
        """NVML lists these processes, spread over the GPUs."""
        with self._lock:
            for gpu in range(NUM_GPUS):
                self.machine.set({"processes": ",".join(f"{pid}:{60 << 30}" for pid in pids[gpu::NUM_GPUS])}, gpu=gpu)

    def xid(self, gpu: int, code: int) -> None:
        with self._lock:
            self.machine.event(gpu, code)

    def kernel_line(self, second: int, code: int = 79) -> None:
        with self.kernel_log.open("a") as f:
            f.write(KERNEL_LINE.format(stamp=100.0 + second, code=code))


def start_rank(data: Path, n: int, incarnation: int = 1) -> subprocess.Popen[bytes]:
    secret = registration_secret(TOKEN, REPLICA, n, incarnation)
    return subprocess.Popen([sys.executable, "-c", RANK, str(data), REPLICA, str(n), str(incarnation), secret])


class Node:
    """A running agent and its node."""

    def __init__(self, folder: Path) -> None:
        self.files = NodeFiles(folder)
        data = self.files.data
        command = [sys.executable, "-m", "rolecall.agent", "--config", str(self.files.config)]
        with (folder / "agent.log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, **self.files.environ})
        deadline = time.monotonic() + 30
        while not (data / "agent.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the agent does not start:\n{(folder / 'agent.log').read_text()}")
            time.sleep(0.05)
        url = json.loads((data / "agent.json").read_text())["url"]
        self.netloc = url.removeprefix("http://")
        self.ranks = [start_rank(data, n) for n in range(NUM_RANKS)]
        self.files.uses([rank.pid for rank in self.ranks])
        self._over = threading.Event()
        self._living = threading.Thread(target=self._live, name="living", daemon=True)
        self._living.start()

    def _live(self) -> None:
        second = 0
        while not self._over.wait(1.0):
            second += 1
            self.files.live(second)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.netloc, timeout=60)

    def close(self) -> None:
        self._over.set()
        self._living.join()
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
