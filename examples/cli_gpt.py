"""Train the byte-level GPT by LightningCLI, sharded by ZeRO: every setting is a key of a YAML file and a flag.

``python examples/cli_gpt.py fit --config configs/cli_gpt.yaml --trainer.strategy.init_args.stage 2``

``--trainer.strategy zero2`` takes a stage with its defaults; ``python examples/cli_gpt.py fit --help`` lists the rest.
"""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

import zero_strategy  # noqa: F401 - makes "zero1", "zero2" and "zero3" known to Lightning
from gpt_lightning import GPTModule
from stdlib_data import EvenWindows, RandomWindows, read_corpus


class Windows(LightningDataModule):
    """Windows of the standard library's source.

    Args:
        block_size: Bytes per window; the model's.
        batch_size: Windows per rank and micro-batch.
        train_windows: Windows in one epoch.
        val_windows: Windows to validate on.
        seed: Of the places of the training windows.
    """

    def __init__(
        self, block_size: int, batch_size: int = 8, train_windows: int = 2**20, val_windows: int = 512, seed: int = 1234
    ) -> None:
        super().__init__()
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.train_windows, self.val_windows = train_windows, val_windows

    def setup(self, stage: str) -> None:
        """Read the text; each rank for itself."""
        self.corpus = read_corpus()

    def train_dataloader(self) -> DataLoader[Tensor]:
        """In the order of their index; Lightning deals them out to the ranks."""
        windows = RandomWindows(self.corpus.train, self.train_windows, self.block_size, self.seed)
        return DataLoader(windows, self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """A fixed set."""
        return DataLoader(EvenWindows(self.corpus.validation, self.val_windows, self.block_size), self.batch_size)


class GPTCLI(LightningCLI):
    """Asks for the length of a window once."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The data's windows are as long as the model's."""
        parser.link_arguments("model.model", "data.block_size", compute_fn=lambda model: model["block_size"])


def main(args: ArgsType = None) -> LightningCLI:
    """Run the command line (or ``args``). Lightning starts this script once more for every further rank."""
    overwrite = {"overwrite": True}  # the config.yaml that a run leaves beside its checkpoints
    return GPTCLI(GPTModule, Windows, seed_everything_default=1234, save_config_kwargs=overwrite, args=args)


if __name__ == "__main__":
    main()
