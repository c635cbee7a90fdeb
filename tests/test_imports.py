"""Importing the engine loads what it needs to be defined, and nothing that takes long and is needed later or never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grimp
import networkx
import pytest

import zero_strategy

LATER = [
    "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.cpp_extension", "torch.utils.data",
    "omegaconf", "yaml", "sympy", "safetensors", "fsspec", "tqdm", "matplotlib", "hydra", "lightning", "accelerate",
    "transformers", "ray",
]  # fmt: skip
SCRIPT = f"""
import sys
import torch
before = set(sys.modules)
from zero_strategy import ZeroEngine, load_config
load_config({{"stage": 3, "mesh": {{"replicate": 1}}}}, prefetch=2)
loaded = set(sys.modules) - before
print(sorted(name for name in {LATER} if name in loaded))
"""


def test_the_engine_s_class_and_a_config_load_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


HEAVY = [
    "torch", "numpy", "yaml", "lightning", "dataclasses", "inspect", "typing", "enum", "re", "functools", "contextlib",
    "collections", "pathlib", "tempfile", "logging", "importlib.abc", "importlib.util", "importlib.metadata",
    "importlib.resources",
]  # fmt: skip
FIRST_IMPORT = f"""
import sys
sys.path.insert(0, {str(Path(zero_strategy.__file__).parents[1])!r})
before = set(sys.modules)
import zero_strategy
loaded = set(sys.modules) - before
print(sorted(name for name in {HEAVY} if name in loaded), sum(name.startswith("zero_strategy") for name in loaded))
"""


def test_importing_the_package_loads_next_to_nothing() -> None:
    """Without `site`, whose hooks of editable installations load some of it first."""
    command = [sys.executable, "-S", "-c", FIRST_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[] 4"


def test_every_public_name_is_there() -> None:
    for name in zero_strategy.__all__:
        assert getattr(zero_strategy, name) is not None, name
    assert {"ZeroStrategy", "initialize", "init_distributed", "add_config_arguments", "optim"} < set(dir(zero_strategy))
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(zero_strategy))
    with pytest.raises(AttributeError, match="no attribute 'ZeroStrateg'"):
        zero_strategy.ZeroStrateg  # noqa: B018


@pytest.mark.parametrize(("name", "needed"), [("ZeroAccelerator", "accelerate"), ("ZeroTrainer", "transformers")])
def test_what_is_not_installed_is_named(name: str, needed: str) -> None:
    script = f"import sys; sys.modules[{needed!r}] = None; import zero_strategy; zero_strategy.{name}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    said = f"ModuleNotFoundError: zero_strategy.{name} needs {needed}: pip install {needed}"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said, done.stderr


FRAMEWORKS = ["lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "peft", "ray"]
BARE = f"""
import importlib, pkgutil
from importlib.machinery import PathFinder
find = PathFinder.find_spec
absent = {[*FRAMEWORKS, "hydra", "matplotlib", "deepspeed"]}
PathFinder.find_spec = lambda name, path=None, target=None: None if name in absent else find(name, path, target)
import zero_strategy
for module in pkgutil.walk_packages(zero_strategy.__path__, "zero_strategy."):
    if not module.name.startswith("zero_strategy.integrations.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
try:
    zero_strategy.ZeroStrategy
except ImportError as error:
    print(error)
"""


def test_all_but_the_integrations_does_without_frameworks() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    needed = "zero_strategy.ZeroStrategy needs PyTorch Lightning: pip install lightning (or pytorch-lightning)"
    assert done.stdout.strip() == needed


CHECKED = """
import zero_strategy
from zero_strategy import FusedAdamW, PipelineStrategy, ZeroAccelerator, ZeroConfig, ZeroEngine, ZeroStrategy
from zero_strategy import ZeroTrainer, initialize
from zero_strategy import init_distributed, load_config, load_from_checkpoint
from zero_strategy.compat.deepspeed import DeepSpeedEngine, initialize as same, zero

ZeroStrategy(stage=3, offload="cpu", prefetch=2)
PipelineStrategy(stages=2, prefetch=2, load_weights_only=True)
ZeroAccelerator(zero_config={"stage": 3})
ZeroConfig(stage=2)
reveal_type(ZeroStrategy(stage=1).explain())
reveal_type(zero_strategy.optim.FusedSGD)
reveal_type(initialize)
reveal_type(init_distributed)
reveal_type(DeepSpeedEngine)
reveal_type(same)
reveal_type(zero.Init)
ZeroStrategy(stag=3)
ZeroStrategy(stage="3")
PipelineStrategy(stag=3)
ZeroAccelerator(zero_config=3)
ZeroTrainer(zero_config=3)
ZeroConfig(stag=3)
load_config(3)
zero_strategy.ZeroStrateg
"""
WRONG = CHECKED.splitlines().index("ZeroStrategy(stag=3)") + 1
"""The line from which on each is a mistake."""

LIBRARIES_UNREAD = """
[[tool.mypy.overrides]]
module = ["torch.*", "numpy.*", "lightning.*", "lightning_fabric.*", "pytorch_lightning.*", "accelerate.*",
    "transformers.*", "peft.*", "torchao.*", "ray.*"]
follow_imports = "skip"

[[tool.mypy.overrides]]
module = ["zero_strategy.*"]
follow_imports = "silent"
"""
"""For mypy: names of this package need none of the libraries, which take a minute. `make lint` checks with them."""


def test_type_checkers_see_what_names_are(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHECKED)
    root = Path(__file__).parent.parent
    config = tmp_path / "pyproject.toml"
    own = (root / "pyproject.toml").read_text().replace("$MYPY_CONFIG_FILE_DIR", str(root))
    config.write_text(own + LIBRARIES_UNREAD)
    options = ["--config-file", str(config), "--cache-dir", os.devnull]
    command = [sys.executable, "-m", "mypy", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=root)
    lines = done.stdout.splitlines()
    errors = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    assert errors == set(range(WRONG, len(CHECKED.splitlines()) + 1)), done.stdout + done.stderr
    revealed = [line.partition("Revealed type is ")[2] for line in lines if "Revealed type" in line]
    assert len(revealed) == 7 and not [line for line in revealed if line == '"Any"'], revealed
    assert revealed[0] == '"str"' or revealed[0] == '"builtins.str"'


def test_the_marker_of_typed_packages_is_shipped() -> None:
    assert Path(zero_strategy.__file__).with_name("py.typed").is_file()


def test_no_modules_import_each_other_at_any_depth() -> None:
    """Imports in functions and those for type checkers alone count as well."""
    graph = grimp.build_graph("zero_strategy", cache_dir=None)
    arrows = networkx.DiGraph(
        (module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)
    )
    assert [sorted(circle) for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1] == []
    assert arrows.number_of_edges() > 1000
