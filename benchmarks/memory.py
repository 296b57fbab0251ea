"""Memory of every process of a run: does it grow with the updates, and how much does a parameter of the model need?

    python benchmarks/memory.py flat [--updates 10000]       # a miniature run; resident memory as it goes on
    python benchmarks/memory.py size [--ranks 2]             # random weights, float32; peaks against the plan
    python benchmarks/memory.py publish [--ranks 2]          # the same model: peaks of one export, and of one load
    python benchmarks/memory.py start [--ranks 2]            # the same model in bfloat16: peak as its ranks start

`flat` prints the resident memory of the coordinator, sampler, scorer and learner at several updates. `size` runs three
updates with a tiny model and with a large one, and prints the differences of their peaks, also as copies of weights,
and the same differences of what the plan says (`config --check`). The weights of a scorer are pages of the file.
Exported weights are shared pages, which all processes have together.

`publish` makes one export of the learner's ranks and one load of a sampler, without a run. It prints how far the
private memory of each process, and the memory of exported weights on this machine, rise above the state before.

`start` starts the learner's ranks, which train in float32, and no other engine. It prints the peak of their private
memory and of the memory that they share, above that of the same ranks of a tiny model, also as copies of the weights.
Freed weights go back to the system at once, as those of large models do (`MALLOC_MMAP_THRESHOLD_`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from slipstream.models.resolve import model_path

CONFIG = """
student = "{model}"
updates = {updates}
[data]
train = "builtin:arithmetic"
[teachers.main]
model = "{model}"
[sampler]
max_tokens = 8
slots = 8
[learner]
batch_size = 8
token_budget = 64
lr = 1e-6
ranks = {ranks}
[schedule]
kind = "async"
tau = 2
[checkpoint]
minutes = 0
[health]
canary = 0
stop = false
[runtime]
kind = "local"
device = "cpu"
[log]
samples = 0
trace = false
"""
MIB = 2**20
PARTS = ("RssAnon", "RssFile", "RssShmem")


def processes(parent: int) -> Iterator[tuple[str, int]]:
    """Name and pid of a process and of all its descendants."""
    yield Path(f"/proc/{parent}/comm").read_text().strip(), parent
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child))


def resident(parent: int) -> dict[str, dict[str, int]]:
    """Resident bytes by process and kind of page."""
    found = dict[str, dict[str, int]]()
    try:
        for name, pid in processes(parent):
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            if "VmRSS" in lines:
                name = "coordinator" if pid == parent else name
                found[name] = {part: int(lines[part].split()[0]) * 1024 for part in PARTS}
    except (FileNotFoundError, ProcessLookupError):  # a process ended meanwhile
        pass
    return found


def updates_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 65536))
        last = lines.read().rsplit(b"\n", 2)
    return int(json.loads(last[-2])["update"]) if len(last) > 2 else 0


def watched(
    folder: Path, model: str, updates: int, pause: float, ranks: int = 1
) -> Iterator[tuple[int, dict[str, dict[str, int]]]]:
    """Run, and yield the updates so far with the memory of all processes."""
    folder.mkdir()
    (folder / "run.toml").write_text(CONFIG.format(model=model, updates=updates, ranks=ranks))
    command = [str(Path(sys.executable).with_name("slipstream")), "train", "run.toml", "--output", "run"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as run:
        while run.poll() is None:
            yield updates_of(folder / "run"), resident(run.pid)
            time.sleep(pause)
    if run.returncode:
        sys.exit((folder / "log").read_text()[-2000:])


def flat(updates: int) -> None:
    marks = [updates * share // 100 for share in (2, 5, 10, 20, 40, 60, 80, 100)]
    names, last = list[str](), dict[str, dict[str, int]]()
    with tempfile.TemporaryDirectory() as folder:
        for done, found in watched(Path(folder, "flat"), "builtin:student", updates, 0.2):
            if marks and done >= marks[0] and found:
                marks = [mark for mark in marks if mark > done]
                if not names:
                    names = list(found)
                    print("resident MiB at update", *names, sep=" | ")
                last = found
                print(
                    done,
                    *(f"{sum(last[name].values()) / MIB:.0f}" for name in names if name in last),
                    sep=" | ",
                    flush=True,
                )


def enlarged(folder: Path, hidden: int, layers: int, dtype: str = "float32") -> int:
    """Save a random model in the built-in student's family and with its tokenizer; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model_path("builtin:student"), folder)
    (folder / "model.safetensors").unlink()
    file = folder / "config.json"
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "head_dim": hidden // 8,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "layer_types": ["full_attention"] * layers}
    file.write_text(json.dumps(json.loads(file.read_text()) | shape | heads | {"max_window_layers": layers}))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def peaks(folder: Path, model: str, ranks: int) -> dict[str, dict[str, int]]:
    """Peak of each kind of page by process."""
    most = dict[str, dict[str, int]]()
    for _, found in watched(folder, model, 3, 0.01, ranks):
        for name, parts in found.items():
            here = most.setdefault(name, {})
            for part, size in parts.items():
                here[part] = max(here.get(part, 0), size)
    return most


