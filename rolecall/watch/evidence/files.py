"""Files of pulled evidence: what is kept of an agent's answer, under which name, and what must not be in it."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolecall.core.faults import EvidenceKind
from rolecall.core.private_file import write_private
from rolecall.core.text import plain
from rolecall.detector.base.plain_pickle import MAGIC, UnsafePickle, loads
from rolecall.reports.redaction import Redactor
from rolecall.watch.evidence.diagnosis import EvidenceFile
from rolecall.watch.evidence.requests import EvidenceRequest

INCIDENT_BYTES_MAX = 64 << 20
NUM_KEPT_MAX = 500
"""Incidents of a run whose evidence is kept: some 2 MB each, at most INCIDENT_BYTES_MAX."""
LINE_CHARS_MAX = 16_384
STACKS = "stacks-"


class EvidenceRejected(Exception):
    """An answer cannot be kept: why."""


class EvidenceFiles:
    """Writes what was had of one incident, redacted, each file for its owner alone."""

    def __init__(self, folder: Path, known: Redactor) -> None:
        """`folder`: of the incident, made in that of all. Raises OSError: nothing can be kept."""
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not folder.exists() and sum(1 for _ in folder.parent.iterdir()) >= NUM_KEPT_MAX:
            raise OSError(0, f"the evidence of {NUM_KEPT_MAX} incidents is kept already, in {folder.parent}")
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._known, self._room = folder, known, INCIDENT_BYTES_MAX

    def keep(self, ask: EvidenceRequest, number: int, body: bytes, wall_at: float) -> EvidenceFile:
        """`number`: stands for the rank of a dump that does not say it itself. `wall_at`: when it was so.

        Raises:
            NoEvidence: it is not what it should be, or too large.
            OSError: it cannot be written.
        """
        try:
            content = redacted(ask.kind, body, self._known)
        except (UnsafePickle, ValueError, RecursionError) as e:
            raise EvidenceRejected(f"its agent's answer makes no sense ({e})") from None
        if len(content) > self._room:
            raise EvidenceRejected(f"left out, over {INCIDENT_BYTES_MAX >> 20} MiB for this incident")
        self._room -= len(content)
        path = self._folder / _name(ask, number)
        write_private(path, content)
        os.utime(path, (wall_at, wall_at))  # the detectors read in it how long somebody had waited
        return EvidenceFile(kind=ask.kind, path=path, who=ask.who, suspected=ask.suspected)


def _name(ask: EvidenceRequest, number: int) -> str:
    if ask.kind is EvidenceKind.FLIGHT:
        name = f"flight_rank_{number}.json"
    elif ask.who is not None:
        name = f"{STACKS}{ask.who.replica}-rank_{ask.who.rank}.json"
    else:
        name = f"nccl_ras-{ask.node}.json" if ask.kind is EvidenceKind.NCCL else f"kernel-{ask.node}.log"
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


def redacted(kind: EvidenceKind, body: bytes, known: Redactor) -> bytes:
    """What is kept of an answer: JSON or lines, without what must not leave.

    Raises:
        NotPlain, ValueError, RecursionError: it is not of this kind.
    """
    if kind is EvidenceKind.STACKS:
        value = json.loads(body)
        if not isinstance(value, Mapping) or not isinstance(value.get("threads"), list):
            raise ValueError("no list of threads")
        return _json({**known.value(value), "one_of_some": True})
    if kind is EvidenceKind.FLIGHT:
        value = loads(body) if MAGIC.match(body) else json.loads(body)
        if not isinstance(value, Mapping):
            raise ValueError("no dump")
        return _json(_names_kept(value, known))
    if kind is EvidenceKind.NCCL:
        with suppress(ValueError):  # NCCL before 2.29 writes damaged JSON, which its reader mends: kept as lines
            return _json(_names_kept(json.loads(body), known))
    return _lines(body, known)


def redacted_again(name: str, content: bytes, known: Redactor) -> bytes:
    """A file that lies there, for somebody else: `known` may know more, or give nodes other names."""
    with suppress(ValueError, RecursionError):
        if name.endswith(".json"):
            value = json.loads(content)
            return _json(known.value(value) if name.startswith(STACKS) else _names_kept(value, known))
    return _lines(content, known)


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _lines(body: bytes, known: Redactor) -> bytes:
    lines = body.decode("utf-8", "replace").split("\n")
    return "".join(f"{plain(known.text(line), LINE_CHARS_MAX)}\n" for line in lines if line).encode()


def _names_kept(value: Any, known: Redactor) -> Any:
    """Texts redacted, keys and hexadecimal names as they are: groups and communicators are told apart by them."""
    seen: dict[str, str] = {}  # a dump says the same few words two thousand times

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            if value not in seen:
                seen[value] = known.text(value, "digest")
            return seen[value]
        if isinstance(value, Mapping):
            return {k: kept(v) for k, v in value.items()}
        return [kept(v) for v in value] if isinstance(value, list | tuple) else value

    return kept(value)
