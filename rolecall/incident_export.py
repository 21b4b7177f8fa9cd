"""One incident as a file for a ticket: `rolecall incident export ID`.

Everything that the run keeps of it: the journal's slice with what caused it, the windows that the diagnosis had read, the
events of the suspects' nodes around that time, what agents and watch logged then, versions, and a page for people. Output
of the job's own processes is never taken in: it is where prompts and samples stand. What goes in has passed `redacting`.

The same run gives the same bytes: no time of the export, no owner, no order of a directory.
"""

import gzip
import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.journal import Journal
from rolecall.core.rundir import RunDir, bearer_token
from rolecall.recovery import commands
from rolecall.redacting import Redactor
from rolecall.text import plain

FORMAT = 1
BEFORE_SECONDS = 120.0
AFTER_SECONDS = 60.0
"""Agents' events and logs are taken from so long before the onset to so long after the incident's last event."""
MEMBER_BYTES_MAX = 2 << 20
"""Of a log or a node's events: the oldest of the slice stay, they are nearest to the onset."""
JOURNAL_BYTES_MAX = 8 << 20
BUNDLE_BYTES_MAX = 64 << 20
"""Before compression. Vendors' portals take no more by mail; a window that does not fit is narrowed to the suspects."""
READ_BYTES_MAX = 256 << 20
"""Of one log; of a longer one its end is searched."""
LINE_BYTES_MAX = 64 << 10
NUM_CAUSES_MAX = 100
_PACKAGES = ("torch", "ray", "vllm", "nvidia-ml-py", "py-spy", "psutil")


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a run holds of one incident, as it is kept: not to be shown."""

    run_id: str
    summary: Mapping[str, Any]  # as `rolecall incidents ID --json`
    diagnosis: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  # of the journal, oldest first, causes included
    windows: Mapping[str, Any]
    agent_events: Mapping[str, Sequence[Mapping[str, Any]]]  # by node
    logs: Mapping[str, str]  # file name -> lines of the slice
    versions: Mapping[str, Any]
    left_out: Sequence[str]

    @property
    def is_open(self) -> bool:
        return self.summary["closed_at"] is None and self.summary["set_aside"] is None

    @property
    def suspects(self) -> list[Mapping[str, Any]]:
        return list(self.diagnosis["suspects"])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the suspects, in the diagnosis' order."""
        return tuple(dict.fromkeys(str(s["node"]) for s in self.suspects))


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def told(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": len(self.content), "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`name`: of the folder in the archive. The manifest is a member, too, and lists all others."""

    name: str
    is_open: bool
    members: tuple[Member, ...]
    left_out: tuple[str, ...] = field(default=())

    def archive(self) -> bytes:
        """The bytes of a .tar.gz: the same for the same members."""
        raw = io.BytesIO()
        # GNU's format: the one that every tar reads, and that holds no times beside the one given.
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for member in self.members:
                entry = tarfile.TarInfo(f"{self.name}/{member.name}")
                entry.size, entry.mode, entry.mtime = len(member.content), 0o600, 0
                tar.addfile(entry, io.BytesIO(member.content))
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as z:
            z.write(raw.getvalue())
        return packed.getvalue()


def export(run: RunDir, incident_id: str, *, anonymous: bool = False) -> Bundle:
    """Raises:
    ConfigError: there is no such incident, or nothing of it can be read.
    JournalError: the journal cannot be used.
    """
    material = gather(run, incident_id)
    return build(material, redactor(run, material, anonymous=anonymous))


# --- reading ------------------------------------------------------------------------------------------------------


def gather(run: RunDir, incident_id: str) -> Material:
    """Raises:
    ConfigError: there is no such incident, or nothing of it can be read.
    JournalError: the journal cannot be used.
    """
    try:
        (told,) = commands.incidents(run, incident_id)
    except CommandRefused as e:
        raise ConfigError([f"ID: {e}"]) from None
    summary = {k: v for k, v in told.items() if k not in ("diagnosis", "events")}
    diagnosis, events = told["diagnosis"], told["events"]
    journal = Journal(run.database_url, create=False)
    try:
        causes, windows = _causes(journal, events), journal.windows(incident_id)
    finally:
        journal.close()
    newest = max(float(e["wall_at"]) for e in events)
    since, until = float(diagnosis["onset"]) - BEFORE_SECONDS, newest + AFTER_SECONDS
    left_out: list[str] = []
    nodes = sorted({str(s["node"]) for s in diagnosis["suspects"]})
    return Material(
        run_id=str(run.run_id),
        summary=summary,
        diagnosis=diagnosis,
        events=sorted([*causes, *events], key=lambda e: int(e["seq"])),
        windows=windows,
        agent_events={n: found for n in nodes if (found := _agent_events(run, n, since, until, left_out))},
        logs=_logs(run, nodes, since, until, left_out),
        versions=_versions(run),
        left_out=left_out,
    )


def _causes(journal: Journal, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events of other incidents or none that these were caused by, and what caused those."""
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
    found, size = [], 0
    for line in _lines(path, left_out):
        with suppress(ValueError, TypeError, KeyError):  # a torn line: the agent's own matter
            event = json.loads(line)
            if not since <= float(event["wall_at"]) <= until:
                continue
            size += len(line)
            if size > MEMBER_BYTES_MAX:
                left_out.append(f"events of {node} after the first {MEMBER_BYTES_MAX} bytes")
                break
            found.append(event)
    return found


def _logs(run: RunDir, nodes: Sequence[str], since: float, until: float, left_out: list[str]) -> dict[str, str]:
    """Of the watch and of the suspects' agents: whole lines that begin with a time within the slice. What follows such
    a line (the frames and message of a traceback) stays behind."""
    found = {}
    for name in ("watch", *(f"agent-{n}" for n in nodes)):
        taken, size = [], 0
        for line in _lines(run.logs / f"{name}.log", left_out):
            at = _logged_at(line)
            if at is None or not since <= at <= until:
                continue
            size += len(line)
            if size > MEMBER_BYTES_MAX:
                left_out.append(f"{name}.log after the first {MEMBER_BYTES_MAX} bytes")
                break
            taken.append(line)
        if taken:
            found[f"{name}.log"] = "\n".join(taken) + "\n"
    return found


def _lines(path: Path, left_out: list[str]) -> Iterator[str]:
    try:
        with path.open("rb") as f:
            skipped = max(0, path.stat().st_size - READ_BYTES_MAX)
            if skipped:
                left_out.append(f"the first {skipped} bytes of {path.name} were not searched")
                f.seek(skipped)
                f.readline()
            while line := f.readline(LINE_BYTES_MAX):
                yield line.decode("utf-8", "replace").rstrip("\n")
    except FileNotFoundError:
        return
    except OSError as e:
        left_out.append(f"{path.name}: {e.strerror}")


def _logged_at(line: str) -> float | None:
    """Wall seconds of a line of `logging`'s own format, `2026-01-31 12:00:00,250 ...` in this machine's local time."""
    try:
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:
        return None


def _versions(run: RunDir) -> dict[str, Any]:
    """Of the run as it was started, and of the machine that exports: its nodes should have the same packages."""
    value = run.read()
    here = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("rolecall", *_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            here[package] = metadata.version(package)
    kept = ("config_digest", "seed", "versions")
    return {"format": FORMAT, "run": {k: value[k] for k in kept if k in value}, "exported_with": here}


# --- building -----------------------------------------------------------------------------------------------------


def redactor(run: RunDir, material: Material, *, anonymous: bool) -> Redactor:
    """Knows the run's own secrets, its owner and every name that the material holds."""
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
        nodes=material.nodes,
        anonymous=anonymous,
    )
    with suppress(OSError):
        known.learn([p.name for p in sorted((run.path / "nodes").iterdir())], "nodes")
    started = run.read()
    known.learn([*started.get("nodes", ()), *started.get("agents", ())], "nodes")
    for part in (material.summary, material.diagnosis, material.events, material.windows, material.agent_events):
        known.learn(part)
    known.learn(list(material.logs.values()))
    return known


def build(material: Material, known: Redactor, bytes_max: int = BUNDLE_BYTES_MAX) -> Bundle:
    """The bundle of what was gathered, of `bytes_max` before compression. Pure."""
    left_out = list(material.left_out)
    events = _bounded(material.events, JOURNAL_BYTES_MAX, "the journal's slice", known, left_out)
    members = [  # windows come last: what is left of the room is theirs
        _member("diagnosis.json", known.value(material.diagnosis)),
        _member("incident.json", known.value(material.summary)),
        Member("journal.jsonl", events),
        _member("versions.json", material.versions),
    ]
    for node, found in material.agent_events.items():
        content = _bounded(found, MEMBER_BYTES_MAX, f"events of {node}", known, left_out)
        members.append(Member(f"agents/{_file(known, node)}.jsonl", content))
    for name, text in material.logs.items():
        lines = "".join(f"{plain(known.text(line), LINE_BYTES_MAX)}\n" for line in text.splitlines())
        members.append(Member(f"logs/{_file(known, name)}", lines.encode()))
    room = bytes_max - sum(len(m.content) for m in members)
    for name, window in sorted(material.windows.items()):
        member = _window(f"windows/{_file(known, name)}.json", window, material.nodes, room, known, left_out)
        if member is not None:
            members.append(member)
            room -= len(member.content)
    told = tuple(known.text(line) for line in left_out)
    members.append(Member("README.txt", _page(material, known, members, told).encode()))
    members.sort(key=lambda m: m.name)
    manifest = {"format": FORMAT, "members": [m.told() for m in members], "left_out": list(told)}
    members.append(_member("MANIFEST.json", manifest))
    name = _file(known, str(material.summary["incident_id"]))
    return Bundle(name=name, is_open=material.is_open, members=tuple(members), left_out=told)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)


