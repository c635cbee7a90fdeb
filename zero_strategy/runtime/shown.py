"""Foreign text as people may see it: names, paths and values of files that others wrote.

A terminal acts on control characters, and a line break in a name makes a line that looks like one of ours. Both are
shown as Python writes them in a string.
"""

from __future__ import annotations

import os
import re
from typing import Any

_MOST_CHARACTERS = 200
_MOST_ITEMS = 8
_FLAT = (bool, bytes, complex, float, int, str, type(None))

# C0 and C1 controls, DEL, line and paragraph separators, marks that turn the direction of text, halves of pairs (bytes
# of a path that are no UTF-8), and characters of no width, with which two names look alike.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ACTING = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def shown(text: object) -> str:
    """The text of a name, a path or a message on one line, with nothing in it that a terminal acts on."""
    return _HIDDEN.sub(_escape, os.fspath(text) if isinstance(text, os.PathLike) else str(text))


def shown_lines(text: object) -> str:
    """A message of several lines, made safe to show: lines after the first are indented.

    A line that begins at the left is therefore one that a program of ours printed.
    """
    first, *others = _ACTING.sub(_escape, str(text)).split("\n")
    return "\n".join([first, *(line if not line or line.startswith(" ") else f"  {line}" for line in others)])


def brief(value: Any) -> str:
    """A value of a file for an error: short, on one line, and in a time that does not depend on what is inside of it.

    `repr` of a tuple that holds another one twice, which holds a third one twice, and so on, takes for ever.
    """
    if isinstance(value, (str, bytes, bytearray)):
        cut = value[:_MOST_CHARACTERS]
        return shown(repr(cut)) + (f"... of {len(value)}" if len(value) > len(cut) else "")
    if value is None or isinstance(value, (bool, float, complex)):
        return repr(value)
    if isinstance(value, int):
        bits = value.bit_length()
        return str(int(value)) if bits <= 256 else f"a whole number of {bits} bits"
    if type(value) in (tuple, list) and len(value) <= _MOST_ITEMS and all(type(each) in _FLAT for each in value):
        items = ", ".join(map(brief, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "layout"):
        return repr(value)
    return f"a {type(value).__name__}"


def checked_path(path: str | os.PathLike[str], what: str) -> str:
    """The text of a path that a user gives for something to be written.

    Args:
        path: The path.
        what: Its name in errors, such as "publish(to=...)".

    Raises:
        TypeError: If it is no path of text.
        ValueError: If it is empty, a URL of a scheme alone, or has bytes that are no UTF-8, which ranks and
            checkpoints could not name.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{what}: {brief(text)} is no str or path of str")
    if not text.strip():
        raise ValueError(f"{what}: the path is empty; is a variable not set?")
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.\-]*:/*", text):
        raise ValueError(f"{what}: {shown(text)} is a URL without a place; is a variable not set?")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what}: {shown(text)} has bytes that are no UTF-8; give another path") from None
    return text


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _NAMED.get(found[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
