"""The console of every command: it shows all text, and lets none of it reach the terminal as a command."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from slipstream.errors import printable


class Screen(Console):
    """Models, endpoints, data and configs may say anything. Styles and cursor movements are ours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
