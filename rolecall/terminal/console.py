"""What every text of a command is printed with: coloured and wrapped on a terminal, plain and unwrapped elsewhere.

The other modules here turn facts into renderables and print nothing. External text is escaped and becomes `Text`, never
markup: a replica named `[red]` is shown as `[red]`, and no escape sequence reaches the terminal.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

WIDTH_WITHOUT_TERMINAL = 100_000
"""Nothing is wrapped in a file or a pipe, so that every line can be searched for."""
PLAIN = ""
GOOD, BAD, WARN, SOFT, STRONG = "green", "bold red", "yellow", "dim", "bold"


def console(file: IO[str] | None = None) -> Console:
    """Of standard output, or of `file`."""
    made = Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
    if not made.is_terminal:
        made.width = WIDTH_WITHOUT_TERMINAL
    return made


def as_text(renderable: RenderableType, width: int = WIDTH_WITHOUT_TERMINAL) -> str:
    """What a pipe gets of it."""
    file = StringIO()
    made = console(file)
    made.width = width
    made.print(renderable)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Indented:
    """A text whose continuation lines are indented, too."""

    text: Text
    first: int = 0
    rest: int = 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - max(self.first, self.rest))
        for number, line in enumerate(self.text.wrap(console, width) or [Text()]):
            line.rstrip()
            yield Text(" " * (self.rest if number else self.first)) + line


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in columns. Where the window is too narrow, the last cells of each are on a second, indented line."""

    rows: Sequence[Sequence[Text]]
    indent: int = 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(map(len, self.rows), default=0)
        lines = aligned(self.rows, self.indent)
        while columns > 1 and max(line.cell_len for line in lines) > options.max_width:
            columns -= 1
            lines = aligned([row[:columns] for row in self.rows], self.indent)
        for line, row in zip(lines, self.rows, strict=True):
            line.rstrip()
            yield line
            if rest := [cell for cell in row[columns:] if cell]:
                yield Indented(Text("  ").join(rest), self.indent + 4, self.indent + 4)


def aligned(rows: Iterable[Sequence[Text]], indent: int = 2) -> list[Text]:
    """One line for each row, its cells in columns two spaces apart."""
    rows = list(rows)
    widths = [max(row[n].cell_len for row in rows if n < len(row)) for n in range(max(map(len, rows), default=0))]
    lines = []
    for row in rows:
        line = Text(" " * indent)
        for number, cell in enumerate(row):
            line += cell
            if number < len(row) - 1:
                line.append(" " * (widths[number] - cell.cell_len + 2))
        lines.append(line)
    return lines
