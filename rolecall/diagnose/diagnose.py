"""`rolecall diagnose`: reads recordings, dumps and logs, runs the detectors, and reports faults with their evidence.

File kinds are recognised by content; folders are searched recursively. A named file that cannot be read is an error; a
file of unknown kind in a folder is skipped and named.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.artifacts import infiniband
from rolecall.detector.artifacts.flight_recorder import diagnosis as flight_recorder
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps
from rolecall.detector.artifacts.kernel_log import diagnosis as kernel_findings
from rolecall.detector.artifacts.kernel_log import logs as kernel_logs
from rolecall.detector.artifacts.nccl import inspector_times, ras_status
from rolecall.detector.artifacts.stacks import diagnosis as stacks
from rolecall.detector.artifacts.stacks import dumps as stack_dumps
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base import packed_files as packed
from rolecall.detector.base.read_budget import Budget, Contents, ReadLimits, read_each
from rolecall.detector.live.fusion import merged
from rolecall.detector.panels.panel import Floats, Panel, PanelDetector, SeenValues, cannot_tell, standing
from rolecall.detector.panels.sensitivity import SmallestEffect, not_tried, smallest_effects
from rolecall.detector.sources import agent_event_files as agent_events
from rolecall.detector.sources import recording
from rolecall.diagnose.explain import ExplainedDiagnosis, ScoreTrace

HEAD_BYTES = 4096
NUM_FILES_MAX = 100_000
"""Files and folders below one folder; more indicates a wrong path."""
NUM_REMARKS_MAX, NUM_UNREADABLE_SHOWN = 100, 50
"""Remarks about the files of one kind, and those about unreadable ones among them; further ones are counted."""
NUM_SKIPPED_SHOWN = 20
"""Files of unknown kind that are named, of each folder; further ones are counted."""
SKIPPED, NOT_READABLE = "folder", "not readable"
KINDS = (
    "a recording (Parquet), a Flight Recorder dump (pickle or JSON), a stack dump of py-spy, an answer of NCCL RAS, "
    "a file of the NCCL Inspector, a kernel log, an agent's events, a copy of an InfiniBand device"
)
CANNOT_TELL = "cannot tell"
SENSITIVITY_SECONDS = 5.0
"""For finding the smallest effects that would have been named, of all panels together."""
PASSES_MIN = 14
"""Over a panel, that its trials take at least."""
SENSITIVITY_SEED = 0
SUSPECT_FIELDS = ("node", "role", "replica", "rank", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input. `content`: what it holds, in words."""

    path: str
    kind: str
    content: str
    remarks: tuple[str, ...] = ()


@dataclass(slots=True)
class DiagnosisReport:
    diagnoses: list[Diagnosis] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    panel_findings: list[tuple[Finding, Panel]] = field(default_factory=list)
    judged_seconds: list[float] = field(default_factory=list)  # of each panel
    smallest_effects: list[SmallestEffect] = field(default_factory=list)  # of healthy panels
    budget: Budget = field(default_factory=Budget)

    @property
    def open_ends(self) -> list[tuple[Input, str]]:
        """What could not be judged, why, and what would settle it: such remarks begin with `cannot tell`."""
        return [(i, r) for i in self.inputs for r in i.remarks if r.startswith(CANNOT_TELL)]

    @property
    def verdict(self) -> str:
        """`fault`, `cannot_tell` or `healthy`: the latter only if everything could be judged. A `cannot_tell` with
        suspects is a fault that is not localized."""
        if any(d.suspects or d.fault_class != FaultClass.CANNOT_TELL for d in self.diagnoses):
            return "fault"
        return "cannot_tell" if self.diagnoses or self.open_ends else "healthy"

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "diagnoses": [
                {**d.to_dict(), "suspects": [{k: s[k] for k in SUSPECT_FIELDS} for s in d.to_dict()["suspects"]]}
                for d in self.diagnoses
            ],
            "inputs": [asdict(i) for i in self.inputs],
            "verdict": self.verdict,
            "cannot_tell": [{"path": i.path, "kind": i.kind, "because": r} for i, r in self.open_ends],
            "smallest_effects": [asdict(e) for e in self.smallest_effects],
        }


