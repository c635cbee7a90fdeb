"""`verify --against` as users call it: the command and the guide's example, what scripts may return and must not."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launcher import Launcher
from tests.verify import hand_written as hand
from tests.verify import parallel_model as models
from tests.verify import subjects
from zero_strategy.cli import main
from zero_strategy.verify.against import verify_against, verify_against_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.deepspeed_run import config_of
from zero_strategy.verify.distributed_run import RunOfRank
from zero_strategy.verify.ready_runs import AveragedRun
from zero_strategy.verify.subject import VerifySettings

FILE = str(Path(models.__file__).resolve())
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "verify.md"


def test_the_guides_own_distributed_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    for name, said in (("train.py", "def factory"), ("parallel.py", "class TensorParallel")):
        [block] = [block for block in blocks if said in block]
        (tmp_path / name).write_text(block)
    places = [f"{tmp_path}/train.py:factory", "--against", f"{tmp_path}/parallel.py:TensorParallel"]
    assert main(["verify", *places, "--steps", "2", "--accumulation", "2"]) == 0
    said = capsys.readouterr().out
    assert "parallel.py:TensorParallel on 2 rank(s) against plain torch in one process, within 8 x" in said
    assert re.search(r"^gradient +8 ", said, re.MULTILINE) and "PASSED: 2 step(s)" in said


def test_the_command_against_ddp_says_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{FILE}:net", "--against", "ddp", "--steps", "1", "--clip", "0.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["against"], found["ranks"], found["passed"]) == ("ddp", 2, True)
    assert [phase["phase"] for phase in found["phases"]] == [
        "start", "loss", "gradient", "norm", "optimizer state", "parameter",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--against", "fsdp3"],
            "against 'fsdp3': accepted: ddp, fsdp2, deepspeed, plain, or path.py:function of your",
        ),
        (["--against", "nothing.py:make"], "distributed run 'nothing.py:make': there is no file"),
        (["--against", "ddp", "--strategy", "zero3"], "--strategy zero3 is of this package's trainings; leave it out"),
        (["--against", "ddp", "--stages", "2"], "--stages 2 is of this package's trainings"),
        (["--against", "ddp", "--stage", "3"], "stage is 3, but ddp divides nothing"),
        (["--against", "fsdp2", "--stage", "1"], "stage is 1; accepted for fsdp2: 3, or 2"),
        (
            ["--against", f"{FILE}:net", "--stage", "1"],
            "a stage or a config is of no use for a distributed run of your",
        ),
        (["--against", "ddp", "--autocast", "fp16"], "fp16 scales losses"),
        (["--against", "ddp", "--tolerance", "0"], "tolerance is 0, but the order in which others sum is not known"),
        (["--against", "ddp", "--steps", "0"], "steps is 0; accepted: 1 or more"),
        (["--against", "ddp", "--ranks", "0"], "ranks is 0; accepted: 1 or more"),
    ],
)
def test_the_command_refuses_what_is_not_for_others(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["verify", f"{FILE}:net", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_deepspeed_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{FILE}:net", "--against", "deepspeed"]) == 2
    assert "--against deepspeed needs DeepSpeed itself: pip install deepspeed" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_as_one_process_does(stage: int) -> None:
    report = verify_against(models.net, "deepspeed", ranks=2, stage=stage, steps=2, accumulation=2, clip_norm=0.3)
    assert report.passed, report


def test_the_config_that_deepspeed_gets() -> None:
    settings = VerifySettings(accumulation=4, clip_norm=0.5, compute_dtype=torch.bfloat16)
    config = config_of(settings, 3, {"zero_optimization": {"stage": 1}, "wall_clock_breakdown": True})
    assert config["zero_optimization"] == {"stage": 1} and config["wall_clock_breakdown"]
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 0.5)
    assert config["bf16"] == {"enabled": True} and config_of(settings, 3, {})["zero_optimization"] == {"stage": 3}
    with pytest.raises(ValueError, match=r"gradient_clipping is 1\.0: the verification says it"):
        config_of(settings, 3, {"gradient_clipping": 1.0})
    with pytest.raises(ValueError, match="the config's optimizer is "):
        config_of(settings, 3, {"optimizer": {"type": "Adam"}})


# ------------------------------------------------------------------------------------------------- what scripts return


class Shown:
    """A run that shows what it is told to."""

    def __init__(self, losses: Any = None, **members: Any) -> None:
        self.losses = losses
        for name, value in members.items():
            setattr(self, name, value)

    def backward(self, batches: Any) -> Any:
        return self.losses

    def update(self) -> None:
        pass

    def weights(self) -> dict[str, torch.Tensor]:
        return {}


def test_what_a_distributed_run_must_not_be() -> None:
    wrong: list[tuple[Any, str]] = [
        (None, r"the distributed run is a NoneType: its function\(subject, settings\) returns"),
        (torch.nn.Linear(1, 1), "the distributed run is a Linear"),
        (Shown(reduction="max"), "reduction is 'max'; accepted: mean, sum, tokens"),
        (Shown(reduction="tokens"), "give it tokens"),
        (Shown(data_rank=2, data_ranks=2), r"data rank 2 of 2 on 2 rank\(s\)"),
        (Shown(data_ranks=3), r"data rank 0 of 3 on 2 rank\(s\)"),
    ]
    for made, said in wrong:
        with pytest.raises(ValueError, match=said):
            RunOfRank(made, 0, 2, 2)
    for losses in ([1.0], "ab", {"a": 1, "b": 2}):
        with pytest.raises(ValueError, match="the run's losses are "):
            RunOfRank(Shown(losses), 0, 2, 2).backward([])
    assert RunOfRank(Shown(), 0, 2, 2).backward([]) == {}
    assert list(RunOfRank(Shown(torch.ones(())), 0, 2, 2).backward([])) == ["mean loss"]
    assert len(RunOfRank(Shown([1.0, torch.ones(())]), 0, 2, 2).backward([])) == 2
    with pytest.raises(ValueError, match=r"the run's gradients\(\) returned a list of 0"):
        RunOfRank(Shown(gradients=list), 0, 2, 2).gradients()


class Renamed(AveragedRun):
    """Names have a prefix that the factory's model knows nothing of."""

    def weights(self) -> dict[str, Any]:
        return {f"module.{name}": weight for name, weight in super().weights().items()}


