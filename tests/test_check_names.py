"""The lint that finds names in docstrings that are names of nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_names.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_names", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DOCSTRINGS = '''
"""`room.one.Thing`, `one.Thing.made`, `Thing.method`, `Thing.held`, `Thing.of_base`, `stage.depth`; `p.grad`, `a.json`.
"""


class Base:
    def of_base(self): ...


class Thing(elsewhere.Thing, Base):
    prefix: ClassVar[str] = "stage."
    depth: int = 0

    def method(self):
        self.held = 1

    @classmethod
    def made(cls):
        """`Thing.gone`; `room.one.Other`; `former.module`;
        `stage.width`."""
'''


def test_dead_names_are_found_and_living_ones_are_not(tmp_path: Path) -> None:
    room = tmp_path / "zero_strategy" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").touch()
    (room / "one.py").write_text(DOCSTRINGS)
    found = [line.partition("one.py:")[2].split(" is nothing")[0] for line in script().dead_names(tmp_path)]
    assert found == ["19: `Thing.gone`", "19: `room.one.Other`", "19: `former.module`", "20: `stage.width`"]
