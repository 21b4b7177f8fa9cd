"""Carries out runs, two at a time, each in a worker process."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.learning import runs as learning_runs
from benchmarks.learning.runs import Run

WORKERS = 2
RUN_SECONDS_MAX = 3600.0
"""A run that takes longer, on a machine however busy, hangs."""


def carry_out(batches: Sequence[Sequence[Run]], *, commit: str, path: Path, minutes: float) -> int:
    """Adds a line of each run to `path`. Returns how many were not carried out."""
    ends = time.monotonic() + 60 * minutes
    batches = [learning_runs.missing(batch, learning_runs.read(path, [commit])) for batch in batches]
    left = sum(map(len, batches))
    for batch in filter(None, batches):
        # A process of its own for each engine; else the import of torch is paid once a worker.
        alone = 1 if any(run.with_engine for run in batch) else None
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), max_tasks_per_child=alone) as pool:
            for run, future in over(
                batch, lambda run: pool.submit(learning_runs.carried_out, run, commit), lambda: time.monotonic() < ends
            ):
                if (error := future.exception()) is not None:  # the others are worth having all the same
                    print(f"{run.part}, {run.name}, seed {run.seed}: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                record = future.result()
                with path.open("a") as out:
                    out.write(json.dumps(record, separators=(",", ":")) + "\n")
                left -= 1
                print(_told(run, record, left), flush=True)
    return left


def over(
    runs: Iterable[Run], begin: Callable[[Run], Future[dict[str, Any]]], may_begin: Callable[[], bool]
) -> Iterator[tuple[Run, Future[dict[str, Any]]]]:
    """Runs as they end, `WORKERS` at a time. When no more may begin, those that have begun are waited for."""
    left, going = deque(runs), dict[Future[dict[str, Any]], Run]()
    while True:
        while left and len(going) < WORKERS and may_begin():
            run = left.popleft()
            going[begin(run)] = run
        if not going:
            return
        done, _ = wait(going, timeout=RUN_SECONDS_MAX, return_when=FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"no run ended within {RUN_SECONDS_MAX:.0f} s")
        for future in done:
            yield going.pop(future), future


def _told(run: Run, record: dict[str, Any], left: int) -> str:
    steps = record["columns"]["reward"]
    reward, exact = record["final"]
    return (
        f"{run.part}, {run.name}, seed {run.seed}: {len(steps)} steps, {sum(record['columns']['cpu_seconds']):.0f} "
        f"CPU s, examined: reward {reward:.3f}, exact {exact:.3f}; load {record['load'][1]}; {left} left"
    )