@dataclass(slots=True)
class InputFiles:
    """Files by kind, in the order of the paths; `passed_over`: files of unknown kind by folder, each with
    the reason."""

    recordings: list[Path] = field(default_factory=list)
    dumps: list[Path] = field(default_factory=list)
    stacks: list[Path] = field(default_factory=list)
    kernel: list[Path] = field(default_factory=list)
    events: list[Path] = field(default_factory=list)  # of agents
    devices: list[Path] = field(default_factory=list)  # folders of InfiniBand trees
    ras: list[Path] = field(default_factory=list)  # NCCL RAS status answers
    inspector: list[Path] = field(default_factory=list)  # files of the NCCL Inspector
    topologies: list[Path] = field(default_factory=list)  # at most one
    passed_over: dict[Path, list[str]] = field(default_factory=dict)
    unknown_only: set[Path] = field(default_factory=set)  # folders that hold nothing else


def search(paths: Sequence[Path], num_files_max: int = NUM_FILES_MAX) -> InputFiles:
    """Raises UnreadableInput: no such path, a named file of unknown kind, a folder without files or with an
    unreadable subfolder."""
    found = InputFiles()
    for path in paths:
        if not path.exists():
            raise UnreadableInput(where=str(path), reason="no such file or folder")
        if not path.is_dir() or infiniband.is_device(path):
            if not _sort(path, found):
                if path.is_file() and recording.is_parquet(path):
                    recording.read(path)  # raises with the missing columns
                if path.is_file():
                    packed.head(path, 1)  # raises if it cannot be unpacked
                raise UnreadableInput(where=str(path), reason=f"unknown kind of file; expected {KINDS}")
            continue
        known = 0
        for file in _files(path, num_files_max):
            if file.name == recording.LABEL_JSON:
                continue  # what `rolecall simulate` says about the recording beside it
            if _sort(file, found):
                known += 1
            else:
                found.passed_over.setdefault(path, []).append(f"{file.relative_to(path)}: {_why_unknown(file)}")
        if not known and not found.passed_over.get(path):
            raise UnreadableInput(where=str(path), reason="the folder holds nothing to diagnose")
        if not known:
            found.unknown_only.add(path)
    return found


def _files(folder: Path, num_max: int) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise UnreadableInput(where=str(error.filename), reason=f"it cannot be read: {error.strerror}") from error

    seen = 0
    # Symlinks to folders are not followed: they may form a loop.
    for root, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        devices = infiniband.devices_in(Path(root), folders)
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
        if is_device := infiniband.is_device(file):
            found.devices.append(file)
        return is_device
    if not file.is_file():
        return False  # reading a socket, pipe or device could block forever
    try:
        for is_kind, files in (
            (recording.is_recording, found.recordings),
            (flight_dumps.is_dump, found.dumps),
            (stack_dumps.is_dump, found.stacks),
            (ras_status.is_status, found.ras),
            (inspector_times.is_log, found.inspector),
            (stack_dumps.is_topology, found.topologies),
            (agent_events.is_events, found.events),
            (kernel_logs.is_log, found.kernel),
        ):
            if is_kind(file):
                files.append(file)
                if len(found.topologies) > 1:
                    reason = f"a second topology beside {found.topologies[0]}"
                    raise UnreadableInput(where=str(file), reason=reason)
                return True
    except OSError as e:
        raise UnreadableInput(where=str(file), reason=f"it cannot be read: {e.strerror or e}") from e
    return False


def _why_unknown(file: Path) -> str:
    """Of a file that can be opened."""
    if not file.is_file():
        return "not a regular file"
    try:
        raw = packed.head(file, HEAD_BYTES)
    except (UnreadableInput, OSError):
        return "it cannot be unpacked"
    if not raw:
        return "empty"
    if recording.is_parquet(file):
        return "Parquet, but no recording"
    return "binary, of no known kind" if b"\0" in raw else "text of no known form; a kernel log has a time in each line"


