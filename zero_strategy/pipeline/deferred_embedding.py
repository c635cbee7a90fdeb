"""Weight gradients of an output embedding, put off to the end of a pipeline's batch.

The last stage's projection onto the vocabulary is its largest matrix product. While other stages wait for its backward
it computes the gradient of the input only and keeps, per micro-batch, the layer's input and the gradient of its output:

    micro-batch 0, 1, ...        embedding_activation_buffer[i], grad_output_buffer[i]
    the drain                    weight.main_grad += grad_output[i]^T @ input[i], micro-batch by micro-batch

With sequence parallelism each tensor-parallel rank has a part of the input's rows. The whole input of micro-batch i + 1
is gathered while the product of micro-batch i is computed, in two scratch buffers that take turns.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.distributed.pending import PendingWork
from zero_strategy.distributed.script_groups import ScriptCommunicator
from zero_strategy.memory.scratch import GlobalMemoryBuffer


class DrainConfig(Protocol):
    """What of a model's configuration the drain looks at."""

    sequence_parallel: bool
    """Each rank's inputs are a part of the rows."""
    gradient_accumulation_fusion: bool
    """Gradients are added to `weight.main_grad`, and not handed to autograd."""


def prepare_input_tensors_for_wgrad_compute(grad_output: Tensor, all_gathered_input: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors as contiguous matrices: (rows, output features) and (rows, input features).

    Args:
        grad_output: (sequence, batch, output features) or (rows, output features); any strides.
        all_gathered_input: The same with input features.

    Raises:
        ValueError: If they have different numbers of rows.
    """
    gradients = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    inputs = all_gathered_input.reshape(-1, all_gathered_input.shape[-1]).contiguous()
    if len(gradients) != len(inputs):
        raise ValueError(
            f"grad_output of shape {list(grad_output.shape)} has {len(gradients)} rows, but the input of shape "
            f"{list(all_gathered_input.shape)} has {len(inputs)}"
        )
    return gradients, inputs


@torch.no_grad()
def drain_embedding_wgrad_compute(
    config: DrainConfig,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: nn.Parameter,
    tp_group: dist.ProcessGroup | None,
    *,
    scratch: GlobalMemoryBuffer | None = None,
) -> None:
    """Add the gradients of all micro-batches to `weight.main_grad`, and empty both lists. A collective of the group.

    Args:
        config: With `sequence_parallel` and `gradient_accumulation_fusion`.
        embedding_activation_buffer: Inputs of the layer, one per micro-batch.
        grad_output_buffer: Gradients of its outputs, one per micro-batch.
        weight: (output features, input features), with a `main_grad` of that shape that gradients are added to.
        tp_group: The ranks that have parts of the inputs, if `sequence_parallel`; None: this rank alone.
        scratch: Where whole inputs are gathered; default: a buffer that ends with the call.

    Raises:
        ValueError: If gradients are not accumulated in `main_grad`, or the lists have different lengths.
    """
    main_grad = _main_grad(config, weight)
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ValueError(
            f"{len(embedding_activation_buffer)} inputs in embedding_activation_buffer, but {len(grad_output_buffer)} "
            "gradients in grad_output_buffer; there must be one of each per micro-batch"
        )
    gathers = _Gathers(ScriptCommunicator(tp_group if config.sequence_parallel else None), scratch)
    coming = gathers.begin(embedding_activation_buffer)
    while coming is not None:
        work, whole = coming
        work.wait()
        coming = gathers.begin(embedding_activation_buffer)  # under way while this product is computed
        _accumulate(main_grad, *prepare_input_tensors_for_wgrad_compute(grad_output_buffer.pop(0), whole))


class _Gathers:
    """Whole inputs, one micro-batch after the other, in two buffers that take turns."""

    def __init__(self, ranks: ScriptCommunicator, scratch: GlobalMemoryBuffer | None) -> None:
        self._ranks, self._scratch = ranks, scratch
        self._turn = 0

    def begin(self, inputs: list[Tensor]) -> tuple[PendingWork, Tensor] | None:
        """Take the first input out of the list and begin to gather it; None if there is none."""
        if not inputs:
            return None
        part = inputs.pop(0)
        if self._ranks.size == 1:
            return PendingWork([]), part
        if self._scratch is None:
            self._scratch = GlobalMemoryBuffer(device=part.device)
        shape = (part.shape[0] * self._ranks.size, *part.shape[1:])
        whole = self._scratch.get_tensor(shape, part.dtype, f"embedding-drain-{self._turn}")
        self._turn = 1 - self._turn
        flat = whole.view(-1)
        flat.chunk(self._ranks.size)[self._ranks.rank].copy_(part.reshape(-1))
        return self._ranks.all_gather(flat), whole


def _main_grad(config: DrainConfig, weight: nn.Parameter) -> Tensor:
    if not config.gradient_accumulation_fusion:
        raise ValueError(
            "drain_embedding_wgrad_compute adds to weight.main_grad, which config.gradient_accumulation_fusion=False "
            "says is not in use; leave the weight's gradient to autograd then"
        )
    found = getattr(weight, "main_grad", None)
    if not isinstance(found, Tensor) or found.shape != weight.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else "none"
        raise ValueError(f"weight of shape {list(weight.shape)} needs a main_grad of that shape; it has {shape}")
    return found


def _accumulate(main_grad: Tensor, gradients: Tensor, inputs: Tensor) -> None:
    """main_grad += gradients^T @ inputs, in the precision of `main_grad`, whatever that of the others is."""
    if gradients.dtype == main_grad.dtype:
        main_grad.addmm_(gradients.t(), inputs)
    elif gradients.is_cuda and main_grad.dtype == torch.float32:
        main_grad.add_(torch.mm(gradients.t(), inputs, out_dtype=torch.float32))  # no copies in float32
    else:
        main_grad.addmm_(gradients.t().to(main_grad.dtype), inputs.to(main_grad.dtype))
