"""Panel detectors by name, imported on demand: most need more than numpy."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rolecall.core.errors import ConfigError
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS, PanelDetector

DEFAULT = "sequential"
BASELINES = ("mahalanobis", "isolation-forest", "pca", "knn", "robust-z", "pairwise")
NAMES = (DEFAULT, "minder", *BASELINES)
FALSE_ALARMS_MIN, FALSE_ALARMS_MAX = 1e-3, 1e6


def detector(
    name: str = DEFAULT,
    *,
    false_alarms_per_1000_machine_days: float = FALSE_ALARMS_PER_1000_MACHINE_DAYS,
    model: Path | None = None,
    profile: Path | None = None,
) -> PanelDetector:
    """`model`, `profile`: files written by `rolecall fit`, for `minder` and for the default detector. Raises
    ConfigError, or UnreadableInput for a file."""
    problems = []
    if name not in NAMES:
        problems.append(f"detector: {name!r} is none of {', '.join(NAMES)}")
    asked = false_alarms_per_1000_machine_days
    if not FALSE_ALARMS_MIN <= asked <= FALSE_ALARMS_MAX:
        wanted = f"{FALSE_ALARMS_MIN:g} to {FALSE_ALARMS_MAX:g}"
        problems.append(f"false alarms: {asked:g} per 1,000 machine-days is not within {wanted}")
    if model is not None and name != "minder":
        problems.append(f"model: detector {name!r} has none; only minder has one")
    if profile is not None and name != DEFAULT:
        problems.append(f"profile: detector {name!r} has none; only {DEFAULT} has one")
    if problems:
        raise ConfigError(problems)
    if name == DEFAULT:
        from rolecall.detector.panels.sequential.detector import Sequential
        from rolecall.detector.panels.sequential.profile import read

        learned = None if profile is None else read(profile)
        return Sequential(false_alarms_per_1000_machine_days=asked, profile=learned)
    if name == "minder":
        from rolecall.detector.panels.minder import detector as minder

        return minder.make(asked, model=model)
    made: Callable[..., PanelDetector] = import_module("rolecall.detector.panels.baselines").BASELINES[name]
    return made(asked)


def with_step_time(chosen: PanelDetector, false_alarms_per_1000_machine_days: float) -> list[PanelDetector]:
    """The detectors of a panel: the chosen one and, except for baselines, step time at the same false alarm rate."""
    from rolecall.detector.panels.step_time import StepTime

    if chosen.name in BASELINES:
        return [chosen]
    return [chosen, StepTime(false_alarms_per_1000_machine_days=false_alarms_per_1000_machine_days)]
