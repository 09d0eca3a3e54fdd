"""Train the EAGLE-3 drafter of milepost-tiny on one CPU core; the target's weights stay as they are.

    python train_eagle3.py --run-dir RUN --target ../../src/milepost/assets/milepost-tiny --out DRAFTER

RUN is the folder `train.py` has made: its tokenizer and token ids are read. The data are those of the target,
drawn with another seed. Writes RUN/eagle3.pt, and with `--out FOLDER` a checkpoint of its own: config.json
and model.safetensors. `--export-only` does just that with RUN/eagle3.pt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from eagle3_drafter import Eagle3Config, Eagle3Drafter, distillation
from export import load_exported, write_json
from model import set_bf16_matmuls
from safetensors.torch import save_file
from torch import Tensor, nn
from train import Options
from train_drafter import OPTIONS, DrafterTrainer, Stage, run

PLAN = (
    Stage(8, 128, 240_000, (0.15, 0.40, 0.40, 0.05)),
    Stage(2, 512, 180_000, (0.15, 0.45, 0.40, 0.00)),
    Stage(1, 2048, 60_000, (0.10, 0.65, 0.25, 0.00)),
)
STEP_WEIGHTS = (1.0, 0.7, 0.5)


class Eagle3Trainer(DrafterTrainer):
    """Three guesses in a row."""

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

    def losses(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
        steps = distillation(self.module, self.target, ids, weights, len(STEP_WEIGHTS))
        loss = sum(
            (weight * step.loss for weight, step in zip(STEP_WEIGHTS, steps, strict=True)), torch.zeros(())
        )
        return loss, [step.agreed for step in steps]

    def end_step(self) -> None:
        """No experts, nothing to balance."""


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
    path = arguments.run_dir / "eagle3.pt"
    options = Options(**{**OPTIONS.__dict__, "seed": arguments.seed})
    trainer = Eagle3Trainer(load_exported(arguments.target), arguments.run_dir, PLAN, options)
    if not arguments.export_only:
        set_bf16_matmuls(True)
        parameters = sum(parameter.numel() for parameter in trainer.module.parameters())
        print(f"{parameters:,} parameters")
        run(trainer, arguments.log_every, path)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "config.json", trainer.module.config.hub_config())
        tensors = torch.load(path, weights_only=True)
        file = arguments.out / "model.safetensors"
        stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(stored, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors creates private files
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
