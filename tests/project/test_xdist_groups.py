"""The tests of an xdist group run in one worker, so that what their module starts (engines, a browser) starts once.

pytest tests/project/test_xdist_groups.py
"""

import subprocess
import sys
from pathlib import Path

MODULE = """
from pathlib import Path
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_of_the_group(number, worker_id):
    (Path(__file__).parent / f"worker-{worker_id}").touch()
"""


def test_one_worker_runs_a_group(tmp_path: Path) -> None:
    """pytest-xdist 3.8.0 under pytest 9.2 spreads it over all workers, and says nothing."""
    (tmp_path / "test_made.py").write_text(MODULE)
    argv = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "test_made.py"]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout
    assert len(list(tmp_path.glob("worker-*"))) == 1
