"""The page of all estimators is what the code says, and says it of every one of them."""

from typing import Any, Literal, get_args, get_origin

import pytest

from slipstream.cli import main
from slipstream.config.losses import DISTILLATION_LOSSES
from slipstream.config.objective import CorrectionConfig, PolicyConfig, ReferenceConfig
from slipstream.estimators.catalogue import Entry, catalogue, find
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS, RS_MODES
from slipstream.estimators.tables.policy import POLICY_LOSSES


def test_every_estimator_is_on_it_with_every_column_filled() -> None:
    families = catalogue()
    assert [entry.name for entry in families["distillation"]] == list(DISTILLATION_LOSSES)
    assert [entry.name for entry in families["policy"]] == list(POLICY_LOSSES)
    assert [entry.name for entry in families["advantage"]] == list(ADVANTAGES)
    assert [entry.name for entry in families["correction"]] == list(PRESETS) and len(PRESETS) == 19
    assert [entry.name for entry in families["rejection"]] == list(RS_MODES) and len(RS_MODES) == 13
    for entries in families.values():
        for entry in entries:
            assert all(getattr(entry, column) for column in Entry._fields), entry


@pytest.mark.parametrize(
    ("family", "section", "setting"),
    [
        ("policy", PolicyConfig, "loss"),
        ("advantage", PolicyConfig, "advantage"),
        ("correction", CorrectionConfig, "preset"),
        ("level", CorrectionConfig, "is_level"),
        ("estimate", ReferenceConfig, "estimate"),
        ("controller", ReferenceConfig, "control"),
        ("centre", PolicyConfig, "centre"),
    ],
)
def test_it_lists_what_a_config_can_choose_and_nothing_else(family: str, section: Any, setting: str) -> None:
    assert {entry.name for entry in catalogue()[family]} == set(choices(section, setting))


def choices(section: Any, setting: str) -> list[str]:
    """The names that a setting takes, left out not counted."""
    annotation = section.model_fields[setting].annotation
    literals = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return [name for literal in literals for name in get_args(literal)]


def test_one_is_found_by_name_and_a_wrong_name_meets_the_nearest() -> None:
    assert find("geo_mean") == find("gmpo"), "by its alias too"
    assert [entry.scope for entry in find("m2po")] == ["batch", "batch"], "a distillation and a policy loss"
    with pytest.raises(ValueError, match="did you mean 'cispo'"):
        find("cispoo")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimators"]) == 0
    assert "reverse_kl_mc" in capsys.readouterr().out
    assert main(["estimators", "cispo"]) == 0
    assert "failure it targets:    rare decisive tokens that lose their gradient by clipping" in capsys.readouterr().out
    assert main(["estimators", "cispoo"]) == 2
    assert "did you mean 'cispo'" in capsys.readouterr().err
