"""Pictures of the dashboard on a real demo run: `python -m tests.dashboards.screenshots docs/images` (about 5 minutes).

A demo is started with its dashboard beside it; once a trainer hangs, the Overview page is taken as on-call sees it. When
the run is over, the other pages are taken from what it left. With `--run DIR` only the latter, of an existing run.

`--synthetic` takes a minute and needs no run: the pages Incidents, Fleet and Accounting and the pages on a phone from
the synthetic run of tests/fake_run.py, and policy health from a recorded training whose learning rate was raised
tenfold at step 60 (tests/detector/courses.json).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from playwright.sync_api import Browser, FloatRect

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, open_run_dir
from rolecall.recovery.operators.commands import quarantine
from tests.dashboards.acting_world import world
from tests.dashboards.browser import ADDRESS, Visit, browser, served, visit
from tests.dashboards.made_runs import MadeRun
from tests.fake_run import FakeRun

T = TypeVar("T")
COURSES = Path(__file__).parents[1] / "detector" / "courses.json"
SEED = 7
RUN_ID = "pictures"
DEMO_SECONDS = 900.0
LOOK_SECONDS = 0.2
PAINT_MILLISECONDS = 2500
"""For what is drawn after the page stands: charts fade in."""
SETTLING_LOOKS = 8
HEIGHT_MAX = 1500
HEIGHT = "() => document.querySelector('[data-testid=\"stMain\"]')?.scrollHeight ?? 900"
TRIMMED = "[data-testid='stHeader'], [data-testid='stStatusWidget'] {visibility: hidden}"


def take(shot: Visit, path: Path, *, whole: bool = False) -> None:
    """Writes one picture; `whole`: of what can be scrolled to, as far as `HEIGHT_MAX`."""
    shot.page.add_style_tag(content=TRIMMED)
    seen = (0, -1)  # height of the page, and the one before: what is read in the background comes later
    for _ in range(SETTLING_LOOKS if whole else 1):
        shot.page.wait_for_timeout(PAINT_MILLISECONDS)
        seen = (int(shot.page.evaluate(HEIGHT)), seen[0])
        if seen[0] == seen[1]:
            break
        if whole:
            width = (shot.page.viewport_size or {"width": 1440})["width"]
            shot.page.set_viewport_size({"width": width, "height": max(900, seen[0])})
    size = shot.page.viewport_size or {"width": 1440, "height": 900}
    clip = FloatRect(x=0, y=0, width=size["width"], height=min(HEIGHT_MAX, size["height"]))
    shot.page.screenshot(path=str(path), clip=clip)
    print(path, flush=True)


def of_a_demo(of: Browser, runs: Path, out: Path) -> RunDir:
    """Runs the demo, and takes Now while a trainer hangs."""
    argv = [sys.executable, "-m", "rolecall", "demo", "--plain", "--seed", str(SEED), "--id", RUN_ID]
    log = runs / "demo.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*argv, "--runs", str(runs)], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        address = _until(process, lambda: ADDRESS.search(log.read_text(errors="replace"))).group()
        with visit(of, address) as shot:
            shot.open("/")
            _until(process, lambda: _hang(runs / RUN_ID))
            take(shot, out / "overview.png")
        process.wait(DEMO_SECONDS)
    finally:
        process.terminate()
        process.wait(60)
    return open_run_dir(runs, RUN_ID)


def _until(process: subprocess.Popen[bytes], look: Callable[[], T | None]) -> T:
    clock = SystemClock()
    end = clock.monotonic() + DEMO_SECONDS
    while clock.monotonic() < end:
        found = look()
        if found is not None:
            return found
        if process.poll() is not None:
            raise SystemExit(f"the demo ended early, with {process.returncode}")
        clock.sleep(LOOK_SECONDS)
    raise SystemExit(f"nothing to take a picture of within {DEMO_SECONDS:.0f} s")


def _hang(path: Path) -> Event | None:
    """The incident of a trainer, once there is one."""
    try:
        journal = Journal(RunDir(path).database_url, create=False)
    except JournalError:
        return None
    try:
        opened = journal.events(kinds=[EventKind.INCIDENT_OPENED])
    finally:
        journal.close()
    return next(
        (
            e
            for e in opened
            if any(str(s["replica"]).startswith("trainer") for s in e.payload.to_body()["diagnosis"]["suspects"])
        ),
        None,
    )


def of_a_run(of: Browser, run: RunDir, out: Path) -> None:
    """What a finished run shows."""
    reported = _hang(run.path)
    incident = reported.incident_id if reported is not None else "inc-1"
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), [str(run.path)]) as address:
        pages = {"incidents": "/incidents", "incident": f"/incidents?incident={incident}"}
        pages |= {"fleet": "/fleet", "accounting": "/accounting", "operations": "/operations"}
        for name, path in pages.items():
            with visit(of, address) as shot:
                shot.open(path)
                take(shot, out / f"{name}.png", whole=True)
        for name in ("incident", "accounting"):
            with visit(of, address, dark=True) as shot:
                shot.open(pages[name])
                take(shot, out / f"{name}-dark.png", whole=True)
        for name in ("overview", "incident"):
            with visit(of, address, size="phone") as shot:
                shot.open(pages.get(name, "/"))
                take(shot, out / f"{name}-phone.png")


def of_synthetic_runs(of: Browser, folder: Path, out: Path) -> None:
    """What needs no real run: incidents, fleet, accounting, the pages on a phone, policy health."""
    run = FakeRun(root=folder / "fake").build()
    with served(folder, [str(run.path)]) as address:
        with visit(of, address) as shot:
            shot.open("/accounting")
            shot.page.get_by_text("Audit passed").first.wait_for()
            take(shot, out / "accounting.png", whole=True)
        with visit(of, address) as shot:
            shot.open("/incidents")
            take(shot, out / "incidents.png", whole=True)
        for name, path in (("overview", "/"), ("incident", "/incidents?incident=i-2")):
            with visit(of, address, size="phone") as shot:
                shot.open(path)
                take(shot, out / f"{name}-phone.png")
    made, now = world(folder / "live"), SystemClock().wall()
    made.open("i-1", "trainer/1", "trainer/1 (node-5) is hung: no progress in compute of step 53 for 3.3 s", at=now)
    made.open("i-2", "rollout/2", "XID 79 on GPU 3 of node-3: fallen off the bus", fault_class=FaultClass.GPU, at=now)
    quarantine(made.run, "node-2", "carla", "its fan is loud")
    with served(folder, [str(made.run.path)]) as address, visit(of, address) as shot:
        shot.open("/fleet")
        take(shot, out / "fleet.png", whole=True)
    collapsed = MadeRun(folder / "collapsed", num_steps=0, watched=False)
    columns = json.loads(COURSES.read_text())["lr x10"]["columns"]
    for step, row in enumerate(zip(*columns.values(), strict=True)):
        health = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        known = {"reward": health.pop("reward", None), "log_ratio_max": health.pop("log_ratio_max", None)}
        health.pop("step", None)
        collapsed.say(
            K.STEP_COMMITTED, {"step": step, "epoch": 1, "seconds": 2.0, "tokens": 768, "health": health, **known}
        )
    collapsed.journal.close()
    with served(folder, [str(collapsed.run.path)]) as address, visit(of, address) as shot:
        shot.open("/")
        shot.page.set_viewport_size({"width": 1440, "height": 3000})
        shot.page.wait_for_timeout(PAINT_MILLISECONDS)
        shot.page.add_style_tag(content=TRIMMED)
        top = shot.page.get_by_role("heading", name="Policy health").bounding_box()
        panels = shot.page.locator("[data-testid='stVegaLiteChart']").all()
        captions = shot.page.locator("[data-testid='stCaptionContainer']").all()
        boxes = [box for part in (*panels, *captions) if (box := part.bounding_box()) is not None]
        assert top is not None
        below = [b for b in boxes if b["y"] > top["y"]]
        left, right = top["x"] - 20, max(b["x"] + b["width"] for b in below) + 20
        bottom = max(b["y"] + b["height"] for b in below) + 20
        clip = FloatRect(x=left, y=top["y"] - 10, width=right - left, height=bottom - top["y"] + 10)
        shot.page.screenshot(path=str(out / "health.png"), clip=clip)


def main() -> None:
    parser = argparse.ArgumentParser(description=re.sub(r"\s+", " ", str(__doc__)))
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--synthetic", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with browser() as of, tempfile.TemporaryDirectory() as runs:
        if asked.synthetic:
            of_synthetic_runs(of, Path(runs), asked.out)
            return
        run = RunDir(asked.run.resolve()) if asked.run else of_a_demo(of, Path(runs), asked.out)
        of_a_run(of, run, asked.out)


if __name__ == "__main__":
    main()
