"""The examples for Accelerate, transformers, PEFT and two optimizers learn, and go on from what they saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from bitsandbytes.functional import has_avx512bf16

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.accelerate.warm_launch import run_warm_launch
from tests.integrations.lightning.trainers import join
from tests.launcher import Launcher
from tests.warm import plain_environment, run_warm_script

ROOT = Path(__file__).parents[2]
LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch"]
TWO = ["--config_file", "configs/accelerate/cpu2.yaml"]
SHAPE = ["--block-size=16", "--n-layer=1", "--n-head=2", "--d-model=32"]


def accelerate(folder: str, steps: int, *more: str) -> list[float]:
    import accelerate_gpt

    with fresh_state():
        return accelerate_gpt.main([f"--steps={steps}", f"--save={folder}", *SHAPE, *more])


def accelerate_in_parts(folder: str) -> tuple[list[float], list[float]]:
    whole = accelerate(folder + "/whole", 24)
    half = accelerate(folder + "/half", 12)
    return whole, half + accelerate(folder + "/rest", 12, "--stage=1", f"--resume={folder}/half")


def test_accelerate_example(ranks: Launcher, tmp_path: Path) -> None:
    for whole, resumed in ranks(2)(accelerate_in_parts, str(tmp_path)):
        assert resumed == pytest.approx(whole, abs=1e-4) and len(whole) == 24
        assert whole[-1] < 0.8 * whole[0]
    assert (tmp_path / "rest" / "model.safetensors").is_file()


def transformers_run(folder: str, *more: str) -> list[dict[str, float]]:
    import transformers_gpt

    small = ["--hidden-size=32", "--layers=1", "--block-size=16", "--every=10", f"--folder={folder}"]
    with fresh_state():
        return transformers_gpt.main([*small, *more])


def transformers_in_parts(folder: str) -> tuple[list[float], list[float]]:
    whole = transformers_run(folder + "/whole", "--steps=20")
    transformers_run(folder + "/parts", "--steps=10")
    parts = transformers_run(folder + "/parts", "--steps=20", "--stage=1", "--resume")
    first, second = ([row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (whole, parts))
    return first, second


def test_transformers_example(ranks: Launcher, tmp_path: Path) -> None:
    for whole, resumed in ranks(2)(transformers_in_parts, str(tmp_path)):
        assert resumed == pytest.approx(whole, abs=1e-4) and len(whole) == 2
        assert whole[1] < whole[0] - 0.2
    assert (tmp_path / "parts" / "checkpoint-20").is_dir()


def lora(folder: str, *more: str) -> dict[str, float]:
    import lora_peft

    with fresh_state():
        return lora_peft.main(["--block-size=16", f"--folder={folder}", *more])


def lora_in_parts(folder: str) -> tuple[dict[str, float], dict[str, float]]:
    return lora(folder, "--steps=20"), lora(folder, "--steps=30", "--resume")


def test_lora_example(ranks: Launcher, tmp_path: Path) -> None:
    both = ranks(2)(lora_in_parts, str(tmp_path))
    for first, second in both:
        assert second["before"] == first["before"] and first["after"] < first["before"] - 0.5
        assert second["after"] < first["after"]
    for found in both[0]:
        assert found["loaded"] == pytest.approx(found["after"], abs=1e-4), "the adapter as plain PEFT reads it"


def quantised(folder: str) -> dict[str, float]:
    return lora(folder, "--steps=20", "--quantize=nf4")


def test_qlora_example(ranks: Launcher, tmp_path: Path) -> None:
    found = ranks(2)(quantised, str(tmp_path))
    assert all(each["after"] < each["before"] - 0.5 for each in found)
    near = 1e-3 if has_avx512bf16() else 1e-4  # on such CPUs bitsandbytes' own layers evaluate in bf16
    assert found[0]["loaded"] == pytest.approx(found[0]["after"], abs=near), (
        "the adapter on weights quantised by plain PEFT"
    )


def gan(folder: str, steps: int, *more: str) -> list[float]:
    import gan_two_optimizers

    join()
    small = ["--accelerator=cpu", f"--steps={steps}", "--batch-size=64", f"--save={folder}"]
    return gan_two_optimizers.main([*small, *more])


def gan_in_parts(folder: str) -> tuple[list[float], list[float]]:
    first = gan(folder + "/first", 120)
    return first, gan(folder + "/second", 140, "--strategy=zero1", f"--resume={folder}/first")


def test_gan_example(ranks: Launcher, tmp_path: Path) -> None:
    for first, second in ranks(2)(gan_in_parts, str(tmp_path)):
        assert len(first) == 120 and first[-1] < 0.5 * first[0]
        assert len(second) == 20 and max(second) < 0.6 * first[0], "it goes on from the checkpoint"


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ([*LAUNCH, *TWO, "examples/accelerate_gpt.py", "--steps=2", *SHAPE, "--save"], "checkpoint:"),
        ([*TWO, "examples/transformers_gpt.py", "--steps=2", "--folder"], "a sample:"),
        ([*TWO, "examples/lora_peft.py", "--steps=2", "--folder"], "adapter:"),
        (["examples/gan_two_optimizers.py", "--accelerator=cpu", "--steps=2", "--save"], "checkpoint:"),
    ],
    ids=["accelerate_gpt", "transformers_gpt", "lora_peft", "gan_two_optimizers"],
)
def test_frameworks_as_a_command(words: list[str], last: str, tmp_path: Path) -> None:
    """As the table in examples/README.md starts them; a launcher's processes import everything anew.

    So one example of those for `accelerate launch` is launched, and the others get the environment of a launch: both
    processes of each would import transformers, which takes far longer than the two steps.
    """
    words, env = [*words, str(tmp_path / "run")], plain_environment()
    if words[0] == TWO[0]:
        processes = run_warm_launch(*words, cwd=ROOT, env=env, timeout=200)
    else:
        processes = [run_warm_script(*words, cwd=ROOT, env=env, timeout=200)]
    for done in processes:
        assert done.returncode == 0, done.stdout + done.stderr
    assert sum(done.stdout.count(last) for done in processes) == 1, "by one of the two processes"
