"""Check the weight files of a model: every weight exists, fits the config, and contains only finite numbers.

Names and shapes come from file headers. Values are read in parts, so a model larger than the memory can be checked.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from slipstream.engines.native.config import load_config
from slipstream.errors import ModelError, first_line
from slipstream.models.adapters import WEIGHTS as ADAPTER
from slipstream.models.adapters import is_adapter
from slipstream.models.resolve import file_of, model_path

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weight files in the order in which transformers looks for them."""
READ_BYTES = 1 << 26
"""Maximum bytes of a tensor that are read at once; a single row may be larger."""
Shape = tuple[int, ...]


def weights_of(name: str) -> list[Path]:
    """Return the paths of a model's weight files; empty for a hub model that is not downloaded yet."""
    for file in WEIGHT_FILES:
        if (found := file_of(name, file)) is None:
            continue
        if not file.endswith(".index.json"):
            return [found]
        parts = sorted(set(json.loads(found.read_text("utf-8"))["weight_map"].values()))
        paths = {part: file_of(name, part) for part in parts}
        for part, path in paths.items():
            if path is None and is_local(name):
                raise ModelError(f"{name}: {part} is missing, but {file} lists it as a file of weights")
        return [path for path in paths.values() if path is not None]
    if is_local(name):
        raise ModelError(f"{name}: no weights there: expected {WEIGHT_FILES[0]}, or {WEIGHT_FILES[1]} and its parts")
    return []


def is_local(name: str) -> bool:
    return Path(model_path(name)).is_dir()


def check_complete(name: str) -> None:
    """Raise a ModelError if a weight is missing or has a wrong size; skip hub models that are not downloaded yet."""
    shapes = {key: shape for file in weights_of(name) for key, (shape, _) in headers_in(name, file).items()}
    if not shapes:
        return
    model = empty_model(name)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    for key in sorted(expected.keys() & shapes.keys()):
        if prod(expected[key]) != prod(shapes[key]):  # the loader may transpose or reshape: only sizes are compared
            raise ModelError(f"{name}: {key} has shape {list(shapes[key])}, but its config needs {list(expected[key])}")
    left_out = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["$^"]))
    absent = sorted(key for key in expected.keys() - shapes.keys() - tied(model) if not left_out.search(key))
    # with unknown names in the files, an absent weight may have the name of another version, which the loader knows
    if absent and not shapes.keys() - expected.keys():
        raise ModelError(missing(name, absent))


def check_quantisation(name: str) -> None:
    """Raise a ModelError if a model's weights are stored in a format whose package is not installed here."""
    from transformers.quantizers import AutoHfQuantizer

    stored = getattr(load_config(name), "quantization_config", None)
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    try:
        AutoHfQuantizer.from_config(stored, pre_quantized=True).validate_environment()
    except (ImportError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{name}: its weights are quantised ({method}), and cannot be loaded here: {first_line(error)}: use the "
            "model without quantisation"
        ) from None


def missing(name: str, absent: list[str]) -> str:
    return f"{name}: {len(absent)} weights are missing or have another shape, first {absent[0]}"


def tied(model: PreTrainedModel) -> set[str]:
    """Return all names of tied (shared) weights: a file needs only one name of each pair."""
    pairs: Mapping[str, str] = model.all_tied_weights_keys
    return {*pairs.keys(), *pairs.values()} if pairs else set()


def empty_model(name: str) -> PreTrainedModel:
    """Build the model on torch's meta device, which has shapes but no values."""
    config = load_config(name)
    if config.is_encoder_decoder and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{name}: {config.model_type} has an encoder and a decoder, but students and teachers must be causal LMs: "
            "name a decoder-only model"
        )
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"{name}: cannot build a causal LM from its config.json: {first_line(error)}") from None


def headers_in(name: str, file: Path) -> dict[str, tuple[Shape, bool]]:
    """Return the shape of each weight in a file, and whether it is stored in bfloat16."""
    if file.suffix != ".safetensors":
        return {key: (tuple(each.shape), each.dtype == torch.bfloat16) for key, each in unpickled(name, file)}
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no dict)
            return {key: (tuple(part.get_shape()), part.get_dtype() == "BF16") for key, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{name}: {file.name} is damaged: {first_line(error)}") from None


def only_bfloat16(name: str) -> bool:
    """Return True if the files of a model store all weights in bfloat16, or are not downloaded yet."""
    return all(narrow for file in weights_of(name) for _, narrow in headers_in(name, file).values())


def unpickled(name: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        tensors: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling a damaged file can raise any exception
        raise ModelError(f"{name}: {file.name} is damaged: {first_line(error)}") from None
    yield from ((key, value) for key, value in tensors.items() if isinstance(value, Tensor))


def read_through(name: str) -> int:
    own = [Path(name, ADAPTER)] if is_adapter(name) else []  # an adapter: check its weights and its base
    return check_numbers(name, (part for file in (*weights_of(name), *own) for part in read_chunks(name, file)))


def read_chunks(name: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix != ".safetensors":
        yield from unpickled(name, file)
        return
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 (no dict)
            part = opened.get_slice(key)
            rows, *rest = part.get_shape() or [0]
            if not rows:
                yield key, opened.get_tensor(key)
            at_once = max(1, READ_BYTES // (8 * prod(rest) or 1))
            for start in range(0, rows, at_once):
                yield key, part[start : start + at_once]


def check_numbers(name: str, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the number of values in these tensors; raise a ModelError if a value is not finite."""
    count, damaged = 0, set[str]()
    for key, tensor in tensors:
        count += tensor.numel()
        if tensor.is_floating_point() and not finite(tensor):
            damaged.add(key)
    if damaged:
        raise ModelError(
            f"{name}: its weights are damaged: {len(damaged)} of them contain values that are not finite, "
            f"first in {min(damaged)}"
        )
    return count


@torch.no_grad()
def finite(tensor: Tensor) -> bool:
    if tensor.itemsize < 2:
        tensor = tensor.float()
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    # fast path: a finite sum has only finite terms
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())
