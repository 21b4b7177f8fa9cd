"""Detectors watch the tasks of a simulated fleet; their alarms are counted as right and wrong."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from benchmarks.panels.fleet.report import Outcome
from rolecall.detector.panels.panel import PanelDetector
from rolecall.detector.simulation.fleet import (
    EPOCH_SECONDS,
    NUM_MACHINES_MAX,
    NUM_MACHINES_MIN,
    SimulatedTask,
    chunks,
    fleet,
)
from rolecall.diagnose.simulate import GRACE_SECONDS, REPEAT_GAP_SECONDS

RUN_SECONDS_MAX = 12 * 3600.0
Alarm = tuple[float, str]


def watch(task: SimulatedTask, detectors: Sequence[PanelDetector]) -> list[tuple[list[Alarm], float]]:
    """(alarms in order, CPU seconds) of each detector."""
    shape = task.shape
    trackers = [d.track(shape) for d in detectors]
    alarms: list[list[Alarm]] = [[] for _ in trackers]
    spent = [0.0 for _ in trackers]
    for part in chunks(task):
        for i, tracker in enumerate(trackers):
            began = time.process_time()
            for at, values in part.ticks():
                # The tick counts, not what the finding says of itself.
                alarms[i] += [(at, s.node) for f in tracker.tick(at, values) for s in f.suspects]
            spent[i] += time.process_time() - began
    return list(zip(alarms, spent, strict=True))


def score(
    task: SimulatedTask, alarms: Iterable[Alarm], *, detector: str, asked: float, cpu_seconds: float = 0.0
) -> Outcome:
    machines, fault = task.shape.machines, task.fault
    onset = fault.onset if fault else math.inf
    culprit = machines[fault.machine].node if fault else ""
    victims = {machines[v.machine].node for v in fault.victims} if fault else set()
    delay: float | None = None
    last: dict[str, float] = {}
    healthy = faulty = of_victims = 0
    for at, node in sorted(alarms):
        if fault and node == culprit and onset <= at <= fault.end + GRACE_SECONDS:
            delay = at - onset if delay is None else delay
            continue
        repeat = at - last.get(node, -math.inf) <= REPEAT_GAP_SECONDS
        last[node] = at
        if repeat:
            continue
        healthy += at < onset
        faulty += at >= onset
        of_victims += at >= onset and node in victims
    return Outcome(
        task=task,
        detector=detector,
        asked=asked,
        delay_seconds=delay,
        false_healthy=healthy,
        healthy_machine_seconds=task.num_machines * min(float(task.num_ticks), onset - EPOCH_SECONDS),
        false_faulty=faulty,
        false_victims=of_victims,
        cpu_seconds=cpu_seconds,
    )


@cache
def made(name: str, asked: float, model: Path | None) -> PanelDetector:
    """Once in each process: some load models. `model`: minder's."""
    from rolecall.detector.panels.registry import detector

    return detector(name, false_alarms_per_1000_machine_days=asked, model=model if name == "minder" else None)


def judge(task: SimulatedTask, wanted: Sequence[tuple[str, float]], model: Path | None) -> list[Outcome]:
    """What a worker does with one task."""
    seen = watch(task, [made(name, asked, model) for name, asked in wanted])
    return [
        score(task, alarms, detector=name, asked=asked, cpu_seconds=spent)
        for (name, asked), (alarms, spent) in zip(wanted, seen, strict=True)
    ]


def within(budget: float, seed: int, num_tasks: int, num_healthy: int) -> int:
    """The largest number of machines with which the fleet takes at most `budget` machine-seconds; 0: no limit."""
    low, high = NUM_MACHINES_MIN, NUM_MACHINES_MAX
    while budget and low < high:
        middle = (low + high + 1) // 2
        tasks = fleet(seed=seed, num_tasks=num_tasks, num_healthy=num_healthy, num_machines_max=middle)
        if sum(t.num_machines * t.num_ticks for t in tasks) <= budget:
            low = middle
        else:
            high = middle - 1
    return high


def run(
    tasks: Sequence[SimulatedTask],
    wanted: Sequence[tuple[str, float]],
    model: Path | None,
    workers: int,
    say: Callable[[str], None],
) -> list[list[Outcome]]:
    """Outcomes of all tasks, by (detector, asked rate)."""
    total = sum(t.num_machines * t.num_ticks for t in tasks)
    done, began = 0, time.monotonic()
    outcomes: list[list[Outcome]] = []
    with ProcessPoolExecutor(workers) as pool:
        # The largest first: at the end small ones fill both cores.
        waiting = {
            pool.submit(judge, t, wanted, model): t for t in sorted(tasks, key=lambda t: -t.num_machines * t.num_ticks)
        }
        try:
            for future in as_completed(waiting, timeout=RUN_SECONDS_MAX):
                outcomes.append(future.result())
                done += waiting[future].num_machines * waiting[future].num_ticks
                say(
                    f"{len(outcomes)}/{len(tasks)} tasks, {100 * done / total:.0f} % of the work, "
                    f"{time.monotonic() - began:.0f} s"
                )
        except BaseException:  # Ctrl-C, too: what has not begun is not begun, and the error goes on
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes.sort(key=lambda of_task: of_task[0].task.index)
    return [[of_task[i] for of_task in outcomes] for i in range(len(wanted))]
