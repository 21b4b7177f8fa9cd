"""`rolecall diagnose`: reads recordings, dumps and logs, runs the detectors, and reports faults with their evidence.

File kinds are recognised by content; folders are searched recursively. A named file that cannot be read is an error; a
file of unknown kind in a folder is skipped and counted.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.core.text import iso_utc, plain
from rolecall.detector.artifacts.flight_recorder import diagnosis as flight_recorder
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps
from rolecall.detector.artifacts.infiniband import findings as infiniband_findings
from rolecall.detector.artifacts.infiniband import trees as infiniband_trees
from rolecall.detector.artifacts.kernel_log import diagnosis as kernel_findings
from rolecall.detector.artifacts.kernel_log import logs as kernel_logs
from rolecall.detector.artifacts.stacks import diagnosis as stacks
from rolecall.detector.artifacts.stacks import dumps as stack_dumps
from rolecall.detector.artifacts.stacks.dumps import StackDump
from rolecall.detector.base import packed_files as packed
from rolecall.detector.base.read_budget import Budget, ReadLimits
from rolecall.detector.live.merging import merged
from rolecall.detector.panels.panel import Floats, Panel, PanelDetector
from rolecall.detector.panels.standing import cannot_tell, standing
from rolecall.detector.sources import agent_event_files as agent_events
from rolecall.detector.sources import recording
from rolecall.diagnose import nccl as diagnosing_nccl
from rolecall.diagnose.explain import ExplainedDiagnosis, ScoreTrace

NUM_FILES_MAX = 100_000
"""Files and folders below one folder; more indicates a wrong path."""
NUM_REMARKS_MAX = 100
"""Remarks about unreadable files of one kind; further ones are counted."""
VALUE_BYTES = 4
SUSPECT_FIELDS = ("node", "role", "replica", "rank", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input. `looked_at`: a description of its content."""

    path: str
    kind: str
    looked_at: str
    remarks: tuple[str, ...] = ()


@dataclass(slots=True)
class DiagnosisReport:
    diagnoses: list[Diagnosis] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {"diagnoses": [_diagnosis(d) for d in self.diagnoses], "inputs": [asdict(i) for i in self.inputs]}


@dataclass(slots=True)
class InputFiles:
    """Files by kind, in the order of the paths; `passed_over`: files of unknown kind by folder."""

    recordings: list[Path] = field(default_factory=list)
    dumps: list[Path] = field(default_factory=list)
    stacks: list[Path] = field(default_factory=list)
    kernel: list[Path] = field(default_factory=list)
    events: list[Path] = field(default_factory=list)  # of agents
    devices: list[Path] = field(default_factory=list)  # folders of InfiniBand trees
    nccl: diagnosing_nccl.NcclFiles = field(default_factory=diagnosing_nccl.NcclFiles)
    topology: Path | None = None
    passed_over: dict[Path, int] = field(default_factory=dict)


def search(paths: Sequence[Path], num_files_max: int = NUM_FILES_MAX) -> InputFiles:
    """Raises UnreadableInput: no such path, a named file of unknown kind, a folder without usable files or with an
    unreadable subfolder."""
    found = InputFiles()
    for path in paths:
        if not path.exists():
            raise UnreadableInput(where=str(path), reason="no such file or folder")
        if not path.is_dir() or infiniband_trees.is_device(path):
            if not _sort(path, found):
                if path.is_file() and recording.is_parquet(path):
                    recording.read(path)  # raises with the missing columns
                if path.is_file():
                    packed.head(path, 1)  # raises if it cannot be unpacked
                kinds = (
                    "a recording (Parquet), a Flight Recorder dump (pickle or JSON), a stack dump of py-spy, "
                    "an answer of NCCL RAS, a file of the NCCL Inspector, a kernel log, an agent's events, "
                    "a copy of an InfiniBand device"
                )
                raise UnreadableInput(where=str(path), reason=f"unknown kind of file; expected {kinds}")
            continue
        known = 0
        for file in _files(path, num_files_max):
            if _sort(file, found):
                known += 1
            else:
                found.passed_over[path] = found.passed_over.get(path, 0) + 1
        if not known:
            passed = found.passed_over.get(path, 0)
            reason = f"the folder holds nothing to diagnose ({passed} file(s) of unknown kind)"
            raise UnreadableInput(where=str(path), reason=reason)
    return found


