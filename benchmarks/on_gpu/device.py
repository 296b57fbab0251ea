"""The ceilings of the device: how fast it copies its own memory, and how fast it multiplies matrices."""

import torch

from on_gpu.report import Report, Setting, peak_tflops, seconds_of


def copy_rate(setting: Setting) -> float:
    """Return bytes per second of a device-to-device copy, counting bytes read and bytes written."""
    source = torch.ones(setting.of(1 << 31, 1 << 20), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), setting)


def stage(setting: Setting, report: Report) -> None:
    report.number("device copy, read and write", copy_rate(setting) / 1e9, "GB/s")
    n = setting.of(8192, 64)
    left, right = (torch.randn(n, n, device=setting.device).to(setting.dtype) for _ in range(2))
    rate = 2 * n**3 / seconds_of(lambda: left @ right, setting) / 1e12
    report.number(
        f"{n}×{n}×{n} product of random matrices", rate, "TFLOP/s", note=f"data sheet {peak_tflops(setting):g}"
    )
