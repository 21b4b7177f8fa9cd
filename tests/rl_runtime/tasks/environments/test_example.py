"""The example plays its game to the end, with a job file that is valid."""

import re
from pathlib import Path

from rolecall.core.config.job import load_job
from rolecall.rl_runtime.tasks.environments.process import EnvironmentProcess, Played, Script

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "environment"


def test_halving_finds_the_number(tmp_path: Path) -> None:
    job = load_job(FOLDER / "job.yaml")
    assert job.environment is not None and job.data is not None and Path(job.data.path).exists()
    process = EnvironmentProcess(job.environment)
    low, high, responses = 1, 20, list[str]()
    try:
        while True:
            responses.append(f"Is it {(low + high) // 2}?")
            (played,) = process.play([Script(key="a", arguments={"seed": 11}, responses=tuple(responses))])
            assert isinstance(played, Played)
            last = played.steps[-1]
            if last.done:
                break
            (guess,) = map(int, re.findall(r"\d+", responses[-1]))
            low, high = (guess + 1, high) if last.observation == "Higher." else (low, guess - 1)
    finally:
        process.close()
    assert len(responses) <= 5 and last.reward == 1.0 - 0.1 * (len(responses) - 1)
