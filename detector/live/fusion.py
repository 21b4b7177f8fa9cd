"""Fuses findings into diagnoses: one per fault, with the smallest set of suspects; the same object while it stands.

Rules, in order:
  a finding that continues a standing fault is reported under its diagnosis (`FaultSpec.absorbs`): a hung process that
  exits was killed by an operator or a timeout, which is not a second fault;
  a finding explained by another one is dropped (`FaultSpec.suppresses`): a crashed process is not also slow;
  when more than half of a role is slow at once, comparison with peers is invalid and becomes `cannot_tell`.

Findings of metric panels are the weakest evidence: they are reported only if nothing else explains them
(detector/live/stages/panels.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolecall.core.diagnosis import Diagnosis, Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass, SuppressionScope
from rolecall.detector.base.findings import ADVISES, COLLAPSE, GAIN, OF_GPU, PANEL, SETTLE, settles

ADVICE_ON_PANELS = "inspect it; nothing is replaced for this alone"

Incarnation = tuple[str, int | None]


def fuse(
    findings: list[Finding],
    standing: Mapping[str, Diagnosis],
    role_sizes: Mapping[str, int],
    now: float,
    of_panels: Sequence[Finding] = (),
) -> list[Diagnosis]:
    """`standing`: previous diagnoses by key. `role_sizes`: live replicas per role. `of_panels`: panel findings without
    another explanation."""
    kept = _drop_consequences(_keep_reported(findings, standing))
    kept = _drop_majority_suspects(kept, role_sizes, now)
    told: dict[str, Diagnosis] = {}
    for finding in (*kept, *of_panels):
        diagnosis = to_diagnosis(finding)
        before = standing.get(diagnosis.key, diagnosis)
        if on_panels_alone(before) and not on_panels_alone(diagnosis):
            # The slowdown of a process named by a panel is now measured. Keep the GPU evidence: it may be the cause.
            of_gpus = tuple(e for e in before.evidence if e.kind == OF_GPU)
            before = replace(diagnosis, evidence=(*diagnosis.evidence, *of_gpus))
        told.setdefault(diagnosis.key, before)
    return list(told.values())


def on_panels_alone(d: Diagnosis) -> bool:
    return all(name.startswith(PANEL) for name in d.detectors)


def to_diagnosis(finding: Finding) -> Diagnosis:
    settle = "; ".join(e.text for e in finding.evidence if e.kind == SETTLE)
    gains = [e.values["ratio"] for e in finding.evidence if e.kind == GAIN]
    return Diagnosis(
        suspects=finding.suspects,
        fault_class=finding.fault_class,
        onset=finding.onset,
        detected_at=finding.detected_at,
        confidence=finding.confidence,
        because=finding.because,
        evidence=tuple(e for e in finding.evidence if e.kind not in (SETTLE, GAIN, ADVISES)),
        detectors=(finding.detector,),
        advice=_advice(finding),
        settle=settle,
        gain_ratio=gains[0] if gains else None,
        about=finding.about,
    )


def _advice(finding: Finding) -> str:
    if finding.detector.startswith(PANEL):
        return ADVICE_ON_PANELS
    own = [e.text for e in finding.evidence if e.kind == ADVISES]
    if finding.detector == COLLAPSE:
        return "; ".join(own)  # on-call decides whether to stop the run
    usual = finding.fault_class.spec.advice
    if not any(
        text.endswith(usual) for text in own
    ):  # already present if a diagnosis is replayed (detector/sources/agent_event_files.py)
        own.append(usual)
    return "; ".join(own)


def incarnations(suspects: tuple[Suspect, ...]) -> set[Incarnation]:
    return {(s.replica, s.incarnation) for s in suspects if s.replica}


def _keep_reported(findings: list[Finding], standing: Mapping[str, Diagnosis]) -> list[Finding]:
    """Maps findings that continue a standing fault (`FaultSpec.absorbs`) to its diagnosis."""
    reported = {
        (who, absorbed): d
        for d in standing.values()
        for absorbed in d.fault_class.spec.absorbs
        for who in incarnations(d.suspects)
    }
    kept = []
    for f in findings:
        keys = [(who, f.fault_class) for who in incarnations(f.suspects)]
        told = [reported[key] for key in keys if key in reported]
        if told:
            f = replace(f, fault_class=told[0].fault_class, suspects=told[0].suspects, because=told[0].because)
        kept.append(f)
    return kept


@dataclass(slots=True)
class _Named:
    """Incarnations, nodes and roles named by the findings of one class."""

    incarnations: set[Incarnation] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)  # roles with failing code; empty for policy collapse

    def explains(self, f: Finding, scope: SuppressionScope) -> bool:
        who = incarnations(f.suspects)
        if scope is SuppressionScope.ROLE:
            return all(s.role in self.roles for s in f.suspects)
        if scope is SuppressionScope.ALL:
            return bool(who) and who <= self.incarnations
        if who & self.incarnations:
            return True
        nodes_only = bool(f.suspects) and not who and scope is SuppressionScope.ANY_OR_NODES
        return nodes_only and all(s.node in self.nodes for s in f.suspects)


def _drop_consequences(findings: list[Finding]) -> list[Finding]:
    """Drops findings suppressed by another finding's class (`FaultSpec.suppresses`)."""
    named: dict[FaultClass, _Named] = {}
    for f in findings:
        of_class = named.setdefault(f.fault_class, _Named())
        of_class.incarnations |= incarnations(f.suspects)
        of_class.nodes |= {s.node for s in f.suspects}
        of_class.roles |= {f.about.partition(":")[0]} - {""}

    def is_consequence(f: Finding) -> bool:
        return any(
            f.fault_class in cause.spec.suppresses and what.explains(f, cause.spec.suppresses[f.fault_class])
            for cause, what in named.items()
        )

    return [f for f in findings if not is_consequence(f)]


def _drop_majority_suspects(findings: list[Finding], role_sizes: Mapping[str, int], now: float) -> list[Finding]:
    slow: dict[str, list[Finding]] = {}
    for f in findings:
        if f.fault_class == FaultClass.SLOW:
            slow.setdefault(f.suspects[0].role, []).append(f)
    kept = list(findings)
    for role, group in slow.items():
        if len(group) < 2 or 2 * len(group) <= role_sizes.get(role, 0):
            continue
        suspects = tuple(sorted((s for f in group for s in f.suspects), key=lambda s: s.replica))
        who = ", ".join(s.replica for s in suspects)
        void = Finding(
            detector="sequential",
            suspects=suspects,
            fault_class=FaultClass.CANNOT_TELL,
            onset=min(f.onset for f in group),
            detected_at=now,
            confidence=0.3,
            because=f"{who} are slower than the rest of role {role}, but they are its majority: "
            "either they are slow or their load differs",
            evidence=(
                *(Evidence(kind="slow", text=f.because) for f in group),
                settles("a replica on a node of its own, or the same work given to each"),
            ),
        )
        kept = [f for f in kept if f not in group] + [void]
    return kept
