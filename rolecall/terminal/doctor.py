"""The checks of `rolecall doctor`, and what it says of a job that runs, as text. Pure."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rolecall.core.text import counted, plain, spans
from rolecall.node.doctor import SEVERITY, CheckLevel, NodeCheck
from rolecall.terminal.console import BAD, GOOD, PLAIN, SOFT, STRONG, WARN, Indented
from rolecall.watch.capabilities import About, Can, Capability, JobFacts, RankCapabilities

LEVEL_STYLES = {CheckLevel.OK: GOOD, CheckLevel.UNKNOWN: SOFT, CheckLevel.WARNING: WARN, CheckLevel.BROKEN: BAD}
LEVEL_COLUMNS = 9


def checks(found: Sequence[NodeCheck]) -> RenderableType:
    """Worst last, each with its fix, and a summary."""
    parts: list[RenderableType] = []
    for check in sorted(found, key=lambda c: SEVERITY.index(c.level)):
        level = (f"{check.level:{LEVEL_COLUMNS}}", LEVEL_STYLES[check.level])
        text = Text.assemble(level, (check.name, STRONG), f": {plain(check.message)}")
        parts.append(Indented(text, 0, LEVEL_COLUMNS))
        if check.fix:
            parts.append(Indented(Text(f"-> {plain(check.fix)}"), LEVEL_COLUMNS, LEVEL_COLUMNS + 3))
    numbers = [(level, sum(c.level is level for c in found)) for level in reversed(SEVERITY)]
    nouns = {CheckLevel.WARNING: "warning"}
    shown = [
        (counted(n, nouns[level]) if level in nouns else f"{n} {level}", LEVEL_STYLES[level])
        for level, n in numbers
        if n
    ]
    separated = [piece for number, one in enumerate(shown) for piece in ((", ", PLAIN), one)[number == 0 :]]
    parts.append(Text.assemble(*separated))
    return Group(*parts)


CAN_STYLES = {Can.YES: GOOD, Can.PARTLY: WARN, Can.NO: BAD, Can.NONE: SOFT}
CAN_COLUMNS = 8
PIDS_SHOWN_MAX = 16


def job(name: str, facts: JobFacts, found: Sequence[RankCapabilities]) -> RenderableType:
    """Ranks of a replica and node that can the same together, then what is missing around them."""
    parts: list[RenderableType] = []
    groups: dict[tuple[str, str, str, tuple[Capability, ...]], list[RankCapabilities]] = {}
    for rank in found:
        it = rank.facts
        key = it.replica, str(it.process.node), it.found_by or it.source or "reporter", rank.capabilities
        groups.setdefault(key, []).append(rank)
    for (replica, node, by, capabilities), ranks in groups.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        pids = ", ".join(str(r.facts.process.pid) for r in ranks[:PIDS_SHOWN_MAX])
        more = ", ..." if len(ranks) > PIDS_SHOWN_MAX else ""
        steps = [r.facts.newest.step for r in ranks if r.facts.reports and r.facts.newest.step >= 0]
        at_step = f", step {spans(set(steps))}" if steps else ""
        of_job = next((f", job {r.facts.job}" for r in ranks if r.facts.job), "")
        head = f" {noun} {spans(r.facts.rank for r in ranks)} on {node} ({by}{of_job}{at_step}; pid {pids}{more})"
        parts.append(Text.assemble((plain(replica), STRONG), plain(head)))
        told = set[str]()
        for about in About:
            parts.append(Indented(Text(f"can be {about}", SOFT), 2, 4))
            parts += [line for c in capabilities if c.about is about for line in _capability(c, told)]
    for state in facts.nodes:
        if state.unreachable:
            parts.append(Indented(Text.assemble(("no answer", BAD), f" {plain(state.unreachable)}"), 0, 4))
    if not found:
        parts.append(Indented(Text(_nothing_seen(name, facts)), 0, 2))
    if facts.other_jobs:
        parts.append(Indented(Text(f"other jobs on these nodes: {plain(', '.join(facts.other_jobs))}", SOFT), 0, 2))
    if facts.unknown_job:
        number = counted(facts.unknown_job, "process", "processes")
        parts.append(Indented(Text(f"{number} of a job that is not known: --job all shows them", SOFT), 0, 2))
    return Group(*parts)


def _capability(capability: Capability, told: set[str]) -> list[RenderableType]:
    """`told`: what to do that was said of these ranks before; it is said once."""
    can = (f"{capability.can:{CAN_COLUMNS}}", CAN_STYLES[capability.can])
    text = Text.assemble(can, (capability.name, STRONG), f": {plain(capability.because)}")
    lines: list[RenderableType] = [Indented(text, 4, 4 + CAN_COLUMNS)]
    if capability.fix and capability.can is not Can.YES and capability.fix not in told:
        told.add(capability.fix)
        lines.append(Indented(Text(f"-> {plain(capability.fix)}"), 4 + CAN_COLUMNS, 7 + CAN_COLUMNS))
    return lines


def _nothing_seen(name: str, facts: JobFacts) -> str:
    nodes = ", ".join(n.node for n in facts.nodes if not n.unreachable)
    if not nodes:
        return "no agent answers: start one on each node with `rolecall agent`"
    of = "a job" if name == "all" else f"job {plain(name)}"
    return (
        f"no rank of {of} runs on {nodes}. -> Is it started? Ranks of other programs need a rule in agent.yaml "
        "(docs/reference/agent.md), or the reporter (docs/howto/instrument.md)"
    )