def diagnose(
    paths: Sequence[Path],
    detectors: Sequence[PanelDetector],
    progress: Callable[[str], None] | None = None,
    *,
    limits: ReadLimits | None = None,
    clock: Clock | None = None,
    sensitivity_seconds: float = 0.0,
) -> DiagnosisReport:
    """All diagnoses of the files at `paths`, earliest first. Where `limits` end it, what was read is judged as far as
    there is time, and remarks name the file that was not read to its end and panels that were not judged to their end.
    `sensitivity_seconds`: if all is healthy, so long at most to find the smallest effects that would have been named.

    Raises UnreadableInput: a file cannot be read.
    """
    say = progress or (lambda _: None)
    budget = Budget(limits, clock)
    found = search(paths)
    answer = DiagnosisReport(budget=budget)
    all_findings: list[Finding] = []
    topology = stack_dumps.read_topology(found.topologies[0]) if found.topologies else None
    # Dumps and logs first: detectors may take all of the time for a recording.
    for kind, files, what in (
        ("flight recorder dumps", found.dumps, "Flight Recorder dump"),
        ("stack dumps", found.stacks, "stack dump"),
        ("infiniband trees", found.devices, "InfiniBand device"),
        ("nccl ras", found.ras, "NCCL RAS answer"),
        ("nccl inspector", found.inspector, "NCCL Inspector file"),
        ("kernel logs", found.kernel, "kernel log"),
        ("agent events", found.events, "agent event file"),
    ):
        if files:
            say(f"reading {counted(len(files), what)}")
            findings, described = _diagnose_kind(kind, files, paths, budget.next_kind(), topology)
            all_findings += findings
            answer.inputs.append(described)
    for number, file in enumerate(found.recordings):
        say(f"reading {file}")
        try:
            budget.check_time(str(file))
            read = recording.read(file, budget.check(file), partial(budget.keep, path=str(file)))
        except ReadingStopped as stopped:
            left = found.recordings[number:]
            answer.inputs.append(_files_input(left, "recording", "not judged", (_not_read(stopped, len(left)),)))
            break
        except UnreadableInput as error:
            if file in paths:
                raise
            answer.inputs.append(_files_input([file], "recording", NOT_READABLE, (f"cannot tell from {error}",)))
            continue
        looked, open_ends = [], list[str]()
        for panel in read.panels:
            say(f"{file}: {panel.shape.name}, {len(panel.shape.machines)} machines, {len(panel.at)} ticks")
            seconds_left = budget.seconds_left
            findings, unsettled = _diagnose_panel(panel, detectors, budget)
            answer.judged_seconds.append(seconds_left - budget.seconds_left)
            all_findings += findings
            answer.panel_findings += [(finding, panel) for finding in findings]
            open_ends += unsettled
            looked.append(_panel_words(panel))
        if not read.panels:
            looked.append("no value")
            open_ends.append(
                f"cannot tell: none of its {read.num_rows:,} samples has a value; a recording of metrics that the "
                "machines report would settle it"
            )
        answer.panels += read.panels
        remarks = (*read.remarks, *dict.fromkeys(filter(None, open_ends)))
        answer.inputs.append(Input(path=str(file), kind="recording", content="; ".join(looked), remarks=remarks))
    if found.topologies and not answer.inputs:
        alone = "cannot tell: a topology only says where ranks are; dumps of these ranks would settle it"
        answer.inputs.append(_files_input(found.topologies, "topology", "names and places of ranks", (alone,)))
    for folder, skipped in found.passed_over.items():
        only = f"cannot tell: it holds no file of a known kind; it would be settled by {KINDS}"
        names = [f"skipped {text}" for text in skipped[:NUM_SKIPPED_SHOWN]]
        if (num_more := len(skipped) - len(names)) > 0:
            names.append(f"skipped {counted(num_more, 'more file')}")
        answer.inputs.append(
            Input(
                path=str(folder),
                kind=SKIPPED,
                content=f"{counted(len(skipped), 'file')} of unknown kind skipped",
                remarks=(*([only] if folder in found.unknown_only else []), *names),
            )
        )
    answer.diagnoses = [kernel_findings.with_advice(d) for d in merged(all_findings)]
    if answer.verdict == "healthy" and sensitivity_seconds:
        seconds = min(sensitivity_seconds, budget.seconds_left)
        judged = tuple(zip(answer.panels, answer.judged_seconds, strict=True))
        answer.smallest_effects = _smallest_effects(judged, detectors, seconds, clock or SystemClock(), say)
    return answer


def _diagnose_panel(
    panel: Panel, detectors: Sequence[PanelDetector], budget: Budget
) -> tuple[list[Finding], list[str]]:
    """Findings, and why there is no verdict. Ends between two ticks when the time of the call is used up."""
    found, seen = list[Finding](), SeenValues()
    trackers = [(detector.name, detector.track(panel.shape)) for detector in detectors]
    for number, (at, values) in enumerate(panel.ticks()):
        if budget.seconds_left < 0:
            reason = f"{number:,} of its {len(panel.at):,} ticks were judged in the {budget.seconds_max:g} s of a call"
            return found, [
                f"cannot tell for {panel.shape.name}: {reason}; a call for it or a part of it alone would settle it"
            ]
        seen.tick(values)
        found += [finding for _, tracker in trackers for finding in tracker.tick(at, values)]
    return found, [cannot_tell(panel.shape, name, tracker, seen) for name, tracker in trackers]


