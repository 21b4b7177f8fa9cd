"""The learning benchmark: what is compared differs in what it says, records are kept, numbers are those of records made
up."""

import json
import math
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.learning import record as learning_record
from benchmarks.learning import report as learning_report
from benchmarks.learning import runs as learning_runs
from benchmarks.learning.runs import CURVES, PARTS, RACE, Run
from benchmarks.learning.workers import over
from benchmarks.pictures import bands
from rolecall.core.config.algorithm import FILTERS, AlgorithmName
from rolecall.core.config.job import parse_job

TINY = {
    "task": {"num_digits": 2},
    "model": {"hidden_size": 32, "intermediate_size": 64},
    "algorithm": {"group_size": 2, "groups_per_microbatch": 1},
}


def run(name: str = "grpo", seed: int = 0, part: str = CURVES, **more: Any) -> Run:
    return Run(part=part, name=name, seed=seed, **{"job": TINY, "steps_max": 3, "seconds_max": 60.0, **more})


def record(of: Run, rewards: list[float | None], ended: str = "steps", **columns: list[float]) -> dict[str, Any]:
    """Each step generates 100 tokens in 4 engine steps for 50 samples, and takes 1 s and 2 s."""
    n = len(rewards)
    given: dict[str, list[Any]] = {
        **{name: [0.0] * n for name in ("exact", "over", "length", "truncated", "entropy", "groups", "context")},
        **{name: [0.0] * n for name in ("filtered", "clipped_low", "clipped_high")},
        "tokens": [100] * n,
        "samples": [50] * n,
        "forwards": [4] * n,
        "write_seconds": [1.0] * n,
        "train_seconds": [2.0] * n,
        "cpu_seconds": [2.5] * n,
        "reward": rewards,
        **columns,
    }
    return {
        "commit": "c",
        "run": json.loads(of.key),
        "algorithm": {"name": of.name},
        "ended": ended,
        "load": [1.0, 2.0],
        "final": [0.9, 0.8],
        "exams": [[i + 1, 3.0 * (i + 1), r or 0.0, 0.0] for i, r in enumerate(rewards)],
        "columns": given,
    }


def test_each_part_of_dapo_is_one_change_and_all_together_are_dapo() -> None:
    rows = list(learning_runs.dapo_parts().values())
    full = [parse_job({"algorithm": row}).algorithm.model_dump(mode="json") for row in rows]
    assert full[0]["aggregation"] == "sample" and full[0]["clip_low"] == full[0]["clip_high"]
    changed = [{k for k in b if a.get(k) != b[k]} for a, b in pairwise(full)]
    assert changed == [{"clip_high"}, {"aggregation"}, {"overlong_buffer_tokens"}, {"dynamic_sampling", *FILTERS}]
    assert {**full[-1], "name": "dapo"} == learning_runs.settings_of(AlgorithmName.DAPO)


def test_the_racers_differ_in_the_window_alone() -> None:
    runs = learning_runs.race(seconds=1.0, exam_every=5, seeds=[0])
    ppo, tppo = (parse_job(r.job).algorithm.model_dump() for r in runs)
    assert {k for k in tppo if ppo.get(k) != tppo[k]} == {"name", "window_tokens", "truncation_value", "prefixes"}
    assert ppo.keys() <= tppo.keys() and ppo["group_size"] == 1
    longest = parse_job(runs[0].job).task.max_response_tokens
    assert tppo["window_tokens"] < longest, "windows that cut nothing would be no race"


def test_each_algorithm_of_the_smaller_part_is_by_its_defaults_and_tppo_cuts() -> None:
    jobs = {r.name: parse_job(r.job) for r in learning_runs.smaller(steps=1, seconds=1.0, seeds=[0])}
    assert list(jobs) == ["grpo", "dapo", "ppo", "tppo"]
    for name, job in jobs.items():
        settings = {k: v for k, v in job.algorithm.model_dump(mode="json").items() if k != "window_tokens"}
        assert settings == {k: v for k, v in learning_runs.settings_of(AlgorithmName(name)).items() if k in settings}
        assert job.algorithm.window_tokens is None or job.algorithm.window_tokens < job.task.max_response_tokens


