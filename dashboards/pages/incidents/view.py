"""What the page of one incident says in words: who and what, the state in a sentence, findings with their evidence,
decisions with guards and persons, the proof of the cure. Pure; every text is plain and limited.
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
from rolecall.dashboards.pages.incidents.timeline import by_words, touched
from rolecall.recovery.incidents.incident import Attempt, Decision, Incident, IncidentState
from rolecall.views.incidents import IncidentSummary

SENTENCE_MAX = 2_000
NUM_SHOWN_MAX = 40
"""Suspects, pieces of evidence, sentences of witnesses: of more the number is told."""
VISIBLE_SECONDS = 0.05
"""Two moments nearer than this are one to a reader."""
K = EventKind

Facts = tuple[tuple[str, str], ...]
"""What it is called, in our words; and what it is, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentHeader:
    """The top of the page."""

    incident_id: str
    sentence: str
    glyph: str
    status: str
    state: str  # in words
    who: tuple[str, ...]
    facts: Facts
    injected: str = ""  # the fault behind it, where the injector's log is there


def head(m: IncidentPageInputs, story: IncidentSummary | None) -> IncidentHeader:
    i = m.incident
    if i is None:
        why = m.set_aside or "nothing is known of it"
        return IncidentHeader(
            incident_id=plain(m.incident_id, 200),
            sentence=plain(why),
            glyph=GLYPHS[SET_ASIDE],
            status=SET_ASIDE,
            state="Set aside: its events cannot be read as one story. Nothing is done for it; the others go on.",
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
        ("Found by", plain(", ".join(d.detectors), 200) or "nobody says"),
        ("Onset", moment(d.onset)),
        ("Found", f"{seconds(max(0.0, d.detected_at - d.onset))} after the onset"),
    ]
    if d.gain_ratio is not None:
        facts.append(("Slower than its peers", f"{d.gain_ratio:.2f} times"))
    if i.mark is not None:
        verdict = "right" if i.mark.right else "wrong"
        because = f": {i.mark.because}" if i.mark.because else ""
        facts.append(("Marked", plain(f"{verdict} by {i.mark.by}{because}", 400)))
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
    named = "and the right one was named" if story.named_right else "and another one was named"
    found = seconds(max(0.0, story.detected_at - story.fault.injected_at))
    how = f" ({story.fault.how})" if story.fault.how else ""
    return plain(f"{story.fault.kind}{how} at {', '.join(story.fault.hit)}, found {found} later, {named}", 400)


def state_words(i: Incident, story: IncidentSummary | None, now: float) -> str:
    """How it stands, in a sentence."""
    a, found = i.attempt, i.diagnosis.detected_at
    if i.outcome is not None:
        return _closed_words(i, story)
    since = seconds(max(0.0, now - i.opened_at))
    match i.state:
        case IncidentState.PROPOSED if a is not None and a.decision is None:
            left = "" if a.expires_at is None else f"; the proposal lapses in {seconds(max(0.0, a.expires_at - now))}"
            return f"Waits for a person: {action_words(a.plan)} is proposed{left}"
        case IncidentState.PROPOSED if a is not None:
            return f"{str(a.decision).capitalize()} by {a.decided_by or 'nobody'}; waits for the guards"
        case IncidentState.ACTING if a is not None and a.started_at is not None:
            return f"In recovery: {action_words(a.plan)}, for {seconds(max(0.0, now - a.started_at))}"
        case IncidentState.VERIFYING if a is not None and a.done_at is not None:
            return f"{action_words(a.plan)} is done; waits for {seconds(max(0.0, now - a.done_at))} to see it work"
        case IncidentState.PLANNED if a is not None and status_of(i) == HELD:
            return f"Held by {', '.join(sorted(a.held_by))}: {action_words(a.plan)}; open for {since}"
        case IncidentState.PLANNED if a is not None:
            return f"Decided: {action_words(a.plan)}; open for {since}"
        case _:
            failed = i.failures[-1] if i.failures else None
            after = f"; attempt {failed.number} failed: {failed.failed_because}" if failed else ""
            return f"Diagnosed {seconds(max(0.0, now - found))} ago, and nothing is decided yet{after}"


