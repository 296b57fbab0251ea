"""The configuration: all sections and the rules between them. Unknown keys are errors. `file.py` reads config files."""

from typing import Self

from pydantic import model_validator

from slipstream.config.rules import first_clash
from slipstream.config.sections import Sections


class Config(Sections):
    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if (clash := first_clash(self)) is not None:
            raise ValueError(clash)
        return self
