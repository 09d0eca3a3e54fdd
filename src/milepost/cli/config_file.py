"""`--config FILE`: the flags' names and values in YAML; what is given on the command line wins."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

from milepost.errors import ConfigError

NOT_IN_FILES = ("config", "help")


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of the option: its file's values become the defaults of the command's other options.

    Raises:
        ConfigError: no such file, no YAML mapping, or a key that is no option (with the nearest name).
    """
    if path is None:
        return None
    options = {
        flag.removeprefix("--").replace("-", "_"): (parameter, flag in parameter.secondary_opts)
        for parameter in context.command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if parameter.name not in NOT_IN_FILES
    }
    defaults: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ConfigError("config", f"{path}: unknown option {str(key)!r}{hint}")
        parameter, is_negative = options[name]
        if parameter.name in defaults:
            raise ConfigError("config", f"{path}: {str(key)!r} is given twice")
        if is_negative and isinstance(value, bool):
            value = not value
        defaults[str(parameter.name)] = _checked(
            path, key, value, is_list=getattr(parameter, "multiple", False)
        )
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("config", f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ConfigError("config", f"{path} must hold options as `name: value`")
    return parsed


def _checked(path: Path, key: Any, value: Any, *, is_list: bool) -> Any:
    values = value if isinstance(value, list) else [value]
    if (isinstance(value, list) and not is_list) or any(
        not isinstance(item, str | int | float) for item in values
    ):
        raise ConfigError("config", f"{path}: {str(key)!r} cannot be {value!r:.80}")
    return [str(item) for item in values] if is_list else value
