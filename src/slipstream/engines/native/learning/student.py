"""The student as a module that is trained: shards, dropout, noise on its layers, and experts that its passes use.

Rollouts are drawn without dropout, so a gradient with dropout would belong to another policy. Dropout and router noise
are off unless the user requests dropout. Some models apply dropout outside of modules, so training runs in evaluation
mode, which has no randomness. Only modules that recompute activations need training mode; their dropout probabilities
are set to 0.

Shapes: L layers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.config.learner import LearnerConfig, PerturbationConfig
from slipstream.engines.native.model import LanguageModel, called_by
from slipstream.engines.native.over_devices import layers_of
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.resources import keep_on_host
from slipstream.engines.native.routers import FREE, Choices, experts_of_record, routers_of, together
from slipstream.engines.native.rows import Rows, difference, probe, recheck_rows, recompute_contexts, use_rows
from slipstream.errors import ModelError, first_line
from slipstream.estimators.auxiliary import balance_loss
from slipstream.estimators.logprobs.tiles import Head
from slipstream.objective.columns import present
from slipstream.objective.constants import UpdateConstants
from slipstream.objective.loss import PAIRS
from slipstream.objective.sample_weights import Key, key_of
from slipstream.records import Ints, Scored, derive_seed

T = TypeVar("T")


class Student(nn.Module):
    """Backbone and head in one root module, so that sharded weights are gathered once for both parts."""

    def __init__(self, lm: LanguageModel, config: LearnerConfig, ranks: Ranks) -> None:
        """Prepare a model for training, and shard it over the ranks."""
        super().__init__()
        self.lm, self.model, self.parts = lm, lm.model, (lm.backbone, lm.head)
        if lm.device.type == "cuda" and config.compute_dtype in ("bfloat16", "float16"):
            torch.backends.cuda.matmul.allow_tf32 = True  # autocast leaves the head's products in float32
        mixed = config.router != "free" or config.router_aux is not None
        self.routing = Routing(lm, config) if mixed else None
        self.width = int(lm.model.config.get_text_config().hidden_size)
        use_rows(lm, packed=config.packing)
        prepare(lm, dropout=config.dropout, checkpointing=config.checkpointing, packed=config.packing)
        self.saving = partial(keep_on_host, self.width) if "activations" in config.offload else nullcontext
        """Context in which the backbone's forward pass stores activations."""
        ranks.shard(self, layers_of(lm.model))
        if ranks.size > 1:
            with deterministic(lm.model):
                recheck_rows(lm, ranks, lambda rows: self(rows, hidden_of), packed=config.packing)

    def forward(self, rows: Rows, compute: Callable[[Tensor, Head], T]) -> T:
        backbone, head = self.parts
        with self.saving():
            hidden_NH = rows.hidden(backbone)
        return compute(hidden_NH, head)


def hidden_of(hidden_NH: Tensor, head: Head) -> Tensor:
    return hidden_NH


# --- mode of the modules ----------------------------------------------------------------------------------------------


def prepare(lm: LanguageModel, *, dropout: bool, checkpointing: bool, packed: bool) -> None:
    """Set up a model for training; check that two passes give equal results, or different results if `dropout`."""
    if checkpointing:
        if not lm.model.supports_gradient_checkpointing:
            kind = type(lm.model).__name__
            raise ModelError(f"{lm.name}: {kind} cannot recompute activations: write learner.checkpointing = false")
        recompute_activations(lm.model)
    if dropout:
        lm.model.train()
    else:
        lm.model.eval()
        for module in lm.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
                _silence(module)
    _prove(lm, dropout=dropout, packed=packed)


def recompute_activations(model: PreTrainedModel) -> None:
    """Let every layer recompute its activations in the backward pass."""
    newer = "activation_checkpointing_enable"
    enable = getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False, "context_fn": recompute_contexts})


def _silence(module: nn.Module) -> None:
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


