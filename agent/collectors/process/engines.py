"""Processes of inference engines below a registered process: vLLM's core and its workers, SGLang's schedulers.

They hold the weights and the requests and report nothing; what is registered is their server, or the actor or trainer
rank that started them. Each names itself: `VLLM::EngineCore`, `VLLM::Worker_TP0`, `sglang::scheduler_TP0`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rolecall.agent.collectors.counters import read_at_most, stat_of

ENGINE = re.compile(r"(VLLM::(EngineCore|Worker)|sglang::scheduler)", re.IGNORECASE)
ENGINES_MAX = 16
"""Of one process: eight workers of a node and their core are nine."""
TITLE_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """`parent`: PID of the next engine process above it, else of the registered process. `is_stopped`: by a signal or a
    debugger."""

    pid: int
    parent: int
    title: str
    is_stopped: bool


def engine_processes(pid: int, proc: Path = Path("/proc")) -> list[EngineProcess]:
    """Living ones below `pid`, parents first."""
    try:
        pids = [int(name) for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return []
    children: dict[int, list[int]] = {}
    stopped: set[int] = set()
    for child in pids:
        stat = stat_of(proc, child)
        if stat is not None and not stat.has_ended:
            children.setdefault(stat.parent, []).append(child)
            stopped |= {child} if stat.state in "Tt" else set()

    found: list[EngineProcess] = []
    above = [(pid, pid)]  # a process, and the next engine process at or above it
    for parent, owner in above:
        for child in sorted(children.pop(parent, ())):  # popped: PIDs that were reused meanwhile make no cycle
            raw = read_at_most(f"{proc}/{child}/cmdline", TITLE_BYTES_MAX).split(b"\0")[0]
            title = raw.decode("utf-8", "replace").strip()
            is_engine = ENGINE.match(title) is not None
            if is_engine:
                found.append(EngineProcess(child, owner, title, child in stopped))
            above.append((child, child if is_engine else owner))
    return found[:ENGINES_MAX]
