"""All that reads files of others goes through `runtime.regular_files` and `runtime.bounded_json`.

A raw `open` waits for a pipe, and reads as much as is there; the standard parsers end in errors that name no file. Each
exception has its reason here, and an exception that is no longer needed is an error, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "zero_strategy"

_OPENERS = {"open_regular", "open_below", "memfd_create"}
_PARSERS = {"json.load", "json.loads", "yaml.load", "yaml.safe_load", "pickle.load", "pickle.loads", "zipfile.ZipFile"}
_READERS = {"read_bytes", "read_text"}

_KERNEL = "files of the kernel"
_RANKS = "messages and files of the ranks of one run, which trust each other"
_OWN = "what this process, or a library in it, has just written"

ALLOWED = {
    "checkpoint/exports.py": {"json.loads": _OWN},
    "checkpoint/folders.py": {"read_text": _KERNEL},
    "checkpoint/memory_writer.py": {"open": _RANKS},
    "checkpoint/piece_writer.py": {"json.loads": _RANKS},
    "checkpoint/save_job.py": {"json.loads": _RANKS},
    "cli/report.py": {"read_text": "parts of the page, in the package"},
    "comm/local_ranks.py": {"pickle.loads": _RANKS, "read_bytes": _RANKS},
    "comm/meeting.py": {"json.loads": _RANKS},
    "comm/store.py": {"json.loads": _RANKS},
    "comm/transport.py": {"pickle.loads": _RANKS},
    "config/deepspeed/classify.py": {"json.loads": "comments are taken out first; depth and size are bounded after it"},
    "convert/zip_entries.py": {"zipfile.ZipFile": "the guarded door"},
    "diagnostics/recorder.py": {"read_text": _KERNEL},
    "diagnostics/run_files.py": {"read_bytes": _OWN},
    "integrations/accelerate/saving.py": {"read_bytes": _OWN},
    "integrations/huggingface/survival.py": {"json.loads": _RANKS},
    "integrations/huggingface/trainer.py": {"read_bytes": _OWN},
    "ops/fatbin.py": {"read_bytes": "the package's own library"},
    "ops/build.py": {"read_bytes": "the package's sources", "json.loads": _OWN},
    "pipeline/messages.py": {"json.loads": _RANKS},
    "planning/held.py": {"read_text": _KERNEL},
    "planning/machine.py": {"read_text": _KERNEL},
    "runtime/bounded_json.py": {"json.loads": "the bounded parser"},
    "runtime/host_threads.py": {"read_bytes": _KERNEL},
    "runtime/regular_files.py": {"open": "the reader"},
    "survive/buddies.py": {"pickle.loads": _RANKS, "read_bytes": _OWN},
    "survive/history.py": {"json.loads": _RANKS},
    "survive/membership.py": {"json.loads": _RANKS},
    "watchdog/diagnosis.py": {"json.loads": _RANKS},
    "watchdog/peers.py": {"json.loads": _RANKS, "read_text": _KERNEL},
}


def dotted(node: ast.expr) -> str:
    """The text of a name with attributes; "" of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def raw_reads(source: str) -> Iterator[tuple[str, int]]:
    """(what, line) of calls that open or parse without a bound."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, last = dotted(node.func), node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _PARSERS:
            yield name, node.lineno
        elif last in _READERS and name != "torch.read_text":
            yield last, node.lineno
        elif name == "open" or (last == "open" and not name.startswith("os.")):
            mode = next((each.value for each in node.keywords if each.arg == "mode"), None)
            place = 1 if name == "open" else 0
            mode = node.args[-1] if mode is None and len(node.args) > place else mode
            texts = [each.value for each in ast.walk(mode) if isinstance(each, ast.Constant)] if mode else ["r"]
            reads = all(isinstance(text, str) and not set(text) & set("wax+") for text in texts)
            first = node.args[0] if node.args and name == "open" else None
            through = isinstance(first, ast.Call) and dotted(first.func).rpartition(".")[2] in _OPENERS
            if reads and not through and (name == "open" or mode is not None or node.keywords):
                yield "open", node.lineno


def test_files_of_others_are_read_in_one_way() -> None:
    wrong, needed = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for what, line in raw_reads(path.read_text()):
            needed.add((file, what))
            if what not in ALLOWED.get(file, {}):
                wrong.append(f"{file}:{line}: {what}; use runtime.regular_files and runtime.bounded_json")
    assert not wrong, "\n".join(wrong)
    assert not (unused := {(f, w) for f, whats in ALLOWED.items() for w in whats} - needed), unused


def test_the_rule_sees_raw_reads() -> None:
    for text, what in (
        ("open(path)", "open"),
        ("open(path, 'rb').read()", "open"),
        ("Path(p).open(encoding='utf-8')", "open"),
        ("path.read_bytes()", "read_bytes"),
        ("json.loads(path.read_text())", "json.loads"),
        ("zipfile.ZipFile(x)", "zipfile.ZipFile"),
    ):
        assert what in [found for found, _ in raw_reads(text)]
    for text in ("open(path, 'w')", "open(open_regular(path), 'rb')", "path.open('x')", "store.open()"):
        assert not list(raw_reads(text)), text
