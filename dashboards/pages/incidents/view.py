"""Text of an incident's page: suspects, state, findings with evidence, decisions with guards and operators, and the
verification of the recovery. Pure; every text is plain and limited in length.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rolecall.core.diagnosis import Evidence, Suspect
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import (
    EvidenceCollected,
    IncidentOpened,
    IncidentUpdated,
    OncallPaged,
    PlanBlocked,
    PlanExpired,
)
from rolecall.core.journal.payloads.run import WeightsAdmitted, WeightsRejected
from rolecall.core.text import in_words, node_text, percent, plain, seconds, utc
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.dashboards.pages.incidents.timeline import action_words, affected_replicas, by_words
from rolecall.dashboards.pages.status import EXPIRED, GLYPHS, SET_ASIDE, status_of
from rolecall.recovery.durations import IncidentDurations, durations
from rolecall.recovery.incidents import Attempt, Decision, Incident, paged_text
from rolecall.views.incidents import IncidentSummary

SENTENCE_MAX = 2_000
NUM_SHOWN_MAX = 40
"""Pieces of evidence that are shown; the rest is counted."""
K = EventKind

Facts = tuple[tuple[str, str], ...]
"""(label, value) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentHeader:
    incident_id: str
    sentence: str
    glyph: str
    status: str
    state: str  # in a sentence
    who: tuple[str, ...] = ()
    facts: Facts = ()
    injected: str = ""  # the injected fault, if the injection log has one


def head(material: IncidentPageInputs, summary: IncidentSummary | None) -> IncidentHeader:
    incident = material.incident
    if incident is None:
        why = material.set_aside or "no information"
        return IncidentHeader(
            incident_id=plain(material.incident_id, 200),
            sentence=plain(why),
            glyph=GLYPHS[SET_ASIDE],
            status=SET_ASIDE,
            state="Set aside: its events contradict each other. No action is taken for it; other incidents are not "
            "affected.",
        )
    diagnosis = incident.diagnosis
    took = durations(incident, material.now) if summary is None else summary.durations(material.now)
    ended = material.ended_at is not None
    status = SET_ASIDE if material.set_aside else status_of(incident, material.mode, material.now, ended=ended)
    facts = [
        ("Fault class", in_words(diagnosis.fault_class)),
        ("Confidence", percent(diagnosis.confidence)),
        ("Detected by", plain(in_words(", ".join(diagnosis.detectors)), 200) or "unknown"),
        ("Onset", utc(incident.first_diagnosis.onset)),
        ("Found", took.found_words or "requested"),
        ("Times", took.words),
    ]
    if diagnosis.gain_ratio is not None:
        facts.append(("Slowdown compared with peers", f"{diagnosis.gain_ratio:.2f} times"))
    if incident.review is not None:
        verdict = "right" if incident.review.right else "wrong"
        because = f": {incident.review.because}" if incident.review.because else ""
        facts.append(("Review", plain(f"{verdict} by {incident.review.by}{because}", 400)))
    return IncidentHeader(
        incident_id=plain(material.incident_id, 200),
        sentence=plain(diagnosis.because, SENTENCE_MAX),
        glyph=GLYPHS.get(status, "·"),
        status=in_words(status),
        state=plain(
            f"Set aside: {material.set_aside}"
            if material.set_aside
            else state_words(incident, summary, material.now, ended=ended),
            SENTENCE_MAX,
        ),
        who=tuple(_suspect(s) for s in diagnosis.suspects),
        facts=tuple(facts),
        injected=_injected(summary),
    )


def _suspect(suspect: Suspect) -> str:
    parts = [
        suspect.name if suspect.replica else f"{node_text(suspect.node)}",
        f"role {suspect.role}" if suspect.role else "",
        f"on {suspect.node}" if suspect.replica else "",
    ]
    parts += [f"rank {suspect.rank}" if suspect.rank else "", f"GPU {suspect.gpu}" if suspect.gpu is not None else ""]
    parts += [f"pid {suspect.process.pid}" if suspect.process else ""]
    return plain(", ".join(p for p in parts if p), 200)


