"""The blocks of docs/guides/migrating.md that show what to write here, run one after the other."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.warm import run_warm_script

ROOT = Path(__file__).parents[2]
PRELUDE = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

x = torch.randn(16, 8)
dataset = TensorDataset(x, x[:, :1])
loader = data = DataLoader(dataset, batch_size=4)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module, model, net = Module(), torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
flags = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "enable_progress_bar": False}
flags |= {"enable_checkpointing": False, "enable_model_summary": False}
language_model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
stages = 1
tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
"""
AFTER = """
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state(reset_partial_state=True)  # one process, several integrations
GradientState._reset_state()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_every_block_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "migrating.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    shutil.copy(ROOT / "tests" / "config" / "data" / "hf_zero2.json", tmp_path / "ds_config.json")
    ds = (tmp_path / "ds_config.json").read_text()
    assert '"scheduler"' in ds
    (tmp_path / "script.py").write_text(PRELUDE + AFTER.join(blocks) + "\nprint('all ran')\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PL_"))}
    done = run_warm_script("script.py", cwd=tmp_path, env=env | {"OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.stdout.endswith("all ran\n") and done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "weights" / "config.json").is_file() and (tmp_path / "run" / "latest").is_file()
