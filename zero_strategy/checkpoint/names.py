"""Names that become paths: parameters, kinds of state and files of a checkpoint, whoever wrote it."""

from __future__ import annotations

MAX_NAME_BYTES = 255
"""Most bytes of a file's name, on all common file systems."""


def is_text(name: str) -> bool:
    """Whether it has characters only, as UTF-8 and JSON need it, and not half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong_in_file_name(name: object) -> str:
    """Says why something cannot be the name of one file or folder; empty where it can."""
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a string"
    if name in ("", ".", ".."):
        return "is no name of a file"
    if "/" in name or "\0" in name:
        return "has a '/'" if "/" in name else "has a NUL"
    if not is_text(name):
        return "has half of a surrogate pair, which is no character"
    size = len(name.encode())
    return f"takes {size} bytes, and a file's name at most {MAX_NAME_BYTES}" if size > MAX_NAME_BYTES else ""


def check_file_name(name: object, what: str, suffix: str = "") -> None:
    """Checks that a name, with a suffix, can be that of one file or folder, and so leads out of none.

    Args:
        name: Anything, such as a key of a file that anybody may have written.
        what: What it names, for errors: "parameter".
        suffix: What comes after it.

    Raises:
        ValueError: Naming it, and saying why.
    """
    if wrong := wrong_in_file_name(name) or wrong_in_file_name(f"{name}{suffix}"):
        shown = repr(name) if len(repr(name)) <= 120 else f"{name!r:.117}..."
        raise ValueError(f"{what} {shown} cannot name a file: it {wrong}")


def folders_above(path: str) -> list[str]:
    """The folders that a relative path lies in: ["a", "a/b"] of "a/b/c"."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def is_inner_path(path: object) -> bool:
    """Whether a relative path written with "/" stays inside its directory."""
    return isinstance(path, str) and not any(map(wrong_in_file_name, path.split("/")))