class Unlike(hand.TensorParallel):
    """Ranks state different things."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.data_ranks = 1 + torch.distributed.get_rank()


class Cast(AveragedRun):
    """It shows what it updates in float64, and losses as numbers."""

    def weights(self) -> dict[str, Any]:
        return {name: weight.double() for name, weight in super().weights().items()}

    def backward(self, batches: Any) -> Any:
        return [float(loss) for loss in super().backward(batches)]


class NotFinite(AveragedRun):
    """A gradient overflows."""

    def reduce(self) -> None:
        super().reduce()
        gradient = self.model.get_parameter("layers.1.up.bias").grad
        assert gradient is not None
        gradient[3] = float("nan")


def on_ranks(runs: list[type]) -> list[VerifyReport]:
    return [verify_against_here(models.net, run, VerifySettings(steps=2)) for run in runs]


def refused_on_ranks() -> list[str]:
    found = []
    for run, settings in ((Unlike, {}), (AveragedRun, {"compute_dtype": torch.bfloat16})):
        with pytest.raises(ValueError) as info:
            verify_against_here(models.net, run, VerifySettings(**settings))
        found.append(str(info.value))
    return found


def test_what_ranks_show_is_read_as_it_is_meant(ranks: Launcher) -> None:
    renamed, cast, infinite = ranks(2)(on_ranks, [Renamed, Cast, NotFinite])[0]
    assert renamed.first is not None and renamed.first.step == -1
    assert "no rank shows it; ranks have, for example, 'module.embedding.weight'" in str(renamed)
    assert cast.passed, cast
    assert infinite.first is not None and infinite.first.name == "layers.1.up.bias"
    assert "not finite" in infinite.first.hint
    unlike, masters = ranks(2)(refused_on_ranks)[0]
    assert "rank 0: 0 of 1, mean; rank 1: 0 of 2, mean" in unlike
    assert "AveragedRun keeps no fp32 weights beside torch.bfloat16: use autocast" in masters


def test_one_rank_of_plain_torch_is_the_reference_run_itself() -> None:
    report = verify_against(subjects.tiny, "plain", ranks=1, steps=2)
    assert report.passed and all(phase.equal == phase.compared for phase in report.phases)
    # torch rounds a norm in float32, which one CPU sums in another order than the next.
    assert verify_against(subjects.tiny, "plain", ranks=1, steps=2, clip_norm=0.5).passed
