"""A user's dataset as a task: prompts through the chat template, rewards from the function, and the check before."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.core.config.data import EvaluationConfig
from rolecall.core.config.job import JobConfig, RolesConfig, RuntimeConfig, load_job, parse_job
from rolecall.core.config.lora import LoraSettings
from rolecall.core.errors import ConfigError, RewardFailed, SamplerMismatch
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.memory_estimate import FreeMemory, ModelSize
from rolecall.rl_runtime.model_folder import read_config, rows_of, weight_shapes
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.check import (
    _architectures,
    _check_data,
    _check_dtype,
    _check_heads,
    _check_layers,
    _check_lengths,
    _check_memory,
    _check_reward,
    available_bytes,
    checked,
    gpu_memory,
)
from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
from rolecall.rl_runtime.tasks.reward_worker import RewardWorker, task_of
from rolecall.rl_runtime.tasks.task import group_id
from rolecall.rl_runtime.trainer.model import load_model_folder
from tests.agent.nvml import Machine, build, shown_by
from tests.rl_runtime.chat_model import WORDS, write_chat_model

ROOT = Path(__file__).parents[3]
ROWS = [{"prompt": f"say {n}", "answer": str(n), "level": n} for n in range(5)]
REWARDS = """
def right(prompt, response, answer, metadata):
    if response == "please":
        raise ValueError("the answer is please")
    return float(response == answer) + metadata["level"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def job_of(folder: Path, *, reward: Any = None, model: str = "model", **data: Any) -> JobConfig:
    value = {
        "model": {"path": str(folder / model)},
        "data": {
            "path": str(folder / "train.jsonl"),
            "answer": "answer",
            "metadata": ["level"],
            "shuffle": False,
            "max_prompt_tokens": 20,
            "max_response_tokens": 8,
            **data,
        },
        "reward": reward or f"{folder / 'mine.py'}:right",
    }
    return parse_job(value)


def small(job: JobConfig) -> JobConfig:
    """With few replicas: the check compares their memory with this machine's."""
    roles = RolesConfig(trainer=1, rollout=1, reward=1)
    return job.model_copy(update={"roles": roles, "runtime": RuntimeConfig(standbys=0)})


def words(tokens: tuple[int, ...]) -> str:
    return " ".join(WORDS[t] for t in tokens)


def group_of(number: int, *responses: str) -> PromptGroup:
    samples = tuple(
        TrainingSample(
            request_id=f"{group_id(number)}.{i}",
            tokens=tuple(WORDS.index(w) for w in response.split()),
            logprobs=(0.0,) * len(response.split()),
            versions=(0,) * len(response.split()),
            reward=0.0,
        )
        for i, response in enumerate(responses)
    )
    return PromptGroup(group_id=group_id(number), prompt_tokens=(1,), samples=samples)


def test_prompts_go_through_the_chat_template(folder: Path) -> None:
    plain, told = task_of(job_of(folder)), task_of(job_of(folder, system_prompt="say please"))
    assert words(plain.prompt(3).tokens) == "<bos> user say 3 <end> <bos> assistant"
    assert words(told.prompt(3).tokens) == "<bos> system say please <end> <bos> user say 3 <end> <bos> assistant"
    assert words(task_of(job_of(folder, chat_template=False)).prompt(3).tokens) == "say 3"
    assert (plain.vocab.eos, plain.vocab.size) == (2, len(WORDS))


def test_a_chat_with_its_own_system_message_keeps_it(folder: Path) -> None:
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "say 1"}]
    (folder / "train.jsonl").write_text(json.dumps({**ROWS[0], "prompt": messages}))
    task = task_of(job_of(folder, system_prompt="yes"))
    assert words(task.prompt(0).tokens) == "<bos> system no <end> <bos> user say 1 <end> <bos> assistant"


def test_a_row_that_cannot_be_used_is_found_before_the_start_and_ends_no_run(folder: Path) -> None:
    rows = [*ROWS[:3], {**ROWS[3], "prompt": ""}, ROWS[4]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"data.prompt: row 3: '' is not a text"):
        _check_data(job_of(folder))
    assert task_of(job_of(folder)).prompt(3).unusable == "the prompt of this row cannot be rendered"


def test_a_prompt_that_is_too_long_says_so(folder: Path) -> None:
    task = task_of(job_of(folder, max_prompt_tokens=6))
    assert task.prompt(0).unusable == "prompt too long: 7 tokens, at most 6"
    assert task_of(job_of(folder)).prompt(0).unusable == ""


