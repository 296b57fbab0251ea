"""Types and limits that all sections of the configuration share."""

import re
from collections.abc import Sequence
from string import Formatter
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from slipstream.errors import did_you_mean

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
HALVES = frozenset({"bfloat16", "float16"})
"""Number formats with 16 bits."""
Quantisation = Literal["int8", "fp8"]
Rounding = Literal["exact", "half", "int8", "fp8"]
"""Coarsest number format of two engines that are compared; exact: float32 or float64 in both."""
Beta = Annotated[float, Field(ge=0, lt=1)]
OWN = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
"""Pattern that names a user function: `./file.py:function` or `package.module:function`."""
GREEDY = 1e-3
"""Lowest sampling temperature. Below this value sampling always returns the most likely token."""
Temperature = Annotated[float, Field(ge=GREEDY, le=100)]
Epsilon = Annotated[float, Field(gt=0)]
Replicas = Annotated[int, Field(ge=1)] | Literal["auto"]
THREADS = 1024
"""Largest number of CPU threads of one engine. Some machines refuse to start more threads and end the process."""
DRAWS = 10_000
"""Largest number of draws (tokens sampled at one position). With more, an exact loss is cheaper."""


def check_arguments(args: dict[str, Any]) -> dict[str, Any]:
    if none := next((name for name, value in args.items() if value is None), None):
        raise ValueError(f"{none} cannot be none: leave it out")
    return args


def check_url(url: str) -> str:
    """Reject URLs with a password, query or wrong scheme. No message repeats the URL, which would be saved."""
    form = "write http://HOST:PORT/v1, and nothing else"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"not a URL: {form}") from None
    if parts.username is not None or parts.password is not None or "@" in url:
        raise ValueError(
            f"holds a user name or a password, which would be printed and saved: {form}; put the key into an "
            "environment variable and its name into api_key_env"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"not a URL of an endpoint: {form}")
    if parts.query or parts.fragment:
        raise ValueError(f"has text after the path: {form}")
    return url.rstrip("/")


def check_variable(name: str) -> str:
    """Reject values that may be a key: names are in capitals, so that a key written by mistake is not logged."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            'is not the name of an environment variable, in capitals, such as "TEACHER_API_KEY"; never write the '
            "key itself into a config"
        )
    return name


def check_local_address(address: str) -> str:
    form = re.fullmatch(r"(?:127(?:\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5})", address)
    if form is None or not 1 <= int(form[1]) <= 65535:
        raise ValueError(
            f'{address!r} is no port of this machine, such as "127.0.0.1:8008"; other machines need a tunnel'
        )
    return address


LocalAddress = Annotated[str, AfterValidator(check_local_address)]
"""Host and port of a server that only programs of this machine reach."""
TemplateArgs = Annotated[dict[str, Any], AfterValidator(check_arguments)]
"""Arguments of a chat template."""
Url = Annotated[str, AfterValidator(check_url)]
"""URL of an OpenAI-compatible endpoint."""
Variable = Annotated[str, AfterValidator(check_variable)]
"""Name of an environment variable that holds a key."""


def at_first(replicas: Replicas) -> int:
    """Return the number of workers at the start of a run."""
    return 1 if replicas == "auto" else replicas


def template_fields(template: str) -> list[tuple[str, str | None, str | None]]:
    """Return (name, format, conversion) of every field of a template; ValueError if its braces do not match."""
    parts = Formatter().parse(template)
    try:
        return [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for literal braces") from None


def as_tuple(given: Any) -> Any:
    names = [given] if isinstance(given, str) else given
    return tuple(names) if isinstance(names, list) else names


def check_own(name: str, built_in: Sequence[str], what: str, kind: str) -> None:
    """Raise ValueError unless `name` is built in, or names a function or class (`kind`) of the user."""
    if name not in built_in and not OWN.fullmatch(name):
        near = f"{did_you_mean(name, built_in)}; " if ":" not in name else ""
        raise ValueError(f'{name!r} is no {what}; {near}your own is "./file.py:{kind}" or "module:{kind}"')


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Return the fields of this section by name."""
        return cls.model_fields

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """Return the values of `kind` that select this section; an empty tuple if the section has no `kind`."""
        kind: Any = cls.model_fields.get("kind")
        return get_args(kind.annotation) if kind else ()

    def changed(self, *names: str) -> list[str]:
        """Return those of the named fields whose value is not the default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