def _closed_words(i: Incident, story: IncidentSummary | None) -> str:
    found, known = i.diagnosis.detected_at, i.diagnosis.because
    because, called = (_rest(text, known) for text in (i.because, i.page_reason))
    person = ""
    if i.page_reason:
        person = f" A person was called: {called}" if called and called != because else " A person was called."
    if str(i.outcome) == "resolved":
        cured_at = story.cured_at if story is not None and story.cured_at is not None else i.verified_at
        after = seconds(max(0.0, (cured_at if cured_at is not None else i.opened_at) - found))
        attempts = f", at attempt {len(i.attempts)}" if len(i.attempts) > 1 else ""
        seen = f": {story.verified_because}" if story is not None and story.verified_because else ""
        worked = ""
        if i.verified_at is not None and cured_at is not None and i.verified_at - cured_at >= VISIBLE_SECONDS:
            worked = f" (seen to work after {seconds(max(0.0, i.verified_at - found))})"
        return f"Resolved {after} after the finding{worked}{attempts}{seen}"
    words = {
        "tolerated": "Tolerated, nothing was done",
        "observed": "Only observed: the fault ended without rolecall",
        "self_recovered": "Refuted: the fault ended before rolecall acted",
        "escalated": "Given up",
    }
    lasted = seconds(max(0.0, (i.closed_at or i.opened_at) - i.opened_at))
    told = f"{words.get(str(i.outcome), str(i.outcome))}, after {lasted}"
    return f"{told}: {because}.{person}" if because else f"{told}.{person}"


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
    """What was said, and on what evidence."""

    title: str
    because: str
    advice: str
    settle: str
    evidence: tuple[EvidenceItem, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidenceSection:
    """What was pulled of the agents for this incident."""

    because: str
    told: tuple[str, ...]
    findings: tuple[FindingSection, ...]
    missing: tuple[str, ...]
    files: tuple[str, ...]  # names below the run
    seconds: float


def findings(m: IncidentPageInputs) -> tuple[FindingSection, ...]:
    """The diagnosis, and each time that more was known, oldest first."""
    found = []
    for e in m.events:
        if isinstance(e.payload, IncidentOpened | IncidentUpdated):
            d = e.payload.diagnosis
            when = "Found" if isinstance(e.payload, IncidentOpened) else "More was known"
            title = f"{when} {moment(e.wall_at)} by {', '.join(d.detectors) or 'nobody'}"
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
    """A number in the unit that its name ends in."""
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
"""How the name of a number ends: what it is multiplied by, and how it is written."""


def collected_evidence(m: IncidentPageInputs) -> tuple[CollectedEvidenceSection, ...]:
    """What EVIDENCE_COLLECTED tells."""
    return tuple(_witness(e.payload) for e in m.events if isinstance(e.payload, EvidenceCollected))


def _witness(said: EvidenceCollected) -> CollectedEvidenceSection:
    return CollectedEvidenceSection(
        because=plain(said.because),
        told=_texts(said.told),
        findings=tuple(_finding(f"Said by {f.detector}", f.because, f.evidence) for f in said.findings[:NUM_SHOWN_MAX]),
        missing=_texts(said.missing),
        files=tuple(f.name for f in said.files[:200]),
        seconds=said.seconds,
    )


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(plain(text, 1000) for text in texts[:NUM_SHOWN_MAX])


# --- decisions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """One plan, and what became of it."""

    number: int
    title: str
    digest: str
    because: str
    also_hit: tuple[str, ...]
    held: tuple[str, ...]
    words: tuple[str, ...]  # of persons
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
    facts = [("PlanSection", moment(a.made_at))]
    if a.started_at is not None:
        facts.append(("Action began", f"{seconds(max(0.0, a.started_at - a.made_at))} after the decision"))
    if a.done_at is not None and a.started_at is not None:
        facts.append(("Action took", seconds(max(0.0, a.done_at - a.started_at))))
    return PlanSection(
        number=a.number,
        title=action_words(a.plan),
        digest=plain(a.plan.digest, 40),
        because=_beyond(plain(a.plan.because, SENTENCE_MAX), plain(i.diagnosis.because, SENTENCE_MAX)),
        also_hit=tuple(plain(text, 300) for text in a.plan.also_hit[:NUM_SHOWN_MAX]),
        held=tuple(plain(text, 600) for text in held[:NUM_SHOWN_MAX]),
        words=tuple(_spoken(during)),
        outcome=plain(_became(a, i), 600),
        facts=tuple(facts),
    )


def _beyond(because: str, diagnosis: str) -> str:
    """A reason without the diagnosis, which stands on top of the page."""
    if not diagnosis or diagnosis not in because:
        return because
    rest = _rest(because, diagnosis)
    return f"of the diagnosis; {rest}" if rest else "of the diagnosis"


def _rest(text: str, diagnosis: str) -> str:
    """What it says beyond the diagnosis."""
    return text.replace(diagnosis, "").strip(" :;,.") if diagnosis and diagnosis in text else text


_SAID: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved it",
    K.PLAN_REJECTED: "said no",
    K.HOLD_PLACED: "put it on hold",
    K.HOLD_LIFTED: "lifted the hold",
}


