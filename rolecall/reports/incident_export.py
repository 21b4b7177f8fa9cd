"""One incident as an archive for a support ticket: `rolecall incident export ID`.

It holds, redacted (redaction.py), everything that the run keeps about the incident, and a README: journal events with
their causes, the windows that the diagnosis used, collected evidence, agent events of the suspects' nodes, log lines of
agents and watch, versions. The job's own output is never included, because it contains prompts and samples.

The archive is reproducible: it contains no export time, owner or directory order.
"""

import gzip
import hashlib
import io
import json
import platform
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, bearer_token
from rolecall.core.text import in_words, node_text, plain
from rolecall.recovery.operators import queries
from rolecall.reports.redaction import Redactor, redacted_again

FORMAT = 1
EVIDENCE_DIR = "evidence"
"""In the run directory, one folder per incident (rolecall/watch/evidence/pull.py)."""
EVIDENCE_BYTES_MAX = 64 << 20
"""Per incident, the limit of evidence collection."""
BEFORE_SECONDS = 120.0
AFTER_SECONDS = 60.0
"""Agent events and logs are included from this long before the onset to this long after the incident's last event."""
MEMBER_BYTES_MAX = 2 << 20
"""Per log or node; the oldest lines are kept, because they are nearest to the onset."""
READ_BYTES_MAX = 256 << 20
"""Per log; only the end of a longer one is searched."""
LINE_BYTES_MAX = 64 << 10
NUM_CAUSES_MAX = 100
_PACKAGES = ("torch", "ray", "vllm", "nvidia-ml-py", "py-spy", "psutil")
JOURNAL_BYTES_MAX = 8 << 20
BUNDLE_BYTES_MAX = 64 << 20
"""Before compression, the limit of vendors' portals; a window that does not fit is narrowed to the suspects."""
EVIDENCE_SHARE_MAX = 0.5
"""Share of the remaining room; the rest is for windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    run_id: str
    summary: Mapping[str, Any]  # as `rolecall incidents ID --json`
    diagnosis: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  # of the journal, oldest first, causes included
    windows: Mapping[str, Any]
    agent_events: Mapping[str, Sequence[Mapping[str, Any]]]  # by node
    logs: Mapping[str, str]  # file name -> lines of the slice
    versions: Mapping[str, Any]
    left_out: Sequence[str]
    evidence: Mapping[str, bytes] = field(default_factory=dict)  # file name -> content, as pulled and redacted once

    @property
    def is_open(self) -> bool:
        return self.summary["closed_at"] is None and self.summary["set_aside"] is None

    @property
    def suspects(self) -> list[Mapping[str, Any]]:
        return list(self.diagnosis["suspects"])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of the suspects, in the diagnosis's order."""
        return tuple(dict.fromkeys(str(s["node"]) for s in self.suspects))