def test_a_run_leaves_a_record_that_json_gives_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    made = learning_runs.carried_out(run(exam_every=2), "c")
    path.write_text(json.dumps(made) + "\n" + json.dumps({**made, "commit": "other"}) + "\n")
    (again,) = learning_runs.read(path, ["c"])
    assert again == json.loads(json.dumps(made)) and [r["commit"] for r in learning_runs.read(path)] == ["other"]
    assert {len(column) for column in made["columns"].values()} == {3}
    assert made["ended"] == "steps" and [exam[0] for exam in made["exams"]] == [2]
    assert learning_runs.missing([run(exam_every=2), run(seed=1)], [again]) == [run(seed=1)]
    assert learning_runs.missing([run(exam_every=2, steps_max=4)], [again]), "another length is another run"


def test_a_run_ends_with_its_time() -> None:
    made = learning_runs.carried_out(run(steps_max=1000, seconds_max=1e-9), "c")
    assert made["ended"] == "time" and len(made["columns"]["reward"]) == 1


def test_two_runs_go_at_a_time_and_when_time_is_up_those_that_have_begun_are_kept() -> None:
    begun: list[int] = []
    going: list[Future[dict[str, Any]]] = []

    def begin(of: Run) -> Future[dict[str, Any]]:
        """Whoever begins ends the one before."""
        begun.append(of.seed)
        if going:
            going[-1].set_result({})
        going.append(Future())
        return going[-1]

    def may_begin() -> bool:
        if len(begun) == 3 and not going[-1].done():
            going[-1].set_result({})  # it goes on after time was up
        return len(begun) < 3

    reported = over([run(seed=s) for s in range(5)], begin, may_begin)
    assert next(reported)[0].seed == 0 and begun == [0, 1]
    assert [r.seed for r, _ in reported] == [1, 2] and begun == [0, 1, 2]


