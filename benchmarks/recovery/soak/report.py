"""The soak's report, made from its result lines alone: each measured time beside the bar it must stay under.

A line is one run (`run.py` makes it). Lines of one commit make one table; all lines together give the counts that add
up: runs, hours without a fault, findings in them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from benchmarks.intervals import poisson_upper

Line = Mapping[str, Any]
Incident = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A time of an incident, and the seconds that it may take."""

    what: str
    field: str
    seconds_max: float


FINDING = "fault to finding"
BARS: dict[str, tuple[Bar, ...]] = {
    "rollout-kill": (
        Bar(FINDING, "detected_seconds", 1.0),
        Bar("fault to its requests going on elsewhere", "requests_moved_seconds", 2.0),
        Bar("finding to replacement serving with proof, warm standby", "resolved_warm_seconds", 3.0),
        Bar("finding to replacement serving with proof, cold", "resolved_cold_seconds", 30.0),
    ),
    "trainer-hang": (
        Bar(FINDING, "detected_seconds", 5.0),
        Bar("finding to interrupted step committed", "step_committed_seconds", 3.0),
        Bar("finding to replica rejoined", "resolved_seconds", 15.0),
    ),
    "rollout-slow": (
        Bar(FINDING, "detected_seconds", 30.0),
        Bar("finding to replacement serving with proof", "resolved_seconds", 30.0),
    ),
}
"""Of the issue that asks for them."""
OTHER_BARS = (
    Bar(FINDING, "detected_seconds", math.inf),
    Bar("finding to replacement at work", "resolved_seconds", math.inf),
)
COLD_SETTING = "runtime.standbys=0"
"""Of the job in which no rollout is kept warm."""
SUBKINDS_OF = ("trainer-hang", "rollout-hang", "rollout-slow", "trainer-slow")
"""Kinds whose ways of happening are told apart."""