def _spoken(during: Iterable[Event]) -> Iterable[str]:
    for e in during:
        if e.kind in _SAID:
            yield plain(by_words(e.payload, f"{_SAID[e.kind]}, {moment(e.wall_at)}"), 600)
        elif isinstance(e.payload, OncallPaged):
            yield plain(f"a person was called ({e.payload.topic}): {e.payload.because}", 600)
        elif isinstance(e.payload, PlanExpired):
            yield plain(f"the proposal lapsed: {e.payload.because}", 600)


def _became(a: Attempt, i: Incident) -> str:
    if a.failure is not None:
        return f"failed ({a.failure}): {a.failed_because}"
    if a is not i.attempt:
        return "made again: more was known"
    if a.done_at is not None:
        return "done, and seen to work" if i.verified_at is not None else "done; it is not seen to work yet"
    if a.started_at is not None:
        return "under way"
    if a.decision in (Decision.REJECTED, Decision.EXPIRED):
        return f"{a.decision}: {a.decision_because}"
    return "not performed" if i.closed_at is not None else "waits"


# --- the proof ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProofSection:
    """What stands for it that a replacement is whole."""

    title: str
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySection:
    replacements: tuple[str, ...]
    proofs: tuple[WeightProofSection, ...]
    refused: tuple[str, ...]
    verified: str


def recovery_section(m: IncidentPageInputs, story: IncidentSummary | None) -> RecoverySection:
    who, made = touched(m), m.incident.touched if m.incident else {}
    replacements = []
    for r in story.replacements if story else ():
        came = "from a warm standby" if r.from_standby else "started afresh"
        serving = "it does not serve yet" if r.serving_at is None else f"serves since {moment(r.serving_at)}"
        replacements.append(plain(f"{r.replica}#{r.incarnation} on {r.node}, pid {r.pid}, {came}; {serving}", 300))
    proofs: dict[tuple[str, int], WeightProofSection] = {}
    refused = []
    since = m.incident.opened_at if m.incident else 0.0
    for e in m.around:
        said = e.payload
        if e.wall_at < since or not isinstance(said, WeightsRejected | WeightsAdmitted) or said.replica not in who:
            continue
        key = (said.replica, said.incarnation)
        if isinstance(said, WeightsRejected):
            refused.append(plain(f"{key[0]}#{key[1]}: {said.part}: {said.because}", 400))
        elif key[1] >= made.get(key[0], 1 << 60) and key not in proofs:
            proofs[key] = _proof(said, max(0.0, e.wall_at - since))
    return RecoverySection(
        replacements=tuple(replacements[:NUM_SHOWN_MAX]),
        proofs=tuple(proofs.values())[:NUM_SHOWN_MAX],
        refused=tuple(refused[:NUM_SHOWN_MAX]),
        verified=plain(story.verified_because, 600) if story else "",
    )


def _proof(admitted: WeightsAdmitted, after_seconds: float) -> WeightProofSection:
    proof = admitted.proof
    same = "the same" if proof.manifest_digest == proof.received_digest else "ANOTHER"
    facts = [
        ("Policy version", str(admitted.policy_version)),
        ("Weights from", plain(admitted.holder, 100)),
        ("Received", quantity("bytes", admitted.bytes)),
        ("In", quantity("seconds", admitted.seconds)),
        ("What was sent and received", plain(f"{same}: {proof.manifest_digest[:16]}", 100)),
        ("Read back from the engine", plain(proof.storage_digest[:16], 40)),
        ("Tensors proven", f"{proof.covered}, not covered: {len(proof.uncovered)}"),
    ]
    if proof.canary_logprobs:
        facts.append(("Canary answers", f"{len(proof.canary_logprobs)} log probabilities are kept with it"))
    who = f"{admitted.replica}#{admitted.incarnation}"
    title = plain(f"{who}: weights admitted {seconds(after_seconds)} after it was opened", 200)
    return WeightProofSection(title=title, facts=tuple((k, v) for k, v in facts if v))
