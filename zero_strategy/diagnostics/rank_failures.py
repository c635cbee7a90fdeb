"""Failures of ranks that a command started, told in sentences: whoever wrote the factory looks for a line of his own.

A message of this package is a sentence already. Of other errors the line of the user's code is named that raised, or
called what raised.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping
from typing import NamedTuple

_HEAD = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (_OWN, *(path + os.sep for path in {sysconfig.get_path(name) for name in ("purelib", "platlib")}))
_SENTENCES = ("ValueError", "TypeError", "FileNotFoundError", "NotImplementedError")
"""Classes whose messages, where this package raises them, need no class before them."""


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    name: str


def in_sentences(failures: Mapping[int, str]) -> str:
    """What happened on ranks, a line or so for each different thing.

    Args:
        failures: By rank, a traceback as Python prints it, or a sentence.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(sentence(text), []).append(rank)
    if len(ranks_of) == 1 and len(failures) > 1:
        return next(iter(ranks_of))
    return "\n".join(f"{_ranks(ranks)}: {said}" for said, ranks in ranks_of.items())


def sentence(text: str) -> str:
    """The last exception of a traceback and its place in the user's code; other text as it is."""
    begin = text.rfind(_HEAD)
    if begin < 0:
        return text.strip()
    frames, said = _divided(text[begin + len(_HEAD) :])
    users = [frame for frame in frames if not frame.file.startswith((*_NOT_THE_USERS, "<"))]
    kind, _, message = said.partition(": ")
    if frames and frames[-1].file.startswith(_OWN) and kind in _SENTENCES and message:
        return message
    place = f" ({users[-1].file}, line {users[-1].line}, in {users[-1].name})" if users else ""
    return said + place


def _divided(block: str) -> tuple[list[Frame], str]:
    """The frames of one traceback, and the exception below them."""
    lines = block.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    frames = [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(block)]
    return frames, "\n".join(lines[end:]).strip()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
