"""`zero-strategy checkpoint ...`: inspect, verify, diff, convert, merge, prune."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.shown import shown
from zero_strategy.runtime.terminal import complain, parse_size, size, table

if TYPE_CHECKING:
    from zero_strategy.checkpoint.reader import StateReader


def add_checkpoint_commands(commands: Any) -> None:
    """Adds `checkpoint` to the parser's commands."""
    parser = commands.add_parser("checkpoint", help="tools for checkpoint directories")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for add, _ in _ACTIONS.values():
        add(actions)


def run_checkpoint_command(options: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status: 2, and a message on stderr, where it cannot be done."""
    try:
        if options.action in ("inspect", "convert"):
            _check_something_is_there(options.path if options.action == "inspect" else options.source)
        status = _ACTIONS[options.action][1](options)
    except (ValueError, OSError, ImportError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=1))
        complain(error)
        return 2
    return status


def _check_something_is_there(path: str) -> None:
    """Raise before torch and the formats are imported, which takes seconds.

    Raises:
        ValueError: If a local path is not there, or an empty directory; names it.
    """
    if "://" in path:
        return
    found = Path(path).absolute()
    if not found.exists():
        raise ValueError(f"{found}: no such file or directory")
    if found.is_dir() and not any(found.iterdir()):
        raise ValueError(f"{found}: not a checkpoint: the directory is empty")


def parser_for(actions: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with examples at the end of its help, --json and --quiet."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


@contextlib.contextmanager
def progress_bar(options: argparse.Namespace, what: str) -> Iterator[Callable[[int], Callable[[int], object]]]:
    """Gives a function from the total number of bytes to what is told of each part of them."""
    from tqdm import tqdm

    hidden = options.quiet or options.json or not sys.stderr.isatty()
    with contextlib.ExitStack() as stack:

        def start(total: int) -> Callable[[int], object]:
            bar: Any = stack.enter_context(
                tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what, disable=hidden)
            )
            return lambda count: bar.update(count)

        yield start


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point weights; default: as they are")
    parser.add_argument(
        "--max-file-size", type=parse_size, default=5_000_000_000, metavar="5GB", help="of one file of weights"
    )


def add_convert(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "convert",
        "from any format to any other",
        "Converts a checkpoint. The target appears whole or not at all, and nothing is overwritten. Nothing that a\n"
        "file says is executed. Exit status: 0 done, 2 error.\n\n"
        "from: native, deepspeed, deepspeed-universal, torch, dcp, lightning, accelerate; found out if not given\n"
        "to:   native, hf (safetensors weights alone), torch (one .pt), dcp, deepspeed-universal,\n"
        '      lightning (one .ckpt that Trainer(strategy="ddp") resumes; all of it is in memory meanwhile)',
        "  zero-strategy checkpoint convert --from deepspeed runs/ds ours --tag global_step100\n"
        "  zero-strategy checkpoint convert runs/step200 model --to hf --dtype bfloat16 --max-file-size 2GB\n"
        "  zero-strategy checkpoint convert runs/step200 step200.pt --to torch\n"
        "  zero-strategy checkpoint convert checkpoints/last.ckpt plain.ckpt --to lightning",
    )
    parser.add_argument("source", metavar="IN", help="a checkpoint")
    parser.add_argument("target", metavar="OUT", help="the new one; must not exist")
    parser.add_argument("--from", dest="from_format", metavar="F", help="the format of IN")
    parser.add_argument("--to", dest="to_format", metavar="F", default="native", help="that of OUT; default native")
    _add_weights_options(parser)
    parser.add_argument("--tag", metavar="T", help="which checkpoint of a folder; default: the one that `latest` names")
    parser.add_argument("--prefix", metavar="P", help="take this off the beginnings of names; default: what DDP adds")
    parser.add_argument("--weights-only", action="store_true", help="leave all but the weights out")
    parser.add_argument(
        "--names",
        metavar="FILE",
        help="JSON list of the optimizer's parameter names in its order, for files that say numbers only",
    )


def run_convert(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    import torch

    from zero_strategy.convert.convert import convert

    with progress_bar(options, "convert") as progress:
        state = convert(
            options.source,
            options.target,
            from_format=options.from_format,
            to_format=options.to_format,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            max_file_bytes=options.max_file_size,
            weights_only=options.weights_only,
            names=None if options.names is None else _names(Path(options.names)),
            options={key: value for key in ("tag", "prefix") if (value := getattr(options, key)) is not None},
            progress=progress,
        )
    total = sum(tensor.spec.nbytes for _, tensor in state.tensors())
    if options.json:
        counts = {"weights": len(state.weights), "optimizers": len(state.optimizers), "bytes": total}
        print(json.dumps({"target": options.target, **counts}, indent=1))
    else:
        what = f"{len(state.weights)} weights, {len(state.optimizers)} optimizer(s), {size(total)}"
        print(f"{shown(options.target)}: {options.to_format}, {what}")
    return 0


def add_average(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "average",
        "the mean of the weights of several checkpoints, or the running averages of one",
        "Writes the mean of the weights of checkpoints of any format, without optimizer states; of one alone, the\n"
        "running averages (EMA, SWA) that were saved with it, as weights. Sums are taken in\n"
        "float64, of fp32 master weights where there are some. Weights that are no floating-point numbers are the\n"
        "last checkpoint's. The target appears whole or not at all. Exit status: 0 done, 2 error.",
        "  zero-strategy checkpoint average runs/step100 runs/step200 runs/step300 --to averaged\n"
        "  zero-strategy checkpoint average a.ckpt b.ckpt --to soup --format hf --dtype bfloat16\n"
        "  zero-strategy checkpoint average old new --shares 0.1 0.9 --to blended\n"
        "  zero-strategy checkpoint average runs/step300 --to ema --format hf",
    )
    parser.add_argument("sources", metavar="IN", nargs="+", help="two checkpoints or more, or one that holds averages")
    parser.add_argument("--to", dest="target", metavar="OUT", required=True, help="the new one; must not exist")
    parser.add_argument("--shares", type=float, nargs="+", metavar="X", help="of each, in any unit; default: equal")
    parser.add_argument("--format", dest="to_format", metavar="F", default="native", help="as of convert --to")
    _add_weights_options(parser)


def run_average(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    import torch

    from zero_strategy.convert.averages import average

    with progress_bar(options, "average") as progress:
        state = average(
            options.sources,
            options.target,
            shares=options.shares,
            to_format=options.to_format,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            max_file_bytes=options.max_file_size,
            progress=progress,
        )
    total = sum(tensor.spec.nbytes for tensor in state.weights.values())
    if options.json:
        print(json.dumps({"target": options.target, "weights": len(state.weights), "bytes": total}, indent=1))
    else:
        several = len(options.sources) > 1
        what = f"the mean of {len(options.sources)}" if several else f"the averages of {options.sources[0]}"
        print(f"{shown(options.target)}: {options.to_format}, {shown(what)}, {size(total)}")
    return 0


def _names(path: Path) -> list[str]:
    names = bounded_json.parse(read_text(path), str(path))
    if isinstance(names, list) and all(isinstance(group, list) for group in names):
        names = [name for group in names for name in group]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: is no list of names")
    return names


def add_diff(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "diff",
        "where two checkpoints, or two runs, first differ",
        "Compares two checkpoints of any format: every element of weights and optimizer states, names, shapes,\n"
        "dtypes, step counts, hyper-parameters, random states. Says in words which parameter and element differ\n"
        "first, by how much, which rank wrote it, and what the pattern of all differences tells. Who saved, and in\n"
        "how many files, is no difference. Of two folders of checkpoints: the first step at which they differ.\n"
        "Exit status: 0 equal, 1 different, 2 could not be compared.",
        "  zero-strategy checkpoint diff runs/step100 again/step100\n"
        "  zero-strategy checkpoint diff runs again            # the first step that differs\n"
        "  zero-strategy checkpoint diff runs/step100 again/step100 --tolerance 4 --all\n"
        "  zero-strategy checkpoint diff exported.pt runs/step200 --weights-only",
    )
    parser.add_argument("a", help="a checkpoint of any format, or a folder of ours")
    parser.add_argument("b", help="another one; beside a folder: its checkpoint of as many steps, or `latest`")
    parser.add_argument("--all", action="store_true", help="tell of all tensors, not of the first ten of a kind")
    parser.add_argument(
        "--tolerance", type=int, default=0, metavar="ULPS", help="numbers so close are equal; default 0: compare bits"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave optimizers and counters out")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums meanwhile")


def run_diff(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.cli import diff_report, diff_runs
    from zero_strategy.cli.diff_checkpoints import bytes_to_compare, compare

    settings = {"weights_only": options.weights_only, "tolerance": options.tolerance}
    runs = [diff_runs.run_of(path) for path in (options.a, options.b)]
    if runs[0] is not None and runs[1] is not None:
        told = diff_runs.compare_runs(
            runs[0], runs[1], partial(progress_bar, options), verify=not options.no_verify, **settings
        )
        found, different = diff_runs.runs_as_json(told), told.first is not None
        lines = diff_runs.runs_report(told, everything=options.all)
    else:
        a, b = diff_runs.opened(options.a, options.b, runs, verify=not options.no_verify)
        with progress_bar(options, "diff") as progress:
            total = bytes_to_compare(a, b, weights_only=options.weights_only)
            compared = compare(a, b, **settings, progress=progress(total))
        found, different = diff_report.as_json(compared), bool(compared.differences)
        lines = diff_report.report(compared, everything=options.all)
    print(json.dumps(found, indent=1) if options.json else "\n".join(map(shown, lines)))
    return int(different)


def add_inspect(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "inspect",
        "what a checkpoint holds",
        "Shows a checkpoint of any format: files, tensors, optimizers, counters. Tensors are not read.\n"
        "Exit status: 0, or 2 if there is no complete checkpoint.",
        "  zero-strategy checkpoint inspect runs/step200\n"
        "  zero-strategy checkpoint inspect runs --tensors 'blocks.0.*'\n"
        "  zero-strategy checkpoint inspect lightning.ckpt --json",
    )
    parser.add_argument("path", help="a checkpoint of any format, or the folder with `latest`")
    parser.add_argument(
        "--tensors", nargs="?", const="*", metavar="PATTERN", help="list tensors: all, or those that fit '*.bias'"
    )


def run_inspect(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.convert.convert import NATIVE, foreign_format, open_any

    reader = open_any(options.path, verify=False)
    foreign = foreign_format(options.path)
    kind = foreign.name if foreign else NATIVE if reader.has_manifest else "plain weights"
    found = describe(reader, kind, options.tensors)
    print(json.dumps(found, indent=1, default=str) if options.json else _text(found))
    return 0


def describe(reader: StateReader, kind: str, pattern: str | None) -> dict[str, Any]:
    """Output of `--json`."""
    specs = reader.weights
    dtypes: dict[str, int] = {}
    for spec in specs.values():
        dtypes[_dtype(spec.dtype)] = dtypes.get(_dtype(spec.dtype), 0) + spec.numel
    files = _files(reader)
    found: dict[str, Any] = {
        "path": str(reader.directory),
        "format": kind,
        "bytes": sum(files.values()),
        "files": files,
        "weights": {
            "tensors": len(specs),
            "elements": sum(spec.numel for spec in specs.values()),
            "bytes": sum(spec.nbytes for spec in specs.values()),
            "elements_by_dtype": dtypes,
        },
        "ties": dict(reader.aliases),
        "optimizers": [],
    }
    if reader.has_manifest:
        manifest = reader.manifest
        names = sorted(manifest.optimizers, key=lambda name: (len(name), name))
        found["optimizers"] = [_optimizer(reader, name) for name in names]
        found |= {"counters": dict(manifest.counters), "user": dict(manifest.user)}
        if kind == "native":
            found |= {"world_size": manifest.world_size, "stage": manifest.stage}
    if pattern is not None:
        found["tensors"] = _tensors(reader, pattern)
    return found


def _files(reader: StateReader) -> dict[str, int]:
    root = reader.directory
    if isinstance(root, str):  # a URL
        return dict(reader.manifest.files)
    if root.is_file():
        return {root.name: root.stat().st_size}
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


def _optimizer(reader: StateReader, name: str) -> dict[str, Any]:
    record, states = reader.manifest.optimizers[name], reader.states(name)
    found = [values.get("step") for values in record.scalars.values()]
    steps = sorted({float(step) for step in found if isinstance(step, (int, float))})
    return {
        "name": name,
        "groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"parameters": len(group["params"])}
            for group in record.param_groups
        ],
        "states": {
            kind: {"tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs.values())}
            for kind, specs in states.items()
        },
        "steps": [steps[0], steps[-1]] if steps else [],
    }


def _tensors(reader: StateReader, pattern: str) -> list[dict[str, Any]]:
    kinds: list[Any] = ["model"]
    if reader.has_manifest:
        kinds += [(name, kind) for name in reader.manifest.optimizers for kind in reader.states(name)]
    found = []
    for kind in kinds:
        specs = reader.weights if kind == "model" else reader.states(kind[0])[kind[1]]
        for name, spec in specs.items():
            if fnmatchcase(name, pattern):
                where = "model" if kind == "model" else f"optimizer {kind[0]} {kind[1]}"
                entry = {"where": where, "name": name, "dtype": _dtype(spec.dtype), "shape": list(spec.shape)}
                found.append({**entry, "bytes": spec.nbytes, "file": reader.file_of(name, kind)})
    return found


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _text(found: dict[str, Any]) -> str:
    weights = found["weights"]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in weights["elements_by_dtype"].items())
    rows = [
        ("path", found["path"]),
        ("format", found["format"]),
        ("size", f"{size(found['bytes'])} in {len(found['files'])} file(s)"),
        ("weights", f"{weights['tensors']} tensors, {size(weights['bytes'])}: {dtypes or 'no elements'}"),
    ]
    if "world_size" in found:
        rows.append(("saved by", f"{found['world_size']} rank(s), stage {found['stage']}"))
    rows += [(f"counter {name}", str(value)) for name, value in found.get("counters", {}).items()]
    rows += [(f"tie {alias}", name) for alias, name in found["ties"].items()]
    for entry in found["optimizers"]:
        rows += _optimizer_rows(entry)
    rows += [(f"user {key}", _short(value)) for key, value in found.get("user", {}).items()]
    parts = [table(rows), table([(name, size(n)) for name, n in found["files"].items()], ("file", "size"), right=(1,))]
    if found.get("tensors"):
        header = ("where", "name", "dtype", "shape", "size", "file")
        lines = [
            (t["where"], t["name"], t["dtype"], t["shape"], size(t["bytes"]), Path(t["file"]).name or "-")
            for t in found["tensors"]
        ]
        parts.append(table(lines, header, right=(4,)))
    return "\n\n".join(parts)


def _optimizer_rows(entry: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"optimizer {entry['name']}"
    rows = [
        (f"{name} {kind}", f"{state['tensors']} tensors, {size(state['bytes'])}")
        for kind, state in entry["states"].items()
    ]
    if entry["steps"]:
        low, high = entry["steps"]
        rows.append((f"{name} steps", f"{low:g}" if low == high else f"{low:g} to {high:g}"))
    for number, group in enumerate(entry["groups"]):
        rows.append((f"{name} group {number}", ", ".join(f"{key}={_short(value)}" for key, value in group.items())))
    return rows


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def add_merge(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "merge",
        "make an ordinary checkpoint of the pieces that ranks wrote",
        "Makes an ordinary checkpoint of one that was saved in pieces: where ranks share no file system, or to an\n"
        "object store. Every byte is compared with its checksum.\n"
        "Exit status: 0 done, 2 not done.",
        "  zero-strategy checkpoint merge host0/step200 host1/step200 --output step200\n"
        "  zero-strategy checkpoint merge s3://bucket/run/step200 --output step200",
    )
    parser.add_argument("directory", nargs="+", help="what has all pieces (or its URL), or those of all hosts")
    parser.add_argument("--output", required=True, help="the new checkpoint; must not exist")


def run_merge(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.cli.checkpoint_merge import merge

    with progress_bar(options, "merge") as progress:
        made = merge(options.directory, options.output, progress)
    if options.json:
        found = {"directory": str(made.directory), "ranks": made.ranks, "files": made.files, "bytes": made.bytes}
        print(json.dumps(found, indent=1))
    else:
        what = f"made of the pieces of {made.ranks} rank(s) ({made.files} files, {made.bytes} bytes)"
        print(f"{shown(made.directory)}: {what}")
    return 0


def add_prune(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "prune",
        "remove old checkpoints of a folder",
        "Removes all complete checkpoints of a folder but the newest ones. The newest, and the one that `latest`\n"
        "names, always stay; what is no complete checkpoint is left alone. Exit status: 0 done, 2 error.",
        "  zero-strategy checkpoint prune runs --keep-last 3 --dry-run\n"
        "  zero-strategy checkpoint prune runs --keep-last 3 --keep-every 1000",
    )
    parser.add_argument("directory", help="the folder")
    parser.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many of the newest stay")
    parser.add_argument(
        "--keep-every", type=int, default=0, metavar="M", help="those whose step is a multiple of M stay, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def run_prune(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.folders import find_checkpoints, remove_checkpoints, which_to_remove

    if options.keep_last < 1:
        raise ValueError(f"--keep-last {options.keep_last}: give 1 or more")
    found = find_checkpoints(options.directory)
    chosen = which_to_remove(found, options.keep_last, options.keep_every)
    if not options.dry_run:
        remove_checkpoints(entry.path for entry in chosen)
    rows = [
        {
            "name": entry.path.name,
            "step": entry.step,
            "bytes": entry.bytes,
            "complete": entry.complete,
            "latest": entry.is_latest,
            "removed": entry in chosen,
        }
        for entry in found
    ]
    if options.json:
        print(json.dumps({"directory": options.directory, "dry_run": options.dry_run, "checkpoints": rows}, indent=1))
        return 0
    gone = "would go" if options.dry_run else "removed"
    state = [gone if entry in chosen else "stays" if entry.complete else "incomplete, left alone" for entry in found]
    lines = [
        [entry.path.name, "-" if entry.step is None else entry.step, size(entry.bytes), what]
        for entry, what in zip(found, state, strict=True)
    ]
    if lines:
        print(table(lines, ("checkpoint", "step", "size", ""), right=(1, 2)))
    print(f"{len(chosen)} of {len(found)} {gone}, {size(sum(entry.bytes for entry in chosen))}")
    return 0


def add_verify(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "verify",
        "compare every byte with its checksum",
        "Reads a checkpoint and compares every byte with its checksum.\n"
        "Exit status: 0 whole, 1 damaged, 2 no checkpoint.",
        "  zero-strategy checkpoint verify runs/step200\n"
        "  zero-strategy checkpoint verify runs   # what `latest` names",
    )
    parser.add_argument("directory", help="a checkpoint, or its parent with a `latest` file")


def run_verify(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.cli.checkpoint_checks import verify

    try:
        with progress_bar(options, "verify") as progress:
            verdict = verify(options.directory, progress)
    except (ValueError, OSError) as error:
        if options.json:
            print(json.dumps({"directory": options.directory, "problems": [str(error)]}, indent=1))
        else:
            complain(error)
        return 2
    if options.json:
        found = {"directory": str(verdict.directory), "files": verdict.files, "bytes": verdict.bytes}
        print(json.dumps({**found, "problems": list(verdict.problems)}, indent=1))
    else:
        for problem in verdict.problems:
            print(shown(problem))
        judgement = f"{len(verdict.problems)} problem(s)" if verdict.problems else "whole"
        print(f"{shown(verdict.directory)}: {judgement} ({verdict.files} files, {verdict.bytes} bytes)")
    return int(bool(verdict.problems))


_ACTIONS: dict[str, tuple[Callable[[Any], None], Callable[[argparse.Namespace], int]]] = {
    "inspect": (add_inspect, run_inspect),
    "verify": (add_verify, run_verify),
    "diff": (add_diff, run_diff),
    "convert": (add_convert, run_convert),
    "average": (add_average, run_average),
    "merge": (add_merge, run_merge),
    "prune": (add_prune, run_prune),
}
"""What adds an action to the parser, and what runs it."""
