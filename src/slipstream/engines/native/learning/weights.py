"""Weights of a learner: those that it trains, and those of other versions.

Other versions are the last few published ones, the old policy, the reference, and teachers that follow the student.
Only trained weights are stored; each rank stores its own shard, in host memory by default. For a pass with a snapshot,
its weights replace the model's weights, which are restored afterwards.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.engines.native.learning.storage import State, not_saved
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.ranks import Ranks, part_of, slice_of
from slipstream.engines.quantisation import quantised
from slipstream.engines.settings import LearnerSettings
from slipstream.engines.weights import export_weights, fingerprint, fingerprint_of_parts, local
from slipstream.estimators.logprobs.tiles import Head
from slipstream.objective.columns import OLD, REFERENCE, present
from slipstream.protocols import Fingerprint, WeightsRef
from slipstream.records import Scored

Version = int | str
"""Number of a published version, or name of a snapshot."""


class Snapshots:
    def __init__(self, model: nn.Module, *, keep: int = 0) -> None:
        """Create an empty store for at most `keep` numbered versions; the oldest version is dropped first."""
        self.keep = keep
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.weights: dict[Version, list[Tensor]] = {}

    @property
    def parameters(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.trained.values()]

    def __contains__(self, version: Version) -> bool:
        return version in self.weights

    @torch.no_grad()
    def take(self, version: Version, *, host: bool = True) -> None:
        device = torch.device("cpu") if host else None
        self.weights[version] = [parameter.to(device or parameter.device, copy=True) for parameter in self.parameters]
        numbered = sorted(version for version in self.weights if isinstance(version, int))
        for old in numbered[: max(0, len(numbered) - self.keep)]:
            del self.weights[old]

    def copy(self, version: Version, copy: Version) -> None:
        """Store a copy of a snapshot under another name."""
        self.weights[copy] = [tensor.clone() for tensor in self.weights[version]]

    @torch.no_grad()
    def blend(self, version: Version, decay: float) -> None:
        """Set the weights of a snapshot to decay · snapshot + (1 − decay) · current weights."""
        for stored, own in zip(self.weights[version], self.parameters, strict=True):
            stored.lerp_(own.to(stored.device), 1 - decay)  # decay 0 gives exactly the current weights

    def state(self, version: Version) -> dict[str, Tensor]:
        """Return a snapshot as a state dict, sharded over the ranks like the model's weights."""
        pairs = zip(self.trained.items(), self.weights[version], strict=True)
        return {name: part_of(tensor, own) for (name, own), tensor in pairs}

    @torch.no_grad()
    def copy_layer(self, version: Version, layer: nn.Linear) -> nn.Linear:
        """Return an unsharded copy of a layer with the weights of a snapshot; all ranks must call this."""
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        stored = dict(zip(map(id, self.trained.values()), self.weights[version], strict=True))
        for name, own in layer.named_parameters():  # a frozen weight is the same in all versions
            weight = part_of(stored[id(own)], own) if id(own) in stored else own.detach()
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            setattr(made, name, nn.Parameter(whole.to(own.device, copy=True), requires_grad=False))
        return made

    def put(self, version: Version, state: Mapping[str, Tensor], *, host: bool = False) -> None:
        """Store a state dict of unsharded weights as a snapshot, in host memory if `host`, else on the device."""
        slices = [local(slice_of(state[name], own)) for name, own in self.trained.items()]
        self.weights[version] = [
            tensor.to("cpu" if host else own.device, own.dtype, copy=True)
            for tensor, own in zip(slices, self.parameters, strict=True)
        ]

    @contextmanager
    def under(self, version: Version) -> Iterator[None]:
        """Give the model the weights of a snapshot within this context, for passes without gradient."""
        with torch.no_grad():
            own = [parameter.clone() for parameter in self.parameters]
            torch._foreach_copy_(self.parameters, self.weights[version])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, own)


