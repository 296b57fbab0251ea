"""Everything that only a GPU can tell, in ten minutes: `make gpu`, or

    python benchmarks/gpu.py [--only head learner …] [--minutes 9.5] [--out runs/gpu]

needs torch, transformers, Triton, pytest and the small packages that the project imports (pydantic, rich, tomli_w,
safetensors); models have real shapes and random weights, so no hub is asked. Liger, cut-cross-entropy and vLLM are
measured as well where they are installed.

Each stage runs in a process of its own, with a share of the time as its limit; what it leaves unused, later stages may
use. Every figure is written as it comes: a run that is cut off keeps what it has. A wrong number is printed in capitals
and makes the exit status 1; it stops neither its stage nor the others. Results are a dated table, OUT/DATE-DEVICE.md,
and the same as JSON lines; a stage that fails or is cut off also leaves its whole error, or where it
was, in OUT/STAGE.log.
"""

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STAGES = {
    "device": 1,
    "head": 3,
    "packing": 6,
    "learner": 6,
    "sampler": 4,
    "scorer": 2,
    "publish": 2,
    "families": 3,
    "loop": 5,
    "vllm": 4,
}
"""In their order; the share of the time that each may take."""
NEEDED = ("torch", "transformers", "triton", "pytest", "pydantic", "rich", "tomli_w", "safetensors")
Figure = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help=", ".join(STAGES)
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="the time of all chosen stages together (9.5)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (runs/gpu)")
    parser.add_argument(
        "--small", action="store_true", help="miniature shapes on a CPU, which test the stages themselves"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        run_stage(args.stage, small=args.small)
        return 0
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"error: make gpu needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    device = "CPU, miniature shapes" if args.small else device_name()
    if device is None:
        print("error: make gpu needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    return run_all(args, device)


def device_name() -> str | None:
    """Return the name of the first GPU; None where torch sees none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run_stage(name: str, *, small: bool) -> None:
    """Run one stage in this process."""
    faulthandler.enable()
    sys.path.insert(0, str(HERE))
    from on_gpu.report import Report, Setting

    importlib.import_module(f"on_gpu.{name}").stage(Setting(small), Report(name))


def run_all(args: argparse.Namespace, device: str) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    where = args.out / f"{date.today()}-{device.replace(' ', '-').replace(',', '').lower()}"
    lines, page, figures = where.with_suffix(".jsonl"), where.with_suffix(".md"), list[Figure]()
    end = time.monotonic() + 60 * args.minutes
    with lines.open("w") as file:
        for index, name in enumerate(args.only):
            limit = limit_of(args.only[index:], end - time.monotonic())
            print(f"{name}: at most {limit:.0f} s", flush=True)
            command = [sys.executable, __file__, "--stage", name, *["--small"] * args.small]
            for figure in figures_of(name, command, limit, args.out / f"{name}.log"):
                print(f"  {shown(figure)}", flush=True)
                figures.append(figure)
                file.write(json.dumps(figure) + "\n")
                file.flush()
                page.write_text(table(figures, device, sys.argv[1:]))
    wrong = [figure for figure in figures if figure["wrong"]]
    print(f"{len(figures)} figures, {len(wrong)} wrong: {page}")
    for figure in wrong:
        print(f"WRONG: {figure['stage']}: {shown(figure)}")
    return 1 if wrong else 0


def limit_of(stages: Sequence[str], left: float) -> float:
    """Return the seconds that the first of these stages may take of those that are left.

    It may take up to twice its share: most stages need less than theirs, and only a few depend on the device.
    """
    return min(left, 2 * left * STAGES[stages[0]] / sum(STAGES[name] for name in stages))


def figures_of(name: str, command: list[str], limit: float, log: Path) -> Iterable[Figure]:
    """Run a stage as this command; yield its figures as they come, and how it failed if it did: `log` has the error."""
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda file: errors.extend(file), args=(child.stderr,), daemon=True)
        reader.start()
        timer = threading.Timer(limit, child.send_signal, [signal.SIGABRT])  # faulthandler prints where it is
        timer.start()
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        status = child.wait()
        timer.cancel()
        reader.join(5)
    took = time.monotonic() - began
    if status:
        log.write_text("".join(errors))
    if status and took >= limit:
        yield failure(name, f"cut off at its limit of {limit:.0f} s", wrong=False)
    elif status:
        reason = next((line.strip() for line in reversed(errors) if line.strip()), f"exit status {status}")
        yield failure(name, f"the stage failed: {reason}", wrong=True)


def failure(name: str, why: str, *, wrong: bool) -> Figure:
    return {"stage": name, "what": why, "value": None, "unit": "", "goal": "", "note": "", "wrong": wrong}


def environment() -> dict[str, str]:
    """Return the environment of a stage: the package of this checkout, and one thread for what runs on the CPU.

    Modules that the first stage compiles are kept for the others, even if Python cannot write beside their source.
    """
    path = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    own |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "slipstream-gpu")}
    return os.environ | own


def shown(figure: Figure) -> str:
    """Return one figure as a line of text."""
    goal = f" (goal: {figure['goal']})" if figure["goal"] else ""
    rest = f"; {figure['note']}" if figure["note"] else ""
    return f"{'WRONG: ' * figure['wrong']}{figure['what']}: {value_of(figure)}{goal}{rest}"


def value_of(figure: Figure) -> str:
    return "" if figure["value"] is None else f"{figure['value']:,.4g} {figure['unit']}"


def table(figures: Iterable[Figure], device: str, arguments: list[str]) -> str:
    """Return the page of results in Markdown."""
    import torch
    import transformers

    command = " ".join(["python benchmarks/gpu.py", *arguments])
    page = [
        f"# {device}, {date.today()}",
        "",
        f"`{command}`; torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "| stage | what | value | goal | note |",
        "|---|---|---|---|---|",
    ]
    for figure in figures:
        value = "**wrong** " * figure["wrong"] + value_of(figure)
        cells = (figure["stage"], figure["what"], value, figure["goal"], figure["note"])
        page.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    sys.exit(main())
