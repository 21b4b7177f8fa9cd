"""A job's processes under `rolecall exec`."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.agent.autostart.environment import HOOK, job_environment

ROOT = Path(__file__).parents[3]
HOOK_TEXT = (HOOK / "sitecustomize.py").read_text()

JOB = """
import sys
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
reporter = sys.modules["rolecall.agent.reporter.reporter"]
page = reporter._page
print(page.q[reporter.at.W_STEP], page.q[reporter.at.W_PROGRESS], page.phase, reporter.__file__)
"""


COMPILED_LATER = """
import sys
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def steps(model):
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
steps(model)
print(len(model._forward_hooks))
steps(torch.compile(model, fullgraph=True, backend="eager"))
reporter = sys.modules["rolecall.agent.reporter.reporter"]
page = reporter._page
print(page.q[reporter.at.W_STEP], page.phase)
optimizer.step = torch.compile(optimizer.step, backend="eager")
steps(model)
print(sum("rolecall" in str(why) for why in torch._dynamo.utils.counters["graph_break"]))
"""


def run(tmp_path: Path, script: str, python: str = sys.executable, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **more}
    environ |= job_environment(environ)
    argv = [python, "-c", script]
    return subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def run_plain(tmp_path: Path, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a Python that has neither torch nor rolecall."""
    return run(tmp_path, script, python=getattr(sys, "_base_executable", sys.executable), **more)


def write(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


TORCH = {
    "torch/__init__.py": "",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": "hooks = []\nregister_optimizer_step_post_hook = hooks.append\n",
}
"""A stand-in, as far as the hook needs it."""
TORCH_JOB = """
import sys
import torch.optim.optimizer as o
print(*[h.__func__.__module__ for h in o.hooks])
"""
ATTACHED = "rolecall.agent.autostart.training"
BOOT = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
print("boot")
here = os.path.dirname(os.path.abspath(__file__))
spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here])
if spec is not None:
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
"""
"""Another tool's `sitecustomize`, which runs the one that it hides."""


@pytest.mark.slow
def test_a_hooked_model_that_is_compiled_whole_later_compiles_and_its_steps_are_seen(tmp_path: Path) -> None:
    """The hook is attached while torch is imported, before `torch.compiler` is."""
    done = run(tmp_path, COMPILED_LATER, RANK="0", WORLD_SIZE="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "8", "wait", "0"]


def test_the_steps_of_a_job_that_knows_nothing_of_rolecall(tmp_path: Path) -> None:
    done = run(tmp_path, JOB, RANK="0", WORLD_SIZE="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    step, progress, phase, _ = done.stdout.split()
    assert (step, progress, phase) == ("5", "5", "wait")
    assert len(done.stderr.splitlines()) == 1, "without an agent one warning, and the job goes on"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ranks_that_the_job_starts_itself_report_and_their_parent_does_not(tmp_path: Path, method: str) -> None:
    train = "\n".join(f"    {line}" for line in JOB.splitlines())
    job = f"""
import multiprocessing, sys
import torch
def train():
{train}
def main():
    rank = multiprocessing.get_context({method!r}).Process(target=train)
    rank.start()
    rank.join()
    print(rank.exitcode, sys.modules["rolecall.agent.reporter.reporter"].is_started())
"""
    path = write(tmp_path / "job", {"job.py": job})
    done = run(tmp_path, "import job; job.main()", RANK="0", WORLD_SIZE="1", PYTHONPATH=f"{ROOT}{os.pathsep}{path}")
    reported, ended = done.stdout.splitlines()
    assert reported.split()[:3] == ["5", "5", "wait"] and ended == "0 False", done.stderr


def test_a_process_without_torch_loads_nothing_of_rolecall(tmp_path: Path) -> None:
    done = run_plain(tmp_path, "import sys; print([m for m in sys.modules if m.startswith('rolecall')])")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("search", ["", "import importlib.util; importlib.util.find_spec('torch.optim.optimizer')"])
def test_the_import_of_torchs_optimizers_attaches_once(tmp_path: Path, search: str) -> None:
    path = write(tmp_path / "job", TORCH)
    done = run_plain(tmp_path, search + TORCH_JOB + "print(len(sys.meta_path))", PYTHONPATH=path)
    plain = run_plain(tmp_path, "import sys; print(len(sys.meta_path))", PYTHONPATH=path, ROLECALL_AUTOSTART="1")
    attached, num_finders = done.stdout.split()
    assert attached == ATTACHED and done.stderr == ""
    assert int(num_finders) == int(plain.stdout) - 1, "the finder has gone"


@pytest.mark.parametrize("loader", ["None", "object()"])
def test_a_finder_that_cannot_help_raises_nothing(tmp_path: Path, loader: str) -> None:
    script = f"""
import importlib.machinery, importlib.util, sys
importlib.util.find_spec = lambda name: importlib.machinery.ModuleSpec(name, {loader})
print(sys.meta_path[0].find_spec("torch.optim.optimizer"))
"""
    assert run_plain(tmp_path, script).stdout == "None\n"


def test_a_missing_torch_stays_an_import_error(tmp_path: Path) -> None:
    script = """
import sys
print(sys.meta_path[0].find_spec("torch.optim.optimizer"))
try:
    import torch.optim.optimizer
except ModuleNotFoundError as e:
    print(e.name)
"""
    assert run_plain(tmp_path, script).stdout.split() == ["None", "torch"]


def test_the_job_s_own_sitecustomize_runs(tmp_path: Path) -> None:
    own = write(tmp_path / "own", {"sitecustomize.py": "print('own')\n"})
    done = run_plain(tmp_path, "import sitecustomize; print(sitecustomize.__file__)", PYTHONPATH=own)
    assert done.stdout.split() == ["own", str(tmp_path / "own" / "sitecustomize.py")]


def test_a_hidden_package_runs_as_one(tmp_path: Path) -> None:
    own = write(
        tmp_path / "own",
        {"sitecustomize/__init__.py": "from . import more\n", "sitecustomize/more.py": "print('own')\n"},
    )
    done = run_plain(tmp_path, "import sitecustomize.more", PYTHONPATH=own)
    assert (done.stdout.split(), done.stderr) == (["own"], "")


def test_two_installations_run_the_hidden_one_once(tmp_path: Path) -> None:
    second = write(tmp_path / "second/agent/autostart/hook", {"sitecustomize.py": HOOK_TEXT})
    own = write(tmp_path / "own", {"sitecustomize.py": "print('own')\n", **TORCH})
    done = run_plain(tmp_path, TORCH_JOB, PYTHONPATH=os.pathsep.join([second, own]))
    assert (done.stdout.split(), done.stderr) == (["own", ATTACHED], "")


@pytest.mark.parametrize("first", ["rolecall", "boot"])
def test_another_tool_that_chains_runs_once(tmp_path: Path, first: str) -> None:
    boot = write(tmp_path / "boot", {"sitecustomize.py": BOOT})
    own = write(tmp_path / "own", {"sitecustomize.py": "print('own')\n", **TORCH})
    if first == "rolecall":
        done = run_plain(tmp_path, TORCH_JOB, PYTHONPATH=os.pathsep.join([boot, own]))
    else:
        script = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {TORCH_JOB!r}])"
        path = os.pathsep.join([boot, str(HOOK), own])
        done = run_plain(tmp_path, f"import os; os.environ['PYTHONPATH'] = {path!r}; {script}")
    assert (done.stdout.split(), done.stderr) == (["boot", "own", ATTACHED], "")