def planned(model: str, ranks: int) -> dict[str, float]:
    """Return the bytes that the plan has for each process."""
    from slipstream.config.file import parse
    from slipstream.objective.method import method_of
    from slipstream.plan.engines import engines_of
    from slipstream.plan.placement import needs

    config = parse(tomllib.loads(CONFIG.format(model=model, updates=3, ranks=ranks)))
    return {need.name: need.total for need in needs(engines_of(config, method_of(config)))}


def size(hidden: int, layers: int, ranks: int) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    with tempfile.TemporaryDirectory() as folder:
        root, tiny = Path(folder), "builtin:student"
        model = str(root / "model")
        parameters = enlarged(root / "model", hidden, layers)
        small, large = peaks(root / "small", tiny, ranks), peaks(root / "large", model, ranks)
        plan, plan_of_tiny = planned(model, ranks), planned(tiny, ranks)
    print(f"{parameters / 1e6:.0f} M parameters, float32: {4 * parameters / MIB:.0f} MiB of weights")
    print("process", "own MiB", "in copies", "shared MiB", "mapped files MiB", "planned MiB", "own/planned", sep=" | ")
    for name, most in large.items():
        own, file, shared = (most[part] - small.get(name, most)[part] for part in PARTS)
        row = f"{own / MIB:.0f}", f"{own / (4 * parameters):.2f}", f"{shared / MIB:.0f}", f"{file / MIB:.0f}"
        if name in plan:
            need = plan[name] - plan_of_tiny[name]
            row += f"{need / MIB:.0f}", f"{own / need:.2f}"
        print(name, *row, sep=" | ")


def exported(pids: dict[str, int]) -> int:
    """Bytes of weights in anonymous shared files that these processes have open, each file once."""
    files = dict[int, int]()
    for pid in pids.values():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "memfd:slipstream" in str(link.readlink()):
                    stat = link.stat()
                    files[stat.st_ino] = stat.st_blocks * 512
    return sum(files.values())


