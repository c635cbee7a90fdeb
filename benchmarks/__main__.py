"""All benchmarks by one command: this package against its peers, each pair in interleaved blocks (A B B A).

    python -m benchmarks --out outputs/bench
    python -m benchmarks --only step,startup --peers ddp,fsdp2,deepspeed --rounds 8
    python -m benchmarks --quick                      that everything works, with the smallest models
    python -m benchmarks --redraw outputs/bench       tables and pictures again, from the JSON that is there

Each suite leaves SUITE.json (rows, rounds, machine, versions, command) and SUITE.png in the folder, at once when it is
over; report.md is the table of all. Peers that are not installed are skipped by name. A comparison that fails is named
at the end, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import DTYPES, REGIMES
from benchmarks.machine import facts
from benchmarks.report import document, picture, read_rows, write_json
from benchmarks.suite import PEERS, Options, Row, Suite

NAMES = ("step", "scaling", "memory", "optimizer", "offload", "nvme", "checkpoint", "pipeline", "frameworks", "startup")
QUICK: dict[str, Any] = {"rounds": 1, "stages": (1, 3), "regimes": ("communication",), "precisions": ("fp32",)}
"""Where nothing else is asked for."""


def suites() -> dict[str, Suite]:
    """All of them by name."""
    from benchmarks import frameworks, part_suites, startup, training_suites

    more = (frameworks.SUITE, startup.SUITE)
    found = {suite.name: suite for suite in (*training_suites.SUITES, *part_suites.SUITES, *more)}
    assert set(found) == set(NAMES)
    return {name: found[name] for name in NAMES}


def _several(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"nothing chosen; there are {', '.join(choices)}")
        return names

    return parse


def _numbers(choices: Sequence[int]) -> Callable[[str], tuple[int, ...]]:
    chosen = _several([str(one) for one in choices])
    return lambda text: tuple(map(int, chosen(text)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_several(NAMES), default=NAMES, metavar="SUITES", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--peers", type=_several(PEERS), default=PEERS, help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, help="of A B B A (default: 8; with --quick 1)")
    parser.add_argument("--ranks", type=_numbers((1, 2, 3, 4)), default=(2,), help="such as 2,4 (default: 2)")
    parser.add_argument("--stages", type=_numbers((0, 1, 2, 3)), help="of ours (default: all; with --quick 1,3)")
    parser.add_argument("--regimes", type=_several(tuple(REGIMES)), help=f"of {', '.join(REGIMES)}, for steps")
    parser.add_argument("--precisions", type=_several(tuple(DTYPES)), help=f"of {', '.join(DTYPES)}, for steps")
    parser.add_argument("--quick", action="store_true", help="only to see that everything works")
    parser.add_argument("--folder", type=Path, help="for files, on the drive to be measured (default: in --out)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one comparison")
    parser.add_argument("--out", type=Path, help="folder of the results (default: outputs/bench/DATE)")
    parser.add_argument("--redraw", type=Path, metavar="DIR", help="tables and pictures of results that are there")
    return parser.parse_args(arguments)


def options_of(chosen: argparse.Namespace, out: Path) -> Options:
    """Options of the suites."""
    given = {key: value for key in QUICK if (value := getattr(chosen, key)) is not None}
    return Options(
        peers=chosen.peers,
        ranks=chosen.ranks,
        quick=chosen.quick,
        folder=chosen.folder or out / "files",
        timeout=chosen.timeout,
        **((QUICK if chosen.quick else {}) | given),
    )


def measure(chosen: argparse.Namespace, out: Path, command: str) -> int:
    """Runs the suites that are asked for; returns how many failed."""
    options, known, about = options_of(chosen, out), suites(), {**facts(), "command": command}
    every: list[Row] = []
    for name in chosen.only:
        print(f"== {name}: {known[name].summary}", file=sys.stderr, flush=True)
        rows = options.tried(name, partial(known[name].run, options))
        if not rows:
            continue
        write_json(out / f"{name}.json", name, rows, about)
        if (why := picture(out / f"{name}.png", name, rows)) is not None:
            options.skip(why)
        every += rows
        (out / "report.md").write_text(document(every, about, [*options.skipped, *options.failed]))
    text = document(every, about, [*options.skipped, *options.failed])
    (out / "report.md").write_text(text)
    print(text)
    return len(options.failed)


def redraw(folder: Path) -> None:
    """Pictures and the table of the JSON files of a folder."""
    every: list[Row] = []
    about: dict[str, Any] = {}
    for name in NAMES:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        rows = read_rows(path)
        about = about or {key: value for key, value in json.loads(path.read_text()).items() if key != "rows"}
        if (why := picture(folder / f"{name}.png", name, rows)) is not None:
            print(f"skipped {why}", file=sys.stderr)
        every += rows
    if not about:
        raise SystemExit(f"{folder} has none of {', '.join(f'{name}.json' for name in NAMES)}")
    text = document(every, about, [])
    (folder / "report.md").write_text(text)
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.redraw is not None:
        redraw(chosen.redraw)
        return 0
    out = chosen.out or Path("outputs", "bench", datetime.now().strftime("%Y-%m-%d-%H-%M-%S"))
    out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    failed = measure(chosen, out, shlex.join(["python", "-m", "benchmarks", *given]))
    print(f"results: {out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
