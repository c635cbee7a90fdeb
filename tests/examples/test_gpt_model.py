"""The example's model: ties, shapes, causality, initialisation."""

import pytest
import torch

from gpt_lightning import OptimConfig, decay_groups
from gpt_model import GPT, GPTConfig

TINY = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=8)


def test_tied_weight_is_one_parameter() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names and "head.weight" not in names
    assert "head.weight" in model.state_dict()


def test_logits_shape_and_loss_of_an_untrained_model() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    windows = torch.randint(256, (3, TINY.block_size + 1))
    assert model(windows[:, :-1]).shape == (3, TINY.block_size, 256)
    assert model.loss(windows).item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)


def test_later_bytes_do_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(256, (1, 10))
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_position_matters() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.equal(one[0, -1], other[0, -1])


def test_materialising_from_meta_gives_the_same_values_as_building() -> None:
    torch.manual_seed(0)
    built = GPT(TINY)
    with torch.device("meta"):
        model = GPT(TINY)
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
    model.head.weight = model.embedding.weight  # to_empty unties
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.testing.assert_close(model.state_dict(), built.state_dict(), rtol=0, atol=0)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="n_head=6"):
        GPTConfig(block_size=8, n_layer=1, n_head=3, d_model=8)


def test_decay_groups_hold_each_parameter_once() -> None:
    model = GPT(TINY)
    matrices, vectors = decay_groups(model, weight_decay=0.1)
    assert [matrices["weight_decay"], vectors["weight_decay"]] == [0.1, 0.0]
    grouped = [id(p) for group in (matrices, vectors) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert len(vectors["params"]) == 2 * (2 * TINY.n_layer + 1)


def test_schedule_warms_up_and_decays() -> None:
    config = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4, weight_decay=0.0, betas=(0.9, 0.95))
    scales = [config.scale(step, total=20) for step in range(21)]
    assert scales[:4] == [0.25, 0.5, 0.75, 1.0]
    assert scales[4] == 1.0 and scales[-1] == pytest.approx(0.1)
    assert scales[4:] == sorted(scales[4:], reverse=True)
