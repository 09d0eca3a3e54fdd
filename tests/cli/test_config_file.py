"""`--config FILE`: the flags' names, checked, and overridden by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from milepost.cli import commands, serve
from milepost.cli.commands import app
from milepost.errors import ConfigError


@pytest.fixture
def served(monkeypatch) -> Iterator[list[tuple[Any, ...]]]:
    """What `serve` would have been started with."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "serve_model", lambda *arguments: seen.append(arguments))
    yield seen


def run(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "milepost.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_options_of_a_file_are_used_and_the_command_line_wins(tmp_path: Path, served) -> None:
    path = write(
        tmp_path,
        "port: 9001\ncache-bytes: 64MiB\nmax_model_len: 100\nseed: 5\nserved-model-name: from-file\n"
        "no-enable-prefix-caching: true\napi-key: [first, second]\nrequest-timeout: 30\nhost: 0.0.0.0\n",
    )
    run("--config", path, "--max-model-len", "200", "--host", "127.0.0.1")
    ((model, options, server_options, host, port, log_format),) = served
    assert (model, host, port, log_format) == (None, "127.0.0.1", 9001, "text")
    assert options.cache_bytes == 64 << 20
    assert options.max_model_len == 200
    assert (options.seed, options.served_model_name) == (5, "from-file")
    assert not options.enable_prefix_caching
    assert server_options.api_keys == ("first", "second")
    assert server_options.request_timeout == 30.0


def test_one_value_for_an_option_that_may_be_repeated(tmp_path: Path, served) -> None:
    run("--config", write(tmp_path, "api-key: 12345\nmodel: some/model\n# a comment\n"))
    assert served[0][2].api_keys == ("12345",)
    assert served[0][0] == Path("some/model")


def test_an_empty_file_changes_nothing(tmp_path: Path, served) -> None:
    run("--config", write(tmp_path, ""))
    run()
    assert served[0] == served[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 5", "unknown option 'max-modle-len'; did you mean max-model-len?"),
        ("zzz: 5", "unknown option 'zzz'$"),
        ("config: other.yaml", "unknown option 'config'"),
        ("port: {a: 1}", "'port' cannot be"),
        ("port: [1, 2]", "'port' cannot be"),
        ("seed: 1\nseed_: 2", "unknown option 'seed_'; did you mean seed"),
        ("max-model-len: 1\nmax_model_len: 2", "is given twice"),
        ("- port", "must hold options"),
        ("port: [", "is no YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, served, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        run("--config", write(tmp_path, text))
    assert raised.value.field == "config" and served == []


def test_a_missing_file_and_bad_values(tmp_path: Path, served) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        run("--config", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="'lots' is not a whole number"):
        run("--config", write(tmp_path, "port: lots"))
    assert served == []


def test_yaml_cannot_run_code(tmp_path: Path, served) -> None:
    with pytest.raises(ConfigError, match="is no YAML"):
        run("--config", write(tmp_path, "port: !!python/object/apply:os.getpid []"))


def test_every_flag_name_is_a_name_in_the_file(tmp_path: Path) -> None:
    """Also those of options added later: none is hidden behind another name."""
    (command,) = [c for n, c in typer.main.get_command(app).commands.items() if n == "serve"]
    flags = [flag for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
    for flag in flags:
        assert commands._is_flag(flag[2:].replace("-", "_")) or flag.startswith("--no-"), flag