def test_a_goal_is_reached_by_a_mean_of_steps_and_never_before_there_are_so_many() -> None:
    lucky = record(run(), [1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert learning_record.reached(lucky, 0.9) == 9
    assert learning_record.spent_until(lucky, 0.9, "tokens") == 1000
    assert learning_record.spent_until(lucky, 0.9, "seconds") == 30
    assert learning_record.spent_until(lucky, 0.99, "step") == 11
    assert learning_record.reached(record(run(), [None, 0.2, None]), 0.1) is None
    assert learning_record.smoothed(record(run(), [None, 0.2, None, 0.4])) == pytest.approx([0.0, 0.2, 0.2, 0.3])


def test_a_run_that_solved_everything_keeps_its_reward_and_one_that_was_cut_short_has_none() -> None:
    solved = record(run(), [0.9] * 5, ended=f"{learning_runs.NOT_FILLED}all right")
    short = record(run(), [0.9] * 5)
    assert learning_record.reward_at(solved, "step", 50) == pytest.approx(0.9)
    assert learning_record.reward_at(short, "step", 50) is None
    assert learning_record.reward_at(short, "tokens", 450) == pytest.approx(0.9)


def test_what_was_not_reached_is_later_than_everything() -> None:
    assert learning_report.until([10.0, None, 30.0]) == "30 (10 to not reached; 2 of 3)"
    assert learning_report.until([None, None, 3.0]) == "not reached (3 to not reached; 1 of 3)"
    ratio, sooner = learning_report.paired({"ppo": {0: 30.0, 1: 20.0, 2: None}, "tppo": {0: 10.0, 1: None, 2: None}})
    assert ratio.startswith("3.00 (") and sooner == "1 of 2"


def test_the_report_says_all_parts_and_what_is_missing() -> None:
    rising = [i / 20 for i in range(21)]
    records = [record(run(n, s), [r * (1 + s) / 2 for r in rising]) for n in ("tppo", "grpo") for s in (0, 1)]
    records += [record(run(n, 0, RACE, exam_every=1), rising) for n in ("ppo", "tppo")]
    text = "\n".join(learning_report.report(records))
    assert "commit c (curves), c (race)" in text and "Part parts was not carried out." in text
    assert text.index("| grpo | 2 |") < text.index("| tppo | 2 |")
    assert "Fewer than 5 seeds: grpo 2, tppo 2." in text
    assert "| slots occupied | 0.50 (0.50 to 0.50; 0.50 to 0.50) |" in text  # 100 tokens, 4 x 50 places
    assert "| 0.5 | 33 (33 to 33; 1 of 1) | 33 (33 to 33; 1 of 1) | 1.00 (" in text and "| 0 of 1 |" in text
    assert "nan" not in text


def test_a_cell_says_of_how_many_runs_it_is_where_some_have_no_such_value() -> None:
    assert learning_report.spread_of([1.0, None, 1.0]) == "1.00 (1.00 to 1.00; 1.00 to 1.00), 2 of 3"
    assert learning_report.spread_of([1.0]) == "1.00 (1.00 to 1.00; 1.00 to 1.00)"
    assert learning_report.spread_of([None]) == "-, 0 of 1"


@pytest.mark.parametrize(("window", "said"), [(6, "nothing is cut"), (4, "4 tokens, the longest answer 6.")])
def test_the_report_says_whether_tppo_cut_anything(window: int, said: str) -> None:
    made = record(run("tppo"), [0.5] * 20)  # TINY: two digits, the end token, and three too many
    text = "\n".join(learning_report.report([{**made, "algorithm": {"name": "tppo", "window_tokens": window}}]))
    assert said in text
    assert ("nothing is cut" in text) == (window == 6)


def test_a_curve_of_examinations_begins_with_the_first_one() -> None:
    rewards: list[float | None] = [0.4, 0.6, 0.8]
    early, late = (record(run("ppo", s, RACE), rewards[s:]) for s in (0, 1))
    late["exams"] = [[n, x + 3.0, *rest] for n, x, *rest in late["exams"]]
    drawn = learning_report.exam_band("ppo", [early, late])
    assert (drawn.xs[0], drawn.xs[-1]) == (6.0, 9.0) and min(drawn.wide[0]) == 0.6
    alone = learning_report.exam_band("ppo", [record(run("ppo", 0, RACE), [0.4])])
    assert list(alone.xs) == [3.0] and list(alone.middle) == [0.4]


def test_costs_are_reported_by_a_fit_that_explains_them_and_by_no_other() -> None:
    n = 300
    forwards, tokens = [float(i % 7 + 1) for i in range(n)], [float(i % 11 + 5) for i in range(n)]
    context = [float(i % 13) for i in range(n)]
    exact = [0.002 * f + 5e-5 * t + 1e-5 * c + 0.05 for f, t, c in zip(forwards, tokens, context, strict=True)]
    causes: dict[str, Any] = {"forwards": forwards, "tokens": tokens, "context": context}
    reported = learning_report.cost_of_a_step([record(run(), [0.5] * n, write_seconds=exact, **causes)])
    assert "an engine step costs 2.0 ms" in reported and "a generated token 50 us more" in reported
    odd = [0.3 if i % 17 == 0 else 0.1 for i in range(n)]
    for seconds in (odd, [s - 0.004 * f for s, f in zip(exact, forwards, strict=True)]):
        reported = learning_report.cost_of_a_step([record(run(), [0.5] * n, write_seconds=seconds, **causes)])
        assert "cannot be told apart" in reported and "ms" not in reported


def test_each_parts_change_is_counted_seed_by_seed() -> None:
    before = [record(run("GRPO", s, PARTS), [0.5] * 10) for s in range(3)]
    after = [record(run("+ clip-higher", s, PARTS), [0.4 + 0.1 * s] * 10) for s in range(3)]
    text = "\n".join(learning_report.steps_between(learning_report.by_name([*before, *after], PARTS)))
    assert "| + clip-higher | 0.000 (-0.050 to 0.050; -0.100 to 0.100) | 1 of 3 |" in text


def test_the_picture_is_sound_and_has_every_curve() -> None:
    records = [record(run(n, s), [0.1 * s + i / 20 for i in range(10)]) for n in ("grpo", "<dapo>") for s in (0, 1)]
    text = bands(learning_report.panels(records))
    root = ElementTree.fromstring(text)
    lines = root.findall(".//{*}polyline")
    assert len(lines) == 4, "two algorithms, by step and by tokens"
    numbers = [float(x) for line in lines for pair in line.attrib["points"].split() for x in pair.split(",")]
    assert numbers and all(math.isfinite(x) for x in numbers)
    assert "&lt;dapo&gt;" in text
