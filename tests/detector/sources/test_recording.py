"""Recordings: what is written is read, in any order of rows; what is damaged or foreign is reported and nothing else."""

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rolecall.core.errors import UnreadableInput
from rolecall.detector.panels.panel import Machine, Panel
from rolecall.detector.sources import recording
from tests.detector.panel_data import noise


def table(**columns: object) -> pl.DataFrame:
    """Two metrics of two machines at three times, with columns replaced or added; None takes one away."""
    rows = [(t, n, m) for t in (100.0, 110.0, 120.0) for n in ("a", "b") for m in ("x", "y")]
    base: dict[str, object] = {
        "timestamp": [r[0] for r in rows],
        "role": ["trainer"] * 12,
        "replica": [f"trainer/{'ab'.index(r[1])}" for r in rows],
        "node": [r[1] for r in rows],
        "metric": [r[2] for r in rows],
        "value": [float(i) for i in range(12)],
    }
    return pl.DataFrame({k: v for k, v in (base | columns).items() if v is not None}, strict=False)


def saved(path: Path, frame: pl.DataFrame) -> Path:
    frame.write_parquet(path)
    return path


def only(path: Path) -> Panel:
    [panel] = recording.read(path).panels
    return panel


def test_a_written_recording_reads_back_equal(tmp_path: Path) -> None:
    panel = noise(machines=3, metrics=2, ticks=20)
    values = panel.values.copy()
    values[1, 4, 2] = np.nan
    whole = Panel(shape=panel.shape, at=panel.at, values=values)
    assert recording.write(tmp_path / "r.parquet", [whole]) == 2 * 20 * 3 - 1
    again = only(tmp_path / "r.parquet")
    assert again.shape == whole.shape
    assert np.array_equal(again.at, whole.at) and np.array_equal(again.values, values, equal_nan=True)
    assert not list(tmp_path.glob("*.partial"))


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    frame = table()
    straight = only(saved(tmp_path / "a.parquet", frame))
    mixed = only(saved(tmp_path / "b.parquet", frame.sample(fraction=1.0, shuffle=True, seed=3)))
    assert straight.shape == mixed.shape and np.array_equal(straight.values, mixed.values)
    assert straight.shape.interval_seconds == 10.0 and straight.at.tolist() == [100.0, 110.0, 120.0]
    assert straight.values[0].tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]


def test_ranks_gpus_jobs_and_phases_make_machines_and_panels(tmp_path: Path) -> None:
    frame = table(rank=[0, 1] * 6, gpu=[None] * 12, job=["j"] * 12, phase=["compute"] * 6 + ["reduce"] * 6, step=None)
    panels = recording.read(saved(tmp_path / "r.parquet", frame)).panels
    assert [(p.shape.job, p.shape.phase) for p in panels] == [("j", "compute"), ("j", "reduce")]
    assert Machine(node="a", replica="trainer/0", rank=1) in panels[0].shape.machines


def test_steps_align_where_every_row_has_one(tmp_path: Path) -> None:
    late = [100.0, 100.0, 103.0, 103.0, 110.0, 110.0, 114.0, 114.0, 120.0, 120.0, 125.0, 125.0]
    panel = only(saved(tmp_path / "r.parquet", table(timestamp=late, step=[1] * 4 + [2] * 4 + [3] * 4)))
    assert panel.at.tolist() == [103.0, 114.0, 125.0] and np.isfinite(panel.values).all()


def test_repeated_times_count_once_and_the_order_of_rows_does_not_decide(tmp_path: Path) -> None:
    twice = pl.concat([table(), table(value=[100.0 + i for i in range(12)])])
    panel = only(saved(tmp_path / "a.parquet", twice))
    other = only(saved(tmp_path / "b.parquet", twice.reverse()))
    assert np.array_equal(panel.values, other.values) and panel.values.min() == 100.0


