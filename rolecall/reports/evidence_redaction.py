"""Redaction of collected evidence: stacks, Flight Recorder dumps, NCCL status, kernel logs."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rolecall.core.faults import EvidenceKind
from rolecall.core.text import plain
from rolecall.detector.base.plain_pickle import MAGIC, loads
from rolecall.reports.redaction import Redactor

LINE_CHARS_MAX = 16_384
STACKS = "stacks-"
"""Prefix of the files that hold stacks."""


def redacted(kind: EvidenceKind, body: bytes, known: Redactor) -> bytes:
    """The part of an agent's response that is kept: JSON or lines, without secrets.

    Raises:
        UnsafePickle, ValueError, RecursionError: `body` is not of this kind.
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
        with suppress(ValueError):  # NCCL before 2.29 writes invalid JSON, which the reader repairs: kept as lines
            return _json(_names_kept(json.loads(body), known))
    return _lines(body, known)


def redacted_again(name: str, content: bytes, known: Redactor) -> bytes:
    """Redact a stored file for an export. `known` may know more secrets by now, or replace node names."""
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
    """Redact texts; keep keys and hexadecimal names, which identify process groups and communicators."""
    seen: dict[str, str] = {}  # a dump repeats a few texts thousands of times

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            if value not in seen:
                seen[value] = known.text(value, "digest")
            return seen[value]
        if isinstance(value, Mapping):
            return {k: kept(v) for k, v in value.items()}
        return [kept(v) for v in value] if isinstance(value, list | tuple) else value

    return kept(value)
