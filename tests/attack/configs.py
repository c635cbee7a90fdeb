"""Configs that multiply, nest, refer to themselves, or are no text."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.attack.rows import Attempt, Outcome, outcome, refused
from zero_strategy.config import load_config

_SOON = 5.0
"""Seconds; each takes less than one on a machine without other work."""


def _levels(line: str, last: str) -> str:
    return "".join(line.format(name=new, old=old) for old, new in zip("abcdefgh", "bcdefghi", strict=True)) + last


_LISTS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + _levels("{name}: &{name} [" + ",".join(["*{old}"] * 9) + "]\n", "stage: 3\n")
_MERGED = "a: &a {x0: 1}\n" + _levels("{name}: &{name} {{<<: [" + ",".join(["*{old}"] * 10) + "]}}\n", "")
_CHAIN = "".join(f"k{n}: ${{k{n + 1}}}${{k{n + 1}}}\n" for n in range(30)) + "k30: x\n"

YAML = {
    "aliases that multiply": _LISTS,
    "aliases below a section": "units:\n" + "".join(f"  {line}\n" for line in _LISTS.splitlines()),
    "merged mappings that multiply": _MERGED,
    "references that multiply": _CHAIN,
    "an alias inside of itself": "a: &x {b: *x}\n",
    "a setting that refers to itself": "stage: ${stage}\n",
    "two that refer to each other": "stage: ${prefetch}\nprefetch: ${stage}\n",
    "3,000 lists in each other": "units: " + "[" * 3000 + "]" * 3000 + "\n",
    "3,000 mappings in each other": "units: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
    "300 interpolations in each other": "diagnostics: {run_dir: '" + "${oc.env:A," * 300 + "x" + "}" * 300 + "'}\n",
    "a number of 5,000 digits": "prefetch: " + "9" * 5000 + "\n",
    "100,000 settings": "".join(f"a{n}: 1\n" for n in range(100_000)),
    "a Python object": "stage: !!python/object/apply:os.system ['true']\n",
    "a null byte": "stage: 3\0\n",
    "two documents": "stage: 1\n---\nstage: 2\n",
    "an escape sequence in a key": '"\\e]0;title\\a\\e[31mstage": 3\n',
    "a line break in a key": '"stage\\nINFO all is well": 3\n',
    "not a number": "timeout_seconds: .nan\n",
    "10 MB": "# " + "x" * 10_000_000 + "\nstage: 3\n",
}
JSON = {
    "100,000 lists": "[" * 100_000,
    "100,000 objects": '{"a":' * 100_000,
    "100,000 lists in DeepSpeed's section": '{"zero_optimization":' + "[" * 100_000,
    "900 lists in DeepSpeed's section": '{"zero_optimization":' + "[" * 900 + "]" * 900 + "}",
    "a number of 6,000 digits": '{"train_batch_size": ' + "9" * 6000 + "}",
    "NaN": '{"zero_optimization": {"stage": 1}, "gradient_clipping": NaN}',
    "a key twice": '{"zero_optimization":{"stage":1},"zero_optimization":{"stage":3}}',
    "comments without an end": '{"zero_optimization": /*' * 20_000,
    "an escape sequence in a key": '{"zero_optimization":{"stage":1,"\\u001b[31m":1}}',
}


def bombs(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Each file is refused by name within a second or so."""
    for suffix, texts in (("yaml", YAML), ("json", JSON)):
        for number, (name, text) in enumerate(texts.items()):
            path = folder / f"config-{number}.{suffix}"
            path.write_text(text)
            began = time.monotonic()
            found = outcome(lambda path=path: load_config(path))  # type: ignore[misc]
            took = time.monotonic() - began
            attempt = refused(f"{suffix}: {name}", found, names=path.name, errors=(ValueError, TypeError))
            yield attempt if took < _SOON or attempt.wrong else Attempt(attempt.name, f"took {took:.1f} s")


def fuzz(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A valid config with characters changed: read, or refused with a ValueError or TypeError that names the file."""
    whole = "stage: 3\noffload: {optimizer: cpu}\nmesh: {replicate: 1}\nunits: {min_numel: 10}\nprefetch: 2\n"
    marks = "&*!|>%@`{}[]:,#?-'\"\\$\n\t\0\x1b \u2028\ud7ff~0123abc"
    path = folder / "fuzzed.yaml"
    for number in range(40 * rounds):
        text = list(whole)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(text))
            text[at : at + draw.randrange(3)] = draw.choice(marks) * draw.randrange(3)
        path.write_text("".join(text))
        found: Outcome = outcome(lambda: load_config(path))
        if found.error is None:
            yield Attempt(f"fuzzed {number}", "")
        else:
            attempt = refused(f"fuzzed {number}", found, names=path.name, errors=(ValueError, TypeError))
            yield Attempt(attempt.name, attempt.wrong and f"{attempt.wrong} of {''.join(text)!r}")
