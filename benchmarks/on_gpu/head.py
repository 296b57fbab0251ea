"""The loss head without N×V: exactness of the Triton kernels against float64, time and memory against dense.

Liger's and cut-cross-entropy's kernels are timed beside it where they are installed. They compute one log-prob per row,
so they are compared with ours at one id per row.

Shapes: N rows, V vocabulary, H hidden, M ids per row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from on_gpu.report import Report, Setting, installed, peak_memory, relative, seconds_of
from slipstream.estimators import logprobs
from slipstream.estimators.logprobs.tiles import Bend

BENDS = {"plain": Bend(), "temperature 0.7": Bend(0.7), "scaled": Bend(1.0, 0.25), "capped": Bend(0.7, 0.5, 30.0)}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float64: 1e-9}
"""Largest relative error against float64; bfloat16 rounds every product to 8 bits."""


def stage(setting: Setting, report: Report) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    h, v = setting.of((1024, 151_936), (32, 777))
    exactness(setting, report, setting.of(512, 24), v, h)
    for n in setting.of((2048, 8192, 32_768), (64,)):
        speed(setting, report, n, v, h)


def exactness(setting: Setting, report: Report, n: int, v: int, h: int) -> None:
    """Values and gradients of every kind of head, against the dense formula in float64."""
    torch.manual_seed(0)
    at = {"device": setting.device}
    hidden_NH, weight_VH, bias_V = torch.randn(n, h, **at), torch.randn(v, h, **at) * h**-0.5, torch.randn(v, **at)
    ids_NM, target_NM = torch.randint(0, v, (n, 16), **at), torch.randn(n, 16, **at)
    ids_NM[1, 3] = -1
    dtypes = (torch.float32, torch.float32) if setting.small else (torch.float32, torch.bfloat16)
    for dtype in dict.fromkeys(dtypes):
        for name, bend in BENDS.items():
            for bias in (None, bias_V):
                inputs = [hidden_NH.to(dtype), weight_VH.to(dtype), None if bias is None else bias.to(dtype)]
                expected = by_float64(inputs, ids_NM, target_NM, bend)
                found = by_head(inputs, ids_NM, target_NM, bend)
                worst = max(relative(a, b) for a, b in zip(found, expected, strict=True))
                kind = f"{name}, {'with bias, ' * (bias is not None)}{str(dtype).removeprefix('torch.')}"
                report.check(f"head against float64: {kind}", worst, LIMITS[dtype])


def by_head(inputs: list[Tensor | None], ids_NM: Tensor, target_NM: Tensor, bend: Bend) -> list[Tensor]:
    """Log-probs, entropies and gradients by `logprobs_and_entropy_at`, then the gradients by `fused_loss`."""
    hidden, weight, bias = (None if x is None else x.detach().clone().requires_grad_() for x in inputs)
    assert hidden is not None and weight is not None
    options: dict[str, Any] = {"bias": bias, **bend._asdict()}
    logp_NM, entropy_N = logprobs.logprobs_and_entropy_at(hidden, weight, ids_NM, **options)
    plain = torch.autograd.grad((logp_NM * target_NM).sum() + entropy_N.square().sum(), [hidden, weight])

    def loss_of(logp_CM: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return (logp_CM * target_NM[rows]).sum(), {}

    loss, _ = logprobs.fused_loss(hidden, weight, ids_NM, loss_of, **options)
    return [logp_NM.detach(), entropy_N.detach(), *plain, *torch.autograd.grad(loss, [hidden, weight])]


def by_float64(inputs: list[Tensor | None], ids_NM: Tensor, target_NM: Tensor, bend: Bend) -> list[Tensor]:
    """The same by the dense formula."""
    hidden, weight, bias = (None if x is None else x.detach().double().requires_grad_() for x in inputs)
    assert hidden is not None and weight is not None
    x_NV = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logp_NV = bend.logits(x_NV).log_softmax(-1)
    logp_NM = logp_NV.gather(1, ids_NM.clamp(min=0)).masked_fill(ids_NM < 0, 0.0)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(1)
    inner = (logp_NM * target_NM).sum()
    plain = torch.autograd.grad(inner + entropy_N.square().sum(), [hidden, weight], retain_graph=True)
    return [logp_NM.detach(), entropy_N.detach(), *plain, *torch.autograd.grad(inner, [hidden, weight])]


def speed(setting: Setting, report: Report, n: int, v: int, h: int) -> None:
    """Forward and backward of one loss on M = 16 ids per row, then on one id per row."""
    torch.manual_seed(0)
    hidden = torch.randn(n, h, device=setting.device).to(setting.dtype).requires_grad_()
    weight = (torch.randn(v, h, device=setting.device) * h**-0.5).to(setting.dtype).requires_grad_()
    measured: dict[str, tuple[float, int]] = {}
    for m in (16, 1):
        ids_NM = torch.randint(0, v, (n, m), device=setting.device)
        for name, loss in contenders(hidden, weight, ids_NM).items():
            label = f"{name}, M = {m}"

            def work(loss: Callable[[], Tensor] = loss) -> None:
                hidden.grad = weight.grad = None
                loss().backward()

            try:
                took = seconds_of(work, setting, repeats=3, warm_up=1)
                hidden.grad = weight.grad = None
                with peak_memory(setting) as peak:
                    work()
            except torch.cuda.OutOfMemoryError:
                report.skip(f"N = {n:,}: {label}", "out of memory")
                continue
            extra = peak[0] - (hidden.numel() + weight.numel()) * hidden.itemsize  # gradients are not extra
            measured[label] = took, extra
            report.number(f"N = {n:,}: {label}", 1e3 * took, "ms", note=f"{extra / 2**20:,.0f} MiB extra")
            if name != "dense" and (dense := measured.get(f"dense, M = {m}")):
                goals = {"fused": ("≤ 1.05", "≥ 20")}.get(name, ("", ""))
                report.number(f"N = {n:,}: {label}, time against dense", took / dense[0], "×", goal=goals[0])
                if not setting.small:
                    share = dense[1] / max(extra, 1)
                    report.number(f"N = {n:,}: {label}, dense's extra memory over its own", share, "×", goal=goals[1])


def contenders(hidden: Tensor, weight: Tensor, ids_NM: Tensor) -> dict[str, Callable[[], Tensor]]:
    n = len(ids_NM)

    def dense() -> Tensor:
        return -(hidden @ weight.T).float().log_softmax(-1).gather(1, ids_NM).sum() / n

    def chunked() -> Tensor:
        return -logprobs.logprobs_at(hidden, weight, ids_NM).sum() / n

    def fused() -> Tensor:
        return logprobs.fused_loss(hidden, weight, ids_NM, lambda logp, rows: (-logp.sum() / n, {}))[0]

    found = {"dense": dense, "chunked": chunked, "fused": fused}
    if ids_NM.shape[1] > 1:
        return found
    if installed("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger"] = lambda: liger(weight, hidden, ids_NM[:, 0])
    if installed("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = lambda: linear_cross_entropy(hidden, weight, ids_NM[:, 0])
    return found
