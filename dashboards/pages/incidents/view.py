"""Text of an incident's page: suspects, state, findings with evidence, decisions with guards and operators, and the
verification of the recovery. Pure; every text is plain and limited in length.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Plan, Suspect
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    EvidenceCollected,
    IncidentOpened,
    IncidentUpdated,
    OncallPaged,
    PlanBlocked,
    PlanExpired,
    WeightsAdmitted,
    WeightsRejected,
)
from rolecall.core.text import plain, seconds
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.dashboards.pages.incidents.table import GLYPHS, HELD, SET_ASIDE, moment, status_of
from rolecall.dashboards.pages.incidents.timeline import affected_replicas, by_words
from rolecall.recovery.incidents.incident import Attempt, Decision, Incident, IncidentState
from rolecall.views.incidents import IncidentSummary

SENTENCE_MAX = 2_000
NUM_SHOWN_MAX = 40
"""Suspects and pieces of evidence that are shown; the rest is counted."""
VISIBLE_SECONDS = 0.05
"""Times closer than this are shown as one."""
K = EventKind

Facts = tuple[tuple[str, str], ...]
"""(label, value) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentHeader:
    """The top of the page."""

    incident_id: str
    sentence: str
    glyph: str
    status: str
    state: str  # in a sentence
    who: tuple[str, ...]
    facts: Facts
    injected: str = ""  # the injected fault, if the injection log has one


def head(m: IncidentPageInputs, story: IncidentSummary | None) -> IncidentHeader:
    i = m.incident
    if i is None:
        why = m.set_aside or "no information"
        return IncidentHeader(
            incident_id=plain(m.incident_id, 200),
            sentence=plain(why),
            glyph=GLYPHS[SET_ASIDE],
            status=SET_ASIDE,
            state="Set aside: its events contradict each other. No action is taken for it; other incidents are not "
            "affected.",
            who=(),
            facts=(),
        )
    d = i.diagnosis
    status = SET_ASIDE if m.set_aside else status_of(i)
    who = tuple(_suspect(s) for s in d.suspects[:NUM_SHOWN_MAX])
    more = len(d.suspects) - NUM_SHOWN_MAX
    facts = [
        ("Fault class", str(d.fault_class).replace("_", " ")),
        ("Confidence", f"{d.confidence:.0%}"),
        ("Detected by", plain(", ".join(d.detectors), 200) or "unknown"),
        ("Onset", moment(d.onset)),
        ("Detected", f"{seconds(max(0.0, d.detected_at - d.onset))} after the onset"),
    ]
    if d.gain_ratio is not None:
        facts.append(("Slowdown compared with peers", f"{d.gain_ratio:.2f} times"))
    if i.mark is not None:
        verdict = "right" if i.mark.right else "wrong"
        because = f": {i.mark.because}" if i.mark.because else ""
        facts.append(("Review", plain(f"{verdict} by {i.mark.by}{because}", 400)))
    return IncidentHeader(
        incident_id=plain(m.incident_id, 200),
        sentence=plain(d.because, SENTENCE_MAX),
        glyph=GLYPHS.get(status, "·"),
        status=status.replace("_", " "),
        state=plain(f"Set aside: {m.set_aside}" if m.set_aside else state_words(i, story, m.now), SENTENCE_MAX),
        who=(*who, *((f"and {more} more",) if more > 0 else ())),
        facts=tuple(facts),
        injected=_injected(story),
    )


def _suspect(s: Suspect) -> str:
    whose = f"{s.replica}#{s.incarnation}" if s.replica and s.incarnation is not None else s.replica
    parts = [whose or f"node {s.node}", f"role {s.role}" if s.role else "", f"on {s.node}" if s.replica else ""]
    parts += [f"rank {s.rank}" if s.rank else "", f"GPU {s.gpu}" if s.gpu is not None else ""]
    parts += [f"pid {s.process.pid}" if s.process else ""]
    return plain(", ".join(p for p in parts if p), 200)