def _files(folder: Path, num_max: int) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise UnreadableInput(where=str(error.filename), reason=f"it cannot be read: {error.strerror}") from error

    seen = 0
    # Symlinks to folders are not followed: they may form a loop.
    for root, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        devices = infiniband_trees.devices_in(Path(root), folders)
        seen += len(files) + len(devices) + 1
        if seen > num_max:
            reason = f"more than {num_max:,} files and folders: name a more specific folder"
            raise UnreadableInput(where=str(folder), reason=reason)
        for device in devices:
            folders.remove(device.name)  # holds hundreds of files
            yield device
        for name in sorted(files):
            yield Path(root) / name


def _sort(file: Path, found: InputFiles) -> bool:
    """Sorts the file by kind; False if unknown. Raises UnreadableInput if it cannot be opened."""
    if file.is_dir():
        if is_device := infiniband_trees.is_device(file):
            found.devices.append(file)
        return is_device
    if not file.is_file():
        return False  # reading a socket, pipe or device could block forever
    try:
        for kind, files in (
            (recording.is_recording, found.recordings),
            (flight_dumps.is_dump, found.dumps),
            (stack_dumps.is_dump, found.stacks),
        ):
            if kind(file):
                files.append(file)
                return True
        if found.nccl.take(file):
            return True
        if stack_dumps.is_topology(file):
            if found.topology:
                raise UnreadableInput(where=str(file), reason=f"a second topology beside {found.topology}")
            found.topology = file
            return True
        if agent_events.is_events(file):
            found.events.append(file)
            return True
        if kernel_logs.is_log(file):
            found.kernel.append(file)
            return True
    except OSError as e:
        raise UnreadableInput(where=str(file), reason=f"it cannot be read: {e.strerror or e}") from e
    return False


