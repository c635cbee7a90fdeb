"""Runs other projects' scripts, trainings, models and tests under ZeRO, and writes one page of what holds.

    python -m tests.conformance [--sections models ...] [--only WORD ...] [--stages 1,3] [--output docs/conformance.md]
    python -m tests.conformance --sections tests --transformers SOURCE_TREE --lightning SOURCE_TREE

Accelerate's scripts come from its installed package and run unchanged but for the class that they import. Trainings of
transformers, TRL and PEFT are compared with the same Trainer under DistributedDataParallel: losses, gradient norms,
rewards. Everything runs in two gloo processes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from tests.conformance import foreign_tests, models_section, sections
from tests.conformance.training import KINDS

HERE = Path(__file__).parent
LIMIT_SECONDS = 240
"""Of one run: the longest takes a minute on two free cores, and plain Accelerate waits for ever in one."""
_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?([\w.]+(?:Error|Exception|Warning)\b.*)")
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "trl", "peft")
SECTIONS = ("scripts", "trainings", "models", "tests")
SCRIPTS_TITLE, TRAININGS_TITLE = "Accelerate's test scripts", "Trainings of transformers, TRL and PEFT"


@dataclass(frozen=True)
class Script:
    """One of Accelerate's scripts.

    Attributes:
        name: Of its module, and after a colon of the part to run.
        settings: For all stages of ours.
        arguments: Of the script, by run: a script that resumes is run twice. FOLDER is a new directory.
        note: Said beside the row.
    """

    name: str
    settings: tuple[str, ...] = ()
    arguments: tuple[tuple[str, ...], ...] = ((),)
    note: str = ""

    @property
    def title(self) -> str:
        """The row's name."""
        return " ".join([f"`{self.name.replace('external_deps.', '')}`", *(f"`{each}`" for each in self.settings)])


PER_STEP = ("gradient_reduction=per_step",)
_CHECKPOINTING = (
    ("--output_dir", "FOLDER", "--partial_train_epoch", "1"),
    ("--output_dir", "FOLDER", "--resume_from_checkpoint", "FOLDER/epoch_0"),
)
SCRIPTS = [
    Script(
        "test_script",
        note="stage 3: its `training_check` reads `model.a` between steps, where the parameter is released; gather it "
        "(`GatheredParameters`), or use stage 2. All before it holds",
    ),
    Script(
        "test_sync",
        note="stages 2 and 3 reduce at each micro-batch by default, so that `p.grad` under `no_sync` is the mean over "
        "ranks already; the script looks for local sums, which `gradient_reduction: per_step` keeps",
    ),
    Script("test_sync", PER_STEP),
    Script("test_sync:all loaders", PER_STEP),
    Script("test_ops"),
    *(
        Script(f"test_distributed_data_loop:{part}")
        for part in (
            "test_default_ensures_even_batch_sizes", "test_can_disable_even_batches", "test_can_join_uneven_inputs",
            "test_join_can_override_even_batches", "test_join_can_override_for_mixed_type_dataloaders",
            "test_join_raises_warning_for_iterable_when_overriding_even_batches", "test_pickle_accelerator",
        )
    ),
    Script("external_deps.test_metrics"),
    Script("external_deps.test_metrics:mrpc"),
    Script("external_deps.test_checkpointing", arguments=_CHECKPOINTING),
]  # fmt: skip


@dataclass
class Outcome:
    """Result of one cell: a few words for the table, and the end of the output where it failed."""

    words: str
    failed: bool = False
    log: str = ""


@dataclass
class Row:
    """One row of the table."""

    title: str
    cells: dict[str, Outcome] = field(default_factory=dict)
    note: str = ""

    @property
    def failed(self) -> bool:
        """True if any cell failed."""
        return any(cell.failed for cell in self.cells.values())


