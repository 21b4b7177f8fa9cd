"""Jobs of other systems: their processes, their logs, and how they are ended. Everything is on loopback."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks import common
from benchmarks.recovery.peers.loop import Worker, read_workers
from rolecall.core.ids import process_start_ticks
from rolecall.rl_runtime.processes import find_processes, is_alive, kill_process, run_environment

NUM_REPLICAS = 3
START_SECONDS = 300.0
STOP_SECONDS = 15.0


class Job(Protocol):
    """A running job of another system."""

    run: Path

    def tend(self) -> None:
        """Called often: what a user's scheduler does beside the system."""

    def node_processes(self, worker: Worker) -> list[tuple[int, int]]:
        """(pid, start ticks) of what ends with the worker's node, the worker's own process left out."""


class _Started:
    """A run directory with the processes that carry its name in their environment."""

    def __init__(self, name: str) -> None:
        self.run = (common.RUNS / name).resolve()
        for folder in ("inject", "logs", "progress"):
            (self.run / folder).mkdir(parents=True, exist_ok=True)
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
        known = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(common.ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with (self.run / "logs" / f"{name}.log").open("ab") as out:
            child = subprocess.Popen(
                [sys.executable, *argv],
                stdout=out,
                stderr=out,
                env={**run_environment(self.run), **known, **environment},
                cwd=common.ROOT,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def tend(self) -> None:
        pass

    def stop(self) -> None:
        """Ends every process of the run, and no other."""
        deadline = time.monotonic() + STOP_SECONDS
        while (left := find_processes(self.run)) and time.monotonic() < deadline:
            for process in left:
                kill_process(process.pid, process.start_ticks)
            time.sleep(0.2)
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
        shutil.rmtree(self.run / "storage", ignore_errors=True)
        if left:
            raise TimeoutError(f"processes that do not end: {', '.join(map(str, left))}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


LIGHTHOUSE = "from torchft._torchft import lighthouse_main\nlighthouse_main()\n"
"""torchft's own command. It takes its options from the arguments after the first file, so that it needs one."""


class TorchftJob(_Started):
    """A lighthouse, and a torchrun for each replica group. A group that ended is started again, as by a scheduler."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        port = free_port()
        self._lighthouse = f"http://127.0.0.1:{port}"
        script = self.run / "lighthouse.py"
        script.write_text(LIGHTHOUSE)
        # The options of torchft's own instructions.
        options = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
        self.start("lighthouse", str(script), *options, "--bind", f"127.0.0.1:{port}", RUST_LOG="info")
        self._groups = [self._start_group(n) for n in range(NUM_REPLICAS)]

    def _start_group(self, number: int) -> subprocess.Popen[bytes]:
        return self.start(
            f"group-{number}",
            *("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=1000"),
            *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
            *("-m", "benchmarks.recovery.peers.torchft_worker"),
            TORCHFT_LIGHTHOUSE=self._lighthouse,
            RANK_OF_GROUP=str(number),
        )

    def tend(self) -> None:
        for number, group in enumerate(self._groups):
            if group.poll() is not None:
                self._groups[number] = self._start_group(number)

    def node_processes(self, worker: Worker) -> list[tuple[int, int]]:
        pid = self._groups[worker.rank].pid
        ticks = process_start_ticks(pid)
        return [] if ticks is None else [(pid, ticks)]


RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray replaces 127.0.0.1 by the address of an interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
    # Its workers would be starved by other processes of the machine, or ended because of their memory.
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


class RayTrainJob(_Started):
    """One driver, which starts the cluster and the trainer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._driver = self.start(
            "driver", "-m", "benchmarks.recovery.peers.ray_job", str(NUM_REPLICAS), **RAY_ENVIRONMENT
        )

    def node_processes(self, worker: Worker) -> list[tuple[int, int]]:
        pid = int(json.loads((self.run / "nodes.json").read_text())[worker.node])
        ticks = process_start_ticks(pid)
        return [] if ticks is None else [(pid, ticks)]


JOBS: Mapping[str, Callable[[str], TorchftJob | RayTrainJob]] = {"torchft": TorchftJob, "ray-train": RayTrainJob}


def live_workers(run: Path) -> list[Worker]:
    return [w for w in read_workers(run) if is_alive(w.pid, w.start_ticks)]
