"""Train the DSpark drafter of milepost-tiny on one CPU core; the target's weights stay as they are.

    python train_block_drafter.py --run-dir RUN --target ../../src/milepost/assets/milepost-tiny --out DRAFTER

RUN is the folder `train.py` has made: its tokenizer and token ids are read. The data are those of the target,
drawn with another seed. Writes RUN/block_drafter.pt, and with `--out FOLDER` a checkpoint of its own:
config.json and model.safetensors. `--export-only` does just that with RUN/block_drafter.pt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dialogues
import torch
from block_drafter import BlockConfig, BlockDrafter, distillation
from export import load_exported, write_json
from model import set_bf16_matmuls
from safetensors.torch import save_file
from torch import Tensor, nn
from train import Options
from train_drafter import OPTIONS, DrafterTrainer, Stage, run

PLAN = (
    Stage(16, 128, 700_000, (0.15, 0.40, 0.40, 0.05)),
    Stage(4, 512, 560_000, (0.15, 0.45, 0.40, 0.00)),
    Stage(1, 2048, 240_000, (0.10, 0.65, 0.25, 0.00)),
)
TOKENS_PER_ANCHOR = 6
PLACE_DECAY = 0.8
"""Weight of a guess relative to the one before it."""
CONFIDENCE_WEIGHT = 0.2


class BlockTrainer(DrafterTrainer):
    """Blocks behind random anchors."""

    def make_module(self) -> nn.Module:
        config = self.target.config
        drafter = BlockDrafter(
            BlockConfig(
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
                # Nothing else is ever padded.
                mask_token_id=self.factory.tokenizer.token_to_id(dialogues.PAD),
            )
        )
        drafter.start_from(self.target)
        return drafter

    def losses(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
        num_anchors = ids.shape[1] // TOKENS_PER_ANCHOR
        made = distillation(self.module, self.target, ids, weights, num_anchors, PLACE_DECAY)
        return made.guesses + CONFIDENCE_WEIGHT * made.confidence, made.agreed

    def end_step(self) -> None:
        """No experts, nothing to balance."""


def write_checkpoint(tensors: dict[str, Tensor], config: BlockConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config.hub_config())
    path = folder / "model.safetensors"
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates private files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="tokenizer.json and train_ids.npy of train.py"
    )
    parser.add_argument("--target", type=Path, required=True, help="exported checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the drafter's checkpoint")
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.add_argument(
        "--export-only", action="store_true", help="no training: write what was trained to --out"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = arguments.run_dir / "block_drafter.pt"
    options = Options(**{**OPTIONS.__dict__, "seed": arguments.seed})
    trainer = BlockTrainer(load_exported(arguments.target), arguments.run_dir, PLAN, options)
    if not arguments.export_only:
        set_bf16_matmuls(True)
        parameters = sum(parameter.numel() for parameter in trainer.module.parameters())
        print(f"{parameters:,} parameters")
        run(trainer, arguments.log_every, path)
    if arguments.out is not None:
        config = trainer.module.config
        write_checkpoint(torch.load(path, weights_only=True), config, arguments.out)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