def private(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


async def rises(work: Awaitable[Any], pids: dict[str, int]) -> tuple[Any, dict[str, int]]:
    """Result of a call, and the largest rise of the private memory of each process, of the shared and of all memory."""

    def now() -> dict[str, int]:
        found = {name: private(pid) for name, pid in pids.items()} | {"shared": exported(pids)}
        return found | {"together": sum(found.values())}

    before, ended = now(), threading.Event()
    most = dict(before)

    def watch() -> None:
        while not ended.wait(0.002):
            for name, size in now().items():
                most[name] = max(most[name], size)

    thread = threading.Thread(target=watch)
    thread.start()
    result = await work
    ended.set()
    thread.join()
    return result, {name: most[name] - before[name] for name in most}


def publish(hidden: int, layers: int, ranks: int) -> None:
    from slipstream.config.file import parse
    from slipstream.data.tokenizers import load_tokenizer
    from slipstream.objective.method import method_of
    from slipstream.plan.engines import engines_of
    from slipstream.runtimes import local

    with tempfile.TemporaryDirectory() as folder:
        parameters = enlarged(Path(folder) / "model", hidden, layers)
        config = parse(
            {
                "student": f"{folder}/model",
                "data": {"train": "builtin:arithmetic"},
                "loss": {"weight": 0.0},
                "policy": {"advantage": "reinforce_plus_plus"},
                "task": {"reward": "exact"},
                "sampler": {"slots": 2, "max_tokens": 8},
                "learner": {"batch_size": 8, "ranks": ranks},
                "runtime": {"device": "cpu"},
            }
        )
        tokenizer = load_tokenizer(f"{folder}/model")
        engines: Any = local.open_engines(engines_of(config, method_of(config)), tokenizer, say=lambda _: None)
        learners = engines.learner.ranks if ranks > 1 else [engines.learner]
        pids = {worker.name: worker.pid for worker in [*learners, *engines.samplers]} | {"coordinator": os.getpid()}

        async def work() -> dict[str, dict[str, int]]:
            (weights, _), first = await rises(engines.learner.export(), pids)
            _, load = await rises(engines.samplers[0].publish(weights, "drain"), pids)
            del weights
            return {"export": first, "load": load}

        try:
            found = asyncio.run(work())
        finally:
            engines.close()
    print(f"{parameters / 1e6:.0f} M parameters, float32: {4 * parameters / MIB:.0f} MiB of weights; MiB above before")
    print("", *found["export"], sep=" | ")
    for name, rise in found.items():
        print(name, *(f"{size / MIB:.0f}" for size in rise.values()), sep=" | ")


def started(model: str, ranks: int) -> dict[str, int]:
    """Return the peaks of private, shared and all memory of the processes of ranks while these start."""
    from slipstream.config.file import parse
    from slipstream.data.tokenizers import load_tokenizer
    from slipstream.objective.method import method_of
    from slipstream.plan.engines import engines_of
    from slipstream.runtimes import local
    from slipstream.runtimes.workers import worker_specs

    config = parse(
        {
            "student": model,
            "data": {"train": "builtin:arithmetic"},
            "loss": {"weight": 0.0},
            "policy": {"advantage": "reinforce_plus_plus"},
            "task": {"reward": "exact"},
            "learner": {"batch_size": 8, "ranks": ranks},
            "runtime": {"device": "cpu"},
        }
    )
    ended, most = threading.Event(), {"private": 0, "shared": 0, "together": 0}

    def watch() -> None:
        while not ended.wait(0.01):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process ended meanwhile
                pids = {str(pid): pid for _, pid in processes(os.getpid()) if pid != os.getpid()}
                now = {"private": sum(map(private, pids.values())), "shared": exported(pids)}
                now["together"] = sum(now.values())
                for name, size in now.items():
                    most[name] = max(most[name], size)

    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    wanted = [each for each in worker_specs(engines_of(config, method_of(config)), load_tokenizer(model)) if each.meets]
    thread = threading.Thread(target=watch)
    thread.start()
    with contextlib.ExitStack() as stack:
        local.start(wanted, stack.enter_context(local.ProcessLauncher()), stack, say=lambda _: None)
        ended.set()
    thread.join()
    return most


def start(hidden: int, layers: int, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = 4 * enlarged(Path(folder) / "model", hidden, layers, "bfloat16")
        small, large = started("builtin:student", ranks), started(f"{folder}/model", ranks)
    print(f"{ranks} ranks, {whole / MIB:.0f} MiB of weights in float32; peaks above those of a tiny model")
    print("memory | MiB | in copies")
    for name, size in large.items():
        print(name, f"{(size - small[name]) / MIB:.0f}", f"{(size - small[name]) / whole:.2f}", sep=" | ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("flat", "size", "publish", "start"))
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="number of the learner's ranks (2)")
    args = parser.parse_args()
    if args.what == "flat":
        flat(args.updates)
    elif args.what == "start":
        start(args.hidden, args.layers, args.ranks)
    elif args.what == "publish":
        publish(args.hidden, args.layers, args.ranks)
    else:
        size(args.hidden, args.layers, args.ranks)


if __name__ == "__main__":
    main()
