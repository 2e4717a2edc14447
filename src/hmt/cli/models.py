"""`hmt pull`, `list` and `rm`: models of the hub, in its cache on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from hmt.base.errors import ConfigError, HMTError
from hmt.base.units import format_bytes
from hmt.cli import inspect, verify
from hmt.cli.console import working

NameArgument = Annotated[
    str,
    typer.Argument(
        help="A name of the list that `hmt` shows, such as qwen3-8b or qwen3-8b:Q8_0; or "
        "owner/name on the Hugging Face hub, or owner/name:TYPE for a GGUF file of it."
    ),
]


def add_commands(app: typer.Typer) -> None:
    """`inspect`, `verify`, `pull`, `list` and `rm`."""
    app.command("inspect")(inspect.inspect)
    app.command("verify")(verify.verify)
    app.command("pull")(pull)
    app.command("list")(list_models)
    app.command("rm")(remove)


def pull(name: NameArgument) -> None:
    """Download a model, or what is missing of it, and compare it with the hub's hashes."""
    from hmt.formats import located
    from hmt.formats.hub_cache import verify_downloaded
    from hmt.planner.catalogue import resolved

    source = resolved(name)
    if Path(source).expanduser().exists():
        raise ConfigError(f"{source} is a file or folder here: there is nothing to download")
    path = located(source)
    if not path.exists():
        raise ConfigError(f"{name} is no name of the list (see `hmt`), and not owner/name")
    with working(f"checking {name}") as report:
        size = verify_downloaded(path, lambda done, total: report(f"checking {name}", done, total))
    print(f"{source}: {format_bytes(size)}, as the hub has it")
    print(f"hmt run {name}")


def list_models() -> None:
    """List the models in the hub's cache on this machine."""
    from hmt.formats.hub_cache import downloaded
    from hmt.planner.catalogue import known_models

    names = {
        model.source(kind): f"{model.name}:{kind}" if kind else model.name
        for model in known_models()
        for kind in model.sizes
    }
    found = downloaded()
    if not found:
        print("no models yet: `hmt` shows what this machine can run, `hmt pull NAME` downloads it")
    for one in found:
        print(f"{format_bytes(one.nbytes):>10}  {names.get(one.source, one.source)}")


def remove(name: NameArgument) -> None:
    """Delete a model from the hub's cache on this machine."""
    from hmt.formats.hub_cache import remove_downloaded
    from hmt.planner.catalogue import resolved

    source = resolved(name)
    freed = remove_downloaded(source)
    print(f"{source} is deleted: {format_bytes(freed)} are free")


def installed_sources() -> set[str]:
    """What of the hub is on this machine; empty where that cannot be told."""
    from hmt.formats.hub_cache import downloaded

    try:
        return {one.source for one in downloaded()}
    except (HMTError, OSError):
        return set()
