"""The engine of a script that trains a pipeline: whole batches at a time, over all stages.

    module = PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine, _, _, _ = initialize(model=module, config=config, training_data=dataset)
    for _ in range(steps):
        loss = engine.train_batch()

A batch is `gradient_accumulation_steps()` micro-batches: they are what fills the pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from zero_strategy.checkpoint.agreement import catalog_of
from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.compat.deepspeed.scripts.data import RepeatingLoader
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.convert.portable import PortableReader, PortableState, StoredTensor
from zero_strategy.fsdp.shard_storage import PARAMETERS
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.executor import BatchFunction, Run
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.topology import PipelineParallelGrid
from zero_strategy.pipeline.transport import PipelineError
from zero_strategy.runtime.torch_private import tree_map


class ScriptPipelineEngine(ScriptEngine):
    """This rank's stages of a model in training. All ranks of the world call the same methods.

    Args:
        zero: The engine that owns the rank's part of the model, with the optimizer attached.
        *args: See `ScriptEngine`.
        **kwargs: See `ScriptEngine`.

    Attributes:
        training_dataloader: What `train_batch()` reads of, if that is a loader.
        data_iterator: What `train_batch()` reads next, where no other iterator is given.
        total_loss: Of the last `train_batch`, on the rank of the last stage: the mean over its micro-batches.
        agg_train_loss: Of the last `train_batch`: what that returned.
        first_output_send: Without effect, for scripts that set it where shapes change: each message tells its shapes.
        pipe_recv_buf: Without effect, likewise.
    """

    zero: PipelineEngine
    module: PipelineModule

    def __init__(self, zero: PipelineEngine, *args: Any, **kwargs: Any) -> None:
        super().__init__(zero, *args, **kwargs)
        self.data_iterator: Iterator[Any] | None = None
        self.total_loss: Tensor | None = None
        self.agg_train_loss: Tensor | None = None
        self._losses: list[Tensor] = []
        self._stepping, self._compute_loss = False, True
        self._micro_batches: int | None = None
        self.first_output_send: bool = True
        self.pipe_recv_buf: Any = None
        self._checkpoint: str | None = None

    # ---- training ----

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train with one batch: all micro-batches forward and backward, one step of the optimizer and the scheduler.

        Args:
            data_iter: Gives `gradient_accumulation_steps()` pairs of inputs and labels. The ranks of the first and the
                last stage read it, and must get the same; it is remembered. None: the iterator of the last call, or
                what `set_dataiterator`, `set_dataloader` or the training data of `initialize` say.

        Returns:
            The mean loss over the micro-batches and the data-parallel ranks, 0-d, on every rank.

        Raises:
            DataEndedError: On all ranks, if the data ends early; a StopIteration. Nothing was changed.
            PipelineError: If another rank fails, is gone or out of step; names its stage.
            RuntimeError: If there is no optimizer, gradients are disabled, or the script steps the scheduler, too.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine has no optimizer; pass one to initialize(), or name one in the config")
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() under torch.no_grad() could not train; eval_batch() evaluates")
        self.zero.model.moved.check("train_batch()")
        self._scheduled.check(self.lr_scheduler, self.optimizer)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        data = _Missing() if self.data_iterator is None else self.data_iterator
        self.module.train()
        self._losses.clear()
        try:
            loss = self.zero.forward_backward(data, self.micro_batches, forwarded=self._note_loss)
        except BaseException:
            self.zero.reset()
            self.zero_grad()
            raise
        self._stepping = True
        try:
            self._update(self.optimizer, {})
        finally:
            self._stepping = False
        self.micro_steps += self.micro_batches
        self.tput_timer.micro_step_count += self.micro_batches
        self.agg_train_loss = loss.to(self.device)
        self.total_loss = torch.stack(self._losses).mean() if self._losses else None
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches forward, in evaluation mode and without gradients.

        Args:
            data_iter: As for `train_batch`; not remembered.
            return_logits: Return the last stage's outputs, too.
            compute_loss: False: outputs take the place of losses, and batches need no labels.
            reduce_output: "avg": the mean over micro-batches and data-parallel ranks; None: a list, one of each
                micro-batch of this pipeline.
            bcast_loss: Give the losses to all stages; outputs are never sent.
            num_micro_batches: How many; default: those of a training batch.

        Returns:
            Losses or outputs; None on ranks that do not have them. With `return_logits`, a pair: them, and the outputs
            on ranks of the last stage (of one micro-batch, or a list of those of several), None on others.

        Raises:
            DataEndedError: On all ranks, if the data ends early; a StopIteration.
            ValueError: If `reduce_output` is another word, or there is no loss.
        """
        if reduce_output is not None and str(reduce_output).lower() != "avg":
            raise ValueError(f"reduce_output {reduce_output!r} is not done; accepted: 'avg', None")
        if num_micro_batches is not None and num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {num_micro_batches}; accepted: 1 or more")
        self.zero.model.moved.check("eval_batch()", (PARAMETERS,))
        data = _iterator(data_iter, "eval_batch")
        count = num_micro_batches or self.micro_batches
        run = self._evaluate(data, count, compute_loss, return_logits or not compute_loss)
        there = self.is_last_stage()
        if not compute_loss:
            found = self._reduced(run.outputs, reduce_output) if there else None
        elif run.loss is None:
            raise ValueError("batches have no labels, so there is no loss; ask with compute_loss=False for outputs")
        elif reduce_output is None:
            found = self._all_losses(count, bcast_loss)
        else:
            found = run.loss.to(self.device) if there or bcast_loss else None
        if not return_logits:
            return found
        outputs: Any = None
        if there:
            outputs = run.outputs[0] if len(run.outputs) == 1 else run.outputs
        return found, outputs

    def _evaluate(self, data: Iterable[Any], micro_batches: int, compute_loss: bool, keep: bool) -> Run:
        executor = self.zero.executor
        self.module.eval()
        self._compute_loss = compute_loss
        self._losses.clear()
        loss_fn = executor.loss_fn
        try:
            executor.loss_fn, executor.keep_outputs = loss_fn if compute_loss else None, keep
            return self.zero.evaluate(data, micro_batches, forwarded=self._note_loss)
        finally:
            executor.loss_fn, executor.keep_outputs = loss_fn, True

    def _reduced(self, outputs: list[Any], how: str | None) -> Any:
        """Outputs of the last stage's rank: as they are, or their mean over its data-parallel group."""
        if how is None:
            return outputs

        def mean(*leaves: Any) -> Any:
            if not isinstance(leaves[0], Tensor):
                return leaves[0]
            if len({leaf.shape for leaf in leaves}) > 1:
                raise ValueError("outputs of micro-batches differ in shape; take them with reduce_output=None")
            own = torch.stack([leaf.float() for leaf in leaves]).mean(0)
            return torch.stack(self.zero.mesh.control.all_gather_small(own.cpu())).mean(0).to(own.device)

        return tree_map(mean, *outputs)

    def _all_losses(self, count: int, share: bool) -> list[Tensor] | None:
        last = self.is_last_stage()
        losses = torch.stack([loss.cpu().float() for loss in self._losses]) if last else torch.zeros(count)
        if share:
            placement = self.module.placement
            losses = self.zero.pipe.all_gather_small(losses)[placement.rank_of(placement.stages - 1)]
        return list(losses.to(self.device)) if last or share else None

    def _note_loss(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        if loss is not None:
            self._losses.append(loss)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see `train_batch` and `eval_batch`."""
        _refuse("forward")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see `train_batch` and `eval_batch`."""
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see `train_batch`."""
        _refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see `train_batch`."""
        _refuse("step")

    def no_sync(self) -> NoReturn:
        """Refused: see `train_batch`."""
        _refuse("no_sync")

    def scale(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as `backward` is."""
        _refuse("scale")

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if gradients are being clipped, or the optimizer is stepping: only inside of a `train_batch`."""
        return self._stepping

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        """Refused: each `train_batch` ends with a step."""
        _refuse("set_gradient_accumulation_boundary")

    # ---- data ----

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Let `train_batch()` read this iterator.

        Raises:
            TypeError: If it is no iterator.
        """
        self.training_dataloader = None
        self.data_iterator = None if iterator is None else _iterator(iterator, "set_dataiterator")

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Let `train_batch()` read this loader, from its beginning; at its end, data has ended (`RepeatingLoader`)."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_batch_fn(self, fn: BatchFunction | None) -> None:
        """Let a function make pairs of inputs and labels of what iterators give."""
        if fn is not None and not callable(fn):
            raise TypeError(f"set_batch_fn takes a function, not {fn!r}")
        self.zero.executor.batch_fn = fn

    @property
    def batch_fn(self) -> BatchFunction | None:
        """Function that makes pairs of inputs and labels."""
        return self.zero.executor.batch_fn

    def take_training_data(self, dataset: Dataset[Any]) -> None:
        """Read a dataset again and again, in its order: each pipeline has samples of its own, its ranks the same ones.

        Args:
            dataset: With a length and indices.
        """
        sampler: Any = None
        if hasattr(dataset, "__len__"):
            grid = self.grid
            sampler = DistributedSampler(
                dataset, num_replicas=grid.data_parallel_size, rank=grid.data_parallel_id, shuffle=False
            )
        self.set_dataloader(RepeatingLoader(self.deepspeed_io(dataset, data_sampler=sampler)))

    def reset_activation_shape(self) -> None:
        """Without effect: what stages send may change its shape at any time."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Without effect: boolean masks among what stages send are sent as they are.

        Raises:
            TypeError: If it is no truth value.
        """
        if not isinstance(value, bool):
            raise TypeError(f"set_has_attention_mask takes True or False, not {value!r}")

    # ---- where this rank is ----

    @property
    def grid(self) -> PipelineParallelGrid:
        """This rank's place, and its process groups."""
        return self.module.mpu()

    mpu = grid

    @property
    def num_stages(self) -> int:
        """Ranks of a pipeline."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self.module.stage_id

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch: `gradient_accumulation_steps()`, unless a script has set another number."""
        return self._micro_batches or self.gradient_accumulation_steps()

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"micro_batches must be an integer of 1 or more, not {count!r}")
        self._micro_batches = None if count == self.gradient_accumulation_steps() else count

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch: `train_micro_batch_size_per_gpu()`."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return world_size()

    @property
    def global_rank(self) -> int:
        """This process among them."""
        return world_rank()

    @property
    def dp_world_size(self) -> int:
        """Number of pipelines."""
        return self.grid.data_parallel_size

    @property
    def is_pipe_parallel(self) -> bool:
        """True if a pipeline has several ranks."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if there are several pipelines."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if layers are divided among ranks (tensor parallelism)."""
        return self.grid.model_parallel_size > 1

    def is_first_stage(self) -> bool:
        """True if this rank has the first layers."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """True if this rank has the last layers, which give outputs and losses."""
        return self.module.placement.stages - 1 in self.module.stages

    # ---- weights ----

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The whole model's, on the host of every rank, tied names included."""
        return self.zero.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole model's weights; each rank takes its own.

        Raises:
            ValueError: If names are missing or unexpected (`strict`), or shapes differ.
        """
        tied = catalog_of(self.zero).aliases
        weights = {name: StoredTensor.of(name, value) for name, value in state_dict.items() if name not in tied}
        aliases = {name: first for name, first in tied.items() if name in state_dict}
        state = PortableState(weights=weights, aliases=aliases)
        self.zero.load_weights(PortableReader(state, Path("load_state_dict()")), strict=strict)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """None: a pipeline's weights are in no dict of one rank; `save_checkpoint` and `state_dict` have them all."""
        return None

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any] | str | os.PathLike[str] | None, strict: bool = True, **kwargs: Any
    ) -> None:
        """Load weights from a directory, or from a dict of the whole model's.

        Args:
            state_dict: A checkpoint of any kind, or a state dict. None: the checkpoint that was saved or loaded last.
            strict: Refuse missing and unexpected names.
            **kwargs: Without effect; DeepSpeed has more arguments.

        Raises:
            ValueError: If it is None and there is no such checkpoint, or a directory of bare layer files.
        """
        source = self._checkpoint if state_dict is None else state_dict
        if source is None:
            raise ValueError("load_module_state_dict(None) reads the last checkpoint again, and there is none yet")
        if isinstance(source, Mapping):
            self.load_state_dict(source, strict)
            return
        if any(Path(source).glob("layer_*-model_states.pt")) and not any(Path(source).glob("*mp_rank_*")):
            raise ValueError(
                f"{os.fspath(source)} has the layer files of PipelineModule.save_state_dict(); read them with "
                "load_state_dir() of the module before initialize()"
            )
        self.zero.load_weights(source, strict=strict)

    def save_checkpoint(self, save_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> bool:
        """See `ScriptEngine.save_checkpoint`: of the whole model, for any number of stages."""
        done = super().save_checkpoint(save_dir, *args, **kwargs)
        tag = args[0] if args else kwargs.get("tag")
        self._checkpoint = os.path.join(save_dir, f"global_step{self.global_steps}" if tag is None else str(tag))
        return done

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """See `ScriptEngine.load_checkpoint`: written with any number of stages."""
        path, state = super().load_checkpoint(*args, **kwargs)
        self._checkpoint = path or self._checkpoint
        return path, state


class _Missing:
    """Stand-in for an iterator that is not there: an error once it is read, which not every stage does."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise ValueError("train_batch() has no data here: pass it an iterator, or pass training_data to initialize()")


def _iterator(data: Any, what: str) -> Iterator[Any]:
    """The iterator itself; a loader would begin again at each call."""
    if data is None:
        return _Missing()
    if not hasattr(data, "__next__"):
        raise TypeError(
            f"{what}() takes an iterator, which goes on where the last call has ended, not {type(data).__name__}: pass "
            "iter(loader), or RepeatingLoader(loader)"
        )
    found: Iterator[Any] = data
    return found


def _refuse(what: str) -> NoReturn:
    raise PipelineError(
        f"{what}() of a part of a pipeline does not exist: micro-batches overlap, so a whole batch is run at "
        "once. Call train_batch(), which also steps, or eval_batch()"
    )
