"""Keeps one node agent per node running: starts it, restarts it at a bounded rate, and stops it."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId, process_start_ticks
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.processes import record_process, run_environment

logger = logging.getLogger(__name__)

RESTARTS_MAX = 5
"""Restarts of one node's agent within `RESTART_WINDOW_SECONDS`; a further one waits until the window has moved on."""
RESTART_WINDOW_SECONDS = 60.0
STOP_SECONDS = 3.0


@dataclass
class _SupervisedAgent:
    process: subprocess.Popen[bytes] | None = None
    restarted_at: list[float] = field(default_factory=list)
    complained: bool = False


class AgentSupervisor:
    """Owned by the supervisor's loop; `restarted(node, because)` is called for every restart."""

    def __init__(
        self, run: RunDir, nodes: Sequence[NodeId], clock: Clock, restarted: Callable[[NodeId, str], None]
    ) -> None:
        self._run, self._clock, self._restarted = run, clock, restarted
        self._kept = {node: _SupervisedAgent() for node in nodes}

    def start(self) -> None:
        for node, kept in self._kept.items():
            kept.process = self._launch(node)

    def tick(self) -> None:
        """Restarts agents that have ended."""
        for node, kept in self._kept.items():
            code = kept.process.poll() if kept.process is not None else None
            if code is None:
                continue
            now = self._clock.monotonic()
            kept.restarted_at = [t for t in kept.restarted_at if now - t < RESTART_WINDOW_SECONDS]
            if len(kept.restarted_at) >= RESTARTS_MAX:
                if not kept.complained:
                    logger.error("the agent of %s ended %d times in a minute: restarts pause", node, RESTARTS_MAX + 1)
                kept.complained = True
                continue
            kept.restarted_at.append(now)
            kept.complained = False
            kept.process = self._launch(node)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._restarted(node, f"the agent of {node} had ended ({how})")

    def stop(self) -> None:
        """Ends them all. Idempotent."""
        running = [k.process for k in self._kept.values() if k.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
        for kept in self._kept.values():
            kept.process = None

    def _launch(self, node: NodeId) -> subprocess.Popen[bytes]:
        folder = self._run.node_dir(node)
        folder.mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        argv = [sys.executable, "-m", "rolecall.agent", "--ranks-only", "--node", node, "--data-dir", str(folder)]
        argv += ["--token-file", str(self._run.token_path)]
        argv += ["--parent-pid", str(me), "--parent-start", str(process_start_ticks(me))]
        with (self._run.logs / f"agent-{node}.log").open("ab") as out:
            process = subprocess.Popen(
                argv,
                env=run_environment(self._run.path, node),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        record_process(self._run.path, f"agent-{node}", process.pid, node=node)
        return process
