"""Records the metrics of a real demo run, as a Prometheus that scrapes it would have them.

    .venv/bin/python -m tools.record_demo_metrics            # about five minutes; writes tests/dashboards/metrics/

Scrapes every agent and the watch of `rolecall demo` (three faults), and beside them an agent on a stand-in of a GPU
node (tests/agent/full_node.py), on which counters move, a GPU gets hot and XIDs happen: its numbers are no
measurements, they are there so that every panel and alert has something to show. The Grafana tests run on the result.
"""

import argparse
import contextlib
import http.client
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.agent.collectors.test_network import interface
from tests.agent.full_node import FullNode, full_node, reporting
from tests.dashboards.openmetrics import Recording
from tests.formats.test_nccl_inspector import line
from tests.infiniband_tree import port

OUT = Path(__file__).parent.parent / "tests" / "dashboards" / "metrics" / "demo.om.gz"
SCRAPE_SECONDS = 5.0
ANSWER_SECONDS = 4.0
AFTER_SECONDS = 20.0
"""The stand-in node goes on for so long once the demo is over."""
DEMO_SECONDS_MAX = 1200.0
BYTES_MAX = 1_500_000
GPU_NODE = "gpu-1"
XID_AFTER, HOT_FROM, HOT_UNTIL = 12, 20, 32
"""Rounds of the stand-in node at which things happen to it."""

KERNEL_SAYS = (
    "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 30 sourcetrack timeout error",
    "mlx5_core 0000:41:00.0 ens1f0np0: Link down",
    "mlx5_core 0000:41:00.0 ens1f0np0: Link up",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x3f)",
    "{1}[Hardware Error]: event severity: fatal",
    "INFO: task python3:4711 blocked for more than 120 seconds.",
)
"""Lines as tests/formats/test_kernel_log.py has them."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--seed", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--out", type=Path, default=OUT)
    given = arguments.parse_args()
    recording = Recording()
    with tempfile.TemporaryDirectory(prefix="rolecall-record-") as folder:
        code = _record(recording, Path(folder), given.seed, given.steps)
    size = recording.write(given.out)
    print(f"{given.out}: {len(recording.names)} names, {size} bytes; the demo ended with {code}")
    if size > BYTES_MAX:
        print(f"that is more than {BYTES_MAX} bytes", file=sys.stderr)
        return 1
    return code


def _record(recording: Recording, folder: Path, seed: int, steps: int) -> int:
    """Until the demo is over, and a little longer. Returns its exit code."""
    (folder / "node").mkdir()
    run = folder / "runs" / f"demo-{seed}"
    _disk(folder / "node")
    with (
        full_node(folder / "node", node=GPU_NODE) as node,
        reporting(node) as process,
        _demo(run, seed, steps) as demo,
    ):
        node.machine.set({"processes": f"{process.pid}:{60 << 30}"}, 0)
        began, over_at, number = time.monotonic(), math.inf, 0
        while time.monotonic() < over_at + AFTER_SECONDS:
            _move(node, number)
            _round(recording, run, node)
            if demo.poll() is not None:
                over_at = min(over_at, time.monotonic())
            if time.monotonic() - began > DEMO_SECONDS_MAX:
                raise TimeoutError(f"the demo is not over after {DEMO_SECONDS_MAX:.0f} s")
            number += 1
            time.sleep(max(0.0, began + number * SCRAPE_SECONDS - time.monotonic()))
        return demo.wait()


@contextlib.contextmanager
def _demo(run: Path, seed: int, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "rolecall", "demo", "--seed", str(seed), "--steps", str(steps), "--plain"]
    argv += ["--no-dashboard", "--minutes-max", "18", "--id", run.name, "--runs", str(run.parent)]
    process = subprocess.Popen(argv)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def _round(recording: Recording, run: Path, node: FullNode) -> None:
    """Scrapes every target once. As in Prometheus, the time of a scrape is that of its start."""
    agents = sorted(run.glob("nodes/*/agent.json"))
    asked = [("rolecall-agent", f"{run.name}/{path.parent.name}", _url(path)) for path in agents]
    if (run / "watch.json").exists():
        asked.append(("rolecall-watch", f"{run.name}/watch", _url(run / "watch.json")))
    asked.append(("rolecall-agent", GPU_NODE, node.url))
    for job, instance, url in asked:
        _scrape(recording, job, instance, url, "/metrics")
    _scrape(recording, "dcgm", GPU_NODE, node.url, "/metrics/dcgm")


def _url(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["url"])
    except (OSError, ValueError, KeyError):
        return ""  # just being written


def _scrape(recording: Recording, job: str, instance: str, url: str, path: str) -> None:
    at, began = time.time(), time.monotonic()
    page = None
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(urlsplit(url).netloc or "127.0.0.1:1", timeout=ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            page = answer.read() if answer.status == 200 else None
    recording.scraped(at, job, instance, page, time.monotonic() - began)


def _disk(folder: Path) -> None:
    """The stand-in node has one disk of this machine's."""
    names = [line.split()[2] for line in Path("/proc/diskstats").read_text().splitlines()]
    busy = next((n for n in names if not n.startswith(("loop", "ram"))), names[0])
    (folder / "sys" / "block" / busy / "device").mkdir(parents=True)


