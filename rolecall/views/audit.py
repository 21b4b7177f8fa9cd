"""`rolecall audit RUN`: is the run's journal intact, and did every prompt group enter the optimizer exactly once?

Checks: the hash chain of the journal; chain and state transitions of the ledger; every copy of the ledger's head
outside the ledger (anchors): commit records in the journal and in checkpoints, the controller's final record, and the
report; that the ledger and the committed steps agree on the trained groups; and that each readmitted rollout served
with its own proof. A problem is a sentence. Read-only.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Audit, GroupState, Ledger, audit
from rolecall.core.journal.payloads.run import ChainHead, ReplicaReady, RunEnded, StepCommitted, WeightsAdmitted
from rolecall.core.journal.run_end import DONE_FLAG, run_end
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted, plain

COMPLETED = "completed"
COMPLETE_OUTCOMES = frozenset({COMPLETED, "stopped"})
"""Outcomes of a run whose controller shut down in order: after these, no group may be open."""

REPORT_JSON = "report.json"

Anchor = tuple[str, ChainHead]
"""(location, head)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A rollout incarnation that began to serve, and its first proof."""

    replica: str
    incarnation: int
    policy_version: int
    wall_at: float
    readmitted: bool  # not the first with its name: a replacement, or a promoted standby
    proof: dict[str, Any]
    problem: str = ""  # why the proof is invalid; empty if it is valid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    ok: bool
    run_id: str
    problems: tuple[str, ...]
    journal: ChainHead
    ledger: Audit
    num_anchors: int
    admissions: tuple[Admission, ...] = ()
    weights_proven: int = 0
    """Readmissions with a valid proof."""
    damage: JournalCorrupt | None = None
    """Why the journal's events were not used."""
    watched: bool = False
    """rolecall did not start the job: it has a journal, and no ledger."""
    notes: tuple[str, ...] = field(default=())

    def summary(self) -> dict[str, Any]:
        """The `audit` section of the report."""
        ledger = self.ledger
        return {
            "ok": self.ok,
            "groups_issued": ledger.groups_issued,
            "groups_trained": ledger.groups_trained,
            "groups_dropped": ledger.groups_dropped,
            "groups_undone": ledger.groups_undone,
            "duplicates": ledger.duplicates,
            "unaccounted": ledger.unaccounted,
            "dropped_by_reason": ledger.dropped_by_reason,
            "dropped_by_length": ledger.dropped_by_length,
            "filtered_by_length": ledger.filtered_by_length,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "anchors": self.num_anchors,
            "journal_head": asdict(self.journal),
            "ledger_head": asdict(ledger.head),
        }


def audit_run(run: RunDir, *, watched: bool = False) -> RunAudit:
    """Audits a run's directory, finished or not. `watched`: of a job that rolecall did not start.

    Raises:
        JournalError: there is no journal.
        JournalCorrupt: the file is not a readable database; which file, and why.
    """
    with closing(Journal(run.database_url, create=False)) as journal:
        return audit_journal(journal, run.run_id, run, watched=watched)


def audit_journal(journal: Journal, run_id: str, run: RunDir | None, *, watched: bool = False) -> RunAudit:
    """Like `audit_run`, for an open journal. `run`: location of checkpoints and report, if available.

    Raises:
        JournalError: it cannot be read now.
    """
    problems: list[str] = []
    notes: list[str] = []
    events: list[Event] = []
    journal_head = ChainHead(position=0, hash="")
    damage: JournalCorrupt | None = None
    try:
        journal_head = journal.verify()
        events = journal.events(limit=journal_head.position)
    except JournalCorrupt as e:
        damage = e
        problems.append(f"journal: {e}; what its events say is not used")
    report = _report(run.path / REPORT_JSON, problems) if run is not None else {}
    anchors = [
        *(
            (f"commit record of step {said.step}", said.ledger)
            for e in events
            if isinstance(said := e.payload, StepCommitted) and said.ledger.position > 0
        ),
        *(_from_checkpoints(run.checkpoints, problems) if run is not None else ()),
        *_from_last_word(journal, problems),
    ]
    if report:
        anchors += _from_report(report, "ledger_head")
        for where, head in _from_report(report, "journal_head"):
            problems += _journal_anchor(where, head, journal_head, events)
    lines = Ledger(journal.store).lines()
    end = run_end(events)
    outcome = end.as_(RunEnded).outcome if end is not None else ""
    found = audit(lines, anchors, ended=outcome in COMPLETE_OUTCOMES)
    problems += found.problems
    if found.duplicates:
        problems.append(f"trained twice: {counted(found.duplicates, 'group')}")
    if watched:
        notes.append("rolecall only watches this job: it has no ledger, so no prompt groups were checked")
    elif outcome not in COMPLETE_OUTCOMES:
        notes.append(f"the run {'ended as ' + outcome if outcome else 'has not ended'}: open groups are not counted")
    if not found.problems:  # a damaged ledger cannot be compared step by step
        problems += compare_steps(events, lines, complete=outcome in COMPLETE_OUTCOMES)
    admissions = admitted(events)
    problems += [f"{a.replica}#{a.incarnation}: {a.problem}" for a in admissions if a.problem]
    return RunAudit(
        ok=not problems,
        run_id=run_id,
        problems=tuple(problems),
        journal=journal_head,
        ledger=found,
        num_anchors=len(anchors),
        admissions=tuple(admissions),
        weights_proven=sum(a.readmitted and not a.problem for a in admissions),
        damage=damage,
        watched=watched,
        notes=tuple(notes),
    )