def test_rows_without_information_are_left_out_and_reported(tmp_path: Path) -> None:
    values = [float("nan"), float("inf"), None, *[float(i) for i in range(9)]]
    times = [100.0] * 10 + [1e300, float("nan")]
    read = recording.read(saved(tmp_path / "r.parquet", table(value=values, timestamp=times)))
    assert read.remarks == (
        "2 rows have no valid time and are left out",
        "3 rows hold no finite value and are left out",
    )
    assert read.num_rows == 12


def test_gaps_make_no_ticks(tmp_path: Path) -> None:
    times = [100.0] * 4 + [110.0] * 4 + [1e9] * 4
    panel = only(saved(tmp_path / "r.parquet", table(timestamp=times)))
    assert len(panel.at) == 3 and panel.at[-1] == pytest.approx(1e9, abs=panel.shape.interval_seconds)


def test_a_recording_cut_short_has_the_same_grid(tmp_path: Path) -> None:
    panel = noise(machines=3, metrics=2, ticks=200)
    recording.write(tmp_path / "a.parquet", [panel])
    frame = pl.read_parquet(tmp_path / "a.parquet").filter(pl.col("timestamp") < panel.at[120])
    cut = only(saved(tmp_path / "b.parquet", frame))
    assert np.array_equal(cut.at, panel.at[:120]) and np.array_equal(cut.values, panel.values[:, :120])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"metric": None}, "no column metric"),
        ({"value": ["a"] * 12}, "column value holds String"),
        ({"timestamp": ["a"] * 12}, "column timestamp holds String"),
        ({"rank": ["a"] * 12}, "column rank holds String"),
        ({"node": [""] * 12}, "no sample"),
    ],
)
def test_foreign_tables_are_refused_by_name(tmp_path: Path, columns: dict[str, object], said: str) -> None:
    path = saved(tmp_path / "r.parquet", table(**columns))
    with pytest.raises(UnreadableInput, match=said) as e:
        recording.read(path)
    assert e.value.where == str(path)


def test_a_recording_without_any_value_has_no_panel(tmp_path: Path) -> None:
    read = recording.read(saved(tmp_path / "r.parquet", table(value=[float("nan")] * 12)))
    assert read.panels == () and read.num_rows == 12


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_files_cut_short_are_refused(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path / "r.parquet", table())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UnreadableInput, match=r"r\.parquet"):
        recording.read(path)


def test_damaged_bytes_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    whole = saved(path, table()).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 8):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged))
        try:
            recording.read(path)
        except UnreadableInput as e:
            assert e.where == str(path)


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "node[0-3]*"
    folder.mkdir()
    path = saved(folder / "r[1]?.parquet", table())
    assert recording.is_recording(path) and only(path).shape == only(saved(tmp_path / "r.parquet", table())).shape


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UnreadableInput, match="not a regular file"):
            recording.read(path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    with path.open("wb") as file:
        file.write(b"PAR1")
        file.truncate(10 << 30)
    with pytest.raises(UnreadableInput):
        recording.read(path)


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "NUM_ROWS_MAX", 11)
    with pytest.raises(UnreadableInput, match="12 samples, and 11 are read at most"):
        recording.read(saved(tmp_path / "r.parquet", table()))
    monkeypatch.setattr(recording, "NUM_ROWS_MAX", 100)
    monkeypatch.setattr(recording, "NUM_VALUES_MAX", 5)
    with pytest.raises(UnreadableInput, match="12 values, and 5 of 5 are left"):
        recording.read(saved(tmp_path / "r.parquet", table()))


def test_many_panels_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = pl.concat([table().with_columns(job=pl.lit(job)) for job in ("a", "b")])
    path = saved(tmp_path / "r.parquet", two)
    monkeypatch.setattr(recording, "NUM_VALUES_MAX", 24)
    assert len(recording.read(path).panels) == 2
    monkeypatch.setattr(recording, "NUM_VALUES_MAX", 23)
    with pytest.raises(UnreadableInput, match="12 values, and 11 of 23 are left"):
        recording.read(path)


