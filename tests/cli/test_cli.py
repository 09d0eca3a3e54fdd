"""The command line over the tensor-less worker, and its errors."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable

import pytest
from rich.console import Console
from tests.engine.tiny_tokenizer import write_model_directory
from tests.server.serving import serving_model

from milepost import __version__
from milepost.cli import main
from milepost.cli.fit import fit_of
from milepost.cli.loading import _progress
from milepost.cli.sizes import format_size, parse_size
from milepost.config import CacheConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.engine import serving
from milepost.engine.serving import ServingOptions
from milepost.engine.speculative import SpeculativeConfig
from milepost.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    """`run("info", "--cache-bytes", "1GiB", stdin="")` -> (status, stdout, stderr)."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["milepost", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("NO_COLOR", "1")
        status = 0
        try:
            main()
        except SystemExit as error:
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> list[ServingOptions]:
    """Commands load the tensor-less model; the options they asked for are collected."""
    seen: list[ServingOptions] = []
    write_model_directory(tmp_path)

    def load(directory, options, progress=None):
        options.cache_config()
        seen.append(options)
        if progress is not None:
            progress(50, 100)
        model, worker, _ = serving_model(tmp_path, cache_bytes=options.cache_bytes, seed=options.seed)
        workers.append(worker)
        return model

    workers: list = []
    monkeypatch.setattr(serving, "load_serving_model", load)
    yield seen
    assert all(worker.closed for worker in workers), "a command left its engine running"


