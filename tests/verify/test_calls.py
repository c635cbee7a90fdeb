"""`verify` as a user calls it: the command, a function, the strategies; what a factory may return, and must not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.verify import subjects
from zero_strategy.cli import main
from zero_strategy.cli.verify import add_verify_command, asked, in_sentences, sentence, show
from zero_strategy.verify import verify
from zero_strategy.verify.subject import load_factory, make_subject, place_of

FILE = str(Path(subjects.__file__).resolve())
SMALL = {"stage": 3, "units": {"min_numel": 0}}


def test_the_command_passes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", f"{FILE}:tiny", "--strategy", "zero3_offload", "--ranks", "1", "--steps", "1", "--clip", "0.5"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "stage 3 on 1 rank(s)" in said and "PASSED: 1 step(s)" in said and "clipped gradient" in said


def test_the_command_fails_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(verify(subjects.changing, {"stage": 2}, ranks=1, steps=1), as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and found["stage"] == 2 and found["ranks"] == 1
    first = found["differences"][0]
    assert (first["phase"], first["name"], first["step"]) == ("start", "position", -1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "write path.py:function or package.module:function"),
        (["nothing.py:factory"], "there is no file"),
        ([f"{FILE}:tiny", "--strategy", "zero9"], "unknown strategy name 'zero9'"),
        ([f"{FILE}:tiny", "--steps", "0"], "steps is 0; accepted: 1 or more"),
        ([f"{FILE}:tiny", "--ranks", "0"], "ranks is 0; accepted: 1 or more"),
        ([f"{FILE}:layered", "--strategy", "pipeline", "--ranks", "1"], "a pipeline of 1 stage(s): give --ranks or"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


FACTORIES = """
import torch

def plain_model():
    return torch.nn.Linear(4, 4)

def another_width():
    model = torch.nn.Linear(4, 4)
    return model, lambda m: torch.optim.SGD(m.parameters(), 0.1), [torch.ones(2, 5)], lambda m, b: m(b).sum()
