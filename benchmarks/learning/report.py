"""What the records of runs say together: tables, and panels for the picture."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np

from benchmarks import common
from benchmarks.common import table
from benchmarks.learning.record import (
    LAST_STEPS,
    SMOOTH_STEPS,
    Record,
    ended_with,
    examined_at,
    generation_rate,
    known,
    reward_at,
    slots,
    spent_until,
    total,
)
from benchmarks.learning.runs import (
    CURVES,
    EXAM_PROMPTS,
    NOT_FILLED,
    PARTS,
    PARTS_DIGITS,
    RACE,
    RACE_DIGITS,
    SEEDS,
    SMALLER,
    STALENESS,
)
from benchmarks.pictures import Band
from rolecall.core.config.job import parse_job

GOALS = (0.5, 0.7, 0.9)
STEPS_SHOWN = (20, 40, 60, 80, 100)
RACE_GOALS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
GRID = 120
"""Points of a curve in the picture."""
EXPLAINED_MIN = 0.5
"""A fit that explains less tells no costs; nor does one in which something costs less than nothing."""


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (quartiles; extremes)`."""
    if not values:
        return "-"
    middle, low, high = common.middle_and_spread(values)
    d = digits
    return f"{middle:,.{d}f} ({low:,.{d}f} to {high:,.{d}f}; {min(values):,.{d}f} to {max(values):,.{d}f})"


def spread_of(values: Sequence[float | None], digits: int = 2) -> str:
    """The same of those that there are, and how many where some are missing."""
    there = known(values)
    some = f", {len(there)} of {len(values)}" if len(there) < len(values) else ""
    return spread(there, digits) + some


def until(values: Sequence[float | None], digits: int = 0) -> str:
    """`median (extremes; how many)` of what was spent until a goal; None: it was not reached. Of an even number the
    later one of the middle, for there is no mean with what was not reached."""
    if not values:
        return "-"
    ordered = sorted(math.inf if v is None else v for v in values)

    def said(value: float) -> str:
        return "not reached" if math.isinf(value) else f"{value:,.{digits}f}"

    ends = f"{said(ordered[0])} to {said(ordered[-1])}"
    return f"{said(ordered[len(ordered) // 2])} ({ends}; {len(known(values))} of {len(values)})"