def _member(name: str, value: Any) -> Member:
    return Member(name, (_json(value, 2) + "\n").encode("utf-8", "replace"))


def _file(known: Redactor, name: str) -> str:
    """`name` as a file may be called: no folder, nothing hidden."""
    said = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in known.text(name))
    return said.lstrip(".") or "_"


def _bounded(values: Sequence[Mapping[str, Any]], limit: int, what: str, known: Redactor, left_out: list[str]) -> bytes:
    """A JSON line for each, the first of them up to `limit` bytes."""
    lines, size = [], 0
    for n, value in enumerate(values):
        line = (_json(known.value(value)) + "\n").encode("utf-8", "replace")
        size += len(line)
        if size > limit:
            left_out.append(f"{what}: {len(values) - n} of {len(values)} events, over {limit} bytes")
            break
        lines.append(line)
    return b"".join(lines)


def _window(
    name: str, window: Any, nodes: Sequence[str], room: int, known: Redactor, left_out: list[str]
) -> Member | None:
    # Measured first as it is kept: redacting takes a second for each few megabytes.
    whole, narrowed = _size(window), False
    if whole > room and isinstance(window, Mapping) and isinstance(window.get("observations"), list):
        window, narrowed = _narrowed(window, nodes), True
    if _size(window) > room:
        left_out.append(f"{name}: {whole} bytes, too large")
        return None
    member = Member(name, (_json(known.value(window)) + "\n").encode("utf-8", "replace"))
    if len(member.content) > room:
        left_out.append(f"{name}: {len(member.content)} bytes, too large")
        return None
    if narrowed:
        left_out.append(f"{name}: {whole} bytes, too large; it holds the suspects' nodes only")
    return member


