"""Which reason stands behind Ray's "actor died": joins what an agent read in Ray's logs to the exit of the process.

The agent reports it within a second of the exit, later on a busy machine (`ray_worker_ended`); until then findings
about exits of Ray's workers are held. What the job itself, or Ray on its behalf, has ended is no crash: `ray.kill`, the
last reference dropped, `exit_actor`, `ray stop`, and the end of the process that created the actor, which is the fault
to look at. Such a process counts as finished, and is reported only if the trainers of its job go on without it
(`uninstrumented`).

Actors of a node whose raylet died are one fault of that node, whatever their number.

Only of jobs that rolecall did not start: its own runtime knows why it ends its actors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.text import plain
from rolecall.detector.base.findings import ADVISES, EXIT, LOG_FILE
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, names, suspect
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.formats.ray_logs import RayReason

DETECTOR = "ray"
RAY = "ray"
"""Kind of the evidence from Ray's logs."""
RAY_WORKER = "ray"
"""Detail of an exit: the process was a child of a raylet."""
WORD_SECONDS = 5.0
"""How long an exit waits for what Ray's logs say about it."""
TEXT_CHARACTERS_MAX = 500
ADVICE = {
    RayReason.CREATION_FAILED: "fix what its __init__ raises: the traceback is in its log; no machine is at fault",
    RayReason.OUT_OF_MEMORY: "give the node more memory or fewer actors, or raise RAY_memory_usage_threshold",
    RayReason.EXITED: "find who calls exit in its code: the stack is in its log",
}


def reason_of(subject: MonitoredProcess) -> RayReason | None:
    """None: it is no worker of Ray, or nothing is known yet."""
    event = subject.ray_event
    return RayReason(event.detail.get("reason", "")) if event is not None else None


def awaits_word(subject: MonitoredProcess, now: float) -> bool:
    """Whether Ray's logs may still say why it has ended."""
    exited = subject.exit_event
    is_worker = subject.foreign and exited is not None and bool(exited.detail.get(RAY_WORKER))
    return is_worker and subject.ray_event is None and now - subject.exit_wall < WORD_SECONDS


class RayDeathsStage(Stage):
    """Runs after the stages that report exits."""

    name = DETECTOR

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        tick.findings = _by_node(tick.fleet, [_explained(tick.fleet, f) for f in tick.findings])
        return []


def _subject(fleet: MonitoredProcesses, found: Finding) -> MonitoredProcess | None:
    """The worker of Ray whose exit it reports."""
    if len(found.suspects) != 1 or not any(e.kind == EXIT for e in found.evidence):
        return None
    (who,) = found.suspects
    here = fleet.roster.of_replica(who.replica).values()
    subject = next((s for s in here if s.process == who.process and s.process is not None), None)
    return subject if subject is not None and subject.ray_event is not None else None


def _explained(fleet: MonitoredProcesses, found: Finding) -> Finding:
    subject = _subject(fleet, found)
    if subject is None or subject.ray_event is None or not subject.foreign:
        return found
    detail, reason = subject.ray_event.detail, reason_of(subject)
    text = plain(detail.get("text", ""), TEXT_CHARACTERS_MAX)
    evidence = [Evidence(kind=RAY, text=plain(detail.get("line") or text, TEXT_CHARACTERS_MAX))]
    own = found.evidence
    if reason is RayReason.OUT_OF_MEMORY:
        own = tuple(replace(e, values={**e.values, "oom": 1.0}) if e.kind == EXIT else e for e in own)
    if (path := detail.get("log_file")) and not any(e.kind == LOG_FILE for e in own):
        evidence.append(Evidence(kind=LOG_FILE, text=path))
    if reason in ADVICE:
        evidence.append(Evidence(kind=ADVISES, text=ADVICE[reason]))
    return replace(found, because=f"{found.because}; {text}", evidence=(*own, *evidence))


def _by_node(fleet: MonitoredProcesses, findings: Iterable[Finding]) -> list[Finding]:
    """Exits of workers whose raylet died are one finding for each node."""
    kept: list[Finding] = []
    lost: dict[str, list[Finding]] = {}
    for found in findings:
        subject = _subject(fleet, found)
        if subject is not None and _is_lost(subject):
            if subject.node not in lost:
                kept.append(found)  # its place
            lost.setdefault(subject.node, []).append(found)
        else:
            kept.append(found)
    merged = {id(group[0]): _lost_node(fleet, node, group) for node, group in lost.items()}
    return [merged.get(id(f), f) for f in kept]


def _is_lost(subject: MonitoredProcess) -> bool:
    return subject.foreign and reason_of(subject) is RayReason.NODE_LOST


def _lost_node(fleet: MonitoredProcesses, node: str, group: Sequence[Finding]) -> Finding:
    """`group`: findings of its workers. Others that ended with them count as consequences and have none."""
    first = min(group, key=lambda f: f.onset)
    workers = sorted((s for s in fleet.roster.gone.values() if s.node == node and _is_lost(s)), key=lambda s: s.key)
    text = next((s.ray_event.detail.get("text", "") for s in workers if s.ray_event is not None), "")
    because = f"{node} has left the Ray cluster, and {names(workers)} ended with it: {plain(text, TEXT_CHARACTERS_MAX)}"
    return replace(
        first,
        detector=DETECTOR,
        fault_class=FaultClass.NODE_LOST,
        suspects=tuple(map(suspect, workers)),
        because=because,
        evidence=tuple(e for f in group for e in f.evidence),
    )
