"""`rolecall fit RECORDING... -o FILE [--detector NAME] [--labels LABEL]...`: learns from recordings what is usual.

For the default detector the file is a profile of one's own job (`panels/sequential/profile.py`), for `minder` a model.

A label file, as `rolecall simulate fleet` writes it, is a JSON object with a list `events`, each with `node`, `onset`
and `end` (seconds on the recording's clock). Without labels everything counts as normal, and minder's priority of
the metrics is not learned."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.core.rundir import write_atomically
from rolecall.core.text import counted, plain
from rolecall.detector.panels.minder.detector import ANY_METRIC, BUILT_IN, NUM_METRICS
from rolecall.detector.panels.minder.detector import read as read_model
from rolecall.detector.panels.minder.fit import NUM_STEPS, LabelledFault, fit, write
from rolecall.detector.panels.panel import Panel
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.peer_place import BLOCK_TICKS, LONG_BLOCKS
from rolecall.detector.panels.sequential.profile import Profile
from rolecall.detector.sources.recording import read

LABEL_BYTES_MAX = 16 << 20
TICKS_MIN = LONG_BLOCKS * BLOCK_TICKS
"""Of a panel, before a profile learns from it."""
SECONDS_MAX = 1e12
"""Bound on the times of a recording, from 1970."""


def fit_profile(
    recordings: Sequence[Path],
    out: Path,
    *,
    labels: Sequence[Path] = (),
    progress: Callable[[str], None] | None = None,
) -> str:
    """Writes the profile to `out`; returns a summary. `recordings`: oldest first. Samples of labelled faults are left
    out.

    Raises:
        CommandRefused: not one label per recording, `out` exists or cannot be written.
        UnreadableInput: a recording or label is damaged, or none shows anything.
    """
    say = progress or (lambda _: None)
    _check(recordings, out, labels)
    profile = Profile(learned_from=[path.name for path in recordings], panels=[])
    unlearned = list[tuple[Path, str]]()
    for i, path in enumerate(recordings):
        say(f"reading {path}")
        events = read_faults(labels[i]) if labels else ()
        for panel in read(path).panels:
            say(f"{path}: {panel.shape.name}, {len(panel.shape.machines)} machines, {len(panel.at)} ticks")
            tracker = Sequential(profile=profile, healthy=True).track(panel.shape)
            for at, values in _without(panel, events).ticks():
                tracker.tick(at, values)
            learned = tracker.learned()
            if learned is None:
                unlearned.append((path, f"{panel.shape.name}: {_why_nothing(panel)}"))
            else:
                profile = profile.replaced(learned, panel.shape)
    if not profile.panels:
        where = ", ".join(map(str, recordings))
        reasons = "; ".join(dict.fromkeys(text for _, text in unlearned)) or "no sample has a value"
        raise UnreadableInput(where=where, reason=f"nothing can be learned: {reasons}")
    try:
        write_atomically(out, profile.to_json())
    except OSError as e:
        raise CommandRefused(f"{out} cannot be written: {e.strerror}") from e
    lines = [f"{out}: profile of {counted(len(profile.panels), 'panel')}"]
    for panel_profile in profile.panels:
        drifts = sum(m.drift is not None for m in panel_profile.metrics.values())
        phase = f", phase {panel_profile.phase}" if panel_profile.phase else ""
        lines.append(
            f"  role {plain(panel_profile.role)}{plain(phase)}, every {panel_profile.interval_seconds:g} s: "
            f"{counted(round(panel_profile.recordings), 'recording')}, {len(panel_profile.metrics)} metrics, "
            f"{len(panel_profile.offsets)} nodes"
        )
        if not drifts:
            lines.append("    usual offsets of the nodes count from two recordings of them on")
    return "\n".join(lines + [f"  shows nothing: {plain(f'{path}: {text}')}" for path, text in unlearned])


def _why_nothing(panel: Panel) -> str:
    if len(panel.shape.machines) < 2:
        return "one machine has no peers"
    if len(panel.at) < TICKS_MIN:
        return f"{len(panel.at)} of {TICKS_MIN} ticks"
    return "no metric moves whose levels machines share"


def _without(panel: Panel, faults: Sequence[LabelledFault]) -> Panel:
    values = panel.values.copy()
    for n, machine in enumerate(panel.shape.machines):
        for fault in faults:
            if fault.node == machine.node:
                values[:, (panel.at >= fault.onset) & (panel.at <= fault.end), n] = np.nan
    return Panel(shape=panel.shape, at=panel.at, values=values)


def _check(recordings: Sequence[Path], out: Path, labels: Sequence[Path]) -> None:
    if labels and len(labels) != len(recordings):
        raise CommandRefused(
            f"{len(labels)} labels for {len(recordings)} recordings: give one per recording, in the same order"
        )
    if out.exists():
        raise CommandRefused(f"{out} already exists and is not overwritten")


def fit_model(
    recordings: Sequence[Path], out: Path, *, labels: Sequence[Path] = (), seed: int = 0, num_steps: int = NUM_STEPS
) -> str:
    """Writes a model of `minder` to `out`; returns a summary.

    Raises:
        CommandRefused: not one label per recording, `out` exists or cannot be written, torch is missing.
        UnreadableInput: a recording or label is damaged, or no recording has eight ticks.
    """
    _check(recordings, out, labels)
    panels: list[Panel] = []
    faults: list[tuple[LabelledFault, ...]] = []
    for i, path in enumerate(recordings):
        events = read_faults(labels[i]) if labels else ()
        for panel in read(path).panels:
            nodes = {m.node for m in panel.shape.machines}
            panels.append(panel)
            faults.append(tuple(e for e in events if e.node in nodes))
    built_in = read_model(BUILT_IN)
    any_metric = built_in.weights.taken(built_in.rows([ANY_METRIC]))  # for metrics that no recording has
    try:
        fitted = fit(panels, faults, any_metric=any_metric, seed=seed, num_steps=num_steps)
    except ValueError as e:
        raise UnreadableInput(where=", ".join(map(str, recordings)), reason=str(e)) from e
    except ModuleNotFoundError as e:
        raise CommandRefused(f"fitting needs {e.name}: pip install {e.name}") from e
    try:
        write(out, fitted.model)
    except OSError as e:
        raise CommandRefused(f"{out} cannot be written: {e.strerror}") from e
    lines = [f"{out}: {len(fitted.mse)} denoisers, {fitted.num_windows:,} windows each"]
    lines += [
        f"  {plain(m)}: mean squared error {fitted.mse[m]:.1e} of a variance of {fitted.spread[m]:.1e}"
        for m in fitted.mse
    ]
    first = [plain(m) for m in fitted.model.priority[:NUM_METRICS]]
    if first:
        share = f"{fitted.num_faulty_ticks:,} of {fitted.num_tree_ticks:,} ticks labelled faulty"
        lines.append(f"priority ({share}): {' > '.join(first)}")
    else:
        lines.append("priority: not learned without faulty labels; all metrics are tried")
    return "\n".join(lines)


def read_faults(path: Path) -> tuple[LabelledFault, ...]:
    """The labelled faults of a file. Raises UnreadableInput."""
    where = str(path)
    try:
        if path.stat().st_size > LABEL_BYTES_MAX:
            raise UnreadableInput(where=where, reason=f"a label file has at most {LABEL_BYTES_MAX:,} bytes")
        label: Any = json.loads(path.read_bytes())
    except OSError as e:
        raise UnreadableInput(where=where, reason=e.strerror or str(e)) from e
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UnreadableInput(where=where, reason=f"not JSON: {e}") from e
    events = label.get("events") if isinstance(label, dict) else None
    if not isinstance(events, list):
        raise UnreadableInput(where=where, reason="not a label file: it has no list `events`")
    return tuple(_fault(where, i, e) for i, e in enumerate(events))


def _fault(where: str, number: int, event: Any) -> LabelledFault:
    if isinstance(event, dict):
        node, onset, end = (event.get(k) for k in ("node", "onset", "end"))
        if (
            isinstance(node, str)
            and isinstance(onset, int | float)
            and isinstance(end, int | float)
            and -SECONDS_MAX < onset <= end < SECONDS_MAX
        ):
            return LabelledFault(node=node, onset=float(onset), end=float(end))
    raise UnreadableInput(where=where, reason=f"event {number} has no node, onset and end in seconds")
