"""The environment in which the Python ranks of a job report by themselves (`rolecall exec`, `rolecall env`). Pure.

PYTHONPATH gets the folder `hook`, whose `sitecustomize.py` every Python process of the job runs at its start. Nothing
else of rolecall becomes importable that way, and nothing of the job's environment is hidden.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from rolecall.agent.reporter.flight_recorder_request import RECORDER_NAMES

HOOK = Path(__file__).with_name("hook")
ENABLED = "ROLECALL_AUTOSTART"
"""`1`: processes report by themselves; anything else switches it off, also in a job that was started with it."""
RECORDER_ENTRIES = "2000"
"""Collectives that PyTorch's Flight Recorder keeps, by torch's own default where it is on."""


def job_environment(environ: Mapping[str, str], hook: Path = HOOK) -> dict[str, str]:
    """The variables to set for a job that would otherwise run with `environ`. What the job sets itself is kept."""
    path = environ.get("PYTHONPATH")  # an empty one is none; an empty entry of it is the working directory
    others = [p for p in path.split(os.pathsep) if p != str(hook)] if path else []
    found = {"PYTHONPATH": os.pathsep.join([str(hook), *others]), ENABLED: "1"}
    if not any(name in environ for name in RECORDER_NAMES):
        found[RECORDER_NAMES[0]] = RECORDER_ENTRIES
    return found
