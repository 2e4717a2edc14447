"""Settings that are remembered for a model, for options that are not given.

`~/.config/hmt/models.toml` has a table for each model, by the name that commands are given:

    ["qwen3-8b"]
    context = 32768
    prefix_cache = true
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hmt.base.errors import ConfigError
from hmt.base.json_store import write_atomically
from hmt.cli.options import EngineOptions
from hmt.cli.presets import preset_settings


def settings_file() -> Path:
    """Where settings of models are remembered."""
    root = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(root) / "hmt" / "models.toml"


def with_settings(options: EngineOptions, model: str | None) -> EngineOptions:
    """The options; what was not given comes from the preset, else from the model's settings.

    Raises ConfigError for a preset that there is not, and for settings that are no options.
    """
    chosen = dict(remembered(model)) if model is not None else {}
    name = options.preset or chosen.pop("preset", None)
    if name is not None:
        chosen |= preset_settings(name)
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) is not None
    }
    return replace(options, **chosen | given)


def settled(options: EngineOptions, model: str | None, keep: bool) -> EngineOptions:
    """See `with_settings`; `keep`: the options that were given are the model's from now on."""
    if keep:
        if model is None:
            raise ConfigError("--remember keeps options of a model: name one")
        remember(model, options)
    return with_settings(options, model)


def remembered(model: str) -> dict[str, Any]:
    """The settings of a model; empty where there are none.  Raises ConfigError."""
    return _checked(model, _tables().get(model, {}))


def remember(model: str, options: EngineOptions) -> dict[str, Any]:
    """Keep the options that were given as the model's settings, beside those that it has."""
    tables = _tables()
    given = {
        field.name: str(value) if isinstance(value, Path) else value
        for field in fields(EngineOptions)
        if (value := getattr(options, field.name)) is not None
    }
    own = tables[model] = {**tables.get(model, {}), **given}
    text = "\n".join(
        f"[{json.dumps(name)}]\n"
        + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    write_atomically(settings_file(), text)
    return own


def _tables() -> dict[str, dict[str, Any]]:
    file = settings_file()
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): correct it, or delete it") from None
    for name, table in found.items():
        if not isinstance(table, dict):
            raise ConfigError(f'{file}: {name} is no table of settings, as ["{name}"] begins one')
    return found


def _checked(model: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as options have them.  Raises ConfigError."""
    hints = get_type_hints(EngineOptions)
    checked = {}
    for name, value in table.items():
        where = f"{settings_file()}: {name} of {model!r}"
        if name not in hints:
            raise ConfigError(f"{where} is no option of hmt run: see hmt run --help")
        kinds = [kind for kind in get_args(hints[name]) if kind is not type(None)]
        if Path in kinds and isinstance(value, str):
            checked[name] = Path(value)
        elif type(value) in kinds or (float in kinds and type(value) is int):
            checked[name] = value
        else:
            raise ConfigError(f"{where} is {value!r:.40}, and {kinds[0].__name__} is wanted")
    return checked


def _toml(value: object) -> str:
    """A string, number or boolean, as TOML and JSON both write it."""
    return json.dumps(value)
