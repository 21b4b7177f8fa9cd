"""Records docs/howto/first-minutes.md: `python -m tests.docs.record_first_minutes` (root; two minutes).

Runs README's three commands, each on a pseudo-terminal, stops a rank, and writes what the terminals say into the page's
blocks below `<!-- recorded: NAME -->`, and the dashboard's pages into docs/images. All in namespaces of its own, on a
machine named `node-1` whose only processes are these.
"""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.dashboards.browser import browser, visit
from tests.dashboards.screenshots import take
from tests.docs.pages import ROOT
from tests.docs.test_first_minutes import START_SECONDS, like_a_clone, three_commands
from tests.support import eventually

PAGE = ROOT / "docs" / "howto" / "first-minutes.md"
IMAGES = ROOT / "docs" / "images"
MACHINE = (
    'hostname node-1 && printf "127.0.0.1 localhost node-1\\n" > "$0/hosts" && mount --bind "$0/hosts" /etc/hosts '
    '&& ip link set lo up && exec "$@"'
)
NAMESPACES = ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", MACHINE]
COLUMNS, LINES = 110, 40
INCIDENT = "inc-1-trainer-0"
STEPS_BEFORE = 100
"""Committed before a rank is stopped: its deadlines are learned."""
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")


def screen(raw: str) -> str:
    """The text that stands on the terminal. rich moves up and erases whole lines; nothing else is interpreted."""
    lines, row = [""], 0
    for part in CONTROL.split(raw):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b[") and part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b["):
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).strip("\n")


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._raw = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], cwd=folder, env=environ, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._raw += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the last writer is gone
                return

    @property
    def text(self) -> str:
        return screen(self._raw)

    def ended(self) -> str:
        """What a command that ends has said."""
        self.process.wait(START_SECONDS)
        self._reader.join(START_SECONDS)
        return self.text


@contextmanager
def running(command: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(command, folder, environ)
    try:
        yield terminal
    finally:
        terminal.process.send_signal(signal.SIGINT)
        terminal.process.wait(START_SECONDS)


def record(folder: Path) -> dict[str, str]:
    """Name of a block -> its text. The pictures are written."""
    environ = {**like_a_clone(folder), "TERM": "xterm-256color"}
    agent, job, watch = three_commands()
    found: dict[str, str] = {}

    def said(command: str) -> str:
        return Terminal(f"rolecall {command} --run my-job", folder, environ).ended()

    def status() -> dict[str, object]:
        return dict(json.loads(said("status --json")))

    with (
        running(agent, folder, environ) as agent_terminal,
        running(job, folder, environ),
    ):
        eventually(lambda: "serves at" in agent_terminal.text, "the agent serves", seconds=START_SECONDS)
        found["agent"] = agent_terminal.text
        with running(watch, folder, environ) as watch_terminal:

            def trains() -> bool:
                steps = [int(n) for n in re.findall(r"step (\d+)", watch_terminal.text)]
                return len(steps) == 2 and min(steps) >= STEPS_BEFORE

            eventually(trains, "both ranks train", seconds=START_SECONDS)
            found["watch"], found["status"] = watch_terminal.text, said("status")
            (pid,) = [r["pid"] for r in json.loads(said("status --json"))["ranks"] if r["rank"] == 1]
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda: status()["open_incidents"], "the incident", seconds=START_SECONDS)
            collected = "evidence collected"
            eventually(lambda: collected in said(f"incidents {INCIDENT}"), "evidence", seconds=START_SECONDS)
            found["watch-stopped"] = watch_terminal.text
            found["incidents"], found["status-stopped"] = said("incidents"), said("status")
            found["incident"] = said(f"incidents {INCIDENT}")
            with running("rolecall dashboard my-job", folder, environ) as dashboard:
                eventually(lambda: "http" in dashboard.text, "the dashboard", seconds=START_SECONDS)
                found["dashboard"] = dashboard.text
                address = re.search(r"http://\S+", dashboard.text)
                assert address is not None
                with browser() as chromium, visit(chromium, address.group()) as shot:
                    shot.open("/")
                    take(shot, IMAGES / "first-minutes-overview.png", whole=True)
                    shot.open(f"/incidents?incident={INCIDENT}")
                    take(shot, IMAGES / "first-minutes-incident.png", whole=True)
            os.kill(pid, signal.SIGCONT)
            eventually(lambda: not status()["open_incidents"], "it is over", seconds=START_SECONDS)
            found["incidents-after"] = said("incidents")
    return found


def written(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these texts in its blocks. A block that the page does not have is not shown."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- recorded: {match[1]} -->\n\n```text\n{blocks[match[1]]}\n```"

    return re.sub(r"<!-- recorded: (\S+) -->\n\n```text\n.*?```", block, page, flags=re.DOTALL)


def main() -> None:
    if sys.argv[1:] == []:
        with tempfile.TemporaryDirectory() as folder:
            again = [sys.executable, "-m", "tests.docs.record_first_minutes", folder]
            sys.exit(subprocess.run([*NAMESPACES, folder, *again], cwd=ROOT, check=False).returncode)
    PAGE.write_text(written(PAGE.read_text(), record(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
