"""Train the DSpark drafter of milepost-tiny on one CPU core; the target's weights stay as they are.

    python train_block_drafter.py --run-dir RUN --target ../../src/milepost/assets/milepost-tiny --out DRAFTER

RUN is the folder `train.py` has made: its tokenizer and token ids are read. The data are those of the target,
drawn with another seed. Writes RUN/block_drafter.pt, and with `--out FOLDER` a checkpoint of its own:
config.json and model.safetensors. `--export-only` does just that with RUN/block_drafter.pt.
"""

from __future__ import annotations

import dialogues
from block_drafter import BlockConfig, BlockDrafter, distillation
from torch import Tensor, nn
from train_drafter import DrafterTrainer, Stage, command, write_drafter

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


if __name__ == "__main__":
    command(__doc__, BlockTrainer, PLAN, "block_drafter.pt", write_drafter)
