"""Lightning on machines without a device: its strategies by their own names, a tiny module, and one way to train it.

Lightning refuses every accelerator but CUDA in `setup_environment`, and compares the numbers of CUDA devices with local
ranks. Neither matters to the numbers, so `use_strategies_on_cpu` puts subclasses without those checks behind the names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from deepspeed.ops.adam import DeepSpeedCPUAdam

FEATURES = 6
ROWS = 48
MICRO_BATCH = 4


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),  # unlike Adam it shows a wrong scale of gradients
    "adam": torch.optim.AdamW,
    "cpu_adam": partial(DeepSpeedCPUAdam, weight_decay=0.01),  # what people must take with offload; it is torch's AdamW
}


class DeepSpeedOnCpu(DeepSpeedStrategy):
    """The strategy of `Trainer` without its checks for CUDA."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class FabricDeepSpeedOnCpu(FabricDeepSpeedStrategy):
    """The strategy of `Fabric` without its checks for CUDA."""

    def setup_environment(self) -> None:
        super(FabricDeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True


def use_strategies_on_cpu() -> None:
    """Put the two classes behind Lightning's own names, `deepspeed_stage_3_offload` and the others, in this process."""
    for registry, strategy in ((StrategyRegistry, DeepSpeedOnCpu), (FABRIC_STRATEGIES, FabricDeepSpeedOnCpu)):
        for name, entry in registry.items():
            if name.startswith("deepspeed"):
                entry["strategy"] = strategy


class Net(nn.Module):
    """Two linear layers, a norm, and an embedding-free output: 6 features to 1, 73 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 1)

    def forward(self, rows_BF: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.hidden(rows_BF))))


class Regression(LightningModule):
    """`Net` as a Lightning user writes it: built in `configure_model`, a schedule per step, losses of each micro-batch.

    Args:
        optimizer: a key of `OPTIMIZERS`.
        lr: its rate.
        halve_after: optimizer steps between two halvings of the rate.
    """

    def __init__(self, optimizer: str = "sgd", lr: float = 0.2, halve_after: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Net | None = None
        self.losses: list[float] = []
        self.validation: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = Net()

    def forward(self, rows_BF: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(rows_BF)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1].to(batch[0].dtype))
        self.losses.append(loss.item())
        self.rates.append(self.lr_schedulers().get_last_lr()[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1].to(batch[0].dtype))
        self.log("val_loss", loss, sync_dist=True)
        self.validation.append(loss.item())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.hparams["optimizer"]](self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.hparams["halve_after"], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(seed: int = 0, count: int = ROWS) -> TensorDataset:
    """Random features, and a smooth function of them to learn."""
    generator = torch.Generator().manual_seed(seed)
    rows_BF = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(rows_BF, torch.sin(rows_BF.sum(1, keepdim=True)) + rows_BF[:, :1])


def loader(seed: int = 0, *, shuffle: bool = False) -> DataLoader[Any]:
    """`rows` in micro-batches; Lightning puts its distributed sampler in."""
    return DataLoader(rows(seed), batch_size=MICRO_BATCH, shuffle=shuffle)


def trainer(strategy: Any, world_size: int, **settings: Any) -> Trainer:
    """A quiet `Trainer` of `world_size` CPU ranks; call it in every rank, with the launcher's variables."""
    use_strategies_on_cpu()
    warnings.filterwarnings("ignore", message=".*(num_workers|isinstance.treespec|`Trainer.fit` stopped).*")
    seed_everything(11, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    usual = {"accelerator": "cpu", "devices": world_size, "max_epochs": 2, "log_every_n_steps": 1}
    return Trainer(strategy=strategy, **{**usual, **quiet, **settings})
