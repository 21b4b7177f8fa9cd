"""`python -m rolecall.rl_runtime.trainer.prepare_model RUN`: writes the run's model folder, `runs/<id>/model`, once.

A separate process, so that the supervisor does not load torch and continues while Ray starts. For an unusable model,
exits with code 2 and one line on standard error.
"""

import sys
from pathlib import Path

from rolecall.core.config.job import parse_job
from rolecall.core.errors import RolecallError
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.trainer.model import write_model_folder


def main(argv: list[str]) -> int:
    run = RunDir(Path(argv[0]))
    try:
        job = parse_job(run.read()["config"])
        write_model_folder(run.path / "model", job.model, job.seed, job.task.name)
    except RolecallError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
