"""The table in examples/README.md has a row for each script, and its commands name files that exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = (EXAMPLES / "README.md").read_text()
ROWS = {row.split("`")[1]: row for row in TABLE.splitlines() if row.startswith("| `")}


def test_each_file_is_there() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    shared = set(re.findall(r"`(\w+\.py)`", TABLE.partition("Modules that these share")[2]))
    assert set(ROWS) | shared == files and not set(ROWS) & shared


@pytest.mark.parametrize(
    "name", ["accelerate_gpt", "transformers_gpt", "lora_peft", "gan_two_optimizers", "fabric_gpt"]
)
def test_the_command_is_taken(name: str) -> None:
    command = ROWS[f"{name}.py"].split("|")[3].strip().strip("`")
    _, script, *flags = shlex.split(command)
    assert script == f"examples/{name}.py"
    assert importlib.import_module(name).parse(flags).steps > 0
