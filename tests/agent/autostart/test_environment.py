"""What `rolecall exec` sets."""

from pathlib import Path

from rolecall.agent.autostart.environment import HOOK, job_environment

HERE = Path("/opt/hook")


def test_the_hook_comes_first_and_the_job_keeps_its_own_paths() -> None:
    assert job_environment({"PYTHONPATH": "/job:/lib"}, HERE)["PYTHONPATH"] == "/opt/hook:/job:/lib"
    assert job_environment({}, HERE)["PYTHONPATH"] == "/opt/hook"


def test_the_working_directory_stays_where_the_path_has_it() -> None:
    assert job_environment({"PYTHONPATH": ":/job:"}, HERE)["PYTHONPATH"] == "/opt/hook::/job:"
    assert job_environment({"PYTHONPATH": "/opt/hook:"}, HERE)["PYTHONPATH"] == "/opt/hook:"
    assert job_environment({"PYTHONPATH": ""}, HERE)["PYTHONPATH"] == "/opt/hook", "as no path at all"


def test_a_second_time_changes_nothing() -> None:
    once = {"PYTHONPATH": "/job", **job_environment({"PYTHONPATH": "/job"}, HERE)}
    assert {**once, **job_environment(once, HERE)} == once


def test_a_recorder_that_the_job_configures_is_kept() -> None:
    assert job_environment({}, HERE)["TORCH_FR_BUFFER_SIZE"] == "2000"
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        assert "TORCH_FR_BUFFER_SIZE" not in job_environment({name: "0"}, HERE)


def test_a_job_can_import_nothing_else_from_the_hooks_folder() -> None:
    assert {p.name for p in HOOK.glob("*")} - {"__pycache__"} == {"__init__.py", "sitecustomize.py"}
