"""Minder: the denoiser, the learned priority, continuity, and who is named."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.detector.panels.minder import detector as minder
from rolecall.detector.panels.minder import fit as minder_fit
from rolecall.detector.panels.minder.detector import Minder, Variant
from rolecall.detector.panels.minder.fit import LabelledFault
from rolecall.detector.panels.panel import Floats, Panel, findings
from rolecall.detector.panels.peer_scores import mean_distances
from rolecall.detector.sources import recording
from rolecall.diagnose.fit import fit_model
from tests.detector.panels.test_baselines import (
    ASKED,
    INTERVAL_SECONDS,
    ONSET_TICK,
    onset_of,
    peers,
    permuted,
    truncated,
)

CONTINUITY_TICKS = 9
"""At 30 s a tick: one more than a window."""


def _detector(**settings: Any) -> Minder:
    return replace(minder.make(ASKED), num_metrics=None, **settings)


@pytest.mark.parametrize("variant", [Variant.PER_METRIC, Variant.RAW, Variant.CONCATENATED])
def test_an_outlier_is_named_and_no_one_else(variant: Variant) -> None:
    panel = peers(seed=1, fault=(3, 1, 15.0))
    found = findings(_detector(variant=variant), panel)
    assert [s.node for f in found for s in f.suspects] == ["m03"]
    delay = found[0].detected_at - onset_of(panel)
    assert (CONTINUITY_TICKS - 1) * INTERVAL_SECONDS <= delay <= (CONTINUITY_TICKS + 8) * INTERVAL_SECONDS
    assert onset_of(panel) <= found[0].onset < found[0].detected_at
    reported = "all metrics together" if variant == Variant.CONCATENATED else "b"
    assert found[0].evidence[0].kind == f"metric:{reported}"
    assert "m03" in found[0].because and reported in found[0].because


def test_no_one_is_named_in_a_healthy_panel() -> None:
    assert findings(_detector(), peers(seed=2)) == []


def test_no_one_is_named_when_all_machines_change_alike_or_one_falls_silent() -> None:
    panel = peers(seed=5)
    panel.values[1, ONSET_TICK:] += 40
    panel.values[2, ONSET_TICK:, 4] = np.nan
    panel.values[:, ONSET_TICK + 10 :, 6] = np.nan
    assert findings(_detector(), panel) == []


@given(st.permutations(range(8)), st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3))
@settings(max_examples=5)
def test_neither_the_order_of_machines_nor_the_unit_of_a_metric_matters(
    order: Sequence[int], factors: Sequence[float]
) -> None:
    panel = peers(seed=3, fault=(2, 0, 12.0))
    reported = [
        [(f.suspects, f.detected_at) for f in findings(_detector(), p)]
        for p in (panel, permuted(panel, order, factors))
    ]
    assert reported[0] == reported[1] != []


def test_what_is_said_does_not_depend_on_what_comes_later() -> None:
    panel = peers(seed=3, fault=(2, 0, 12.0))
    whole = findings(_detector(), panel)
    cut = int(np.searchsorted(panel.at, whole[0].detected_at))
    assert findings(_detector(), truncated(panel, cut)) == []
    assert findings(_detector(), truncated(panel, cut + 1)) == whole[:1]


def test_a_difference_that_does_not_last_is_named_only_without_continuity() -> None:
    panel = peers(seed=1)
    panel.values[1, ONSET_TICK : ONSET_TICK + 2, 3] = panel.values[1, ONSET_TICK - 1, 2] + 60
    named = [[s.node for f in findings(_detector(continuity_ticks=n), panel) for s in f.suspects] for n in (1, 12)]
    assert "m03" in named[0]
    assert named[1] == []


def test_two_machines_that_are_faulty_together_are_both_named_once() -> None:
    panel = peers(seed=1, num_machines=12, num_ticks=340, fault=(3, 1, 25.0))
    panel.values[2, ONSET_TICK + 5 :, 7] -= 30
    found = findings(_detector(), panel)
    assert sorted(s.node for f in found for s in f.suspects) == ["m03", "m07"]


def test_the_first_metric_of_the_priority_tells() -> None:
    panel = peers(seed=1, fault=(3, 1, 15.0))
    panel.values[2, ONSET_TICK:, 3] += 15
    for order in ("bca", "cba"):
        model = replace(minder.make(ASKED).model, priority=tuple(order))
        found = findings(replace(_detector(), model=model), panel)
        assert found[0].evidence[0].kind == f"metric:{order[0]}"


def test_three_machines_are_too_few_to_tell() -> None:
    panel = peers(seed=4, num_machines=3, fault=(0, 0, 50.0))
    assert findings(_detector(), panel) == []


def test_which_metrics_are_tried() -> None:
    model = replace(minder.make(ASKED).model, priority=("c", "a", "b"))
    assert model.order(("a", "b", "c"), 2) == [2, 0], "the first of the priority"
    assert model.order(("b", "c", "d"), 2) == [1, 0, 2], "one of them is lacking: all, in the order known"
    assert replace(model, priority=()).order(("x", "y"), 1) == [0, 1], "no order was learned: all"


def _smooth(seed: int, num: int) -> Floats:
    """(8, 1, 1, num): what normal metrics look like within eight seconds, scaled: levels, slopes, waves, a bit of
    noise."""
    rng = np.random.default_rng(seed)
    wave = np.sin(rng.uniform(0.02, 0.2, num) * np.arange(8)[:, None] + rng.uniform(0, 2 * math.pi, num))
    values = 0.5 + rng.uniform(0, 0.4, num) * wave + rng.uniform(-0.1, 0.1, num)
    values += 0.003 * rng.standard_normal(values.shape)
    return values.astype(np.float32)[:, None, None]


def test_the_denoiser_gives_normal_windows_back_and_keeps_outliers_apart() -> None:
    """The paper's bar, a mean squared error below 1e-4 on normal data, of the built-in denoiser for any metric."""
    model = minder.read(minder.BUILT_IN)
    weights = model.weights.taken(model.rows([minder.ANY_METRIC]))
    normal = _smooth(2, 500)
    assert minder_fit.mean_squared_error(weights, normal)[0] < 1e-4
    assert normal.var() > 1e-2, "the mean would not do"
    alike = np.repeat(normal[..., :1], 20, axis=3) + np.random.default_rng(3).normal(0, 0.01, (8, 1, 1, 20))
    alike[:, :, :, 4] += 0.2
    distances = mean_distances(minder.denoise(weights, alike.astype(np.float32))[:, :, 0])[0]
    assert distances.argmax() == 4
    assert distances[4] > 3 * np.delete(distances, 4).max()