def _injected(story: IncidentSummary | None) -> str:
    if story is None or story.fault is None:
        return ""
    named = "correct suspect" if story.named_right else "wrong suspect"
    found = seconds(max(0.0, story.detected_at - story.fault.injected_at))
    how = f" ({story.fault.how})" if story.fault.how else ""
    return plain(f"{story.fault.kind}{how} at {', '.join(story.fault.hit)}, detected {found} later, {named}", 400)


def state_words(i: Incident, story: IncidentSummary | None, now: float) -> str:
    """The state in a sentence."""
    a, found = i.attempt, i.diagnosis.detected_at
    if i.outcome is not None:
        return _closed_words(i, story)
    since = seconds(max(0.0, now - i.opened_at))
    match i.state:
        case IncidentState.PROPOSED if a is not None and a.decision is None:
            left = "" if a.expires_at is None else f"; expires in {seconds(max(0.0, a.expires_at - now))}"
            return f"Awaiting approval: {action_words(a.plan)}{left}"
        case IncidentState.PROPOSED if a is not None:
            return f"{str(a.decision).capitalize()} by {a.decided_by or 'unknown'}; waiting for the guards"
        case IncidentState.ACTING if a is not None and a.started_at is not None:
            return f"Recovering: {action_words(a.plan)}, for {seconds(max(0.0, now - a.started_at))}"
        case IncidentState.VERIFYING if a is not None and a.done_at is not None:
            return f"{action_words(a.plan)} is done; verifying progress for {seconds(max(0.0, now - a.done_at))}"
        case IncidentState.PLANNED if a is not None and status_of(i) == HELD:
            return f"Blocked by {', '.join(sorted(a.held_by))}: {action_words(a.plan)}; open for {since}"
        case IncidentState.PLANNED if a is not None:
            return f"Planned: {action_words(a.plan)}; open for {since}"
        case _:
            failed = i.failures[-1] if i.failures else None
            after = f"; attempt {failed.number} failed: {failed.failed_because}" if failed else ""
            return f"Diagnosed {seconds(max(0.0, now - found))} ago; no plan yet{after}"


def _closed_words(i: Incident, story: IncidentSummary | None) -> str:
    found, known = i.diagnosis.detected_at, i.diagnosis.because
    because, page_reason = (_rest(text, known) for text in (i.because, i.page_reason))
    paged = ""
    if i.page_reason:
        differs = page_reason and page_reason != because
        paged = f" On-call was paged: {page_reason}" if differs else " On-call was paged."
    if str(i.outcome) == "resolved":
        cured_at = story.cured_at if story is not None and story.cured_at is not None else i.verified_at
        after = seconds(max(0.0, (cured_at if cured_at is not None else i.opened_at) - found))
        attempts = f", at attempt {len(i.attempts)}" if len(i.attempts) > 1 else ""
        seen = f": {story.verified_because}" if story is not None and story.verified_because else ""
        worked = ""
        if i.verified_at is not None and cured_at is not None and i.verified_at - cured_at >= VISIBLE_SECONDS:
            worked = f" (verified after {seconds(max(0.0, i.verified_at - found))})"
        return f"Resolved {after} after detection{worked}{attempts}{seen}"
    words = {
        "tolerated": "Tolerated without action",
        "observed": "Observed: the fault ended without action by rolecall",
        "self_recovered": "Self-recovered: the fault ended before rolecall acted",
        "escalated": "Escalated",
    }
    lasted = seconds(max(0.0, (i.closed_at or i.opened_at) - i.opened_at))
    text = f"{words.get(str(i.outcome), str(i.outcome))}, after {lasted}"
    return f"{text}: {because}.{paged}" if because else f"{text}.{paged}"


def action_words(plan: Plan) -> str:
    targets = ", ".join(f"{t.replica}#{t.incarnation}" for t in plan.targets[:NUM_SHOWN_MAX])
    action = str(plan.action).replace("_", " ")
    return plain(f"{action} of {targets}" if targets else action, 400)


