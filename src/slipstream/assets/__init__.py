"""Tiny models that ship with the package, and what `builtin:` names mean."""

from __future__ import annotations

from pathlib import Path

from slipstream.assets.adapters import base_of, is_adapter
from slipstream.errors import ModelError, did_you_mean

HERE = Path(__file__).parent
DEMO = HERE / "demo.toml"
MODELS = ("student", "teacher", "reader")


def model_path(name: str) -> str:
    """`builtin:student` as a directory, an adapter's as that of its base, and every other name as it is. A path, which
    no hub name looks like, must exist."""
    if not name.strip():
        raise ModelError(f"{name!r} names no model: write an HF directory or a hub name")
    if is_adapter(name):
        try:
            return model_path(base_of(name))
        except ModelError as error:
            raise ModelError(str(error) if str(error).startswith(name) else f"{name}: its base is {error}") from None
    kind, _, rest = name.partition(":")
    if kind != "builtin":
        if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
            raise ModelError(f"{name}: no such directory")
        if Path(name).is_file():
            raise ModelError(f"{name}: is a file; a model is a directory, or a name on the hub")
        return name
    if rest not in MODELS:
        raise ModelError(f"no built-in model {rest!r}; {did_you_mean(rest, MODELS)}")
    return str(HERE / rest)
