"""The callback in a real Trainer of Lightning; and a job of two processes with an agent and a watch."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.core.journal.events import EventKind
from rolecall.integrations.training import Training
from tests.integrations.recorded import Clock, Recorded
from tests.integrations.shell import Shell
from tests.support import eventually

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.linear(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.linear(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, module: Any, report: Recorded, **more: Any) -> Any:
    from rolecall.integrations.lightning import RolecallCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=folder,
        callbacks=[RolecallCallback(Training(report, Clock()))],
        **more,
    )
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    trainer.fit(module, data, data)
    return trainer


def test_steps_of_a_trainer(tmp_path: Path) -> None:
    report = Recorded()
    trainer = fit(tmp_path, Module(), report)
    assert trainer.global_step == 8
    assert report.of("start") == [{"rank": 0, "world_size": 1, "local_rank": 0}]
    assert report.of("step") == list(range(1, 9)) and len(report.of("progress")) == 8
    assert report.phases[-1] == "wait" and set(report.phases) == {"step", "wait"}
    assert all(set(values) == {"loss"} for values in report.of("update")) and len(report.of("update")) == 8


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    report = Recorded()
    fit(tmp_path, Module(), report, accumulate_grad_batches=2)
    assert report.of("step") == [1, 2, 3, 4] and len(report.of("progress")) == 4


def test_an_exception_is_reported_and_passes(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ValueError("bad batch")

    report = Recorded()
    with pytest.raises(ValueError, match="bad batch"):
        fit(tmp_path, Broken(), report)
    assert [str(e) for e in report.of("exception")] == ["bad batch"] and report.phases[-1] == "wait"


JOB = Path(__file__).parent / "lightning_job.py"
SECONDS = 180.0
STEPS_LEARNED = 40


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    it = Shell(tmp_path)
    yield it
    it.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "source"), [(f"python {JOB} --callback", "integration"), (f"rolecall exec -- python {JOB}", "hooks")]
)
def test_ranks_that_lightning_starts_are_told_apart_and_one_that_hangs_is_named(
    shell: Shell, command: str, source: str
) -> None:
    shell.start("rolecall agent", "agent.log")
    eventually(lambda: "serves at" in shell.read("agent.log"), "the agent serves")
    shell.start(command, "job.log")
    shell.start("rolecall watch agents http://127.0.0.1:9477 --id my-job", "watch.log")
    both = {("trainer/0", 0), ("trainer/0", 1)}

    def train() -> bool:
        ranks = shell.ranks()
        return set(ranks) == both and min(r.step for r in ranks.values()) >= STEPS_LEARNED

    eventually(train, f"both ranks train:\n{shell.read('job.log')[-2000:]}", seconds=SECONDS)
    ranks = shell.ranks()
    assert {r.reports_by for r in ranks.values()} == {source}
    if source == "integration":
        assert all(r.loss is not None for r in ranks.values())
    shell.enter(f"kill -STOP {ranks['trainer/0', 1].pid}")
    eventually(lambda: shell.events(EventKind.INCIDENT_OPENED), "the stopped rank is named", seconds=SECONDS)
    told = " ".join(shell.enter("rolecall incidents --run my-job").split())
    assert "trainer/0 rank 1 (node-1, " in told and "is hung" in told and "process stopped" in told, told
    assert told.count("inc-1-trainer-0 open") == 1 and "inc-2" not in told, told
