"""The report: each system by itself, then rolecall and the others side by side."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.recovery.chaos.lines import LINES as CHAOS_LINES
from benchmarks.recovery.chaos.schedule import counted
from benchmarks.recovery.peers.jobs import NUM_REPLICAS
from benchmarks.recovery.peers.run import DEADLINE_SECONDS, LINES
from benchmarks.recovery.peers.schedule import ROLE, SYSTEMS, kinds, left_out

Line = Mapping[str, Any]
NAMES = {"torchft": "torchft", "ray-train": "Ray Train"}
ABOUT = (
    f"Seconds from the injection; a fault had {DEADLINE_SECONDS:g} s to be found and cured. Found: the first line by "
    "which the system says that something is wrong. Named right: its lines name the worker that was hit, by rank or "
    "PID, and no other, with words that fit the fault. Cured: every rank makes steps with a finite loss again, the hit "
    "one in a new process. Innocent: processes of workers that were not hit and are gone. Lost: steps done again or "
    "discarded. Stall: the longest time without a step of the workers that were not hit."
)


def report(lines: Sequence[Line], chaos: Sequence[Line]) -> Iterator[str]:
    """`lines`: of the other systems; `chaos`: rolecall's, of all roles."""
    yield ABOUT
    yield ""
    injected = [x for x in lines if x["line"] == "fault" and x["injected"]]
    for system in SYSTEMS:
        of_system = [x for x in injected if x["system"] == system]
        versions = ", ".join(sorted({x["version"] for x in of_system}))
        yield from (f"## {NAMES[system]} {versions}".rstrip(), "")
        head = ("fault", "n", "named right", "found", "cured", "innocent", "lost steps", "stall")
        yield from common.table(head, [_row(name, [x for x in of_system if x["name"] == name]) for name in kinds()])
        for x in of_system:
            yield f"- {x['seed']}/{x['number']}, {x['name']}, {x['target']}: " + (
                f"`{x['quote'].replace('`', chr(39))}`" if x["quote"] else "nothing was said"
            )
        for x in lines:
            if x["system"] == system and not x["injected"]:
                yield f"- not injected: {x['seed']}/{x['number']}, {x['name']}: {x['reason']}"
        yield ""
    yield from ("## Side by side", "")
    yield from side_by_side(
        injected, [x for x in counted(chaos).values() if x["injected"] and x["met"] and x["role"] == ROLE]
    )
    yield from ("## Not in the schedule", "")
    yield from (f"- {name}: {reason}" for name, reason in left_out())


def _row(name: str, group: Sequence[Line]) -> list[str]:
    if not group:
        return [name, "0", *["-"] * 6]
    return [
        name,
        str(len(group)),
        str(sum(x["named"] for x in group)),
        *(_times(group, key) for key in ("found_seconds", "cured_seconds")),
        str(sum(x["innocent"] for x in group)),
        *(common.summary([x[key] for x in group], digits) for key, digits in (("lost_steps", 0), ("stall_seconds", 1))),
    ]


def _times(group: Sequence[Line], key: str) -> str:
    """`median (worst; n)` of those in time, and how many were not."""
    values = [x[key] for x in group if x[key] is not None]
    late = len(group) - len(values)
    return ", ".join([*([common.summary(values, 1)] if values else []), *([f"not: {late}"] if late else [])])


def side_by_side(injected: Sequence[Line], chaos: Sequence[Line]) -> list[str]:
    """A row of each kind of fault, a column of each system: named right, found and cured, innocent."""
    columns: list[Sequence[Line]] = [chaos, *([x for x in injected if x["system"] == s] for s in SYSTEMS)]
    rows = [[name, *(_cell([x for x in column if x["name"] == name]) for column in columns)] for name in kinds()]
    return common.table(["fault", "rolecall", *(NAMES[s] for s in SYSTEMS)], rows)


def _cell(group: Sequence[Line]) -> str:
    if not group:
        return "not measured"
    parts = [f"named {sum(x['named'] for x in group)}/{len(group)}"]
    for word, key in (("found", "found_seconds"), ("cured", "cured_seconds")):
        values = [x[key] for x in group if x[key] is not None]
        middle = f" {statistics.median(values):.1f} s" if values else ""
        share = "" if len(values) == len(group) and values else f" {len(values)}/{len(group)}"
        parts.append(f"{word}{share}{middle}" if values else f"not {word}")
    num_innocent = sum(x["innocent"] if isinstance(x["innocent"], int) else len(x["innocent"]) for x in group)
    return ", ".join([*parts, f"innocent {num_innocent}"])


def write_report(note: str = "") -> int:
    """`note`: on the circumstances, which the lines do not tell."""
    lines = common.read_lines(LINES)
    seeds = ", ".join(sorted({str(x["seed"]) for x in lines}))
    config = f"{NUM_REPLICAS} workers, gloo on CPU, each system's own timeouts" + (f"; {note}" if note else "")
    commits = ", ".join(sorted({x["commit"] for x in lines}))
    text = common.header("Chaos in other systems", config, seeds, commits)
    common.publish("chaos_peers", [*text, *report(lines, common.read_lines(CHAOS_LINES))])
    return 0
