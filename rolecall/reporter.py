"""What a training process reports: `from rolecall import reporter`. Standard library only.

reporter.start()
for n in range(num_steps):
    with reporter.step(n):
        ...
"""

from rolecall.agent.reporter.reporter import (
    collective,
    enter_phase,
    exception,
    finish,
    health,
    phase,
    progress,
    set_step,
    start,
    step,
    update,
)

__all__ = [
    "collective",
    "enter_phase",
    "exception",
    "finish",
    "health",
    "phase",
    "progress",
    "set_step",
    "start",
    "step",
    "update",
]