def _size(value: Any) -> int:
    return len(_json(value).encode("utf-8", "replace"))


def _narrowed(window: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """A window of the detector with what `nodes` said only, and without what had been learned before."""
    kept = [
        {**o, **{k: [x for x in o.get(k, ()) if x.get("node") in nodes] for k in ("batches", "events")}}
        for o in window["observations"]
    ]
    return {**{k: v for k, v in window.items() if k != "start"}, "observations": kept}


# --- the page for people ------------------------------------------------------------------------------------------

_MEANING = {
    "agents": "what the agents of the suspects' nodes saw around that time (exits, XIDs, links), a JSON line each",
    "diagnosis.json": "who, what, since when, how sure, and the evidence with its numbers",
    "incident.json": "the incident at a glance",
    "journal.jsonl": "everything decided and done about it; `caused_by` names the event before, as e<seq>",
    "logs": "lines that the agents and the watch logged around that time",
    "versions.json": "of the run, and of the machine that wrote this file",
    "windows": "what the diagnosis had read: samples and events of the fleet in the seconds before it",
}


def _page(material: Material, known: Redactor, members: Sequence[Member], left_out: Sequence[str]) -> str:
    found = Diagnosis.from_dict(dict(material.diagnosis))
    summary = known.value(material.summary)

    def line(text: object) -> str:
        return plain(known.text(str(text)))

    told = [f"Incident {summary['incident_id']} of run {line(material.run_id)}", ""]
    told.append(f"What:      {found.fault_class}, confidence {found.confidence:.2f}")
    for suspect in material.suspects:
        told.append(f"Who:       {line(_who(suspect))}")
    told.append(f"Onset:     {_time(found.onset)}")
    told.append(f"Found:     {_time(found.detected_at)}, {found.detected_at - found.onset:.1f} s later")
    told.append(f"State:     {line(_state(material))}")
    told += ["", "Diagnosis: " + line(found.because)]
    told += [f"  - {line(e.text)}" for e in found.evidence]
    if found.advice:
        told.append(f"Advice:    {line(found.advice)}")
    if found.settle:
        told.append(f"Cannot be told yet; what would settle it: {line(found.settle)}")
    told += ["", "What was done:"]
    told += [f"  {_time(float(e['wall_at']))}  {e['kind']}{line(_said(e))}" for e in material.events]
    told += ["", "What is in here (MANIFEST.json has the SHA-256 of each):"]
    told += [f"  {m.name:<28} {_MEANING[m.name.partition('/')[0]]}" for m in sorted(members, key=lambda m: m.name)]
    if not any("stack" in m.name for m in members):
        told.append("  No stacks were kept with this incident.")
    told += ["", "Left out for their size:" if left_out else "Nothing was left out for its size."]
    told += [f"  {plain(text)}" for text in left_out]
    told += ["", *_REMOVED, ""]
    return "\n".join(told)


_REMOVED = (
    "Removed on purpose: prompts, samples and messages of exceptions; passwords, tokens and keys; environments and command",
    "lines; names of users and their home directories; all of a URL but scheme, host and port. Output of the job's own",
    "processes was never taken in. `hash` of a journal line is that of the line as the run keeps it, before this.",
)


def _who(suspect: Mapping[str, Any]) -> str:
    place = [f"node {suspect['node']}"]
    if suspect.get("replica"):
        place = [f"{suspect['replica']}#{suspect.get('incarnation')} on {suspect['node']}"]
    place += [f"{word} {suspect[k]}" for k, word in (("rank", "rank"), ("gpu", "GPU")) if suspect.get(k) is not None]
    return ", ".join(place)


def _state(material: Material) -> str:
    summary = material.summary
    if summary["set_aside"] is not None:
        return f"set aside: {summary['set_aside']}"
    if material.is_open:
        newest = material.events[-1]
        return f"STILL OPEN ({summary['state']}) when this was written, as of {_time(float(newest['wall_at']))}"
    return f"closed {_time(float(summary['closed_at']))}: {summary['outcome']}; {summary['closed_because']}"


def _said(event: Mapping[str, Any]) -> str:
    body = event["body"]
    said = body.get("because") or body.get("outcome") or ""
    plan = body.get("plan")
    action = f" {plan['action']}" if isinstance(plan, Mapping) and "action" in plan else ""
    return f"{action} {said}".rstrip()


def _time(wall: float) -> str:
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
    except (ValueError, OverflowError, OSError):
        return f"{wall} s"


# --- writing ------------------------------------------------------------------------------------------------------


def write_private(path: Path, content: bytes) -> None:
    """The whole file or none, for its owner alone (mode 0600); one that was there is replaced.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
