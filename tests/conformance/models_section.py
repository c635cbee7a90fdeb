"""The page's section on transformers' architectures."""

from __future__ import annotations

import collections
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.conformance import architectures, zoo, zoo_pool
from tests.conformance.sections import table

TITLE = "Architectures of transformers at stage 3"
COLUMNS = ("tried", "equal (bits)", "plain fails", "refused", "differ or fail", "not built", "not reached")
HEADINGS = {
    "BAD": "These differ, or fail where the plain model does not.",
    "refused": "These are refused by an error that says why.",
    "plain fails": "The plain model fails in the same steps.",
}
"""Verdicts that get a table of their own, with the sentence above it."""


def run(kinds: Sequence[str], log: Path, minutes: float = float("inf")) -> list[dict[str, Any]]:
    """Compare model types with the plain model.

    Args:
        kinds: Model types; what the log has of others stays. Empty: all, from the beginning.
        log: File with a line per result, to which each is appended as it comes; the last of a model type counts.
        minutes: No more model types are begun after so many; one that is under way is left.

    Returns:
        A result of each model type that is known; those that no run has reached have the verdict `not reached`.
    """
    todo = list(kinds or architectures.classes())
    if not kinds:
        log.unlink(missing_ok=True)
    with tqdm(total=len(todo), unit="model", dynamic_ncols=True) as bar, log.open("a", encoding="utf-8") as file:

        def report(result: dict[str, Any]) -> None:
            file.write(json.dumps(result) + "\n")
            file.flush()
            if result["verdict"] in ("BAD", "refused"):
                bar.write(f"{result['kind']} {result['verdict']}: {result['words']}")
            bar.set_description(result["kind"])
            bar.update()

        zoo_pool.run_all(todo, report, 60.0 * minutes)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    left = {
        kind: {"kind": kind, "verdict": "not reached", "words": "", "facts": {}} for kind in architectures.classes()
    }
    return list({**left, **{result["kind"]: result for result in lines}}.values())


def reason(words: str) -> str:
    """The common words of a family of reasons for not building."""
    kinds = {
        "requires the": "a library that is not installed",
        "parameters with small sizes": f"more than {architectures.LARGEST:,} parameters with small sizes",
        "per-layer attribute": "per-layer attributes",
        "Class validation error": "sizes that the class refuses together",
        "no input is known": "inputs that are not made here",
        "missing 1 required": "inputs that are not made here",
        "You must specify": "inputs that are not made here",
        "You have to specify": "inputs that are not made here",
        "has to be not-None": "inputs that are not made here",
        "not finite": "a loss or gradients of the plain model that are not finite",
    }
    return next((said for pattern, said in kinds.items() if pattern in words), "sizes or inputs that do not fit")


def names(results: Sequence[dict[str, Any]]) -> str:
    """Model types in one sentence."""
    return ", ".join(sorted(each["kind"] for each in results))


def section(results: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """The section's text, and what is neither equal nor refused nor fails plainly."""
    by = collections.defaultdict(list)
    for result in results:
        by[result["verdict"]].append(result)
    tried = [each for each in results if each["verdict"] not in ("not built", "not reached")]
    equal = by["equal"]
    bits = [each for each in equal if each["facts"].get("bits")]
    rounded = [each for each in equal if "rounding" in each["facts"]]
    counts = [
        str(len(tried)), f"{len(equal)} ({len(bits)})", str(len(by["plain fails"])), str(len(by["refused"])),
        str(len(by["BAD"])), str(len(by["not built"])), str(len(by["not reached"])),
    ]  # fmt: skip
    prose = (
        "Tiny models of random numbers, one class for each model type of transformers' auto mappings, built by "
        "`tests/conformance/architectures.py` without a download: two ranks with data and dropout of their own, "
        "`units.min_numel: 1`, `units.may_skip` where a model drops layers, SGD with momentum. The reference is the "
        "same module with rank 0's buffers and gradients averaged by all_reduce, which is what "
        "DistributedDataParallel computes. Compared are the losses of two steps, each weight and buffer, a checkpoint "
        "loaded into a model with other numbers, a third step and an evaluation of both, and `save_pretrained` with "
        "`from_pretrained`. Equal means a relative difference of at most "
        f"{zoo.TOLERANCE:.0e}; in brackets, those equal to the last bit in all of the first two steps. Of the equal, "
        f"{len(rounded)} differ by more, yet by less than {zoo.ROUNDINGS:.0f} times what the plain model differs from "
        "itself if each gradient is moved by one rounding. Model types with the most heads come first; those that the "
        "time did not reach are counted, not named."
    )
    lines = [
        *textwrap.wrap(prose, 100),
        "",
        *table(
            ["tried", "equal (bits)", "plain fails", "refused", "differ or fail", "not built", "not reached"], [counts]
        ),
    ]
    for verdict, sentence in HEADINGS.items():
        if by[verdict]:
            rows = [
                [f"`{each['kind']}`", each["facts"].get("class", ""), each["words"][:240].replace("\n", " ")]
                for each in by[verdict]
            ]
            lines += ["", sentence, "", *table(["model type", "class", "what"], rows)]
    lines += ["", *textwrap.wrap(f"Equal: {names(equal)}.", 100, break_on_hyphens=False)]
    why = collections.defaultdict(list)
    for each in by["not built"]:
        why[reason(each["words"])].append(each)
    if why:
        lines += ["", "Not built, by reason:", ""]
        for said, those in sorted(why.items()):
            lines += textwrap.wrap(f"- {said}: {names(those)}.", 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines), [each["kind"] for each in by["BAD"]]
