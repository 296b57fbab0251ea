"""What runs inside vLLM's workers: how weights come in, what really runs, and the extra draws. For vLLM 0.32.

vLLM imports this file because `worker_extension_cls` names a class of it, before it loads the model.

**Weights** come by vLLM's own weight transfer, with one more backend: every worker maps a file in shared memory and
takes its part, by vLLM's loaders, which write into the tensors that run already (CUDA graphs stay valid).

**Draws** beyond the emitted token take the place of the top log-probs that vLLM returns with it: `logprobs = M − 1`
asks for so many. They are made where the V1 runner's sampler has the log-probs of what it drew from, temperature and
truncation included, by random numbers of their own, so the emitted tokens are the same with and without them.

Shapes: N requests of a step, M draws, V vocabulary, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.draws import draw, uniforms
from slipstream.engines.vllm.layers import Home, as_saved, checksum_of, place_of, twin_of
from slipstream.engines.weights import view_of
from slipstream.protocols import TensorSpec

BACKEND = "slipstream"
Spec = tuple[str, str, list[int], int, int]
"""name, dtype, shape, offset and number of bytes."""


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class File(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str
    manifest: list[Spec]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Under a learner's names, as views of the file: nothing is read before it is used, and nothing written."""
        flat = torch.from_numpy(np.memmap(self.path, np.uint8, mode="c"))
        for name, dtype, shape, offset, nbytes in self.manifest:
            yield name, view_of(TensorSpec(name, dtype, tuple(shape), offset, nbytes), flat)


class FileTransfer(WeightTransferEngine[NoInfo, File]):  # type: ignore[misc]
    init_info_cls, update_info_cls = NoInfo, File
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if isinstance(layer, RoutedExperts):
                    # experts are packed for a CPU where their kernel is made, and then never again
                    layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            # buffers are not published, and in a layer that is loaded vLLM would leave in them what memory holds
            kept = {name: buffer for name, buffer in layer.named_buffers(recurse=False) if buffer.is_meta}
            if kept and layer._parameters:
                _, running = get_layerwise_info(layer).kernel_tensors
                layer._buffers.update({name: running[name].clone() for name in kept})

    def receive_weights(self, update_info: File) -> None:
        wanted = set(dict(self.model.named_parameters()))
        loaded = set(self.model.load_weights(as_saved(twin_of(self.model_config.model), update_info)))
        constant = {name for name in wanted if name.rpartition(".")[2] in SKIP_LOAD_TENSORS}
        if missing := sorted((wanted - loaded | self._untouched()) - constant - self._tied()):
            raise RuntimeError(f"new weights do not get into {len(missing)} of vLLM's, {missing[0]} first")

    def _untouched(self) -> set[str]:
        """Weights of layers that nothing came for: loaders that copy by themselves write into the void here."""
        found = set()
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load() and not info.load_numel:
                found |= {f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False)}
        return found

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if current_platform.is_cpu() and self._tied() and head is not None:
            # a tied head gets no weights of its own, and on CPUs keeps a packed copy of the old ones
            head.quant_method.process_weights_after_loading(head)

    def _tied(self) -> set[str]:
        return {"lm_head.weight"} if self.model_config.hf_text_config.tie_word_embeddings else set()

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class Extension:
    """Methods for `collective_rpc`, mixed into vLLM's worker class."""

    model_runner: Any
    vllm_config: Any
    slipstream_places: dict[str, Home]

    def slipstream_ready(self, names: list[str], hook: bool) -> dict[str, Any]:
        """Hook the draws into the runner that they are for; say what is here, and why a weight cannot be checked."""
        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            twin = twin_of(self.vllm_config.model_config.model)
        found = {name: place_of(name, runner.get_model(), twin) for name in names}
        self.slipstream_places = {name: place for name, place in found.items() if isinstance(place, Home)}
        sampler: Any = getattr(runner, "sampler", None)
        hooked = hook and type(sampler) is Sampler and hasattr(runner, "input_batch") and hasattr(runner, "requests")
        if hooked:
            sampler.gather_logprobs = MoreDraws(runner)
        return {
            "unchecked": next((why for why in found.values() if isinstance(why, str)), ""),
            "hooked": hooked,
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        }

    @torch.no_grad()
    def slipstream_checksums(self, path: str, manifest: list[Spec]) -> dict[str, int]:
        """CRC-32 of each fingerprinted weight as it really runs; the file is what it should be."""
        places = self.slipstream_places
        with set_current_vllm_config(self.vllm_config):
            return {name: checksum_of(places[name], loaded) for name, loaded in File(path, manifest) if name in places}


# --- draws -----------------------------------------------------------------------------------------------------------


class MoreDraws:
    """In place of `Sampler.gather_logprobs`: the emitted token, then draws of the same distribution."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __call__(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        ids_N1 = token_ids[:, None]
        logp_N1 = logprobs.gather(1, ids_N1)
        if num_logprobs:
            seed_N, position_N = self._streams(logprobs.device)
            uniform_NM = uniforms(seed_N, position_N, num_logprobs + 1)[:, 1:]
            # an exception here would end the engine: what is not finite goes on as it is, and is told of there
            sound_N1 = logprobs.exp().sum(1, keepdim=True).isfinite()
            ids_NM, logp_NM = draw(logprobs.where(sound_N1, 0.0), uniform_NM)
            ids_N1 = torch.cat([ids_N1, ids_NM], 1)
            logp_N1 = torch.cat([logp_N1, logp_NM.where(sound_N1, torch.nan)], 1)
        return LogprobsTensors(ids_N1.int(), logp_N1, torch.zeros_like(token_ids))

    def _streams(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Seed of every request, and how many tokens its response has."""
        batch, requests = self.runner.input_batch, self.runner.requests
        n = batch.num_reqs
        seeds = [requests[name].sampling_params.seed or 0 for name in batch.req_ids[:n]]
        positions = batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]
        return torch.tensor(seeds, device=device), torch.from_numpy(positions.astype(np.int64)).to(device)