def _smallest_effects(
    judged: Sequence[tuple[Panel, float]],
    detectors: Sequence[PanelDetector],
    seconds: float,
    clock: Clock,
    say: Callable[[str], None],
) -> list[SmallestEffect]:
    """Each panel gets an equal part of the time that those before it left. `judged`: panels and how long the detectors
    took for each: one whose trials cannot end in time is not tried."""
    found, end = list[SmallestEffect](), clock.monotonic() + seconds
    for number, (panel, pass_seconds) in enumerate(judged):
        now = clock.monotonic()
        until = now + max(0.0, end - now) / (len(judged) - number)
        if now + PASSES_MIN * pass_seconds > until:
            found += not_tried(panel)
            continue
        rng = np.random.default_rng(SENSITIVITY_SEED)

        def is_over(until: float = until) -> bool:
            return clock.monotonic() >= until

        found += smallest_effects(panel, detectors, rng, is_over, say)
    return found


def _diagnose_kind(
    kind: str, files: Sequence[Path], named: Sequence[Path], budget: Budget, topology: Topology | None
) -> tuple[list[Finding], Input]:
    """Findings of the files of one kind. `named`: paths that the user gave: one that cannot be read is an error."""
    remarks: Sequence[str]
    match kind:
        case "flight recorder dumps":
            dumps, unreadable = flight_dumps.read_as_needed(files, flight_recorder.entries_wanted, budget=budget)
            for error in unreadable:
                if Path(error.where) in named or error.reason.startswith("refused"):
                    raise error  # a malicious dump invalidates the whole diagnosis
            # A truncated dump is from a rank that died or was stopped while writing: its rank counts as missing.
            unread = _unread(files, Contents(items=dumps, unreadable=unreadable, stopped=budget.stopped))
            findings = flight_recorder.diagnose(dumps, topology=topology, complete=budget.stopped is None)
            remarks = () if findings or not dumps else flight_recorder.open_ends(dumps)
            content = flight_recorder.summary(dumps)
        case "stack dumps":
            counted = set[int]()
            # The processes of unreadable dumps count as missing, those of dumps that were not read do not.
            stack = read_each(files, named, budget, stack_dumps.read, lambda d: stack_dumps.kept_bytes(d, counted))
            unread, content = _unread(files, stack), stacks.summary(stack.items, topology=topology)
            findings = stacks.diagnose(stack.items, topology=topology, complete=stack.stopped is None)
            remarks = () if findings else stacks.open_ends(stack.items, topology=topology)
        case "infiniband trees":
            ports = infiniband.read(files, budget)
            findings, remarks = infiniband.diagnose(ports)
            where = os.path.commonpath([str(device.parent.absolute()) for device in files])
            stopped = (_not_read(budget.stopped, 0),) if budget.stopped is not None else ()
            shown = (*stopped, *remarks[:NUM_REMARKS_MAX])
            return findings, Input(path=where, kind=kind, content=infiniband.summary(ports), remarks=shown)
        case "nccl ras":
            answers = read_each(files, named, budget, ras_status.read, ras_status.kept_bytes)
            polls = [p for several in answers.items for p in several]
            findings, remarks = ras_status.diagnose(polls, topology=topology)
            unread, content = _unread(files, answers), ras_status.summary(polls)
        case "nccl inspector":
            logs = read_each(files, named, budget, inspector_times.read, inspector_times.kept_bytes)
            findings, remarks = inspector_times.diagnose(logs.items, topology=topology)
            unread, content = _unread(files, logs), inspector_times.summary(logs.items)
        case "kernel logs":
            kernel = read_each(files, named, budget, kernel_logs.read, kernel_logs.kept_bytes)
            findings, remarks = kernel_findings.diagnose(kernel.items), kernel_findings.remarks(kernel.items)
            unread, content = _unread(files, kernel), kernel_findings.summary(kernel.items)
        case _:
            events = read_each(files, named, budget, lambda file, _: agent_events.read(file, budget), lambda _: 0)
            findings = agent_events.diagnose(events.items, budget.check(files[-1]))
            unread = _unread(files, replace(events, stopped=budget.stopped))
            remarks, content = agent_events.remarks(events.items), agent_events.summary(events.items)
    return findings, _files_input(files, kind, content, (*unread, *remarks))