def test_training_learns_and_a_seed_gives_the_same_weights() -> None:
    windows = _smooth(1, 1024)
    weights = [minder_fit.train(windows, seed=0, num_steps=n, num_starts=2) for n in (3, 3, 200)]
    assert np.array_equal(weights[0].encoder_input, weights[1].encoder_input)
    assert minder_fit.mean_squared_error(weights[2], _smooth(2, 500))[0] < windows.var() / 4


def test_the_arithmetic_is_that_of_an_lstm() -> None:
    """Against torch's own LSTM, whose gates stand in another order."""
    import torch

    rng = np.random.default_rng(7)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in minder.weight_shapes(2, 3).items()}
    weights = minder.Weights(**arrays)
    windows = rng.random((8, 2, 3, 5), dtype=np.float32)
    found = minder.denoise(weights, windows)
    rows = [*range(8), *range(12, 16), *range(8, 12)]  # input, forget, candidate, output

    def lstm(k: int, part: str, num_inputs: int) -> torch.nn.LSTM:
        made = torch.nn.LSTM(num_inputs, 4)
        with torch.no_grad():
            made.weight_ih_l0.copy_(torch.from_numpy(arrays[f"{part}_input"][k][rows]))
            made.weight_hh_l0.copy_(torch.from_numpy(arrays[f"{part}_hidden"][k][rows]))
            made.bias_ih_l0.copy_(torch.from_numpy(arrays[f"{part}_bias"][k][rows, 0]))
            made.bias_hh_l0.zero_()
        return made

    for k in range(2):
        with torch.no_grad():
            _, (hidden, _) = lstm(k, "encoder", 3)(torch.from_numpy(windows[:, k].transpose(0, 2, 1).copy()))
            latent = hidden[0].numpy() @ arrays["latent_weight"][k].T + arrays["latent_bias"][k].T
            state = latent @ arrays["state_weight"][k].T + arrays["state_bias"][k].T
            begin = (torch.from_numpy(np.tanh(state[None, :, :4])), torch.from_numpy(state[None, :, 4:].copy()))
            out, _ = lstm(k, "decoder", 8)(torch.from_numpy(np.repeat(latent[None], 8, axis=0)), begin)
            wanted = out.numpy() @ arrays["output_weight"][k].T + arrays["output_bias"][k].T
        np.testing.assert_allclose(found[:, k], wanted.transpose(0, 2, 1), atol=1e-4)


def _faulty_panels(metric: int) -> tuple[list[Panel], list[list[LabelledFault]]]:
    """Panels whose faults all stand on one metric, each on another machine."""
    panels = [peers(seed=s, fault=(s, metric, 10.0)) for s in range(6)]
    return panels, [
        [LabelledFault(node=f"m{s:02d}", onset=onset_of(p), end=float(p.at[-1]))] for s, p in enumerate(panels)
    ]


@pytest.mark.parametrize("metric", [0, 2])
def test_the_tree_puts_the_metric_first_on_which_faults_show(metric: int) -> None:
    order, num_faulty, num_ticks = minder_fit.priority(*_faulty_panels(metric))
    assert order[0] == "abc"[metric]
    assert sorted(order) == ["a", "b", "c"]
    assert 0 < num_faulty < num_ticks


def test_without_labels_no_order_is_learned() -> None:
    assert minder_fit.priority([peers(seed=1)], [[]])[0] == ()


