"""Findings become diagnoses: one per fault, with the smallest set of suspects, and the same object while it stands.

Rules, in order:
  a crash ends a slowness of the same incarnation: the dead are not slow (and recovery may have tolerated slowness);
  a hang that was already told stays a hang when its process then exits: somebody killed it, that is no second fault;
  a hang ends a slowness; an accusation of one rank ends a tie that it was part of, and the silence of its node;
  user code ends the crashes and hangs of its role, for they are its consequences;
  when more than half of a role is slow at once, peer evidence is void and nobody is named for it.

What panels of metrics say is the weakest evidence: that a machine is not as it was, and not what ails it. It is told
where nothing else explains it (`unexplained`), and gives way for good to whatever else names the same machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Diagnosis, Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import ADVISES, GAIN, OF_GPU, PANEL, SETTLE, settles
from rolecall.detector.live.stages import collapse

ADVICE = {
    FaultClass.CRASH: "replace the replica",
    FaultClass.HANG: "replace the replica; those who wait for it need nothing",
    FaultClass.SLOW: "replace the replica if the gain over the horizon exceeds the cost",
    FaultClass.NETWORK: "replace the replica on another node",
    FaultClass.GPU: "place nothing on this GPU until it is mended",
    FaultClass.USER_CODE: "stop the job and mend the code or its input; no replacement helps",
    FaultClass.CONTROL_PLANE: "restart the agent; touch no replica",
    FaultClass.NODE_LOST: "place nothing on this node",
    FaultClass.CANNOT_TELL: "wait for what settles it; evict nobody",
}

ADVICE_ON_PANELS = "look at it; nobody is replaced for this alone"

Incarnation = tuple[str, int | None]


def fuse(
    findings: list[Finding],
    standing: Mapping[str, Diagnosis],
    role_sizes: Mapping[str, int],
    now: float,
    of_panels: Sequence[Finding] = (),
) -> list[Diagnosis]:
    """`standing`: what was told before, by key. `role_sizes`: live replicas per role. `of_panels`: those that nothing
    else explains."""
    kept = _drop_consequences(_keep_reported_hangs(findings, standing), now)
    kept = _drop_majority_suspects(kept, role_sizes, now)
    told: dict[str, Diagnosis] = {}
    for finding in (*kept, *of_panels):
        diagnosis = to_diagnosis(finding)
        before = standing.get(diagnosis.key, diagnosis)
        if on_panels_alone(before) and not on_panels_alone(diagnosis):
            # A slowness was measured of whom a panel had named: now it can be weighed. What its GPU does may be why.
            of_gpus = tuple(e for e in before.evidence if e.kind == OF_GPU)
            before = replace(diagnosis, evidence=(*diagnosis.evidence, *of_gpus))
        told.setdefault(diagnosis.key, before)
    return list(told.values())


def on_panels_alone(d: Diagnosis) -> bool:
    return all(name.startswith(PANEL) for name in d.detectors)


def unexplained(of_panels: Sequence[Finding], findings: list[Finding], role_sizes: Mapping[str, int]) -> list[Finding]:
    """Findings of panels, oldest first, that nothing explains: neither another finding of the same process or node,
    whatever it accuses it of, nor an earlier one of panels; and none of a role of which they name more than half: then
    peers are no measure. What is dropped is dropped for good."""
    accused = {who for f in findings for who in _who(f.suspects)}
    nodes = {str(s.node) for f in findings for s in f.suspects if s.node}
    kept: list[Finding] = []
    for f in of_panels:
        here = {str(s.node) for s in f.suspects if s.node}
        if not (_who(f.suspects) & accused or here & nodes):
            kept.append(f)
            nodes |= here
    named: dict[str, set[str]] = {}
    for f in kept:
        for s in f.suspects:
            named.setdefault(s.role, set()).add(s.replica or s.node)
    void = {role for role, who in named.items() if len(who) > 1 and 2 * len(who) > role_sizes.get(role, math.inf)}
    return [f for f in kept if not any(s.role in void for s in f.suspects)]


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
    if finding.detector == collapse.DETECTOR:
        return "; ".join(own)  # whether to stop is for a person to say
    usual = ADVICE.get(finding.fault_class, "")
    if not any(
        text.endswith(usual) for text in own
    ):  # it does where a diagnosis is told again (detector/sources/agent_event_files.py)
        own.append(usual)
    return "; ".join(own)


def _who(suspects: tuple[Suspect, ...]) -> set[Incarnation]:
    return {(s.replica, s.incarnation) for s in suspects if s.replica}


def _keep_reported_hangs(findings: list[Finding], standing: Mapping[str, Diagnosis]) -> list[Finding]:
    """A crash of somebody who stands diagnosed as hung goes on under that diagnosis."""
    hung = {who: d for d in standing.values() if d.fault_class == FaultClass.HANG for who in _who(d.suspects)}
    kept = []
    for f in findings:
        told = [hung[who] for who in _who(f.suspects) if who in hung]
        if f.fault_class == FaultClass.CRASH and told:
            f = replace(f, fault_class=FaultClass.HANG, suspects=told[0].suspects, because=told[0].because)
        kept.append(f)
    return kept


def _drop_consequences(findings: list[Finding], now: float) -> list[Finding]:
    named: dict[FaultClass, set[Incarnation]] = {}
    for f in findings:
        named.setdefault(f.fault_class, set()).update(_who(f.suspects))
    crashed, hung = named.get(FaultClass.CRASH, set()), named.get(FaultClass.HANG, set())
    accused = crashed | hung | named.get(FaultClass.NETWORK, set())
    cut_off = {s.node for f in findings if f.fault_class == FaultClass.NETWORK for s in f.suspects}
    # Not of a finding that is about no role's code, as the collapse of a policy is.
    broken_roles = {f.about.partition(":")[0] for f in findings if f.fault_class == FaultClass.USER_CODE} - {""}
    kept = []
    for f in findings:
        who = _who(f.suspects)
        if f.fault_class in (FaultClass.SLOW, FaultClass.CANNOT_TELL) and who & accused:
            continue
        if (
            f.fault_class == FaultClass.CANNOT_TELL
            and f.suspects
            and not who
            and all(s.node in cut_off for s in f.suspects)
        ):
            continue
        if f.fault_class == FaultClass.HANG and who and who <= crashed:
            continue
        if f.fault_class in (FaultClass.HANG, FaultClass.CRASH) and all(s.role in broken_roles for s in f.suspects):
            continue
        kept.append(f)
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
            f"either they are slow or their load differs",
            evidence=(
                *(Evidence(kind="slow", text=f.because) for f in group),
                settles("a replica on a node of its own, or the same work given to each"),
            ),
        )
        kept = [f for f in kept if f not in group] + [void]
    return kept