def _unread(files: Sequence[Path], read: Contents[Any]) -> tuple[str, ...]:
    """Remarks about files that could not be read, or not to their end."""
    remarks = [f"cannot tell from {error}" for error in read.unreadable[:NUM_UNREADABLE_SHOWN]]
    if (num_more := len(read.unreadable) - len(remarks)) > 0:
        remarks.append(f"cannot tell from {num_more:,} more files that cannot be read")
    if read.stopped is not None:
        remarks.append(_not_read(read.stopped, len(files) - len(read.items) - len(read.unreadable)))
    return tuple(remarks)


def _not_read(stopped: ReadingStopped, num_left: int) -> str:
    left = f" ({counted(num_left, 'file')} not read)" if num_left else ""
    return f"cannot tell from {stopped}{left}"


def explained(answer: DiagnosisReport, detectors: Sequence[PanelDetector]) -> list[ExplainedDiagnosis]:
    """Each diagnosis with its panel and, if one of `detectors` made it, that detector's score over time."""
    traces = dict[tuple[int, str], tuple[Floats, Floats]]()
    items = []
    for diagnosis in answer.diagnoses:
        panel, machine = _place(diagnosis, answer)
        score = None
        by = next((x for x in detectors if x.name in diagnosis.detectors), None)
        if panel is not None and by is not None:
            key = id(panel), by.name
            if key not in traces:
                traces[key] = _trace(panel, by, answer.budget)
            scores, thresholds = traces[key]
            score = ScoreTrace(at=panel.at, score=scores[:, machine], threshold=thresholds)
        items.append(ExplainedDiagnosis(diagnosis=diagnosis, panel=panel, score=score))
    return items


def _trace(panel: Panel, detector: PanelDetector, budget: Budget) -> tuple[Floats, Floats]:
    """Scores (T, N) and thresholds (T,): NaN before there is one, and after the time of the call."""
    tracker = detector.track(panel.shape)
    scores = np.full((len(panel.at), len(panel.shape.machines)), np.nan, dtype=np.float32)
    thresholds = np.full(len(panel.at), np.nan, dtype=np.float32)
    for tick, (at, values) in enumerate(panel.ticks()):
        if budget.seconds_left < 0:
            break
        tracker.tick(at, values)
        if (stands := standing(tracker)) is not None:
            with np.errstate(over="ignore"):  # beyond float32 is beyond every threshold
                scores[tick], thresholds[tick] = stands
    thresholds[~np.isfinite(thresholds)] = np.nan
    return scores, thresholds


def _place(diagnosis: Diagnosis, answer: DiagnosisReport) -> tuple[Panel | None, int]:
    """The panel that the diagnosis was made from, else one that contains the first suspect, and the suspect's
    column."""
    said = diagnosis.because, diagnosis.detected_at
    own = [panel for finding, panel in answer.panel_findings if (finding.because, finding.detected_at) == said]
    for panel in (*own, *answer.panels):
        for n in range(len(panel.shape.machines)):
            if panel.shape.suspect(n) == diagnosis.suspects[0]:
                return panel, n
    return None, 0


def _files_input(files: Sequence[Path], kind: str, content: str, remarks: tuple[str, ...] = ()) -> Input:
    where = os.path.commonpath([str(f.parent) for f in files]) if len(files) > 1 else str(files[0])
    if len(remarks) > NUM_REMARKS_MAX:
        remarks = tuple(sorted(remarks, key=lambda r: not r.startswith(CANNOT_TELL)))  # these decide the verdict
        remarks = (*remarks[:NUM_REMARKS_MAX], f"{len(remarks) - NUM_REMARKS_MAX:,} more remarks")
    return Input(path=where, kind=kind, content=f"{counted(len(files), 'file')}: {content}", remarks=remarks)


def _panel_words(panel: Panel) -> str:
    shape = panel.shape
    hours = (float(panel.at[-1] - panel.at[0]) + shape.interval_seconds) / 3600
    span = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
    return (
        f"{shape.name}: {counted(len(shape.machines), 'machine')}, {counted(len(shape.metrics), 'metric')}, "
        f"{len(panel.at)} ticks of {shape.interval_seconds:g} s ({span})"
    )


def exit_code(answer: DiagnosisReport) -> int:
    """1 if a fault was found, 2 if nothing could be read, else 0."""
    if answer.verdict == "fault":
        return 1
    return 2 if all(i.kind == SKIPPED or i.content.endswith(NOT_READABLE) for i in answer.inputs) else 0
