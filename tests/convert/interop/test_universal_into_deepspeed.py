"""The real DeepSpeed loads what is written here: at stages 1, 2 and 3, on two ranks, in fp32, bf16 and fp16."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.convert.interop.deepspeed_ranks import run
from tests.convert.interop.deepspeed_workers import GROUPS, Net, groups_of, loss_of
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor
from zero_strategy.convert.universal import write

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


class Trained:
    """Three steps in plain torch, in fp32; the model's own weights in another dtype are casts."""

    def __init__(self, groups: int = 2, steps: int = 3) -> None:
        self.net = Net()
        self.optimizer = torch.optim.AdamW(groups_of(self.net, groups))
        self.step(steps)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.net).backward()
            self.optimizer.step()

    def state(self, dtype: torch.dtype) -> PortableState:
        named = dict(self.net.named_parameters())
        names = {id(p): name for name, p in named.items()}
        kinds: dict[str, dict[str, StoredTensor]] = {
            kind: {name: StoredTensor.of(name, self.optimizer.state[p][kind].clone()) for name, p in named.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        if dtype != torch.float32:
            kinds["master"] = {name: StoredTensor.of(name, p.clone()) for name, p in named.items()}
        weights = {name: StoredTensor.of(name, p.detach().to(dtype)) for name, p in named.items()}
        weights["scale"] = StoredTensor.of("scale", self.net.scale)
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
            for g in self.optimizer.param_groups
        ]
        scalars: dict[str, Any] = {name: {"step": 3.0} for name in named}
        return PortableState(
            weights=weights,
            aliases={"out.weight": "embed.weight"},
            optimizers=[PortableOptimizer(kinds, scalars, {"step": "float32"}, groups)],
            counters={"global_steps": 3, "global_samples": 24, "skipped_steps": 1},
            loss_scaler={"scale": 64.0, "good_steps": 3, "skipped": 1} if dtype == torch.float16 else None,
            client_state={"note": "hello", "table": [1, 2]},
        )


# stage, dtype, param groups
CASES = [
    (1, "float32", 2), (2, "float32", 2), (3, "float32", 2), (3, "float32", 1),
    (1, "bfloat16", 2), (3, "bfloat16", 2), (2, "float16", 2), (3, "float16", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], list[dict[str, Any]]]:
    paths = {}
    for dtype, groups in sorted({case[1:] for case in CASES}):
        root = tmp_path_factory.mktemp(f"{dtype}-{groups}")
        write(Trained(groups).state(getattr(torch, dtype)), root / "step3_universal")
        paths[f"{dtype}-{groups}"] = str(root)
    ranks = run("tests.convert.interop.deepspeed_workers:load_universal", 2, {"paths": paths, "cases": CASES})
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeed_has_every_bit(results: Any, case: tuple[int, str, int]) -> None:
    trained = Trained(case[2])
    for found in results[case]:
        assert found["path"] and found["client_state"] == {"note": "hello", "table": [1, 2]}
        assert found["counters"] == (3, 24, 1) and set(found["steps"]) == {3.0}
        for name, parameter in trained.net.named_parameters():
            assert torch.equal(found["loaded"]["fp32"][name], parameter)
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found["loaded"][kind][name], trained.optimizer.state[parameter][kind])
        assert [{k: group[k] for k in GROUPS[0]} for group in found["groups"]] == list(GROUPS[: case[2]])
        assert {tuple(group["betas"]) for group in found["groups"]} == {(0.9, 0.999)}
        assert case[1] != "float16" or found["scale"] == 64.0


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "float32"], ids=str)
def test_the_next_step_is_that_of_plain_training(results: Any, case: tuple[int, str, int]) -> None:
    trained = Trained(case[2], steps=4)
    for found in results[case]:
        # At stage 3, several groups would share one tensor of the step count, so that it has to be a number.
        assert found["numbers"] == (case[0] == 3 and case[2] == 2)
        for name, parameter in trained.net.named_parameters():
            torch.testing.assert_close(found["stepped"]["fp32"][name], parameter.detach(), rtol=1e-6, atol=1e-7)
            moment = trained.optimizer.state[parameter]["exp_avg_sq"]
            torch.testing.assert_close(found["stepped"]["exp_avg_sq"][name], moment, rtol=1e-5, atol=1e-10)
