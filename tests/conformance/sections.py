"""The page's sections: each run replaces those that it made, and leaves the others as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PREFACE = "# Conformance: other projects' scripts"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar inside a cell would end it."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def split(text: str) -> dict[str, str]:
    """The sections of a page by title, with what precedes them under "", in their order."""
    parts = re.split(r"^(## .*)$", text, flags=re.MULTILINE)
    found = {"": parts[0].strip()}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        found[title.removeprefix("## ").strip()] = body.strip()
    return found


def joined(sections: dict[str, str]) -> str:
    """A page of these sections."""
    preface = sections.get("", PREFACE)
    rest = [f"## {title}\n\n{body}" for title, body in sections.items() if title and body]
    return "\n\n".join([preface, *rest]) + "\n"


def update(path: Path, made: dict[str, str]) -> None:
    """Replace the sections in `made`, or add them at the end of the page."""
    known = split(path.read_text(encoding="utf-8")) if path.exists() else {"": PREFACE}
    path.write_text(joined({**known, **made}), encoding="utf-8")
