"""Blocks of the documentation: Python that stands alone is run, settings are read, commands are parsed, links followed.

On the pages of quickstart/ and guides/ a block that is marked `python` runs; `py` marks one that needs another machine,
files or the reader's own names, of which syntax, imports and settings are checked.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.warm import run_warm_script
from zero_strategy.cli import main
from zero_strategy.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [path for folder in ("quickstart", "guides") for path in sorted((DOCS / folder).glob("*.md"))]
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
RUN = [page for page in GUIDES if "\n```python\n" in page.read_text() and page.stem != "migrating"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SETTINGS = {
    "ZeroStrategy",
    "PipelineStrategy",
    "load_config",
    "ZeroEngine",
    "PipelineEngine",
    "ZeroAccelerator",
    "ZeroTrainer",
}
"""Calls whose literal config, or keywords, are settings."""
OTHER_KEYWORDS = {"config", "zero_stage", "zero_config", "weights", "compute_dtype", "mixed_precision"}

PRELUDE = """
import lightning.pytorch
import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer(lightning.pytorch.Trainer):
    # The pages' Trainers on any machine: one CPU process, two steps.
    def __init__(self, **options):
        fixed = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
        fixed["enable_model_summary"] = False
        fixed["enable_checkpointing"] = bool(options.get("callbacks"))
        options.pop("max_epochs", None)
        super().__init__(**{"max_steps": 2, **options, **fixed})


lightning.pytorch.Trainer = Trainer
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)


class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


make_module = Module
module = Module()
"""
BETWEEN = """
if True:
    import sys

    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # one process, several frameworks
        GradientState._reset_state()
    {end}
    module = Module()
"""
END = "if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()"
DS = """{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind in kinds]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_script.json").write_text(DS)
    (tmp_path / "nvme").mkdir()
    script, between = PRELUDE, BETWEEN.format(end=END)
    for block in blocks(page, "python"):
        # An engine of an earlier block of the page may go on being used: its group stays.
        keeps = re.search(r"\bengine\.(?!attach)", block) and "ZeroEngine(" not in block and "initialize(" not in block
        script += (BETWEEN.format(end="pass") if keeps else between) + block
    (tmp_path / "script.py").write_text(script + "\nprint('all ran')\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PL_"))}
    done = run_warm_script("script.py", cwd=tmp_path, env=env | {"OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.stdout.endswith("all ran\n") and done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def literal(node: ast.expr | None) -> Any:
    """The value of an expression, None where it is no literal."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def settings_in(tree: ast.AST) -> Iterator[dict[str, Any]]:
    """Literal settings of the calls that take them."""
    for node in ast.walk(tree):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
        if name not in SETTINGS or not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in ("ZeroStrategy", "load_config"):
            found = {key: literal(value) for key, value in given.items() if key not in OTHER_KEYWORDS}
            yield {key: value for key, value in found.items() if value is not None}
        for config in (*node.args, given.get("zero_config")):
            if isinstance(value := literal(config), dict):
                yield value


@pytest.mark.parametrize("page", [*PAGES], ids=name_of)
def test_settings_in_python_and_yaml_are_accepted(page: Path) -> None:
    if page.is_relative_to(DOCS / "design") or page.stem == "names_of_deepspeed_and_megatron":
        pytest.skip("no page for users of the settings")
    for block in blocks(page, "python", "py"):
        for settings in settings_in(ast.parse(block)):
            if "zero_optimization" not in settings:
                load_config(settings)
    for block in blocks(page, "yaml"):
        load_config(yaml.safe_load(block))


class Parsed(Exception):
    """Raised in place of running a command that was parsed."""


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each line of a shell that starts `zero-strategy`."""
    for block in blocks(page, "bash", ""):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if line.startswith("zero-strategy "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page)]], ids=name_of)
def test_commands_are_parsed(page: Path) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise Parsed

    for words in commands(page):
        with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only):
            with pytest.raises(Parsed):
                main(words)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        anchor = slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{slug}_{number}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lost = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert not lost, f"{name_of(page)}: links to files or headings that are not there"


def test_some_blocks_of_each_kind_are_checked() -> None:
    assert len(RUN) >= 20
    assert sum(len([*commands(page)]) for page in PAGES) >= 25
