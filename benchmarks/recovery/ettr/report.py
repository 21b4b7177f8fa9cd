"""The report of result lines, with the simulator's own numbers of the same runs."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks import common
from benchmarks.recovery.ettr.schedule import ARMS, NUM_ROLLOUTS, NUM_TRAINERS, ROLES
from rolecall.simulate.faults import StageSeconds
from rolecall.simulate.measured import MeasuredFault, MeasuredRun, simulate_measured
from rolecall.simulate.settings import ARMS as SIMULATOR_ARMS
from rolecall.simulate.simulator import Account
from rolecall.views.phases import PHASES

SIMULATED = {"role": "replica", "warm": "restart_warm", "cold": "restart_cold"}
"""Arm here -> arm of the simulator."""
REWARD_SHARES, REWARD_STEPS = (0.25, 0.5, 0.75, 1.0), 5


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """`median (least to most)`; of one value, itself."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    least, most = (f"{v:.{digits}f}" for v in (min(known), max(known)))
    return f"{statistics.median(known):.{digits}f} ({least} to {most})"


def simulated(line: Mapping[str, Any], free: Mapping[str, Any]) -> Account | None:
    """The run as the simulator computes it from the run without faults, the moments of the faults and the times of the
    recoveries' stages. None: a stage was not measured.

    A restart of the job leaves trainers without trajectories: `fill` is what the interrupted step took longer after it
    than a step takes. Both sides count as the report does: after a trainer's fault no trainer until the commit (the
    cold arm: until it serves again).
    """
    arm, step_seconds = line["arm"], free["seconds_to_n"] / free["num_steps"]
    faults = []
    for r in line["recoveries"]:
        if None in (r["detect"], r["decide"], r["restart"], r["reconnect"], r["away"], r["whole"]):
            return None
        restart = r["restart"] + r["reconnect"] if arm == "role" else r["away"]
        fill = 0.0 if arm == "role" else max(0.0, r["whole"] - r["detect"] - r["decide"] - restart - step_seconds)
        stages = StageSeconds(detect=r["detect"], decide=r["decide"], restart=restart, fill=fill)
        fault = MeasuredFault(
            step=r["step"], role=r["role"], replica=r["replica"], stages=stages, until_commit=arm != "cold"
        )
        faults.append(fault)
    run = MeasuredRun(
        num_steps=line["num_steps"],
        step_seconds=step_seconds,
        num_trainers=NUM_TRAINERS,
        num_rollouts=NUM_ROLLOUTS,
        faults=faults,
        checkpoint_every_steps=line["settings"]["checkpoint_every"],
    )
    return simulate_measured(run, SIMULATOR_ARMS[SIMULATED[arm]])


def step_of(lines: Sequence[Mapping[str, Any]], like: Mapping[str, Any]) -> float | None:
    """Seconds of a step without faults, of the runs with these settings."""
    free = [x["step_seconds"] for x in lines if x["arm"] == "none" and x["settings"] == like["settings"]]
    return statistics.median(free) if free else None


