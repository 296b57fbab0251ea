"""New weights on their way to a sampler: through host memory as the project publishes, by device copy, by CUDA IPC."""

import time
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from on_gpu.device import copy_rate
from on_gpu.report import SHAPES, Report, Setting, seconds_of
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.weights import export_weights, fingerprint, load_weights


def stage(setting: Setting, report: Report) -> None:
    ceiling = copy_rate(setting)
    learner, sampler = (setting.model(SHAPES[0], seed=seed) for seed in (0, 1))
    dtype = str(setting.dtype).removeprefix("torch.")
    weights = export_weights(learner.model, dtype)
    size = len(weights.body)
    report.number("weights", size / 1e9, "GB")
    steps = {
        "export, device to host": lambda: export_weights(learner.model, dtype),
        "load, host to device": lambda: load_weights(sampler.model, weights),
        "fingerprint of what runs": lambda: fingerprint(sampler.model, dtype),
    }
    for name, work in steps.items():
        report.number(name, size / seconds_of(work, setting, repeats=3, warm_up=1) / 1e9, "GB/s")
    same = fingerprint(sampler.model, dtype) == fingerprint(learner.model, dtype, exported=weights)
    report.check("fingerprints after a publish (0: equal)", float(not same), 0)
    copied = seconds_of(lambda: copy(learner, sampler), setting)
    note = f"device's own copy {ceiling / 1e9:,.0f} GB/s"
    report.number("device copy, tensor by tensor, read and write", 2 * size / copied / 1e9, "GB/s", note=note)
    if setting.small:
        report.skip("CUDA IPC", "no GPU")
    else:
        report.number("CUDA IPC, read and write", 2 * size / by_ipc(learner) / 1e9, "GB/s", note=note)


@torch.no_grad()
def copy(source: LanguageModel, target: LanguageModel) -> None:
    for new, old in zip(source.model.parameters(), target.model.parameters(), strict=True):
        old.copy_(new)


def by_ipc(lm: LanguageModel) -> float:
    """Return the seconds in which another process copies all weights from this process's device memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=receive, args=(there,), daemon=True)
    child.start()
    there.close()  # so that a child that dies is seen
    here.send([parameter.detach() for parameter in lm.model.parameters()])
    if not here.poll(60):
        child.kill()
        raise TimeoutError("the process that was to receive weights by CUDA IPC did not answer within 60 s")
    took: float = here.recv()
    here.send(None)
    child.join(30)
    return took


def receive(connection: Any) -> None:
    """Copy the tensors that come by IPC, three times; answer with the fastest."""
    theirs = connection.recv()
    own = [torch.empty_like(tensor) for tensor in theirs]
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, source in zip(own, theirs, strict=True):
            target.copy_(source)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    connection.send(min(found))
    connection.recv()
