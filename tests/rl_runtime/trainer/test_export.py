"""`rolecall export`: a checkpoint as a folder that transformers loads, whole or not at all."""

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolecall.core.config.job import parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger, LedgerLine
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.checkpoint import save
from rolecall.rl_runtime.trainer.export import DTYPES, FILES, export_model
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.trainer.state import first_state
from tests.e2e.runs import command
from tests.full_disk import small_disk
from tests.rl_runtime.chat_model import write_chat_model

TOKENS = torch.tensor([[1, 3, 6, 10, 11]])
PROMPTS = [[1, 3, 6, 10 + n, 2, 1, 5] for n in range(6)]
NUM_NEW = 8
GREEDY_IN_VLLM = """
import json, sys
from rolecall.rl_runtime.rollout.engine import import_vllm
vllm = import_vllm()
folder, prompts, num_new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = vllm.LLM(
    model=folder, dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=8 << 20, seed=0
)
sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
made = model.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
print(json.dumps([list(m.outputs[0].token_ids) for m in made]))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made_run(tmp_path)


def made_run(tmp_path: Path, **changes: Any) -> RunDir:
    """Its masters at step n are those of the model, plus n / 100."""
    model = write_chat_model(tmp_path / "given")
    given = {"path": str(model), **changes.pop("model", {})}
    job = parse_job({"model": given, "data": {"path": "x.jsonl"}, "reward": "exact", **changes})
    made = create_run_dir(tmp_path / "runs", "mine", None)
    made.write({"run_id": "mine", "config": job.model_dump(mode="json")})
    write_model_folder(made.path / "model", job.model, job.seed, None)
    for step in (3, 7):
        state = first_state(job, vocabulary(job.model, None), replica=ReplicaId("trainer/0"))
        with torch.no_grad():
            for master in state.policy.masters:
                master.add_(step / 100)
        state.policy.masters_changed()
        save(made.checkpoints, step, *state.export())
    return made


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def test_the_folder_has_the_newest_weights_and_the_tokenizer(run: RunDir, tmp_path: Path) -> None:
    done = export_model(run, tmp_path / "out")
    assert (done.step, done.dtype, done.passed_over) == (7, "float32", ())
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "given"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.07)
        assert torch.allclose(logits(tmp_path / "out"), model(TOKENS).logits, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert "user say 3" in tokenizer.apply_chat_template([{"role": "user", "content": "say 3"}], tokenize=False)


def test_half_precision_and_a_damaged_newest_checkpoint(run: RunDir, tmp_path: Path) -> None:
    newest = max(run.checkpoints.iterdir()) / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    done = export_model(run, tmp_path / "out", "bfloat16")
    assert done.step == 3 and done.num_parameters > 0 and "state.safetensors" in done.passed_over[0]
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert model.dtype is torch.bfloat16


def test_the_dtype_is_that_of_the_run(tmp_path: Path) -> None:
    run = made_run(tmp_path, model={"dtype": "bfloat16"})
    assert export_model(run, tmp_path / "out").dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    given = AutoModelForCausalLM.from_pretrained(str(tmp_path / "given"), dtype=torch.float32)
    assert model.dtype is torch.bfloat16
    for one, other in zip(model.parameters(), given.parameters(), strict=True):
        assert torch.equal(one, (other + 0.07).bfloat16()), "of the float32 masters"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_into_a_whole_model(tmp_path: Path, dtype: str) -> None:
    run = made_run(tmp_path, model={"dtype": dtype}, lora={"rank": 2, "alpha": 4, "target_modules": ["q_proj"]})
    assert export_model(run, tmp_path / "out").dtype == dtype
    found = load_file(tmp_path / "out" / "model.safetensors")
    given = load_file(tmp_path / "given" / "model.safetensors")
    state = load_file(max(run.checkpoints.iterdir()) / "state.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (state[f"weight/{name}.lora_{x}.default.weight"].double() for x in "AB")
    assert len(state) == 6, "a checkpoint has the adapters and their moments alone"
    given[f"{name}.weight"] = given[f"{name}.weight"].to(DTYPES[dtype]).double() + 2 * b @ a
    assert found.keys() == given.keys()
    assert all(torch.equal(t, given[n].to(DTYPES[dtype])) for n, t in found.items())
    (run.path / "model" / "model.safetensors").unlink()
    save_file({**found, "model.norm.weight": found["model.norm.weight"] + 1}, run.path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"run mine: .*the model folder has changed"):
        export_model(run, tmp_path / "again")


def test_the_command(run: RunDir, tmp_path: Path) -> None:
    done = command("export", "mine", "--runs", str(run.path.parent), "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and done.stdout.endswith("M parameters in float32, after 8 steps\n"), done
    again = command("export", "mine", "--runs", str(run.path.parent), "--out", str(tmp_path / "out"))
    assert again.returncode == 2 and "exists already" in again.stderr
    odd = command("export", "mine", "--runs", str(run.path.parent), "--out", str(tmp_path / "o"), "--dtype", "int8")
    assert odd.returncode == 2 and "expected float32, bfloat16, float16" in odd.stderr


def test_without_a_checkpoint_or_a_place_nothing_is_left(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out: .*Not a directory"):
        export_model(run, tmp_path / "given" / "config.json" / "out", "float32")
    for folder in run.checkpoints.iterdir():
        (folder / "meta.json").unlink()
    with pytest.raises(ConfigError, match="run mine has no checkpoint to export; passed over: "):
        export_model(run, tmp_path / "out", "float32")
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_without_room_for_the_weights_is_named_and_nothing_is_left(run: RunDir, tmp_path: Path) -> None:
    others = [path.stat().st_size for path in (run.path / "model").iterdir() if path.suffix in FILES]
    with small_disk(tmp_path / "disk", size_kib=sum(others) // 1024 + 4 * (len(others) + 4)) as disk:
        with pytest.raises(ConfigError, match=r"--out: .*serializ.*No space left"):
            export_model(run, disk.path / "out")
        assert not list(disk.path.iterdir())


def test_every_file_is_on_disk_before_the_folder_appears(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", os.fsync
    synced: list[tuple[Path, bool]] = []

    def fsync(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink(), out.exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    export_model(run, out)
    *before, last = synced
    work = before[-1][0]
    assert {path for path, _ in before} == {work, *(work / path.name for path in out.iterdir())}
    assert not any(is_there for _, is_there in before) and last == (tmp_path, True)


def test_the_checkpoint_of_a_step_is_chosen_and_another_step_is_refused_with_those_there_are(
    run: RunDir, tmp_path: Path
) -> None:
    assert export_model(run, tmp_path / "3", step=3).step == 3
    export = ("export", "mine", "--runs", str(run.path.parent), "--out", str(tmp_path / "out"), "--step")
    none = command(*export, "4")
    assert none.returncode == 2 and none.stderr.endswith("--step: run mine has no checkpoint of step 4; it has 7, 3\n")
    done = command(*export, "3")
    assert done.returncode == 0 and done.stdout.endswith("after 4 steps\n"), done
    (run.checkpoints / "step-00000003" / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"--step: run mine has no checkpoint of step 3; it has 7; passed over: "):
        export_model(run, tmp_path / "again", step=3)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.xdist_group("engines")
@pytest.mark.timeout(300)
def test_vllm_and_transformers_give_the_folder_the_same_greedy_tokens(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(run, out, "float32")
    model = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    given = AutoModelForCausalLM.from_pretrained(str(tmp_path / "given"), dtype=torch.float32)
    wanted, untrained = ([greedy(m, p) for p in PROMPTS] for m in (model, given))
    assert wanted != untrained, "else the weights before the training would pass, too"
    argv = [sys.executable, "-c", GREEDY_IN_VLLM, str(out), json.dumps(PROMPTS), str(NUM_NEW)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == wanted


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_checkpoint_of_a_step_that_was_undone_is_passed_over(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    with closing(Journal(run.database_url)) as journal:
        ledger = Ledger(journal.store)
        ledger.write([LedgerLine(group_id=GroupId(g), state=GroupState.ISSUED) for g in ("g3", "g7")])
        job = parse_job(run.read()["config"])
        for step in (3, 7):
            group = GroupId(f"g{step}")
            head = ledger.write([LedgerLine(group_id=group, state=GroupState.ASSIGNED, step=step)])
            tensors, meta = first_state(job, vocabulary(job.model, None), replica=ReplicaId("trainer/0")).export()
            stored = json.loads(meta)
            stored["commit"] |= {"step": step, "group_ids": [group], "ledger": asdict(head)}
            save(run.checkpoints, step, tensors, json.dumps(stored))
            ledger.write([LedgerLine(group_id=group, state=GroupState.TRAINED, step=step)])
    assert export_model(run, tmp_path / "7").step == 7
    with closing(Journal(run.database_url)) as journal:
        Ledger(journal.store).undo_after(3, "back to step 3")
    done = export_model(run, tmp_path / "3")
    assert done.step == 3
    assert [Path(reason.partition(":")[0]).name for reason in done.passed_over] == ["step-00000007"]