# --- findings and evidence ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceItem:
    """One piece of evidence."""

    kind: str
    text: str
    numbers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSection:
    """A diagnosis or finding with its evidence."""

    title: str
    because: str
    advice: str
    settle: str
    evidence: tuple[EvidenceItem, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidenceSection:
    """Evidence collected from the agents for this incident."""

    because: str
    statements: tuple[str, ...]
    findings: tuple[FindingSection, ...]
    missing: tuple[str, ...]
    files: tuple[str, ...]  # file names
    seconds: float


def findings(m: IncidentPageInputs) -> tuple[FindingSection, ...]:
    """The diagnosis and its updates, oldest first."""
    found = []
    for e in m.events:
        if isinstance(e.payload, IncidentOpened | IncidentUpdated):
            d = e.payload.diagnosis
            when = "Diagnosed" if isinstance(e.payload, IncidentOpened) else "Updated"
            title = f"{when} {moment(e.wall_at)} by {', '.join(d.detectors) or 'unknown'}"
            found.append(_finding(title, d.because, d.evidence, d.advice, d.settle))
    return tuple(found[:1] + found[1:][-NUM_SHOWN_MAX:])


def _finding(
    title: str, because: str, evidence: Sequence[Evidence], advice: str = "", settle: str = ""
) -> FindingSection:
    return FindingSection(
        title=plain(title, 200),
        because=plain(because),
        advice=plain(advice, 1000),
        settle=plain(settle, 1000),
        evidence=tuple(
            EvidenceItem(kind=plain(e.kind, 60).replace("_", " "), text=plain(e.text, 1000), numbers=_numbers(e.values))
            for e in evidence[:NUM_SHOWN_MAX]
        ),
        num_left_out=max(0, len(evidence) - NUM_SHOWN_MAX),
    )


def _numbers(values: Mapping[str, float]) -> str:
    return "; ".join(f"{plain(n, 60).replace('_', ' ')}: {quantity(n, v)}" for n, v in list(values.items())[:20])


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
    "share": (1.0, "{:.1%}"),
}
"""Name suffix -> (factor, format)."""


def collected_evidence(m: IncidentPageInputs) -> tuple[CollectedEvidenceSection, ...]:
    """Sections from the EVIDENCE_COLLECTED events."""
    return tuple(_collected(e.payload) for e in m.events if isinstance(e.payload, EvidenceCollected))


def _collected(payload: EvidenceCollected) -> CollectedEvidenceSection:
    return CollectedEvidenceSection(
        because=plain(payload.because),
        statements=_texts(payload.told),
        findings=tuple(
            _finding(f"Finding of {f.detector}", f.because, f.evidence) for f in payload.findings[:NUM_SHOWN_MAX]
        ),
        missing=_texts(payload.missing),
        files=tuple(f.name for f in payload.files[:200]),
        seconds=payload.seconds,
    )


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(plain(text, 1000) for text in texts[:NUM_SHOWN_MAX])


# --- decisions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """One plan and its outcome."""

    number: int
    title: str
    digest: str
    because: str
    also_hit: tuple[str, ...]
    held: tuple[str, ...]
    commands: tuple[str, ...]  # of operators
    outcome: str  # of the attempt
    facts: Facts


def plan_sections(m: IncidentPageInputs) -> tuple[PlanSection, ...]:
    if m.incident is None:
        return ()
    return tuple(_decided(a, m.incident, m.events) for a in m.incident.attempts)


def _decided(a: Attempt, i: Incident, events: Iterable[Event]) -> PlanSection:
    last = a is i.attempt
    until = float("inf") if last else next(b.made_at for b in i.attempts if b.number == a.number + 1)
    during = [e for e in events if a.made_at <= e.wall_at < until]
    held = [f"{e.payload.guard}: {e.payload.because}" for e in during if isinstance(e.payload, PlanBlocked)]
    facts = [("Planned", moment(a.made_at))]
    if a.started_at is not None:
        facts.append(("Action started", f"{seconds(max(0.0, a.started_at - a.made_at))} after the plan"))
    if a.done_at is not None and a.started_at is not None:
        facts.append(("Action duration", seconds(max(0.0, a.done_at - a.started_at))))
    return PlanSection(
        number=a.number,
        title=action_words(a.plan),
        digest=plain(a.plan.digest, 40),
        because=_beyond(plain(a.plan.because, SENTENCE_MAX), plain(i.diagnosis.because, SENTENCE_MAX)),
        also_hit=tuple(plain(text, 300) for text in a.plan.also_hit[:NUM_SHOWN_MAX]),
        held=tuple(plain(text, 600) for text in held[:NUM_SHOWN_MAX]),
        commands=tuple(_operator_commands(during)),
        outcome=plain(_outcome(a, i), 600),
        facts=tuple(facts),
    )


