"""Runs other projects' own tests with our class under their class's name, and classifies what fails.

Their packages do not ship these tests: the user names a source tree of the installed version. What fails by design is
recognised by the words of the error, and everything else that fails is counted as unexplained.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.sections import table

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Design:
    """A reason for which tests fail on purpose.

    Attributes:
        reason: One sentence for the page.
        words: A pattern of the error, or None.
        tests: A pattern of the test's name, or None. Both have to match where both are given.
    """

    reason: str
    words: str | None = None
    tests: str | None = None

    def explains(self, entry: dict[str, Any]) -> bool:
        """True if a failed test is one of these."""
        named = self.tests is None or re.search(self.tests, entry["test"]) is not None
        return named and (self.words is None or re.search(self.words, entry["words"]) is not None)


@dataclass(frozen=True)
class Suite:
    """The tests of one project.

    Attributes:
        title: Of the section.
        option: Of the command line, that names the source tree.
        plugin: Of pytest, that puts our class in place.
        folder: Below the source tree, where pytest starts.
        paths: Below that folder.
        designs: Reasons for failures, the first that matches counts.
        plain: The project's own class, by which failures without a reason are tried again.
    """

    title: str
    option: str
    plugin: str
    folder: str
    paths: tuple[str, ...]
    designs: tuple[Design, ...]
    plain: str


HUB = Design(
    "It needs a model, data or a package that is not on this machine.",
    "Hub|huggingface.co|offline|LocalEntryNotFound|No module named|No such file or directory: .*tests/|is not a local",
)
TRANSFORMERS = Suite(
    "transformers' own Trainer tests",
    "transformers",
    "tests.conformance.transformers_plugin",
    ".",
    tuple(
        f"tests/trainer/test_{name}.py"
        for name in (
            "trainer_checkpointing", "trainer_optimizers", "trainer", "trainer_data", "trainer_evaluation",
            "trainer_accelerator", "trainer_seq2seq", "trainer_callback",
        )
    ),
    (
        HUB,
        Design("It reads a parameter between steps, where stage 3 has released it.", "is released|gather"),
        Design("It looks for `optimizer.pt`; the state is in the sharded checkpoint.", r"optimizer\.(pt|bin)"),
        Design("An optimizer or option is refused with its reason.", "stage 3|deepspeed"),
        Design("It counts forward hooks, and finds the engine's.", "hook", "neftune"),
    ),
    "the plain Trainer",
)  # fmt: skip
LIGHTNING = Suite(
    "Lightning's own checkpoint, loop and callback tests",
    "lightning",
    "tests.conformance.lightning_plugin",
    "tests",
    ("tests_pytorch/checkpointing", "tests_pytorch/loops", "tests_pytorch/callbacks"),
    (
        Design(
            "It expects a checkpoint to be one file; here it is a directory that all ranks write.",
            "isfile|IsADirectoryError|Is a directory",
        ),
        Design("It needs a package that is not installed.", "No module named|is available. Try|not met"),
        Design("`storage_options` have no use for a directory, which the error says.", "storage_options"),
        Design("A sharded module is not pickled: its parameters are released.", "pickling of a sharded module"),
        Design(
            "Lightning passes `weights_only` to no strategy that loads after set-up; `load_weights_only` is ours.",
            "that are not plain data",
        ),
        Design("Every fit seeds anew, as under Lightning's own DDPStrategy.", "assert not True", "starts_with_seed"),
        Design(
            "The engine runs the closure before the step: an optimizer that drops it trains all the same.",
            "DID NOT RAISE",
            "no_closure_raises",
        ),
        Design("It assigns `world_size`, a property of every parallel strategy.", "'world_size' of"),
        Design(
            "At stage 3 weights are released between steps; pruning reads and replaces them there.",
            "is released",
            "prun|lottery|sparsity|permanent",
        ),
        Design("A trainable parameter that no optimizer has is refused by name.", "are in no optimizer"),
        Design(
            "Averaging callbacks whose own methods work on a copy of the whole module are refused.",
            "of its own, which works on a copy",
        ),
        Design(
            "An optimizer whose step cannot be tried on a small matrix is refused by name.", "cannot run on sharded"
        ),
    ),
    "`DDPStrategy`",
)
SUITES = (TRANSFORMERS, LIGHTNING)


PLAIN = "plain"
"""In place of a stage: the project's own class, `DDPStrategy` on one process for Lightning."""


