"""A job of Lightning as its users start it: `python lightning_job.py [--callback]`; Lightning starts the second process.

With `--callback` its trainer has rolecall's; without it the job knows nothing of rolecall.
"""

import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

EPOCHS, SAMPLES, BATCH = 20, 640, 8


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.1)  # a longer computation
        loss = self.linear(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    callbacks: list[Any] = []
    if "--callback" in sys.argv:
        from rolecall.integrations.lightning import RolecallCallback

        callbacks.append(RolecallCallback())
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        callbacks=callbacks,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(SAMPLES, 2), batch_size=BATCH))


if __name__ == "__main__":
    main()
