"""--explain: one page that loads nothing, shows foreign text as text, and draws what the detector saw."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.artifacts.stacks.diagnosis import diagnose
from rolecall.detector.artifacts.stacks.dumps import Frame, StackDump, Thread
from rolecall.detector.live.fusion import to_diagnosis
from rolecall.detector.panels.panel import Machine, Panel, PanelShape
from rolecall.diagnose import explain as module
from rolecall.diagnose.explain import (
    CHART_BYTES_MAX,
    LINE_STYLES,
    NUM_BUCKETS,
    PAGE_BYTES_MAX,
    SCORE_OVER_THRESHOLD_MAX,
    ExplainedDiagnosis,
    ScoreTrace,
    Window,
    chosen_metrics,
    explain,
    extremes,
    metric_chart,
    metric_series,
    moment,
    quantiles,
    render,
    window,
)
from tests.reports.test_html import HOSTILE, _read

ONSET, DECIDED = 1_700_000_300.0, 1_700_000_312.0


def panel(num_ticks: int = 600, num_machines: int = 30, *, faulty: int = 3) -> Panel:
    """`power` of one machine falls at the onset; `load` stays as it is."""
    rng = np.random.default_rng(7)
    at = ONSET - 300.0 + np.arange(num_ticks, dtype=np.float64)
    values = rng.normal(300.0, 5.0, (2, num_ticks, num_machines)).astype(np.float32)
    values[1, at >= ONSET, faulty] -= 60.0
    machines = tuple(Machine(node=f"m{n:02d}", replica=f"trainer/{n}") for n in range(num_machines))
    shape = PanelShape(role="trainer", metrics=("load", "power"), machines=machines, interval_seconds=1.0)
    return Panel(shape=shape, at=at, values=values)


def diagnosis(*machines: int, text: str = "30 sigmas below its peers", **changes: object) -> Diagnosis:
    reported = Diagnosis(
        suspects=tuple(Suspect(node=NodeId(f"m{n:02d}"), role="trainer", replica=f"trainer/{n}") for n in machines),
        fault_class=FaultClass.GPU,
        onset=ONSET,
        detected_at=DECIDED,
        confidence=0.9,
        because="trainer/3 draws less power than its peers",
        evidence=(Evidence(kind="metric:power", text=text, values={"sigmas": 30.25}),),
        detectors=("sequential",),
        advice="replace the replica",
    )
    return replace(reported, **changes)  # type: ignore[arg-type]


def score(seen: Panel) -> ScoreTrace:
    return ScoreTrace(at=seen.at, score=np.maximum(0, seen.at - ONSET).astype(np.float32), threshold=11.5)


def drawings(html: str) -> str:
    return "".join(re.findall(r"<svg viewBox=\"0 0 1120.*?</svg>", html))


def test_the_page_is_whole_and_loads_and_runs_nothing(tmp_path: Path) -> None:
    seen = panel()
    out = explain(tmp_path / "why.html", [ExplainedDiagnosis(diagnosis=diagnosis(3), panel=seen, score=score(seen))])
    assert [p.name for p in tmp_path.iterdir()] == ["why.html"]
    html = out.read_text()
    page = _read(html.replace("<br>", "<br/>"))
    tags = [t for t, _ in page.tags]
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form"} & set(tags)
    assert not re.search(r"(?:src|href|srcset|action)\s*=|url\(|@import|javascript:", html)
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html
    assert tags.count("h1") == 1
    for word in (
        "1 fault found",
        "gpu: trainer/3 (node m03)",
        "power against 29 peers",
        "30 sigmas below",
        "sigmas 30.25",
    ):
        assert word in page.text, word
    for word in (
        "12.0 s after the onset",
        "replace the replica",
        "Score and threshold of",
        "30 machines, 2 metrics, 600 ticks",
    ):
        assert word in page.text, word
    assert "load against" not in page.text, "the evidence names power alone"


def test_the_chart_shows_what_the_panel_holds() -> None:
    seen = panel()
    by = window(seen.at, 1.0, ONSET, DECIDED)
    series = metric_series(seen, 1, [3], by)
    (suspect,), (low, median, high) = series.suspects, series.band
    after, before = suspect[series.at > ONSET + 1], suspect[series.at < ONSET - 1]
    assert len(after) > 20 and len(before) > 60 and series.band_at.tolist() == series.at.tolist()
    assert max(after) < min(low) - 20, "below the band"
    assert min(low) < np.median(before) < max(high) and (low <= median).all() and (median <= high).all()
    svg, has_usual = metric_chart(seen, 1, [3], by)
    assert has_usual and ">onset</text>" in svg and ">decision</text>" in svg
    assert svg.count('stroke="var(--bad)"') >= 2 and 'fill="var(--lane)"' in svg


def test_the_usual_place_of_the_suspect_among_its_peers_is_drawn() -> None:
    seen = panel()
    seen.values[1, :, 3] += 100.0  # its place is far from theirs
    by = window(seen.at, 1.0, ONSET, DECIDED)
    series = metric_series(seen, 1, [3], by)
    (suspect,) = series.suspects
    assert abs(np.median(series.usual) - np.median(suspect[series.at < ONSET])) < 5
    assert np.median(suspect[series.at > ONSET]) < min(series.usual) - 20
    assert "where it usually is among them" in render([ExplainedDiagnosis(diagnosis=diagnosis(3), panel=seen)])
    young = replace(seen, at=seen.at[290:], values=seen.values[:, 290:])
    assert "usually is" not in render([ExplainedDiagnosis(diagnosis=diagnosis(3), panel=young)])


def _odd_panels() -> dict[str, Panel]:
    whole = panel(200)
    gaps = whole.values.copy()
    gaps[:, 40:60] = np.nan
    gaps[:, ::7, 3] = np.nan
    constant, nothing, huge = np.full_like(gaps, 5.0), np.full_like(gaps, np.nan), whole.values * np.float32(1e34)
    alone = replace(whole.shape, machines=whole.shape.machines[3:4])
    return {
        "gaps": replace(whole, values=gaps),
        "constant": replace(whole, values=constant),
        "nothing but gaps": replace(whole, values=nothing),
        "huge": replace(whole, values=huge),
        "tiny": replace(whole, values=whole.values * np.float32(1e-34)),
        "one tick": replace(whole, at=whole.at[:1], values=whole.values[:, :1]),
        "no tick": replace(whole, at=whole.at[:0], values=whole.values[:, :0]),
        "no peer": replace(whole, shape=alone, values=whole.values[:, :, 3:4]),
        "steps for time": replace(whole, at=np.arange(200.0)),
    }


@pytest.mark.parametrize("name", list(_odd_panels()))
def test_odd_panels_are_drawn(name: str) -> None:
    seen = _odd_panels()[name]
    odd = ScoreTrace(at=seen.at, score=np.full(len(seen.at), np.inf, dtype=np.float32), threshold=np.float32(3.0))
    for reported in (
        diagnosis(3),
        diagnosis(3, evidence=()),
        diagnosis(3, onset=float("nan"), detected_at=float("inf")),
    ):
        html = render([ExplainedDiagnosis(diagnosis=reported, panel=seen, score=odd)])
        _read(html.replace("<br>", "<br/>"))
        drawn = drawings(html)
        assert "NaN" not in drawn and "Infinity" not in drawn
        assert bool(drawn) == (name != "no tick")


def test_a_suspect_that_is_not_in_the_panel_is_reported_without_a_drawing() -> None:
    html = render([ExplainedDiagnosis(diagnosis=diagnosis(99), panel=panel(50))])
    assert "trainer/99" in html and not drawings(html)


def test_several_suspects_have_lines_of_their_own_and_a_word_each() -> None:
    html = render([ExplainedDiagnosis(diagnosis=diagnosis(*range(6)), panel=panel())])
    assert all(f'stroke="{colour}"' in drawings(html) for colour, _ in LINE_STYLES)
    assert "2 more suspects are not drawn" in html and "power against 24 peers" in html


def test_a_score_that_is_drawn_in_part_says_so() -> None:
    """Else it would seem to stay at a level that it does not have."""
    seen = panel()
    for highest, cut in ((SCORE_OVER_THRESHOLD_MAX, False), (SCORE_OVER_THRESHOLD_MAX + 1, True)):
        trace = ScoreTrace(at=seen.at, score=np.full(len(seen.at), 2 * highest, dtype=np.float32), threshold=2.0)
        page = render([ExplainedDiagnosis(diagnosis=diagnosis(3), panel=seen, score=trace)])
        assert (f"drawn up to {SCORE_OVER_THRESHOLD_MAX:g} thresholds" in page) == cut


def test_a_process_of_which_no_node_is_known_has_none() -> None:
    known = replace(diagnosis(3), suspects=(Suspect(node=NodeId("m03"), replica="trainer/0", rank=3),))
    assert "trainer/0 rank 3 (node m03)" in render([ExplainedDiagnosis(diagnosis=known)])
    for node, replica in (("rank-3", ""), ("trainer/0-rank-3", "trainer/0")):
        unknown = replace(known, suspects=(Suspect(node=NodeId(node), replica=replica, rank=3),))
        page = render([ExplainedDiagnosis(diagnosis=unknown)])
        assert f"{replica} rank 3".strip() in page and "node" not in page.partition("</h3>")[0].rpartition("<h3>")[2]


def test_without_a_named_metric_the_farthest_is_drawn() -> None:
    seen = panel()
    assert chosen_metrics(seen, [3], diagnosis(3))[0] == 1
    assert "power against 29 peers" in render([ExplainedDiagnosis(diagnosis=diagnosis(3, evidence=()), panel=seen)])


def test_stacks_are_shown_as_groups() -> None:
    def process(rank: int, *names: str) -> StackDump:
        frames = tuple(Frame("train.py", name) for name in names)
        thread = Thread(name="MainThread", frames=frames, active=False, owns_gil=False)
        return StackDump(path=f"{rank}", at=ONSET, threads=(thread,), rank=rank, node=f"m{rank}", role="trainer")

    dumps = [*(process(r, "all_reduce", "step") for r in range(3)), process(3, "<b>pause</b>", "step")]
    (found,) = diagnose(dumps)
    text = _read(render([ExplainedDiagnosis(diagnosis=to_diagnosis(found))]).replace("<br>", "<br/>")).text
    assert "Groups of equal stacks" in text and "<b>pause</b> (train.py)" in text
    assert "trainer rank 0 (node m0), trainer rank 1 (node m1), trainer rank 2 (node m2)" in text


def test_every_foreign_text_is_shown_as_text() -> None:
    seen = panel(50)
    machines = tuple(replace(m, node=HOSTILE, replica=HOSTILE) for m in seen.shape.machines)
    shape = replace(seen.shape, role=HOSTILE, job=HOSTILE, phase=HOSTILE, metrics=(HOSTILE, "b"), machines=machines)
    reported = diagnosis(
        3,
        suspects=(Suspect(node=NodeId(HOSTILE), replica=HOSTILE, role=HOSTILE),),
        evidence=(
            Evidence(kind=f"metric:{HOSTILE}", text=HOSTILE, values={HOSTILE: 1.0}),
            Evidence(kind="stack_group", text=f"{HOSTILE}: {HOSTILE} < {HOSTILE}"),
        ),
        **dict.fromkeys(("because", "advice", "settle"), HOSTILE),
        detectors=(HOSTILE,),
    )
    html = render([ExplainedDiagnosis(diagnosis=reported, panel=replace(seen, shape=shape))])
    page = _read(html.replace("<br>", "<br/>"))
    assert "<script" not in html and "<img" not in html and "\x1b" not in html and "\u202e" not in html
    assert not [n for _, attrs in page.tags for n in attrs if n.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") > 10, "it is there, as text"
    assert drawings(html)


def test_no_diagnosis_and_no_decision_are_pages_too() -> None:
    assert "0 faults found" in _read(render([])).text
    undecided = diagnosis(fault_class=FaultClass.CANNOT_TELL, suspects=(), settle="a second look")
    text = _read(render([ExplainedDiagnosis(diagnosis=undecided)])).text
    assert "No fault localized, 1 undecided" in text and "a second look" in text and "none" in text


def test_the_page_stays_small() -> None:
    seen = panel(100_000, 4)
    reported = diagnosis(3, onset=seen.at[0], detected_at=seen.at[-1])
    one = ExplainedDiagnosis(diagnosis=reported, panel=seen, score=score(seen))
    html = render([one])
    assert drawings(html) and len(html.encode()) < 100_000
    endless = diagnosis(3, evidence=tuple(Evidence(kind=f"e{n}", text="x" * 2000) for n in range(99)))
    cut = render([ExplainedDiagnosis(diagnosis=endless)] * 40)
    assert len(cut.encode()) < PAGE_BYTES_MAX + 1000 and re.search(r"\d+ more are not shown", cut)
    assert "and 59 more" in cut


def test_charts_leave_room_for_the_text_of_every_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits of a tenth: drawing a page of charts up to the real ones takes most of a minute."""
    page_bytes_max, num_items = PAGE_BYTES_MAX // 10, 20
    monkeypatch.setattr(module, "PAGE_BYTES_MAX", page_bytes_max)
    monkeypatch.setattr(module, "CHART_BYTES_MAX", CHART_BYTES_MAX // 10)
    few = panel(1200, 4)
    wide = diagnosis(3, onset=few.at[0], detected_at=few.at[-1])
    many = render([ExplainedDiagnosis(diagnosis=wide, panel=few, score=score(few))] * num_items)
    assert drawings(many) and len(many.encode()) < page_bytes_max + 1000
    assert "Not drawn: the page would be too large" in many and many.count("<article") == num_items


@settings(max_examples=60)
@given(
    st_numpy.arrays(
        np.float64,
        st.integers(1, 900),
        elements=st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))),
        fill=st.nothing(),
    )
    | st.builds(lambda n, seed: np.random.default_rng(seed).normal(size=n), st.integers(1, 5000), st.integers(0, 99))
)
def test_no_excursion_is_lost_in_a_long_series(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    at = np.arange(len(values), dtype=np.float64)
    runs = extremes(at, values, Window(0.0, float(len(values)), 0.0, 1.0))
    flat = [point for run in runs for point in run]
    assert [t for t, _ in flat] == sorted({t for t, _ in flat}) and len(flat) <= 2 * NUM_BUCKETS
    known = values[np.isfinite(values)]
    if len(known):
        assert min(v for _, v in flat) == known.min() and max(v for _, v in flat) == known.max()
        assert all(values[int(t)] == v for t, v in flat)
    else:
        assert not flat


def test_a_stretch_without_values_breaks_the_line() -> None:
    at = np.arange(4.0 * NUM_BUCKETS)
    values = np.sin(at)
    values[1::2] = np.nan  # every other sample is missing: no break
    assert len(extremes(at, values, Window(0.0, float(len(at)), 0.0, 1.0))) == 1
    values[100:120] = np.nan
    first, second = extremes(at, values, Window(0.0, float(len(at)), 0.0, 1.0))
    assert first[-1][0] == 98.0 and second[0][0] == 120.0


def test_quantiles_are_those_of_numpy_without_its_gaps() -> None:
    values = np.random.default_rng(1).normal(size=(50, 9)).astype(np.float32)
    values[np.random.default_rng(2).random(values.shape) < 0.3] = np.nan
    values[7] = np.nan
    found = quantiles(values, (0.1, 0.5, 0.9))
    assert np.isnan(found[:, 7]).all()
    known = np.delete(np.arange(50), 7)
    wanted = np.nanquantile(values[known].astype(np.float64), (0.1, 0.5, 0.9), axis=1)
    np.testing.assert_allclose(found[:, known], wanted, rtol=1e-12)
    assert np.isnan(quantiles(values[:, :0], (0.5,))).all()


def test_moments_are_of_the_calendar_or_of_the_recording() -> None:
    assert (moment(ONSET), moment(12.25)) == ("2023-11-14 22:18:20 UTC", "12.2 s")
    assert moment(float("nan")) == "unknown" and moment(1e300).endswith(" s")
