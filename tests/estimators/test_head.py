"""The head's definition, found by asking the model: scales and caps are part of it, and whatever else is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engines.native.model import split
from slipstream.errors import ModelError
from slipstream.estimators.logprobs import logprobs_at
from slipstream.estimators.logprobs.tiles import Head
from support.tiny_models import make_model


def with_logits(change: Callable[[Tensor], Tensor]) -> Any:
    """A model that does something to its logits."""
    model = make_model()
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = forward
    return model


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.0625, None), (1 / 13, None), (1.0, 30.0), (0.5, 2.0)])
def test_scale_and_cap_are_found_however_small_the_logits(scale: float, cap: float | None) -> None:
    def change(logits: Tensor) -> Tensor:
        return logits * scale if cap is None else cap * torch.tanh(logits * scale / cap)

    model = with_logits(change)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e-3)  # tied: logits of thousandths, which no cap changes much
    lm = split("bent", model)
    assert lm.head.scale == pytest.approx(scale, rel=1e-5)
    assert lm.head.cap == (cap if cap is None else pytest.approx(cap, rel=1e-5))


def test_logits_and_log_probs_are_those_of_the_model() -> None:
    lm = split("bent", with_logits(lambda logits: 3 * torch.tanh(2 * logits / 3)))
    ids = torch.arange(2, 12)[None]
    hidden = lm.backbone(ids).last_hidden_state[0]
    expected = lm.model(ids).logits[0]
    torch.testing.assert_close(lm.head(hidden), expected)
    every = torch.arange(lm.vocab_size).expand(len(hidden), -1)
    found = logprobs_at(hidden, lm.head.weight, every, **lm.head.bend)
    torch.testing.assert_close(found, expected.log_softmax(-1))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 0.01 * x.abs(),
        lambda x: x.clamp(-5, 5),
        lambda x: -x,
        lambda x: x + torch.arange(x.shape[-1]),
        lambda x: torch.where(torch.arange(x.shape[-1]) > 20, -1e9, x),
    ],
    ids=["bent", "clamped", "negative", "shifted", "masked"],
)
def test_whatever_else_a_model_does_to_its_logits_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="odd: Qwen3ForCausalLM does more to its logits than scale and cap them"):
        split("odd", with_logits(change))


@pytest.mark.parametrize("scale", [0.1, 12.0])
def test_a_scaled_hidden_state_is_part_of_the_head(scale: float) -> None:
    model = make_model()
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * scale,))
    assert split("scaled", model).head.scale == pytest.approx(scale, rel=1e-5)
    biased = make_model("phi")
    biased.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * scale,))
    with pytest.raises(ModelError, match="scales the hidden state before a head with a bias"):
        split("scaled", biased)


def test_a_changed_hidden_state_is_refused() -> None:
    model = make_model()
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].tanh(),))
    with pytest.raises(ModelError, match="odd: Qwen3ForCausalLM changes the hidden state before its head"):
        split("odd", model)


def test_damaged_weights_are_told_apart() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ModelError, match="its logits are not finite: the weights are damaged"):
        split("broken", model)


def test_products_are_in_the_lower_precision_of_both() -> None:
    head = Head(torch.nn.Linear(4, 5, bias=False).to(torch.bfloat16))
    hidden, weight, bias = head.inputs(torch.randn(2, 4))
    assert (hidden.dtype, weight.dtype, bias) == (torch.bfloat16, torch.bfloat16, None)
    assert Head(torch.nn.Linear(4, 5)).inputs(hidden)[1].dtype == torch.bfloat16