def test_the_workers_rewards_are_the_functions(folder: Path) -> None:
    worker = RewardWorker(replica=ReplicaId("reward/0"), incarnation=1, job=job_of(folder))
    # Row 2 in the second epoch; the end token is no part of the response.
    assert worker.score(1, [group_of(7, "2 <end>", "3 <end>", "2")]) == [[3.0, 2.0, 3.0]]
    with pytest.raises(RewardFailed, match="ValueError: the answer is please"):
        worker.score(1, [group_of(0, "please")])
    assert worker.score(1, [group_of(0, "0")]) == [[1.0]]


def test_the_ledger_names_row_epoch_and_fingerprint_and_holds_no_text(folder: Path) -> None:
    task = task_of(job_of(folder))
    assert isinstance(task, DatasetTask)
    journal = Journal(f"sqlite:///{folder / 'journal.db'}")

    def recorder(task: DatasetTask) -> RunRecorder:
        return RunRecorder(journal, Ledger(journal.store), ReplicaId("controller/0"), 1, origin=task.origin)

    recorder(task).issued([GroupId(group_id(n)) for n in range(6)])
    reasons = [line["reason"] for line in Ledger(journal.store).lines()]
    assert [r.partition(" row ")[2] for r in reasons] == [
        f"{n % 5} epoch {n // 5} of {task.fingerprint[:12]}" for n in range(6)
    ]
    recorder(task).resume_sampler()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    other = task_of(job_of(folder))
    assert isinstance(other, DatasetTask)
    with pytest.raises(SamplerMismatch, match=f"of {other.fingerprint[:12]}"):
        recorder(other).resume_sampler()


def test_a_good_job_gets_its_fingerprints(folder: Path) -> None:
    (folder / "held-out.jsonl").write_text("".join(json.dumps({**row, "prompt": "say 20"}) + "\n" for row in ROWS))
    evaluation = EvaluationConfig(path=str(folder / "held-out.jsonl"), answer="answer", num_prompts=2)
    job = checked(small(job_of(folder)).model_copy(update={"evaluation": evaluation}))
    task = task_of(job)
    assert isinstance(task, DatasetTask) and job.evaluation is not None and job.data is not None
    assert job.evaluation.fingerprint == task.held_out_fingerprint != job.data.fingerprint == task.fingerprint
    assert parse_job(job.model_dump(mode="json")) == job, "as the run's processes read it"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"answer": "solution"}, r"data: row 0 has no column 'solution'; it has 'prompt', 'answer', 'level'"),
        ({"max_prompt_tokens": 3}, r"none of the first 5 prompts fits: the shortest has 7 tokens, at most 3"),
        ({"model": "bare"}, r"model.path: the tokenizer has no chat template"),
        ({"model": "missing"}, r"model.path: .*No such file or directory"),
    ],
)
def test_mistakes_in_data_and_reward_are_named(folder: Path, change: dict[str, Any], why: str) -> None:
    write_chat_model(folder / "bare", template=None)
    with pytest.raises(ConfigError, match=why):
        _check_data(job_of(folder, **change))


@pytest.mark.parametrize(
    ("reward", "data", "problems"),
    [
        ("exact", {"answer": None}, ["data.answer: reward exact compares with it: name the column"]),
        (
            "{folder}/mine.py:right",
            {"answer": None, "metadata": []},
            [
                "data.answer: reward {folder}/mine.py:right needs it: name the column",
                "data.metadata: reward {folder}/mine.py:right needs it: name the column",
            ],
        ),
        ("{folder}/mine.py:right", {}, []),
        ("{folder}/mine.py:lenient", {"answer": None, "metadata": []}, []),
        (
            "reasoning_gym:gcd",
            {"metadata": []},
            ["data.metadata: reward reasoning_gym:gcd needs it: name the column"],
        ),
    ],
)
def test_a_column_that_the_reward_needs_is_not_forgotten(
    folder: Path, reward: str, data: dict[str, Any], problems: list[str]
) -> None:
    with (folder / "mine.py").open("a") as f:
        f.write("\ndef lenient(response, answer=None):\n    return 0.0\n")
    job = job_of(folder, reward=reward.format(folder=folder), **data)
    if not problems:
        assert _check_reward(job) == ""
        return
    with pytest.raises(ConfigError) as found:
        _check_reward(job)
    assert list(found.value.problems) == [p.format(folder=folder) for p in problems]


