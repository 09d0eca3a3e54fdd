"""Milepost beside llama.cpp, vLLM for CPUs and transformers: the same requests, one core, one run.

    make bench-peers                               # installs what it can into .peers/, then runs this
    python bench/peers.py                          # what is installed already
    python bench/peers.py --quick                  # small sizes: does everything work?

All serve one random Qwen3.5 text checkpoint (9 Gated DeltaNet and 3 attention layers, 142.5 M parameters,
`bench/make_model.py --family qwen3_5`) in bfloat16, each pinned to the same core with one thread, and take
turns: every repetition asks each of them once, so that a slow minute of the machine meets all. Processor
time is that of the server's process tree; wall time is in brackets. Prompts are random token ids, no two
alike. The floor of a decode step is the bytes it must move over the read bandwidth measured in the same run.

Phases: `speed` (prefill, decode of one and of eight), `chat` (the conversations of `bench/multiturn.py`),
`exactness` (an MLA model's cold prompt, where `milepost serve` has `--exactness`) and `load`
(`bench/loading.py`). An engine that is not installed is a row that says how to install it.

Exits with 1 if a measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import loading
import peer_install
import torch
from common import RESULTS, ROOT, calibration_ms, console, print_machine, print_table, write_json
from make_model import SIZES, make_size
from peer_measures import (
    Chat,
    Ids,
    Sample,
    Turn,
    Workload,
    decode,
    decode_batch,
    expected_computed,
    prefill,
    summarize,
)
from peer_report import (
    CHAT_16,
    CHAT_32,
    CHAT_BARE,
    CHAT_LLAMA,
    CHAT_LLAMA_FREE,
    COLUMNS,
    LLAMA,
    OURS,
    OURS_FREE,
    OURS_INT4,
    TRANSFORMERS,
    VLLM,
    Results,
    plot,
    rows,
)
from peer_servers import Engine, Server, Setup, gguf_of, llama, milepost, transformers, vllm

import kernels
from milepost.engine.chat import common_prefix
from milepost.models.description import describe, read_spec

MODELS = peer_install.PEERS / "models"
LOGS = peer_install.PEERS / "logs"
GGUF_TYPES = {"bfloat16": "bf16", "float32": "f32"}
AGREEMENT_TOKENS = 16
PHASES = ("speed", "chat", "exactness", "load")


class Run:
    """One run: what is asked, who is there, and what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results()
        self.failures: list[str] = []
        self.setup = Setup(
            model=cached_model(options.size),
            dtype=options.dtype,
            core=options.core,
            max_model_len=options.max_model_len,
            max_num_seqs=8,
            cache_bytes=1 << 30,
        )
        self.vocabulary = read_spec(self.setup.model).vocab_size
        self._ids = Ids(self.vocabulary, seed=0)
        self.help = serve_help()

    def engines(self) -> list[Engine]:
        """Those of the speed phase."""
        found = [milepost(OURS), vllm(VLLM), llama(LLAMA), transformers(TRANSFORMERS)]
        for name, option, value in (
            (OURS_INT4, "--quantization", "int4"),
            (OURS_FREE, "--exactness", "off"),
        ):
            if option in self.help:
                found.append(milepost(name, option, value))
            else:
                self.results.missing[name] = f"this build of milepost has no {option}"
        return self._present(found)

    def _present(self, engines: list[Engine]) -> list[Engine]:
        present = []
        for engine in engines:
            reason = engine.missing()
            if reason is None and self.options.engines:
                kind = engine.name.split(",")[0].split()[0]
                reason = None if kind in self.options.engines else "left out by --engines"
            if reason is None:
                present.append(engine)
            else:
                self.results.missing[engine.name] = reason
        return present

    @contextmanager
    def servers(self, engines: list[Engine], setup: Setup) -> Iterator[list[Server]]:
        """Starts them one after another; what does not start is noted and left out."""
        with ExitStack() as stack:
            started = []
            for engine in engines:
                console.print(f"starting {engine.name}", highlight=False)
                try:
                    if engine.name.startswith(LLAMA):
                        convert(setup)
                    log = LOGS / f"{engine.name.replace(' ', '-').replace(',', '')}.log"
                    server = Server(engine, setup, log)
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    self._failed(engine.name, error)
                    continue
                stack.callback(server.stop)
                started.append(server)
            yield started

    def _failed(self, name: str, error: Exception) -> None:
        self.results.missing[name] = str(error)
        self.failures.append(f"{name}: {error}")
        console.print(f"failed: {name}: {error}", highlight=False)

    def measure(
        self, server: Server, name: str, work: Callable[[], Sample], kept: list[Sample] | None
    ) -> None:
        """Takes a sample; without `kept` it is thrown away, for warming up."""
        try:
            sample = work()
        except (OSError, RuntimeError) as error:
            self._failed(f"{server.engine.name}, {name}", error)
            return
        if kept is not None:
            kept.append(sample)
            console.print(
                f"{server.engine.name}: {name} {sample.cpu_ms_per_token:.3f} ms/token "
                f"({sample.wall_ms_per_token:.3f} wall)",
                highlight=False,
            )

    def speed(self) -> None:
        options, results = self.options, self.results
        spec, description = read_spec(self.setup.model), describe(self.setup.model, dtype=options.dtype)
        context = options.context_tokens + options.decode_tokens // 2
        results.step_bytes = kernels.decode_step_bytes(spec, description, context)
        with self.servers(self.engines(), self.setup) as servers:
            for server in servers:
                results.start_s[server.engine.name] = server.start_s
                results.speed[server.engine.name] = {"prefill": [], "decode": [], "batch": []}
            self._compare_answers(servers)
            for repetition in range(options.repetitions + 1):
                warm_up = repetition == 0
                with pinned(self.setup.core):
                    bandwidth = kernels.read_bandwidth()
                if not warm_up:
                    results.bandwidth.append(bandwidth)
                for measure in ("prefill", "decode", "batch"):
                    # Who goes first changes, so that nobody always follows the same neighbour.
                    turn = repetition % len(servers) if servers else 0
                    for server in servers[turn:] + servers[:turn]:
                        self._speed_sample(server, measure, warm_up)

    def _compare_answers(self, servers: list[Server]) -> None:
        """How many greedy tokens each engine has in common with the first: do they run the same model?

        They round differently, and random weights make near-ties, so that answers part sooner or later.
        """
        prompt = self._ids.take(self.options.context_tokens)
        first: list[int] | None = None
        for server in servers:
            try:
                tokens = server.complete(prompt, AGREEMENT_TOKENS).token_ids
            except (OSError, RuntimeError) as error:
                self._failed(f"{server.engine.name}, first answer", error)
                continue
            first = first or tokens
            same = common_prefix(array("I", first), array("I", tokens))
            self.results.agreement[server.engine.name] = same
            console.print(f"{server.engine.name}: {same} of {AGREEMENT_TOKENS} first tokens agree")

    def _speed_sample(self, server: Server, measure: str, warm_up: bool) -> None:
        options, take = self.options, self._ids.take
        kept = None if warm_up else self.results.speed[server.engine.name][measure]
        work: dict[str, Callable[[], Sample]] = {
            "prefill": lambda: prefill(server, take(options.prefill_tokens)),
            "decode": lambda: decode(server, take(options.context_tokens), options.decode_tokens),
            "batch": lambda: decode_batch(
                server, [take(options.context_tokens) for _ in range(8)], options.decode_tokens
            ),
        }
        if measure == "batch" and not server.engine.is_concurrent:
            return
        self.measure(server, measure, work[measure], kept)

    def chat(self) -> None:
        workload = Workload(num_turns=self.options.turns, num_system_tokens=self.options.system_tokens)
        marker = {"prompt_cache_breakpoints": [workload.num_system_tokens]}
        variants: dict[str, tuple[Engine, Callable[[int], dict[str, Any]], int]] = {
            CHAT_32: (milepost(CHAT_32, "--prefix-match-unit", "32"), lambda _: marker, 32),
            CHAT_16: (milepost(CHAT_16, "--prefix-match-unit", "16"), lambda _: marker, 16),
            CHAT_BARE: (milepost(CHAT_BARE), lambda _: {}, 32),
            VLLM: (vllm(VLLM), lambda _: {}, 32),
            CHAT_LLAMA: (llama(CHAT_LLAMA), lambda conversation: {"id_slot": conversation}, 1),
            CHAT_LLAMA_FREE: (llama(CHAT_LLAMA_FREE), lambda _: {}, 1),
        }
        present = self._present([engine for engine, _, _ in variants.values()])
        with self.servers(present, self.setup) as servers:
            chats = {
                server.engine.name: Chat(server, workload, self.vocabulary, variants[server.engine.name][1])
                for server in servers
            }
            for server in servers:
                self.measure(server, "warm-up", lambda s=server: prefill(s, self._ids.take(600)), None)
            for turn in range(workload.num_turns):
                for conversation in range(workload.num_conversations):
                    self._chat_turn(chats, conversation, turn)
            for name, chat in chats.items():
                self.results.chats[name] = summarize(chat.turns)
                self.results.expected[name] = expected_computed(chat.turns, variants[name][2])

    def _chat_turn(self, chats: dict[str, Chat], conversation: int, turn: int) -> None:
        for name, chat in list(chats.items()):
            try:
                done: Turn = chat.ask(conversation, turn)
            except (OSError, RuntimeError) as error:
                self._failed(name, error)
                del chats[name]
                continue
            console.print(
                f"{name}: {'AB'[conversation] if conversation < 2 else conversation}{turn + 1}: "
                f"{done.num_prompt:,} tokens, {done.num_computed:,} computed, first token after "
                f"{1e3 * done.ttft_s:.0f} ms",
                highlight=False,
            )

    def exactness(self) -> None:
        """A cold prompt of an MLA model, exact and not."""
        if "--exactness" not in self.help:
            self.results.missing["exactness of an MLA model"] = "this build of milepost has no --exactness"
            return
        setup = Setup(
            *(cached_model(self.options.mla_size), self.options.dtype, self.options.core),
            *(self.options.mla_tokens + 64, 1, 1 << 30),
        )
        vocabulary = read_spec(setup.model).vocab_size
        ids = Ids(vocabulary, seed=1)
        kinds = ("exact", "prompt", "off")
        with self.servers([milepost(f"mla {kind}", "--exactness", kind) for kind in kinds], setup) as servers:
            for repetition in range(min(3, self.options.repetitions) + 1):
                for server in servers:
                    kept = self.results.mla.setdefault(server.engine.name.split()[1], [])
                    count = self.options.mla_tokens if repetition else min(600, self.options.mla_tokens)
                    self.measure(
                        *(server, "prefill", lambda s=server, n=count: prefill(s, ids.take(n))),
                        kept if repetition else None,
                    )

    def load(self) -> None:
        directory = cached_model(self.options.load_size)
        self.results.load = loading.ratios(loading.measure(directory, min(3, self.options.repetitions), None))


