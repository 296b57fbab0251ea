"""Loader of user code: import functions and classes by name, read their parameters, describe errors in one line."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from slipstream.errors import ConfigError, did_you_mean, first_line

MAX_MESSAGE = 400
"""Largest number of characters of an exception's message that a description quotes."""


def load_object(spec: str, kind: type = FunctionType) -> Any:
    """Import the object named by `./file.py:name` or `module:name`. This runs user code: call it in a child process."""
    source, _, name = spec.rpartition(":")
    module = _from_file(Path(source).expanduser()) if source.endswith(".py") else _from_module(source)
    found = getattr(module, name, None)
    if found is None:
        others = [each for each, value in vars(module).items() if isinstance(value, kind)]
        what = "class" if kind is type else "function"
        raise ConfigError(f"no {what} {name!r} in it; {did_you_mean(name, others) if others else 'it has none'}")
    if kind is type and not isinstance(found, type):
        raise ConfigError(f"{name} is {short_repr(found)}, not a class")
    if not callable(found):
        raise ConfigError(f"{name} is {short_repr(found)}, not a function")
    return found


def _from_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise ConfigError(f"there is no file {displayed_path(str(path))}")
    name = str(path).replace(".", ":")  # pickle looks for a module with dots in its name in a package
    if (known := sys.modules.get(name)) is not None:
        return known
    sys.path.insert(0, str(path.parent))  # allow imports of files in the same directory, as for a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a path cannot conflict with the name of another module
    _run(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _from_module(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"there is no module {name!r} here or among what is installed")
    module: ModuleType = _run(lambda: importlib.import_module(name), spec.origin or "")
    return module


def _run(load: Callable[[], Any], file: str) -> Any:
    try:
        return load()
    except BaseException as error:  # user code may raise anything during its import
        raise ConfigError(f"cannot be imported: {describe_error(error, file)}") from None


def parameters(function: Callable[..., Any], known: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of the `known` names a function can get as arguments, and which of these it requires."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError("Python cannot read its parameters: wrap it in a function of your own") from None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        asks = list(known)
    else:
        asks = [each.name for each in parameters if each.name in known and each.kind is not each.POSITIONAL_ONLY]
    needs = []
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.default is not each.empty:
            continue
        if each.name not in asks:
            raise ConfigError(f"no value is available for its parameter {each.name!r}; known: {', '.join(known)}")
        needs.append(each.name)
    return tuple(asks), tuple(needs)


def describe_error(error: BaseException, file: str) -> str:
    """Describe an exception in one line, with the number of the last line of `file` in its traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    line = lines[-1] if lines else None
    name = type(error).__name__
    message = error.msg if isinstance(error, SyntaxError) else first_line(error)
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    description = name if message == name else f"{name}: {message}"
    return f"{description} ({displayed_path(file)}:{line})" if line is not None else description


def file_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else ""


def displayed_path(file: str) -> str:
    """Shorten the path of a file in the working directory to a relative path; return other paths unchanged."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


def short_repr(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '…'}" if value is not None else "None"


def field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))
