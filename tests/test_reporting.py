"""Lines that a script asks for are seen in it, once, whatever it has done about logging."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import run_warm

ASKING = """
import torch
from zero_strategy.activation.settings import CheckpointTimings
from zero_strategy.diagnostics.recorder import see_memory_usage
from zero_strategy.compat.megatron.straggler import StragglerDetector
from zero_strategy.integrations import deepspeed
from zero_strategy.pipeline.building import LayerSpec

see_memory_usage("after the forward")
detector = StragglerDetector()
detector.configure(1, 0, enabled=True)
with detector:
    pass
assert detector.report(log_interval=1)
LayerSpec(torch.nn.Linear, 2, 3).build(log=True)
deepspeed.checkpointing.configure(None, profile=True)
x = torch.ones(2, requires_grad=True)
deepspeed.checkpointing.checkpoint(torch.sin, x).sum().backward()
"""
LINES = (
    "after the forward | device memory",
    "straggler report: ",
    "building Linear(2, 3)",
    "checkpoint 1: ",
    "checkpoint backward 1: ",
)
PLAIN = ""
CONFIGURED = "import logging; logging.basicConfig(level=logging.INFO, format='log: %(message)s')"
OWN = (
    "import logging; h = logging.StreamHandler(); h.setFormatter(logging.Formatter('log: %(message)s')); "
    "logging.getLogger('zero_strategy').addHandler(h); logging.getLogger('zero_strategy').setLevel('INFO')"
)
WARNINGS = "import logging; logging.basicConfig(level=logging.WARNING)"
LEVEL = "import logging; logging.getLogger('zero_strategy').setLevel(logging.ERROR)"
DISABLED = "import logging; logging.disable(logging.INFO)"


SCRIPTS = {
    "plain": (PLAIN, "zero_strategy: "),
    "configured": (CONFIGURED, "log: "),
    "own": (OWN, "log: "),
    "warnings": (WARNINGS, None),
    "level": (LEVEL, None),
    "disabled": (DISABLED, None),
}


@pytest.mark.parametrize(("begin", "head"), SCRIPTS.values(), ids=SCRIPTS)
def test_what_a_script_asks_for_is_seen_once(begin: str, head: str | None, tmp_path: Path) -> None:
    done = run_warm(f"{begin}\n{ASKING}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in LINES:
        assert done.stderr.count(line) == (0 if head is None else 1), done.stderr
        assert head is None or f"{head}{line}" in done.stderr
