"""Console of all commands, which prints control characters in text as escape sequences."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from slipstream.errors import printable


class Screen(Console):
    """Console that escapes untrusted text (of models, endpoints, data, configs) but keeps its own control codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
