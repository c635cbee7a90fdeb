"""Parsers of the command line whose errors are a sentence, with the nearest command or option there is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from zero_strategy.runtime.shown import shown

_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class CommandParser(argparse.ArgumentParser):
    """A parser that prints what is wrong in place of its usage; parsers of its commands are such, too."""

    def error(self, message: str) -> NoReturn:
        """Print the message, the nearest word that would be accepted, and where help is; exit with status 2."""
        if found := _CHOICE.search(message):
            message += _meant(found[1], self._choices())
        self.exit(2, f"{self.prog}: {shown(message)}\n`{self.prog} --help` shows what there is\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; unknown ones are an error of the command that they were given to.

        argparse hands them up to the first parser, which does not know the command's options.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            near = next(filter(None, (_meant(word, list(self._option_string_actions)) for word in words)), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return parsed, unknown

    def _choices(self) -> list[str]:
        def each() -> Iterator[str]:
            for action in self._actions:
                yield from map(str, action.choices or ())

        return list(each())


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