def launch(words: Sequence[str], log: Path) -> str:
    """Run a script in two processes; "" or why it failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment = {**os.environ, **ours}
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"did not end within {LIMIT_SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks as well
            process.wait()
    if status == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [found[1] for line in lines if (found := _ERROR.match(line)) and "ChildFailedError" not in line]
    return errors[-1].strip() if errors else f"exit status {status}"


def run_script(script: Script, column: str, log: Path) -> Outcome:
    """One of Accelerate's scripts in one column."""
    with tempfile.TemporaryDirectory() as folder:
        for arguments in script.arguments:
            own = [word.replace("FOLDER", folder) for word in arguments]
            settings = () if column == "plain" else script.settings
            words = [str(HERE / "accelerate_script.py"), script.name, column, *settings, *(["--", *own] if own else [])]
            if problem := launch(words, log):
                return Outcome("fails", True, problem)
    return Outcome("holds")


def run_training(kind: str, column: str, log: Path, folder: Path) -> Outcome:
    """One training in one column; stages are compared with the plain run before."""
    output = folder / f"{kind}-{column}.json"
    if problem := launch([str(HERE / "training.py"), kind, column, str(output)], log):
        return Outcome("fails", True, problem)
    logged = json.loads(output.read_text(encoding="utf-8"))
    if column == "plain":
        return Outcome(f"{len(logged)} events")
    plain = json.loads((folder / f"{kind}-plain.json").read_text(encoding="utf-8"))
    if [list(entry) for entry in logged] != [list(entry) for entry in plain]:
        return Outcome("fails", True, "another sequence of logged numbers than under DDP")
    worst = max(
        (abs(ours - theirs) / max(abs(theirs), 1e-3), key)
        for mine, other in zip(logged, plain, strict=True)
        for (key, ours), theirs in zip(mine.items(), other.values(), strict=True)
    )
    return Outcome(f"{worst[0]:.1e}", worst[0] > 1e-4, f"{worst[1]} differs by {worst[0]:.1e}")


def cells(rows: Sequence[Row], columns: Sequence[str]) -> list[list[str]]:
    """Titles and words of rows."""
    return [[row.title, *(row.cells[column].words for column in columns)] for row in rows]


def preface() -> str:
    """The page's head."""
    known = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known.append(f"{name} {importlib.metadata.version(name)}")
    words = (
        "Written by `make conformance`, which anyone can repeat, on CPUs with gloo: "
        f"{', '.join(known)}, Python {platform.python_version()}, {datetime.date.today().isoformat()}. A section that "
        "a run leaves out stays as an earlier one wrote it."
    )
    return "\n".join([sections.PREFACE, "", *textwrap.wrap(words, 100)])