def by_name(records: Iterable[Record], part: str) -> dict[str, list[Record]]:
    """Name -> its records by seed, in the order in which names were carried out first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["run"]["part"] == part:
            found.setdefault(record["run"]["name"], []).append(record)
    order = ORDER[part]
    return {
        name: sorted(found[name], key=lambda r: r["run"]["seed"])
        for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order))
    }


ORDER = {
    CURVES: ("grpo", "dapo", "ppo", "tppo"),
    SMALLER: ("grpo", "dapo", "ppo", "tppo"),
    PARTS: ("GRPO", "+ clip-higher", "+ token-level loss", "+ overlong punishment", "+ dynamic sampling"),
    RACE: ("ppo", "tppo"),
}


def curves(named: dict[str, list[Record]]) -> list[str]:
    (job,) = {_task_and_model(r) for rs in named.values() for r in rs}
    lines = [f"## Four algorithms on `digit_parity` ({job}), from random weights", "", *_cuts(named.get("tppo", []))]
    shown = [s for s in STEPS_SHOWN if any(len(r["columns"]["reward"]) >= s for rs in named.values() for r in rs)]
    lines += ["Reward by step:", ""]
    lines += table(
        ("algorithm", "n", *(f"step {s}" for s in shown)),
        [
            (name, str(len(rs)), *(spread_of([reward_at(r, "step", s) for r in rs]) for s in shown))
            for name, rs in named.items()
        ],
    )
    lines += ["Until a reward (median, extremes, how many reached it):", ""]
    spent = (("steps", "step"), ("thousand tokens generated", "tokens"), ("CPU seconds", "cpu_seconds"))
    rows = []
    for goal in GOALS:
        for name, rs in named.items():
            untils = [[spent_until(r, goal, column) for r in rs] for _, column in spent]
            untils[1] = [None if v is None else v / 1e3 for v in untils[1]]
            rows.append((f"{goal}", name, *map(until, untils)))
    lines += table(("reward", "algorithm", *(what for what, _ in spent)), rows)
    lines += ["A step (median of each run):", ""]
    lines += table(
        ("algorithm", "CPU seconds", "tokens generated", "clipped below", "clipped above"),
        [
            (
                name,
                spread([statistics.median(r["columns"]["cpu_seconds"]) for r in rs]),
                spread([statistics.median(r["columns"]["tokens"]) for r in rs], 0),
                *(
                    spread([statistics.median(known(r["columns"][c]) or [0.0]) for r in rs], 3)
                    for c in ("clipped_low", "clipped_high")
                ),
            )
            for name, rs in named.items()
        ],
    )
    return lines + at_the_end(named)


def _task_and_model(record: Record) -> str:
    """What its job says of them."""
    job = record["run"]["job"]
    return "; ".join(_plain(job[section]) for section in ("task", "model") if section in job) or "default job"


def _cuts(tppo: Sequence[Record]) -> list[str]:
    """Whether T-PPO cuts any answer there."""
    window = tppo[0]["algorithm"].get("window_tokens") if tppo else None
    if window is None:
        return []
    longest = parse_job(tppo[0]["run"]["job"]).task.max_response_tokens
    told = f"T-PPO's windows have {window} tokens, the longest answer {longest}"
    if window >= longest:
        told += ": nothing is cut, and what sets it apart from PPO here is its lambda and a prompt for each answer"
    return [f"{told}.", ""]


def at_the_end(named: dict[str, list[Record]]) -> list[str]:
    lines = [
        f"At the end, examined on {EXAM_PROMPTS} prompts of numbers that no step had, one answer each, sampled:",
        "",
    ]
    lines += table(
        ("", "reward", "exact", "tokens generated", "how the runs ended"),
        [
            (
                name,
                spread([r["final"][0] for r in rs]),
                spread([r["final"][1] for r in rs]),
                spread([total(r, "tokens")[-1] for r in rs], 0),
                endings(rs),
            )
            for name, rs in named.items()
        ],
    )
    return lines


def endings(records: Iterable[Record]) -> str:
    return ", ".join(f"{how} {n}" for how, n in sorted(Counter(ending(r["ended"]) for r in records).items()))


def ending(how: str) -> str:
    if not how.startswith(NOT_FILLED):
        return how
    return "prompts too easy for a full batch" if "too easy" in how else "prompts too hard for a full batch"


def parts(named: dict[str, list[Record]]) -> list[str]:
    lines = [f"## DAPO's four parts, one by one, on `long_addition` of {PARTS_DIGITS} places", ""]
    lines += ["Each line has everything of the line before. The last is DAPO. Same number of steps; means of the last "]
    lines[-1] += f"{LAST_STEPS} steps of each run, median (quartiles; extremes) over seeds:"
    lines.append("")
    columns = (("reward", 2), ("exact", 2), ("length", 1), ("truncated", 3), ("entropy", 2))
    lines += table(
        ("", "n", *(name for name, _ in columns)),
        [
            (name, str(len(rs)), *(spread([ended_with(r, c) for r in rs], d) for c, d in columns))
            for name, rs in named.items()
        ],
    )
    budget = min((total(r, "tokens")[-1] for rs in named.values() for r in rs if r["ended"] == "steps"), default=0.0)
    lines += [
        (
            "What it took, over the whole run; `at equal tokens`: reward when as many tokens were generated as by "
            f"that one of the runs with all their steps which generated the fewest ({budget:,.0f}):"
        ),
        "",
    ]
    lines += table(
        ("", "groups a step", "tokens a step", "clipped above", "clipped below", "steps to 0.8", "at equal tokens"),
        [
            (
                name,
                *(spread([statistics.fmean(r["columns"][c]) for r in rs], 0) for c in ("groups", "tokens")),
                *(
                    spread([statistics.fmean(known(r["columns"][c]) or [0.0]) for r in rs], 3)
                    for c in ("clipped_high", "clipped_low")
                ),
                until([spent_until(r, 0.8, "step") for r in rs]),
                spread_of([reward_at(r, "tokens", budget) for r in rs]),
            )
            for name, rs in named.items()
        ],
    )
    return [*lines, *steps_between(named), *at_the_end(named)]


def steps_between(named: dict[str, list[Record]]) -> list[str]:
    """What each part changed, seed by seed."""
    rows, names = [], list(named)
    for before, after in pairwise(names):
        ones, others = ({r["run"]["seed"]: r for r in named[name]} for name in (before, after))
        both = sorted(ones.keys() & others.keys())
        changes = [ended_with(others[s], "reward") - ended_with(ones[s], "reward") for s in both]
        exams = [others[s]["final"][0] - ones[s]["final"][0] for s in both]
        better = f"{sum(c > 0 for c in changes)} of {len(changes)}"
        rows.append((after, spread(changes, 3), better, spread(exams, 3)))
    return [
        (
            "Change of the reward by each part, seed by seed. n is small: where the quartiles hold 0, nothing is "
            "shown, and all five in one direction come by chance once in 16, of each part:"
        ),
        "",
        *table(("", "reward of the last steps", "better in", "reward of the examination"), rows),
    ]


def race(named: dict[str, list[Record]]) -> list[str]:
    lines = ["## PPO and T-PPO with a real engine, by the clock", ""]
    seconds = max(r["run"]["seconds_max"] for rs in named.values() for r in rs)
    lines += [
        (
            f"`long_addition` of {RACE_DIGITS} places, {seconds:.0f} s of generating and training each, engine in "
            f"the same process, one thread. The two "
            "have the same settings but for the window: groups are of one sample with PPO too, and a step has as "
            "many of its whole answers as of T-PPO's windows. The settings are T-PPO's defaults, not PPO's (lambda 1 "
            "among "
            "them). The two of a seed ran at the same time, on a core each."
        ),
        "",
    ]

    def a_step(column: str) -> Callable[[Record], float]:
        return lambda r: statistics.fmean(r["columns"][column])

    whats: tuple[tuple[str, Callable[[Record], float], int], ...] = (
        ("steps", lambda r: float(len(r["columns"]["reward"])), 0),
        ("answers or windows a step (slots)", a_step("samples"), 0),
        ("tokens generated a step", a_step("tokens"), 0),
        ("prompt and earlier tokens read a step", a_step("context"), 0),
        ("engine steps a step", a_step("forwards"), 1),
        ("slots occupied", lambda r: sum(r["columns"]["tokens"]) / sum(slots(r)), 2),
        (
            "generation's share of the time",
            lambda r: sum(r["columns"]["write_seconds"]) / total(r, "seconds")[-1],
            2,
        ),
        ("generated tokens a second of generation", generation_rate, 0),
        ("generated tokens a second", lambda r: total(r, "tokens")[-1] / total(r, "seconds")[-1], 0),
        ("answers that ended a step", a_step("over"), 0),
        (
            "seconds between examinations",
            lambda r: r["run"]["exam_every"] * total(r, "seconds")[-1] / len(r["columns"]["reward"]),
            1,
        ),
    )
    lines += table(
        ("", *named), [(what, *(spread([f(r) for r in rs], d) for rs in named.values())) for what, f, d in whats]
    )
    lines += [cost_of_a_step([r for rs in named.values() for r in rs]), ""]
    lines += [
        (
            f"Seconds until the first examination that shows a reward: {EXAM_PROMPTS} whole answers to prompts of "
            f"other numbers, every {named[next(iter(named))][0]['run']['exam_every']} steps, its time not counted "
            f"(median, "
            "extremes, how many reached it). Both are asked every so many steps and not seconds: the seconds between "
            "examinations are how late a time may be, and whoever is asked more often is lucky more often (the "
            "standard error of one "
            "examination is at most 0.03):"
        ),
        "",
    ]
    rows = []
    for goal in RACE_GOALS:
        by_seed = {n: {r["run"]["seed"]: examined_at(r, goal) for r in rs} for n, rs in named.items()}
        rows.append((f"{goal}", *(until(list(found.values())) for found in by_seed.values()), *paired(by_seed)))
    lines += table(("reward", *named, "ppo / tppo, seed by seed", "T-PPO sooner"), rows)
    return [*lines, *at_the_end(named), *RACE_READING]


def cost_of_a_step(records: Sequence[Record]) -> str:
    """Least squares over all steps of both: what an engine step costs however few rows it has, and what a token
    costs."""
    columns = [r["columns"] for r in records]
    took = np.array([s for c in columns for s in c["write_seconds"]])
    steps = np.array([f for c in columns for f in c["forwards"]], dtype=float)
    tokens = np.array([t for c in columns for t in c["tokens"]], dtype=float)
    context = np.array([t for c in columns for t in c["context"]], dtype=float)
    if len(took) < 2 * GRID:
        return "Too few steps to tell what an engine step costs."
    causes = np.stack([steps, tokens, context, np.ones_like(steps)], axis=1)
    (step, token, read, rest), *_ = np.linalg.lstsq(causes, took, rcond=None)
    explained = 1 - float(np.var(took - causes @ np.array([step, token, read, rest])) / np.var(took))
    if explained < EXPLAINED_MIN or min(step, token, read, rest) < 0:
        return (
            f"What an engine step costs however few rows it has, and what a token more, cannot be told apart here: a "
            f"fit over all {len(took):,} steps explains {explained:.2f} of the variance."
        )
    return (
        f"Fitted over all {len(took):,} steps (explains {explained:.2f} of the variance): an engine step costs "
        f"{1e3 * step:.1f} ms however few rows it has, a generated token {1e6 * token:.0f} us more, a token of a "
        f"prompt or an earlier window {1e6 * read:.0f} us, and a step's generation {1e3 * rest:.0f} ms besides (new "
        f"weights)."
    )


def paired(by_seed: dict[str, dict[int, float | None]]) -> tuple[str, str]:
    """(ratio of the seeds in which both reached it, in how many pairs the second was sooner)."""
    if len(by_seed) != 2:
        return "-", "-"
    ones, others = by_seed.values()
    both = [(ones[s], others[s]) for s in sorted(ones.keys() & others.keys())]
    times = [(math.inf if a is None else a, math.inf if b is None else b) for a, b in both]
    ratios = [a / b if math.isfinite(a) and math.isfinite(b) else None for a, b in times]
    reached_by_any = [(a, b) for a, b in times if math.isfinite(min(a, b))]
    return spread_of(ratios), f"{sum(b < a for a, b in reached_by_any)} of {len(reached_by_any)}"


READING = (
    "## How to read this",
    "",
    (
        "- The model has under a million parameters and starts from random weights, the tasks are made up, the answers "
        "short."
    ),
    (
        "  What helps a pretrained model of billions may do nothing here, and the other way round. Nothing here confirms "  # noqa: E501
        "or"
    ),
    "  refutes a paper's number.",
    (
        "- Settings are the defaults but where a part says otherwise: found by a few trials on seeds from 100 on, not "
        "the best"
    ),
    (
        "  that there are. Which algorithm comes first is true of these settings and not of the methods. DAPO keeps its "  # noqa: E501
        "paper's"
    ),
    "  narrow clip range, GRPO, PPO and T-PPO have a wider one: what is clipped stands in the tables.",
    "- Five seeds show large differences only, fewer show none to rely on.",
    (
        "- Examinations ask prompts of numbers that no step had. Of `long_addition`'s short prompts there are so few "
        "that most"
    ),
    "  were trained on all the same: there an examination shows what was learned, and hardly how it generalises.",
    "",
)
RACE_READING = (
    (
        "- In the race the occupancy of the slots is what T-PPO gains, and what an engine step costs however few rows it "  # noqa: E501
        "has"
    ),
    "  is what an empty slot wastes: on a CPU a step with fewer rows is cheaper, so an empty slot costs less than on a",
    (
        "  GPU, where it costs nearly as much as a full one. T-PPO pays for it by reading prompt and earlier tokens "
        "again in"
    ),
    (
        "  each window, because new weights void the cache. Answers of a few dozen tokens have no tail as those of "
        "20,000 have."
    ),
    "",
)


def report(records: Sequence[Record]) -> list[str]:
    seeds = sorted({r["run"]["seed"] for r in records})
    lines = common.header(
        "Learning curves",
        f"defaults of each algorithm but where a part says otherwise; samples {STALENESS} versions old; settings at "
        f"the end",
        ", ".join(map(str, seeds)),
        ", ".join(sorted({f"{r['commit']} ({r['run']['part']})" for r in records})),
    )
    loads = [x for r in records for x in r["load"]]
    made = ((CURVES, curves), (SMALLER, curves), (PARTS, parts), (RACE, race))
    lines[-1:-1] = [
        (
            f"- {len(records)} runs, two at a time on a thread each; load average at their beginnings and ends: "
            f"{statistics.median(loads):.1f} (largest {max(loads):.1f})"
        ),
        (
            "- numbers are medians over seeds (quartiles; extremes), of fewer runs where the cell says so; rewards "
            f"are means over {SMOOTH_STEPS} steps, of all answers that ended in them"
        ),
    ]
    for part, tell in made:
        named = by_name(records, part)
        if not named:
            lines += [f"Part {part} was not carried out.", ""]
            continue
        lines += tell(named)
        short = [f"{name} {len(rs)}" for name, rs in named.items() if len(rs) < len(SEEDS)]
        if short:
            lines += [f"Fewer than {len(SEEDS)} seeds: {', '.join(short)}.", ""]
    return [*lines, *READING, *settings(records)]


def settings(records: Sequence[Record]) -> list[str]:
    """All of every line, as the run had it."""
    lines = ["## Settings", ""]
    for part in ORDER:
        for name, rs in by_name(records, part).items():
            job = parse_job(rs[0]["run"]["job"])
            sections = {"task": job.task, "model": job.model}
            told = {s: section.model_dump(mode="json") for s, section in sections.items()}
            told["algorithm"] = rs[0]["algorithm"]
            lines.append(f"- {part}, {name}: " + "; ".join(f"{s}: {_plain(values)}" for s, values in told.items()))
    return [*lines, ""]


def _plain(values: dict[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)


def band(label: str, records: Sequence[Record], column: str) -> Band:
    """Of the smoothed reward, as far as the shortest run goes that did not end because all was learnt."""
    unended = [r for r in records if not r["ended"].startswith(NOT_FILLED)]
    right = min(total(r, column)[-1] for r in unended or records)
    first = max(total(r, column)[0] for r in records)
    xs = [first + (right - first) * i / (GRID - 1) for i in range(GRID)] if right > first else [first]
    return _band(label, xs, [known(reward_at(r, column, x) for r in records) for x in xs])


def exam_band(label: str, records: Sequence[Record]) -> Band:
    """From where each run was examined once: before, nothing is known."""
    first, right = max(r["exams"][0][1] for r in records), min(r["exams"][-1][1] for r in records)
    xs = [first + (right - first) * i / (GRID - 1) for i in range(GRID)] if right > first else [first]
    return _band(label, xs, [[next(e[2] for e in reversed(r["exams"]) if e[1] <= x) for r in records] for x in xs])


def _band(label: str, xs: Sequence[float], rows: Sequence[Sequence[float]]) -> Band:
    middles, lows, highs = zip(*(common.middle_and_spread(row) for row in rows), strict=True)
    wide = [min(row) for row in rows], [max(row) for row in rows]
    return Band(label=label, xs=xs, middle=middles, narrow=(lows, highs), wide=wide)


def panels(records: Sequence[Record]) -> dict[str, tuple[str, list[Band]]]:
    dapo, runners = (by_name(records, part) for part in (PARTS, RACE))
    found: dict[str, tuple[str, list[Band]]] = {}
    for part, task in ((CURVES, "digit_parity"), (SMALLER, "digit_parity, smaller")):
        if four := by_name(records, part):
            found[f"{task}: reward by step"] = "optimizer steps", [band(n, rs, "step") for n, rs in four.items()]
            found[f"{task}: by tokens"] = "generated tokens", [band(n, rs, "tokens") for n, rs in four.items()]
    if dapo:
        found["long_addition: DAPO's parts"] = "generated tokens", [band(n, rs, "tokens") for n, rs in dapo.items()]
    if runners and all(r["exams"] for rs in runners.values() for r in rs):
        found["long_addition: examined, by the clock"] = "seconds", [exam_band(n, rs) for n, rs in runners.items()]
    return found


def picture_name() -> str:
    return f"learning_{common.hardware()}_{datetime.now(UTC):%Y%m}.svg"
