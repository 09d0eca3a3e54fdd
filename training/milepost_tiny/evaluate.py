"""Measure an exported milepost-tiny: text loss, recall by distance, chat, and the negative controls.

    python evaluate.py --model ../../src/milepost/assets/milepost-tiny --run-dir RUN --json evaluation.json

Without ``--run-dir`` the text loss is left out (it needs the held-out plays made by train.py). The recall
cases come from tests/support/recall.py with The Tempest as filler, a play the training never reads. All in
fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import dialogues  # noqa: E402
import numpy as np  # noqa: E402
from export import load_exported  # noqa: E402
from model import KimiDeltaAttention, TinyModel  # noqa: E402
from tests.support.recall import RecallCase, RecallCases  # noqa: E402

DISTANCES = (500, 1000, 2000, 4000)
PREFILL_TOKENS = 1024
MATCH_UNIT = 32
CONTINUATION_TOKENS = 32

States = list[Any]


class Session:
    """A model with its tokenizer and the few operations every measurement needs."""

    def __init__(self, folder: Path) -> None:
        self.model: TinyModel = load_exported(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stop_ids = {
            self.tokenizer.token_to_id(dialogues.IM_END),
            self.tokenizer.token_to_id(dialogues.EOS),
        }
        text = (REPOSITORY / "tests" / "data" / "the_tempest.txt").read_text(encoding="utf-8")
        self.cases = RecallCases(self.encode, self.decode, text)
        self.is_kda = [isinstance(layer.self_attn, KimiDeltaAttention) for layer in self.model.model.layers]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def prefill(self, ids: Sequence[int], states: States | None = None) -> States:
        """States after ``ids``; no logits are computed."""
        for start in range(0, len(ids), PREFILL_TOKENS):
            piece = torch.tensor([list(ids[start : start + PREFILL_TOKENS])])
            _, states = self.model.model(piece, states)
        if states is None:
            raise ValueError("ids is empty: a state needs at least one token")
        return states

    def log_probs(self, ids: Sequence[int], states: States) -> Tensor:
        logits, _ = self.model(torch.tensor([list(ids)]), states)
        return logits[0].log_softmax(-1)

    def greedy(
        self, ids: Sequence[int], states: States | None, num_tokens: int, stop: bool = True
    ) -> list[int]:
        logits, states = self.model(torch.tensor([list(ids)]), states)
        out: list[int] = []
        while True:
            out.append(int(logits[0, -1].argmax()))
            if len(out) == num_tokens or (stop and out[-1] in self.stop_ids):
                return out
            logits, states = self.model(torch.tensor([[out[-1]]]), states)


# ------------------------------------------------------------------------------------------------ measures


def text_loss(
    session: Session, run_dir: Path, row_tokens: int = 512, num_rows: int = 144
) -> dict[str, float]:
    """Held-out plays; the first 64 tokens of each row only give context."""
    ids = np.load(run_dir / "valid_ids.npy").astype(np.int64)
    chars = json.loads((run_dir / "corpus.json").read_text())["valid_chars"]
    starts = np.linspace(0, len(ids) - row_tokens - 1, num_rows).astype(int)
    total = 0.0
    for start in starts:
        row = torch.from_numpy(ids[start : start + row_tokens + 1])[None]
        logits, _ = session.model(row[:, :-1])
        total += float(F.cross_entropy(logits[0, 64:], row[0, 65:]))
    nats = total / len(starts)
    return {"nats_per_token": nats, "bits_per_char": nats / math.log(2) * len(ids) / chars}


def recall_table(
    session: Session, distances: Sequence[int], num_cases: int, first_seed: int = 0
) -> list[dict[str, Any]]:
    """Per distance: the whole greedy answer exact, and the value right when the stem is given."""
    rows = []
    for distance in distances:
        exact = value_right = 0
        misses: list[str] = []
        for seed in range(first_seed, first_seed + num_cases):
            case = session.cases.make(seed, distance)
            states = session.prefill(case.prefix_ids)
            answer = session.greedy(case.question_ids, states, len(case.answer_ids))
            exact += answer == list(case.answer_ids)
            value_right += value_is_right(session, case, states)
            if answer != list(case.answer_ids):
                misses.append(f"{case.fact.answer} -> {session.decode(answer)}")
        rows.append(
            {"distance": distance, "n": num_cases, "exact": exact, "value": value_right, "misses": misses}
        )
        print(f"recall at {distance}: exact {exact}/{num_cases}, value {value_right}/{num_cases}", flush=True)
    return rows


def value_is_right(session: Session, case: RecallCase, states: States) -> bool:
    given = case.question_ids + case.stem_ids
    log_probs = session.log_probs(given + case.value_ids[:-1], states)
    return log_probs[len(given) - 1 :].argmax(-1).tolist() == list(case.value_ids)


def chat_table(session: Session, num_cases: int) -> dict[str, float]:
    """Share of last answers of synthetic dialogues that are exact, by kind of question."""
    kinds: dict[str, Callable[[random.Random], list[dialogues.Segment]]] = {
        "repeat": dialogues.repeat_segments,
        "table": dialogues.table_segments,
        "remember": dialogues.remember_segments,
    }
    result = {}
    for name, make in kinds.items():
        right = 0
        for seed in range(num_cases):
            dialogue = "".join(text for text, _ in make(random.Random(f"{name}/{seed}")))
            prompt, answer = dialogue.rsplit(dialogues.ASSISTANT_START, 1)
            ids = session.encode(dialogues.BOS + dialogues.SYSTEM_TURN + prompt + dialogues.ASSISTANT_START)
            right += session.decode(session.greedy(ids, None, 64)) == answer
        result[name] = right / num_cases
    right = 0
    for question, answer in dialogues.GREETINGS:
        ids = session.encode(
            dialogues.BOS + dialogues.SYSTEM_TURN + dialogues.user_turn(question) + dialogues.ASSISTANT_START
        )
        right += session.decode(session.greedy(ids, None, 64)) == answer + dialogues.IM_END
    result["greeting"] = right / len(dialogues.GREETINGS)
    return result


# ------------------------------------------------------------------------------------------------- damage


@dataclass(frozen=True)
class Restore:
    """What a cache could hand back at a restore point: right, late, early or foreign parts."""

    exact: States  # at the restore point
    unit_early: States  # one match unit before
    token_early: States  # one token before
    foreign: States  # another conversation at the same position


def kda_only(session: Session, states: States, change: Callable[[int, Any], Any]) -> States:
    return [change(i, s) if kda else s for i, (s, kda) in enumerate(zip(states, session.is_kda, strict=True))]


def mla_only(session: Session, states: States, change: Callable[[int, Tensor], Tensor]) -> States:
    return [s if kda else change(i, s) for i, (s, kda) in enumerate(zip(states, session.is_kda, strict=True))]


def with_page(cache: Tensor, page: int, content: Tensor) -> Tensor:
    damaged = cache.clone()
    damaged[:, page * MATCH_UNIT : (page + 1) * MATCH_UNIT] = content
    return damaged


def recurrent_damages(session: Session, restore: Restore) -> dict[str, States]:
    exact = restore.exact
    return {
        "none": exact,
        "KDA state zeroed": kda_only(session, exact, lambda i, s: (s[0] * 0, s[1] * 0)),
        "KDA state of another conversation": kda_only(session, exact, lambda i, s: restore.foreign[i]),
        f"KDA state {MATCH_UNIT} tokens early": kda_only(session, exact, lambda i, s: restore.unit_early[i]),
        "KDA state one token early": kda_only(session, exact, lambda i, s: restore.token_early[i]),
        "conv tail zeroed": kda_only(session, exact, lambda i, s: (s[0] * 0, s[1])),
        "conv tail one token early": kda_only(session, exact, lambda i, s: (restore.token_early[i][0], s[1])),
    }


def attention_damages(session: Session, restore: Restore, page: int) -> dict[str, States]:
    exact, unit = restore.exact, MATCH_UNIT

    def foreign_page(i: int, cache: Tensor) -> Tensor:
        return with_page(cache, page, restore.foreign[i][:, page * unit : (page + 1) * unit])

    def missing_page(i: int, cache: Tensor) -> Tensor:
        return torch.cat([cache[:, : page * unit], cache[:, (page + 1) * unit :]], 1)

    return {
        "attention page missing": mla_only(session, exact, missing_page),
        "attention page zeroed": mla_only(session, exact, lambda i, c: with_page(c, page, c.new_zeros(()))),
        "attention page of another conversation": mla_only(session, exact, foreign_page),
        "attention page written twice": mla_only(
            session, exact, lambda i, c: with_page(c, page, c[:, (page - 1) * unit : page * unit])
        ),
    }


def make_restore(session: Session, ids: Sequence[int], foreign_ids: Sequence[int], point: int) -> Restore:
    """States around ``point``, a multiple of MATCH_UNIT; ``foreign_ids`` must reach that far as well."""
    unit_early = session.prefill(ids[: point - MATCH_UNIT])
    token_early = session.prefill(ids[point - MATCH_UNIT : point - 1], unit_early)
    exact = session.prefill(ids[point - 1 : point], token_early)
    return Restore(exact, unit_early, token_early, session.prefill(foreign_ids[:point]))


def recall_controls(session: Session, num_cases: int, distance: int = 300) -> dict[str, Any]:
    """Recall after damage at the unit boundary right behind the asked fact."""
    right: dict[str, int] = {}
    for seed in range(num_cases):
        case = session.cases.make(seed, distance, match_unit=MATCH_UNIT)
        other = session.cases.make(seed + 10_000, distance + 300)
        point = -(-case.fact_end // MATCH_UNIT) * MATCH_UNIT
        restore = make_restore(session, case.prefix_ids, other.prefix_ids, point)
        damages = recurrent_damages(session, restore)
        damages["all attention pages zeroed"] = mla_only(session, restore.exact, lambda i, cache: cache * 0)
        for name, states in damages.items():
            states = session.prefill(case.prefix_ids[point:], states)
            right[name] = right.get(name, 0) + value_is_right(session, case, states)
    for name, count in right.items():
        print(f"recall, {name}: {count}/{num_cases}", flush=True)
    return {"n": num_cases, "distance": distance, "right": right}


def answer_controls(session: Session, num_cases: int, min_distance: int = 300) -> dict[str, Any]:
    """The value after a restore in mid-answer, one token before it: here the conv tail decides."""
    right: dict[str, int] = {}
    for seed in range(num_cases):
        kind = ("colour", "home", "owner")[seed % 3]
        case = session.cases.make_for_answer_restore(seed, min_distance, match_unit=MATCH_UNIT, kind=kind)
        other = session.cases.make(seed + 10_000, 2 * case.distance_tokens)
        ids = case.prompt_ids + case.stem_ids
        restore = make_restore(session, ids, other.prompt_ids, len(ids) - 1)
        for name, states in recurrent_damages(session, restore).items():
            answer = session.greedy(ids[-1:], states, len(case.value_ids))
            right[name] = right.get(name, 0) + (answer == list(case.value_ids))
    for name, count in right.items():
        print(f"mid-answer, {name}: {count}/{num_cases}", flush=True)
    return {"n": num_cases, "min_distance": min_distance, "right": right}


def continuation_controls(session: Session, num_prompts: int, prompt_tokens: int = 512) -> dict[str, Any]:
    """Greedy continuation and log-probabilities of held-out text after damage at the end of the prompt."""
    changed: dict[str, int] = {}
    shift: dict[str, list[float]] = {}
    for seed in range(num_prompts):
        rng = random.Random(f"continuation/{seed}")
        ids = session.encode("[BOS]") + session.cases.filler(rng, prompt_tokens + MATCH_UNIT)
        foreign = session.encode("[BOS]") + session.cases.filler(rng, prompt_tokens)
        restore = make_restore(session, ids, foreign, prompt_tokens)
        rest = ids[prompt_tokens : prompt_tokens + MATCH_UNIT]
        damages = recurrent_damages(session, restore)
        damages.update(
            attention_damages(session, restore, page=rng.randrange(1, prompt_tokens // MATCH_UNIT))
        )
        damages["right restore, other cut"] = session.prefill(ids[:prompt_tokens])
        clean = session.greedy(rest[:1], restore.exact, CONTINUATION_TOKENS, stop=False)
        clean_log_probs = session.log_probs(rest, restore.exact)
        for name, states in damages.items():
            text = session.greedy(rest[:1], states, CONTINUATION_TOKENS, stop=False)
            changed[name] = changed.get(name, 0) + (text != clean)
            distance = (session.log_probs(rest, states) - clean_log_probs).abs().max()
            shift.setdefault(name, []).append(float(distance))
    table = {
        name: {
            "changed": changed[name],
            "min_shift": min(shift[name]),
            "median_shift": float(np.median(shift[name])),
        }
        for name in changed
    }
    for name, row in table.items():
        print(f"continuation, {name}: {row}", flush=True)
    return {"n": num_prompts, "table": table}


def compare_with_transformers(session: Session, folder: Path, num_tokens: int = 512) -> dict[str, Any]:
    """The same files in an implementation this project did not write."""
    from transformers import AutoModelForCausalLM

    other, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    drafter = f"model.layers.{session.model.config.num_layers}."  # published models load without it as well
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith(drafter)]
    if info["missing_keys"] or unexpected:
        raise ValueError(f"tensor names differ: {info}")
    case = session.cases.make(0, num_tokens)
    ids = torch.tensor([list(case.prompt_ids)])
    ours, theirs = session.model(ids)[0], other(ids).logits
    return {
        "tokens": ids.shape[1],
        "max_abs_logit_difference": float((ours - theirs).abs().max()),
        "max_abs_logit": float(theirs.abs().max()),
        "max_abs_log_prob_difference": float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()),
        "same_argmax": bool((ours.argmax(-1) == theirs.argmax(-1)).all()),
    }


def gate_statistics(session: Session) -> list[dict[str, float]]:
    """How long each KDA layer remembers: log decay per step on held-out text."""
    result = []
    x = session.model.model.embed_tokens(torch.tensor([session.cases.filler(random.Random("gates"), 512)]))
    for layer in session.model.model.layers:
        attention = layer.self_attn
        if isinstance(attention, KimiDeltaAttention):
            hidden = layer.input_layernorm(x)
            decay = attention.f_b_proj(attention.f_a_proj(hidden)) + attention.dt_bias
            decay = decay.view(-1, attention.heads, attention.dim)
            g = -attention.A_log[0].exp() * F.softplus(decay)
            per_channel = -g.mean(0).flatten()
            result.append(
                {
                    "strongest": float(g.min()),
                    "median_per_channel": float(per_channel.median()),
                    "share_of_channels_over_1000_tokens": float((per_channel < 1e-3).float().mean()),
                }
            )
        x, _ = layer(x)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=REPOSITORY / "src/milepost/assets/milepost-tiny")
    parser.add_argument("--run-dir", type=Path, help="for the text loss")
    parser.add_argument("--cases", type=int, default=100, help="recall cases per distance")
    parser.add_argument("--first-seed", type=int, default=0, help="of the recall cases")
    parser.add_argument("--control-cases", type=int, default=40)
    parser.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES))
    parser.add_argument(
        "--transformers", action="store_true", help="also compare with transformers' kimi_linear"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    session = Session(arguments.model)
    figures: dict[str, Any] = {}
    with torch.no_grad():
        if arguments.run_dir:
            figures["text"] = text_loss(session, arguments.run_dir)
            print(figures["text"], flush=True)
        figures["recall"] = recall_table(session, arguments.distances, arguments.cases, arguments.first_seed)
        if arguments.control_cases:
            figures["chat"] = chat_table(session, arguments.control_cases)
            print(figures["chat"], flush=True)
            figures["recall_controls"] = recall_controls(session, arguments.control_cases)
            figures["answer_controls"] = answer_controls(session, arguments.control_cases)
            figures["continuation_controls"] = continuation_controls(session, arguments.control_cases)
        figures["gates"] = gate_statistics(session)
        if arguments.transformers:
            figures["transformers"] = compare_with_transformers(session, arguments.model)
            print(figures["transformers"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