def _beyond(because: str, diagnosis: str) -> str:
    """A reason without the diagnosis, which is shown at the top of the page."""
    if not diagnosis or diagnosis not in because:
        return because
    rest = _rest(because, diagnosis)
    return f"the diagnosis; {rest}" if rest else "the diagnosis"


def _rest(text: str, diagnosis: str) -> str:
    """A text without the diagnosis."""
    return text.replace(diagnosis, "").strip(" :;,.") if diagnosis and diagnosis in text else text


_COMMANDS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved it",
    K.PLAN_REJECTED: "rejected it",
    K.HOLD_PLACED: "put it on hold",
    K.HOLD_LIFTED: "lifted the hold",
}


def _operator_commands(during: Iterable[Event]) -> Iterable[str]:
    for e in during:
        if e.kind in _COMMANDS:
            yield plain(by_words(e.payload, f"{_COMMANDS[e.kind]}, {moment(e.wall_at)}"), 600)
        elif isinstance(e.payload, OncallPaged):
            yield plain(f"on-call was paged ({e.payload.topic}): {e.payload.because}", 600)
        elif isinstance(e.payload, PlanExpired):
            yield plain(f"the plan expired: {e.payload.because}", 600)


def _outcome(a: Attempt, i: Incident) -> str:
    if a.failure is not None:
        return f"failed ({a.failure}): {a.failed_because}"
    if a is not i.attempt:
        return "replaced by a new plan after an update of the diagnosis"
    if a.done_at is not None:
        return "done and verified" if i.verified_at is not None else "done, not verified yet"
    if a.started_at is not None:
        return "in progress"
    if a.decision in (Decision.REJECTED, Decision.EXPIRED):
        return f"{a.decision}: {a.decision_because}"
    return "not executed" if i.closed_at is not None else "pending"


# --- the proof ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProofSection:
    """Proof that a replacement loaded the right weights."""

    title: str
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySection:
    replacements: tuple[str, ...]
    proofs: tuple[WeightProofSection, ...]
    refused: tuple[str, ...]
    verified: str


def recovery_section(m: IncidentPageInputs, story: IncidentSummary | None) -> RecoverySection:
    who, made = affected_replicas(m), m.incident.touched if m.incident else {}
    replacements = []
    for r in story.replacements if story else ():
        came = "from a warm standby" if r.from_standby else "newly started"
        serving = "not serving yet" if r.serving_at is None else f"serving since {moment(r.serving_at)}"
        replacements.append(plain(f"{r.replica}#{r.incarnation} on {r.node}, pid {r.pid}, {came}; {serving}", 300))
    proofs: dict[tuple[str, int], WeightProofSection] = {}
    refused = []
    since = m.incident.opened_at if m.incident else 0.0
    for e in m.around:
        payload = e.payload
        if (
            e.wall_at < since
            or not isinstance(payload, WeightsRejected | WeightsAdmitted)
            or payload.replica not in who
        ):
            continue
        key = (payload.replica, payload.incarnation)
        if isinstance(payload, WeightsRejected):
            refused.append(plain(f"{key[0]}#{key[1]}: {payload.part}: {payload.because}", 400))
        elif key[1] >= made.get(key[0], 1 << 60) and key not in proofs:
            proofs[key] = _proof(payload, max(0.0, e.wall_at - since))
    return RecoverySection(
        replacements=tuple(replacements[:NUM_SHOWN_MAX]),
        proofs=tuple(proofs.values())[:NUM_SHOWN_MAX],
        refused=tuple(refused[:NUM_SHOWN_MAX]),
        verified=plain(story.verified_because, 600) if story else "",
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
