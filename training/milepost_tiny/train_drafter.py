"""Train the draft module of milepost-tiny on one CPU core; the target's weights stay as they are.

    python train_drafter.py --run-dir RUN --target ../../src/milepost/assets/milepost-tiny

RUN is the folder `train.py` has made: its tokenizer and token ids are read. The data are those of the target,
drawn with another seed. Writes RUN/drafter.pt, and with `--out FOLDER` adds the module to an exported
checkpoint: `mtp.safetensors`, the index and `num_nextn_predict_layers` in config.json. `--export-only` does
just that with RUN/drafter.pt.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafter import MtpModule, distillation
from export import DRAFTER_FILE, FP32_SUFFIXES, load_exported, write_json
from model import SparseMoe, TinyModel, set_bf16_matmuls
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import Options, make_optimisers

import data


@dataclass(frozen=True)
class Stage:
    """``tokens`` tokens in batches of ``rows`` x ``row_tokens``; mix = (text, recall, chat, dense)."""

    rows: int
    row_tokens: int
    tokens: int
    mix: tuple[float, float, float, float]


PLAN = (
    Stage(8, 128, 200_000, (0.15, 0.40, 0.40, 0.05)),
    Stage(2, 512, 160_000, (0.15, 0.45, 0.40, 0.00)),
    Stage(1, 2048, 60_000, (0.10, 0.65, 0.25, 0.00)),
)
STEP_WEIGHTS = (1.0, 0.6)
"""Of the first guess and of the one made from it."""
OPTIONS = Options(seed=0, adamw_lr=3e-3, muon_lr=0.02, warmup_steps=20, decay_share=0.6)


class DrafterTrainer:
    """Holds target, module, optimisers and position. What is trained, and how, is in four methods.

    Attributes:
        step_weights: of the first guess and of those made from it.
    """

    step_weights = STEP_WEIGHTS

    def __init__(self, target: TinyModel, run_dir: Path, plan: tuple[Stage, ...], options: Options) -> None:
        tokenizer = Tokenizer.from_file(str(run_dir / "tokenizer.json"))
        self.factory = data.DocumentFactory(tokenizer, np.load(run_dir / "train_ids.npy"))
        self.target, self.plan, self.options = target.requires_grad_(False).eval(), plan, options
        torch.manual_seed(options.seed)
        self.rng = random.Random(options.seed + 1000)
        self.module = self.make_module()
        self.muon, self.adamw = make_optimisers(self.module, options)
        self.step = self.tokens = 0
        self.total = sum(stage.tokens for stage in plan)

    def make_module(self) -> nn.Module:
        """What is trained, with its initial values."""
        module = MtpModule(self.target.config)
        module.start_from(self.target)
        return module

    def losses(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
        """The weighted loss, and per guess the share of rows in which module and target agree."""
        steps = self.guesses(ids, weights)
        loss = sum(
            (weight * step.loss for weight, step in zip(self.step_weights, steps, strict=True)),
            torch.zeros(()),
        )
        return loss, [step.agreed for step in steps]

    def guesses(self, ids: Tensor, weights: Tensor) -> list[Any]:
        """Loss and agreement of each guess."""
        return distillation(self.module, self.target, ids, weights, len(self.step_weights))

    def end_step(self) -> None:
        """After the weights have moved: experts are balanced, where there are any."""
        for part in self.module.modules():
            if isinstance(part, SparseMoe):
                part.rebalance(self.options.balance_rate)

    def stage(self) -> Stage | None:
        """The stage at the present number of tokens, None at the end."""
        end = 0
        for stage in self.plan:
            end += stage.tokens
            if self.tokens < end:
                return stage
        return None

    def rate(self) -> float:
        """Learning-rate factor: warm-up, constant, linear fall."""
        options = self.options
        fall = min(1.0, max(0.0, (1 - self.tokens / self.total) / options.decay_share))
        warm = min(1.0, (self.step + 1) / options.warmup_steps)
        return warm * (options.final_lr_share + (1 - options.final_lr_share) * fall)

    def train_step(self, stage: Stage) -> tuple[float, list[float]]:
        """See `losses`."""
        batch, batch_weights = self.factory.batch(self.rng, stage.rows, stage.row_tokens, stage.mix)
        ids, weights = torch.from_numpy(batch)[:, :-1], torch.from_numpy(batch_weights)[:, 1:]
        factor = self.rate()
        for optimiser, lr in ((self.adamw, self.options.adamw_lr), (self.muon, self.options.muon_lr)):
            for group in optimiser.param_groups:
                group["lr"] = lr * factor
        loss, agreed = self.losses(ids.contiguous(), weights)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {self.step}: lower the learning rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.options.clip_norm)
        for optimiser in (self.adamw, self.muon):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.end_step()
        self.step += 1
        self.tokens += ids.numel()
        return float(loss.detach()), agreed


def run(trainer: DrafterTrainer, log_every: int, path: Path) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f} %"),
        TimeRemainingColumn(),
    )
    started, sums = time.process_time(), torch.zeros(())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=trainer.total)
        while (stage := trainer.stage()) is not None:
            loss, agreed = trainer.train_step(stage)
            sums = sums + torch.tensor([loss, *agreed])
            bar.update(task, completed=trainer.tokens, description=f"loss {loss:.2f}")
            if trainer.step % log_every == 0 or trainer.stage() is None:
                count = (trainer.step - 1) % log_every + 1
                mean_loss, *shares = (sums / count).tolist()
                sums = torch.zeros(())
                seconds = time.process_time() - started
                bar.console.print(
                    f"step {trainer.step} {trainer.tokens / 1e6:.2f}M tokens {seconds:.0f}s of one core, "
                    f"loss {mean_loss:.3f}, agrees "
                    + " ".join(f"{share:.3f}" for share in shares)
                    + f", lr x{trainer.rate():.3f}"
                )
                torch.save(trainer.module.state_dict(), path)
    torch.save(trainer.module.state_dict(), path)


def add_to_checkpoint(module_tensors: dict[str, Tensor], folder: Path) -> None:
    """The module as the layer behind the decoder's last one, in a file of its own that the index names."""
    config_path, index_path = folder / "config.json", folder / "model.safetensors.index.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {
        prefix + name: tensor.to(
            torch.float32 if name.endswith(FP32_SUFFIXES) else torch.bfloat16
        ).contiguous()
        for name, tensor in module_tensors.items()
    }
    save_file(tensors, folder / DRAFTER_FILE, metadata={"format": "pt"})
    (folder / DRAFTER_FILE).chmod(0o644)
    index = json.loads(index_path.read_text(encoding="utf-8"))
    weight_map = {
        name: file for name, file in index["weight_map"].items() if not name.startswith(prefix)
    } | dict.fromkeys(tensors, DRAFTER_FILE)
    stored = [
        tensor for file in sorted(set(weight_map.values())) for tensor in load_file(folder / file).values()
    ]
    total = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    write_json(
        index_path, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    write_json(config_path, config | {"num_nextn_predict_layers": 1})


def command(
    description: str | None,
    trainer: type[DrafterTrainer],
    plan: tuple[Stage, ...],
    file_name: str,
    export: Callable[[DrafterTrainer, dict[str, Tensor], Path], None],
) -> None:
    """The command line of a drafter's training.

    Args:
        file_name: of the trained weights, in the run's folder.
        export: puts them into the folder of `--out`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="tokenizer.json and train_ids.npy of train.py"
    )
    parser.add_argument("--target", type=Path, required=True, help="exported checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint that gets the drafter")
    parser.add_argument("--plan", type=Path, help="JSON list of stages instead of the built-in plan")
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.add_argument(
        "--export-only", action="store_true", help="no training: write what was trained to --out"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = arguments.run_dir / file_name
    if arguments.plan is not None:
        stages = json.loads(arguments.plan.read_text())
        plan = tuple(Stage(**{**stage, "mix": tuple(stage["mix"])}) for stage in stages)
    options = replace(OPTIONS, seed=arguments.seed)
    trained = trainer(load_exported(arguments.target), arguments.run_dir, plan, options)
    if not arguments.export_only:
        set_bf16_matmuls(True)
        parameters = sum(parameter.numel() for parameter in trained.module.parameters())
        print(f"{parameters:,} parameters")
        run(trained, arguments.log_every, path)
    if arguments.out is not None:
        export(trained, torch.load(path, weights_only=True), arguments.out)
        print(f"wrote {arguments.out}")


def write_drafter(trained: DrafterTrainer, tensors: dict[str, Tensor], folder: Path) -> None:
    """A checkpoint of its own: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", trained.module.config.hub_config())
    path = folder / "model.safetensors"
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates private files


def main() -> None:
    command(
        __doc__,
        DrafterTrainer,
        PLAN,
        "drafter.pt",
        lambda _, tensors, folder: add_to_checkpoint(tensors, folder),
    )


if __name__ == "__main__":
    main()
