"""Scenario files: series in, diagnoses out, none where none is due. The format is described in scenario.py."""

from pathlib import Path

import pytest

from rolecall.detector.live.engine import LiveDetector
from tests.detector.scenario import Scenario

FILES = sorted((Path(__file__).parents[2] / "scenarios").glob("detect_*.toml"))


def test_there_are_scenarios() -> None:
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    scenario = Scenario(path)
    scenario.run()
    reported = list(scenario.reported.values())
    seen = "\n".join(f"  {at:.1f} s until {until}: {d.key}: {d.because}" for at, d, until in reported)
    expected = scenario.spec.get("expect", [])
    assert len(reported) == len(expected), f"expected {len(expected)} diagnoses, got\n{seen}"
    for (at, diagnosis, until), want in zip(reported, expected, strict=True):
        first, last = want["between"]
        assert first <= at <= last, f"reported at {at:.1f} s\n{seen}"
        assert diagnosis.fault_class == want["fault_class"], seen
        assert [s.replica or s.node for s in diagnosis.suspects] == want["suspects"], seen
        if "ranks" in want:
            assert [s.rank for s in diagnosis.suspects if s.rank is not None] == want["ranks"], seen
        for words in want.get("says", []):
            assert words in diagnosis.because + diagnosis.settle, seen
        if "until" in want:
            assert until is not None and until <= want["until"], f"stood until {until}\n{seen}"
        else:
            assert until is None, f"stood only until {until}\n{seen}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_window_replays_to_the_same_diagnoses(path: Path) -> None:
    scenario = Scenario(path)
    if any("forget" in change for change in scenario.spec.get("at", [])):
        pytest.skip("what recovery ordered is no observation: it is in the state that a window begins with")
    scenario.run()
    replayed = LiveDetector.replay(scenario.config, scenario.spec.get("roles"), scenario.observations)
    first_told = {}
    for diagnoses in replayed:
        for d in diagnoses:
            first_told.setdefault(d.key, d)
    assert first_told == {key: d for key, (_, d, _) in scenario.reported.items() if key == d.key}
