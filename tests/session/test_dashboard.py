"""The dashboard beside a run: where it is, who may act on it, and a run that continues without it."""

import stat
import urllib.request
from pathlib import Path

from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.dashboards.users import Authenticator, SignedInUser
from rolecall.session.children import TOKEN_FILE, USER, DashboardBeside
from tests.fake_run import FakeRun
from tests.support import PATIENCE_SECONDS, eventually


def _report_of(beside: DashboardBeside) -> str:
    heard: list[str] = []

    def news() -> bool:
        heard.append(beside.news())
        return bool(heard[-1])

    eventually(news, "a word of the dashboard")
    return heard[-1]


def test_its_address_is_reported_and_the_token_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).build()
    beside = DashboardBeside(run)
    beside.start()
    try:
        line = _report_of(beside)
        address = line.split()[1]
        with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as page:
            assert page.status == 200
        assert beside.news() == "", "it is reported once"
        token = (run.path / TOKEN_FILE).read_text().strip()
        assert stat.S_IMODE((run.path / TOKEN_FILE).stat().st_mode) == 0o600
        entered = Authenticator(run.path / "users.yaml").sign_in(token, 0.0)
        assert isinstance(entered, SignedInUser) and entered.name == USER
        assert token not in line + (run.logs / "dashboard.log").read_text()
    finally:
        beside.stop()
    eventually(lambda: _refused(address), "the port is closed")


def _refused(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=PATIENCE_SECONDS).close()
    except OSError:
        return True
    return False


def test_a_dashboard_that_cannot_be_is_a_line_and_nothing_more(tmp_path: Path) -> None:
    run: RunDir = create_run_dir(tmp_path, "nothing")  # no run.json: there is nothing to show
    beside = DashboardBeside(run)
    beside.start()
    line = _report_of(beside)
    assert line.startswith("no dashboard: ") and "run.json is missing" in line
    beside.stop()


def test_a_directory_that_takes_no_token_starts_none(tmp_path: Path) -> None:
    beside = DashboardBeside(RunDir(tmp_path / "gone"))
    beside.start()
    assert beside.news() == ""
    beside.stop()
