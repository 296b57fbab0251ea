"""The launcher never calls CUDA: engines that it forks could not use CUDA any more.

torch is made to look as if it had CUDA, and `flash_attn` is an empty package: transformers asks torch for a GPU while
it is imported if that package is installed. Each call of CUDA is written down with its process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
import torch, torch._dynamo
from slipstream.runtimes.local import ProcessLauncher

nvml, calls = int(sys.argv[1]), sys.argv[2]

def count_by_cuda():
    with open(calls, "a") as file:
        print(os.getpid(), file=file)
    return 3

torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: nvml
torch._C._cuda_getDeviceCount = count_by_cuda
with ProcessLauncher() as launcher:
    assert launcher.process is None, "the launcher is a fork of this process"
    print(json.dumps({"launcher": launcher.pid, "gpus": launcher.gpus()}))
"""
FLASH_ATTN = """
__version__ = "2.8.3"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return print
"""


@pytest.mark.parametrize(
    ("nvml", "gpus", "cuda_calls"),
    [
        (2, ["0", "1"], 0),
        (-1, ["0", "1", "2"], 1),  # without NVML, and for parts of GPUs (MIG), a child counts
    ],
)
def test_the_launcher_never_calls_cuda(tmp_path: Path, nvml: int, gpus: list[str], cuda_calls: int) -> None:
    install_flash_attn(tmp_path)
    calls = tmp_path / "calls"
    calls.touch()
    src = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), src]), "OMP_NUM_THREADS": "1"}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        environment.pop(name, None)
    command = [sys.executable, "-c", SCRIPT, str(nvml), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["gpus"] == gpus
    callers = [int(line) for line in calls.read_text().split()]
    assert answer["launcher"] not in callers
    assert len(callers) == cuda_calls


def install_flash_attn(where: Path) -> None:
    """Write a package that transformers takes for flash-attn."""
    for module in ("flash_attn", "flash_attn/bert_padding", "flash_attn/layers", "flash_attn/layers/rotary"):
        (where / module).mkdir()
        (where / module / "__init__.py").write_text(FLASH_ATTN)
    about = where / "flash_attn-2.8.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (about / "top_level.txt").write_text("flash_attn\n")
    (about / "RECORD").write_text("flash_attn/__init__.py,,\n")
