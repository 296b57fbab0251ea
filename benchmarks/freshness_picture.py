"""docs/freshness.svg: what a sample counts, by its lag and by how far the student has drifted since.

python benchmarks/freshness_picture.py > docs/freshness.svg
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from slipstream.estimators.drift import score, weight

WIDTH, HEIGHT, LEFT, TOP = 300, 190, 50, 34
COLORS = ("#1b6ca8", "#2a9d5c", "#c98a00", "#c2412d", "#7a4fa3")
Point = tuple[float, float]


def worth(lag: float, drift: float) -> float:
    return float(weight(score(torch.tensor(lag), torch.tensor(drift, dtype=torch.float64), 0.0)))


def panel(
    x0: int, title: str, axis: str, ticks: Sequence[float], top: float, curves: Iterable[tuple[str, list[Point]]]
) -> str:
    def at(point: Point) -> str:
        return f"{x0 + point[0] / top * WIDTH:.1f},{TOP + (1 - point[1]) * HEIGHT:.1f}"

    parts = [f'<text x="{x0 + WIDTH / 2}" y="18" text-anchor="middle" font-weight="bold">{title}</text>']
    for tick in ticks:
        x = x0 + tick / top * WIDTH
        parts.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - share) * HEIGHT
        parts.append(f'<path d="M{x0} {y:.1f}h{WIDTH}" class="grid"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{axis}</text>')
    for number, (name, points) in enumerate(curves):
        color, y = COLORS[number], TOP + 16 + 16 * number
        parts.append(f'<polyline points="{" ".join(map(at, points))}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<path d="M{x0 + WIDTH - 104} {y - 4}h18" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x0 + WIDTH - 80}" y="{y}">{name}</text>')
    return "\n".join(parts)


def curve(of: Callable[[float], float], top: float) -> list[Point]:
    return [(top * i / 80, of(top * i / 80)) for i in range(81)]


def picture() -> str:
    by_lag = [(f"drift {d:g}", curve(lambda lag, d=d: worth(lag, d), 8.0)) for d in (0.0, 0.02, 0.1, 0.5)]  # type: ignore[misc]
    by_drift = [(f"lag {n}", curve(lambda d, n=n: worth(n, d), 0.5)) for n in (0, 1, 2, 4, 8)]  # type: ignore[misc]
    style = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd;stroke-width:1}"
    second = 2 * LEFT + WIDTH + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {second + WIDTH + 20} {TOP + HEIGHT + 44}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            panel(LEFT, "weight by lag", "lag, in updates", (0, 2, 4, 6, 8), 8.0, by_lag),
            panel(
                second, "weight by drift", "KL to what drew it, in nats", (0, 0.1, 0.2, 0.3, 0.4, 0.5), 0.5, by_drift
            ),
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(picture())
