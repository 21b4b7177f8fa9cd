"""Files of collected evidence: which part of an agent's response is kept, and under which name."""

import os
from pathlib import Path

from rolecall.core.faults import EvidenceKind
from rolecall.core.private_file import write_private
from rolecall.detector.base.plain_pickle import UnsafePickle
from rolecall.reports.evidence_redaction import STACKS, redacted
from rolecall.reports.redaction import Redactor
from rolecall.watch.evidence.diagnosis import EvidenceFile
from rolecall.watch.evidence.requests import EvidenceRequest

INCIDENT_BYTES_MAX = 64 << 20
NUM_KEPT_MAX = 500
"""Incidents of a run whose evidence is stored: about 2 MB each, at most INCIDENT_BYTES_MAX."""


class EvidenceRejected(Exception):
    """A response cannot be stored, with the reason."""


class EvidenceFiles:
    """Writes the redacted evidence of one incident, each file readable by its owner only."""

    def __init__(self, folder: Path, known: Redactor) -> None:
        """`folder`: the incident's, created in the parent of all. Raises OSError: nothing can be stored."""
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not folder.exists() and sum(1 for _ in folder.parent.iterdir()) >= NUM_KEPT_MAX:
            raise OSError(0, f"{folder.parent} already holds the evidence of {NUM_KEPT_MAX} incidents, the limit")
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._known, self._room = folder, known, INCIDENT_BYTES_MAX

    def keep(self, ask: EvidenceRequest, number: int, body: bytes, wall_at: float) -> EvidenceFile:
        """`number`: replaces the rank of a dump that does not contain it. `wall_at`: time of the evidence.

        Raises:
            EvidenceRejected: it is malformed or too large.
            OSError: it cannot be written.
        """
        try:
            content = redacted(ask.kind, body, self._known)
        except (UnsafePickle, ValueError, RecursionError) as e:
            raise EvidenceRejected(f"its agent's response is malformed ({e})") from None
        if len(content) > self._room:
            raise EvidenceRejected(f"left out, over {INCIDENT_BYTES_MAX >> 20} MiB for this incident")
        self._room -= len(content)
        path = self._folder / _name(ask, number)
        write_private(path, content)
        os.utime(path, (wall_at, wall_at))  # the detectors compute waiting times from it
        return EvidenceFile(kind=ask.kind, path=path, who=ask.who, suspected=ask.suspected)


def _name(ask: EvidenceRequest, number: int) -> str:
    if ask.kind is EvidenceKind.FLIGHT:
        name = f"flight_rank_{number}.json"
    elif ask.who is not None:
        name = f"{STACKS}{ask.who.replica}-rank_{ask.who.rank}.json"
    else:
        name = f"nccl_ras-{ask.node}.json" if ask.kind is EvidenceKind.NCCL else f"kernel-{ask.node}.log"
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