def test_a_check_that_takes_too_long_is_a_mistake_of_the_job(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data: the check of data, reward and model took more than 0.01 s"):
        checked(job_of(folder), seconds=0.01)


@pytest.mark.slow
def test_what_the_reward_function_prints_does_not_hide_what_the_check_found(folder: Path) -> None:
    with (folder / "mine.py").open("a") as f:
        f.write("\nprint('loading', end='', flush=True)\n")
    assert checked(job_of(folder)).data is not None


@pytest.mark.slow
def test_a_library_that_fails_in_the_check_is_one_line(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("[]")
    with pytest.raises(ConfigError) as found:
        checked(job_of(folder))
    assert {p.partition(" (")[0] for p in found.value.problems} >= {"model.path: expected a mapping, got a list"}
    assert not any("Traceback" in p or "\n" in p for p in found.value.problems)


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (["say 1", " "], "prompt has no tokens"),
        (["say 1", "say 21"], "prompt has a token that the model does not have"),
    ],
)
def test_a_prompt_that_an_engine_cannot_compute_with(folder: Path, prompts: list[str], why: str) -> None:
    rows = [{**ROWS[0], "prompt": prompt} for prompt in prompts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": WORDS.index("21")}))
    job = job_of(folder, chat_template=False)
    with pytest.raises(ConfigError, match=f"data.prompt: row 1: {why}"):
        _check_data(job)
    assert [task_of(job).prompt(n).unusable for n in (0, 1)] == ["", why]


def test_a_text_that_the_tokenizer_refuses_costs_its_group_and_not_the_run(folder: Path) -> None:
    """Half of a surrogate pair, as of an emoji that was cut."""
    rows = [ROWS[0], {**ROWS[0], "prompt": "say \ud83d"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = job_of(folder, chat_template=False)
    with pytest.raises(ConfigError, match=r"data.prompt: row 1: the tokenizer refuses its text"):
        _check_data(job)
    assert task_of(job).prompt(1).unusable == "the prompt of this row cannot be rendered"


def test_a_file_has_no_split(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.split: a file has no splits"):
        _check_data(job_of(folder, split="test"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"architectures": "Qwen3ForCausalLM"},
            "model.path: config.json: architectures is no list: 'Qwen3ForCausalLM'",
        ),
        ([], "model.path: expected a mapping, got a list"),
    ],
)
def test_a_strange_config_is_named(folder: Path, change: Any, why: str) -> None:
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **change} if change else change))
    with pytest.raises(ConfigError, match=re.escape(why)):
        _architectures(read_config(folder / "model"), "")


def test_a_folder_without_a_config_is_one_problem_whichever_check_sees_it(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.unlink()
    for check in (lambda: read_config(path.parent), lambda: _check_layers(job_of(folder))):
        with pytest.raises(ConfigError) as refused:
            check()
        assert str(refused.value) == f"{path}: model.path: No such file or directory"


def test_an_empty_text_config_is_none(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": None}))
    assert rows_of(read_config(folder / "model"), 0) == len(WORDS)


@pytest.mark.parametrize(
    ("config", "lost", "why"),
    [
        ({}, "model.layers.0.self_attn.q_proj.weight", "no such weight: model.layers.0.self_attn.q_proj.weight"),
        ({}, "lm_head.weight", "no such weight: lm_head.weight"),
        ({"tie_word_embeddings": True}, "lm_head.weight", ""),
        ({"num_hidden_layers": 2}, "", "no such weight: model.layers.1.input_layernorm.weight and 10 more"),
        ({"hidden_size": 64}, "", "a weight of another shape than in config.json: lm_head.weight and 11 more"),
    ],
)
def test_weights_that_the_files_lack_are_not_made_up(folder: Path, config: dict[str, Any], lost: str, why: str) -> None:
    model = folder / "model"
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **config}))
    weights = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name != lost}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    if not why:
        assert _check_layers(job_of(folder)) == "" and load_model_folder(model) is not None
        return
    kind, _, rest = why.partition(": ")
    for check in (lambda: _check_layers(job_of(folder)), lambda: load_model_folder(model)):
        with pytest.raises(ConfigError, match=f"model.path: {kind}: .*{rest.partition(' and')[2]}"):
            check()


def test_only_files_of_the_index_count(folder: Path) -> None:
    model = folder / "model"
    before = weight_shapes(model)
    save_file({"old": torch.zeros(1000)}, model / "original.safetensors")
    assert weight_shapes(model).keys() == before.keys() | {"old"}
    index = {"weight_map": dict.fromkeys(before, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_shapes(model) == before
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"model.path: model.safetensors.index.json: TypeError"):
        weight_shapes(model)


def test_logits_need_memory_and_a_budget_of_tokens_bounds_it(folder: Path) -> None:
    job = job_of(folder, max_prompt_tokens=40, max_response_tokens=16)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 10_000_000}))
    with pytest.raises(
        ConfigError, match=r"for logits, less with algorithm.microbatch_tokens_max\), and 64.0 are free"
    ):
        _check_memory(job, FreeMemory(host_bytes=64 << 30))


