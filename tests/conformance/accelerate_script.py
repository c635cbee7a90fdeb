"""Runs one of the test scripts inside Accelerate's package on this rank; a script itself.

    torchrun ... accelerate_script.py NAME[:PART] STAGE [key=value ...] [-- arguments of the script]

The script gets `ZeroAccelerator` under the name `Accelerator`, which is the line that a user changes; STAGE `plain`
leaves it alone. What it would take from the Hugging Face hub is replaced (`offline`), and data that it draws unseeded
are drawn from a seed.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance import offline
from zero_strategy.integrations.accelerate import ZeroAccelerator

PACKAGE = "accelerate.test_utils.scripts"


class Configured(ZeroAccelerator):
    """With a config, for scripts that pass none. At the top of a module, since a script pickles it."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, zero_config=dict(self.config), **keywords)


def seeded(seed: int | None = None, make: Any = np.random.default_rng) -> np.random.Generator:
    """Some scripts compare gradients of unseeded data by a relative error, which fails where one is near zero."""
    generator: np.random.Generator = make(7 if seed is None else seed)
    return generator


def main() -> None:
    """Run the script that the command line names."""
    words, arguments = sys.argv[1:], []
    if "--" in words:
        words, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    name, stage, *pairs = words
    settings = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    script: Any = importlib.import_module(f"{PACKAGE}.{name.partition(':')[0]}")
    sys.argv = [script.__file__, *arguments]
    with ExitStack() as patches:
        patches.enter_context(patch.object(np.random, "default_rng", seeded))
        if stage != "plain":
            Configured.config = {"stage": int(stage), "units": {"min_numel": 0}, **settings}
            patches.enter_context(patch.object(script, "Accelerator", Configured, create=True))
            if name == "test_ops":  # it asks for the state, and makes no accelerator
                Configured()
        for attribute, stand_in in (("load_dataset", offline.paraphrases),):
            if hasattr(script, attribute):
                patches.enter_context(patch.object(script, attribute, stand_in))
        if hasattr(script, "AutoTokenizer"):
            patches.enter_context(patch.object(script.AutoTokenizer, "from_pretrained", offline.tokenizer))
            known = script.AutoModelForSequenceClassification
            patches.enter_context(patch.object(known, "from_pretrained", offline.classifier))
            patches.enter_context(patch.object(script.evaluate, "load", lambda *names: offline.Metric()))
        run(script, name.partition(":")[2])


def run(script: Any, part: str) -> None:
    """Run all of a script, or a part: the name of a function, or cases that the script leaves out on the CPU."""
    if part == "all loaders":  # of test_sync
        for case in itertools.product([True, False], repeat=3):
            script.test_gradient_accumulation(*case)
            script.test_gradient_accumulation_with_opt_and_scheduler(*case)
    elif part == "mrpc":  # of test_metrics
        for case in itertools.product([True, False], repeat=2):
            accelerator = script.Accelerator()
            script.test_mrpc(*case)
            accelerator.state._reset_state()
    elif part:
        function = getattr(script, part)
        function(*[script.create_accelerator() for _ in inspect.signature(function).parameters])
    else:
        script.main()


if __name__ == "__main__":
    main()
