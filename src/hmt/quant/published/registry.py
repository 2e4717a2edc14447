"""The code for each published form, by the name that hmt.formats gives it."""

from collections.abc import Callable
from functools import cache
from typing import Any

from hmt.contracts.checkpoint import FormName
from hmt.quant.published.floats import Floats
from hmt.quant.published.form import Form, InPlace

_SCHEMES: dict[str, Callable[..., Form | InPlace]] = {
    "in place": InPlace,
    "floats": Floats,
}


@cache
def open_form(name: FormName) -> Form | InPlace:
    """The code for `name`; the same object each time."""
    options: dict[str, Any] = dict(name.options)
    return _SCHEMES[name.scheme](**options)
