"""A tensor-parallel engine of two ranks: the same tokens and proofs as one process, and one life.

The engines are started once and shared, with those of `test_engine.py`.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rolecall.agent.processes.state_pages import PageReader
from rolecall.agent.reporter.page_layout import page_name
from rolecall.core.config.job import ModelConfig
from rolecall.core.errors import ProofMismatch
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.processes import is_alive, recorded_processes
from rolecall.rl_runtime.rank_processes import RANK_EXIT
from rolecall.rl_runtime.rollout.engine import EngineSettings
from rolecall.rl_runtime.rollout.worker_extension import _share
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.weights.proof import ProofVerifier
from tests.rl_runtime.rollout.test_engine import PROMPT, Remote, Stage, finished, largest_difference, request
from tests.support import PATIENCE_SECONDS, eventually

engines = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.xdist_group("engines"),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("multi-rank-engines")
    write_model_folder(folder / "model", ModelConfig(num_layers=2), seed=0)
    made = Stage(folder, folder / "model")
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return create_run_dir(tmp_path_factory.mktemp("runs"), "r")


def start(stage: Stage, run: RunDir, replica: str) -> Remote:
    settings = EngineSettings(model_dir=str(stage._model_dir), max_model_len=128, num_ranks=2)
    engine = stage.engines[replica] = Remote(replica, stage._folder, stage._model_dir, settings, run=str(run.path))
    return engine


@pytest.fixture(scope="module")
def two(stage: Stage, run: RunDir) -> Remote:
    return start(stage, run, "rollout/5")


def further_rank(run: RunDir, replica: str) -> tuple[int, int]:
    """(PID, start time)."""
    [line] = [r for r in recorded_processes(run.path) if r["name"] == f"{replica}#1 rank 1"]
    return int(line["pid"]), int(line["start_ticks"])


class TestEngine:
    pytestmark = engines

    def test_it_proves_the_weights_of_both_ranks(self, stage: Stage, two: Remote) -> None:
        certifier, manifest = ProofVerifier(), stage.publish(noise=1e-3)
        proof = stage.update(two, manifest)
        assert certifier.judge(manifest, proof).admitted
        assert proof.uncovered == ()
        names = [name for name, _ in proof.storage]
        assert (
            len({n for n in names if n.startswith("rank0.")})
            == len(names) / 2
            == len({n for n in names if n.startswith("rank1.")})
        )
        assert largest_difference(proof.canary_logprobs, manifest.canary_logprobs) < 1e-5

    def test_its_tokens_and_log_probabilities_are_those_of_one_process(self, stage: Stage, two: Remote) -> None:
        one, manifest = stage.engine("rollout/0"), stage.publish()
        made = []
        for engine in (one, two):
            stage.update(engine, manifest)
            engine.submit(1, [request(f"same.{n}", n) for n in range(6)])
            made.append(finished(engine, *(f"same.{n}" for n in range(6))))
        for name, chunk in made[0].items():
            assert made[1][name].tokens == chunk.tokens
            assert largest_difference(made[1][name].logprobs, stage.score(PROMPT, chunk.tokens)) < 1e-5

    def test_a_rank_reports_what_it_waits_for_the_other(self, stage: Stage, two: Remote, run: RunDir) -> None:
        stage.update(two, stage.publish())
        names = [f"waits.{n}" for n in range(4)]
        two.submit(1, [request(name, n) for n, name in enumerate(names)])
        finished(two, *names)
        page = PageReader(run.node_dir(NodeId("node-1")) / "pages" / page_name(*further_rank(run, "rollout/5"))).read()
        assert page.work_units > 0 and page.busy_seconds > 0 and page.exchange_seconds > 0
        assert page.exchanges > page.work_units and page.tokens > 0

    def test_other_weights_on_one_rank_are_seen(self, stage: Stage, two: Remote, tmp_path: Path) -> None:
        manifest = stage.publish()
        stage.update(two, manifest)
        other = {n: (p + 0.1).detach().contiguous() for n, p in stage.reference.state_dict().items()}
        save_file(other, tmp_path / "other.safetensors")
        two.load_at_further_ranks_only(str(tmp_path / "other.safetensors"))
        with pytest.raises(ProofMismatch, match="canary"):
            stage.update(two, manifest)  # the same version: only the proof is repeated
        assert two.info().policy_version == manifest.policy_version, "the weights were loaded again, and proven"

    def test_its_further_rank_ends_with_it_even_if_stopped(self, stage: Stage, run: RunDir) -> None:
        engine = start(stage, run, "rollout/7")
        engine.info()
        engine.promote(ReplicaId("rollout/8"), 2, "secret")
        pid, ticks = further_rank(run, "rollout/7")
        names = {r["name"] for r in recorded_processes(run.path) if int(r["pid"]) == pid}
        assert names == {"rollout/7#1 rank 1", "rollout/8#2 rank 1"}, "it belongs to the replica that it became"
        os.kill(pid, signal.SIGSTOP)
        engine.process.kill()
        eventually(lambda: not is_alive(pid, ticks), "end of the further rank")

    def test_it_ends_with_its_further_rank(self, stage: Stage, two: Remote, run: RunDir) -> None:
        """The last one that uses this engine."""
        stage.update(two, stage.publish())
        pid, _ = further_rank(run, "rollout/5")
        two.submit(1, [request(f"lost.{n}", n) for n in range(4)])
        os.kill(pid, signal.SIGKILL)
        assert two.process.wait(PATIENCE_SECONDS) == RANK_EXIT


def test_a_parameter_is_an_equal_share_of_its_sources() -> None:
    q, k = torch.arange(16.0).view(4, 4), torch.arange(8.0).view(2, 4)
    rows = torch.nn.Parameter(torch.zeros(3, 4))
    assert torch.equal(_share([q, k], rows, 1, 2), torch.cat([q[2:], k[1:]]))
    assert torch.equal(_share([q], torch.nn.Parameter(torch.zeros(4, 2)), 1, 2), q[:, 2:])
    vocabulary = torch.nn.Parameter(torch.zeros(4, 4))
    vocabulary.output_dim = 0  # type: ignore[attr-defined]  # vLLM marks what it cuts
    assert torch.equal(_share([q], vocabulary, 0, 2), q)
    assert torch.equal(_share([q], vocabulary, 1, 2), torch.zeros(4, 4)), "padding"
    assert torch.equal(_share([torch.ones(4)], torch.nn.Parameter(torch.zeros(4)), 1, 2), torch.ones(4)), "not cut"
    assert torch.equal(_share([q], torch.nn.Parameter(torch.zeros(6, 4)), 0, 1)[:4], q), "padded on one rank"
