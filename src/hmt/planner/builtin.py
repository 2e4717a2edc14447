"""Files that come with HMT beside the code: machines, shapes of models, profiles."""

from importlib.resources import files
from pathlib import Path

from hmt.base.errors import MissingFileError, os_reason


def builtin_names(folder: str, ending: str) -> list[str]:
    """What `folder` of the planner has, without `ending`, such as ".toml"."""
    names = (entry.name for entry in (files("hmt.planner") / folder).iterdir())
    return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))


def builtin_text(source: str, folder: str, ending: str, what: str) -> str:
    """The text of a file, or of one of `builtin_names`.

    what   such a file holds, for the message: "machines"

    Raises MissingFileError where there is neither or it cannot be read, and UnicodeDecodeError for
    what is no text.
    """
    path = Path(source).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig")  # some editors mark UTF-8
        except OSError as error:
            raise MissingFileError(f"{path} cannot be read ({os_reason(error)})") from None
    if source in (names := builtin_names(folder, ending)):
        name = f"{source}{ending}"
        return (files("hmt.planner") / folder / name).read_text(encoding="utf-8")
    raise MissingFileError(
        f"{source!r} is neither a file nor one of the {what} that HMT knows: {', '.join(names)}"
    )