def run(
    suite: Suite, tree: Path, stage: int | str, log: Path, minutes: float = float("inf"), tests: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], bool]:
    """Run a suite in one process; the outcomes of its tests, and True if all came to run within so many minutes.

    Args:
        suite: The tests.
        tree: The source tree.
        stage: Of ours, or `PLAIN`.
        log: What pytest prints; outcomes go beside it.
        minutes: After which the run is ended.
        tests: Those to run, by pytest's names; empty: all.
    """
    folder = tree / suite.folder
    paths = list(tests) or [path for path in suite.paths if (folder / path).exists()]
    if not paths:
        raise FileNotFoundError(f"{folder} has none of {', '.join(suite.paths)}: is it a source tree of this project?")
    outcomes = log.with_suffix(".jsonl")
    outcomes.unlink(missing_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "ZERO_STAGE": str(stage),
        "OUTCOMES": str(outcomes), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=no", "--continue-on-collection-errors",
        "-W", "ignore", "-p", "no:cacheprovider", "--timeout", "120",
        "-p", suite.plugin, "-p", "tests.conformance.outcomes", "--rootdir", str(folder), *paths,
    ]  # fmt: skip
    seconds = None if minutes == float("inf") else 60.0 * minutes
    complete = True
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=output, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            complete = False
    lines = outcomes.read_text(encoding="utf-8").splitlines() if outcomes.exists() else []
    if not lines:
        raise RuntimeError(f"pytest has run no test of {folder}: see {log}")
    return [json.loads(line) for line in lines], complete


def note_plain_failures(suite: Suite, entries: Sequence[dict[str, Any]], tree: Path, log: Path) -> None:
    """Run what fails without a reason under the project's own class, and note in `plain` what fails there, too."""
    failed = [entry for entry in entries if is_unexplained(suite, entry)]
    if not failed:
        return
    names = list(dict.fromkeys(entry["test"] for entry in failed))
    outcomes, _ = run(suite, tree, PLAIN, log, tests=names)
    bad = {entry["test"] for entry in outcomes if entry["outcome"] == "failed"}
    for entry in failed:
        entry[PLAIN] = entry["test"] in bad


def is_unexplained(suite: Suite, entry: dict[str, Any]) -> bool:
    """True of a failed test that no reason explains."""
    if entry["outcome"] != "failed" or entry["when"] == "collect":
        return False
    return not any(design.explains(entry) for design in suite.designs)


def section(
    suite: Suite, entries: Sequence[dict[str, Any]], stage: int, complete: bool = True
) -> tuple[str, list[str]]:
    """The text of a suite's section, and the names of failed tests that no reason explains."""
    files = sorted({entry["test"].rpartition("/")[2] for entry in entries if entry["when"] == "collect"})
    entries = [entry for entry in entries if entry["when"] != "collect"]
    counts = collections.Counter(entry["outcome"] for entry in entries)
    ours = sum(entry["ours"] for entry in entries if entry["outcome"] == "passed")
    explained: dict[str, list[str]] = {}
    unexplained: list[tuple[str, str]] = []
    plain: list[str] = []
    for entry in entries:
        if entry["outcome"] != "failed":
            continue
        name = entry["test"].rpartition("/")[2]
        reason = next((design.reason for design in suite.designs if design.explains(entry)), None)
        if reason is None and entry.get(PLAIN):
            plain.append(name)
        elif reason is None:
            unexplained.append((name, entry["words"].strip().splitlines()[0] if entry["words"].strip() else ""))
        else:
            explained.setdefault(reason, []).append(name)
    rows = [
        [
            f"{len(entries)}",
            f"{counts['passed']} ({ours})",
            f"{counts['skipped']}",
            f"{counts['failed'] - len(unexplained) - len(plain)}",
            f"{len(plain)}",
            f"{len(unexplained)}",
        ]
    ]
    lines = [
        f'Stage {stage}, one process, `make conformance ARGS="--{suite.option} SOURCE_TREE"`. In brackets:',
        "passed tests in which our class was made.",
        "",
        *table(["results", "passed", "skipped", "fail by design", "fail plainly, too", "fail else"], rows),
    ]
    if files:
        words = f"Files that cannot be imported here: {', '.join(f'`{name}`' for name in files)}."
        lines += ["", *textwrap.wrap(words, 100)]
    if not complete:
        last = entries[-1]["test"].rpartition("/")[2]
        lines += ["", "The run ended when its time was over; the last test was", f"`{last.partition('[')[0]}`."]
    if explained:
        why = [
            [reason, str(len(names)), ", ".join(f"`{name}`" for name in list(dict.fromkeys(map(test_name, names)))[:2])]
            for reason, names in explained.items()
        ]
        lines += ["", *table(["fails by design, since", "tests", "such as"], why)]
    if plain:
        names = ", ".join(f"`{name}`" for name in sorted(set(map(test_name, plain))))
        words = f"Fail under {suite.plain}, too: {names}."
        lines += ["", *textwrap.wrap(words, 100)]
    if unexplained:
        what = [[f"`{test_name(name)}`", f"`{words[:100]}`"] for name, words in unexplained]
        lines += ["", *table(["fails else", "with"], what)]
    return "\n".join(lines), [name for name, _ in unexplained]


def test_name(node: str) -> str:
    """The function's name, without its file and parameters."""
    return node.rpartition("::")[2].partition("[")[0]