class LearnerWeights:
    """Weights of the student, the snapshots of its method, and the teachers that follow it."""

    def __init__(
        self, lm: LanguageModel, plan: LearnerSettings, ranks: Ranks, *, quantised: Collection[str] = ()
    ) -> None:
        """Take the snapshots that the method needs, before any restore, since the reference is the first student.

        `quantised` are the names of the layers that samplers quantise.
        """
        self.lm, self.plan, self.ranks = lm, plan, ranks
        self.snapshots = Snapshots(lm.model, keep=plan.snapshots)
        if plan.method.keeps_reference:
            self.snapshots.take(REFERENCE, host=plan.method.hosts_reference)
        if plan.method.keeps_old:
            self.snapshots.take(OLD, host=False)
        for teacher in plan.follow:
            self.snapshots.take(snapshot_of(teacher))
        self.followed = dict.fromkeys(plan.follow, 0)
        """For each following teacher, the update after which its weights last changed; 0: not yet."""
        self.earlier: dict[str, list[int]] = {teacher: [] for teacher in plan.follow}
        """For each following teacher, its earlier versions that are stored, oldest first."""
        self.unsent: dict[str, list[int]] = {teacher: [] for teacher in plan.follow}
        """For each following teacher, the versions that `restore` loaded and `export` has not returned yet."""
        self.quantised = {f"{name}.weight" for name in quantised}
        self.checksums: dict[str, dict[str, int]] = {}
        """Checksums of frozen weights, by precision and name."""

    def heads(self, samples: Iterable[Scored], known: Collection[tuple[str, int]]) -> dict[tuple[str, int], Head]:
        """Return the heads of following teachers whose hidden states samples of any rank hold, except those `known`."""
        hidden = [each for each in samples if each.teacher in self.plan.follow and each.teacher_hidden is not None]
        mine, heads = {(each.teacher, each.teacher_version) for each in hidden}, dict[tuple[str, int], Head]()
        for teacher, version in sorted(set().union(*self.ranks.gathered(mine)) - set(known)):
            snapshot = snapshot_of(teacher, None if version == self.followed[teacher] else version)
            linear = self.snapshots.copy_layer(snapshot, self.lm.head.linear)
            dtype = getattr(torch, self.plan.follow[teacher].dtype)
            heads[teacher, version] = replace(self.lm.head, linear=linear.to(dtype))
        return heads

    def export(self, teacher: str, made: int) -> tuple[WeightsRef, Fingerprint]:
        """Return the student's weights after update `made`, or those of a following teacher, which is moved if due."""
        if teacher:
            dtype, version, others = self._move(teacher, made)
        else:
            if self.snapshots.keep:
                self.snapshots.take(made)
            dtype, version, others = self.plan.exported, made, {}
        model, keep = self.lm.model, self.ranks.index == 0
        weights = export_weights(model, dtype, version=version, keep=keep, others=others)
        checksum = fingerprint(model, dtype, exported=weights, still=self.checksums.setdefault(dtype, {}))
        if self.plan.quantisation is not None and keep and not teacher:
            return weights, fingerprint_of_parts(weights, self._parts)
        return weights, checksum

    def _move(self, teacher: str, made: int) -> tuple[str, int, dict[str, Tensor]]:
        """Move a teacher if it is due; return dtype, version and shards of the weights to export next."""
        follower, name = self.plan.follow[teacher], snapshot_of(teacher)
        if made > self.followed[teacher] and made % follower.every == 0:
            self._store_earlier(teacher)
            self.snapshots.blend(name, follower.decay)
            self.followed[teacher] = made
        version, unsent = self.followed[teacher], self.unsent[teacher]
        if unsent and (oldest := unsent.pop(0)) in self.earlier[teacher]:
            version, name = oldest, snapshot_of(teacher, oldest)
        return follower.dtype, version, dict(zip(self.snapshots.trained, self.snapshots.weights[name], strict=True))

    def _store_earlier(self, teacher: str) -> None:
        """Store the weights of a teacher that is about to move, and delete the oldest if there are too many."""
        earlier, keep = self.earlier[teacher], self.plan.follow[teacher].keep
        if keep:
            earlier.append(self.followed[teacher])
            self.snapshots.copy(snapshot_of(teacher), snapshot_of(teacher, earlier[-1]))
        while len(earlier) > keep:
            del self.snapshots.weights[snapshot_of(teacher, earlier.pop(0))]

    def _parts(self, name: str, weight: Tensor) -> Sequence[Tensor]:
        """Return an exported weight, with the codes and scales that samplers make of it."""
        kind = present(self.plan.quantisation)
        return (weight, *quantised(weight, kind)) if name in self.quantised else (weight,)

    def state(self, drew: Collection[int], scored: Collection[int]) -> dict[str, Any]:
        """Return the fields of a checkpoint's `State` about weights, by field.

        `drew` are the versions that drew tokens of unfinished groups, and `scored` those of teachers that scored them.
        """
        snapshots, names = self.snapshots, self.plan.follow
        return {
            "previous": snapshots.state(OLD) if self.plan.method.keeps_old else {},
            "versions": {version: snapshots.state(version) for version in sorted(drew) if version in snapshots},
            "teachers": {name: (self.followed[name], snapshots.state(snapshot_of(name))) for name in names},
            "earlier": {
                name: {v: snapshots.state(snapshot_of(name, v)) for v in self.earlier[name] if v in scored}
                for name in names
            },
        }

    def restore(self, path: Path, found: State) -> None:
        if self.plan.method.keeps_old:
            if not found.previous:
                old = f'the weights that policy.old = "{present(self.plan.method.policy).old}" compares with'
                raise not_saved(path, old, "policy.old")
            self.snapshots.put(OLD, found.previous)
        for name, follower in self.plan.follow.items():
            if name not in found.teachers:
                raise not_saved(path, f"the weights of teachers.{name}, which follows the student", "follow")
            self.followed[name], state = found.teachers[name]
            self.snapshots.put(snapshot_of(name), state, host=True)
            self.earlier[name] = sorted(found.earlier[name]) if follower.keep else []
            for version in self.earlier[name]:
                self.snapshots.put(snapshot_of(name, version), found.earlier[name][version], host=True)
            self.unsent[name] = [*self.earlier[name], self.followed[name]]
        if self.snapshots.keep:
            for version, state in found.versions.items():
                self.snapshots.put(version, state, host=True)


def snapshot_of(teacher: str, version: int | None = None) -> str:
    """Return the name of the snapshot of a teacher, or of an earlier version of the teacher."""
    return f"teacher {teacher}" if version is None else f"teacher {teacher} after {version}"
