"""The callback in a real Trainer of Lightning."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.integrations.training import Training
from tests.integrations.recorded import Clock, Recorded

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
    assert report.of("start") == [{}]
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
