"""Colour and width: a terminal is coloured and wrapped, a pipe gets plain text of whole lines."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.text import Text

from rolecall.core.rundir import RunDir
from rolecall.terminal.console import Indented, aligned, as_text
from tests.support import PATIENCE_SECONDS


def on_terminal(*argv: str, columns: int = 80, **environ: str) -> str:
    """What the command writes to a terminal of `columns` x 24."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    given = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "rolecall", *argv],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**given, "TERM": "xterm-256color", **environ},
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # EIO: the process has closed its end
                break
            if not part:
                break
            written += part
        process.wait(PATIENCE_SECONDS)
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


def test_a_terminal_is_coloured_unless_no_color_is_set(fake_run: RunDir) -> None:
    incidents = ("incidents", "--run", str(fake_run.path))
    coloured, plain = on_terminal(*incidents), on_terminal(*incidents, NO_COLOR="1")
    assert "\x1b[32mresolved\x1b[0m" in coloured
    assert "\x1b" not in plain and "i-1 resolved: rollout/1" in plain


def test_lines_are_wrapped_to_the_window_and_nothing_is_cut(fake_run: RunDir) -> None:
    narrow = on_terminal("incidents", "i-2", "--run", str(fake_run.path), NO_COLOR="1")
    assert max(map(len, narrow.splitlines())) <= 80
    piped = subprocess.run(
        [sys.executable, "-m", "rolecall", "incidents", "i-2", "--run", str(fake_run.path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    ).stdout
    assert "\x1b" not in piped
    assert "trainer/0 was waiting for it in reduce" in piped.splitlines()[0], "one line, however long"
    assert piped.split() == narrow.split()


def test_continuation_lines_are_indented() -> None:
    assert as_text(Indented(Text("one two three four five six"), 2, 4), 24) == "  one two three four\n    five six\n"


def test_cells_are_aligned_without_spaces_at_the_end() -> None:
    rows = [[Text("a"), Text("bb")], [Text("ccc"), Text("d")]]
    assert [line.plain for line in aligned(rows)] == ["  a    bb", "  ccc  d"]
    assert aligned([]) == []


@pytest.mark.parametrize("columns", [80, 120])
def test_a_watch_on_a_terminal_shows_a_table(tmp_path: Path, columns: int) -> None:
    from rolecall.detector.sources import recording
    from tests.detector.panels.test_source import a_panel

    recording.write(tmp_path / "r.parquet", [a_panel("trainer", 1.0, 1, num_ticks=20)])
    argv = ("watch", "recording", str(tmp_path / "r.parquet"), "--speed", "20", "--detector", "robust-z")
    shown = on_terminal(*argv, columns=columns, NO_COLOR="1")
    assert "watching" in shown and "machines  metrics  interval" in shown
    assert "20 ticks of 5 machines: role trainer" in " ".join(shown.split()) and "{" not in shown