def _injected(summary: IncidentSummary | None) -> str:
    if summary is None or summary.fault is None:
        return ""
    named = "correct suspect" if summary.diagnosed_correctly else "wrong suspect"
    how = f" ({summary.fault.how})" if summary.fault.how else ""
    return plain(f"{summary.fault.kind}{how} at {', '.join(summary.fault.hit)}, {named}", 400)


def state_words(incident: Incident, summary: IncidentSummary | None, now: float, *, ended: bool = False) -> str:
    """`ended`: the run has ended, at `now`."""
    took = durations(incident, now) if summary is None else summary.durations(now)
    if incident.outcome is not None:
        return _closed_words(incident, took)
    return f"No, {took.end_words}" + (" when the run ended" if ended else "")


def _closed_words(incident: Incident, took: IncidentDurations) -> str:
    known = incident.diagnosis.because
    because, page_reason = (_rest(text, known) for text in (incident.because, incident.page_reason))
    paged = ""
    if incident.page_reason:
        differs = page_reason and page_reason != because
        done = paged_text(incident.page_channel).capitalize()
        paged = f" {done}: {page_reason}" if differs else f" {done}."
    if str(incident.outcome) == "resolved":
        seen = f": {incident.verified_because}" if incident.verified_because else ""
        attempts = f", at attempt {len(incident.attempts)}" if len(incident.attempts) > 1 else ""
        return f"Resolved, {took.end_words}{attempts}{seen}"
    words = {
        "tolerated": "Tolerated without action",
        "self_recovered": "Self-recovered: the fault ended without action by rolecall",
        "ended": "Ended: the run or the processes ended before the fault",
        "escalated": "Escalated",
    }
    text = f"{words.get(str(incident.outcome), str(incident.outcome))}, {took.end_words}"
    return f"{text}: {because}.{paged}" if because else f"{text}.{paged}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSection:
    title: str
    because: str
    advice: str
    settle: str
    evidence: tuple[str, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidenceSection:
    because: str
    statements: tuple[str, ...]
    findings: tuple[FindingSection, ...]
    missing: tuple[str, ...]
    files: tuple[str, ...]  # file names
    seconds: float


def findings(material: IncidentPageInputs) -> tuple[FindingSection, ...]:
    """The diagnosis and the updates that changed it, oldest first."""
    found: list[FindingSection] = []
    for event in material.events:
        if isinstance(event.payload, IncidentOpened | IncidentUpdated):
            diagnosis = event.payload.diagnosis
            when = "Diagnosed" if isinstance(event.payload, IncidentOpened) else "Updated"
            title = f"{when} {utc(event.wall_at)} by {in_words(', '.join(diagnosis.detectors)) or 'unknown'}"
            section = _finding(title, diagnosis.because, diagnosis.evidence, diagnosis.advice, diagnosis.settle)
            if not found or replace(found[-1], title="") != replace(section, title=""):
                found.append(section)
    return tuple(found[:1] + found[1:][-NUM_SHOWN_MAX:])


def _finding(
    title: str, because: str, evidence: Sequence[Evidence], advice: str = "", settle: str = ""
) -> FindingSection:
    return FindingSection(
        title=plain(title, 200),
        because=plain(because),
        advice=plain(advice, 1000),
        settle=plain(settle, 1000),
        evidence=tuple(_evidence_words(e) for e in evidence[:NUM_SHOWN_MAX]),
        num_left_out=max(0, len(evidence) - NUM_SHOWN_MAX),
    )


def _evidence_words(evidence: Evidence) -> str:
    numbers = "; ".join(
        f"{plain(name, 60).replace('_', ' ')}: {quantity(name, value)}"
        for name, value in list(evidence.values.items())[:20]
    )
    return f"{plain(evidence.kind, 60).replace('_', ' ')}: {plain(evidence.text, 1000)}" + (
        f"  [{numbers}]" if numbers else ""
    )


def quantity(name: str, value: object) -> str:
    """A number with the unit that its name ends in."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value, 60)
    scale, form = next((how for ending, how in UNITS.items() if name.endswith(ending)), (1.0, "{:.6g}"))
    return form.format(value * scale)


UNITS: Mapping[str, tuple[float, str]] = {
    "seconds": (1.0, "{:.3g} s"),
    "per_unit": (1.0, "{:.3g} s"),
    "bytes": (1 / 2**20, "{:,.1f} MiB"),
    "celsius": (1.0, "{:.3g} °C"),
    "watts": (1.0, "{:.4g} W"),
    "hertz": (1e-6, "{:,.0f} MHz"),
    "share": (100.0, "{:.1f} %"),
}
"""Name suffix -> (factor, format)."""


def collected_evidence(material: IncidentPageInputs) -> tuple[CollectedEvidenceSection, ...]:
    return tuple(
        CollectedEvidenceSection(
            because=plain(said.because),
            statements=_texts(said.statements),
            findings=tuple(
                _finding(f"Finding of {in_words(f.detector)}", f.because, f.evidence)
                for f in said.findings[:NUM_SHOWN_MAX]
            ),
            missing=_texts(said.missing),
            files=tuple(f.name for f in said.files[:200]),
            seconds=said.seconds,
        )
        for said in (e.payload for e in material.events)
        if isinstance(said, EvidenceCollected)
    )


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(plain(text, 1000) for text in texts[:NUM_SHOWN_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    number: int
    title: str
    digest: str
    because: str
    also_hit: tuple[str, ...]
    held: tuple[str, ...]
    commands: tuple[str, ...]  # of operators
    outcome: str  # of the attempt
    facts: Facts


def plan_sections(material: IncidentPageInputs) -> tuple[PlanSection, ...]:
    if material.incident is None:
        return ()
    return tuple(_decided(a, material.incident, material) for a in material.incident.attempts)


def _decided(attempt: Attempt, incident: Incident, material: IncidentPageInputs) -> PlanSection:
    last = attempt is incident.attempt
    until = float("inf") if last else next(b.made_at for b in incident.attempts if b.number == attempt.number + 1)
    during = [e for e in material.events if attempt.made_at <= e.wall_at < until]
    held = [f"{in_words(e.payload.guard)}: {e.payload.because}" for e in during if isinstance(e.payload, PlanBlocked)]
    facts = [("Planned", utc(attempt.made_at))]
    if attempt.started_at is not None:
        facts.append(("Action started", f"{seconds(max(0.0, attempt.started_at - attempt.made_at))} after the plan"))
    if attempt.done_at is not None and attempt.started_at is not None:
        facts.append(("Action duration", seconds(max(0.0, attempt.done_at - attempt.started_at))))
    return PlanSection(
        number=attempt.number,
        title=action_words(attempt.plan),
        digest=plain(attempt.plan.digest, 40),
        because=_beyond(plain(attempt.plan.because, SENTENCE_MAX), plain(incident.diagnosis.because, SENTENCE_MAX)),
        also_hit=tuple(plain(text, 300) for text in attempt.plan.also_hit[:NUM_SHOWN_MAX]),
        held=tuple(plain(text, 600) for text in held[:NUM_SHOWN_MAX]),
        commands=tuple(_operator_commands(during)),
        outcome=plain(_outcome(attempt, incident, material), 600),
        facts=tuple(facts),
    )


def _beyond(because: str, diagnosis: str) -> str:
    """A reason without the diagnosis, which is shown at the top of the page."""
    if not diagnosis or diagnosis not in because:
        return because
    rest = _rest(because, diagnosis)
    return f"the diagnosis; {rest}" if rest else "the diagnosis"


def _rest(text: str, diagnosis: str) -> str:
    return text.replace(diagnosis, "").strip(" :;,.") if diagnosis and diagnosis in text else text


_COMMANDS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved it",
    K.PLAN_REJECTED: "rejected it",
    K.HOLD_PLACED: "put it on hold",
    K.HOLD_LIFTED: "lifted the hold",
}


def _operator_commands(during: Iterable[Event]) -> Iterable[str]:
    for event in during:
        if event.kind in _COMMANDS:
            yield plain(by_words(event.payload, f"{_COMMANDS[event.kind]}, {utc(event.wall_at)}"), 600)
        elif isinstance(event.payload, OncallPaged):
            text = f"{paged_text(event.payload.channel)} ({in_words(event.payload.topic)}): {event.payload.because}"
            yield plain(text, 600)
        elif isinstance(event.payload, PlanExpired):
            yield plain(f"the plan expired: {event.payload.because}", 600)


def _outcome(attempt: Attempt, incident: Incident, material: IncidentPageInputs) -> str:
    over = incident.closed_at is not None or material.ended_at is not None
    if attempt.failure is not None:
        return f"failed ({in_words(attempt.failure)}): {attempt.failed_because}"
    if attempt is not incident.attempt:
        return "replaced by a new plan after an update of the diagnosis"
    if attempt.done_at is not None:
        unverified = "done, not verified" if over else "done, not verified yet"
        return "done and verified" if incident.verified_at is not None else unverified
    if attempt.started_at is not None:
        return "not finished" if over else "in progress"
    if attempt.decision is Decision.REJECTED or (attempt.decision is Decision.EXPIRED and over):
        return f"{attempt.decision}: {attempt.decision_because}" if attempt.decision_because else str(attempt.decision)
    if over:
        return "not executed"
    status = status_of(incident, material.mode, material.now)
    return (
        f"{status} at {utc(attempt.expires_at or material.now)}; nothing will happen" if status == EXPIRED else status
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProofSection:
    title: str
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySection:
    replacements: tuple[str, ...]
    proofs: tuple[WeightProofSection, ...]
    refused: tuple[str, ...]
    verified: str


def recovery_section(material: IncidentPageInputs, summary: IncidentSummary | None) -> RecoverySection:
    who, made = affected_replicas(material), material.incident.touched if material.incident else {}
    replacements = []
    for replacement in summary.replacements if summary else ():
        came = "from a warm standby" if replacement.from_standby else "newly started"
        serving = (
            "not serving yet" if replacement.serving_at is None else f"serving since {utc(replacement.serving_at)}"
        )
        replacements.append(
            plain(
                f"{replacement.replica}#{replacement.incarnation} on {replacement.node}, pid {replacement.pid}, "
                f"{came}; {serving}",
                300,
            )
        )
    proofs: dict[tuple[str, int], WeightProofSection] = {}
    refused = []
    since = material.incident.opened_at if material.incident else 0.0
    for event in material.around:
        payload = event.payload
        if (
            event.wall_at < since
            or not isinstance(payload, WeightsRejected | WeightsAdmitted)
            or payload.replica not in who
        ):
            continue
        key = (payload.replica, payload.incarnation)
        if isinstance(payload, WeightsRejected):
            refused.append(plain(f"{key[0]}#{key[1]}: {payload.part}: {payload.because}", 400))
        elif key[1] >= made.get(key[0], 1 << 60) and key not in proofs:
            proofs[key] = _proof(payload, max(0.0, event.wall_at - since))
    return RecoverySection(
        replacements=tuple(replacements[:NUM_SHOWN_MAX]),
        proofs=tuple(proofs.values())[:NUM_SHOWN_MAX],
        refused=tuple(refused[:NUM_SHOWN_MAX]),
        verified=plain(summary.incident.verified_because, 600) if summary else "",
    )


def _proof(admitted: WeightsAdmitted, after_seconds: float) -> WeightProofSection:
    proof = admitted.proof
    match = "match" if proof.manifest_digest == proof.received_digest else "MISMATCH"
    facts = [
        ("Policy version", str(admitted.policy_version)),
        ("Weights from", plain(admitted.holder, 100)),
        ("Received", quantity("bytes", admitted.bytes)),
        ("In", quantity("seconds", admitted.seconds)),
        ("Sent and received weights", plain(f"{match}: {proof.manifest_digest[:16]}", 100)),
        ("Digest read back from the engine", plain(proof.storage_digest[:16], 40)),
        ("Tensors verified", f"{proof.covered}, not covered: {len(proof.uncovered)}"),
    ]
    if proof.canary_logprobs:
        facts.append(("Canary", f"{len(proof.canary_logprobs)} log probabilities stored"))
    who = f"{admitted.replica}#{admitted.incarnation}"
    title = plain(f"{who}: weights admitted {seconds(after_seconds)} after the incident opened", 200)
    return WeightProofSection(title=title, facts=tuple((k, v) for k, v in facts if v))
