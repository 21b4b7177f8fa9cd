"""The dashboard in a real Chromium: every page in light, dark and on a phone; hostile text; an operator who acts.

Two dashboards are served, of a run that is over (with other runs in its folder) and of one whose plan waits for an
operator, and one browser looks at both.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, TimeoutError

from rolecall.core.diagnosis import Evidence, Finding, Plan
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.reports.incident_export import EVIDENCE_DIR
from tests.dashboards.acting_world import World, world
from tests.dashboards.browser import Visit, browser, profile, served, tab, visit
from tests.dashboards.made_runs import MadeRun
from tests.dashboards.pages.test_overview import observed_job
from tests.fake_run import FakeRun
from tests.support import eventually, some

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]  # one worker serves and looks

K = EventKind
HUNG = "i-2"
PAGES = {
    "overview": ("/", "Lost time"),
    "incidents": ("/incidents", "3 incidents"),
    "incident": (f"/incidents?incident={HUNG}", "Copy as Markdown"),
    "fleet": ("/fleet", "Node details"),
    "accounting": ("/accounting", "Time to recover"),
    "operations": ("/operations", "Command history"),
}
"""Page: its address, and what stands on it when it is whole."""
Looks = dict[str, BrowserContext]
LOOKS = {"light": ("desktop", False), "dark": ("desktop", True), "phone": ("phone", True)}
WIDER = """() => ['html', 'body', '[data-testid="stMain"]', '[data-testid="stMainBlockContainer"]']
    .map(name => document.querySelector(name)).filter(e => e.scrollWidth > e.clientWidth).map(e => e.outerHTML.slice(0, 80))"""
BRIGHTNESS = """() => getComputedStyle(document.querySelector('[data-testid="stApp"]')).backgroundColor
    .match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765"""

HARM = "window.harmed = true"
HOSTILE = (
    f'<img src=x class=harm onerror="{HARM}"><script>{HARM}</script><b class=harm>b</b> **hostile-bold** '
    f"[hostile-link](javascript:{HARM}) https://hostile.example/a $x^2$ :red[hostile-red] `hostile-code`"
)
TRACEBACK = f'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: {HOSTILE}\n# hostile-heading\n'
MADE_OF_IT = """() => {
    const all = [...document.querySelectorAll('strong, em, a, code, h1, h2, h3, h4, .katex, span[class*=red], span[style*=color]')];
    const ours = all.filter(e => /hostile-/.test(e.textContent) && !e.closest('[data-testid="stCode"]'));
    const elements = [...document.querySelectorAll('.harm, script:not([src])')].filter(e => /harm/.test(e.outerHTML));
    const links = [...document.querySelectorAll('a')].filter(e => /^javascript:|hostile.example/.test(e.href));
    return [...ours, ...elements, ...links].map(e => e.outerHTML.slice(0, 200));
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run whose plan waits for an operator, and the dashboard on which she may say yes."""

    made: World
    plan: Plan
    token: str
    address: str


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def looks(chromium: Browser) -> Iterator[Looks]:
    """All tests of a look share its cache: the scripts of a page are loaded and compiled once."""
    with ExitStack() as profiles:
        yield {
            name: profiles.enter_context(profile(chromium, size=size, dark=dark))
            for name, (size, dark) in LOOKS.items()
        }


@pytest.fixture(scope="module")
def finished(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDir, str]]:
    folder = tmp_path_factory.mktemp("finished")
    run = FakeRun(folder / "runs").build()
    one, other = MadeRun(folder / "runs", run_id="one"), MadeRun(folder / "runs", run_id="other", num_steps=3)
    other.open(name="i-9")
    for made in (one, other):
        made.journal.close()
    observed_job(folder / "runs")
    with served(folder, [str(run.path)]) as address:
        yield run, address


@pytest.fixture(scope="module")
def asked(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("asked")
    made = world(folder)
    plan = made.propose("inc-asked", because=HOSTILE)
    made.open("inc-hostile", "rollout/0", because=TRACEBACK, evidence=(HOSTILE, TRACEBACK), detectors=(HOSTILE,))
    made.open("inc-no one", HOSTILE, because=HOSTILE, fault_class=FaultClass.HANG, node=HOSTILE)
    made.say(K.EVIDENCE_COLLECTED, _collected(), "inc-hostile")
    made.say(K.NODE_QUARANTINED, {"node": HOSTILE, "by": HOSTILE, "because": HOSTILE})
    made.say(K.DIAGNOSIS_REVIEWED, {"verdict": "wrong", "by": HOSTILE, "because": HOSTILE}, "inc-hostile")
    evidence = made.run.path / EVIDENCE_DIR / "inc-hostile"
    evidence.mkdir(parents=True)
    (evidence / "stacks.txt").write_text(TRACEBACK)
    token = made.add_user("anna")
    with served(folder, [str(made.run.path), "--users", str(made.users_path)]) as address:
        yield Asked(made=made, plan=plan, token=token, address=address)


def _collected() -> dict[str, object]:
    evidence = (Evidence(kind=HOSTILE, text=TRACEBACK, values={}),)
    finding = Finding(
        detector=HOSTILE, suspects=(), fault_class=FaultClass.CRASH, onset=0.0, detected_at=0.0, confidence=1.0,
        because=HOSTILE, evidence=evidence,
    )  # fmt: skip
    files = [{"name": name, "bytes": 1, "sha256": "", "kind": "stacks"} for name in (HOSTILE, "stacks.txt")]
    return {
        "because": HOSTILE,
        "seconds": 1.0,
        "findings": [finding.to_dict()],
        "statements": [HOSTILE],
        "missing": [HOSTILE],
        "files": files,
    }


@contextmanager
def at(looks: Looks, address: str, path: str, whole: str, look: str = "light") -> Iterator[Visit]:
    """The page, once it is whole; at the end it must have been without fault."""
    with tab(looks[look], address) as shot:
        shot.open(path)
        shot.page.get_by_text(whole).first.wait_for()
        yield shot
        shot.faultless()


@pytest.mark.parametrize(
    ("name", "look"),
    # Dark on a desktop is what a phone has in dark, and what a desktop has in light: one page every time.
    some(list(product(PAGES, LOOKS)), [("overview", "dark"), *product(PAGES, ("light", "phone"))]),
)
def test_a_page_is_without_fault(looks: Looks, finished: tuple[RunDir, str], name: str, look: str) -> None:
    path, whole = PAGES[name]
    with at(looks, finished[1], path, whole, look) as shot:
        assert (shot.page.evaluate(BRIGHTNESS) < 0.3) is (look != "light")
        assert shot.page.evaluate(WIDER) == [], "it is wider than the screen"


def test_the_sentence_of_the_incident_is_on_its_page_and_in_the_address(
    looks: Looks, finished: tuple[RunDir, str]
) -> None:
    run, address = finished
    journal = Journal(run.database_url, create=False)
    (opened,) = [e for e in journal.events(kinds=[K.INCIDENT_OPENED]) if e.incident_id == HUNG]
    journal.close()
    with at(looks, address, *PAGES["incident"]) as shot:
        assert opened.payload.to_body()["diagnosis"]["because"] in shot.text()
        shot.page.get_by_role("button", name="All incidents").click()
        shot.page.get_by_text("3 incidents").wait_for()
        assert "incident=" not in shot.page.url


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        ("/", "Replicas"),
        ("/incidents", "3 incidents"),
        ("/incidents?incident=inc-hostile", "Copy as Markdown"),
        ("/incidents?incident=inc-no one", "Copy as Markdown"),
        ("/incidents?incident=%3Cimg%20src%3Dx%20class%3Dharm%3E", "has no such incident"),
        ("/fleet", "Node details"),
        ("/accounting", "Diagnosis precision"),
        ("/operations", "Command history"),
    ],
)
def test_hostile_text_makes_no_element_no_link_and_no_script(looks: Looks, asked: Asked, path: str, whole: str) -> None:
    with at(looks, asked.address, path, whole) as shot:
        if "inc-hostile" in path:
            shot.page.get_by_role("tab", name="Evidence").click()
            _choose(shot, "Evidence files", "stacks.txt")
            shot.page.get_by_text("hostile-heading").last.wait_for()
        if path != "/fleet" and "%3C" not in path and path != "/incidents":
            assert "**hostile-bold**" in shot.text(), "the text itself is to be read"
        assert shot.page.evaluate(MADE_OF_IT) == []
        assert shot.page.evaluate("() => window.harmed") is None


OPENING_MILLISECONDS = 3000


def _choose(shot: Visit, label: str, option: str) -> None:
    """By keys: a list that is open is closed by the scrolling of a click, or of a page that is still growing."""
    field = shot.page.get_by_role("combobox", name=label)
    listed = shot.page.get_by_role("option", name=option)

    def opened() -> bool:
        field.scroll_into_view_if_needed()
        field.press("ArrowDown")
        try:
            listed.wait_for(timeout=OPENING_MILLISECONDS)
        except TimeoutError:
            return False
        return True

    eventually(opened, f"the list of {label}")
    field.press("ArrowDown")
    field.press("Enter")


def _approve(shot: Visit) -> Locator:
    return shot.page.get_by_role("button", name="Approve", exact=True)


def test_an_operator_signs_in_and_approves_by_one_click(looks: Looks, asked: Asked) -> None:
    with at(looks, asked.address, "/operations", "Command history", "phone") as shot:
        assert _approve(shot).is_disabled()
        assert asked.made.events(K.PLAN_APPROVED) == []
        shot.page.get_by_test_id("stExpandSidebarButton").click()
        token = shot.page.get_by_label("Access token", exact=True)
        token.fill(asked.token)
        token.press("Enter")
        shot.page.get_by_text("Signed in as anna").wait_for(state="attached")
        shot.page.get_by_test_id("stSidebarCollapseButton").get_by_role("button").click()
        _approve(shot).dblclick()
        eventually(lambda: asked.made.events(K.PLAN_APPROVED), "the approval in the journal")
        _approve(shot).wait_for(state="detached")
        assert asked.token not in shot.page.content() and asked.token not in shot.page.url
        assert asked.token not in repr(shot.page.context.cookies())
        shot.open("/operations")  # a reload signs out, and says nothing again
        shot.page.get_by_text("Read-only: sign in").wait_for()
    (approved,) = asked.made.events(K.PLAN_APPROVED)
    assert (approved.payload.by, approved.incident_id) == ("anna", asked.plan.incident_id)
    assert approved.payload.digest == asked.plan.digest


def test_the_tab_of_the_browser_names_run_state_and_open_incidents(
    looks: Looks, finished: tuple[RunDir, str], asked: Asked
) -> None:
    with at(looks, finished[1], "/", "Lost time") as shot:
        shot.page.wait_for_function("() => document.title.includes('run completed')")
        assert finished[0].run_id in shot.page.title() and "no open incidents" in shot.page.title()
    with at(looks, asked.address, "/", "Replicas") as shot:
        shot.page.wait_for_function("() => /[1-9] open$/.test(document.title)")


def test_an_incident_has_tabs_and_is_copied_as_markdown(looks: Looks, finished: tuple[RunDir, str]) -> None:
    with at(looks, finished[1], *PAGES["incident"]) as shot:
        for label, text in (
            ("Decision", "Actions and verification"),
            ("Cost", "Replica-seconds"),
            ("What-if", "Replay"),
        ):
            shot.page.get_by_role("tab", name=label).click()
            shot.page.get_by_text(text, exact=True).first.wait_for()
        shot.page.get_by_role("tab", name="Timeline").click()
        height = shot.page.evaluate("() => document.querySelector('[data-testid=\"stMain\"]').scrollHeight")
        assert height <= 2 * 900, "at most two screens"
        shot.page.get_by_role("button", name="Copy as Markdown").click()
        shot.page.get_by_text("## trainer/1 hung in step 54").wait_for()


def test_keys_go_from_incident_to_incident(looks: Looks, finished: tuple[RunDir, str]) -> None:
    with at(looks, finished[1], *PAGES["incidents"]) as shot:
        previous = shot.page.get_by_role("button", name="Previous row")
        pressed_until(shot, "j", previous.is_enabled, "another row is marked")
        pressed_until(shot, "k", previous.is_disabled, "the first row is marked")
        shot.page.keyboard.press("o")
        shot.page.wait_for_url("**/incidents?incident=i-3")
        shot.page.get_by_text("rollout/0 slow").first.wait_for()
        shot.page.keyboard.press("j")
        shot.page.wait_for_url("**/incidents?incident=i-2")


AGAIN_SECONDS = 1.0


def pressed_until(shot: Visit, key: str, done: Callable[[], bool], what: str) -> None:
    """A key that is pressed while the page is drawn anew may be lost, and is pressed again."""

    def pressed() -> bool:
        if done():
            return True
        shot.page.keyboard.press(key)
        try:
            eventually(done, what, seconds=AGAIN_SECONDS)
        except AssertionError:
            return False
        return True

    eventually(pressed, what)


def test_filters_are_behind_one_button_on_a_phone(looks: Looks, finished: tuple[RunDir, str]) -> None:
    with at(looks, finished[1], *PAGES["incidents"], "phone") as shot:
        filters = shot.page.locator(".st-key-incidents-filters")
        assert filters.count() == 1 and not filters.is_visible()
        shot.page.locator(".st-key-incidents-show label").click()
        filters.wait_for(state="visible")


def test_on_a_phone_a_link_of_the_menu_closes_it(looks: Looks, finished: tuple[RunDir, str]) -> None:
    with at(looks, finished[1], *PAGES["fleet"], "phone") as shot:
        open_menu = shot.page.get_by_test_id("stExpandSidebarButton")
        open_menu.click()
        shot.page.get_by_role("link", name="Operations").click()
        shot.page.get_by_text("Actions of rolecall").wait_for()
        open_menu.wait_for()


@pytest.mark.parametrize("look", ["light", "dark"])
def test_captions_are_read_easily(looks: Looks, finished: tuple[RunDir, str], look: str) -> None:
    with at(looks, finished[1], *PAGES["fleet"], look) as shot:
        for part in ("", " code"):
            found = shot.page.locator(f'[data-testid="stCaptionContainer"]{part}').last
            ink, opacity = found.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).opacity]")
            assert ink == ("rgb(85, 97, 111)" if look == "light" else "rgb(163, 175, 187)") and opacity == "1"


def test_a_job_that_is_only_watched_is_there_without_dashes(looks: Looks, finished: tuple[RunDir, str]) -> None:
    with at(looks, finished[1], f"/?run={WATCHED_JOB}", "Last events") as shot:
        card = shot.page.locator("article.rc-card")
        assert "trainer/0 rank 1 hung in step 53" in card.inner_text() and "rolecall would replace" in card.inner_text()
        assert "nobody was paged, because no notification channel is configured" in card.inner_text()
        shot.page.wait_for_function("() => document.title.endsWith('1 open')")
        figures = shot.page.locator(".rc-figures")
        # One call: between two, the page may be drawn anew.
        top = "const top = which => document.querySelector(which).getBoundingClientRect().top"
        shot.page.wait_for_function(f"() => {{ {top}; return top('article.rc-card') < top('.rc-figures') }}")
        words = figures.inner_text().split("\n")
        assert {"ranks", "nodes", "step of the job", "last progress", "last sample"} == set(words) & FIGURES
        assert shot.page.locator(".rc-ranks i").count() == 4
        [row] = [r for r in shot.page.locator("tr").all() if "4001" in r.inner_text()]
        assert row.inner_text().split("\t")[:7] == ["▲ suspect", "trainer/0", "1", "vm", "4001", "compute", "53"]
        assert "–" not in shot.page.get_by_test_id("stMain").inner_text()
        shot.page.get_by_role("link", name="Open the incident").click()
        shot.page.get_by_text("Copy as Markdown").wait_for()
        assert "No, open for" in shot.text() and "nothing, mode observe" in shot.text()
        shot.page.get_by_role("button", name="All incidents").click()
        shot.page.get_by_text("1 incident", exact=True).wait_for()


WATCHED_JOB = "torchrun-job"
FIGURES = {"ranks", "nodes", "last progress", "last sample", "step of the job", "step", "reward", "ETTR", "rollouts"}
"""Tiles of a watched job, and some that it has no data for."""


def test_runs_of_the_same_folder_can_be_switched(looks: Looks, finished: tuple[RunDir, str]) -> None:
    run, address = finished
    with at(looks, address, "/", "Lost time") as shot:
        assert run.path.name in shot.page.get_by_role("combobox", name="Run").input_value()
    with at(looks, address, "/?run=other", "of 120") as shot:
        shot.page.wait_for_function("() => document.title.includes('other')")
        assert "other" in shot.page.get_by_role("combobox", name="Run").input_value()
        shot.page.get_by_test_id("stSidebar").get_by_role("link", name="Fleet").click()
        shot.page.wait_for_url("**/fleet?run=other")
        shot.open("/fleet?run=other")  # what a reload or a copied address shows
        shot.page.wait_for_function("() => document.title.includes('other')")
    with at(looks, address, "/?run=nosuch", "No run nosuch in") as shot:
        assert "Replicas" not in shot.text()
        shot.page.get_by_role("link", name="other").click()
        shot.page.get_by_text("of 120").first.wait_for()
    with at(looks, address, "/incidents?run=one&incident=i-9", "Run one has no such incident: i-9") as shot:
        shot.page.get_by_role("button", name="Search 3 other runs").click()
        shot.page.get_by_role("link", name="other").click()
        shot.page.get_by_text("Copy as Markdown").wait_for()


def test_a_lost_server_says_what_to_do(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lost")
    made = MadeRun(folder)
    with visit(chromium, "http://127.0.0.1:1") as shot:
        with served(folder, [str(made.run.path)]) as address:
            shot.origin = address
            shot.open("/")
            shot.page.get_by_text("Replicas").first.wait_for()
        text = shot.page.locator("[role=dialog] > h2 + div > div")
        text.first.wait_for(state="attached")
        said = text.first.evaluate("e => getComputedStyle(e, '::after').content")
        assert "rolecall dashboard" in said and "rolecall status" in said and "`" not in said
        shot.page.wait_for_function("() => document.title.startsWith('? disconnected')")
