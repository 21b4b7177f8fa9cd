"""Results of `rolecall simulate run` and `rolecall doctor JOB --plan` as text. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolecall.core.text import counted, plain, seconds
from rolecall.simulate.plan import EVERY_STEPS, FleetPlan
from rolecall.simulate.settings import SimulationSettings
from rolecall.simulate.standbys import standbys
from rolecall.simulate.study import ArmResult, Costs, Estimate, Interval
from rolecall.terminal.console import SOFT, STRONG

ARM_TEXTS = {
    "replica": "the replica at fault alone is replaced, as rolecall does",
    "role": "all trainers restart, or one rollout",
    "restart_warm": "the whole job restarts in place",
    "restart_cold": "the whole job is queued and started again",
}
"""Of the arms in the default settings."""


def comparison(
    settings: SimulationSettings, num_seeds: int, results: Sequence[ArmResult], costs: Mapping[str, Costs]
) -> RenderableType:
    """ETTR and goodput of each arm, where its GPU-hours went, and `costs` if there are any. Loads: of checkpoints."""
    parts: list[RenderableType] = [*_head(settings, num_seeds), Text()]
    parts += [_shares(results), Text(), Text("GPU-hours lost, mean of the runs", STRONG), _lost(results)]
    for name, answer in costs.items():
        parts += [Text(), Text(plain(name), STRONG), *_costs(answer)]
    if costs:
        parts += [Text(), Text("costs: mean of the runs, and the interval of 95 % in which it lies", SOFT)]
    return Group(*parts)


def plan(found: FleetPlan) -> RenderableType:
    """Standbys, then one row for each arm."""
    parts: list[RenderableType] = [*_head(found.settings, found.num_seeds), Text()]
    table = _made_table("arm", "checkpoint", "by Young", "by Daly", "ETTR, %", "goodput, %")
    for name, arm in found.arms.items():
        table.add_row(
            Text(plain(name)),
            counted(arm.every_steps, "step"),
            *(seconds(value, "not loaded") for value in (arm.young_seconds, arm.daly_seconds)),
            _percents(arm.expected.ettr),
            _percents(arm.expected.goodput),
        )
    notes = (
        *(f"{name}: {text}" for name, text in ARM_TEXTS.items() if name in found.arms),
        "standby machines: the 99th percentile of the machines lost on a day, where the settings give no number",
        f"checkpoint: of periods of {', '.join(map(str, EVERY_STEPS))} steps the one that loses least in simulation",
        "by Young, by Daly: work between checkpoints, from how often one was loaded",
    )
    return Group(*parts, table, *(Text(note, SOFT) for note in notes))


def _head(settings: SimulationSettings, num_seeds: int) -> Iterable[Text]:
    sizes = [
        f"{counted(size.replicas, role)} of {counted(size.gpus_per_replica, 'GPU')}"
        for role, size in (("trainer", settings.trainer), ("rollout", settings.rollout))
        if size.replicas
    ]
    yield Text(f"{counted(settings.gpus, 'GPU')}, {settings.mode}: {', '.join(sizes)}", STRONG)
    yield Text(
        f"{counted(num_seeds, 'run')} of {settings.days:g} days, steps of {seconds(settings.step_seconds)}; median and "
        "the interval that holds 95 % of the runs"
    )
    pool = [f"{n} for {role}s" for role, n in standbys(settings).items() if n]
    yield Text(f"standby machines: {', '.join(pool) or 'none'}")


def _made_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _shares(results: Sequence[ArmResult]) -> Table:
    table = _made_table("arm", "ETTR, %", "goodput, %", "faults", "loads")
    for row in results:
        numbers = f"{row.num_faults.median:,.0f}", f"{row.num_checkpoint_loads:,.1f}"
        table.add_row(Text(plain(row.arm)), _percents(row.ettr), _percents(row.goodput), *numbers)
    return table


def _percents(found: Interval) -> str:
    return f"{100 * found.median:.2f} ({100 * found.low:.2f} to {100 * found.high:.2f})"


def _lost(results: Sequence[ArmResult]) -> Table:
    """One column for each arm, so that it fits into 80 columns."""
    table = _made_table("", *(plain(row.arm) for row in results))
    uses = list(results[0].lost_gpu_hours) if results else []
    for use in uses:
        table.add_row(use, *(f"{row.lost_gpu_hours[use]:,.0f}" for row in results))
    table.add_row("together", *(f"{sum(row.lost_gpu_hours.values()):,.0f}" for row in results))
    table.add_row("of", *(f"{row.gpu_hours:,.0f}" for row in results))
    table.add_row("standby machines", *(f"{row.standby_gpu_hours:,.0f}" for row in results))
    return table


def _estimate(found: Estimate) -> str:
    value, low, high = (
        "unlimited" if n == math.inf else f"{n:,.0f}" if abs(n) >= 100 else f"{n:.2g}"
        for n in (found.value, found.low, found.high)
    )
    return f"{value} ({low} to {high})"


def _costs(found: Costs) -> Iterable[Text]:
    eviction = found.eviction
    yield Text(f"  a second of detection costs {_estimate(found.detection_gpu_hours_per_day)} GPU-hours a day")
    yield Text(
        f"  evictions by a detector pay up to {_estimate(eviction.per_1000_machine_days)} false alarms per 1,000 "
        f"machine-days: finding silent faults saves {_estimate(eviction.gain_gpu_hours_per_day)} GPU-hours a day, a "
        f"false alarm costs {_estimate(eviction.gpu_hours_per_alarm)}"
    )
    for row in found.standbys:
        sizes = ", ".join(f"{n} for {role}s" for role, n in row.standbys.items())
        yield Text(
            f"  standby machines {sizes}: {row.standby_gpu_hours_per_day:,.0f} GPU-hours a day of their own, "
            f"{_estimate(row.lost_gpu_hours_per_day)} lost by the job"
        )
