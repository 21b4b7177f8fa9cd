"""A whole run with trivial actors, as a script: `python cluster_run.py RUNS_FOLDER RUN_ID`. Ends at SIGINT or SIGTERM.

The cluster, the agents, the control loop and the end are the product's own; only the actors do nothing.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.agent.reporter import reporter
from rolecall.core.clock import SystemClock
from rolecall.core.config.job import parse_job
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.cluster.supervisor import TICK_SECONDS, Supervisor


class Idle:
    """Answers the supervisor's calls, and reports its environment."""

    def __init__(self, spawn: Any, job: dict[str, Any]) -> None:
        reporter.start(replica=spawn.replica, rank=0, incarnation=spawn.incarnation, secret=spawn.secret, node_dir=None)
        names = ("ROLECALL_RUN", "ROLECALL_NODE", "OMP_NUM_THREADS", "RAY_AUTH_TOKEN")
        text = "\n".join(f"{name}={os.environ.get(name, '')}" for name in names)
        role = spawn.replica.replace("/", "-")
        (Path(spawn.run_dir) / f"env.{role}.{spawn.incarnation}").write_text(f"{text}\nNICE={os.getpriority(0, 0)}\n")

    def ready(self) -> tuple[int, int]:
        return os.getpid(), process_start_ticks(os.getpid()) or 0

    def renew(self, seconds: float) -> None:
        pass

    def promote(self, replica: str, incarnation: int, secret: str) -> None:
        reporter.become(replica=replica, incarnation=incarnation, secret=secret)

    def stop(self) -> None:
        reporter.finish("stopped")


class Interrupted(BaseException):
    pass


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def main(root: str, run_id: str) -> None:
    clock = SystemClock()
    run = create_run_dir(Path(root), run_id)
    roles = ("trainer", "rollout", "reward", "controller")
    job = parse_job({"injection_allowed": True, "runtime": {"nodes": 7}})
    supervisor = Supervisor(run, job, clock, classes=lambda: dict.fromkeys(roles, Idle))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    begun = clock.monotonic()
    try:
        supervisor.start(lambda text: print(f"{clock.monotonic() - begun:.2f} {text}", flush=True))
        print(f"STARTED {clock.monotonic() - begun:.2f}", flush=True)
        while True:
            supervisor.tick()
            clock.sleep(TICK_SECONDS)
    except Interrupted:
        pass
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        supervisor.stop("the test is over")
    print("STOPPED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
