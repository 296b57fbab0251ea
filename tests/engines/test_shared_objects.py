"""One process of a machine builds an object, and the others map its tensors: the same bits in the same pages."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from transformers import LlamaConfig

from slipstream.config.learner import LoraConfig
from slipstream.engines.native.learning.student import prepare
from slipstream.engines.native.model import LanguageModel, called_layers, with_adapters
from slipstream.engines.native.ranks import SharedObjects
from slipstream.engines.native.resources import keep_freed_memory
from slipstream.engines.native.rows import use_rows
from slipstream.engines.quantisation import compute_rounded
from support.tiny_experts import MIXTURES, make_mixture
from support.tiny_models import CONFIGS, SHAPE, make_model, wrap

ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def adapted() -> LanguageModel:
    return with_adapters(wrap(make_model()), LoraConfig(rank=2), seed=0)


def rounded() -> LanguageModel:
    lm = wrap(make_model())
    compute_rounded(lm.model, called_layers(lm), "int8", "float32")
    return lm


def pinned(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    monkeypatch.setitem(CONFIGS, "dynamic", lambda: LlamaConfig(**SHAPE, rope_parameters=ROPE))
    return wrap(make_model("dynamic"))


STUDENTS: dict[str, Callable[[], LanguageModel]] = {
    **{name: partial(lambda name: wrap(make_model(name)), name) for name in CONFIGS},
    **{name: partial(lambda name: wrap(make_mixture(name)), name) for name in MIXTURES},
    "adapters": adapted,
    "rounded": rounded,
}


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def never() -> Any:
    raise AssertionError("this process must map the object of the other")


def both(build: Callable[[], Any]) -> tuple[Any, Any, list[SharedObjects]]:
    store = HashStore()
    ends = [SharedObjects(store), SharedObjects(store)]
    return ends[0].get("it", build), ends[1].get("it", never), ends


def tensors_of(lm: LanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from lm.model.named_parameters(remove_duplicate=False)
    yield from lm.model.named_buffers(remove_duplicate=False)


@pytest.mark.parametrize("name", [*STUDENTS, "dynamic"])
def test_a_mapped_student_is_the_one_that_was_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = partial(pinned, monkeypatch) if name == "dynamic" else STUDENTS[name]
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = build().model(ids).logits
        ours, theirs, _ = both(build)
        assert torch.equal(ours.model(ids).logits, expected) and torch.equal(theirs.model(ids).logits, expected)
    for (known, one), (other, two) in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert known == other and torch.equal(one, two) and one.requires_grad == two.requires_grad, known
        assert type(one) is type(two)
    assert theirs.head.linear is theirs.model.get_output_embeddings()
    tied = [lm.head.weight is lm.model.get_input_embeddings().weight for lm in (ours, theirs)]
    assert tied[0] == tied[1]
    for lm in (ours, theirs):
        use_rows(lm)
        prepare(lm, dropout=False, checkpointing=True, packed=True)


def test_a_write_stays_in_its_process() -> None:
    ours, theirs, ends = both(
        lambda: {"weight": frozen(torch.arange(5.0)), "none": torch.empty(0, 3), "one": torch.tensor(7)}
    )
    theirs["weight"][0] = 9
    ours["weight"][1] = 8
    third = SharedObjects(ends[0].store).get("it", never)
    assert third["weight"].tolist() == [0, 1, 2, 3, 4]
    assert ours["weight"].tolist() == [0, 8, 2, 3, 4] and theirs["weight"].tolist() == [9, 1, 2, 3, 4]
    assert third["none"].shape == (0, 3) and third["one"].item() == 7


def test_names_are_apart_and_mapped_tensors_outlive_the_memory() -> None:
    ours, theirs, ends = both(lambda: frozen(torch.ones(3)))
    other = ends[1].get("other", lambda: torch.zeros(3))
    ends[0].memory.clear()
    assert [each.tolist() for each in (ours, theirs, other)] == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def resident() -> tuple[int, int]:
    """Return the bytes of private memory, and of shared pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private, shared = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return private, shared


def test_parameters_move_to_shared_pages_which_no_buffer_keeps() -> None:
    keep_freed_memory()  # as every process of an engine does
    size = 64 * 2**20
    private, shared = resident()

    def build() -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_parameter("weight", frozen(torch.ones(size // 4)))
        made.register_buffer("factors", torch.arange(3.0))
        return made

    ours, theirs, ends = both(build)
    assert ours.weight.sum() == theirs.weight.sum() == size // 4
    assert resident()[0] - private < size // 2  # neither has a copy of its own
    assert resident()[1] - shared > size
    del ours.weight, theirs.weight
    ends[0].memory.clear()
    assert resident()[1] - shared < size // 2
    assert ours.factors.tolist() == theirs.factors.tolist() == [0, 1, 2]
