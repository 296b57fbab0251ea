"""Convert TOML files and `--a.b value` overrides to a `Config`, and back. Each mistake is reported in one line."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.config.base import Section
from slipstream.config.data import DataConfig
from slipstream.config.foreign_names import DISTILLATION_KEYS, FOREIGN_KEYS, VALUES
from slipstream.config.losses import ALIASES
from slipstream.config.renamed_keys import DROPPED, renaming, with_new_keys
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig, endpoint_defaults, spelling_defaults
from slipstream.errors import ConfigError, did_you_mean

SHOULD = "Input should be "
"""First words of pydantic's error messages about an expected value."""
SANDBOXES = re.compile(r"(task|environment|environments\.[^.]+)\.sandbox")
"""Names of the settings of which "none" is a value, a sandbox that isolates nothing."""
STUDY = "sweep"
"""Name of the TOML table that makes a config file a study, which consists of several runs."""
SAVED, BESIDE = "config.toml", "meta.json"
"""Name of the config in a run directory, and a file that is always beside it there."""
TOO_DEEP = "nested too deeply: no setting is more than a few tables or lists deep; take the brackets out"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def load(path: str | Path, overrides: Sequence[tuple[str, str]] = (), *, say: Any = print) -> Config:
    """Read a TOML file, apply `(dotted key, text)` overrides and validate; the config of a run may have old keys."""
    tree = read(path)
    if STUDY in tree:
        raise ConfigError(f"{path} is a study of several runs: slipstream sweep {shlex.quote(str(path))}")
    if Path(path).name == SAVED and (Path(path).parent / BESIDE).exists():
        tree = with_new_keys(tree)
    return parse(tree, overrides, where=str(path), say=say)


def read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name its config.toml") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None


def parse(
    tree: dict[str, Any], overrides: Sequence[tuple[str, str]] = (), *, where: str = "config", say: Any = print
) -> Config:
    notes = list[str]()
    try:
        tree = overridden(tree, overrides, say=notes.append)
        tree = _set_endpoint_defaults(_replace_verl_names(tree), notes.append)
        # strict mode of JSON accepts a list as a tuple, which TOML needs, but rejects true and "7" as numbers
        config = Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("; ".join(f"{where}: {explain(detail)}" for detail in _merge_errors(error)[:3])) from None
    except RecursionError:
        raise ConfigError(f"{where}: {TOO_DEEP}") from None
    for note in notes:
        say(note)
    return config