def cached_model(size: str) -> Path:
    """A checkpoint of a named size, made once."""
    directory = MODELS / size
    if not (directory / "model.safetensors.index.json").exists():
        make_size(directory, size)
    return directory


def convert(setup: Setup) -> None:
    """The GGUF file of a checkpoint, made once."""
    output = gguf_of(setup.model, setup.dtype)
    if output.exists():
        return
    script, source = ROOT / "bench" / "peer_gguf.py", peer_install.llama_source()
    subprocess.run(
        [
            *(str(peer_install.python_of("llama")), "-P", str(script)),
            *(str(setup.model), f"{output}.part"),
            *("--source", str(source), "--outtype", GGUF_TYPES[setup.dtype]),
        ],
        check=True,
    )
    Path(f"{output}.part").rename(output)


def serve_help() -> str:
    """Options that `milepost serve` knows."""
    command = [sys.executable, "-m", "milepost", "serve", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """This thread on a core, then where it was."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--engines", nargs="+", help=f"only these, of {OURS} {VLLM} {LLAMA} {TRANSFORMERS}")
    parser.add_argument("--size", choices=sorted(SIZES), default="qwen-142m")
    parser.add_argument("--mla-size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--load-size", choices=sorted(SIZES), default="qwen-1gb")
    parser.add_argument("--dtype", choices=sorted(GGUF_TYPES), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--context-tokens", type=int, default=256, help="prompt of the decode measurements")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system-tokens", type=int, default=2000)
    parser.add_argument("--mla-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--core", type=int, default=cores[-1], help="for the servers; the client takes others"
    )
    parser.add_argument("--quick", action="store_true", help="small model and sizes, one repetition")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--plot", type=Path, help="default: beside the results")
    options = parser.parse_args()
    if options.quick:
        options.size = options.load_size = "qwen-7m"
        options.mla_size = "5m"
        options.repetitions, options.turns = 1, 2
        options.prefill_tokens, options.context_tokens, options.decode_tokens = 256, 64, 24
        options.system_tokens, options.mla_tokens, options.max_model_len = 150, 512, 2048
    return options


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    calibration = calibration_ms()
    others = os.sched_getaffinity(0) - {options.core}
    if others:
        os.sched_setaffinity(0, others)
    run = Run(options)
    settings = {name: str(value) for name, value in vars(options).items()}
    for phase in options.phases:
        getattr(run, phase)()
        # After each: what was measured is not lost if a later phase is ended.
        write_json(options.json, "peers", calibration, {"options": settings, **run.results.document()})
    print_table(
        f"processor time of the server, wall time in brackets; {options.dtype}, one core",
        *(COLUMNS, [row.cells() for row in rows(run.results)]),
    )
    for name, reason in sorted(run.results.missing.items()):
        console.print(f"not measured: {name}: {reason}", highlight=False)
    print_machine(calibration)
    plot(run.results, options.plot or options.json.with_suffix(".png"))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
