"""The code of docs/frameworks.md under the real frameworks on two ranks: resumed runs go on bit for bit.

What is executed is the page itself, on every rank, in a process group that is there already; both frameworks take it.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from fusedcomp import TopK, ddp

PAGE = Path(__file__).resolve().parent.parent / "docs" / "frameworks.md"


def needs(package: str) -> pytest.MarkDecorator:
    """Looked for, not imported: Lightning takes seconds, and only the ranks need it."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install -e '.[frameworks]'")


def blocks(heading: str) -> list[str]:
    """The fenced Python under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found
    return found


def behave_as_launched(rank: int, world: int) -> None:
    """The variables that torchrun would set; the process group they would lead to is there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def residuals(state: ddp.CompressionState) -> bytes:
    """What this rank has not sent yet."""
    found: list[bytes] = []

    def collect(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key in value:
                collect(value[key], str(key))
        elif isinstance(value, torch.Tensor) and name == "residual":
            found.append(value.numpy().tobytes())

    collect(state.state_dict())
    assert found
    assert any(any(one) for one in found)
    return b"".join(found)


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerate_run(seed: int) -> dict[str, Any]:
    """The page's set-up and loop, around the tests' model and data; its names."""
    inputs, targets = ranks.batch(0, 0, 48)
    names: dict[str, Any] = {"model": ranks.net(seed), "inputs": inputs, "targets": targets}
    set_up, loop = blocks("Hugging Face Accelerate")
    exec(set_up, names)
    exec(loop.partition("\n\n\n")[0], names)  # train_epoch, without the calls that follow
    return names


def resume_accelerate(rank: int, world: int, folder: str) -> dict[str, Any]:
    behave_as_launched(rank, world)
    whole = accelerate_run(seed=0)
    whole["train_epoch"](0)
    whole["accelerator"].save_state(folder)
    saved, half = residuals(whole["state"]), ranks.digest(whole["model"])
    whole["train_epoch"](1)

    resumed = accelerate_run(seed=1)
    resumed["accelerator"].load_state(folder)
    loaded = residuals(resumed["state"])
    resumed["train_epoch"](1)

    forgetful = accelerate_run(seed=1)
    empty = ddp.CompressionState(TopK(0.01), forgetful["model"].named_parameters()).state_dict()
    forgetful["accelerator"].load_state(folder)
    forgetful["state"].load_state_dict(empty)
    forgetful["train_epoch"](1)
    return {
        "wrapped": isinstance(whole["model"], nn.parallel.DistributedDataParallel),
        "half": half,
        "whole": ranks.digest(whole["model"]) + residuals(whole["state"]),
        "resumed": ranks.digest(resumed["model"]) + residuals(resumed["state"]),
        "parameters": ranks.digest(resumed["model"]),
        "forgetful": ranks.digest(forgetful["model"]),
        "saved": saved,
        "loaded": loaded,
    }


# ---- Lightning -------------------------------------------------------------------------------------------------------


def resume_lightning(rank: int, world: int, folder: str) -> dict[str, Any]:
    behave_as_launched(rank, world)
    import lightning

    names: dict[str, Any] = {"ddp": ddp}
    exec(blocks("Lightning")[0], names)
    began: list[bytes] = []

    class Compression(names["Compression"]):
        remembers = True

        def on_fit_start(self, *args: Any) -> None:
            super().on_fit_start(*args)
            if self.state.state_dict()["state"]:
                began.append(residuals(self.state))

        def load_state_dict(self, saved: Any) -> None:
            if self.remembers:
                super().load_state_dict(saved)

    class Classifier(lightning.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.layers = ranks.net(seed)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.cross_entropy(self.layers(inputs), targets)

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def trainer_of(epochs: int) -> tuple[Any, Any]:
        callback = Compression(TopK(0.01))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world, strategy="ddp", max_epochs=epochs, logger=False, callbacks=[callback],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        return trainer, callback

    def fit(seed: int, epochs: int, checkpoint: str | None = None, remembers: bool = True) -> tuple[Any, ...]:
        model, (trainer, callback) = Classifier(seed), trainer_of(epochs)
        callback.remembers = remembers
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return model, trainer, callback.state

    loader = DataLoader(TensorDataset(*ranks.batch(0, 0, 48)), batch_size=8, shuffle=True)
    whole, _, whole_state = fit(seed=0, epochs=2)
    half, trainer, half_state = fit(seed=0, epochs=1)
    file = os.path.join(folder, "half.ckpt")
    trainer.save_checkpoint(file)
    resumed, _, resumed_state = fit(seed=1, epochs=2, checkpoint=file)
    forgetful, _, _ = fit(seed=1, epochs=2, checkpoint=file, remembers=False)
    trainer_of(1)[0].validate(Classifier(1), loader, ckpt_path=file, verbose=False)
    (loaded,) = began
    return {
        "wrapped": isinstance(trainer.strategy, lightning.pytorch.strategies.DDPStrategy),
        "half": ranks.digest(half),
        "whole": ranks.digest(whole) + residuals(whole_state),
        "resumed": ranks.digest(resumed) + residuals(resumed_state),
        "parameters": ranks.digest(resumed),
        "forgetful": ranks.digest(forgetful),
        "saved": residuals(half_state),
        "loaded": loaded,
    }


@pytest.mark.parametrize(
    "resume",
    [
        pytest.param(resume_accelerate, marks=needs("accelerate"), id="accelerate"),
        pytest.param(resume_lightning, marks=needs("lightning"), id="lightning"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(resume: Callable[..., Any], tmp_path: Path) -> None:
    """Parameters and residuals of every rank, from the framework's checkpoint; not without the hook's part in it."""
    first, second = ranks.run(resume, 2, str(tmp_path))
    for each in (first, second):
        assert each["wrapped"]
        assert each["loaded"] == each["saved"]
        assert each["resumed"] == each["whole"]
        assert len({each["half"], each["parameters"], each["forgetful"]}) == 3
    assert first["saved"] != second["saved"]
    assert first["parameters"] == second["parameters"]