def overridden(
    tree: dict[str, Any], overrides: Sequence[tuple[str, str]], *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return a copy with the overrides applied, `kind` first: a new kind discards other settings of its section."""
    tree = _add_kinds(tree)
    for key, text in sorted(overrides, key=lambda override: not override[0].endswith(".kind")):
        value = text if text == "none" and SANDBOXES.fullmatch(key) else value_of(text)
        tree = _override(tree, key.split("."), value, say)
    return tree


def data_section(given: Mapping[str, Any]) -> DataConfig:
    """Return a [data] section with these values, for commands without a config file. Values of None are ignored."""
    try:
        return DataConfig.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        (detail, *_) = error.errors()
        raise ConfigError(explain({**detail, "loc": ("data", *detail["loc"])})) from None


def _add_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which every section with several kinds has a `kind`; a missing `kind` is set to the default."""
    kinds = {name: info.default.kind for name, info in Config.model_fields.items() if info.discriminator}
    below = {name: tree.get(name, {}) for name in kinds}
    return tree | {name: {"kind": kinds[name], **own} for name, own in below.items() if isinstance(own, dict)}


def _replace_verl_names(tree: dict[str, Any]) -> dict[str, Any]:
    match tree.get("loss"):
        case {"kind": str(kind), **options} if kind in ALIASES:
            return {**tree, "loss": {**options, "kind": ALIASES[kind]}}
    return tree


def _set_endpoint_defaults(tree: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return a copy in which unset loss options get values that such teachers support."""
    teachers, loss = tree.get("teachers"), tree.get("loss")
    if not isinstance(teachers, dict) or not isinstance(loss, dict) or loss.get("weight") == 0:
        return tree
    if own := [name for name, t in teachers.items() if isinstance(t, dict) and t.get("spelling") == "own"]:
        changes = spelling_defaults(loss)
        for name, value in changes.items():
            say(f'note: loss.{name} = {json.dumps(value)}, because teachers.{own[0]}.spelling = "own"')
        loss = {**loss, **changes}
    remote = {name: t for name, t in teachers.items() if isinstance(t, dict) and t.get("base_url") is not None}
    limits = [t.get("max_logprobs", TeacherConfig.model_fields["max_logprobs"].default) for t in remote.values()]
    if not limits or not all(isinstance(limit, int) for limit in limits):
        return {**tree, "loss": loss}
    changes, named = endpoint_defaults(loss, min(limits)), list(remote)[limits.index(min(limits))]
    for name, value in changes.items():
        say(f"note: loss.{name} = {json.dumps(value)}, because teachers.{named} is an endpoint")
    return {**tree, "loss": {**loss, **changes}}


def value_of(text: str) -> Any:
    """Parse text as a TOML value: `1e-5`, `true`, `[1, 2]`, `"x"`. `none` is None, and other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "none" else text


def _override(tree: dict[str, Any], path: list[str], value: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Return a copy with one value replaced. A new `kind` discards the old kind's settings; `say` receives a note."""
    head, *rest = path
    if rest:
        below = tree.get(head, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--{'.'.join(path)}: {head} is a value, not a section")
        return {**tree, head: _override(below, rest, value, say)}
    if head == "kind" and tree.get("kind", value) != value:
        dropped = sorted(set(tree) - {"kind"})
        if dropped:
            say(f"note: kind = {value!r} replaces {tree['kind']!r}; its settings {', '.join(dropped)} are discarded")
        return {"kind": value}
    return {**tree, head: value}


def _merge_errors(error: ValidationError) -> list[ErrorDetails]:
    """Merge errors to one per setting. A setting that accepts several types has an error for each type."""
    found: dict[Any, ErrorDetails] = {}
    for detail in error.errors():
        name = ".".join(_locate(detail["loc"], Config)[0])
        key = name if detail["msg"].startswith(SHOULD) else (name, len(found))
        if key in found:
            found[key]["msg"] += f" or {detail['msg'].removeprefix(SHOULD)}"
        else:
            found[key] = detail
    return list(found.values())


def explain(detail: ErrorDetails, root: type[Section] = Config) -> str:
    """Return one line that says where the error is, what is wrong, and what to write instead."""
    names, holder = _locate(detail["loc"], root)
    dotted = ".".join(names)
    match detail["type"]:
        case "extra_forbidden" | "literal_error" if (new := renaming(dotted, detail["input"])) is not None:
            was = dotted if detail["type"] == "extra_forbidden" else f"{dotted} = {detail['input']!r}"
            return f"{was} was renamed: write {new}"
        case "extra_forbidden" if dotted in DROPPED:
            return f"{dotted} was dropped: {DROPPED[dotted]}; leave it out"
        case "extra_forbidden" if dotted == "loss.use":
            return f'{dotted} is for estimates of the KL at the emitted token: write loss.kind = "k1", or drop it'
        case "extra_forbidden" if holder and (key := _key_here(names)) not in (None, dotted):
            given = json.dumps(detail["input"], default=str)
            return f"unknown key {dotted!r}: write {key}" + ("" if "," in key else f" = {given}")
        case "literal_error" if str(detail["input"]) in VALUES.get(dotted, ()):
            return f"{dotted} = {detail['input']!r}: {VALUES[dotted][detail['input']]}"
        case "extra_forbidden" if holder:
            return f"unknown key {dotted!r}; {did_you_mean(names[-1], holder.settings())}"
        case "missing" if holder:
            return f"{dotted!r} is missing: {holder.settings()[names[-1]].description}"
        case "union_tag_invalid":
            kinds = detail["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"{dotted}.kind: {did_you_mean(detail['ctx']['tag'], kinds)}"
        case "value_error":
            return f"{dotted}: {detail['ctx']['error']}" if dotted else str(detail["ctx"]["error"])
        case _:
            return f"{dotted}: {detail['msg'].lower()}, got {detail['input']!r}"


def _key_here(names: Sequence[str]) -> str | None:
    """Return what to write instead of a key of verl or TRL; None if it is unknown."""
    match names:
        case ["loss", name] | ["sft", "loss", name] if name in DISTILLATION_KEYS:
            return ".".join([*names[:-2], DISTILLATION_KEYS[name]])
    return FOREIGN_KEYS.get(names[-1])


def _locate(loc: Sequence[int | str], root: type[Section]) -> tuple[list[str], type[Section] | None]:
    """Return the parts of a setting's dotted name and its section (None inside a value) for a pydantic location."""
    names: list[str] = []
    holder: type[Section] | None = None
    here: Any = root
    for part in map(str, loc):
        sections = members(here)
        if get_origin(here) in (dict, tuple) and sections:
            names.append(part)
            here = sections[0]
        elif len(sections) > 1:
            here = next(section for section in sections if part in section.kinds())
        elif sections:
            holder = sections[0]
            names.append(part)
            here = holder.settings()[part].annotation if part in holder.settings() else None
        else:
            holder = None
    return names, holder


def members(annotation: Any) -> list[type[Section]]:
    """Return the sections that an annotation can hold: one section, the members of a union, or the values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for arg in get_args(annotation) for section in members(arg)]


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield (dotted name, field, kinds) of every setting. `kinds` names the kinds that have it; "" means all."""
    for name, info in section.settings().items():
        sections = members(info.annotation)
        dotted = f"{prefix}{name}"
        if get_origin(info.annotation) is dict and sections:
            dotted += ".NAME"
        if not sections:
            yield dotted, info, ""
        for each in sections:
            kind = " | ".join(each.kinds()) if len(sections) > 1 else ""
            for inner, field, below in fields(each, f"{dotted}."):
                yield inner, field, kind or below


def to_toml(config: Config) -> str:
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def differing(one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Return (name, value in `one`, value in `other`) of every setting that differs between two configs."""
    a, b = (flat(each.model_dump(mode="json")) for each in (one, other))
    return [(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the values of a nested dict as a flat dict with dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {name: tree}
    return {
        dotted: value
        for key, below in tree.items()
        for dotted, value in flat(below, f"{name}.{key}".strip(".")).items()
    }


def describe(info: FieldInfo) -> str:
    """Return the text `type = default` of a setting in TOML notation; `none` means that there is no default value."""
    kind = _type_name(info.annotation)
    if info.is_required():
        return kind
    return f"{kind} = {'none' if info.default is None else json.dumps(info.default)}"


def bounds(info: FieldInfo) -> str:
    """Return the bounds of a setting as text, such as `≥ 0, < 1`; an empty text if the setting has no bounds."""
    known = [(sign, getattr(each, key, None)) for each in info.metadata for key, sign in BOUNDS.items()]
    return ", ".join(f"{sign} {value:g}" for sign, value in known if value is not None)


def _type_name(annotation: Any) -> str:
    args = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Literal:
            return " | ".join(map(str, args))
        case origin if origin in (Union, UnionType):
            return " | ".join(map(_type_name, args))
        case origin if origin is Annotated:
            return _type_name(args[0])
        case origin if origin is tuple:
            return f"[{', '.join('…' if arg is ... else _type_name(arg) for arg in args)}]"
        case origin if origin is dict:
            return "table"
    return "none" if annotation is NoneType else str(annotation.__name__)