def test_help_and_version_name_every_command(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(command in out for command in ("serve", "chat", "complete", "info"))
    assert run("--version") == (0, f"milepost {__version__}\n", "")


def test_serve_has_the_flags_users_know(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    for flag in (
        "--host", "--port", "--served-model-name", "--max-model-len", "--dtype", "--seed", "--cache-bytes",
        "--prefix-match-unit", "--prefix-cache-retention-interval", "--decode-interval",
        "--max-num-batched-tokens", "--max-num-seqs", "--enable-prefix-caching", "--no-enable-prefix-caching",
        "--max-states-per-path", "--audit-hits",
    ):  # fmt: skip
        assert flag in out, flag


def test_complete(run: Run, tiny: list[ServingOptions]) -> None:
    status, out, err = run("complete", "say {{hello there}}")
    assert (status, out) == (0, "hello there\n")
    assert "smallest prompt that can hit: 17 tokens" in err
    assert "loading: 50 %" in err
    assert run("complete", "-", "--stop", "there", stdin="{{hello there}}")[1] == "hello \n"
    assert run("complete", "{{bytes:hello}}", "--max-tokens", "2")[1] == "he\n"
    options = ("--seed", "3", "--temperature", "1", "--max-tokens", "9")
    assert run("complete", "anything", *options) == run("complete", "anything", *options)
    assert tiny[-1].seed == 3


def test_on_a_terminal_progress_shows_no_total_before_it_is_known() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with _progress(console) as on_progress:
        time.sleep(0.15)
        on_progress(1 << 20, 4 << 20)
        time.sleep(0.15)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "/?" not in shown and "1.0/4.0 MiB" in shown


def test_complete_refuses_bad_input(run: Run, tiny: list[ServingOptions]) -> None:
    refusal = "error: prompt: must not be empty; - reads standard input\n"
    assert run("complete", "") == (2, "", refusal)
    assert run("complete", "-", stdin="") == (2, "", "error: prompt: standard input is empty\n")
    assert tiny == [], "no model was loaded for it"
    assert "temperature" not in run("complete", "x", "--max-tokens", "0")[1]
    assert "at least 1" in run("complete", "x", "--max-tokens", "0")[2]
    assert "at least 0" in run("complete", "x", "--temperature", "-1")[2]


def test_chat_shows_what_each_turn_cost(run: Run, tiny: list[ServingOptions]) -> None:
    long = "the quick brown fox jumps over the lazy dog " * 4
    status, out, err = run(
        "chat", "--temperature", "0", "--system", long,
        stdin="first {{one}}\n\nsecond {{two}}\n/help\n/reset\nthird {{three}}\n/exit\nnever\n",
    )  # fmt: skip
    assert status == 0
    assert out == "one\ntwo\nthree\n"
    costs = [line for line in err.splitlines() if "reused" in line]
    assert len(costs) == 3
    reused = [int(line.split("reused ")[1].split(" of")[0].replace(",", "")) for line in costs]
    assert reused[0] == 0
    assert 0 < reused[2] < reused[1], "after a reset only the system prompt is shared"
    assert all("first token after" in line and "computed" in line for line in costs)


def test_chat_asks_nobody_about_a_command_it_does_not_know(run: Run, tiny: list[ServingOptions]) -> None:
    status, out, err = run("chat", stdin="/rest\n/usr/bin {{a path}}\n")
    assert (status, out) == (0, "a path\n")
    assert "/rest is no command" in err and "/reset starts over" in err


@pytest.mark.parametrize("command", [("complete", "x"), ("chat",)])
def test_both_take_a_drafter(run: Run, tiny: list[ServingOptions], command: tuple[str, ...]) -> None:
    flag = "--speculative-config"
    status, _, err = run(*command, flag, '{"method": "mtp", "num_speculative_tokens": 2}')
    assert status == 0, err
    assert tiny[-1].speculative == SpeculativeConfig("mtp", 2)
    status, _, err = run(*command, flag, '{"method": "oracle", "num_speculative_tokens": 2}')
    assert status == 2 and "--speculative-config: method 'oracle' is not supported" in err


def test_chat_says_how_many_guesses_were_right(run: Run) -> None:
    """With the embedded model and its own module."""
    pytest.importorskip("torch")
    flags = ("--temperature", "0", "--cache-bytes", "64MiB")
    drafter = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
    turn = "The code of Mira is 4821.\n"
    _, plain, err = run("chat", *flags, stdin=turn)
    assert "guesses" not in err
    _, out, err = run("chat", *flags, *drafter, stdin=turn)
    assert out == plain
    found = re.search(r"(\d+) of (\d+) guesses right", err)
    assert found is not None and 0 < int(found[1]) <= int(found[2])


def test_chat_survives_an_overlong_turn(run: Run, tiny: list[ServingOptions]) -> None:
    status, out, err = run("chat", "--temperature", "0", stdin="word " * 4000 + "\n{{still here}}\n")
    assert (status, out) == (0, "still here\n")
    assert "2048 tokens" in err


@pytest.mark.parametrize(("unit", "interval"), [(48, 288), (256, 256), (1000, 1000)])
def test_any_match_unit_works_without_a_decode_interval(run: Run, unit: int, interval: int) -> None:
    assert ServingOptions(match_unit=unit).cache_config().decode_interval == interval
    assert run("info", "--prefix-match-unit", str(unit))[0] == 0


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("info", "--cache-bytes", "lots"), "--cache-bytes: 'lots' is not a size"),
        (
            ("info", "--cache-bytes", "5XB"),
            "--cache-bytes: '5XB' has the unknown unit 'XB'; write it like 1GiB",
        ),
        (("serve", "--request-timeout", "30s"), "--request-timeout: '30s' is not a number of seconds"),
        (
            ("serve", "--max-model-len", "8k"),
            "--max-model-len: '8k' is not a whole number; write digits alone",
        ),
        (("serve", "--audit-hits", "1%"), "--audit-hits: '1%' is not a number; write it without a unit"),
        (("serve", "--port", "65536"), "--port: must be between 0 and 65535, not 65536"),
        (("sim", "--scale", "0"), "--scale: must be at least 1, not 0"),
        (("info", "--cache-bytes", "10KiB"), "--cache-bytes: 10,240 bytes cannot hold one request"),
        (("info", "--cache-bytes", "1MiB", "--max-model-len", "30000"), "which needs"),
        (("info", "--max-model-len", "10000000"), "--max-model-len: 10000000 is more than"),
        (("info", "--max-model-len", "0"), "--max-model-len: must be at least 2"),
        (("serve", "--port", "0", "--max-model-len", "1"), "--max-model-len: must be at least 2"),
        (("info", "--dtype", "int3"), "--dtype: 'int3' is not supported"),
        (("info", "--prefix-match-unit", "0"), "--prefix-match-unit: must be at least 1"),
        (
            ("info", "--prefix-cache-retention-interval", "50"),
            "--prefix-cache-retention-interval: must be 0 or",
        ),
        (("info", "/no/such/model"), "/no/such/model"),
        (("serve", "--port", "0", "--audit-hits", "1.5"), "--audit-hits: must be a share of hits between"),
        (("serve", "--port", "0", "--max-states-per-path", "0"), "--max-states-per-path: must be at least"),
        (("serve", "/no/such/model", "--port", "0"), "/no/such/model"),
        (("serve", "--host", "999.1.1.1"), "--host: cannot listen on 999.1.1.1:8000"),
        (("complete", "x", "--cache-bytes", "10KiB"), "cannot hold one request"),
        (("complete", "x", "--max-tokens", "0"), "--max-tokens: must be at least 1, not 0"),
        (("complete", "x", "--temperature", "-1"), "--temperature: must be at least 0, not -1"),
        (("complete", "x", "--temperature", "inf"), "--temperature: must be a finite number, not inf"),
        (("complete", "x", "--stop", ""), "--stop: must not hold an empty string"),
        (("chat", "--max-tokens", "0"), "--max-tokens: must be at least 1, not 0"),
        (("chat", "--temperature", "nan"), "--temperature: must be a finite number, not nan"),
    ],
)
def test_errors_are_one_line_that_names_the_flag(run: Run, arguments: tuple[str, ...], text: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert err.startswith("error: ") and text in err, err
    assert "Traceback" not in err and out == ""


def test_a_taken_port_is_found_before_anything_is_loaded(run: Run, tiny: list[ServingOptions]) -> None:
    from milepost.server.app import bind

    with bind(port=0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = run("serve", "--port", str(port))
    assert status == 2 and f"--port: cannot listen on 127.0.0.1:{port}" in err
    assert f"--port {port + 1}, or PORT={port + 1} with make" in err and f"ss -ltnp sport = :{port}" in err
    assert tiny == []


def test_a_missing_extra_is_named(run: Run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "milepost.engine.serving")
    for name in [name for name in sys.modules if name.startswith("milepost.engine")]:
        monkeypatch.delitem(sys.modules, name)
    status, _, err = run("complete", "x")
    assert status == 2 and "this command needs tokenizers" in err
    assert re.search(r"-m pip install -e '.*\[cpu\]'", err), err


# ---------------------------------------------------------------- arithmetic


def test_sizes() -> None:
    sizes = {"1GiB": 1 << 30, "512 MiB": 512 << 20, "1.5g": 3 << 29, "2GB": 2 * 10**9, "7": 7, "4k": 4096}
    for text, size in sizes.items():
        assert parse_size(text) == size
    for text in ("", "GiB", "-1", "1XB", "1 2"):
        with pytest.raises(ConfigError):
            parse_size(text)
    assert [format_size(n) for n in (10, 1536, 3 << 30)] == ["10 B", "1.5 KiB", "3.0 GiB"]


def test_what_fits_is_what_the_sizes_say() -> None:
    geometry = CacheGeometry(16, (AttentionGroupSpec("a", 256),), (RecurrentGroupSpec("r", 8192),))
    fit = fit_of(geometry, CacheConfig(1 << 20, 16, checkpoint_interval=512), 1000)
    assert fit.num_longest_requests == (1 << 20) // (63 * 4096 + 8192)
    assert fit.num_checkpoints == (1 << 20) // (32 * 4096 + 8192)
    assert fit.cached_tokens == fit.num_checkpoints * 512
    assert fit.smallest_hit_prompt == 17
    assert (
        fit_of(geometry, CacheConfig(1 << 20, 16, enable_prefix_caching=False), 9).smallest_hit_prompt is None
    )
    assert fit_of(geometry, CacheConfig(1 << 20, 16, checkpoint_interval=0), 1000).checkpoint_interval == 0


def test_info_of_the_embedded_model(run: Run) -> None:
    status, out, err = run("info", "--cache-bytes", "64MiB")
    assert (status, err) == (0, "")
    for text in (
        "kimi_linear",
        "bytes per state",
        "KV bytes per token",
        "33 tokens",
        "64.0 MiB",
        "kda",
        "mla",
    ):
        assert text in out, text
