"""The report of result lines: bars, every cell, every miss."""

import sys
from collections.abc import Iterator, Sequence

from benchmarks import common
from benchmarks.intervals import poisson_upper
from benchmarks.recovery.chaos.lines import Line, read_lines
from benchmarks.recovery.chaos.runs import SETTINGS
from benchmarks.recovery.chaos.schedule import NUM_FAULTS, ROLES, cells, counted, not_there

BARS = (
    "at least 99 % named, all cured; 0 lost, 0 doubled, 0 innocent, 0 in plans that were not hit, 0 false alarms; "
    "24 hours without faults and without an eviction"
)
NAMED_SHARE_MIN, QUIET_HOURS_MIN = 0.99, 24.0


def report(lines: Sequence[Line]) -> Iterator[str]:
    faults = [x for x in counted(lines).values() if x["injected"]]
    pieces = [x for x in lines if x["line"] == "piece"]
    quiet = [x for x in lines if x["line"] == "quiet"]
    audits = [x["audit"] for x in (*pieces, *quiet) if x.get("audit")]
    met = [x for x in faults if x["met"]]
    named = sum(x["named"] for x in met)
    uncured = sum(x["cured_seconds"] is None for x in faults)
    hours = sum(x["wall_seconds"] for x in quiet) / 3600
    evicted = sum(len(x["evicted"]) for x in quiet)
    yield f"Bars: {BARS}."
    yield ""
    yield "| what | measured | bar met |"
    yield "|---|---|---|"
    share = named / len(met) if met else 0.0
    rows = (
        (
            f"faults injected, of {NUM_FAULTS}",
            f"{len(faults)}, of them elsewhere than wanted: {len(faults) - len(met)}",
            len(faults) >= NUM_FAULTS,
        ),
        ("named right, of those where wanted", f"{named} of {len(met)}, {100 * share:.1f} %", share >= NAMED_SHARE_MIN),
        ("faults not cured", f"{uncured}", not uncured),
        *(
            (what, f"{sum(len(x[key]) for x in faults)}", not any(x[key] for x in faults))
            for what, key in (
                ("innocent processes", "innocent"),
                ("replicas in plans that were not hit", "others_in_plans"),
                ("false alarms", "alarms"),
            )
        ),
        ("prompt groups lost", f"{sum(a['unaccounted'] for a in audits)}", not any(a["unaccounted"] for a in audits)),
        ("prompt groups doubled", f"{sum(a['duplicates'] for a in audits)}", not any(a["duplicates"] for a in audits)),
        (
            "audits that hold",
            f"{sum(a['ok'] for a in audits)} of {len(pieces) + len(quiet)} runs",
            len(audits) == len(pieces) + len(quiet) and all(a["ok"] for a in audits),
        ),
        (
            "hours without faults, evictions",
            f"{hours:.2f} h, {evicted}",
            hours >= QUIET_HOURS_MIN and not evicted,
        ),
    )
    for what, value, is_met in rows:
        yield f"| {what} | {value} | {'yes' if is_met else '**no**'} |"
    yield from _table(faults)
    yield from _misses(lines, faults)
    yield from _quiet(quiet)
    yield ""
    yield "## Not in the schedule"
    yield ""
    for name, roles, reason in not_there():
        yield f"- {name}: {'every role' if len(roles) == len(ROLES) else ', '.join(roles)}: {reason}"


def _table(faults: Sequence[Line]) -> Iterator[str]:
    yield ""
    yield "## Faults"
    yield ""
    yield (
        "Seconds from the injection. n, named right, found and cured: of faults where wanted. Elsewhere: those that "
        "did not meet their target in the work to interrupt; the columns after it are of both. In plans: replicas "
        "replaced that were not hit. Alarms: incidents that name anything else. Audit: it held after the fault (groups "
        "lost are known at the end of a piece only)."
    )
    yield ""
    yield "| fault | role | n | named right | found | cured | elsewhere | innocent | in plans | alarms | audit |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name, role, _, _ in cells():
        group = [x for x in faults if (x["name"], x["role"]) == (name, role)]
        if not group:
            yield f"| {name} | {role} | 0 | - | - | - | - | - | - | - | - |"
            continue
        met = [x for x in group if x["met"]]
        found, cured = (
            common.summary([x[key] for x in met if x[key] is not None], 1) for key in ("found_seconds", "cured_seconds")
        )
        sums = " | ".join(str(sum(len(x[key]) for x in group)) for key in ("innocent", "others_in_plans", "alarms"))
        named, held = sum(x["named"] for x in met), sum(not x["problems"] for x in group)
        apart = len(group) - len(met)
        yield f"| {name} | {role} | {len(met)} | {named} | {found} | {cured} | {apart} | {sums} | {held} |"


def _misses(lines: Sequence[Line], faults: Sequence[Line]) -> Iterator[str]:
    yield ""
    yield "## Misses"
    yield ""
    missed = [
        x
        for x in faults
        if not x["met"] or any(x[key] for key in ("reason", "innocent", "others_in_plans", "alarms", "problems"))
    ]
    if not missed:
        yield "None."
    for x in missed:
        parts = [] if x["met"] else ["not injected in the work to interrupt"]
        parts += [x["reason"]] if x["reason"] else []
        parts += [f"innocent: {', '.join(x['innocent'])}"] if x["innocent"] else []
        parts += [f"others in plans: {', '.join(x['others_in_plans'])}"] if x["others_in_plans"] else []
        parts += [f"alarm: {alarm}" for alarm in x["alarms"]] + [f"audit: {problem}" for problem in x["problems"]]
        yield f"- {x['seed']}/{x['number']}, {x['name']}, {x['target']}: {'; '.join(parts)}"
    refused = [x for x in counted(lines).values() if not x["injected"]]
    for x in refused:
        yield f"- not injected: {x['seed']}/{x['number']}, {x['name']}, {x['role']}: {x['reason']}"
    for x in lines:
        if x["line"] == "piece" and (x["failure"] or not (x.get("audit") or {}).get("ok")):
            problems = (x.get("audit") or {}).get("problems", ["no report"])
            said = "; ".join(filter(None, [x["failure"], *problems]))
            yield f"- piece {x['run_id']}, {x['num_injected']} of {x['num_wanted']} faults injected: {said}"


def _quiet(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    hours = sum(x["wall_seconds"] for x in lines) / 3600
    evicted = sum(len(x["evicted"]) for x in lines)
    bound = poisson_upper(evicted) / hours if hours else float("inf")
    yield ""
    yield "## Without faults"
    yield ""
    yield f"{len(lines)} runs, {hours:.2f} hours, {evicted} evictions: at most {bound:.2f} an hour (95 %)."
    for x in lines:
        for said in x["incidents"]:
            yield f"- {x['run_id']}: {said}"


def write_report(commits: Sequence[str]) -> int:
    lines = [x for x in read_lines() if x["commit"] in commits]
    if not lines:
        print(f"no run of commit {', '.join(commits)}", file=sys.stderr)
        return 1
    seeds = ", ".join(sorted({str(x["seed"]) for x in lines}))
    text = common.header("Chaos", f"rolecall demo, {', '.join(SETTINGS)}", seeds, ", ".join(commits))
    text += report(lines)
    common.publish("chaos", text)
    return 0