@pytest.mark.parametrize(("name", "gib"), [("job.yaml", 21), ("job-ranks.yaml", 22)])
def test_the_examples_fit_into_the_memory_that_they_name(monkeypatch: pytest.MonkeyPatch, name: str, gib: int) -> None:
    size = ModelSize(
        num_parameters=134_515_008,
        num_outside_layers=28_312_128,
        num_output_only=0,
        num_rows=49_152,
        hidden=576,
        intermediate=1536,
        query=576,
        key_value=192,
        num_layers=30,
        is_folder=True,
        num_adapted=106_168_320,
        num_adapters=4_884_480,
    )
    monkeypatch.setattr("rolecall.rl_runtime.tasks.check.model_size", lambda _: size)
    path = ROOT / "examples" / "smollm2" / name
    job = load_job(path)
    assert f"bout {gib} GiB of memory" in path.read_text()
    assert job.roles.trainer == 2 and _check_memory(job, FreeMemory(host_bytes=gib << 30)) == ""


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 100),
        ({"proc": "0::/a/b\n", "a/b/memory.max": "max", "a/b/memory.current": GIB}, 100),
        ({"proc": "0::/a/b\n", "a/b/memory.max": 8 * GIB, "a/b/memory.current": 3 * GIB, "a/b/memory.stat": ""}, 5),
        ({"proc": "0::/a/b\n", "a/memory.max": 8 * GIB, "a/memory.current": 3 * GIB, "a/memory.stat": ""}, 5),
        ({"proc": "0::/gone\n", "memory.max": 8 * GIB, "memory.current": 3 * GIB, "memory.stat": ""}, 5),
        (
            {
                "proc": "0::/\n",
                "memory.max": 8 * GIB,
                "memory.current": 3 * GIB,
                "memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            6,
        ),
        (
            {
                "proc": "4:cpu,memory:/a\n0::/\n",
                "memory/a/memory.limit_in_bytes": 8 * GIB,
                "memory/a/memory.usage_in_bytes": 3 * GIB,
                "memory/a/memory.stat": f"total_inactive_file {GIB}\n",
            },
            6,
        ),
    ],
    ids=["no groups", "no limit", "limit", "limit above", "limit of a container", "files not in use", "version 1"],
)
def test_the_limit_of_the_control_group_counts(tmp_path: Path, files: dict[str, Any], free: int) -> None:
    for name, value in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(value))
    assert available_bytes(lambda: 100 * GIB, tmp_path / "proc", tmp_path) == free * GIB


def test_the_free_memory_of_each_gpu_is_nvmls(tmp_path: Path) -> None:
    library = build(tmp_path)
    with shown_by(Machine(tmp_path / "machine", num_gpus=2)) as machine:
        machine.set({"MemoryInfo.used": 20 * GIB}, gpu=1)
        free, total = zip(*((gpu.free_bytes, gpu.total_bytes) for gpu in gpu_memory(library)), strict=True)
        assert free == (19 * GIB, 59 * GIB) and total == (80 * GIB, 80 * GIB), "a GiB is reserved"
        machine.set({"error.nvmlDeviceGetMemoryInfo": 15}, gpu=0)
        with pytest.raises(ConfigError, match=r"runtime.device: GPU is lost"):
            gpu_memory(library)


@pytest.mark.slow
def test_all_mistakes_are_found_before_anything_starts(folder: Path) -> None:
    config = json.loads((write_chat_model(folder / "odd") / "config.json").read_text())
    (folder / "odd" / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ConfigError) as found:
        job = job_of(folder, model="odd", answer="solution", reward="nowhere.at_all:score")
        checked(small(job).model_copy(update={"lora": LoraSettings(target_modules=("query",))}))
    data, reward, model, lora = found.value.problems
    assert lora.startswith("lora.target_modules: 'query' is no linear layer") and lora.endswith("v_proj")
    assert "no column 'solution'" in data and "vLLM has no NoSuchModel" in model
    assert reward.startswith("reward.function: nowhere.at_all cannot be imported: ModuleNotFoundError")


