"""What is missing is said before a model is loaded, with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from milepost import config
from milepost.cli import extras
from milepost.cli.extras import check_modules, check_serving_extras, missing_text
from milepost.config import install_command
from milepost.engine.stores import StoreOptions
from milepost.errors import MilepostError
from milepost.server.options import ServerOptions

OTLP = "http://localhost:4318/v1/traces"


def test_a_checkout_is_installed_from_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(config, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert install_command("otel") == ".venv/bin/python -m pip install -e '.[otel]'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    words = shlex.split(install_command("otel"))
    assert words[0] == sys.executable and words[-1] == f"{tmp_path}[otel]"


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (None, "milepost[redis]"),
        (
            {"url": "file:///tmp/milepost.whl", "archive_info": {}},
            "milepost[redis] @ file:///tmp/milepost.whl",
        ),
        (
            {"url": "https://host/milepost.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "milepost[redis] @ git+https://host/milepost.git@12ab",
        ),
    ],
)
def test_elsewhere_it_is_installed_as_it_was(
    source: dict[str, object] | None, requirement: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "CHECKOUT", tmp_path)
    text = None if source is None else json.dumps(source)
    found = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert shlex.split(install_command("redis"))[-1] == requirement


@pytest.mark.parametrize(
    ("stores", "server", "missing", "extra"),
    [
        (StoreOptions(), ServerOptions(), "torch", "cpu"),
        (StoreOptions(), ServerOptions(), "fastapi", "server"),
        (StoreOptions(), ServerOptions(otlp_traces_endpoint=OTLP), "opentelemetry", "otel"),
        (StoreOptions(("redis://localhost:6379/0?bytes=1GiB",)), ServerOptions(), "redis", "redis"),
        (
            StoreOptions(kv_events_config='{"endpoint": "tcp://127.0.0.1:5557"}'),
            ServerOptions(),
            "zmq",
            "events",
        ),
    ],
)
def test_what_options_need_is_looked_for(
    stores: StoreOptions, server: ServerOptions, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_is_there", lambda module: module.partition(".")[0] != missing)
    with pytest.raises(MilepostError, match=rf"needs {missing}; install it with: .*\[{extra}\]'"):
        check_serving_extras(stores, server)
    monkeypatch.setattr(extras, "_is_there", lambda module: True)
    check_serving_extras(stores, server)


def test_what_is_not_asked_for_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = ("opentelemetry", "redis", "mooncake", "zmq")
    monkeypatch.setattr(extras, "_is_there", lambda module: module.partition(".")[0] not in optional)
    check_serving_extras(StoreOptions(), ServerOptions())


def test_modules_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    check_modules(["json", "importlib.metadata"])
    for name in ("no_such_package", "no_such_package.inside", "json.nothing"):
        with pytest.raises(MilepostError, match="which is not installed"):
            check_modules([name])
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MilepostError, match="zmq"):
        check_modules(["zmq"])
    assert missing_text("no_such_package") is None