"""


def test_what_users_get_wrong_is_told_in_sentences(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    assert main(["verify", f"{file}:plain_model"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("the factory returned a Linear: return (model, optimizer, batches, loss)"), said
    assert said[-1] == "(--traceback shows all that the ranks raised)"
    assert main(["verify", f"{file}:another_width", "--ranks", "1", "--json"]) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)["error"]
    assert "mat1 and mat2 shapes cannot be multiplied" in found and f"({file}, line 9, in <lambda>)" in found
    assert "Traceback" not in captured.err
    assert main(["verify", f"{file}:another_width", "--ranks", "1", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ranks_that_fail_differently() -> None:
    head = "Traceback (most recent call last):\n"
    mine = f'{head}  File "/a/train.py", line 3, in make\n    x = y\n        ^\nNameError: name y\nis not defined\n'
    chained = f'{head}  File "/b.py", line 1, in f\nKeyError: 1\n\nDuring handling of it:\n\n{mine}'
    said = "NameError: name y\nis not defined (/a/train.py, line 3, in make)"
    assert sentence(mine) == sentence(chained) == said
    assert in_sentences({0: mine, 1: chained}) == said
    assert in_sentences({0: mine}) == f"rank 0: {said}"
    both = in_sentences({0: "ended with signal SIGKILL, without a word", 1: mine, 2: chained})
    assert both == f"rank 0: ended with signal SIGKILL, without a word\nranks 1, 2: {said}"


def test_what_options_ask_for() -> None:
    parser = argparse.ArgumentParser()
    add_verify_command(parser.add_subparsers())
    for words, stage, stages, micro_batches in [
        ("--strategy zero3_offload", 3, 1, None),
        ("--strategy pipeline --ranks 4", 1, 4, None),
        ("--strategy pipeline --ranks 4 --stages 2 --stage 2 --accumulation 3", 2, 2, 3),
    ]:
        config, given = asked(parser.parse_args(["verify", "train.py:factory", *words.split()]))
        assert (config.stage, config.pipeline.stages, config.pipeline.micro_batches) == (stage, stages, micro_batches)
        assert given["accumulation"] == (micro_batches or 1)
    _, given = asked(parser.parse_args(["verify", "train.py:factory", "--dtype", "fp16", "--autocast"]))
    assert (given["compute_dtype"], given["autocast"]) == (torch.float16, torch.bfloat16)


def test_verify_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["verify", "--help"])
    assert info.value.code == 0 and "Exit status: 0" in capsys.readouterr().out


def test_one_process_is_enough() -> None:
    state = torch.get_rng_state()
    report = verify(subjects.tiny, SMALL, ranks=1, steps=2, accumulation=2, compute_dtype=torch.bfloat16)
    assert report.passed and report.ranks == 1, report
    assert torch.equal(torch.get_rng_state(), state)
    report.raise_if_failed()


def test_the_strategies() -> None:
    pytest.importorskip("lightning")
    from zero_strategy.integrations.fabric import ZeroStrategy as FabricStrategy
    from zero_strategy.integrations.lightning import PipelineStrategy, ZeroStrategy

    for strategy in (ZeroStrategy(stage=2), FabricStrategy(stage=3, units={"min_numel": 0})):
        report = strategy.verify(subjects.tiny, ranks=1, steps=1)
        assert report.passed and report.stage == strategy.config.stage
    with pytest.raises(ValueError, match=r"pipeline.stages is 2 .*accepted: a divisor of the world size 1"):
        PipelineStrategy(stages=2).verify(subjects.layered, ranks=1)


def test_verify_lightning_module() -> None:
    pytest.importorskip("lightning")
    report = verify(lightning_module, SMALL, ranks=1, steps=2)
    assert report.passed and report.phases[1].phase == "loss", report
    assert report.phases[0].compared == 19, "the net of configure_model, and a bias"
    with pytest.raises(ValueError, match=r"asks its Trainer, and here is none: let the factory return \(model, "):
        verify(lightning_module_with_a_schedule, SMALL, ranks=1)


def lightning_module_with_a_schedule() -> Any:
    module, data = lightning_module()
    module.configure_optimizers = lambda: module.trainer.estimated_stepping_batches
    return module, data


def lightning_module() -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(()))

        def configure_model(self) -> None:
            self.net = subjects.Tiny()

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            loss = subjects.loss_of(self.net, batch) + self.bias**2
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = subjects.optimizer_of(self)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    data = torch.randint(0, subjects.WORDS, (8, subjects.LENGTH + 1))
    return Module(), torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def shared() -> Any:
    return _MODEL, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)], lambda m, x: m(x).sum()


_MODEL = nn.Linear(2, 1)


def test_what_a_factory_must_not_return() -> None:
    model, optimizer, batches, loss = subjects.tiny()
    wrong: list[tuple[Any, str]] = [
        (model, "the factory returned a Tiny"),
        ((model, optimizer), "the factory returned a tuple of 2"),
        ((loss, optimizer, batches, loss), "the factory's model is a function"),
        ((model, optimizer(model), batches, loss), "the factory's optimizer is a AdamW"),
        ((model, optimizer, [], loss), "batches are empty"),
        ((model, optimizer, batches[0], loss), "batches are a Tensor"),
        ({"model": model}, "keys \\['model'\\]"),
    ]
    for value, said in wrong:
        with pytest.raises(ValueError, match=said):
            make_subject(lambda value=value: value, 0, 4)  # type: ignore[misc]
    mapping = {"model": model, "optimizer": optimizer, "batches": iter(batches), "loss": loss}
    assert len(make_subject(lambda: mapping, 0, 4).batches) == 4
    with pytest.raises(ValueError, match="one model twice"):
        verify(shared, {"stage": 2}, ranks=1)
    with pytest.raises(ValueError, match=r"pipeline.stages is 2 .*; accepted: a divisor of the world size 1"):
        verify(subjects.tiny, {"pipeline": {"stages": 2}}, ranks=1)
    with pytest.raises(ValueError, match="at the top of a module"):
        place_of(lambda: None)
    assert load_factory(place_of(subjects.tiny)) is subjects.tiny
    with pytest.raises(ValueError, match="has no 'absent'"):
        load_factory(f"{FILE}:absent")