def test_panels_are_announced_before_they_take_memory(tmp_path: Path) -> None:
    def refuse(num_bytes: int) -> None:
        raise OverflowError(num_bytes)

    path = saved(tmp_path / "r.parquet", table())
    with pytest.raises(OverflowError) as e:
        recording.read(path, keep=refuse)
    assert e.value.args == (12 * 4 + 3 * 8,)


@pytest.mark.parametrize(
    ("limit", "most", "said"),
    [
        ("NUM_NAMES_MAX", 1, "more than 1 machines: cut it by role"),
        ("NUM_TICKS_MAX", 2, "more than 2 ticks: cut it by"),
    ],
)
def test_too_many_machines_or_ticks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, said: str
) -> None:
    path = saved(tmp_path / "r.parquet", table())
    monkeypatch.setattr(recording, limit, most + 1)
    assert only(path).values.size == 12
    monkeypatch.setattr(recording, limit, most)
    with pytest.raises(UnreadableInput, match=said):
        recording.read(path)


@pytest.mark.parametrize("batch", [1, 5, 1000])
def test_batches_do_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Of machines, metrics, first samples, ticks, repeated samples and rows without a value."""
    monkeypatch.setattr(recording, "NUM_FIRST_SAMPLES", 2)
    rows = pl.concat([table(value=[0.5, None, *[float(i) for i in range(10)]]), table()])
    for steps in (None, [1] * 12 + [2] * 12):
        named = rows.with_columns(job=pl.lit("j"), gpu=pl.Series([0, 1, 2] * 8), step=pl.Series(steps or [None] * 24))
        path = saved(tmp_path / "r.parquet", named.sample(fraction=1.0, shuffle=True, seed=batch))
        whole = recording.read(path)
        with monkeypatch.context() as smaller:
            smaller.setattr(recording, "BATCH_ROWS", batch)
            smaller.setattr(recording, "NUM_NEW_SAMPLES", batch)
            parts = recording.read(path)
        assert parts.remarks == whole.remarks == ("1 rows hold no finite value and are left out",)
        for one, other in zip(whole.panels, parts.panels, strict=True):
            assert one.shape == other.shape and np.array_equal(one.at, other.at)
            assert np.array_equal(one.values, other.values, equal_nan=True)


def test_of_samples_on_one_tick_the_latest_counts_in_whatever_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "BATCH_ROWS", 12)
    late = table(timestamp=[t + 1.0 for t in (100.0, 110.0, 120.0) for _ in range(4)], value=[-1.0] * 12)
    for frames in ([table(), late, late], [late, table(), table()]):
        panel = only(saved(tmp_path / "r.parquet", pl.concat([*frames, table(value=[-2.0] * 12)])))
        assert panel.shape.interval_seconds == 1.0 and len(panel.at) == 6
        steps = pl.concat([*frames, late]).with_columns(step=(pl.col("timestamp") // 10).cast(pl.Int64))
        by_step = only(saved(tmp_path / "s.parquet", steps))
        assert by_step.at.tolist() == [101.0, 111.0, 121.0] and (by_step.values == -1.0).all()


def test_a_role_may_have_machines_with_and_without_rank(tmp_path: Path) -> None:
    ranks = [0, 0, None, None] * 3
    panels = recording.read(
        saved(tmp_path / "r.parquet", table(rank=ranks, node=["a"] * 12, replica=["t"] * 12))
    ).panels
    assert [p.shape.machines[0].rank for p in panels] == [None, 0]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "r.parquet", table())
    reads = iter(range(10))

    def change() -> None:
        if next(reads) == 1:
            saved(path, table(metric=["z"] * 12))

    with pytest.raises(UnreadableInput, match="changed while it was read"):
        recording.read(path, change)


def test_times_of_the_calendar_are_seconds(tmp_path: Path) -> None:
    frame = table().with_columns((pl.col("timestamp") * 1e6).cast(pl.Int64).cast(pl.Datetime("us")))
    assert only(saved(tmp_path / "r.parquet", frame)).at.tolist() == [100.0, 110.0, 120.0]
