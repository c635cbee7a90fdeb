"""A stand-in for vLLM's server: a plain model in the first rank's process that loads what TRL sends, and generates.

It stands where TRL has `VLLMClient`; what is tested is what reaches it. After each sync its weights are compared, bit
by bit, with those of the trained model as one process has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.conformance import offline


class Server:
    """Stands in for `trl.generation.vllm_client.VLLMClient`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.model = offline.causal_model().eval()
        self._chance = torch.Generator().manual_seed(3)

    def init_communicator(self, device: Any) -> None:
        """Nothing to open: tensors are handed over in the process."""

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Load weights that were announced, in that order, as vLLM's loaders do: `parameter.copy_(loaded)`."""
        places, left = self.model.state_dict(keep_vars=True), list(metadata)
        with torch.no_grad():
            for name, tensor in weights:
                announced = left.pop(0)
                if (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) != tuple(announced):
                    raise AssertionError(f"{name} {tensor.dtype} {tensor.shape} came where {announced} was announced")
                places[name].copy_(tensor)
        if left:
            raise AssertionError(f"{left} did not come")

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **options: Any) -> dict[str, Any]:
        """Sample completions of equal length."""
        found: dict[str, Any] = {"prompt_ids": prompts, "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            for _ in range(n):
                ids, scores = list(prompt), []
                for _ in range(max_tokens):
                    shares = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                    ids.append(int(torch.multinomial(shares.exp(), 1, generator=self._chance)))
                    scores.append([float(shares[ids[-1]])])
                found["completion_ids"].append(ids[len(prompt) :])
                found["logprobs"].append(scores)
        return found


def install() -> None:
    """Let TRL's trainers find this server."""
    from trl.generation import vllm_generation

    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.VLLMClient = Server


def compare_after_syncs(trainer: Any) -> list[int]:
    """Compare weights after every sync of a trainer; gives the numbers of tensors compared so far, one per sync.

    Raises:
        AssertionError: In the training, naming what differs.
    """
    generation, compared = trainer.vllm_generation, list[int]()
    sync = generation.sync_weights

    def checked() -> None:
        sync()
        engine = getattr(trainer, "zero_engine", None)
        state = trainer.model.state_dict() if engine is None else engine.full_state_dict()
        if not trainer.accelerator.is_main_process:
            return
        expected, served = _merged(trainer, state), generation.vllm_client.model.state_dict()
        different = [name for name, tensor in expected.items() if not torch.equal(served[name], tensor)]
        if different or expected.keys() != served.keys():
            raise AssertionError(f"the server has other weights: {different or expected.keys() ^ served.keys()}")
        compared.append(len(expected))

    generation.sync_weights = checked
    return compared


def _merged(trainer: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that inference needs, made in one process by PEFT alone."""
    from peft import PeftModel, get_peft_model

    plain: Any = offline.causal_model()
    if not isinstance(trainer.model, PeftModel):
        plain.load_state_dict(state)
        return dict(plain.state_dict())
    adapted = get_peft_model(plain, trainer.model.peft_config["default"])
    adapted.load_state_dict(state)
    return dict(adapted.merge_and_unload().state_dict())