def test_faulty_time_is_not_learned_as_normal() -> None:
    panel = peers(seed=1, fault=(3, 1, 1000.0))
    labels = [LabelledFault(node="m03", onset=onset_of(panel), end=float(panel.at[-20]))]
    panel.values[:, -20:] = panel.values[:, :20]
    windows = minder_fit.windows_of(panel, labels, np.random.default_rng(0))
    both = minder_fit.windows_of(panel, [], np.random.default_rng(0))
    assert np.nanmin(windows[:, 1]) >= 0 and np.nanmax(windows[:, 1]) <= 1
    # Before the fault the range is that of healthy machines; with it one machine lies far above the rest.
    steady = [np.median(np.ptp(w[:, 1], axis=0)) for w in (windows, both)]
    assert steady[0] > steady[1]
    inside = minder_fit.faulty(panel.at, labels, 8)
    assert inside.sum() == len(panel.at) - 19 - ONSET_TICK + 8


@pytest.fixture
def _recorded(tmp_path: Path) -> Iterator[tuple[list[Path], list[Path]]]:
    recordings, labels = [], []
    panels, faults = _faulty_panels(0)
    for i, (panel, some) in enumerate(zip(panels[:2], faults, strict=False)):
        recordings.append(tmp_path / f"{i}.parquet")
        recording.write(recordings[-1], [panel])
        labels.append(tmp_path / f"{i}.json")
        events = [{"node": f.node, "onset": f.onset, "end": f.end, "kind": "x"} for f in some]
        labels[-1].write_text(json.dumps({"healthy": False, "events": events}))
    yield recordings, labels


def test_what_fit_writes_the_detector_reads(tmp_path: Path, _recorded: tuple[list[Path], list[Path]]) -> None:
    recordings, labels = _recorded
    out = tmp_path / "model"
    reported = fit_model(recordings, out, labels=labels, num_steps=5)
    assert "3 denoisers" in reported and "priority" in reported and "a" in reported
    model = minder.make(ASKED, model=out).model
    assert set(model.metrics) == {"a", "b", "c", minder.ANY_METRIC}
    assert model.priority[0] == "a"
    built_in = minder.read(minder.BUILT_IN)
    for f in fields(minder.Weights):
        mine = getattr(model.weights, f.name)[model.rows(["nobody has this"])]
        assert np.array_equal(mine, getattr(built_in.weights, f.name)[built_in.rows([minder.ANY_METRIC])])
    with pytest.raises(CommandRefused, match="already exists"):
        fit_model(recordings, out)
    with pytest.raises(CommandRefused, match="1 labels for 2 recordings"):
        fit_model(recordings, tmp_path / "other", labels=labels[:1])


@pytest.mark.parametrize(
    "label",
    [
        *("", "[]", "{}", '{"events": 3}', '{"events": [{}]}', "\xff", "[" * 100_000),
        '{"events": [{"node": "m00", "onset": 5, "end": 4}]}',
        '{"events": [{"node": "m00", "onset": NaN, "end": 4}]}',
    ],
)
def test_a_label_file_of_another_kind_is_refused(
    tmp_path: Path, _recorded: tuple[list[Path], list[Path]], label: str
) -> None:
    recordings, labels = _recorded
    labels[1].write_text(label, encoding="latin-1")
    with pytest.raises(UnreadableInput, match=r"1\.json"):
        fit_model(recordings, tmp_path / "model", labels=labels)
    assert not (tmp_path / "model").exists()


def test_recordings_without_a_window_are_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.parquet"
    recording.write(short, [truncated(peers(seed=1), 5)])
    with pytest.raises(UnreadableInput, match="eight ticks"):
        fit_model([short], tmp_path / "model")


def _saved(path: Path, arrays: dict[str, NDArray[Any]], about: Any) -> Path:
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"rolecall": json.dumps(about)})
    return path


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    shapes = minder.weight_shapes(1, 1)
    good = {n: np.zeros(s, dtype=np.float32) for n, s in shapes.items()}
    about = {"format": 1, "metrics": ["a"], "priority": []}
    assert minder.read(_saved(tmp_path / "good", good, about)).metrics == ("a",)
    whole = (tmp_path / "good").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-7])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not a model")
    wrong = [tmp_path / "cut", tmp_path / "empty", tmp_path / "text", tmp_path / "absent", tmp_path]
    wrong.append(_saved(tmp_path / "nan", {**good, "latent_bias": good["latent_bias"] * np.nan}, about))
    wrong.append(_saved(tmp_path / "shape", {**good, "latent_bias": np.zeros((1, 8), np.float32)}, about))
    wrong.append(_saved(tmp_path / "lacks", {"latent_bias": good["latent_bias"]}, about))
    for i, other in enumerate((None, [], {"format": 2}, {**about, "metrics": "a"}, {**about, "priority": [1]})):
        wrong.append(_saved(tmp_path / f"about{i}", good, other))
    for path in wrong:
        with pytest.raises(UnreadableInput):
            minder.make(ASKED, model=path)