def test_too_little_memory_is_a_mistake_of_the_roles(folder: Path) -> None:
    job = job_of(folder)
    with pytest.raises(ConfigError, match=r"roles: trainer 2 x .* GiB, rollout 3 x .* GiB, and 1.0 are free"):
        _check_memory(job, FreeMemory(host_bytes=1 << 30))
    assert _check_memory(job, FreeMemory(host_bytes=64 << 30)) == ""
    assert _check_memory(small(parse_job({})), FreeMemory(host_bytes=64 << 30)) == "", "the built-in model"


def test_the_heads_of_a_model_folder_are_known_before_the_start(folder: Path) -> None:
    job = job_of(folder)
    assert _check_heads(job) == ""
    shared = job.runtime.model_copy(update={"rollout_ranks": 2, "trainer_ranks": 3, "trainer_tensor_ranks": 3})
    with pytest.raises(ConfigError) as found:
        _check_heads(job.model_copy(update={"runtime": shared}))
    assert found.value.problems == (
        "runtime.rollout_ranks: 2 ranks do not divide the model's 1 attention head",
        "runtime.trainer_tensor_ranks: 3 ranks do not divide the model's 1 attention head",
    )
    with pytest.raises(ConfigError, match=r"tensor_ranks: 3 ranks do not divide the \d+ outputs of layers.0.self_attn"):
        _check_layers(job.model_copy(update={"runtime": shared}))


def test_answers_that_the_model_cannot_read_are_found(folder: Path) -> None:
    assert _check_lengths(job_of(folder)) == ""
    with pytest.raises(ConfigError, match="have up to 80 tokens, and the model reads 64"):
        _check_lengths(job_of(folder, max_response_tokens=60))


def test_adapters_and_checkpointing_are_tried_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(folder)
    model = job.model.model_copy(update={"gradient_checkpointing": True})
    job = job.model_copy(update={"model": model, "lora": LoraSettings(rank=2)})
    assert _check_layers(job) == ""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora: needs peft"):
        _check_layers(job)


class Platform:
    """As vLLM's, of a machine with `dtypes`; its GPU refuses `refused`."""

    device_type = "cuda"

    def __init__(self, *dtypes: torch.dtype, refused: torch.dtype | None = None) -> None:
        self.supported_dtypes, self._refused = dtypes, refused

    def check_if_supports_dtype(self, dtype: torch.dtype) -> None:
        if dtype is self._refused:
            raise ValueError("Bfloat16 is only supported on GPUs with compute capability of at least 8.0.")


def test_a_dtype_that_the_engine_lacks_is_a_mistake_of_the_model() -> None:
    both = torch.float32, torch.bfloat16
    _check_dtype("bfloat16", Platform(*both))
    with pytest.raises(ConfigError, match=r"model.dtype: vLLM has no bfloat16 on this machine \(cuda\)"):
        _check_dtype("bfloat16", Platform(torch.float32))
    with pytest.raises(ConfigError, match=r"model.dtype: Bfloat16 is only supported on GPUs"):
        _check_dtype("bfloat16", Platform(*both, refused=torch.bfloat16))


def test_paths_start_at_the_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model: {path: model}\ndata: {path: train.jsonl}\nreward: mine.py:right\n"
    (folder / "job.yaml").write_text(text)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    job = load_job(Path("../job.yaml"))
    assert job.data is not None and job.reward is not None
    assert job.model.path == str(folder / "model") and job.data.path == str(folder / "train.jsonl")
    assert job.reward.function == f"{folder / 'mine.py'}:right"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"data": {"path": "x"}}, "data: needs model.path"),
        ({"reward": "exact"}, "reward: no meaning without data"),
        ({"sampling": {"stop": ["\n"]}}, "sampling.stop: no meaning without data"),
        (
            {
                "model": {"path": "m"},
                "data": {"path": "x"},
                "reward": "exact",
                "sampling": {"stop": ["\n"]},
                "algorithm": {"name": "tppo"},
            },
            "sampling.stop: tppo generates an answer in windows, which would split",
        ),
        (
            {"model": {"path": "m"}, "data": {"path": "x"}, "reward": "exact", "task": {}},
            "task: the job has data: give one",
        ),
        (
            {
                "model": {"path": "m"},
                "data": {"path": "x", "system_prompt": "a", "chat_template": False},
                "reward": "exact",
            },
            "system_prompt has no meaning with chat_template: false",
        ),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: Input should be greater than or equal to 0.01"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(value: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_job(value)


def test_a_rewarded_group_is_not_that_of_another_row(folder: Path) -> None:
    group = group_of(1, "1")
    worker = RewardWorker(replica=ReplicaId("reward/0"), incarnation=1, job=job_of(folder))
    assert worker.score(1, [group, replace(group, group_id=group_id(2))]) == [[2.0], [2.0]]
