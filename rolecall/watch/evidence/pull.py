"""Collects the evidence of an incident from the agents: stacks, Flight Recorder dumps, NCCL RAS, kernel lines.

The loop never waits: what arrives within `DEADLINE_SECONDS` is stored, the rest is reported as missing with its reason.
What another system says of the nodes is read beside that, within `NODE_HEALTH_SECONDS`, and holds no finding up.
Requests to one agent are sequential, agents are queried concurrently, all in daemon threads. Files are in
`evidence/<incident>/` of the run, readable by their owner only, redacted like those of `rolecall incident export`; one
journal event lists the files and what the detectors found in them. What cannot be stored is analysed all the same.
"""

import hashlib
import json
import logging
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import EvidenceKind
from rolecall.core.http import HttpFailed, request
from rolecall.core.journal.payloads.recovery import EvidenceCollected, EvidenceFileRecord
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.core.telemetry import Phase
from rolecall.core.text import node_text, plain
from rolecall.detector.base.plain_pickle import UnsafePickle
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import suspect
from rolecall.recovery.incidents import finite
from rolecall.recovery.interfaces import CollectedEvidence
from rolecall.reports.incident_export import EVIDENCE_DIR, run_redactor
from rolecall.reports.redaction import STACKS, Redactor, redacted
from rolecall.watch.evidence.diagnosis import EvidenceAnalysis, EvidenceFile, analyse_evidence
from rolecall.watch.evidence.node_health import NodeHealth
from rolecall.watch.evidence.requests import KIND_TEXTS, EvidenceRequest, process_name, select_evidence

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 20.0
"""Of one incident, from its first request. An agent abandons a stack or a dump after 10 s."""
NODE_HEALTH_SECONDS = 10.0
"""For what another system says of all nodes of an incident, from its first request."""
NODE_HEALTH_GRACE_SECONDS = 0.5
"""Beyond it, for an answer that says which nodes were not read."""
NUM_AGENTS_AT_ONCE = 16
"""Agents of one incident."""
NUM_INCIDENTS_AT_ONCE = 2
NUM_WAITING_MAX = 32
BUSY_PAUSE_SECONDS = 0.2
PROBE_SECONDS, PROBE_SECONDS_MAX = 5.0, 300.0
"""Between two probes of a suspicion: the first pause, doubled each time, and the longest."""
BYTES_MAX = {
    EvidenceKind.STACKS: 6 << 20,
    EvidenceKind.FLIGHT: 8 << 20,
    EvidenceKind.NCCL: 4 << 20,
    EvidenceKind.KERNEL: 1 << 20,
}
"""Of one response. A trainer with 30 threads of 40 frames takes 0.3 MB, as does each engine process below it, a dump of
2,000 entries 0.3 to 1 MB."""
INCIDENT_BYTES_MAX = 64 << 20
NUM_KEPT_MAX = 500
"""Incidents of a run whose evidence is stored: about 2 MB each, at most INCIDENT_BYTES_MAX. That of later ones is only
analysed: no evidence is removed that someone may still need."""
REASON_CHARS_MAX = 300
NUM_STATEMENTS_MAX = 40
"""Texts of each kind in the event."""
NUM_NAMED_MAX = 4
AGENTS_NAMED_MAX = 8
WRONG_TOKEN = "give the watch the token of these agents (docs/reference/agent.md, Security)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """`incident_id`: empty for a suspicion, whose evidence is not stored. `part`: as in `EvidenceCollector.request`.
    `between`: processes between two steps."""

    incident_id: str
    asks: tuple[EvidenceRequest, ...]
    nodes: tuple[str, ...] = ()  # of its suspects
    ours: frozenset[tuple[str, int]] = frozenset()  # node and PID of the job's processes
    part: int = 1
    between: frozenset[Suspect] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvidenceResponse:
    ask: EvidenceRequest
    body: bytes | None = None  # None: it is missing
    wall_at: float = 0.0
    missing: str = ""
    unasked: bool = False  # the reason concerns the agent, not the kind of evidence


def no_token(urls: Sequence[str], run_id: str) -> str:
    """Why agents were not asked, and the commands that change it."""
    again = f"rolecall watch agents {','.join(urls)} --id {run_id} --credentials credentials"
    return (
        "no evidence was requested: agents require their bearer token. `umask 077; rolecall agent token "
        "--bearer > credentials` on a node writes it to a file; then start the watch with it: "
        + (f"`{again}`" if len(urls) <= AGENTS_NAMED_MAX else "`--credentials credentials`")
    )


class EvidenceRequestFailed(Exception):
    """The evidence is unavailable; the message says why. `status`: HTTP status of the agent's response, 0 without
    one.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        self.status = status
        super().__init__(reason)


