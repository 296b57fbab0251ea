"""A teacher of the run: its scorers, and the settings that say what they score and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config.teacher import TeacherConfig
from slipstream.pipeline.pool import Pool
from slipstream.pipeline.publish import MovingTeacher
from slipstream.pipeline.watchdog import ResponseWatch

NO_TEACHER = TeacherConfig(model="none", recheck=0)
"""Settings in a run without teachers."""


@dataclass(frozen=True)
class Teacher:
    name: str
    settings: TeacherConfig
    pool: Pool[Any]
    shows: tuple[str, ...] = ()
    """Fields of `Attempts` in the context of this teacher."""
    silence: ResponseWatch | None = None
    """Warns if the teacher's endpoint does not answer; None for a teacher without endpoint."""

    @property
    def follows(self) -> bool:
        return isinstance(self.pool, MovingTeacher)
