"""The checks of `rolecall doctor` as text. Pure."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rolecall.core.text import counted, plain
from rolecall.node.doctor import SEVERITY, CheckLevel, NodeCheck
from rolecall.terminal.console import BAD, GOOD, PLAIN, SOFT, STRONG, WARN, Indented

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
