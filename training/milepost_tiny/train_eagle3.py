"""Train the EAGLE-3 drafter of milepost-tiny on one CPU core; the target's weights stay as they are.

    python train_eagle3.py --run-dir RUN --target ../../src/milepost/assets/milepost-tiny --out DRAFTER

RUN is the folder `train.py` has made: its tokenizer and token ids are read. The data are those of the target,
drawn with another seed. Writes RUN/eagle3.pt, and with `--out FOLDER` a checkpoint of its own: config.json
and model.safetensors. `--export-only` does just that with RUN/eagle3.pt.
"""

from __future__ import annotations

from typing import Any

from eagle3_drafter import Eagle3Config, Eagle3Drafter, distillation
from torch import Tensor, nn
from train_drafter import DrafterTrainer, Stage, command, write_drafter

PLAN = (
    Stage(8, 128, 240_000, (0.15, 0.40, 0.40, 0.05)),
    Stage(2, 512, 180_000, (0.15, 0.45, 0.40, 0.00)),
    Stage(1, 2048, 60_000, (0.10, 0.65, 0.25, 0.00)),
)


class Eagle3Trainer(DrafterTrainer):
    """Three guesses in a row."""

    step_weights = (1.0, 0.7, 0.5)

    def make_module(self) -> nn.Module:
        config = self.target.config
        drafter = Eagle3Drafter(
            Eagle3Config(
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
            )
        )
        drafter.start_from(self.target)
        return drafter

    def guesses(self, ids: Tensor, weights: Tensor) -> list[Any]:
        return distillation(self.module, self.target, ids, weights, len(self.step_weights))


if __name__ == "__main__":
    command(__doc__, Eagle3Trainer, PLAN, "eagle3.pt", write_drafter)
