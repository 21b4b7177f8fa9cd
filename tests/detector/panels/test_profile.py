"""Profiles: what is usual in one's own job, learned from recordings or by `watch`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.core.rundir import RunDir
from rolecall.detector.base.observation import Observation
from rolecall.detector.live import run_panels
from rolecall.detector.panels.metric_kinds import ANY_KIND, KINDS, kind
from rolecall.detector.panels.panel import Machine, Panel, PanelShape, findings
from rolecall.detector.panels.registry import detector
from rolecall.detector.panels.sequential import profile as profiles
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.priors import SPREADS, Priors, shipped
from rolecall.detector.panels.sequential.profile import (
    RECORDINGS_MAX,
    SURE_MAX,
    PanelProfile,
    Profile,
    UsualPlaces,
    machine_keys,
)
from rolecall.detector.sources import recording
from rolecall.diagnose.fit import fit_profile
from rolecall.session.demo import demo_job
from rolecall.testing.synthetic_run import FakeFleet
from rolecall.watch import run as watching

MACHINES, METRICS, TICKS, NOISE = 4, 3, 120, 1.0
UNEQUAL = 40.0
"""Offset of machine m2 in the first metric on every day, in units of the noise."""


def recorded(day: int, *, unequal: float = UNEQUAL, slow: float = 0.0, ticks: int = TICKS) -> Panel:
    """m2 always does more work; `slow` is added to the first metric of m0."""
    rng = np.random.default_rng(day)
    values = 1000 + rng.standard_normal((METRICS, ticks, MACHINES)) + 0.3 * rng.standard_normal((METRICS, 1, MACHINES))
    values[0, :, 2] += unequal
    values[0, :, 0] += slow
    shape = PanelShape(
        role="trainer",
        metrics=tuple(f"metric_{m}" for m in range(METRICS)),
        machines=tuple(Machine(node=f"m{n}", replica=f"trainer/{n}") for n in range(MACHINES)),
        interval_seconds=1.0,
    )
    at = 1.7e9 + 86_400.0 * day + np.arange(float(ticks))
    return Panel(shape=shape, at=at, values=values.astype(np.float32))


def learned(*panels: Panel) -> Profile:
    profile = Profile(panels=[])
    for panel in panels:
        tracker = Sequential(profile=profile, healthy=True).track(panel.shape)
        for at, values in panel.ticks():
            assert not tracker.tick(at, values), "none is named while learning"
        found = tracker.learned()
        assert found is not None
        profile = profile.replaced(found, panel.shape)
    return profile


def named(panel: Panel, profile: Profile | None = None) -> set[str]:
    return {s.node for f in findings(Sequential(profile=profile), panel) for s in f.suspects}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return learned(*(recorded(day) for day in range(4)))


def test_what_is_usual_in_a_job_is_no_fault_with_its_profile(profile: Profile) -> None:
    today = recorded(9)
    assert named(today) == {"m2"}
    assert named(today, profile) == set()


def test_a_fault_is_found_beside_what_is_usual(profile: Profile) -> None:
    assert named(recorded(9, slow=UNEQUAL), profile) == {"m0"}
    assert named(recorded(9, unequal=0.0), profile) == {"m2"}, "less than its usual work"


@pytest.mark.parametrize("ticks", [TICKS, 400])
def test_one_recording_does_not_show_how_far_offsets_move(ticks: int) -> None:
    once = learned(recorded(1, ticks=ticks))
    (panel,) = once.panels
    assert panel.offsets["m2"]["metric_0"] == pytest.approx(UNEQUAL, rel=0.2)
    shape = recorded(9).shape
    usual = UsualPlaces.of(shape, shipped().log_spreads(shape.metrics), panel)
    assert np.isnan(usual.offsets).all() and not usual.drift.any() and usual.spread.any()


def test_a_recording_too_short_teaches_nothing() -> None:
    panel = recorded(1, ticks=95)
    tracker = Sequential(healthy=True).track(panel.shape)
    for at, values in panel.ticks():
        tracker.tick(at, values)
    assert tracker.learned() is None


def test_a_profile_applies_to_its_role_phase_and_interval(profile: Profile) -> None:
    shape = recorded(9).shape
    (panel,) = profile.panels

    def of(**changes: object) -> PanelProfile | None:
        fields = {name: getattr(shape, name) for name in ("role", "metrics", "machines", "interval_seconds", "phase")}
        return profile.of(PanelShape(**(fields | changes)))  # type: ignore[arg-type]

    assert of() is panel and of(interval_seconds=1.4) is panel
    assert of(role="rollout") is None and of(phase="sync") is None and of(interval_seconds=15.0) is None


def test_earlier_recordings_fade_and_what_is_not_seen_is_kept(profile: Profile) -> None:
    shape = recorded(0).shape
    (panel,) = profile.panels
    many = panel.model_copy(
        update={"recordings": 50.0, "metrics": {**panel.metrics, "other": panel.metrics["metric_0"]}}
    )
    tracker = Sequential(profile=Profile(panels=[many]), healthy=True).track(shape)
    for at, values in recorded(9, unequal=0.0).ticks():
        tracker.tick(at, values)
    now = tracker.learned()
    assert now is not None
    assert now.recordings == RECORDINGS_MAX + 1 and now.metrics["other"] == many.metrics["other"]
    before, after = (p.offsets["m2"]["metric_0"] for p in (many, now))
    assert after == pytest.approx(before * RECORDINGS_MAX / (RECORDINGS_MAX + 1), abs=1.0)


def test_machines_keep_their_key_when_a_replica_is_replaced() -> None:
    assert machine_keys([Machine(node="a", replica="trainer/0"), Machine(node="b", replica="trainer/1")]) == ["a", "b"]
    several = [Machine(node="a", replica=f"trainer/{i}", rank=0, gpu=None) for i in range(2)]
    assert machine_keys(several) == ["a trainer/0 rank 0", "a trainer/1 rank 0"]
    assert machine_keys([Machine(node="a", rank=3, gpu=7)]) == ["a rank 3 gpu 7"]


def test_no_profile_is_certain(profile: Profile) -> None:
    (panel,) = profile.panels
    shape = recorded(9).shape
    usual = UsualPlaces.of(shape, shipped().log_spreads(shape.metrics), panel)
    assert usual.spread.max() == 0.0 and usual.spread.min() >= -SURE_MAX


def test_a_file_of_another_kind_is_refused(tmp_path: Path, profile: Profile) -> None:
    good = json.loads(profile.to_json())
    wrong_grid = json.loads(profile.to_json())
    wrong_grid["panels"][0]["metrics"]["metric_0"]["spread"] = [0.0]
    for content, reason in (
        ("{", "not JSON"),
        ("[]", "`rolecall fit` writes one"),
        (json.dumps({**good, "kind": "model"}), "`rolecall fit` writes one"),
        (json.dumps({**good, "version": 2}), "version"),
        (json.dumps(wrong_grid), r"panels.0.metrics.metric_0.spread"),
    ):
        path = tmp_path / "profile.json"
        path.write_text(content)
        with pytest.raises(UnreadableInput, match=reason):
            profiles.read(path)
    with pytest.raises(UnreadableInput, match="No such file"):
        profiles.read(tmp_path / "none")
    (tmp_path / "good.json").write_text(profile.to_json())
    assert profiles.read(tmp_path / "good.json") == profile


def test_fit_writes_a_profile_that_diagnose_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days = []
    for day in range(3):
        days.append(tmp_path / f"day{day}.parquet")
        recording.write(days[-1], [recorded(day)])
    recording.write(tmp_path / "today.parquet", [recorded(9)])
    out, today = str(tmp_path / "job.json"), str(tmp_path / "today.parquet")
    assert main(["fit", *map(str, days), "-o", out]) == 0
    assert "3 recordings, 3 metrics, 4 nodes" in capsys.readouterr().out
    assert main(["diagnose", today]) == 1
    assert main(["diagnose", today, "--profile", out]) == 0
    assert main(["diagnose", today, "--profile", out, "--detector", "minder"]) == 2
    assert "only sequential has one" in capsys.readouterr().err
    with pytest.raises(CommandRefused, match="already exists"):
        fit_profile(days, Path(out))


def test_samples_of_labelled_faults_are_left_out(tmp_path: Path) -> None:
    panel = recorded(1, slow=200.0)
    recording.write(tmp_path / "day.parquet", [panel])
    label = tmp_path / "label.json"
    event = {"node": "m0", "onset": float(panel.at[0]), "end": float(panel.at[-1])}
    label.write_text(json.dumps({"events": [event]}))
    fit_profile([tmp_path / "day.parquet"], tmp_path / "out.json", labels=[label])
    (learned_panel,) = profiles.read(tmp_path / "out.json").panels
    assert "metric_0" not in learned_panel.offsets["m0"] and "metric_0" in learned_panel.offsets["m1"]


def test_fit_refuses_recordings_that_show_nothing(tmp_path: Path) -> None:
    recording.write(tmp_path / "short.parquet", [recorded(1, ticks=50)])
    with pytest.raises(UnreadableInput, match="96 ticks"):
        fit_profile([tmp_path / "short.parquet"], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_fit_tells_why_a_panel_shows_nothing(tmp_path: Path) -> None:
    good, still, alone = recorded(1), recorded(1), recorded(1)
    still.values[:] = 7.0
    alone = Panel(
        shape=replace(alone.shape, machines=alone.shape.machines[:1]), at=alone.at, values=alone.values[..., :1]
    )
    paths = [tmp_path / f"{name}.parquet" for name in ("good", "still", "alone", "short")]
    for path, panel in zip(paths, (good, still, alone, recorded(1, ticks=50)), strict=True):
        recording.write(path, [panel])
    said = fit_profile(paths, tmp_path / "out.json")
    for name, why in (("still", "no metric moves"), ("alone", "one machine has no peers"), ("short", "50 of 96 ticks")):
        assert f"shows nothing: {tmp_path}/{name}.parquet: role trainer: {why}" in said


def test_watch_keeps_what_it_learned_for_the_next_run_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, profile: Profile
) -> None:
    job = demo_job(seed=1, num_steps=1, injection_allowed=False)
    clock = FakeClock()
    first = watching._PersistentDetector(RunDir(tmp_path / "first"), job, clock)
    fake = SimpleNamespace(profile=profile, findings=lambda _: ())
    first._panels = fake  # type: ignore[assignment]
    first.observe(Observation(wall_at=1.0))
    kept = tmp_path / watching.PROFILES_FOLDER / f"{job.digest()}.json"
    assert not kept.exists(), "not at every poll"
    clock.advance(watching.PROFILE_SECONDS)
    (tmp_path / "first").mkdir()
    first.observe(Observation(wall_at=2.0))
    assert profiles.read(kept) == profile
    second = watching._PersistentDetector(RunDir(tmp_path / "second"), job, clock)
    assert second._panels.profile == profile
    kept.write_text("{")
    third = watching._PersistentDetector(RunDir(tmp_path / "third"), job, clock)
    assert third._panels.profile is None and "starting without learned state" in caplog.text


def test_a_live_panel_teaches_after_a_while_and_a_replacement_does_not_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_panels, "LEARNED_TICKS_MIN", run_panels.SETTLE_TICKS + 100)
    fleet, panels = FakeFleet(seed=1), run_panels.RunPanels(detector())

    def go(seconds: float) -> None:
        for observation in fleet.run(seconds):
            panels.findings(observation)

    go(run_panels.SETTLE_TICKS + 80)
    assert panels.profile is None
    go(60)
    learned_so_far = panels.profile
    assert learned_so_far is not None
    (of_rollouts,) = learned_so_far.panels
    assert of_rollouts.role == "rollout" and len(of_rollouts.offsets) == 3 and of_rollouts.recordings == 1
    fleet.kill("rollout/2")
    go(run_panels.SILENT_SECONDS + 10)
    kept = panels.profile
    assert kept is not None and kept.panels[0].offsets.keys() == of_rollouts.offsets.keys()


def test_metrics_have_kinds_by_the_words_of_their_names() -> None:
    assert kind("MEM_cached") == "state" and kind("forward-compute.mean") == "own_work"
    assert kind("rolecall_gpu_sm_clock_hertz") == "hardware" and kind("CPU_ALL_User%") == "usage"
    assert kind("net_read_KBps") == "traffic" and kind("k03") == ANY_KIND


def test_the_shipped_priors_cover_every_channel_and_any_metric() -> None:
    priors = shipped()
    assert set(priors.scores) == {"single", "several", "distance", "novelty"}
    assert ANY_KIND in priors.spreads and set(priors.spreads) <= {ANY_KIND, *KINDS}
    grid = np.exp(priors.log_spreads(["k03", "MEM_cached"]))
    assert grid.shape == (2, len(SPREADS)) and grid.sum(axis=1) == pytest.approx(1.0, abs=1e-6)


def test_a_prior_moves_what_is_surprising() -> None:
    body = json.loads((Path(profiles.__file__).parent / "priors.json").read_text())
    body["spreads"] = {ANY_KIND: {"median": 60.0, "width": 0.5, "uniform": 0.02}}
    wide = Priors.from_dict(body)
    today = recorded(9)
    assert not {s.node for f in findings(Sequential(priors=wide), today) for s in f.suspects}
