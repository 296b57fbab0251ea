"""Resolution of model names: directories, hub names, adapters, and two kinds of names for models of this package.

A GGUF file is converted to a directory once. `builtin:NAME` is a tiny model. `shapes:NAME` is the config.json, without
weights, of a model on the hub.
"""

from functools import cache
from pathlib import Path

from slipstream.errors import ModelError, did_you_mean, first_line
from slipstream.models.adapters import base_of, is_adapter
from slipstream.models.gguf import directory_of

HERE = Path(__file__).parent / "builtin"
DEMO = HERE / "demo.toml"
SHAPES_FOLDER = Path(__file__).parent / "shapes"
MODELS = (
    *("student", "teacher", "reader", "pair_teacher"),
    *("tool_student", "tool_teacher", "tool_reader", "word_student", "word_teacher"),
)
KNOCK = 10.0
"""Timeout in seconds of the test request to the hub."""


def model_path(name: str) -> str:
    """Return the directory or hub name of a model or of an adapter's base; raise ModelError if none can exist."""
    if not name.strip():
        raise ModelError(f"{name!r} names no model: write an HF directory or a hub name")
    if is_adapter(name):
        try:
            return model_path(base_of(name))
        except ModelError as error:
            raise ModelError(str(error) if str(error).startswith(name) else f"{name}: base model: {error}") from None
    kind, _, rest = name.partition(":")
    if kind == "shapes":
        if rest not in shipped_shapes():
            raise ModelError(f"no shapes of {rest!r} are shipped; {did_you_mean(rest, shipped_shapes())}")
        return str(SHAPES_FOLDER / rest)
    if name.endswith(".gguf"):
        return directory_of(name)
    if kind != "builtin":
        if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
            raise ModelError(f"{name}: no such directory")
        if Path(name).is_file():
            raise ModelError(f"{name}: is a file; a model is a directory, or a name on the hub")
        return name
    if rest not in MODELS:
        raise ModelError(f"no built-in model {rest!r}; {did_you_mean(rest, MODELS)}")
    return str(HERE / rest)


def shipped_shapes() -> list[str]:
    """Return the hub names of all models whose config.json is part of this package."""
    return sorted(path.parent.relative_to(SHAPES_FOLDER).as_posix() for path in SHAPES_FOLDER.glob("*/*/config.json"))


def without_weights(name: str) -> str:
    """Return a name whose config.json is on this machine if there is one: the given name, or one of `shapes:NAME`."""
    here = is_adapter(name) or name.startswith("builtin:") or file_of(name, "config.json")
    return f"shapes:{name}" if not here and name in shipped_shapes() else name


def file_of(name: str, file: str) -> Path | None:
    """Return the path of a model's file in its directory or in the hub's cache; None if the file is not there."""
    path = Path(model_path(name))
    if path.is_dir():
        return found if (found := path / file).exists() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(path), file)
    return Path(cached) if isinstance(cached, str) else None


@cache
def check_reachable(name: str) -> None:
    """Raise ModelError if a model is not local and the hub does not answer; its library would retry for a minute."""
    path = model_path(name)
    if Path(path).is_dir():
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        known = any(file_of(name, file) for file in ("config.json", "tokenizer_config.json"))
        if not known and not constants.is_offline_mode():
            get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=KNOCK)
    except (HfHubHTTPError, HFValidationError):  # the hub's library reports these errors well when it loads the model
        return
    except Exception as error:  # the exceptions depend on the HTTP client that the library uses
        said = f"no such directory, and the hub does not answer: {first_line(error)}"
        raise ModelError(f"{name}: {said}") from None
