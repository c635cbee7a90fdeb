"""Where DeepSpeed JSON is read from: a mapping, a file that may have comments, base64 as its launcher passes it."""

from __future__ import annotations

import base64
import binascii
import errno
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_strategy.runtime.regular_files import read_text

from ..rules import wrong_type
from ..sources import Layer, read_file, read_mapping

# Strings come first in both patterns, so that nothing inside of one is taken for a comment or a comma.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENTS = re.compile(_STRING + r"|(?://|#)[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMAS = re.compile(_STRING + r"|,(?=\s*[}\]])")
_MAY_BE_INFINITE = ("steps_per_print",)


class _Constant(float):
    """A number that only Python's JSON writes: Infinity, -Infinity, NaN."""


def read_source(source: Mapping[str, Any] | str | os.PathLike[str]) -> Layer:
    """Reads a DeepSpeed config from wherever it is.

    Args:
        source: A mapping (a DictConfig too), the path of a JSON or YAML file, or base64 of JSON text.

    Raises:
        FileNotFoundError: If it is neither base64 nor an existing file.
        TypeError: If it is something else, or holds something other than a mapping.
        ValueError: If the text cannot be read, or has a key twice.
    """
    if isinstance(source, Mapping):
        return read_mapping(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(wrong_type("config", source, "a mapping, the path of a JSON file or base64 of JSON", None))
    encoded = read_base64(source)
    if encoded is not None:
        return encoded
    path, shown = Path(source).expanduser(), os.fspath(source)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no DeepSpeed config file (and not base64 of one)", shown)
    return read_file(source) if path.suffix in (".yaml", ".yml") else read_json_file(source)


def read_json_file(source: str | os.PathLike[str]) -> Layer:
    """Makes a layer of a JSON file, in which comments and trailing commas are allowed."""
    shown = os.fspath(source)
    text = read_text(Path(source).expanduser())
    return Layer(parse_json(text, f"the config file {shown}"), f"user: {shown}")


def read_base64(source: str | os.PathLike[str]) -> Layer | None:
    """Makes a layer of base64 of a JSON object, either alphabet; None if the text is something else."""
    if not isinstance(source, str) or not re.fullmatch(r"[A-Za-z0-9+/_-]{4,}={0,2}\s*", source):
        return None
    try:
        text = base64.b64decode(source.strip().translate(str.maketrans("-_", "+/")), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    # Any word of the right length is base64 of something; a config begins with a brace.
    if not text.lstrip().startswith("{"):
        return None
    return Layer(parse_json(text, "the base64 config"), "user: base64")


def parse_json(text: str, shown: str) -> dict[str, Any]:
    """Parses JSON with ``//``, ``#`` and ``/* */`` comments and trailing commas.

    Raises:
        TypeError: If it is no object.
        ValueError: If it is no such JSON, or a key appears twice in one object; `shown` names the text.
    """
    bare = _TRAILING_COMMAS.sub(_keep_strings, _COMMENTS.sub(_keep_strings, text))
    try:
        values = json.loads(bare, object_pairs_hook=_unique, parse_constant=_Constant)
    except json.JSONDecodeError as error:
        hint = "; HJSON beyond comments and trailing commas (such as names without quotes) is not read"
        raise ValueError(f"{shown} cannot be read as JSON: {error}{hint}") from error
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error
    if not isinstance(values, dict):
        raise TypeError(f"{shown} holds a {type(values).__name__}; expected a mapping of settings")
    return values


def _keep_strings(match: re.Match[str]) -> str:
    # What is taken out leaves its line breaks, and blanks for the rest: positions in errors are those of the file.
    found = match.group()
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            both = f"{values[name]!r} and {value!r}"
            raise ValueError(f"the key '{name}' is there twice in one section ({both}); keep one")
        if name in _MAY_BE_INFINITE and isinstance(value, _Constant) and value > 0:
            value = float(value)
        _check_finite(value)
        values[name] = value
    return values


def _check_finite(value: Any) -> None:
    if isinstance(value, _Constant):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        raise ValueError(f"{name} is no JSON number; write a finite one")
    for inner in value if isinstance(value, list) else ():
        _check_finite(inner)
