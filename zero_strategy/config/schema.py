"""The settings of zero_strategy, with their defaults and accepted values.

`ZeroConfig` can be built in Python, or by `load_config` from a file, a mapping or keywords, or be registered
as a Hydra structured config: ``ConfigStore.instance().store(name="zero", node=ZeroConfig)``.

What a framework owns is no setting here: accumulation, clipping, batch size, mixed precision, the optimizer
and its learning rate stay where Lightning or Accelerate have them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from zero_strategy.config.section import Section, at_least, between, matching, non_empty, one_of, table, within

if TYPE_CHECKING:
    from torch import nn

    from zero_strategy.config.deepspeed.settings import DeepSpeedSettings

_PLANNER = "zero_strategy.planning.memory_plan:plan_model"
"""Where `ZeroConfig.plan` leads, as a name: planning reads settings, and settings stand below it."""
DEFAULT_BUDGET = 0.5
"""What `activation_checkpointing.budget` is where nobody set it, and can be."""


@dataclass
class UnitsConfig(Section):
    """Units that are sharded, gathered and released together: module subtrees, such as transformer blocks."""

    prefix: ClassVar[str] = "units."

    classes: list[str] = field(default_factory=list, metadata=non_empty())
    """Class names whose instances are units, such as ``["LlamaDecoderLayer"]``."""

    patterns: list[str] = field(default_factory=list, metadata=non_empty())
    """fnmatch patterns on module names; matching modules are units, such as ``["model.layers.*"]``."""

    min_numel: int = field(default=8192, metadata=at_least(0))
    """Elements. Candidate modules that were found automatically and hold fewer stay with their parent."""

    may_skip: bool = False
    """Ranks may skip different layers of a ModuleList (LayerDrop, early exits) at stage 3, as at the others. They are
    gathered on all ranks all the same, in the order of their list."""


@dataclass
class MeshConfig(Section):
    """Layout of the ranks: ``replicate`` x ``shard`` x ``tensor`` (x pipeline stages) = world size.

    Several replicas: hybrid sharding.
    """

    prefix: ClassVar[str] = "mesh."

    replicate: int = field(default=1, metadata=at_least(1))
    """Number of replicas of the sharded state (dp_replicate axis), such as the number of nodes."""

    shard: int | None = field(default=None, metadata=at_least(1))
    """Ranks that the state is divided among (dp_shard axis). None: derived, world size / replicate / tensor."""

    tensor: int | None = field(default=None, metadata=at_least(1))
    """Ranks that divide each layer (tensor parallelism by torch's ``parallelize_module``). None: derived from the
    model's DTensors where it is known, else 1."""

    sequence: int = field(default=1, metadata=at_least(1))
    """Neighbouring ranks that divide the tokens of the same sequences (sequence parallelism); they shard the state as
    all data-parallel ranks do."""

    ulysses: int | None = field(default=None, metadata=at_least(1))
    """Of these, ranks that exchange tokens for attention heads; the others pass keys and values round a ring. None:
    derived, all of them."""

    expert: int = field(default=1, metadata=at_least(1))
    """Neighbouring ranks that divide the experts of each layer (expert parallelism): tokens travel to them. All ranks
    have data of their own, and those with the same experts shard these among each other."""


@dataclass
class CommunicationConfig(Section):
    """Messages between ranks."""

    prefix: ClassVar[str] = "communication."

    parameters: str = field(default="values", metadata=one_of("values", "delta", "float8", "autocast"))
    """How ranks get parameters from each other, always with the same bits in the end. "values": as they are. "delta"
    (stages 1 and 2): a lossless code of the bits that a step has changed; in bf16 at learning rates of fine-tuning a
    small part of the bytes, for some time of the processor: for slow links. "float8" (stage 3): weights of torchao's
    tensorwise float8 layers, cast before they are sent instead of after; half the bytes of bf16. "autocast" (stage 3):
    float32 weights that autocast casts to 16 bits, likewise; half the bytes, and no copy of all weights from forward to
    backward."""


@dataclass
class PrecisionConfig(Section):
    """Precision in which state is kept and summed. The framework sets that of the computation."""

    prefix: ClassVar[str] = "precision."

    master_weights: bool = True
    """Keep fp32 copies of parameters of lower precision for the optimizer."""

    gradient_dtype: str = field(default="float32", metadata=one_of("float32", "parameter"))
    """What gradients are accumulated in: ``float32``, or ``parameter`` for the dtype of each parameter."""

    reduce_dtype: str = field(default="float32", metadata=one_of("float32", "gradient"))
    """What gradients are summed in across ranks: ``float32``, or ``gradient`` for the dtype they have."""


@dataclass
class OptimizerConfig(Section):
    """Form of the states of optimizers. The optimizer and its hyper-parameters are your code's."""

    prefix: ClassVar[str] = "optimizer."

    state_bits: int = field(default=32, metadata=one_of(8, 32))
    """Bits of the moments of AdamW, Adam and Lion and of the momentum of SGD. 8: codes with a scale for each block of
    256 elements of a parameter, a quarter of the memory; the same bits at every number of ranks. Parameters of fewer
    than 4096 elements keep 32."""

    keep_32_bits: list[str] = field(default_factory=list, metadata=non_empty())
    """fnmatch patterns of the names of parameters whose states keep 32 bits, such as ``["*embed*"]``."""


@dataclass
class LossScaleConfig(Section):
    """Dynamic loss scaling, in use where the framework trains in fp16."""

    prefix: ClassVar[str] = "loss_scale."

    initial: float = field(default=65536.0, metadata=between(0, math.inf))
    """Factor on the loss at the first step."""

    growth_factor: float = field(default=2.0, metadata=between(1, math.inf))
    """The scale is multiplied by this after ``growth_interval`` steps in a row without overflow."""

    backoff_factor: float = field(default=0.5, metadata=between(0, 1))
    """The scale is multiplied by this after a step that overflowed."""

    growth_interval: int = field(default=2000, metadata=at_least(1))
    """Optimizer steps without overflow before the scale grows."""

    growth_delay: int = field(default=0, metadata=at_least(0))
    """Further steps without overflow that do not count, at the start and after each overflow. DeepSpeed has 1."""

    minimum: float = field(default=1.0, metadata=between(0, math.inf))
    """The scale does not fall below this."""

    hysteresis: int = field(default=1, metadata=at_least(1))
    """The scale falls at the overflow of this number since it last grew, and at every one after that until it grows
    again. 1: at each."""

    consecutive_hysteresis: bool = False
    """Count overflows that leave the scale as it is anew after each step without one, not only when the scale grows."""

    def check(self) -> None:
        """Checks the values, and that the scale starts no lower than its minimum."""
        super().check()
        if self.initial < self.minimum:
            raise ValueError(
                f"loss_scale.initial is {self.initial}; accepted: loss_scale.minimum ({self.minimum}) or more"
            )


@dataclass
class CheckpointConfig(Section):
    """Writing and reading of checkpoints."""

    prefix: ClassVar[str] = "checkpoint."

    max_file_bytes: int = field(default=5_000_000_000, metadata=at_least(1))
    """Bytes of tensor data after which a new file is begun; one larger tensor still goes into one file."""

    layout: str = field(default="auto", metadata=one_of("auto", "shared", "pieces"))
    """How ranks write: ``shared`` into the same files in place, ``pieces`` one file each. ``auto``: pieces where the
    ranks do not see the same directory, and always for URLs."""

    format: str = field(default="directory", metadata=one_of("directory", "file"))
    """What the Trainer's and Fabric's strategies save: a ``directory`` that all ranks write at once, or one ordinary
    ``file`` of Lightning, which rank 0 gathers in host memory and writes while training waits. Plain Lightning and
    ``torch.load`` open files; they hold no random states and no fp32 master weights."""

    asynchronous: bool = True
    """Saves of a framework's own checkpoint callbacks go on in the background from a copy in host memory of this
    rank's share (as many bytes as it writes); where state is offloaded to files, from as many bytes there. What
    `engine.save` does is its caller's choice."""

    while_saving: str = field(default="wait", metadata=one_of("wait", "refuse"))
    """What a save does while another one of the same engine is under way: ``wait`` for it, or ``refuse`` with an
    error on all ranks."""

    bytes_per_second: int = field(default=0, metadata=at_least(0))
    """Bound on the writing speed of each rank in the background. 0: as fast as one thread and the disk are."""

    timeout_seconds: float = field(default=300.0, metadata=between(0, math.inf))
    """Seconds that another rank may show no sign of work during a save before the save fails on all ranks."""

    keep_last: int = field(default=0, metadata=at_least(0))
    """Complete checkpoints that are kept beside a new one, itself included; older ones are removed once it is there.
    0: all. Not with Lightning's ModelCheckpoint, whose ``save_top_k`` decides."""

    keep_every: int = field(default=0, metadata=at_least(0))
    """Checkpoints whose step is a multiple of this are kept however old they are; 0: none. Needs ``keep_last``."""

    frozen: str = field(default="include", metadata=one_of("include", "reference"))
    """Parameters that need no gradient: ``include`` them, or ``reference`` them by a digest, which a model that loads
    the checkpoint must match (for adapters: the base weights then exist once)."""

    random_state: bool = True
    """Give every rank its random state back when a checkpoint is resumed from."""

    preemption_signals: list[str] = field(
        default_factory=lambda: ["SIGTERM", "SIGUSR1"], metadata=one_of("SIGTERM", "SIGUSR1", "SIGUSR2")
    )
    """Signals that let a Trainer save ``preempted.ckpt`` in its ``default_root_dir`` after the next optimizer step,
    and end after SIGTERM. An empty list leaves signals to Lightning."""

    verify: bool = True
    """Compare the checksums of all that is loaded with those that were noted when it was saved."""

    def check(self) -> None:
        """Checks the values, and that ``keep_every`` does not stand alone."""
        super().check()
        if self.keep_every and not self.keep_last:
            raise ValueError(
                f"checkpoint.keep_every is {self.keep_every}, checkpoint.keep_last is 0, which keeps all checkpoints; "
                "set checkpoint.keep_last too"
            )


@dataclass
class OffloadConfig(Section):
    """Places of state that the device has no room for."""

    prefix: ClassVar[str] = "offload."
    scalar: ClassVar[str] = "optimizer"
    booleans: ClassVar[Mapping[bool, str]] = {False: "none"}

    optimizer: str = field(default="none", metadata=one_of("none", "cpu", "nvme"))
    """Where optimizer state and master weights are kept: ``none``: on the device; ``cpu``: in host memory; ``nvme``:
    in files under ``nvme_path``, from which each step reads them and to which it writes them. ``offload: cpu`` in place
    of the section says this, and at stage 3 ``parameters`` as well, as the name ``zero3_offload`` does."""

    optimizer_ratio: float = field(default=1.0, metadata=within(0.0, 1.0))
    """The part of each bucket's optimizer state and master weights that is kept in the optimizer's tier; the rest stays
    on the device, and is updated there."""

    parameters: str = field(default="none", metadata=one_of("none", "cpu", "nvme"))
    """Where stage 3 keeps this rank's part of the parameters; a unit is brought to the device when it is needed."""

    gradients: str | None = field(default=None, metadata=one_of("none", "cpu", "nvme"))
    """Where reduced gradients are kept until the step. None: derived, the optimizer's tier where gradients are reduced
    per micro-batch, ``none`` where they stay whole on the device until the step."""

    activations: str = field(default="none", metadata=one_of("none", "cpu"))
    """Where what autograd keeps inside of units waits for backward: ``none``: on the device; ``cpu``: in host memory,
    brought back one unit ahead. Without effect where the device is the CPU."""

    nvme_path: list[str] = field(default_factory=list, metadata=non_empty())
    """Directories on NVMe drives, or one; with several, state is striped over them. Each rank has files of its own
    there, for the duration of the run."""

    staging_bytes: int = field(default=256 << 20, metadata=at_least(1 << 16))
    """Bytes of host memory of each rank through which state in files passes in a step. More lets larger parts pass."""

    resident_bytes: int = field(default=0, metadata=at_least(0))
    """Bytes of host memory of each rank in which parameters, then reduced gradients, stay whose tier is ``nvme``; what
    does not fit is in files, and optimizer state always is. What stays is neither read nor written in a step."""

    checksums: bool = False
    """Keep a checksum of all that is in files, and compare it whenever it is read: for drives that are suspected of
    changing bytes."""

    probe_seconds: float = field(default=1.5, metadata=at_least(0))
    """Seconds in which the drive is measured at the start, to choose how it is read and written and to say how long a
    step will take. 0: none."""

    def check(self) -> None:
        """Checks the values, and that there is a place for files where one is needed."""
        super().check()
        for key in ("optimizer", "parameters", "gradients"):
            if getattr(self, key) == "nvme" and not self.nvme_path:
                raise ValueError(
                    f"offload.{key} is 'nvme' and offload.nvme_path is empty; give one or several directories on NVMe "
                    "drives, such as offload.nvme_path: [/local_nvme], or for strategy names the environment variable "
                    "ZERO_STRATEGY_NVME_PATH"
                )
        if self.optimizer_ratio != 1.0 and self.optimizer == "none":
            raise ValueError(
                f"offload.optimizer_ratio is {self.optimizer_ratio:g} and offload.optimizer is 'none': set "
                "offload.optimizer: cpu or nvme, or leave the ratio out"
            )
        if self.gradients not in (None, "none") and self.optimizer == "none":
            raise ValueError(
                f"offload.gradients is {self.gradients!r} and offload.optimizer is 'none': gradients that are not on "
                "the device serve an update on the host; set offload.optimizer: cpu or nvme, or leave "
                "offload.gradients out"
            )
        if self.parameters != "none" and self.optimizer == "none":
            raise ValueError(
                f"offload.parameters is {self.parameters!r} and offload.optimizer is 'none': parameters that are not "
                "on the device are updated on the host, with the optimizer's state; set offload.optimizer: cpu or nvme"
            )


@dataclass
class ActivationCheckpointingConfig(Section):
    """Activations that are computed again in backward instead of being kept; the units are those of sharding."""

    prefix: ClassVar[str] = "activation_checkpointing."
    scalar: ClassVar[str] = "mode"
    booleans: ClassVar[Mapping[bool, str]] = {False: "none", True: "full"}

    mode: str = field(default="none", metadata=one_of("none", "full", "selective", "every_n", "budget"))
    """``none``: all are kept; ``full``: of each unit its inputs; ``selective``: those, matrix products and what
    attention gives; ``every_n``: one unit in ``every_n`` as in full; ``budget``: as many units as it takes. May be
    written as ``activation_checkpointing: full``; true is full."""

    every_n: int = field(default=2, metadata=at_least(1))
    """Mode ``every_n``: of so many units one is recomputed, the first of each group."""

    budget: float | None = field(default=None, metadata=between(0, 1))
    """Mode ``budget``: the part of the bytes that units keep in mode ``none`` which they may take at any moment. Units
    are chosen after the first step, by what that step would have kept and computed. None: derived, 0.5, or what is
    taken with all units computed again where that is more."""

    tile_tokens: int = field(default=0, metadata=at_least(0))
    """MLPs and the loss of Hugging Face models over so many tokens at a time, whatever the mode: of an MLP nothing but
    inputs and outputs is kept, and logits are never whole. 0: all at once."""


@dataclass
class PipelineConfig(Section):
    """Division of the layers of a model into pipeline stages, and the order in which stages work."""

    prefix: ClassVar[str] = "pipeline."

    stages: int = field(default=1, metadata=at_least(1))
    """Ranks that one copy of the model is divided among; the world size is a multiple of it."""

    schedule: str = field(
        default="1f1b",
        metadata=matching(
            r"gpipe|1f1b|interleaved_1f1b|zb_h1|interleaved_zb|zbv|auto|csv:.+",
            "'gpipe', '1f1b', 'interleaved_1f1b', 'zb_h1', 'interleaved_zb', 'zbv', 'auto', 'csv:PATH'",
        ),
    )
    """In which order a rank does the forwards and backwards of its micro-batches; ``csv:PATH`` reads a table, ``auto``
    takes what is fastest by measured times and fits. See ``zero-strategy schedule list``."""

    chunks: int | None = field(default=None, metadata=at_least(1))
    """Parts of the model that each rank holds. None: derived, 2 for interleaved schedules and zbv, else 1."""

    micro_batches: int | None = field(default=None, metadata=at_least(1))
    """Micro-batches of an optimizer step. None: derived, the framework's accumulation steps, else ``stages``."""

    partition: str = field(default="parameters", metadata=non_empty())
    """What stages have equal shares of: ``uniform`` (layers), ``parameters``, ``profile`` (measured time), or
    ``type:regex`` (layers whose class name matches)."""

    gather: str = field(default="per_micro_batch", metadata=one_of("per_micro_batch", "per_step"))
    """Stage 3: how often a unit's parameters are gathered. ``per_step`` sends less and holds a stage's parameters
    whole during a step."""

    gather_bytes: int | None = field(default=None, metadata=at_least(0))
    """Stage 3: bytes of full parameters that a rank may hold during a step. Units that fit, in their order, are
    gathered once per step, the others for each micro-batch. None: derived, ``gather`` says it of all units."""

    timeline: str = ""
    """File into which rank 0 writes when which rank did what in each step, for ``zero-strategy schedule show
    --timeline``. Empty: none."""

    def check(self) -> None:
        """Checks the values, and that what divides a model has parts to give."""
        super().check()
        if self.stages == 1 and (self.chunks or 1) > 1:
            raise ValueError(
                f"pipeline.chunks is {self.chunks} and pipeline.stages is 1: one rank holds the whole model; set "
                "pipeline.stages, or leave pipeline.chunks out"
            )


@dataclass
class WatchdogConfig(Section):
    """Detection of ranks that have failed, are gone, or do something else."""

    prefix: ClassVar[str] = "watchdog."
    scalar: ClassVar[str] = "mode"
    booleans: ClassVar[Mapping[bool, str]] = {False: "off", True: "default"}

    mode: str = field(default="default", metadata=one_of("off", "default", "strict"))
    """``default``: ranks compare where they are as soon as one has waited for ``wait_seconds``; ``strict``: before
    each collective as well, which costs a message each; ``off``: a rank waits for ``timeout_seconds``. May be written
    as ``watchdog: strict``."""

    wait_seconds: float = field(default=3.0, metadata=between(0, math.inf))
    """Seconds without any progress before a rank tells the others where it is, and looks for what is wrong."""

    silence_seconds: float = field(default=5.0, metadata=between(0, math.inf))
    """Seconds that a rank may be stopped, or not come back after an exception, before the others give it up. A rank
    that computes is waited for until ``timeout_seconds``."""

    unheard_seconds: float = field(default=60.0, metadata=between(0, math.inf))
    """Seconds that a rank of another host may not be heard of while it is waited for. A third of that is logged. Its
    process cannot be looked at from here, and one long call that keeps the GIL silences a healthy one, too."""


@dataclass
class ReproducibleConfig(Section):
    """Training whose bits do not depend on the number of ranks, their stage, tiers or pipeline stages."""

    prefix: ClassVar[str] = "reproducible."
    scalar: ClassVar[str] = "slots"

    slots: int = field(default=0, metadata=at_least(0))
    """Micro-batches of a step, over all ranks; a multiple of the data-parallel ranks. Samples, random numbers and
    losses belong to a slot of a step, and gradients are summed over slots in one fixed order, in float32. May be
    written as ``reproducible: 8``. 0: ranks have samples and random numbers of their own."""

    seed: int | None = field(default=None, metadata=at_least(0))
    """Of the random numbers of all slots. None: derived from rank 0's generator of torch when the engine is made; a
    checkpoint's takes its place."""


@dataclass
class SurviveConfig(Section):
    """Training that goes on in the same processes when some of them die."""

    prefix: ClassVar[str] = "survive."
    scalar: ClassVar[str] = "enabled"

    enabled: bool = False
    """Go on with the processes that are left, from a copy in memory of the last step, and take new ones in. Needs a
    launcher that starts a lighthouse. May be written as ``survive: true``."""

    wait_seconds: float = field(default=600.0, metadata=at_least(0))
    """Longest wait for others where those who are left cannot go on alone, such as with one stage of a pipeline."""


@dataclass
class AutoConfig(Section):
    """Settings that are chosen for the model, the ranks and the memory that there is."""

    prefix: ClassVar[str] = "auto."
    scalar: ClassVar[str] = "enabled"

    enabled: bool = False
    """Choose what nobody has set: the stage, tiers, how long stage 3 keeps what it has gathered, what is computed again
    in backward, saves in the background, and with ``global_batch`` the rows of a micro-batch. May be written as
    ``stage: auto``."""

    global_batch: int = field(default=0, metadata=at_least(0))
    """Rows of a step, over all ranks, of which micro-batches are made. 0: batches are taken as they come."""

    margin: float = field(default=0.1, metadata=within(0.0, 0.9))
    """Part of the memory that stays free, for gaps between blocks and for what libraries take."""


@dataclass
class DiagnosticsConfig(Section):
    """Record of a run: where the time and the memory of its steps go."""

    prefix: ClassVar[str] = "diagnostics."

    run_dir: str = ""
    """Directory for what every rank records, which ``zero-strategy report`` and ``trace`` read. Empty: nothing is
    recorded, and nothing is measured."""

    every_n_steps: int = field(default=1, metadata=at_least(1))
    """Optimizer steps of which one is recorded. On a GPU a recorded step ends with a wait for the device."""

    memory_every_n_steps: int = field(default=10, metadata=at_least(0))
    """Recorded steps of which one has memory by category. 0: none has."""

    trace_steps: int = field(default=5, metadata=at_least(0))
    """Recorded steps, from the first, of which every interval is kept for ``zero-strategy trace``."""

    flops: bool = True
    """Count the floating-point operations of a forward and backward, once for each shape of batch."""

    peak_tflops: float = field(default=0.0, metadata=at_least(0))
    """What a device can do, for MFU, in 10^12 operations per second. 0: what a table says of the device."""

    measure_peak: bool = False
    """Time matrix products where no table knows the device."""

    log: bool = True
    """Hand the figures of recorded steps to the framework's loggers, under names that begin with ``zero/``."""

    journal: bool = True
    """With ``reproducible.slots``: write a journal of the bits of each step, which ``zero-strategy replay`` reads."""

    journal_weights_every_n_steps: int = field(default=100, metadata=at_least(0))
    """Steps of which the journal has digests of the weights for one. 0: for none but the first."""

    journal_elements: int = field(default=64, metadata=at_least(0))
    """Elements of each unit's output, evenly spread, that the journal looks at. 0: all."""

    journal_factory: str = ""
    """Place of a factory, ``path.py:function``, that makes the same training again, for ``zero-strategy replay``."""


@dataclass
class ZeroConfig(Section):
    """All settings, each with a default. `load_config` reads them from files and mappings as well.

    Example:
        ```python
        config = ZeroConfig(stage=2, activation_checkpointing=ActivationCheckpointingConfig(mode="full"))
        config = load_config({"stage": 2, "activation_checkpointing": "full"})  # the same
        print(config.explain())
        ```
    """

    stage: int = field(default=3, metadata=one_of(0, 1, 2, 3))
    """ZeRO stage. 0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters."""

    units: UnitsConfig = field(default_factory=UnitsConfig)
    """What is sharded, gathered and released together."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the ranks are laid out."""

    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    """What ranks send each other."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Precision in which state is kept and summed."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """In what form states of optimizers are kept."""

    gradient_reduction: str | None = field(default=None, metadata=one_of("per_step", "per_micro_batch"))
    """When gradients are reduced across ranks. None: derived, ``per_step`` for stages 0 and 1 (fewest bytes
    sent), ``per_micro_batch`` for 2 and 3 (no rank holds all gradients)."""

    uneven_batches: str = field(default="error", metadata=one_of("error", "join", "join_active"))
    """Ranks that run out of batches before others: an ``error`` on all ranks, or they count with weight 0 in the mean
    over all ranks (``join``), or over those with a batch (``join_active``)."""

    prefetch: int = field(default=1, metadata=at_least(0))
    """Units that are gathered ahead of their use under stage 3; 0 gathers each when it is needed."""

    reshard_after_forward: bool = True
    """Stage 3: free gathered parameters between forward and backward. False saves a gather, costs memory."""

    reshard_after_backward: bool = True
    """Stage 3: free gathered parameters after backward. False keeps them from their first forward until an optimizer
    steps on them: one gather per step, hidden behind the first forward, and full parameters in between."""

    broadcast_buffers: bool = True
    """Send rank 0's buffers (running statistics of BatchNorm, ...) to all ranks when gradients are reduced and a rank
    may have changed them, as DistributedDataParallel does. False: each rank has its own; checkpoints hold rank 0's."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling."""

    nonfinite_gradients: str = field(default="ignore", metadata=one_of("ignore", "skip", "raise"))
    """A step whose gradients are not all finite, where no loss scale decides: taken (``ignore``), not taken on any
    rank (``skip``), or an error on all of them (``raise``). Costs a pass over the gradients where no norm is taken."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Where state is kept that the device has no room for."""

    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """Which activations are computed again in backward instead of being kept."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How the layers of a model are divided into pipeline stages."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How checkpoints are written."""

    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """How ranks notice that one of them has failed, is gone, or does something else."""

    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    """What is written down of a run."""

    reproducible: ReproducibleConfig = field(default_factory=ReproducibleConfig)
    """The same bits on any number of ranks."""

    survive: SurviveConfig = field(default_factory=SurviveConfig)
    """What happens when processes die."""

    auto: AutoConfig = field(default_factory=AutoConfig)
    """Settings that are chosen for you."""

    elementwise_optimizers: list[str] = field(default_factory=list, metadata=non_empty())
    """Class names of optimizers outside torch.optim that you assert to treat every element on its own, so
    that they can run on slices of parameters."""

    matrix_optimizers: list[str] = field(default_factory=list, metadata=non_empty())
    """Class names of optimizers that need whole matrices, such as Shampoo (Muon needs none of this). At stages 1 to 3
    each matrix then lies in the slice of one rank, its owner, which takes its steps; slices are padded for that."""

    matrix_parameters: list[str] = field(default_factory=list, metadata=non_empty())
    """Shell-style patterns of the names of matrices that share buckets with each other alone; empty: none, or with
    matrix_optimizers all trained ones of two dimensions in units below the root, which leaves embeddings and heads
    out. With matrix_optimizers they choose parameters of any dimensions ("*": all). For Muon beside another optimizer,
    or with offloaded state."""

    fused_optimizers: bool = True
    """Take the steps of torch.optim.Adam, AdamW, SGD and Adagrad in the fused ops, one pass over memory. False, or
    `foreach` or `fused` given to the optimizer, leaves the steps to torch."""

    mmap_threshold: int = field(default=0, metadata=at_least(0))
    """Bytes from which a block of host memory is mapped on its own, in the whole process (mallopt(3)). It goes back to
    the system when it is freed, where glibc's heap keeps gaps, and takes time for its pages. 0: glibc's own rule."""

    timeout_seconds: float = field(default=1800.0, metadata=between(0, math.inf))
    """Seconds until a collective of the process group times out."""

    barrier_seconds: float = field(default=60.0, metadata=between(0, math.inf))
    """Seconds that our own waits on other ranks last at most before they raise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._deepspeed: DeepSpeedSettings | None = None
        self._chosen: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Checks the values, and that parameters are sharded where they are offloaded."""
        super().check()
        if self.offload.parameters != "none" and self.stage != 3:
            raise ValueError(
                f"offload.parameters is {self.offload.parameters!r} at stage {self.stage}, where parameters are whole "
                "on the device; use stage: 3, or offload.parameters: none"
            )
        if self.optimizer.state_bits == 8:
            self._check_state_bits()
        if self.communication.parameters == "delta" and self.stage not in (1, 2):
            raise ValueError(
                f"communication.parameters is 'delta' at stage {self.stage}: only stages 1 and 2 gather parameters "
                "after a step, of which all ranks hold the former values; use one of them, or 'values'"
            )

        if self.communication.parameters in ("float8", "autocast"):
            self._check_coded_parameters()

    def _check_coded_parameters(self) -> None:
        """Raise if parameters are gathered as layers cast them, and another setting has no place for it."""
        for key, wrong, why in (
            ("stage", self.stage != 3, "only stage 3 gathers weights for a forward; use it, or 'values'"),
            ("offload.parameters", self.offload.parameters != "none", "slices are cast where they are computed with"),
            ("reshard_after_backward", self.reshard_after_backward is False, "what stays is gathered once per step"),
            ("units.may_skip", self.units.may_skip, "what is read outside of layers is gathered apart"),
            ("mesh.tensor", (self.mesh.tensor or 1) > 1, "weights are cast whole"),
        ):
            if wrong:
                value = dict(self.settings())[key].value if key != "mesh.tensor" else self.mesh.tensor
                form = self.communication.parameters
                raise ValueError(f"communication.parameters is {form!r}, and {key} is {value!r}: {why}")

    def _check_state_bits(self) -> None:
        """Raise if another setting has no place for states of 8 bits."""
        for key, wrong, why in (
            ("fused_optimizers", not self.fused_optimizers, "steps that are left to torch have no such states"),
            ("mesh.tensor", (self.mesh.tensor or 1) > 1, "blocks are those of whole parameters"),
            ("matrix_optimizers", self.matrix_optimizers, "optimizers of whole matrices have no such states"),
            ("matrix_parameters", self.matrix_parameters, "optimizers of whole matrices have no such states"),
            ("offload.optimizer_ratio", self.offload.optimizer_ratio != 1.0, "scales are not divided between tiers"),
        ):
            if wrong:
                value = self.mesh.tensor if key == "mesh.tensor" else dict(self.settings())[key].value
                raise ValueError(
                    f"optimizer.state_bits is 8, and {key} is {value!r}: {why}; leave one of the two at its default"
                )

    @property
    def deepspeed(self) -> DeepSpeedSettings | None:
        """The DeepSpeed config that this was read from, with what it says about what others own; None: it was none."""
        return self._deepspeed

    @property
    def chosen(self) -> Mapping[str, Any] | None:
        """Figures of the candidates among which settings were chosen (`auto.enabled`); None: none were."""
        return self._chosen

    def origin_of(self, key: str) -> str:
        """Origin of the value of a setting.

        Args:
            key: Full dotted key, such as ``"mesh.shard"``.

        Raises:
            KeyError: If there is no such setting.
        """
        return dict(self.settings())[key].origin

    def asked_records(self) -> str:
        """A clause that names the setting that asks for records of the run; "": none does."""
        if self.diagnostics.run_dir:
            return f"diagnostics.run_dir is {self.diagnostics.run_dir!r}"
        observers = () if self.deepspeed is None else self.deepspeed.observers
        return f"the DeepSpeed JSON has {', '.join(observers)}" if observers else ""

    def plan(self, model: nn.Module | Any, *, world_size: int = 1, **options: Any) -> Any:
        """Memory that every rank of a run would hold, computed before anything is allocated.

        Args:
            model: A module, best built under `torch.device("meta")`; or a `ModelShape`, see `planning.model_shape`.
            world_size: Number of ranks.
            **options: Of `planning.memory_plan.plan_model`: `compute_dtype` (torch.bfloat16, ...), `optimizer`
                (a class name, an `OptimizerState`, a torch optimizer; default "AdamW"), `offload` (an `Offload`),
                `device` ("cpu" or "cuda"; default: what is here), `ranks_per_host` (default: all), `snapshots`
                (default: `checkpoint.asynchronous`), `activations` (bytes to keep free on the device), `tokens` and
                `recompute` (of a micro-batch, for shapes of plain numbers, whose activations are known),
                `accumulation` (micro-batches of a step, all but the last under `no_sync`: at stage 1 full gradients
                are kept for more than one; default: 1), `autocast` (torch.bfloat16, ...: autograd keeps a copy of all
                matrices in it, on each rank).

        Returns:
            The `MemoryPlan`. This is `plan_model` as a method; the function has types.

        Raises:
            ValueError: If the mesh does not fit the ranks, or an option is not accepted; names it.
        """
        return resolve_name(_PLANNER)(model, self, world_size=world_size, **options)

    def explain(self) -> str:
        """A table of all settings: key, value, origin."""
        return table(self.settings())