def free_of(lines: Sequence[dict[str, Any]], like: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run without faults of the same seed and settings."""
    same = (x for x in lines if x["arm"] == "none")
    return next((x for x in same if (x["seed"], x["settings"]) == (like["seed"], like["settings"])), None)


def report(lines: Sequence[dict[str, Any]], of_commit: str) -> list[str]:
    shared = {name: value for name, value in lines[0]["settings"].items() if name != "microbatches"}
    config = ", ".join(f"{name} {value:g}" for name, value in shared.items())
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    sizes = sorted({x["settings"].get("microbatches", 0) for x in lines})
    about = f"{NUM_TRAINERS} trainers, {NUM_ROLLOUTS} rollouts, {config}, microbatches {', '.join(map(str, sizes))}"
    text = common.header("ETTR: a replica replaced, or the whole job restarted", about, seeds, of_commit)
    good = [x for x in lines if x["ok"]]
    text += [
        (
            "Median (least to most) over runs. Step: without faults. ETTR: the paper's formula; with rollouts: a lost "
            "rollout counts too. Tokens beyond: generated beyond the same seed's run without faults. Trained again: "
            "counts as effective."
        ),
        "",
        (
            "| step, s | steps with a fault | of | arm | runs | faults | ETTR | with rollouts | s to N steps "
            "| longer than without, % | tokens beyond | tokens trained again | steps trained again |"
        ),
        "|---" * 13 + "|",
    ]
    for percent, roles, arm, group in _groups(good):
        pairs = [(x, free) for x in group if (free := free_of(good, x)) is not None]
        longer = [100 * (x["seconds_to_n"] / free["seconds_to_n"] - 1) for x, free in pairs]
        beyond = [x["tokens_generated"] - free["tokens_generated"] for x, free in pairs]
        step = step_of(good, group[0])
        text.append(
            f"| {'-' if step is None else f'{step:.1f}'} | {f'{percent:g} %' if percent else '-'} | {roles or '-'} "
            f"| {arm} | {len(group)} "
            f"| {sum(x['num_faults'] for x in group)} | {spread([x['ettr'] for x in group], 3)} "
            f"| {spread([x['ettr_with_rollouts'] for x in group], 3)} | {spread([x['seconds_to_n'] for x in group])} "
            f"| {spread(longer)} | {spread(beyond, 0)} | {spread([x['tokens_trained_again'] for x in group], 0)} "
            f"| {spread([x['steps_trained_again'] for x in group], 0)} |"
        )
    text += _recoveries(good) + _lost(good) + _rewards(good) + _simulations(good)
    for what, key in (("Faults not hit in time", "num_skipped"), ("Faults not found", "num_missed")):
        text += ["", f"{what}: {sum(x[key] for x in good)}."]
    about_what = sorted({words for x in good for words in x.get("false_alarms_about", ())})
    text += [
        "",
        f"False alarms: {sum(x['false_alarms'] for x in good)}{': ' if about_what else ''}{'; '.join(about_what)}.",
    ]
    text += ["", f"Audit holds in {sum(bool(x.get('audit_ok')) for x in good)} of {len(good)} runs."]
    failures = [x for x in lines if not x["ok"]]
    return text + [line for x in failures for line in ("", f"Failed: {x['run_id']}, exit code {x['exit_code']}.")]


def _lost(good: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    steps = sorted({step for x in good if (step := step_of(good, x)) is not None})
    for step, arm, role in product(steps, ARMS[1:], ROLES["both"]):
        runs = [x for x in good if x["arm"] == arm and step_of(good, x) == step]
        found = [r["lost"] for x in runs for r in x["recoveries"] if r["role"] == role and "lost" in r]
        if found:
            cells = [spread([r.get(phase) for r in found]) for phase in PHASES]
            together = spread([sum(r.values()) for r in found])
            rows.append(f"| {step:.1f} | {arm} | {role} | {len(found)} | {' | '.join(cells)} | {together} |")
    about = (
        "Of a fault, by the phase in which they were lost; healthy replicas that wait or are restarted count, too, and "
        "work that is done again does not, as in ETTR. A replica is one process here: they stand for GPU-seconds."
    )
    heads = ["step, s", "arm", "killed", "n", *PHASES, "together"]
    return _section("Replica-seconds lost", about, heads, rows)


def _rewards(good: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for percent, _, arm, group in _groups(good):
        pairs = [(x, free) for x in group if x.get("rewards") and (free := free_of(good, x)) is not None]
        if not pairs:
            continue
        cells = []
        for share in (*REWARD_SHARES, math.inf):
            until = [[r for at, r in x["rewards"] if at <= share * free["seconds_to_n"]] for x, free in pairs]
            means = [statistics.fmean(rewards[-REWARD_STEPS:]) if rewards else None for rewards in until]
            cells.append(f"{spread(means, 3)}; {spread([float(len(rewards)) for rewards in until], 0)}")
        step = step_of(good, group[0])
        size, faults = "-" if step is None else f"{step:.1f}", f"{percent:g} %" if percent else "-"
        rows.append(f"| {size} | {faults} | {arm} | {len(pairs)} | {' | '.join(cells)} |")
    about = (
        f"Mean reward of the newest {REWARD_STEPS} steps, and the number of steps done: at shares of the time that the "
        "same seed's run without faults took, and at the run's own end."
    )
    at = [f"at {100 * share:.0f} %" for share in REWARD_SHARES]
    return _section("Reward over wall time", about, ["step, s", "steps with a fault", "arm", "runs", *at, "end"], rows)


def _section(title: str, about: str, heads: Sequence[str], rows: Sequence[str]) -> list[str]:
    """Nothing without rows: older lines lack what these are made of."""
    head = ["", f"## {title}", "", about, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*head, *rows] if rows else []


def _recoveries(good: Sequence[dict[str, Any]]) -> list[str]:
    text = [
        "",
        "## Recoveries",
        "",
        "Seconds. Whole: from the fault until the step that it interrupted is committed.",
        "",
        "| step, s | arm | killed | n | " + " | ".join(PHASES) + " | whole | whole / step |",
        "|---" * (len(PHASES) + 6) + "|",
    ]
    steps = sorted({step for x in good if (step := step_of(good, x)) is not None})
    for step in steps:
        for arm in ARMS[1:]:
            for role in ROLES["both"]:
                runs = [x for x in good if x["arm"] == arm and step_of(good, x) == step]
                found = [r for x in runs for r in x["recoveries"] if r["role"] == role]
                if found:
                    whole = [r["whole"] for r in found]
                    ratio = [w / step for w in whole if w is not None]
                    cells = [spread([r[phase] for r in found], 2) for phase in PHASES]
                    text.append(
                        f"| {step:.1f} | {arm} | {role} | {len(found)} | {' | '.join(cells)} | {spread(whole)} "
                        f"| {spread(ratio, 2)} |"
                    )
    return text


def _simulations(good: Sequence[dict[str, Any]]) -> list[str]:
    """Each run beside what the simulator makes of its faults and stage times."""
    rows = []
    for x in sorted(good, key=lambda x: (x["settings"].get("microbatches", 0), x["seed"], ARMS.index(x["arm"]))):
        free = free_of(good, x)
        account = simulated(x, free) if free is not None and x["arm"] != "none" else None
        if account is not None and free is not None:
            points = 100 * (account.ettr_of_paper - x["ettr"])
            rows.append(
                f"| {free['step_seconds']:.1f} | {x['percent']:g} % | {x['seed']} | {x['arm']} | {x['ettr']:.3f} "
                f"| {account.ettr_of_paper:.3f} | {points:+.1f} | {x['seconds_to_n']:.1f} | {account.seconds:.1f} |"
            )
    if not rows:
        return []
    return [
        "",
        "## The simulator on these runs",
        "",
        (
            "`rolecall simulate` with the step time of the run without faults, the moments of the faults and the "
            "measured times of the stages (of a restart also how long trainers wait for the first trajectories)."
        ),
        "",
        "| step, s | percent | seed | arm | ETTR measured | simulated | points | s to N steps measured | simulated |",
        "|---" * 9 + "|",
        *rows,
    ]


def _groups(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[float, str, str, list[dict[str, Any]]]]:
    found: dict[tuple[float, float, str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        size = line["settings"].get("microbatches", 0)
        found[size, -line["percent"], line["roles"], ARMS.index(line["arm"])].append(line)
    for (_, percent, roles, arm), group in sorted(found.items()):
        yield -percent, roles, ARMS[arm], group