def incidents_by_kind(lines: Sequence[Line]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for incident in line["incidents"]:
            if incident.get("fault"):
                resolved = {
                    "resolved_cold_seconds" if _is_cold(incident) else "resolved_warm_seconds": incident[
                        "resolved_seconds"
                    ]
                }
                found[incident["fault"]["kind"]].append({**incident, **resolved})
    return dict(sorted(found.items()))


def _is_cold(incident: Incident) -> bool:
    return not any(r["from_standby"] for r in incident.get("replacements", ()))


def _missed(lines: Sequence[Line], kind: str, how: str | None = None) -> int:
    """Injected and never found: these count against a bar as much as a late finding."""
    return sum(f["kind"] == kind and how in (None, f.get("how")) for line in lines for f in line["missed"])


def bars(lines: Sequence[Line]) -> Iterator[str]:
    """One row a time and a way of happening, with its bar."""
    yield "| fault | named right | time, s | n | median | spread (P25 to P75) | worst | bar | met |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for kind, found in incidents_by_kind(lines).items():
        groups = [(kind, found, _missed(lines, kind))]
        if kind in SUBKINDS_OF:
            for how in sorted({i["fault"]["how"] for i in found}):
                chosen = [i for i in found if i["fault"]["how"] == how]
                groups.append((f"{kind}, {how}", chosen, _missed(lines, kind, how)))
        for name, group, missed in groups:
            yield from _rows(name, BARS.get(kind, OTHER_BARS), group, missed)
    for kind in sorted({f["kind"] for line in lines for f in line["missed"]} - set(incidents_by_kind(lines))):
        yield f"| {kind} | 0 of {_missed(lines, kind)} | - | 0 | - | - | - | - | **no** |"


def _rows(name: str, wanted: Sequence[Bar], group: Sequence[Incident], missed: int) -> Iterator[str]:
    named = f"{sum(bool(i['diagnosed_correctly']) for i in group)} of {len(group) + missed}"
    for bar in wanted:
        values = [float(i[bar.field]) for i in group if i.get(bar.field) is not None]
        if not values:
            continue
        median, low, high = common.middle_and_spread(values)
        met = "yes" if max(values) <= bar.seconds_max and not missed else "**no**"
        limit = f"{bar.seconds_max:g}" if math.isfinite(bar.seconds_max) else "-"
        yield (
            f"| {name} | {named} | {bar.what} | {len(values)} | {median:.2f} | {low:.2f} to {high:.2f} | "
            f"{max(values):.2f} | {limit} | {met if limit != '-' else '-'} |"
        )


def work_lost(lines: Sequence[Line]) -> Iterator[str]:
    found = [i for line in lines for i in line["incidents"] if i.get("fault")]
    audits = [line["audit"] for line in lines if line.get("audit")]
    faultless = sum(bool(line.get("microbatches_failure_free")) for line in lines)
    known = sum(line.get("microbatches_failure_free") is not None for line in lines)
    rows = {
        "tokens made and not yet streamed when their engine died": (sum(i["tokens_lost"] for i in found), None),
        "streamed tokens that went on elsewhere": (sum(i["tokens_kept"] for i in found), None),
        "prompt groups unaccounted for": (sum(a["unaccounted"] for a in audits), 0),
        "prompt groups trained on twice": (sum(a["duplicates"] for a in audits), 0),
        "prompt groups dropped before the end of their run": (sum(dropped_in_run(a) for a in audits), 0),
        "steps lost": (sum(i["steps_lost"] for i in found), 0),
        "runs whose set of (step, microbatch) is not the failure-free one": (known - faultless, 0),
        "runs whose audit does not hold": (sum(not (x.get("audit") or {}).get("ok") for x in lines), 0),
        "runs in which a process that no plan named lost its PID": (sum(not x["pids_kept"] for x in lines), 0),
        "injected faults without a finding": (sum(len(x["missed"]) for x in lines), 0),
        "findings without a fault": (sum(len(x["false_alarms"]) for x in lines), 0),
        "runs with an exit code other than 0": (sum(bool(x["exit_code"]) for x in lines), 0),
    }
    yield f"| over {len(lines)} runs | count | bar | met |"
    yield "|---|---|---|---|"
    for what, (count, limit) in rows.items():
        met = "-" if limit is None else "yes" if count <= limit else "**no**"
        yield f"| {what} | {count} | {'-' if limit is None else limit} | {met} |"


def dropped_in_run(audit: Mapping[str, Any]) -> int:
    """Groups given up for another reason than that the run was over."""
    return int(audit["groups_dropped"]) - int(audit.get("dropped_by_reason", {}).get("run_ended", 0))


def pace(lines: Sequence[Line]) -> Iterator[str]:
    """ETTR and seconds to N steps of runs with faults, beside the failure-free run's."""
    yield "| seed | faults | ETTR | failure-free | steps | seconds to them | failure-free | reward, first to last |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        if line["faults"] == "none":
            continue
        to_n = line.get("seconds_to_n_steps") or {}
        standbys = ", no standby" if COLD_SETTING in line.get("settings", ()) else ""
        rewards = f"{_text(line.get('reward_first'))} to {_text(line.get('reward_last'))}"
        yield (
            f"| {line['seed']} | {line['faults']}{standbys} | {_text(line.get('ettr'), 3)} | "
            f"{_text(line.get('ettr_baseline'), 3)} | "
            f"{_text(to_n.get('n'), 0)} | {_text(to_n.get('this'), 1)} | {_text(to_n.get('baseline'), 1)} | {rewards} |"
        )
    ettrs = [x["ettr"] for x in lines if x["faults"] != "none" and x.get("ettr") is not None]
    if ettrs:
        median, low, high = common.middle_and_spread(ettrs)
        yield ""
        yield (
            f"ETTR: median {median:.3f}, {low:.3f} to {high:.3f} (P25 to P75), worst {min(ettrs):.3f}, n={len(ettrs)}."
        )


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def failure_free(by_commit: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Findings per hour without a fault, by commit and in all."""
    yield (
        "| commit | runs | with exit code 0 | failure-free runs | hours | findings in them | 95 % upper bound, per "
        "hour |"
    )
    yield "|---|---|---|---|---|---|---|"
    total = [line for lines in by_commit.values() for line in lines]
    for name, lines in [*by_commit.items(), ("all", total)]:
        healthy = [x for x in lines if x["faults"] == "none"]
        hours = sum(x["wall_seconds"] for x in healthy) / 3600
        findings = sum(len(x["false_alarms"]) for x in healthy)
        bound = f"{poisson_upper(findings) / hours:.2f}" if hours else "-"
        good = sum(x["exit_code"] == 0 for x in lines)
        yield f"| {name} | {len(lines)} | {good} | {len(healthy)} | {hours:.2f} | {findings} | {bound} |"


def report(lines: Sequence[Line], by_commit: Mapping[str, Sequence[Line]]) -> list[str]:
    """`lines`: of the commit that is measured. `by_commit`: all there are."""
    parts: list[tuple[str, Iterator[str]]] = [
        ("Times", bars(lines)),
        ("What was lost", work_lost(lines)),
        ("Training beside the failure-free run", pace(lines)),
        ("False alarms, all results so far", failure_free(by_commit)),
    ]
    told: list[str] = []
    for title, rows in parts:
        told += [f"## {title}", "", *rows, ""]
    return told
