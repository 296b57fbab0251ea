"""Loading of new weights into a model, on modules that load as vLLM's do, or should not."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.engines.vllm.worker import File, FileTransfer
from slipstream.engines.weights import export_weights


class Model(nn.Module):
    def __init__(self, *, careless: bool) -> None:
        super().__init__()
        self.norm, self.sinks = nn.LayerNorm(2), nn.ParameterList([torch.zeros(2)])
        self.norm.register_buffer("slope", torch.full((3,), 0.5))
        self.careless = careless

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set[str]()
        for name, weight in weights:
            if name.startswith("sinks") and self.careless:
                own[name].data.copy_(weight)
            else:
                getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)
            loaded.add(name)
        return loaded


def transfer_of(model: Model, tmp_path: Path) -> FileTransfer:
    GPT2Config().save_pretrained(tmp_path)
    record_metadata_for_reloading(model)
    transfer = FileTransfer.__new__(FileTransfer)
    transfer.model = model
    transfer.model_config = SimpleNamespace(
        model=str(tmp_path), hf_text_config=SimpleNamespace(tie_word_embeddings=False), dtype=torch.float32
    )
    return transfer


def published(tmp_path: Path, *, without: str = "") -> File:
    other = Model(careless=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    weights = export_weights(other, "float32")
    weights.body.tofile(tmp_path / "weights")
    specs = [(s.name, s.dtype, list(s.shape), s.offset, s.nbytes) for s in weights.manifest if s.name != without]
    return File(str(tmp_path / "weights"), specs)


def test_weights_are_new_and_buffers_stay(tmp_path: Path) -> None:
    model = Model(careless=False)
    transfer = transfer_of(model, tmp_path)
    transfer.start_weight_update()
    transfer.receive_weights(published(tmp_path))
    transfer.finish_weight_update()
    assert all((parameter == 7).all() for parameter in model.parameters())
    assert model.norm.slope.tolist() == [0.5] * 3


@pytest.mark.parametrize(("careless", "without", "first"), [(True, "", "sinks.0"), (False, "norm.bias", "norm.bias")])
def test_a_weight_that_nothing_new_gets_into_is_told(tmp_path: Path, careless: bool, without: str, first: str) -> None:
    """A loader that copies by itself says that it has loaded, and has written into no memory."""
    transfer = transfer_of(Model(careless=careless), tmp_path)
    transfer.start_weight_update()
    with pytest.raises(RuntimeError, match=f"vLLM did not load new weights for 1 parameters, first {first}"):
        transfer.receive_weights(published(tmp_path, without=without))