def _head(value: Any) -> ChainHead | None:
    try:
        return ChainHead(position=int(value["position"]), hash=str(value["hash"]))
    except (TypeError, KeyError, ValueError):
        return None


def _from_last_word(journal: Journal, problems: list[str]) -> list[Anchor]:
    word = journal.flag(DONE_FLAG)
    if word is None:
        return []  # the run has not shut down yet
    try:
        head = _head(json.loads(word)["ledger"])
    except (ValueError, KeyError, TypeError):
        head = None
    if head is None:
        problems.append("the controller's last word holds no ledger head")
        return []
    return [("the controller's last word", head)]


def _from_checkpoints(folder: Path, problems: list[str]) -> list[Anchor]:
    """Ledger heads in the commit records of checkpoints; a malformed record is a problem."""
    found = []
    for path in sorted(p for p in folder.glob("step-*") if p.is_dir()):
        where = f"checkpoint {path.name}"
        try:
            raw = (path / "commit.json").read_bytes()
            written = json.loads((path / "meta.json").read_text(encoding="utf-8"))["files"]
            head = _head(json.loads(raw)["commit"]["ledger"])
            sizes = {name: (path / name).stat().st_size for name in written}
        except (OSError, ValueError, TypeError, KeyError) as e:
            problems.append(f"{where} cannot be read: {e!r}")
            continue
        if hashlib.sha256(raw).hexdigest() != written["commit.json"]["sha256"]:
            problems.append(f"{where}: commit.json was changed: its SHA-256 is not that of what was written")
            continue
        wrong = [n for n, size in sizes.items() if size != written[n]["bytes"]]
        problems += [f"{where}: {name} does not have the size that was written" for name in wrong]
        if head is None:
            problems.append(f"{where}: its commit record holds no ledger head")
        elif head.position > 0:
            found.append((where, head))
    return found


def _report(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        problems.append(f"report.json cannot be read: {e}")
        return {}
    return value if isinstance(value, dict) else {}


def _from_report(report: Mapping[str, Any], which: str) -> list[Anchor]:
    summary = report.get("audit")
    head = _head(summary.get(which)) if isinstance(summary, dict) else None
    return [] if head is None else [("report.json", head)]


def _journal_anchor(where: str, anchor: ChainHead, head: ChainHead, events: Sequence[Event]) -> list[str]:
    if not head.hash or anchor.position == 0:
        return []
    if anchor.position > head.position:
        return [
            f"{where} knows {anchor.position} journal lines, the journal has {head.position}: its tail was truncated"
        ]
    if events[anchor.position - 1].hash != anchor.hash:
        return [f"{where} knows another journal: line {anchor.position} has another hash"]
    return []


def compare_steps(events: Iterable[Event], lines: Iterable[Mapping[str, Any]], *, complete: bool) -> list[str]:
    """Disagreements of journal and ledger on the groups trained in a step. Pure.

    `complete`: the run is over, so a trained step without its event is a problem, not just pending.
    """
    step_of: dict[str, int] = {}
    undone: set[str] = set()
    for line in lines:
        group = str(line["group_id"])
        if line["state"] == GroupState.TRAINED:
            step_of[group] = int(line["step"])
        elif line["state"] == GroupState.UNDONE:
            step_of.pop(group, None)
            undone.add(group)
    trained: dict[int, set[str]] = {}
    for group, step in step_of.items():
        trained.setdefault(step, set()).add(group)
    by_event: dict[int, set[str]] = {}
    for event in events:
        if isinstance(event.payload, StepCommitted):
            by_event[event.payload.step] = set(event.payload.groups)
    problems = []
    for step in sorted(by_event):
        by_ledger = trained.get(step, set())
        missing, more = by_event[step] - by_ledger, by_ledger - by_event[step]
        if not by_ledger and (missing <= undone or (step == max(by_event) and not complete)):
            continue  # undone and not repeated; or the controller died between the event and the ledger
        if more or missing:
            names = ", ".join(sorted(missing | more)[:5])
            problems.append(
                f"step {step}: journal and ledger disagree on {counted(len(missing | more), 'group')}: {names}"
            )
    if complete and by_event:
        lone = sorted(trained.keys() - by_event.keys())
        problems += [f"step {s}: trained by the ledger, never committed by the journal" for s in lone]
    return problems


def admitted(events: Iterable[Event]) -> list[Admission]:
    """The first admission of every rollout incarnation, and whether its proof is valid. Pure.

    The first proof of a version defines its manifest: all others must agree, and so must the storage digests of one
    version, since the rollouts of one run have one layout.
    """
    manifests: dict[int, str] = {}
    storages: dict[int, str] = {}
    promoted: set[tuple[str, int]] = set()
    first: dict[tuple[str, int], Admission] = {}
    for event in events:
        said = event.payload
        if isinstance(said, ReplicaReady) and said.from_standby:
            promoted.add((said.replica, said.incarnation))
        if not isinstance(said, WeightsAdmitted):
            continue
        key = (said.replica, said.incarnation)
        proof = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(said.proof).items()}
        version = said.policy_version
        problem = _proof_problem(proof, version, manifests, storages)
        if key not in first or (problem and not first[key].problem):
            admission = Admission(
                replica=key[0],
                incarnation=key[1],
                policy_version=version,
                wall_at=event.wall_at,
                readmitted=key[1] > 1 or key in promoted,
                proof={**proof, "holder": said.holder, "bytes": said.bytes, "epoch": said.epoch},
                problem=problem,
            )
            first[key] = admission
    return list(first.values())


