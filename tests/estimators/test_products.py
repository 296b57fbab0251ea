"""Products by oneDNN: the same numbers, gradients and layers as torch's own products, whatever the processor."""

import copy

import pytest
import torch
from torch import nn

from slipstream.estimators import products
from slipstream.estimators.products import (
    FastLinear,
    add_product,
    forget_packed,
    linear,
    multiply_into,
    pack_layers,
    use_fast_layers,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose oneDNN on every processor, and for matrices of every size."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "MIN_WEIGHT_SIZE", 1)


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_has_the_values_and_gradients_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 7)
    inputs = [x, torch.randn(7, 12), *[torch.randn(7)] * bias]
    results = []
    for function in (linear, nn.functional.linear):
        own = [each.clone().requires_grad_() for each in inputs]
        out = function(*own)
        out.backward(grad.transpose(0, -1).contiguous().transpose(0, -1))  # gradients may come in any layout
        results.append([out, *[each.grad for each in own]])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert "_Linear" in str(linear(*[each.clone().requires_grad_() for each in inputs]).grad_fn)


@pytest.mark.usefixtures("by_onednn")
def test_products_in_parts_are_those_of_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PRODUCT_COLUMNS", 4)
    left, right, out, total = torch.randn(3, 5), torch.randn(10, 5), torch.empty(3, 10), torch.ones(10, 5)
    multiply_into(out, left, right)
    torch.testing.assert_close(out, left @ right.T)
    add_product(total, out.T, left)
    torch.testing.assert_close(total, 1 + out.T @ left)


@pytest.mark.parametrize(
    ("dtype", "size", "chosen"),
    [
        (torch.float32, 400, True),
        (torch.float32, 300, False),  # small: both are equally fast
        (torch.bfloat16, 400, False),  # torch uses oneDNN anyway
    ],
)
def test_only_large_float32_products_on_other_processors_are_oneDNNs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, chosen: bool
) -> None:
    x, weight = torch.zeros(2, size, dtype=dtype), torch.zeros(size, size, dtype=dtype)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    assert products.is_faster(x, weight) == chosen
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    assert not products.is_faster(x, weight)


@pytest.mark.usefixtures("by_onednn")
def test_autocast_rounds_layers_but_not_products_into_given_memory() -> None:
    torch.manual_seed(0)
    left, right, layer = torch.randn(6, 12), torch.randn(20, 12), FastLinear(12, 20, bias=False)
    out, total = torch.empty(6, 20), torch.zeros(6, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.is_faster(left, right), "autocast does not touch a product into given memory"
        products.multiply_into(out, left, right)
        products.add_product(total, out, right)
        assert layer(left).dtype == torch.bfloat16
    torch.testing.assert_close(out, left @ right.T)
    torch.testing.assert_close(total, left @ right.T @ right)


def test_layers_keep_names_weights_and_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    x, names = torch.randn(2, 3), list(model.state_dict())
    expected = model(x)
    use_fast_layers(model)
    assert [type(each) for each in model] == [FastLinear, nn.ReLU, FastLinear]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)


@pytest.mark.usefixtures("by_onednn")
def test_packed_layers_follow_every_change_of_their_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 5, bias=False))
    plain, x, names = copy.deepcopy(model), torch.randn(3, 12), list(model.state_dict())
    pack_layers(model)
    assert list(model.state_dict()) == names
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))
        assert model[0].packed[0].is_mkldnn
        for each in (model, plain):
            each[0].weight.mul_(2)
        torch.testing.assert_close(model(x), plain(x))
        for each in (model, plain):
            each[0].weight.detach().numpy()[:] = 3.0  # torch does not know of this change
        forget_packed(model)
        torch.testing.assert_close(model(x), plain(x))
        for each in (model, plain):
            each[1].weight.data = torch.ones(5, 7)
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.usefixtures("by_onednn")
def test_packed_layers_have_gradients() -> None:
    layer = nn.Linear(12, 7)
    expected, x = copy.deepcopy(layer), torch.randn(3, 12)
    pack_layers(layer)
    with torch.no_grad():
        layer(x)
    for each in (layer, expected):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
