"""One incident as a file for a ticket: `rolecall incident export ID`.

Everything that the run keeps of it (incident_material.py) and a page for people. What goes in has passed `redacting`.

The same run gives the same bytes: no time of the export, no owner, no order of a directory.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain
from rolecall.reports.evidence_redaction import redacted_again
from rolecall.reports.incident_material import (
    FORMAT,
    LINE_BYTES_MAX,
    MEMBER_BYTES_MAX,
    IncidentRecord,
    gather,
    redactor,
)
from rolecall.reports.redaction import Redactor

JOURNAL_BYTES_MAX = 8 << 20
BUNDLE_BYTES_MAX = 64 << 20
"""Before compression. Vendors' portals take no more by mail; a window that does not fit is narrowed to the suspects."""
EVIDENCE_SHARE_MAX = 0.5
"""Of the room: the rest is for windows."""


@dataclass(frozen=True, slots=True)
class BundleFile:
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
    members: tuple[BundleFile, ...]
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


# --- building -----------------------------------------------------------------------------------------------------


def build(material: IncidentRecord, known: Redactor, bytes_max: int = BUNDLE_BYTES_MAX) -> Bundle:
    """The bundle of what was gathered, of `bytes_max` before compression. Pure."""
    left_out = list(material.left_out)
    events = _bounded(material.events, JOURNAL_BYTES_MAX, "the journal's slice", known, left_out)
    members = [  # windows come last: what is left of the room is theirs
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
    told = tuple(known.text(line) for line in left_out)
    members.append(BundleFile("README.txt", _page(material, known, members, told).encode()))
    members.sort(key=lambda m: m.name)
    manifest = {"format": FORMAT, "members": [m.told() for m in members], "left_out": list(told)}
    members.append(_member("MANIFEST.json", manifest))
    name = _file(known, str(material.summary["incident_id"]))
    return Bundle(name=name, is_open=material.is_open, members=tuple(members), left_out=told)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)


def _member(name: str, value: Any) -> BundleFile:
    return BundleFile(name, (_json(value, 2) + "\n").encode("utf-8", "replace"))


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
) -> BundleFile | None:
    # Measured first as it is kept: redacting takes a second for each few megabytes.
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
    "evidence": "what was asked of the agents for it: stacks, Flight Recorder dumps, NCCL RAS, kernel lines",
    "incident.json": "the incident at a glance",
    "journal.jsonl": "everything decided and done about it; `caused_by` names the event before, as e<seq>",
    "logs": "lines that the agents and the watch logged around that time",
    "versions.json": "of the run, and of the machine that wrote this file",
    "windows": "what the diagnosis had read: samples and events of the fleet in the seconds before it",
}


def _page(material: IncidentRecord, known: Redactor, members: Sequence[BundleFile], left_out: Sequence[str]) -> str:
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


def _state(material: IncidentRecord) -> str:
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
