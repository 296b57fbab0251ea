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

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.draws import draw, uniforms

BACKEND = "slipstream"
PROBED = 256
"""Most columns of a packed weight that are compared with what was loaded."""
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
        """Under their HF names, as views of the file: nothing is read before it is used, and nothing written."""
        flat = torch.from_numpy(np.memmap(self.path, np.uint8, mode="c"))
        for name, dtype, shape, offset, nbytes in self.manifest:
            yield name, flat[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


class FileTransfer(WeightTransferEngine[NoInfo, File]):  # type: ignore[misc]
    init_info_cls, update_info_cls = NoInfo, File
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: File) -> None:
        wanted = set(dict(self.model.named_parameters()))
        loaded = self.model.load_weights(iter(update_info))
        if missing := sorted(wanted - set(loaded) - self._tied()):
            raise RuntimeError(f"the weights that came lack {len(missing)} of vLLM's, {missing[0]} first")

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

    def slipstream_ready(self, names: list[str], hook: bool) -> dict[str, Any]:
        """Hook the draws into the runner that they are for, and say what is here, and which weights are not."""
        runner = self.model_runner
        modules = dict(runner.get_model().named_modules())
        sampler: Any = getattr(runner, "sampler", None)
        hooked = hook and type(sampler) is Sampler and hasattr(runner, "input_batch") and hasattr(runner, "requests")
        if hooked:
            sampler.gather_logprobs = Draws(runner)
        return {
            "missing": [name for name in names if not hasattr(modules.get(name.rpartition(".")[0]), "weight")],
            "hooked": hooked,
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        }

    @torch.no_grad()
    def slipstream_checksums(self, names: list[str], path: str, manifest: list[Spec]) -> dict[str, int]:
        """CRC-32 of each of these weights as it really runs; the file is what it should be."""
        model, chosen = self.model_runner.get_model(), set(names)
        with set_current_vllm_config(self.vllm_config):
            return {
                name: checksum(model.get_submodule(name.rpartition(".")[0]), loaded)
                for name, loaded in File(path, manifest)
                if name in chosen
            }


def checksum(layer: nn.Module, loaded: Tensor) -> int:
    if isinstance(weight := layer.weight, Tensor) and weight.numel():
        if get_tensor_model_parallel_world_size() > 1:  # o_proj and down_proj are sharded by their inputs
            weight = tensor_model_parallel_all_gather(weight.contiguous(), dim=1)
        running = weight.to("cpu", loaded.dtype)
        return crc(running)
    # CPUs run a packed copy: unit vectors bring its columns back
    size = loaded.shape[1]
    columns = torch.linspace(0, size - 1, min(size, PROBED)).long()
    units_KK = torch.zeros(len(columns), size, dtype=loaded.dtype)
    units_KK[torch.arange(len(columns)), columns] = 1
    running = layer.cpu_linear(units_KK, layer.weight, None).t()  # type: ignore[operator]
    return crc(loaded) if torch.equal(running, loaded[:, columns]) else crc(running.contiguous())


def crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


# --- draws -----------------------------------------------------------------------------------------------------------


class Draws:
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