@dataclass(frozen=True, slots=True)
class BundleFile:
    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def listing(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": len(self.content), "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`name`: folder in the archive. The manifest is a member and lists all others."""

    name: str
    is_open: bool
    members: tuple[BundleFile, ...]
    left_out: tuple[str, ...] = field(default=())

    def archive(self) -> bytes:
        """A reproducible .tar.gz."""
        raw = io.BytesIO()
        # GNU format: readable by every tar, and without further timestamps.
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for member in self.members:
                entry = tarfile.TarInfo(f"{self.name}/{member.name}")
                entry.size, entry.mode, entry.mtime = len(member.content), 0o600, 0
                tar.addfile(entry, io.BytesIO(member.content))
        return gzip.compress(raw.getvalue(), mtime=0)


def export(run: RunDir, incident_id: str, *, anonymous: bool = False) -> Bundle:
    """Raises:
    ConfigError: there is no such incident, or nothing of it can be read.
    JournalError: the journal cannot be used.
    """
    material = gather(run, incident_id)
    return build(material, redactor(run, material, anonymous=anonymous))


def build(material: IncidentRecord, known: Redactor, bytes_max: int = BUNDLE_BYTES_MAX) -> Bundle:
    """The bundle, at most `bytes_max` before compression. Pure."""
    left_out = list(material.left_out)
    events = _bounded(material.events, JOURNAL_BYTES_MAX, "the journal's slice", known, left_out)
    members = [  # windows come last and get the remaining room
        _member("diagnosis.json", known.value(material.diagnosis)),
        _member("incident.json", known.value(material.summary)),
        BundleFile("journal.jsonl", events),
        _member("versions.json", material.versions),
    ]
    for node, found in material.agent_events.items():
        content = _bounded(found, MEMBER_BYTES_MAX, f"events of {node}", known, left_out)
        members.append(BundleFile(f"agents/{_file(known, node)}.jsonl", content))
    for name, text in material.logs.items():
        lines = "".join(f"{plain(known.text(line), LINE_BYTES_MAX)}\n" for line in text.splitlines())
        members.append(BundleFile(f"logs/{_file(known, name)}", lines.encode()))
    room = bytes_max - sum(len(m.content) for m in members)
    for_evidence = int(EVIDENCE_SHARE_MAX * room)
    for name, raw in material.evidence.items():
        content = redacted_again(name, raw, known)
        if len(content) > for_evidence:
            left_out.append(f"evidence/{name}: {len(content)} bytes, too large")
            continue
        members.append(BundleFile(f"evidence/{_file(known, name)}", content))
        for_evidence -= len(content)
        room -= len(content)
    for name, window in sorted(material.windows.items()):
        member = _window(f"windows/{_file(known, name)}.json", window, material.nodes, room, known, left_out)
        if member is not None:
            members.append(member)
            room -= len(member.content)
    omissions = tuple(known.text(line) for line in left_out)
    members.append(BundleFile("README.txt", _page(material, known, members, omissions).encode()))
    members.sort(key=lambda m: m.name)
    manifest = {"format": FORMAT, "members": [m.listing() for m in members], "left_out": list(omissions)}
    members.append(_member("MANIFEST.json", manifest))
    name = _file(known, str(material.summary["incident_id"]))
    return Bundle(name=name, is_open=material.is_open, members=tuple(members), left_out=omissions)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)


def _member(name: str, value: Any) -> BundleFile:
    return BundleFile(name, (_json(value, 2) + "\n").encode("utf-8", "replace"))


def _file(known: Redactor, name: str) -> str:
    """`name` as a safe file name: no separator, not hidden."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in known.text(name))
    return safe.lstrip(".") or "_"


def _bounded(values: Sequence[Mapping[str, Any]], limit: int, what: str, known: Redactor, left_out: list[str]) -> bytes:
    """JSON lines, truncated at `limit` bytes."""
    lines, size = [], 0
    for number, value in enumerate(values):
        line = (_json(known.value(value)) + "\n").encode("utf-8", "replace")
        size += len(line)
        if size > limit:
            left_out.append(f"{what}: {len(values) - number} of {len(values)} events, over {limit} bytes")
            break
        lines.append(line)
    return b"".join(lines)


def _window(
    name: str, window: Any, nodes: Sequence[str], room: int, known: Redactor, left_out: list[str]
) -> BundleFile | None:
    # Check the size before redaction, which takes about a second per few megabytes.
    whole, narrowed = _size(window), False
    if whole > room and isinstance(window, Mapping) and isinstance(window.get("observations"), list):
        window, narrowed = _narrowed(window, nodes), True
    if _size(window) > room:
        left_out.append(f"{name}: {whole} bytes, too large")
        return None
    member = BundleFile(name, (_json(known.value(window)) + "\n").encode("utf-8", "replace"))
    if len(member.content) > room:
        left_out.append(f"{name}: {len(member.content)} bytes, too large")
        return None
    if narrowed:
        left_out.append(f"{name}: {whole} bytes, too large; reduced to the suspects' nodes")
    return member


def _size(value: Any) -> int:
    return len(_json(value).encode("utf-8", "replace"))


def _narrowed(window: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """A detector window reduced to `nodes`, without the state learned before it."""
    kept = [
        {**o, **{k: [x for x in o.get(k, ()) if x.get("node") in nodes] for k in ("batches", "events")}}
        for o in window["observations"]
    ]
    return {**{k: v for k, v in window.items() if k != "start"}, "observations": kept}


_MEANING = {
    "agents": "events of the agents on the suspects' nodes around that time (exits, XIDs, links), JSON lines",
    "diagnosis.json": "suspects, fault class, onset, confidence, and the evidence with its numbers",
    "evidence": "collected from the agents: stacks, Flight Recorder dumps, NCCL RAS, kernel log lines",
    "incident.json": "summary of the incident",
    "journal.jsonl": "all decisions and actions; `caused_by` names the causing event as e<seq>",
    "logs": "log lines of the agents and the watch around that time",
    "versions.json": "software versions of the run and of the exporting machine",
    "windows": "the diagnosis's input: samples and events of all nodes in the seconds before it",
}


def _page(material: IncidentRecord, known: Redactor, members: Sequence[BundleFile], left_out: Sequence[str]) -> str:
    found = Diagnosis.from_dict(dict(material.diagnosis))
    summary = known.value(material.summary)

    def line(text: object) -> str:
        return plain(known.text(str(text)))

    lines = [f"Incident {summary['incident_id']} of run {line(material.run_id)}", ""]
    lines.append(f"Fault:     {in_words(found.fault_class)}, confidence {found.confidence:.2f}")
    for suspect in material.suspects:
        lines.append(f"Suspect:   {line(_who(suspect))}")
    lines.append(f"Onset:     {_time(found.onset)}")
    lines.append(f"Found:     {_time(found.detected_at)}")
    lines.append(f"Times:     {line(summary['durations']['text'])}")
    lines.append(f"State:     {line(_state(material, summary))}")
    lines += ["", "Diagnosis: " + line(found.because)]
    lines += [f"  - {line(e.text)}" for e in found.evidence]
    if found.advice:
        lines.append(f"Advice:    {line(found.advice)}")
    if found.settle:
        lines.append(f"Undecided; would be settled by: {line(found.settle)}")
    lines += ["", "Timeline:"]
    lines += [f"  {_time(float(e['wall_at']))}  {line(queries.event_text(known.value(e)))}" for e in material.events]
    lines += ["", "Contents (MANIFEST.json has the SHA-256 of each file):"]
    lines += [f"  {m.name:<28} {_MEANING[m.name.partition('/')[0]]}" for m in sorted(members, key=lambda m: m.name)]
    if not any("stack" in m.name for m in members):
        lines.append("  No stacks were collected for this incident.")
    lines += ["", "Omitted because of size:" if left_out else "Nothing was omitted because of size."]
    lines += [f"  {plain(text)}" for text in left_out]
    lines += ["", _REDACTED]
    return "\n".join(lines)


_REDACTED = """\
Redacted: prompts, samples and exception messages; passwords, tokens and keys; environments and command lines; user
names and home directories; all of a URL but scheme, host and port. The job's own output is never included. The `hash`
of a journal line is that of the original line, before redaction.
"""


def _who(suspect: Mapping[str, Any]) -> str:
    named = Suspect.from_dict(dict(suspect))
    place = [f"{named.name} on {named.node}" if named.replica else node_text(named.node)]
    place += [f"{unit} {n}" for unit, n in (("rank", named.rank), ("GPU", named.gpu)) if n is not None]
    return ", ".join(place)


def _state(material: IncidentRecord, summary: Mapping[str, Any]) -> str:
    """`summary`: redacted, because a secret is no longer recognized once its underscores are spaces."""
    if summary["set_aside"] is not None:
        return f"set aside: {summary['set_aside']}"
    if material.is_open:
        newest = material.events[-1]
        return f"STILL OPEN ({summary['state']}) at export, as of {_time(float(newest['wall_at']))}"
    return f"closed {_time(float(summary['closed_at']))}: {in_words(summary['outcome'])}; {summary['closed_because']}"


def _time(wall: float) -> str:
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
    except (ValueError, OverflowError, OSError):
        return f"{wall} s"


def gather(run: RunDir, incident_id: str) -> IncidentRecord:
    """Raises:
    ConfigError: there is no such incident, or nothing of it can be read.
    JournalError: the journal cannot be used.
    """
    try:
        (record,) = queries.incidents(run, incident_id)
    except CommandRefused as e:
        raise ConfigError([f"ID: {e}"]) from None
    summary = {k: v for k, v in record.items() if k not in ("diagnosis", "events")}
    diagnosis, events = record["diagnosis"], record["events"]
    with closing(Journal(run.database_url, create=False)) as journal:
        causes, windows = _causes(journal, events), journal.windows(incident_id)
    newest = max(float(e["wall_at"]) for e in events)
    since, until = float(diagnosis["onset"]) - BEFORE_SECONDS, newest + AFTER_SECONDS
    left_out: list[str] = []
    nodes = sorted({str(s["node"]) for s in diagnosis["suspects"]})
    return IncidentRecord(
        run_id=str(run.run_id),
        summary=summary,
        diagnosis=diagnosis,
        events=sorted([*causes, *events], key=lambda e: int(e["seq"])),
        windows=windows,
        agent_events={n: found for n in nodes if (found := _agent_events(run, n, since, until, left_out))},
        logs=_logs(run, nodes, since, until, left_out),
        versions=_versions(run),
        left_out=left_out,
        evidence=_evidence(run, incident_id, left_out),
    )


def _causes(journal: Journal, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The transitive causes of these events that do not belong to the incident."""
    have = {f"e{e['seq']}" for e in events}
    found: list[dict[str, Any]] = []
    wanted = [e["caused_by"] for e in events]
    while wanted and len(found) < NUM_CAUSES_MAX:
        name = wanted.pop()
        if name is None or name in have or not str(name)[1:].isdigit():
            continue
        have.add(name)
        for event in journal.events(after=int(name[1:]) - 1, limit=1):
            found.append(event.to_dict())
            wanted.append(event.caused_by)
    return found


def _agent_events(run: RunDir, node: str, since: float, until: float, left_out: list[str]) -> list[dict[str, Any]]:
    path = run.node_dir(node) / "events.jsonl"

    def happened_at(line: str) -> float | None:
        with suppress(ValueError, TypeError, KeyError):  # a torn line
            return float(json.loads(line)["wall_at"])
        return None

    return [json.loads(line) for line in _slice(path, happened_at, since, until, f"events of {node}", left_out)]


def _logs(run: RunDir, nodes: Sequence[str], since: float, until: float, left_out: list[str]) -> dict[str, str]:
    """Logs of the watch and the suspects' agents: lines with a timestamp in range. Continuation lines (tracebacks) are
    left out."""
    found = {}
    for name in ("watch.log", *(f"agent-{n}.log" for n in nodes)):
        taken = _slice(run.logs / name, _logged_at, since, until, name, left_out)
        if taken:
            found[name] = "\n".join(taken) + "\n"
    return found


def _slice(
    path: Path, at: Callable[[str], float | None], since: float, until: float, what: str, left_out: list[str]
) -> list[str]:
    """Lines of that time, up to `MEMBER_BYTES_MAX`. `at`: the time of a line; None if it has none."""
    found, size = [], 0
    for line in _lines(path, left_out):
        when = at(line)
        if when is None or not since <= when <= until:
            continue
        size += len(line)
        if size > MEMBER_BYTES_MAX:
            left_out.append(f"{what} after the first {MEMBER_BYTES_MAX} bytes")
            break
        found.append(line)
    return found


def evidence_files(run: RunDir, incident_id: str) -> list[Path]:
    """Evidence files, by name. The incident ID comes from the journal and is untrusted: it is compared, never joined to
    a path. Raises OSError."""
    folder = run.path / EVIDENCE_DIR
    folders = [p for p in folder.iterdir() if p.name == incident_id and p.is_dir()] if folder.is_dir() else []
    files = sorted(p for folder in folders if not folder.is_symlink() for p in folder.iterdir())
    return [p for p in files if p.is_file() and not p.is_symlink() and not p.name.startswith(".")]


def _evidence(run: RunDir, incident_id: str, left_out: list[str]) -> dict[str, bytes]:
    found, size = dict[str, bytes](), 0
    for path in evidence_files(run, incident_id):
        size += path.stat().st_size
        if size > EVIDENCE_BYTES_MAX:
            left_out.append(f"evidence/{path.name}: over {EVIDENCE_BYTES_MAX} bytes")
            break
        found[path.name] = path.read_bytes()
    return found


def _lines(path: Path, left_out: list[str]) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            skipped = max(0, path.stat().st_size - READ_BYTES_MAX)
            if skipped:
                left_out.append(f"the first {skipped} bytes of {path.name} were not searched")
                file.seek(skipped)
                file.readline()
            while line := file.readline(LINE_BYTES_MAX):
                yield line.decode("utf-8", "replace").rstrip("\n")
    except FileNotFoundError:
        return
    except OSError as e:
        left_out.append(f"{path.name}: {e.strerror}")


def _logged_at(line: str) -> float | None:
    """Wall seconds of a line in `logging`'s format, `2026-01-31 12:00:00,250 ...` in this machine's local time."""
    try:
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:
        return None


def _versions(run: RunDir) -> dict[str, Any]:
    """Versions of the run at its start, and of the exporting machine, whose packages should match the nodes'."""
    value = run.read()
    here = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("rolecall", *_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            here[package] = metadata.version(package)
    kept = ("config_digest", "seed", "versions")
    return {"format": FORMAT, "run": {k: value[k] for k in kept if k in value}, "exported_with": here}


def run_redactor(run: RunDir, *, nodes: Iterable[str] = (), anonymous: bool = False) -> Redactor:
    """A redactor that knows the run's secrets, owner, folders and nodes; `nodes` get the first numbers."""
    secrets: list[str] = []
    with suppress(OSError):
        token = run.token()
        secrets = [token, bearer_token(token)]
    users: list[str] = []
    with suppress(OSError, KeyError, NotImplementedError):
        users.append(run.path.owner())
    known = Redactor(
        secrets=secrets,
        users=users,
        folders={str(run.path): "RUN", str(run.path.parent): "RUNS"},
        nodes=nodes,
        anonymous=anonymous,
    )
    with suppress(OSError):
        known.learn([p.name for p in sorted((run.path / "nodes").iterdir())], "nodes")
    started = run.read()
    known.learn([*started.get("nodes", ()), *started.get("agents", ())], "nodes")
    return known


def redactor(run: RunDir, material: IncidentRecord, *, anonymous: bool) -> Redactor:
    """A redactor that also knows all names in the material."""
    known = run_redactor(run, nodes=material.nodes, anonymous=anonymous)
    for part in (material.summary, material.diagnosis, material.events, material.windows, material.agent_events):
        known.learn(part)
    known.learn(list(material.logs.values()))
    return known