def _move(node: FullNode, number: int) -> None:
    """What happens on the stand-in node in its round `number`."""
    wave = math.sin(number / 3.0)
    hot = HOT_FROM <= number < HOT_UNTIL
    for gpu in range(2):
        mine = hot and gpu == 1
        node.machine.set(
            {
                "UtilizationRates": round(80 + 15 * wave),
                "PowerUsage": round(512_000 + 90_000 * wave),
                "TotalEnergyConsumption": 123_456_789_000 + number * 2_560_000,
                "Temperature": 86 if mine else round(52 + 6 * wave) + gpu,
                "ClockInfo.sm": 1200 if mine else 1755,
                "CurrentClocksEventReasons": 0x40 if mine else 0,
                "CurrentClocksThrottleReasons": 0x40 if mine else 0,
                "PcieReplayCounter": number // 10 if gpu else 0,
                "TotalEccErrors.0.1": 3 + number // 8,
                "field.138": (1 << 20) + number * (1 << 21),
                "field.139": (1 << 20) + number * (1 << 21),
            },
            gpu,
        )
    root = node.folder / "sys/class"
    for n in range(2):
        counters = {
            "port_rcv_data": 5 + number * 600_000_000,
            "port_xmit_data": 5 + number * 580_000_000,
            "symbol_error": number // 6 if n else 0,
            "link_downed": int(number > XID_AFTER) if n else 0,
        }
        port(root / "infiniband", f"mlx5_{n}", counters=counters, hw_counters={"np_cnp_sent": 1 + 40 * number})
    interface(
        root / "net",
        "eth0",
        rx_bytes=1000 + number * 50_000_000,
        tx_bytes=2000 + number * 48_000_000,
        rx_packets=10 + number * 40_000,
        tx_packets=10 + number * 39_000,
        rx_dropped=max(0, number - HOT_FROM) * 3,
    )
    with (node.folder / "inspector" / "n-pid1.log").open("ab") as f:
        f.write(b"".join(line(rank, number * 4 + n, 500.0 + 80.0 * wave) for rank in range(2) for n in range(4)))
    if number == XID_AFTER:
        node.happen()
    if number == HOT_FROM:
        node.machine.set({"NvLinkState.7": 0, "NvLinkErrorCounter.7.0": 12}, 1)
        with node.kernel_log.open("a") as f:
            f.writelines(
                f"Nov 22 10:00:{n:02} n kernel: [  20{n}.000001] {said}\n" for n, said in enumerate(KERNEL_SAYS)
            )


if __name__ == "__main__":
    sys.exit(main())
