"""Chooses triton's interpreter where there is no GPU, skips what the machine cannot run, and sets hypothesis up."""

import os
import sys

import torch

# tl.sum, tl.cdiv and the rest are jitted when triton is imported, and building any torch optimizer imports it.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton was imported before the interpreter could be chosen"
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

# Several ranks share the cores, and one thread gives one order of summation.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(tryfirst=True)  # before -m selects: multigpu implies gpu
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed:
            item.add_marker("gpu")
        if devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}"))
