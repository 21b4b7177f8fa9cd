"""Numbers of one run, from its events."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.recovery.ettr.schedule import NUM_ROLLOUTS, NUM_TRAINERS
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.views.ettr import Loss, charges, ettr, losses, steps, training_began
from rolecall.views.incidents import InjectedFault, summarize_incidents
from rolecall.views.lifetimes import IncarnationRecord, Key
from rolecall.views.phases import Commits, lost_by_phase, recovery_phases

ENDED_SECONDS = 60.0
"""What is reported of a cluster within so long after it was ended is about that end."""


def measured(
    events: Sequence[Event],
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    killed_at: Sequence[float],
) -> dict[str, Any]:
    """Numbers of one run. `killed_at`: cold restarts, wall seconds; what is reported of a cluster that was ended on
    purpose is no false alarm. Empty if no step was committed."""
    committed, began = steps(events), training_began(events)
    if not committed or began is None:
        return {}
    end = committed[-1].at
    joined = summarize_incidents(events, known, faults)
    lost = cold_losses(known, faults, killed_at, end) if killed_at else losses(joined, end)
    every = [e.as_(StepCommitted) for e in events if e.kind is EventKind.STEP_COMMITTED]
    shares = partial(ettr, began, end, lost, num_rollouts=NUM_ROLLOUTS, num_trainers=NUM_TRAINERS)
    charged = list(charges(lost, began, end, num_rollouts=NUM_ROLLOUTS, num_trainers=NUM_TRAINERS))
    gaps = [b.at - a.at for a, b in pairwise(committed)]
    pace = statistics.median(gaps) if gaps else end - began
    commits_at = [(e.wall_at, e.as_(StepCommitted).step) for e in events if e.kind is EventKind.STEP_COMMITTED]
    alarms = [s.incident for s in joined.summaries if s.incident.incident_id in joined.false_alarms]
    alarms = [a for a in alarms if not any(kill <= a.opened_at <= kill + ENDED_SECONDS for kill in killed_at)]
    commits, recoveries = Commits(events), []
    for fault in faults:
        summary = next((s for s in joined.summaries if s.fault == fault), None)
        if summary is None:
            continue
        kill = next((at for at in killed_at if at > fault.injected_at), None)
        started = kill if kill is not None else summary.incident.action_started_at
        made = (
            [r for r in summary.replacements if r.replica.partition("/")[0] in ("trainer", "rollout")]
            if kill is None
            else [r for r in known.values() if _is_made_after(r, kill, killed_at)]
        )
        phases = recovery_phases(
            began_at=fault.injected_at,
            detected_at=summary.detected_at,
            started_at=started,
            made=made,
            commits=commits,
            incident_id=summary.incident.incident_id,
        )
        role, _, index = fault.target.partition("/")
        recovery: dict[str, Any] = {
            "role": role,
            "replica": int(index),
            "step": position(began, commits_at, pace, fault.injected_at),
        }
        served = [r.serving_at - started for r in made if r.serving_at is not None] if started is not None else []
        recovery["away"] = round(statistics.fmean(served), 3) if served else None
        recovery["lost"] = {phase: round(seconds, 1) for phase, seconds in lost_by_phase(charged, phases).items()}
        recoveries.append({**recovery, **phases.to_dict()})
    return {
        "num_steps": len(committed),
        "seconds_to_n": end - began,
        "ettr": shares(count_rollouts=False),
        "ettr_with_rollouts": shares(),
        "step_seconds": pace,
        "rewards": [[round(s.at - began, 1), round(s.reward, 4)] for s in committed if math.isfinite(s.reward)],
        "tokens_trained": sum(s.num_tokens for s in committed),
        "tokens_trained_again": sum(c.tokens for c in every) - sum(s.num_tokens for s in committed),
        "steps_trained_again": len(every) - len(committed),
        "num_faults": len(faults),
        "num_missed": len(joined.missed),
        "false_alarms": len(alarms),
        "false_alarms_about": [a.diagnosis.because[:80] for a in alarms],
        "killed_at": list(killed_at),
        "recoveries": recoveries,
    }


def position(began: float, commits: Sequence[tuple[float, int]], step_seconds: float, at: float) -> float:
    """Steps done at `at`: 20.5 is the middle of step 20, counted from 0. `commits`: (wall seconds, step) of all, those
    of steps that were undone later included."""
    last, done = max(((t, step + 1) for t, step in commits if t <= at), default=(began, 0))
    return round(done + min(0.99, (at - last) / step_seconds), 3)


def _is_made_after(record: IncarnationRecord, kill: float, killed_at: Sequence[float]) -> bool:
    following = min((at for at in killed_at if at > kill), default=float("inf"))
    return record.role in ("trainer", "rollout") and kill < (record.starting_at or 0.0) < following


def cold_losses(
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    killed_at: Sequence[float],
    end: float,
) -> list[Loss]:
    """From a fault to the kill the replica is lost, as in the project's accounting; then every replica until it serves
    again."""
    replicas = [f"trainer/{n}" for n in range(NUM_TRAINERS)] + [f"rollout/{n}" for n in range(NUM_ROLLOUTS)]
    found = []
    for kill in killed_at:
        hit = [f for f in faults if f.injected_at < kill][-1:]
        found += [Loss(replica=r, since=f.injected_at, until=kill, stalled_until=kill) for f in hit for r in f.hit]
        for replica in replicas:
            at = [r.serving_at for r in known.values() if r.replica == replica and r.serving_at is not None]
            until = min((t for t in at if kill < t < end), default=end)
            found.append(Loss(replica=replica, since=kill, until=until, stalled_until=until, by_restart=True))
    return found