@torch.no_grad()
def _prove(lm: LanguageModel, *, dropout: bool, packed: bool) -> None:
    kind, trained = type(lm.model).__name__, [weight for weight in lm.model.parameters() if weight.requires_grad]
    # each gradient is freed at once, so that those of all weights are never in memory
    hooks: list[Any] = [weight.register_post_accumulate_grad_hook(_free_gradient) for weight in trained]
    try:
        with torch.enable_grad():
            once, again = probe(lm, packed), probe(lm, packed)
            torch.autograd.backward(torch.cat(again).sum())
    except Exception as error:  # any exception of the model's code means that it cannot be trained
        raise ModelError(f"{lm.name}: {kind} cannot be trained here: {first_line(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()
    with deterministic(lm.model):
        plain = probe(lm, packed)
    drawn = max(difference(once, again), difference(once, plain))
    rounding = 1e-4 if lm.head.weight.dtype.itemsize >= 4 else 0.02
    if dropout and drawn <= rounding:
        raise ModelError(f"{lm.name}: {kind} has no dropout (its config disables it): drop learner.dropout = true")
    if not dropout and not drawn <= rounding:
        raise ModelError(
            f"{lm.name}: two passes of {kind} in training mode differ by {drawn:.1%}, without any dropout: "
            "write learner.checkpointing = false"
        )


def _free_gradient(weight: nn.Parameter) -> None:
    weight.grad = None


@contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode within this context, for passes without gradient."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# --- noise on the layers ----------------------------------------------------------------------------------------------


class Perturbation:
    """Learned noise on the input of every layer, in the training passes of a policy loss (ALP, 2603.19470).

    The ratio of a policy loss then compares a perturbed learner with the unperturbed policy that drew the tokens. Layer
    l receives h + σ_l·ε with ε ~ N(0, 1). The logarithms of all σ are trained with the loss, by an AdamW of their own.
    Samplers, evaluations and passes without gradient have no noise.
    """

    def __init__(self, lm: LanguageModel, config: PerturbationConfig, *, packed: bool, seed: int) -> None:
        layers = layers_of_text(lm, packed=packed)
        if not layers:
            kind = type(lm.model).__name__
            raise ModelError(f"learner.perturbation: {lm.name}: {kind} does not name its layers: drop it")
        self.device, self.seed = lm.device, seed
        self.noise_seed: int | None = None
        """Seed of the current pass; None outside of passes with noise."""
        self.log_std_L = nn.Parameter(torch.full((len(layers),), math.log(config.std), device=lm.device))
        self.optimizer = torch.optim.AdamW([self.log_std_L], lr=config.lr, weight_decay=0.0)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._perturb, index), with_kwargs=True)

    @contextmanager
    def during(self, *pass_: int) -> Iterator[None]:
        """Perturb layers in this context. A pass that is recomputed or repeated with equal numbers has equal noise."""
        self.noise_seed = derive_seed(self.seed, "perturbation", *pass_)
        try:
            yield
        finally:
            self.noise_seed = None

    def _perturb(self, index: int, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.noise_seed is None:
            return None
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.noise_seed, "layer", index))
        hidden: Tensor = args[0] if args else named["hidden_states"]
        noise = torch.randn(hidden.shape, generator=generator, device=self.device)
        hidden = hidden + (self.log_std_L[index].exp() * noise).to(hidden)
        return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})

    @property
    def std(self) -> float:
        """Return the mean standard deviation of the noise over all layers."""
        return float(self.log_std_L.detach().exp().mean())

    @property
    def gradients(self) -> list[Tensor]:
        return [] if self.log_std_L.grad is None else [self.log_std_L.grad]

    def state(self) -> dict[str, Tensor]:
        moments = self.optimizer.state.get(self.log_std_L, {})
        return {"log_std": self.log_std_L.detach(), **moments}

    def load(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.log_std_L.copy_(state["log_std"])
        moments = {name: value for name, value in state.items() if name != "log_std"}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: moments} if moments else {}})


@torch.no_grad()
def layers_of_text(lm: LanguageModel, *, packed: bool) -> list[nn.Module]:
    """Return the layers that a pass over text calls, without layers inside of other layers, such as Mamba's mixers."""
    layers = layers_of(lm.model)
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    called = called_by(lambda: probe(lm, packed), layers)
    return [layer for layer in layers if layer in called - inner]


# --- experts of a mixture ---------------------------------------------------------------------------------------------