def scripts_section(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The section on Accelerate's scripts."""
    notes = [f"- {row.title}: {row.note}." for row in rows if row.note and row.failed]
    lines = [
        "The scripts inside the package `accelerate` (`accelerate.test_utils.scripts`), with",
        "`ZeroAccelerator` imported under the name `Accelerator`, in two processes. *Plain* is Accelerate",
        "itself, which does not hold to some of its own scripts on two CPU processes.",
        "",
        *sections.table(["script", "plain", *(f"stage {column}" for column in columns[1:])], cells(rows, columns)),
        "",
        *(line for note in notes for line in textwrap.wrap(note, 100, subsequent_indent="  ")),
    ]
    return "\n".join(lines).strip()


def trainings_section(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The section on trainings."""
    lines = [
        "The Trainer's class by `make_zero_trainer`, against the same class under DistributedDataParallel, in",
        "two processes. A cell is the largest relative difference of any logged loss, gradient norm, reward or",
        "length.",
        "",
        *sections.table(["training", "DDP", *(f"stage {column}" for column in columns[1:])], cells(rows, columns)),
    ]
    return "\n".join(lines)


def log_of(folder: Path, name: str, column: str) -> Path:
    """The file for the output of one run, empty."""
    found = folder / f"{re.sub('[^A-Za-z0-9_.=-]+', '-', name).strip('-')}.{column}.log"
    found.unlink(missing_ok=True)
    return found


def run(rows: Sequence[tuple[Row, Script | str]], columns: Sequence[str], logs: Path) -> list[str]:
    """Fill the rows in; those that fail here, hold plainly, and are not explained."""
    unexplained = []
    bar = tqdm(total=len(columns) * len(rows), unit="run", dynamic_ncols=True)
    with bar, tempfile.TemporaryDirectory() as folder:
        for row, what in rows:
            for column in columns:
                bar.set_description(f"{row.title.partition(': ')[0][:50]} {column}")
                log = log_of(logs, row.title.partition(": ")[0], column)
                if isinstance(what, Script):
                    outcome = run_script(what, column, log)
                else:
                    outcome = run_training(what, column, log, Path(folder))
                row.cells[column] = outcome
                if outcome.failed:
                    bar.write(f"{row.title} {column}: {outcome.log} (see {log})")
                    if column != "plain" and not row.note and not row.cells["plain"].failed:
                        unexplained.append(f"{row.title} {column}")
                bar.update()
    return unexplained


def run_rows(options: argparse.Namespace, columns: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The sections of scripts and trainings, and what fails in them without an explanation."""
    known: list[tuple[Row, Script | str]] = []
    if "scripts" in options.sections:
        known += [(Row(script.title, note=script.note), script) for script in SCRIPTS]
    if "trainings" in options.sections:
        known += [
            (Row(f"`{kind}`: {(train.__doc__ or '').strip().rstrip('.')}"), kind) for kind, train in KINDS.items()
        ]
    rows = [each for each in known if not options.only or any(word in each[0].title for word in options.only)]
    if options.list:
        print("\n".join(row.title for row, _ in rows))
        return {}, []
    unexplained = run(rows, columns, options.logs)
    made = {}
    if scripts := [row for row, what in rows if isinstance(what, Script)]:
        made[SCRIPTS_TITLE] = scripts_section(scripts, columns)
    if trainings := [row for row, what in rows if not isinstance(what, Script)]:
        made[TRAININGS_TITLE] = trainings_section(trainings, columns)
    return made, unexplained


def run_suites(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """The sections of other projects' tests whose source trees are given."""
    made, unexplained = {}, []
    for suite in foreign_tests.SUITES:
        tree: Path | None = getattr(options, suite.option)
        if tree is None:
            print(f"{suite.title}: skipped, since --{suite.option} names no source tree", file=sys.stderr)
            continue
        log = (options.logs / f"{suite.option}-tests.log").resolve()
        entries, complete = foreign_tests.run(suite, tree.resolve(), 3, log, options.minutes)
        foreign_tests.note_plain_failures(suite, entries, tree.resolve(), log.with_stem(f"{log.stem}-plain"))
        made[suite.title], failed = foreign_tests.section(suite, entries, 3, complete)
        unexplained += failed
    return made, unexplained


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=SECTIONS, help="default: all")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows whose name has one of these words")
    parser.add_argument(
        "--models", nargs="*", default=[], metavar="TYPE",
        help="model types; results of others stay as the last log has them (default: all, from the beginning)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of models, and of each project's tests (default: no limit)"
    )
    parser.add_argument("--stages", default="1,2,3", help="of scripts and trainings, such as 1,3 (default: 1,2,3)")
    for suite in foreign_tests.SUITES:
        words = f"source tree of the installed version, for {suite.title.replace('%', '%%')}"
        parser.add_argument(f"--{suite.option}", type=Path, metavar="DIR", help=words)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the page's sections there, such as docs/conformance.md"
    )
    parser.add_argument("--logs", type=Path, default=Path("outputs/conformance"), metavar="DIR", help="where logs go")
    parser.add_argument("--list", action="store_true", help="name the rows, and end")
    options = parser.parse_args(arguments)
    if bad := [column for column in options.stages.split(",") if column not in ("0", "1", "2", "3")]:
        parser.error(f"--stages has {bad}; accepted: 0 to 3, separated by commas")
    return options


def main() -> int:
    """Run what is asked for; 0 if all rows hold or are explained."""
    options = parse()
    options.logs.mkdir(parents=True, exist_ok=True)
    made, unexplained = run_rows(options, ["plain", *options.stages.split(",")])
    if options.list:
        return 0
    if "models" in options.sections:
        found = models_section.run(options.models, options.logs / "models.jsonl", options.minutes)
        made[models_section.TITLE], bad = models_section.section(found)
        unexplained += bad
    if "tests" in options.sections:
        texts, bad = run_suites(options)
        made |= texts
        unexplained += bad
    print(sections.joined({"": preface(), **made}))
    if options.output is not None:
        sections.update(options.output, {"": preface(), **made})
    for each in unexplained:
        print(f"fails here and not plainly: {each}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
