"""Collected evidence files, shown as text: only files in the incident's own folder, and only the start of large ones.

Names in the journal are untrusted and never used as paths; they are compared with the names of files on disk.
"""

from dataclasses import dataclass
from pathlib import Path

from rolecall.core.rundir import RunDir
from rolecall.reports.incident_export import evidence_files

SHOWN_BYTES_MAX = 64 << 10
"""Shown per file: about a thousand lines, which a browser renders without delay."""
LINE_CHARS_MAX = 2_000
NUM_FILES_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FileText:
    """`note`: the omitted part, or the reason why nothing is shown."""

    text: str = ""
    note: str = ""


def names(run: RunDir | None, incident_id: str) -> tuple[str, ...]:
    return tuple(sorted(_files(run, incident_id)))


def _files(run: RunDir | None, incident_id: str) -> dict[str, Path]:
    try:
        found = [] if run is None else evidence_files(run, incident_id)
    except OSError:
        return {}
    return {p.name: p for p in found[:NUM_FILES_MAX]}


def read(run: RunDir | None, incident_id: str, name: str) -> FileText:
    path = _files(run, incident_id).get(name)
    if path is None:
        return FileText(note="The file is not on this machine.")
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            raw = f.read(SHOWN_BYTES_MAX)
    except OSError as e:
        return FileText(note=f"The file cannot be read: {e.strerror or e}.")
    note = f"The first {SHOWN_BYTES_MAX >> 10} KiB of {size:,} bytes." if size > SHOWN_BYTES_MAX else f"{size:,} bytes."
    return FileText(text=harmless(raw.decode("utf-8", "replace")), note=note)


def harmless(text: str) -> str:
    """Keeps line breaks; replaces other control and text-direction characters with U+FFFD."""
    lines = []
    for line in text.split("\n"):
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip("\r"))
        lines.append(shown if len(shown) <= LINE_CHARS_MAX else shown[:LINE_CHARS_MAX] + "…")
    return "\n".join(lines)