def _proof_problem(proof: Mapping[str, Any], version: int, manifests: dict[int, str], storages: dict[int, str]) -> str:
    if not proof.get("manifest_digest") or not proof.get("canary_logprobs"):
        return f"admitted to version {version} without a whole proof"
    manifest, storage = str(proof["manifest_digest"]), str(proof.get("storage_digest", ""))
    if proof.get("received_digest") != manifest:
        return f"admitted to version {version} although the bytes received are not the manifest's"
    if manifests.setdefault(version, manifest) != manifest:
        return f"admitted to version {version} of another manifest than its peers"
    if storages.setdefault(version, storage) != storage:
        return f"admitted to version {version} with another storage digest than its peers"
    return ""


def audit_text(found: RunAudit) -> str:
    ledger = found.ledger
    groups = (
        f"{ledger.groups_issued} issued, {ledger.groups_trained} trained, {ledger.groups_dropped} dropped, "
        f"{ledger.groups_undone} undone, {ledger.duplicates} trained twice, {ledger.unaccounted} unaccounted"
    )
    proven = (
        f"{len(found.admissions)} rollout incarnations served, {counted(found.weights_proven, 're-admission')} proven"
    )
    lines = [
        f"run {found.run_id}: {'the audit holds' if found.ok else counted(len(found.problems), 'problem')}",
        f"  journal   {found.journal.position} events",
    ]
    if not found.watched:
        lines += [
            f"  ledger    {ledger.head.position} lines, {found.num_anchors} anchors",
            f"  groups    {groups}",
            f"  weights   {proven}",
        ]
    lines += [f"  dropped   {n} because {plain(reason)}" for reason, n in sorted(ledger.dropped_by_reason.items())]
    for bucket, n in sorted(ledger.dropped_by_length.items(), key=lambda b: int(b[0].partition("-")[0])):
        filtered = ledger.filtered_by_length.get(bucket, 0)
        lines.append(f"  tokens    {bucket}: {n} dropped{f', {filtered} of them filtered' if filtered else ''}")
    lines += [f"  note      {plain(note)}" for note in found.notes]
    lines += [f"  PROBLEM   {plain(problem)}" for problem in found.problems]
    return "\n".join(lines)


def offer(error: JournalCorrupt) -> str:
    """A sentence for people; empty where the journal is none of a run directory's."""
    run = Path(error.where.partition(": ")[0]).parent
    checkpoints, report = run / "checkpoints", run / REPORT_JSON
    if not checkpoints.is_dir():
        return ""
    found = newest_whole(checkpoints)
    offered = [f"its newest whole checkpoint {found}"] if found is not None else []
    if report.is_file():
        offered.append(f"the report that was written before, {report}")
    if not offered:
        return f"nothing else of this run can be used: {checkpoints} holds no whole checkpoint"
    return f"what can still be used of this run: {'; '.join(offered)}"


def newest_whole(folder: Path) -> Path | None:
    """The newest `step-*` of which every file is what was written."""
    return next((p for p in sorted(folder.glob("step-*"), reverse=True) if _whole(p)), None)


def _whole(path: Path) -> bool:
    try:
        files = json.loads((path / "meta.json").read_text(encoding="utf-8"))["files"]
        sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in files}
        return bool(sums) and all(sums[name] == files[name]["sha256"] for name in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
