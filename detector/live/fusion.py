"""Fuses findings into diagnoses: one per fault, with the smallest set of suspects; the same object while it stands.

Rules for live findings (`fuse`), in order:
  a finding that continues a standing fault is reported under its diagnosis (`FaultSpec.absorbs`): a hung process that
  exits was killed by an operator or a timeout, which is not a second fault;
  a finding explained by another one is dropped (`FaultSpec.suppresses`): a crashed process is not also slow;
  when more than half of a role is slow at once, comparison with peers is invalid and becomes `cannot_tell`;
  findings of one detector about several ranks of a replica are one diagnosis, which names them all.

Findings of metric panels are the weakest evidence: they are reported only if nothing else explains them
(detector/live/stages/evidence/panels.py).

Rules for findings of panels and dumps alone (`Merger`), in order, cause before symptom, as early as possible:
  findings of one node and one fault class within `SAME_FAULT_SECONDS` of each other are one fault, whichever rank or
  GPU they name; the earliest counts. Flight Recorder dumps may lack role and node; for them, equal ranks count as equal
  nodes;
  a slowdown of nodes named by an earlier fault is its consequence (`FaultSpec.causes_slowness`);
  a `cannot_tell` is dropped once another finding has named one of its nodes.
Later findings never withdraw or change a diagnosis, so live and offline runs give the same result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolecall.core.diagnosis import Diagnosis, Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass, SuppressionScope
from rolecall.detector.base.findings import (
    ADVISES,
    COLLAPSE,
    FULL_DISK,
    GAIN,
    NOT_FINITE,
    OF_GPU,
    ORPHAN,
    PANEL,
    SETTLE,
    SUSPENDED,
    settles,
)

ADVICE_ON_PANELS = "inspect it; nothing is replaced for this alone"

NUM_TOLD_MAX = 4
"""Ranks of a replica whose own sentences and evidence a diagnosis keeps, if several have the same fault."""

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
    found = [to_diagnosis(finding) for finding in (*kept, *of_panels)]
    lasting = {d.key for d in found if d.key in standing and not d.further_ranks(standing[d.key].suspects)}
    current: dict[str, list[Diagnosis]] = {}
    for diagnosis in found:
        before = standing[diagnosis.key] if diagnosis.key in lasting else diagnosis
        if on_panels_alone(before) and not on_panels_alone(diagnosis):
            # The slowdown of a process named by a panel is now measured. Keep the GPU evidence: it may be the cause.
            of_gpus = tuple(e for e in before.evidence if e.kind == OF_GPU)
            before = replace(diagnosis, evidence=(*diagnosis.evidence, *of_gpus))
        alike = current.setdefault(diagnosis.key, [before])
        named = [s for d in alike for s in d.suspects]
        # Of another detector: its view of the same fault, after a cause that was found before it.
        if diagnosis.detectors == alike[0].detectors and diagnosis.further_ranks(named):
            alike.append(diagnosis)
    return [_of_ranks(alike, standing) if len(alike) > 1 else alike[0] for alike in current.values()]


def _of_ranks(alike: Sequence[Diagnosis], standing: Mapping[str, Diagnosis]) -> Diagnosis:
    """Diagnoses of several ranks of the same replicas as one."""
    told, num_more = alike[:NUM_TOLD_MAX], len(alike[NUM_TOLD_MAX:])
    both = replace(
        alike[0],
        suspects=tuple(s for d in alike for s in d.suspects),
        onset=min(d.onset for d in alike),
        because="; ".join([d.because for d in told] + [f"and {num_more} more of its ranks"] * (num_more > 0)),
        evidence=tuple(e for d in told for e in d.evidence),
    )
    stood = standing.get(both.key, both)
    return both if both.further_ranks(stood.suspects) else stood


def on_panels_alone(d: Diagnosis) -> bool:
    return all(name.startswith(PANEL) for name in d.detectors)


def to_diagnosis(finding: Finding) -> Diagnosis:
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
        settle="; ".join(e.text for e in finding.evidence if e.kind == SETTLE),
        gain_ratio=gains[0] if gains else None,
        about=finding.about,
    )


def _advice(finding: Finding) -> str:
    if finding.detector.startswith(PANEL):
        return ADVICE_ON_PANELS
    own = [e.text for e in finding.evidence if e.kind == ADVISES]
    if finding.detector in (COLLAPSE, NOT_FINITE, FULL_DISK, ORPHAN, SUSPENDED):
        return "; ".join(own)  # on-call decides whether to stop the run, or what to delete, to end or to resume
    usual = finding.fault_class.spec.advice
    # It is already there if a diagnosis is replayed (detector/sources/agent_event_files.py).
    if not any(text.endswith(usual) for text in own):
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
    for finding in findings:
        keys = [(who, finding.fault_class) for who in incarnations(finding.suspects)]
        current = [reported[key] for key in keys if key in reported]
        if current:
            finding = replace(
                finding, fault_class=current[0].fault_class, suspects=current[0].suspects, because=current[0].because
            )
        kept.append(finding)
    return kept


@dataclass(slots=True)
class _Named:
    """Incarnations, nodes and roles named by the findings of one class."""

    incarnations: set[Incarnation] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)  # roles with failing code; empty for policy collapse

    def explains(self, finding: Finding, scope: SuppressionScope) -> bool:
        who = incarnations(finding.suspects)
        if scope is SuppressionScope.ROLE:
            return all(s.role in self.roles for s in finding.suspects)
        if scope is SuppressionScope.ALL:
            return bool(who) and who <= self.incarnations
        if who & self.incarnations:
            return True
        nodes_only = bool(finding.suspects) and not who and scope is SuppressionScope.ANY_OR_NODES
        return nodes_only and all(s.node in self.nodes for s in finding.suspects)


def _drop_consequences(findings: list[Finding]) -> list[Finding]:
    """Drops findings suppressed by another finding's class (`FaultSpec.suppresses`)."""
    named: dict[FaultClass, _Named] = {}
    for finding in findings:
        of_class = named.setdefault(finding.fault_class, _Named())
        of_class.incarnations |= incarnations(finding.suspects)
        of_class.nodes |= {s.node for s in finding.suspects}
        of_class.roles |= {finding.about.partition(":")[0]} - {""}

    kept = []
    for finding in findings:
        scopes = [(what, cause.spec.suppresses.get(finding.fault_class)) for cause, what in named.items()]
        if not any(scope is not None and what.explains(finding, scope) for what, scope in scopes):
            kept.append(finding)
    return kept


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