def diagnose(
    paths: Sequence[Path],
    detectors: Sequence[PanelDetector],
    progress: Callable[[str], None] | None = None,
    *,
    limits: ReadLimits | None = None,
    clock: Clock | None = None,
) -> DiagnosisReport:
    """All diagnoses of the files at `paths`, earliest first. `limits`: per kind of file.

    Raises UnreadableInput: a file cannot be read, or a kind exceeds its limits.
    """
    say = progress or (lambda _: None)
    found = search(paths)
    answer = DiagnosisReport()
    all_findings: list[Finding] = []
    budget = Budget(limits, clock)
    for file in found.recordings:
        say(f"reading {file}")
        read = recording.read(file)
        # Samples that share a grid cell are merged, but took as long to read.
        num_values = max(read.num_rows, sum(p.values.size for p in read.panels))
        budget.keep(VALUE_BYTES * num_values, str(file))
        looked, open_ends = [], list[str]()
        for panel in read.panels:
            say(f"{file}: {panel.shape.name}, {len(panel.shape.machines)} machines, {len(panel.at)} ticks")
            for detector in detectors:
                tracker = detector.track(panel.shape)
                all_findings += [f for at, values in panel.ticks() for f in tracker.tick(at, values)]
                open_ends.append(cannot_tell(panel.shape, detector.name, tracker))
            looked.append(_looked_at(panel))
        answer.panels += read.panels
        remarks = (*read.remarks, *dict.fromkeys(filter(None, open_ends)))
        answer.inputs.append(Input(path=str(file), kind="recording", looked_at="; ".join(looked), remarks=remarks))
    topology = stack_dumps.read_topology(found.topology) if found.topology else None
    if found.dumps:
        say(f"reading {len(found.dumps)} Flight Recorder dump(s)")
        dumps, unreadable = flight_dumps.read_as_needed(
            found.dumps, flight_recorder.entries_wanted, budget=Budget(limits, clock)
        )
        for error in unreadable:
            if not dumps or error.reason.startswith("refused"):
                raise error  # a malicious dump invalidates the whole diagnosis
        all_findings += flight_recorder.diagnose(dumps, topology=topology)
        # A truncated dump is from a rank that died or was stopped while writing: its rank counts as missing.
        remarks = tuple(str(e) for e in unreadable)
        looked_at = flight_recorder.looked_at(dumps)
        answer.inputs.append(_dump_input(found.dumps, "flight recorder dumps", looked_at, remarks))
    if found.stacks:
        say(f"reading {len(found.stacks)} stack dump(s)")
        taken, remarks = _stacks(found.stacks, paths, Budget(limits, clock))
        all_findings += stacks.diagnose(taken, topology=topology)
        looked_at = stacks.looked_at(taken, topology=topology)
        answer.inputs.append(_dump_input(found.stacks, "stack dumps", looked_at, remarks))
    if found.devices:
        say(f"reading {len(found.devices)} InfiniBand device(s)")
        ports = infiniband_trees.read(found.devices)
        findings, open_questions = infiniband_findings.diagnose(ports)
        all_findings += findings
        where = os.path.commonpath([str(device.parent.absolute()) for device in found.devices])
        looked_at = infiniband_findings.looked_at(ports)
        remarks = tuple(open_questions[:NUM_REMARKS_MAX])
        answer.inputs.append(Input(path=where, kind="infiniband trees", looked_at=looked_at, remarks=remarks))
    findings, nccl_inputs = diagnosing_nccl.diagnose(found.nccl, paths, lambda: Budget(limits, clock), topology)
    all_findings += findings
    answer.inputs += [_dump_input(i.files, i.kind, i.looked_at, i.remarks) for i in nccl_inputs]
    if found.kernel:
        say(f"reading {len(found.kernel)} kernel log(s)")
        logs, remarks = kernel_logs.read_all(found.kernel, paths, Budget(limits, clock))
        all_findings += kernel_findings.diagnose(logs)
        looked_at, remarks = kernel_findings.looked_at(logs), (*remarks, *kernel_findings.remarks(logs))
        answer.inputs.append(_dump_input(found.kernel, "kernel logs", looked_at, remarks))
    if found.events:
        say(f"reading the events of {len(found.events)} agent(s)")
        budget = Budget(limits, clock)
        events = [agent_events.read(file, budget) for file in found.events]
        all_findings += agent_events.diagnose(events)
        about = agent_events.looked_at(events)
        answer.inputs.append(_dump_input(found.events, "agent events", about, agent_events.remarks(events)))
    for folder, num in found.passed_over.items():
        answer.inputs.append(Input(path=str(folder), kind="folder", looked_at=f"{num} file(s) of unknown kind skipped"))
    answer.diagnoses = [kernel_findings.with_advice(d) for d in merged(all_findings)]
    return answer


def explained(answer: DiagnosisReport, detectors: Sequence[PanelDetector]) -> list[ExplainedDiagnosis]:
    """Each diagnosis with its panel and, if one of `detectors` made it, that detector's score over time."""
    traces = dict[tuple[int, str], tuple[Floats, Floats]]()
    items = []
    for d in answer.diagnoses:
        panel, machine = _place(d, answer.panels)
        score = None
        by = next((x for x in detectors if x.name in d.detectors), None)
        if panel is not None and by is not None:
            key = id(panel), by.name
            if key not in traces:
                traces[key] = _trace(panel, by)
            scores, thresholds = traces[key]
            score = ScoreTrace(at=panel.at, score=scores[:, machine], threshold=thresholds)
        items.append(ExplainedDiagnosis(diagnosis=d, panel=panel, score=score))
    return items


def _trace(panel: Panel, detector: PanelDetector) -> tuple[Floats, Floats]:
    """Scores (T, N) and thresholds (T,): NaN before there is one."""
    tracker = detector.track(panel.shape)
    scores = np.full((len(panel.at), len(panel.shape.machines)), np.nan, dtype=np.float32)
    thresholds = np.full(len(panel.at), np.nan, dtype=np.float32)
    for t, (at, values) in enumerate(panel.ticks()):
        tracker.tick(at, values)
        if (stands := standing(tracker)) is not None:
            with np.errstate(over="ignore"):  # beyond float32 is beyond every threshold
                scores[t], thresholds[t] = stands
    thresholds[~np.isfinite(thresholds)] = np.nan
    return scores, thresholds