@pytest.mark.parametrize("name", ["rolecall.py", "rolecall/__init__.py"])
def test_another_package_of_this_name_stays_the_job_s(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "job", {**TORCH, name: "print('own')\n"})
    done = run_plain(tmp_path, TORCH_JOB + "import rolecall; print(rolecall.__file__)", PYTHONPATH=path)
    assert (done.stdout.split(), done.stderr) == (["own", f"{path}/{name}"], "")


def test_a_clone_beside_the_job_hides_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "job", {**TORCH, "rolecall/README.md": ""})
    assert run_plain(tmp_path, TORCH_JOB, PYTHONPATH=path).stdout.split() == [ATTACHED]


def test_the_job_s_own_rolecall_is_used(tmp_path: Path) -> None:
    files = {f"rolecall/{f}__init__.py": "" for f in ("", "agent/", "agent/autostart/")}
    files["rolecall/agent/autostart/training.py"] = "def attach(optimizers): print('own')\n"
    path = write(tmp_path / "job", {**TORCH, **files})
    assert run_plain(tmp_path, TORCH_JOB, PYTHONPATH=path).stdout.split() == ["own"]


def test_after_a_failure_nothing_of_rolecall_is_left(tmp_path: Path) -> None:
    files = {f"{f}__init__.py": "" for f in ("", "agent/", "agent/autostart/")}
    files["agent/autostart/training.py"] = "raise OSError('no space')\n"
    broken = write(tmp_path / "broken", {**files, "agent/autostart/hook/sitecustomize.py": HOOK_TEXT})
    path = write(tmp_path / "job", TORCH)
    script = f"import os, sys; os.environ['PYTHONPATH'] = {broken + '/agent/autostart/hook' + os.pathsep + path!r}; "
    job = TORCH_JOB + "print([m for m in sys.modules if m.startswith('rolecall')])"
    done = run_plain(tmp_path, script + f"os.execv(sys.executable, [sys.executable, '-c', {job!r}])")
    assert done.stdout.split() == ["[]"]
    assert done.stderr == "rolecall does not watch this process: OSError: no space\n"


def test_an_old_python_can_read_the_hook() -> None:
    assert HOOK_TEXT.isascii()
    for node in ast.walk(ast.parse(HOOK_TEXT, feature_version=(3, 4))):
        assert not isinstance(node, ast.AnnAssign | ast.JoinedStr | ast.Nonlocal | ast.NamedExpr | ast.Starred)
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None and not any(a.annotation for a in node.args.args)
            assert not node.args.kwonlyargs and not node.args.posonlyargs
        assert not isinstance(node, ast.Raise) or node.cause is None


@pytest.mark.parametrize("command", [["exec", "--", "sh", "-c", "echo $ROLECALL_AUTOSTART-$1; exit 7", "x", "--help"]])
def test_exec_runs_the_command_unchanged(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rolecall", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("1---help", 7), done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("/no/such/program", "/no/such/program: No such file"), ("", "COMMAND: the name of the program is empty")],
    ids=["missing", "empty"],
)
def test_a_command_that_cannot_run_is_named(command: str, said: str) -> None:
    argv = [sys.executable, "-m", "rolecall", "exec", "--", command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"rolecall: {said}")


def test_a_shell_takes_over_the_environment(tmp_path: Path) -> None:
    argv = ["sh", "-c", f'eval "$({sys.executable} -m rolecall env)"; echo "$ROLECALL_AUTOSTART $PYTHONPATH"']
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    enabled, path = done.stdout.split()
    assert enabled == "1" and path.split(os.pathsep)[0].endswith("agent/autostart/hook")