SAME_FAULT_SECONDS = 600.0
"""Time within which detectors report the same fault: the slowest takes a few minutes longer than the fastest."""


@dataclass(slots=True)
class Merger:
    """Findings must be added in order of `detected_at`."""

    kept: list[Finding] = field(default_factory=list)
    last_at: list[float] = field(default_factory=list)  # per entry of `kept`: time of its newest finding

    def add(self, finding: Finding) -> Diagnosis | None:
        """The new diagnosis; None if this fault, or one that explains it, was reported before."""
        for i, first in enumerate(self.kept):
            alike = first.fault_class == finding.fault_class and first.about == finding.about
            same = _nodes(first) == _nodes(finding) or _same_ranks(first.suspects, finding.suspects)
            if alike and same and finding.detected_at - self.last_at[i] <= SAME_FAULT_SECONDS:
                self.last_at[i] = finding.detected_at
                return None
        explained = any(
            at <= finding.detected_at <= at + SAME_FAULT_SECONDS and _explains(first, finding)
            for first, at in zip(self.kept, self.last_at, strict=True)
        )
        if explained:
            return None
        self.kept.append(finding)
        self.last_at.append(finding.detected_at)
        return to_diagnosis(finding)


def merged(findings: Sequence[Finding]) -> list[Diagnosis]:
    """All diagnoses of these findings, by `detected_at`."""
    merger = Merger()
    # At equal times causes come first.
    ordered = sorted(
        findings, key=lambda f: (f.detected_at, not f.fault_class.spec.causes_slowness, f.detector, _nodes(f))
    )
    return [d for f in ordered if (d := merger.add(f)) is not None]


def _nodes(f: Finding) -> tuple[str, ...]:
    return tuple(sorted({s.node for s in f.suspects}))


def _same_ranks(first: tuple[Suspect, ...], others: tuple[Suspect, ...]) -> bool:
    """Whether both name the same ranks of one job. A pair matches if the nodes are equal, or if one of the two has
    neither role nor replica."""
    mine, theirs = {s.rank: s for s in first}, {s.rank: s for s in others}
    if not mine or None in mine or mine.keys() != theirs.keys() or len(mine) < max(len(first), len(others)):
        return False  # no rank, unknown ranks, other ranks, or ranks numbered per node
    pairs = [(s, theirs[rank]) for rank, s in mine.items()]
    return all(a.node == b.node or any(not s.role and not s.replica for s in (a, b)) for a, b in pairs)


def _explains(cause: Finding, finding: Finding) -> bool:
    """Whether the earlier finding `cause` explains `finding`."""
    if finding.fault_class == FaultClass.SLOW:
        return cause.fault_class.spec.causes_slowness and set(_nodes(finding)) <= set(_nodes(cause))
    if finding.fault_class == FaultClass.CANNOT_TELL:
        return cause.fault_class != FaultClass.CANNOT_TELL and bool(set(_nodes(finding)) & set(_nodes(cause)))
    return False