class Routing:
    """Experts that passes use: chosen freely, or replayed from the records or from the old policy's pass.

    A sample has a row of choices for each of its tokens before the last one, in the prompt and in the response: all
    passes that its log-probs depend on. Rows that no record has are chosen freely.

    Shapes: T flat tokens of rows, R routers, X chosen experts, E experts, N trained tokens.
    """

    def __init__(self, lm: LanguageModel, config: LearnerConfig) -> None:
        self.keeps_logits, self.mode = config.router_aux is not None, config.router
        self.routers = routers_of(lm, field=f"learner.router{'_aux' * self.keeps_logits}", logits=self.keeps_logits)
        aux = config.router_aux or 0.0
        self.balance = float(lm.model.config.get_text_config().router_aux_loss_coef if aux == "model" else aux)
        """Coefficient of the auxiliary loss of the routers; 0 is off."""
        self.share_E = torch.zeros(0)
        """Share of each expert in the choices of this update."""
        self.old: dict[Key, Ints] = {}
        """With "replay_old", the choices of the old policy for the samples of this update."""

    def choices(self, rows: Rows, samples: Sequence[Scored], *, replays: bool) -> Choices:
        """Return the choices to use in a pass over rows of these samples, which are in the order of the rows."""
        given_TRX = None
        if replays and self.mode == "replay_rollout":
            given_TRX = self._recorded(rows, samples)
        if replays and self.mode == "replay_old":
            given_TRX = self._table(rows, [self.old.get(key_of(sample)) for sample in samples])
        return Choices(self.routers, given_TRX, keeps_logits=self.keeps_logits and torch.is_grad_enabled())

    def _table(self, rows: Rows, known: Sequence[Ints | None]) -> Tensor | None:
        """Return the choices of all samples at the tokens of the rows, FREE where unknown; None if all are unknown."""
        if all(each is None for each in known):
            return None
        shape = rows.ids_RL.numel(), len(self.routers.modules), self.routers.chosen
        found_TRX = np.full(shape, FREE, np.int16)
        for at, each in zip(rows.inputs(), known, strict=True):
            if each is not None:
                found_TRX[at] = each
        return torch.from_numpy(found_TRX).to(rows.ids_RL.device)

    def _recorded(self, rows: Rows, samples: Sequence[Scored]) -> Tensor | None:
        return self._table(rows, [experts_of_record(sample.rollout) for sample in samples])

    def used(self, rows: Rows) -> Iterator[Ints]:
        """Yield for each sample of rows the experts that the pass has used, a row for each token before the last."""
        assert rows.choices is not None
        used_TRX = together(rows.choices.used).short().cpu().numpy()
        yield from (used_TRX[at] for at in rows.inputs())

    def flips(self, rows: Rows, samples: Sequence[Scored]) -> dict[str, Tensor]:
        """Count pairs of a trained token and a router, and those whose experts differ between sampler and learner."""
        table_TRX = self._recorded(rows, samples)
        if table_TRX is None or rows.choices is None:
            return {}
        own_NRX, drawn_NRX = (x[rows.predict_N].sort(-1).values for x in (together(rows.choices.own), table_TRX.long()))
        known_NR = (drawn_NRX != FREE).all(-1)
        differ_NR = (own_NRX != drawn_NRX.to(own_NRX)).any(-1) & known_NR
        return {"router/flips": differ_NR.sum().double(), PAIRS: known_NR.sum().double()}

    def count(self, experts: Iterable[tuple[Ints, NDArray[np.bool_]]], ranks: Ranks) -> None:
        """Set the share of each expert, from choices of samples and masks of the tokens that the loss counts."""
        counts = torch.zeros(self.routers.experts, dtype=torch.float64)
        for ids, mask in experts:
            chosen = torch.from_numpy(ids[-len(mask) :][mask]).flatten().long()
            counts += torch.bincount(chosen, minlength=self.routers.experts)
        counts = sum(ranks.gathered(counts), torch.zeros_like(counts))
        self.share_E = self.routers.chosen * counts / counts.sum().clamp(min=1)

    def balanced(
        self,
        found: tuple[Tensor, dict[str, Tensor]],
        rows: Rows,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        n_tokens: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the balance loss to loss and metrics of a micro-batch."""
        loss, metrics = found
        pairs = zip(constants, samples, strict=True)
        kept_N = torch.cat([each.mask_T[torch.from_numpy(sample.rollout.loss_mask)] for each, sample in pairs])
        part = self.balance_of(rows, kept_N, n_tokens)
        added = self.balance * part.detach()
        measured = {"router/balance": part.detach(), "loss": metrics["loss"] + added}
        return loss + self.balance * part, metrics | measured

    def balance_of(self, rows: Rows, kept_N: Tensor, n_tokens: int) -> Tensor:
        """Return the auxiliary loss of a pass, over the trained tokens that are kept."""
        at_N = rows.predict_N[kept_N.to(rows.predict_N.device)]
        logits = [logits_TE[at_N.to(logits_TE.device)] for logits_TE in present(rows.choices).logits]
        return balance_loss(logits, self.share_E, n_tokens=max(n_tokens, 1))