def request_evidence(url: str, path: str, authorization: str, *, seconds: float, bytes_max: int) -> bytes:
    """The response of the agent at `url` to `path`, within `seconds`. Raises EvidenceRequestFailed: it does not respond
    in time, rejects the request, or sends more than `bytes_max`."""
    headers = {"Authorization": authorization}
    try:
        answer = request("GET", url.rstrip("/") + path, headers=headers, deadline_seconds=seconds, bytes_max=bytes_max)
    except HttpFailed as error:
        if error.late:
            raise EvidenceRequestFailed(f"no complete answer of its agent within {seconds:.0f} s") from None
        if error.too_large:
            raise EvidenceRequestFailed(str(error), HTTPStatus.OK) from None
        raise EvidenceRequestFailed(f"its agent does not answer ({plain(str(error), REASON_CHARS_MAX)})") from None
    if answer.status != HTTPStatus.OK:
        try:
            reason = f"its agent reports: {plain(str(json.loads(answer.body)['error']), REASON_CHARS_MAX)}"
        except (ValueError, KeyError, TypeError):
            reason = f"its agent answers with status {answer.status}"
        raise EvidenceRequestFailed(reason, answer.status)
    return answer.body


class EvidenceRejected(Exception):
    """A response cannot be stored, with the reason."""


class EvidenceFiles:
    """Writes the redacted evidence of one incident, each file readable by its owner only."""

    def __init__(self, folder: Path, known: Redactor, part: int) -> None:
        """`folder`: the incident's, created in the parent of all. `part`: see `EvidenceCollector.request`. Raises
        OSError: nothing can be stored."""
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not folder.exists() and sum(1 for _ in folder.parent.iterdir()) >= NUM_KEPT_MAX:
            raise OSError(0, f"{folder.parent} already holds the evidence of {NUM_KEPT_MAX} incidents, the limit")
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._known, self._part = folder, known, part

    def keep(self, ask: EvidenceRequest, number: int, body: bytes, wall_at: float) -> EvidenceFile:
        """`number`: replaces the rank of a dump that does not contain it. `wall_at`: time of the evidence. Raises
        EvidenceRejected: it is malformed or too large; OSError: it cannot be written."""
        try:
            content = redacted(ask.kind, body, self._known, is_stopped=ask.is_stopped)
        except (UnsafePickle, ValueError, RecursionError) as e:
            raise EvidenceRejected(f"its agent's response is malformed ({e})") from None
        stored = 0
        for file in self._folder.iterdir():
            with suppress(FileNotFoundError):  # a temporary file of another part
                stored += file.stat().st_size
        if stored + len(content) > INCIDENT_BYTES_MAX:
            raise EvidenceRejected(f"left out, over {INCIDENT_BYTES_MAX >> 20} MiB for this incident")
        path = self._folder / _name(ask, number, self._part)
        write_atomically(path, content, private=True)
        os.utime(path, (wall_at, wall_at))  # the detectors compute waiting times from it
        return EvidenceFile(kind=ask.kind, path=path, who=ask.who, suspected=ask.suspected)


def _name(ask: EvidenceRequest, number: int, part: int) -> str:
    """Those of later parts have its number before the suffix, where the detectors expect that of a round."""
    suffix = ".log" if ask.kind is EvidenceKind.KERNEL else ".json"
    if ask.kind is EvidenceKind.FLIGHT:
        name = f"flight_rank_{number}"
    elif ask.who is not None:
        name = f"{STACKS}{ask.who.replica}-rank_{ask.who.rank}"
    else:
        name = f"nccl_ras-{ask.node}" if ask.kind is EvidenceKind.NCCL else f"kernel-{ask.node}"
    name += (f".{part}" if part > 1 else "") + suffix
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


