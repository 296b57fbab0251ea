"""Convert a GGUF file to a directory that transformers loads, once; later uses read the directory.

A child process converts, because this needs torch and the memory of a whole model. Quantised weights become float32,
which holds them exactly. A file whose tensors are all bfloat16 (or all float16) keeps this format.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from slipstream.errors import ModelError, first_line
from slipstream.run_dir.temporary import TemporaryDirectory


def directory_of(file: str) -> str:
    """Return the directory with the converted model; convert the file if this was not done yet."""
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ModelError(f"{file}: no such file")
    if absent := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelError(f"{file}: reading a GGUF file needs {' and '.join(absent)}: pip install 'slipstream[gguf]'")
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "slipstream" / "gguf" / f"{path.stem}-{key}"
    if not folder.is_dir():
        _convert_in_child(file, path, folder)
    return str(folder)


def _convert_in_child(file: str, path: Path, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = TemporaryDirectory("converting-", str(folder.parent.parent))
    except OSError as error:
        raise ModelError(
            f"{file}: {folder.parent} cannot be written: {error.strerror}; set XDG_CACHE_HOME to a directory of yours"
        ) from None
    with closing(work):
        made = work.path / "model"
        command = [sys.executable, "-m", __name__, str(path), str(made)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
            raise ModelError(f"{file}: transformers cannot read this GGUF file: {reason}")
        try:
            made.rename(folder)
        except OSError:  # another process has converted the same file meanwhile
            if not folder.is_dir():
                raise


def convert(source: Path, target: Path) -> None:
    """Write model and tokenizer of a GGUF file as safetensors and tokenizer.json."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    formats = {tensor.tensor_type.name for tensor in GGUFReader(source).tensors if tensor.data.ndim > 1}
    dtype = {frozenset({"BF16"}): torch.bfloat16, frozenset({"F16"}): torch.float16}.get(
        frozenset(formats), torch.float32
    )
    here = {"gguf_file": source.name, "trust_remote_code": False}  # other files beside it may name code
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, **here)
    config = model.config
    del config.quantization_config  # the weights are no longer quantised
    fresh = type(model)(config).to(dtype)  # transformers does not save a model that it has read from GGUF
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **here).save_pretrained(target)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # any failure of the libraries becomes one line for the parent
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        print(first_line(error), file=sys.stderr)
        raise SystemExit(1) from None
