"""The head without N×V: peak memory and time of forward and backward, against the dense path.

    python benchmarks/head.py [--rows 2048] [--vocabulary 151936] [--hidden 1024] [--draws 16] [--repeats 3]
    python benchmarks/head.py --trl-python /tmp/trl/bin/python      # also TRL's chunked kernel (one id per row)

Every contender runs in a process of its own, in turn. Extra memory is the peak of resident memory during forward and
backward, less what was resident before and less the gradient of the weight, which all of them return. On a shared
machine the ratio of CPU seconds is steadier than that of seconds.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def contender(name: str, n: int, v: int, h: int, m: int, threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(n, h).requires_grad_()
    weight = (torch.randn(v, h) * h**-0.5).requires_grad_()
    ids = torch.randint(0, v, (n, m))
    target = torch.randn(n, m)

    def loss_of(logp: Any, rows: slice) -> tuple[Any, dict[str, Any]]:
        return (logp - target[rows]).square().sum() / n, {}

    def dense() -> Any:
        logp = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
        return loss_of(logp, slice(None))[0]

    def chunked() -> Any:
        from slipstream.estimators.logprobs import logprobs_at

        return loss_of(logprobs_at(hidden, weight, ids), slice(None))[0]

    def fused() -> Any:
        from slipstream.estimators.logprobs import fused_loss

        return fused_loss(hidden, weight, ids, loss_of)[0]

    def trl() -> Any:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        logp = ChunkedLogProbFunction.apply(hidden, weight, None, ids[:, 0].contiguous(), 1.0, 8192, None, 1.0, ())[0]
        return (logp - target[:, 0]).square().sum() / n

    work = {"dense": dense, "chunked": chunked, "fused": fused, "trl": trl}[name]
    (hidden[:8] @ weight[:8].T).sum().backward()  # threads, kernels and the gradient buffers are there
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began, cpu_began = resident("VmRSS"), time.perf_counter(), time.process_time()
    loss = work()
    loss.backward()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    extra = resident("VmHWM") - before - weight.numel() * 4
    return {"seconds": seconds, "cpu": cpu, "extra": extra, "loss": loss.item(), "norm": weight.grad.norm().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-python")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        shape = (args.rows, args.vocabulary, args.hidden, args.draws, args.threads)
        print(json.dumps(contender(args.one, *shape)))
        return

    pythons = dict.fromkeys(("dense", "chunked", "fused"), sys.executable)
    if args.trl_python:
        pythons["trl"] = args.trl_python
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    options = [f"--{key}={getattr(args, key)}" for key in ("rows", "vocabulary", "hidden", "draws", "threads")]
    for _ in range(args.repeats):
        for name, python in pythons.items():
            command = [python, __file__, "--one", name, *options]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"N = {args.rows}, V = {args.vocabulary}, H = {args.hidden}, M = {args.draws}, float32, {args.threads} threads"
    )
    dense = found["dense"]
    for name, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        wall, cpu = (
            statistics.median(run[clock] / other[clock] for run, other in zip(runs, dense, strict=True))
            for clock in ("seconds", "cpu")
        )
        memory = [run["extra"] for run in runs]
        share = statistics.median(dense_run["extra"] for dense_run in dense) / statistics.median(memory)
        print(
            f"{name:8} {statistics.median(seconds):6.1f} s [{min(seconds):.1f} … {max(seconds):.1f}]   "
            f"{wall:.2f}× dense, {cpu:.2f}× in CPU seconds   extra {statistics.median(memory) / 2**20:7,.0f} MiB, "
            f"1/{share:.1f} of dense   loss {runs[0]['loss']:.4f}, |∂weight| {runs[0]['norm']:.5f}"
        )


if __name__ == "__main__":
    main()
