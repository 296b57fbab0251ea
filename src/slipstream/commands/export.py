"""`slipstream export`: write the student of a run as a GGUF file, by llama.cpp's own converters."""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from slipstream.commands.common import note
from slipstream.errors import ConfigError, RunDirError
from slipstream.models.adapters import base_of, is_adapter
from slipstream.models.resolve import model_path
from slipstream.plan.placement import size
from slipstream.plan.subject import evaluated_model

LLAMA_CPP = "LLAMA_CPP"
"""Environment variable with the directory of a checkout of llama.cpp."""
MODEL_CONVERTER, ADAPTER_CONVERTER = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
GGUF_MAGIC = b"GGUF"
"""First bytes of every GGUF file."""


def run(args: Namespace) -> None:
    export(args.directory, args.gguf, kind=args.type, adapter=args.adapter)


def export(directory: Path, file: Path, *, kind: str, adapter: bool) -> None:
    """Convert the student of a run, with its adapter merged, or with `adapter` its adapter alone."""
    subject = evaluated_model(str(directory))
    for text in subject.notes:
        note(f"note: {text}")
    model, options = Path(subject.model), list[str]()
    if subject.run is None or subject.config is None:
        raise RunDirError(f"{directory} is no run: name the directory of a run, its final, or one of its checkpoints/N")
    if is_adapter(str(model)):
        raise ConfigError(f"{directory} is an adapter: name its run, with --adapter for the adapter alone")
    if adapter:
        model /= "adapter"
        if not model.is_dir():
            why = "a run saves it at its end" if subject.config.learner.lora else "the run trained none (learner.lora)"
            raise ConfigError(f"--adapter: {subject.model} has no adapter, because {why}: drop it")
        student = subject.config.student  # the directory of a built-in one can move with the package
        base = model_path(student if student.startswith("builtin:") else base_of(str(model)))
        options = ["--base" if Path(base).is_dir() else "--base-model-id", base]
    if file.exists():
        raise ConfigError(f"--gguf {file}: this file exists: name another, or remove it")
    if not file.parent.is_dir():
        raise ConfigError(f"--gguf {file}: there is no directory {file.parent}")
    converter = find_converter(ADAPTER_CONVERTER if adapter else MODEL_CONVERTER)
    part = file.with_name(f"part-{os.getpid()}-{file.name}")
    command = [sys.executable, converter, str(model), *options, "--outfile", str(part), "--outtype", kind]
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if done.returncode or not is_gguf(part):
            *_, why = ["it wrote no GGUF file", *done.stderr.decode(errors="replace").splitlines()]
            raise ConfigError(f"{converter} cannot convert {model}: {why}")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    print(f"{size(file.stat().st_size):>12}  {file}")


def find_converter(name: str) -> str:
    """Return the path of a converter, in the checkout that LLAMA_CPP names or else on the PATH."""
    there = os.environ.get(LLAMA_CPP)
    found = str(Path(there, name)) if there else shutil.which(name)
    if found is None or not Path(found).is_file():
        where = f"{there} ({LLAMA_CPP}) has none" if there else f"there is none on the PATH, and {LLAMA_CPP} is not set"
        raise ConfigError(
            f"--gguf needs {name} of llama.cpp, and {where}: clone https://github.com/ggml-org/llama.cpp and set "
            f"{LLAMA_CPP} to its directory"
        )
    return found


def is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