def _place(d: Diagnosis, panels: Sequence[Panel]) -> tuple[Panel | None, int]:
    """The panel that contains the first suspect, and its column."""
    for panel in panels:
        for n in range(len(panel.shape.machines)):
            if panel.shape.suspect(n) == d.suspects[0]:
                return panel, n
    return None, 0


def _stacks(files: Sequence[Path], named: Sequence[Path], budget: Budget) -> tuple[list[StackDump], tuple[str, ...]]:
    """The dumps, and the errors of unreadable ones in folders, whose processes count as missing. Raises
    UnreadableInput: a named file cannot be read, or none can, or the budget is exhausted."""
    dumps, unreadable = [], []
    counted = set[int]()
    for file in files:
        budget.check_time(str(file))
        try:
            dump = stack_dumps.read(file)
        except UnreadableInput as e:
            if file in named:
                raise
            unreadable.append(e)
            continue
        dumps.append(dump)
        budget.keep(stack_dumps.kept_bytes(dump, counted), str(file))
    if not dumps:
        raise unreadable[0]
    return dumps, tuple(str(e) for e in unreadable)


def _dump_input(files: Sequence[Path], kind: str, looked_at: str, remarks: tuple[str, ...] = ()) -> Input:
    where = os.path.commonpath([str(f.parent) for f in files]) if len(files) > 1 else str(files[0])
    if len(remarks) > NUM_REMARKS_MAX:
        remarks = (*remarks[:NUM_REMARKS_MAX], f"{len(remarks) - NUM_REMARKS_MAX:,} more files cannot be read")
    return Input(path=where, kind=kind, looked_at=f"{len(files)} file(s): {looked_at}", remarks=remarks)


def _looked_at(panel: Panel) -> str:
    shape = panel.shape
    hours = (float(panel.at[-1] - panel.at[0]) + shape.interval_seconds) / 3600
    span = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
    return (
        f"{shape.name}: {len(shape.machines)} machine(s), {len(shape.metrics)} metric(s), "
        f"{len(panel.at)} ticks of {shape.interval_seconds:g} s ({span})"
    )


def _diagnosis(d: Diagnosis) -> dict[str, Any]:
    whole = d.to_dict()
    whole["suspects"] = [{k: s[k] for k in SUSPECT_FIELDS} for s in whole["suspects"]]
    return whole


def sentences(answer: DiagnosisReport) -> list[str]:
    """The report as text: each diagnosis with its evidence, or `healthy`, followed by the inputs."""
    lines: list[str] = []
    for d in answer.diagnoses:
        lines.append(f"{_when(d.detected_at)} {d.fault_class}: {d.because}")
        lines += [f"    {e.text}" for e in d.evidence]
        if d.settle:
            lines.append(f"    to settle it: {d.settle}")
        if d.advice:
            lines.append(f"    advice: {d.advice}")
    if not answer.diagnoses:
        open_ends = any(r.startswith("cannot tell") for i in answer.inputs for r in i.remarks)
        lines.append(
            "nothing found, but not everything could be checked, in" if open_ends else "healthy: nothing found in"
        )
    else:
        lines.append(f"{len(answer.diagnoses)} diagnosis(es) in")
    for i in answer.inputs:
        lines.append(f"    {i.path}: {i.looked_at}")
        lines += [f"        {r}" for r in i.remarks]
    return [
        plain(line) if not line.startswith(" ") else line[: len(line) - len(line.lstrip())] + plain(line.lstrip())
        for line in lines
    ]


def _when(at: float) -> str:
    text = iso_utc(at)
    return f"at {text}" if text.endswith(" s") else text


def exit_code(answer: DiagnosisReport) -> int:
    """1 if a fault was found, else 0. A `cannot_tell` with suspects is a fault that is not localized."""
    return 1 if any(d.suspects or d.fault_class != FaultClass.CANNOT_TELL for d in answer.diagnoses) else 0
