"""Eight-bit weights: codes by hand, laws over random weights, and the fingerprint of what was quantised."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from slipstream.engines.quantisation import compute_rounded, quantise, quantised, quantised_weights
from slipstream.engines.weights import (
    export_weights,
    fingerprint,
    fingerprint_of_loaded,
    fingerprint_of_parts,
    load_weights,
)
from support.tiny_models import make_model

E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
"""The 127 numbers of float8 e4m3 that are not negative: 3 bits of mantissa, exponents from -6 to 8; the last is NaN."""
WEIGHTS = st.builds(
    lambda seed, size: torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)) * 2.0**size,
    st.integers(0, 10**6),
    st.integers(-30, 30),
)


def test_int8_by_hand() -> None:
    # the largest of the first row is 2.54 = 127 · 0.02: 0.05 / 0.02 = 2.5 rounds to the even 2, -1.27 to -63.5 → -64
    codes, scale = quantised(torch.tensor([[2.54, 0.05, -1.27], [0.0, 0.0, 0.0], [-254.0, 1.0, 127.0]]), "int8")
    assert codes.dtype == torch.int8 and codes[1:].tolist() == [[0, 0, 0], [-127, 0, 64]]
    assert codes[0, 0] == 127 and codes[0, 1] in (2, 3) and codes[0, 2] in (-63, -64), "halves, up to float32"
    assert scale[:, 0].tolist() == pytest.approx([0.02, 1.0, 2.0])


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_int8_is_off_by_half_a_scale_at_most(weight_OI: torch.Tensor) -> None:
    codes, scale = quantised(weight_OI, "int8")
    assert (codes.abs().amax(-1) == 127).all()
    assert ((codes.double() * scale - weight_OI).abs() <= 0.5001 * scale).all()


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_fp8_is_the_nearest_number_of_the_format(weight_OI: torch.Tensor) -> None:
    codes, scale = quantised(weight_OI, "fp8")
    assert (codes.float().abs().amax(-1) == 448).all()
    wanted = (weight_OI / scale).abs().double().numpy()
    nearest = np.abs(wanted[..., None] - E4M3[:-1]).min(-1)
    found = np.abs(np.abs(codes.double().numpy()) - wanted)
    np.testing.assert_allclose(found, nearest, atol=1e-4 * 448)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_power_of_two_moves_into_the_scale(kind: str) -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    (codes, scale), (others, its_scale) = quantised(weight, kind), quantised(weight * 8, kind)
    assert torch.equal(codes.float(), others.float()) and torch.equal(scale * 8, its_scale)


def quantised_model(kind: str, model: PreTrainedModel) -> PreTrainedModel:
    names = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear and name != "lm_head"]
    quantise(model, names, kind)
    return model


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantised_model_computes_with_codes_times_scales_and_stores_no_other_weights(kind: str) -> None:
    plain, model = make_model("phi"), quantised_model(kind, make_model("phi", seed=1))
    with torch.no_grad():
        load_weights(model, export_weights(plain, "float32"))
        for name, parameter in plain.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                codes, scale = quantised(parameter, kind)
                parameter.copy_(codes.float() * scale)
        ids = torch.arange(2, 20)[None]
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(quantised_weights(model)) == 12
    assert all(layer.weight.itemsize == 1 for layer in quantised_weights(model).values())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("travels", ["float32", "bfloat16"])
def test_the_fingerprint_is_of_received_bytes_and_of_what_runs(kind: str, travels: str) -> None:
    weights = export_weights(make_model("phi"), travels)
    model = quantised_model(kind, make_model("phi", seed=1).to(getattr(torch, travels)))
    names = quantised_weights(model).keys()
    expected = fingerprint_of_parts(weights, lambda n, w: (w, *quantised(w, kind)) if n in names else (w,))
    with torch.no_grad():
        assert fingerprint_of_loaded(model, weights) != expected, "nothing was loaded yet"
        load_weights(model, weights)
        assert fingerprint_of_loaded(model, weights) == expected
        layer = model.model.layers[1].mlp.fc2
        spoilt: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = [
            (layer.weight.data, lambda part: part.view(torch.int8)[0, 0].bitwise_xor_(1)),
            (layer.scale, lambda part: part[3].mul_(2)),
            (layer.bias.data, lambda part: part[0].add_(1)),
        ]
        for part, spoil in spoilt:
            kept = part.clone()
            spoil(part)
            assert fingerprint_of_loaded(model, weights) != expected
            part.copy_(kept)
        assert fingerprint_of_loaded(model, weights) == expected


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("travels", ["float32", "bfloat16"])
def test_a_rounded_layer_computes_what_samplers_compute_and_passes_its_gradient_to_the_weight(
    kind: str, travels: str
) -> None:
    model, sampler = make_model("phi"), quantised_model(kind, make_model("phi", seed=1))
    plain = make_model("phi")
    compute_rounded(model, [name.removesuffix(".weight") for name in quantised_weights(sampler)], kind, travels)
    with torch.no_grad():
        load_weights(sampler, export_weights(model, travels))
        for name, parameter in plain.named_parameters():
            parameter.copy_(dict(sampler.named_parameters())[name].float())
            if name in quantised_weights(sampler):
                parameter.mul_(quantised_weights(sampler)[name].scale)
        for name, parameter in model.named_parameters():  # all other weights travel in the same dtype
            if name not in quantised_weights(sampler):
                parameter.copy_(parameter.to(getattr(torch, travels)))
    ids = torch.arange(2, 20)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    for each in (model, plain):
        each(ids).logits.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_change_too_small_for_a_code_is_still_seen() -> None:
    model = make_model("phi")
    weights = export_weights(model, "float32")
    with torch.no_grad():
        weight = model.model.layers[0].mlp.fc2.weight
        weight[0, weight[0].abs().argmin()] += 1e-6
    moved = export_weights(model, "float32")
    assert torch.equal(
        quantised(weight, "int8")[0], quantised(make_model("phi").model.layers[0].mlp.fc2.weight, "int8")[0]
    )

    def parts(_: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight, *quantised(weight, "int8")) if weight.ndim == 2 else (weight,)

    assert fingerprint_of_parts(moved, parts) != fingerprint_of_parts(weights, parts)


def test_a_model_without_quantised_layers_has_the_plain_fingerprint() -> None:
    model = make_model("phi")
    assert fingerprint_of_loaded(model, export_weights(model, "float32")) == fingerprint(model, "float32")