class EvidencePull:
    """A `recovery.interfaces.EvidenceCollector`. `request` and `collected` are for the loop's thread and never
    block."""

    def __init__(
        self,
        run: RunDir,
        agents: Callable[[], Mapping[str, str]],
        authorization: Callable[[str], str],
        fleet: Callable[[], Iterable[MonitoredProcess]],
        clock: Clock,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        node_health: Callable[[Sequence[str], float], NodeHealth] | None = None,
    ) -> None:
        """`agents`: node -> URL. `authorization`: URL -> the header's value with the bearer token; empty: no request
        is sent there. `fleet`: the processes that the detectors know, called by `request`. `node_health`: what another
        system says of nodes, within so many seconds; None: no other one is asked."""
        self._node_health = node_health
        self._run, self._agents, self._authorization, self._fleet = run, agents, authorization, fleet
        self._clock, self._deadline_seconds = clock, deadline_seconds
        self._jobs: queue.Queue[_Job] = queue.Queue(NUM_WAITING_MAX)
        self._collected: deque[CollectedEvidence] = deque()
        self._findings: deque[Finding] = deque()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._probes: dict[str, tuple[float, float]] = {}  # key of a suspicion -> time of its next probe, its pause

    def request(self, incident_id: str, diagnosis: Diagnosis, part: int = 1) -> None:
        fleet = tuple(self._fleet())
        asks = tuple(select_evidence(diagnosis, fleet))
        nodes = tuple(dict.fromkeys(str(s.node) for s in diagnosis.suspects if s.node)) if self._node_health else ()
        if not asks and not nodes:
            return
        try:
            ours = frozenset(
                (str(p.node), p.pid)
                for p in (*(s.process for s in fleet), *(s.process for s in diagnosis.suspects))
                if p is not None
            )
            between = frozenset(suspect(s) for s in fleet if s.phase == Phase.WAIT)
            self._enqueue(_Job(incident_id=incident_id, asks=asks, nodes=nodes, ours=ours, part=part, between=between))
        except queue.Full:
            because = f"no evidence was requested: {NUM_WAITING_MAX} other incidents are in the queue"
            self._record(incident_id, part, missing=[because])

    def probe(self, suspicions: Iterable[Diagnosis]) -> None:
        """Requests the stacks of all processes of each suspicion, again after a growing pause while it stands. Call it
        after each observation, with all suspicions that stand."""
        now, standing = self._clock.monotonic(), {d.key: d for d in suspicions}
        self._probes = {key: probe for key, probe in self._probes.items() if key in standing}
        for key, suspicion in standing.items():
            due, pause = self._probes.get(key, (now, PROBE_SECONDS))
            if now < due:
                continue
            self._probes[key] = now + pause, min(2 * pause, PROBE_SECONDS_MAX)
            asks = select_evidence(suspicion, self._fleet())
            stacks = tuple(ask for ask in asks if ask.kind is EvidenceKind.STACKS)
            if stacks:
                with suppress(queue.Full):  # incidents come first
                    self._enqueue(_Job(incident_id="", asks=stacks))

    def _enqueue(self, job: _Job) -> None:
        """Raises queue.Full."""
        if not self._threads:
            for n in range(NUM_INCIDENTS_AT_ONCE):
                self._threads.append(threading.Thread(target=self._work, name=f"evidence-{n}", daemon=True))
                self._threads[-1].start()
        self._jobs.put_nowait(job)

    def collected(self) -> list[CollectedEvidence]:
        return [self._collected.popleft() for _ in range(len(self._collected))]

    def findings(self) -> tuple[Finding, ...]:
        """Findings from evidence since the last call."""
        return tuple(self._findings.popleft() for _ in range(len(self._findings)))

    def close(self) -> None:
        """Abandons everything in progress."""
        self._closed.set()

    # --- in separate threads

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                job = self._jobs.get(timeout=BUSY_PAUSE_SECONDS)
            except queue.Empty:
                continue
            try:
                if job.incident_id:
                    self._pull(job)
                else:
                    self._pull_probe(job)
            except Exception as e:  # deliberate: a defect here affects only this incident's evidence
                logger.exception("evidence of %s", job.incident_id or "a suspicion")
                if job.incident_id:
                    because = f"the evidence could not be processed: {type(e).__name__}: {e}"
                    self._record(job.incident_id, job.part, missing=[because])

    def _pull(self, job: _Job) -> None:
        started_at = self._clock.monotonic()
        health_due = self._ask_node_health(job.nodes)
        answers = self._answers(job.asks, started_at + self._deadline_seconds)
        missing = _missing(answers)
        folder, until = self._run.path / EVIDENCE_DIR / job.incident_id, started_at + 2 * self._deadline_seconds
        is_stored = True
        try:
            kept, refused = self._kept(job, folder, answers, until)
            analysis = analyse_evidence(kept, _asked(job), job.ours)
        except OSError as e:
            is_stored = False
            missing.append(f"the collected evidence could not be stored: {e.strerror or e}")
            try:
                kept, refused, analysis = self._read_once(job, answers, until)
            except OSError:  # nor is there room for temporary files
                kept, refused, analysis = [], [], EvidenceAnalysis()
        missing += refused
        self._findings.extend(analysis.settling(job.between))
        health = self._health_by(started_at + self._health_seconds, job.nodes, health_due)
        missing += health.missing
        seconds = self._clock.monotonic() - started_at
        self._record(
            job.incident_id,
            job.part,
            kept=kept,
            is_stored=is_stored,
            analysis=analysis,
            missing=missing,
            seconds=seconds,
            health=health.statements,
        )

    @property
    def _health_seconds(self) -> float:
        return min(NODE_HEALTH_SECONDS, self._deadline_seconds)

    def _ask_node_health(self, nodes: Sequence[str]) -> "queue.SimpleQueue[NodeHealth]":
        """Where the answer will be, in a while or never."""
        answer: queue.SimpleQueue[NodeHealth] = queue.SimpleQueue()
        ask, seconds = self._node_health, self._health_seconds
        if ask is None or not nodes:
            answer.put(NodeHealth())
        else:
            threading.Thread(target=lambda: answer.put(ask(nodes, seconds)), name="node-health", daemon=True).start()
        return answer

    def _health_by(self, until: float, nodes: Sequence[str], answer: "queue.SimpleQueue[NodeHealth]") -> NodeHealth:
        try:
            # Those of the nodes that were read in time are told when it has given up the others: a moment later.
            return answer.get(timeout=max(until - self._clock.monotonic(), 0.0) + NODE_HEALTH_GRACE_SECONDS)
        except queue.Empty:
            named = ", ".join(nodes[:NUM_NAMED_MAX])
            return NodeHealth(
                missing=(f"what another system says of {named}: nothing within {self._health_seconds:g} s",)
            )

    def _pull_probe(self, job: _Job) -> None:
        """Its files are not kept."""
        started_at = self._clock.monotonic()
        answers = self._answers(job.asks, started_at + self._deadline_seconds)
        _, _, analysis = self._read_once(job, answers, started_at + 2 * self._deadline_seconds)
        self._findings.extend(analysis.of_a_suspicion())

    def _read_once(
        self, job: _Job, answers: Sequence[_EvidenceResponse], until: float
    ) -> tuple[list[EvidenceFile], list[str], EvidenceAnalysis]:
        """As `_kept`, of files that are removed again, with what is found in them. Raises OSError."""
        with tempfile.TemporaryDirectory(prefix="rolecall-evidence-") as folder:
            read, refused = self._kept(job, Path(folder), answers, until)
            return read, refused, analyse_evidence(read, _asked(job), job.ours)

    def _kept(
        self, job: _Job, folder: Path, answers: Sequence[_EvidenceResponse], until: float
    ) -> tuple[list[EvidenceFile], list[str]]:
        """The files, and why there are no more. `until`: redacting takes a second for a few megabytes. Raises
        OSError."""
        # A kernel log may be empty; anything else that is empty is malformed.
        had = [(a, a.body) for a in answers if a.body is not None and (a.body or a.ask.kind is not EvidenceKind.KERNEL)]
        if not had:
            return [], []
        known = run_redactor(self._run, nodes=[a.node for a in job.asks])
        files = EvidenceFiles(folder, known, job.part)
        # The number of a dump that does not contain its rank: the registered rank, if those are unique.
        flights = [a for a in job.asks if a.kind is EvidenceKind.FLIGHT]
        ranks = [a.who.rank for a in flights if a.who is not None and a.who.rank is not None]
        unique = len(set(ranks)) == len(flights)
        numbers = {a: ranks[n] if unique else n for n, a in enumerate(flights)}
        kept, refused = list[EvidenceFile](), list[str]()
        for answer, body in had:
            if self._clock.monotonic() > until:
                refused.append(f"{answer.ask.what}: received, but there was no time left to redact it")
                continue
            try:
                kept.append(files.keep(answer.ask, numbers.get(answer.ask, 0), body, answer.wall_at))
            except EvidenceRejected as e:
                refused.append(f"{answer.ask.what}: {plain(e, 300)}")
        return kept, refused

    def _answers(self, asks: Sequence[EvidenceRequest], until: float) -> list[_EvidenceResponse]:
        """In the order of `asks`; once `until` has passed, each is answered or missing."""
        try:
            urls = dict(self._agents())
        except (OSError, ValueError) as e:
            return [_EvidenceResponse(ask=a, missing=f"the list of agents cannot be read: {e}") for a in asks]
        by_node: dict[str, list[EvidenceRequest]] = {}
        found: dict[EvidenceRequest, _EvidenceResponse] = {}
        for ask in asks:
            if ask.node in urls and not self._authorization(urls[ask.node]):
                because = no_token(list(urls.values()), self._run.run_id)
                found[ask] = _EvidenceResponse(ask=ask, missing=because, unasked=True)
            else:
                by_node.setdefault(ask.node, []).append(ask)
        nodes: queue.SimpleQueue[str] = queue.SimpleQueue()
        for node in by_node:
            nodes.put(node)
        responses: queue.SimpleQueue[_EvidenceResponse] = queue.SimpleQueue()

        def converse() -> None:
            while True:
                try:
                    node = nodes.get_nowait()
                except queue.Empty:
                    return
                self._of_node(urls.get(node, ""), by_node[node], until, responses)

        for n in range(min(NUM_AGENTS_AT_ONCE, len(by_node))):
            threading.Thread(target=converse, name=f"evidence-ask-{n}", daemon=True).start()
        while len(found) < len(asks):
            left = until - self._clock.monotonic()
            try:
                answer = responses.get(timeout=max(left, 0.001))
            except queue.Empty:
                break
            found[answer.ask] = answer
        late = f"no response within the deadline of {self._deadline_seconds:.0f} s"
        return [found.get(a) or _EvidenceResponse(ask=a, missing=late) for a in asks]

    def _of_node(
        self, url: str, asks: Sequence[EvidenceRequest], until: float, responses: "queue.SimpleQueue[_EvidenceResponse]"
    ) -> None:
        """Sends one agent's requests in sequence; stops after the first without a response."""
        gone = "" if url else "its agent is unknown"
        for ask in asks:
            if gone or self._closed.is_set():
                responses.put(_EvidenceResponse(ask=ask, missing=gone or "the watch ended"))
                continue
            try:
                body = self._one(url, ask, until)
                responses.put(_EvidenceResponse(ask=ask, body=body, wall_at=self._clock.wall()))
            except EvidenceRequestFailed as e:
                gone = "" if e.status else str(e)
                absent = e.status == HTTPStatus.NOT_FOUND and ask.who is None  # an agent without this collector
                advice = f"; {WRONG_TOKEN}" if e.status == HTTPStatus.UNAUTHORIZED else ""
                responses.put(_EvidenceResponse(ask=ask, missing="" if absent else f"{e}{advice}"))

    def _one(self, url: str, ask: EvidenceRequest, until: float) -> bytes:
        """Raises EvidenceRequestFailed."""
        pid = "" if ask.who is None or ask.who.process is None else f"?pid={ask.who.process.pid}"
        while True:
            left = until - self._clock.monotonic()
            if left <= 0 or self._closed.is_set():
                raise EvidenceRequestFailed(f"not received within the deadline of {self._deadline_seconds:.0f} s")
            path = f"/v1/evidence/{ask.kind}{pid}"
            try:
                return request_evidence(
                    url, path, self._authorization(url), seconds=left, bytes_max=BYTES_MAX[ask.kind]
                )
            except EvidenceRequestFailed as e:
                if e.status != HTTPStatus.TOO_MANY_REQUESTS:
                    raise
            self._closed.wait(BUSY_PAUSE_SECONDS)  # it is busy dumping another process

    def _record(
        self,
        incident_id: str,
        part: int,
        *,
        kept: Sequence[EvidenceFile] = (),
        is_stored: bool = True,
        analysis: EvidenceAnalysis | None = None,
        missing: Sequence[str] = (),
        seconds: float = 0.0,
        health: Sequence[str] = (),
    ) -> None:
        analysis = analysis or EvidenceAnalysis()
        if not kept and not missing and not health:
            return  # these agents do not provide the requested kinds
        collected = EvidenceCollected(
            because=_because(kept, analysis, missing, health),
            files=tuple(_described(f, self._run.path) for f in kept) if is_stored else (),
            statements=tuple(plain(text) for text in (*health, *analysis.statements)[:NUM_STATEMENTS_MAX]),
            findings=tuple(Finding.from_dict(finite(f.to_dict())) for f in analysis.findings[:NUM_STATEMENTS_MAX]),
            missing=tuple(plain(text) for text in (*missing, *analysis.unread)[:NUM_STATEMENTS_MAX]),
            seconds=round(seconds, 3),
        )
        self._collected.append(CollectedEvidence(incident_id=incident_id, payload=collected, part=part))


def _asked(job: _Job) -> list[Suspect]:
    return [a.who for a in job.asks if a.kind is EvidenceKind.STACKS and a.who is not None]


def _missing(answers: Sequence[_EvidenceResponse]) -> list[str]:
    """One text per reason, with what is missing."""
    by_reason: dict[tuple[str, str, EvidenceKind], list[str]] = {}
    for a in answers:
        if a.missing and not a.unasked:
            names = by_reason.setdefault((a.missing, a.ask.node, a.ask.kind), [])
            names += [process_name(a.ask.who)] if a.ask.who is not None else []
    texts = list(dict.fromkeys(a.missing for a in answers if a.unasked))
    for (reason, node, kind), names in by_reason.items():
        more = f" and {len(names) - NUM_NAMED_MAX} more" if len(names) > NUM_NAMED_MAX else ""
        of = f" of {', '.join(names[:NUM_NAMED_MAX])}{more}" if names else ""
        texts.append(f"{KIND_TEXTS[kind]}{'s' * (len(names) > 1)}{of} ({node_text(node)}): {reason}")
    return texts


def _because(
    kept: Sequence[EvidenceFile], analysis: EvidenceAnalysis, missing: Sequence[str], health: Sequence[str]
) -> str:
    numbers = [(kind, sum(f.kind is kind for f in kept)) for kind in EvidenceKind]
    had = [f"{n} {KIND_TEXTS[kind]}{'s' * (n > 1)}" for kind, n in numbers if n]
    texts = [*health[:NUM_NAMED_MAX], *[f.because for f in analysis.findings][:NUM_NAMED_MAX]]
    summary = [", ".join(had) or "no evidence"] if had or not health else []
    return plain("; ".join([*summary, *texts, *(missing[:1] if not had else ())]))


def _described(file: EvidenceFile, root: Path) -> EvidenceFileRecord:
    content = file.path.read_bytes()
    return EvidenceFileRecord(
        name=str(file.path.relative_to(root)),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        kind=str(file.kind),
    )
