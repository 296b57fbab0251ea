"""Proof that a server runs the published weights: its answers, compared with those of a copy of the student here.

Pure functions, for four faults:

    other weights       log-probs of fixed texts are far from the copy's
    old weights         the copy's log-probs moved since the last proven version, and the server's did not
    an old output head  log-probs are nearer to those that the copy would have with its first head
    an old tensor       the copy's tensor changed since the first load, and the server's checksum of it did not

Log-probs are compared after every load. Moves below `MIN_MOVE` prove nothing; they add up until a later version. A head
counts as old only if its effect stands out from all other differences between server and copy.

Shapes: N tokens of all texts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.records import Floats

PROOF_TEXTS, PROOF_TOKENS = 4, 24
"""Number of texts, and tokens of each."""
MAX_DIFFERENCE = {"float64": 0.01, "float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""Limit of the root mean square difference between server and copy, by the number format of the weights."""
MIN_MOVE = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""Root mean square move of the copy's log-probs above which the server's must move, too."""
NOISE_FACTOR = 4.0
"""Smallest move of the copy that counts, as a multiple of the difference between two equal requests."""
MIN_HEAD_EFFECT = 6.0
"""Effect of an old head, in standard errors, above which it is no accident."""
OLD_HEAD = "keeps an old output head: use a student whose head is not tied to its embeddings"


@dataclass(frozen=True)
class Answers:
    """Log-probs of the server and of the copy for the same weights."""

    served_N: Floats
    copy_N: Floats
    old_head_N: Floats
    """Log-probs that the copy would have with the output head of its first weights."""


@dataclass(frozen=True)
class Checksums:
    """Checksums of all tensors of the server and of the copy, by name."""

    served: Mapping[str, tuple[str, ...]]
    """Checksums of all shards of a tensor, by `REPLICA:NAME`."""
    copy: Mapping[str, int]


def texts(vocabulary: int, context: int) -> list[list[int]]:
    """Return the fixed texts: random token ids, the same in every run with this vocabulary."""
    texts: list[list[int]] = (
        np.random.default_rng(0).integers(0, vocabulary, (PROOF_TEXTS, min(PROOF_TOKENS, context - 1))).tolist()
    )
    return texts


def apart(a_N: Floats, b_N: Floats) -> float:
    """Return the root mean square difference."""
    return float(np.sqrt(np.mean((a_N - b_N) ** 2)))


def moved(now: Answers, before: Answers, *, noise: float, dtype: str) -> bool:
    """Return whether the copy's log-probs moved so far that the server's must move, too."""
    return apart(now.copy_N, before.copy_N) > max(MIN_MOVE[dtype], NOISE_FACTOR * noise)


def objection(now: Answers, before: Answers | None, *, noise: float, dtype: str) -> str:
    """Return why the server does not run the published weights; empty if it does."""
    far = apart(now.served_N, now.copy_N)
    if not far <= MAX_DIFFERENCE[dtype]:  # also true for NaN
        limit = MAX_DIFFERENCE[dtype]
        return f"does not run the published weights: its log-probs of fixed texts are {far:.2g} off, above {limit}"
    if before and moved(now, before, noise=noise, dtype=dtype) and apart(now.served_N, before.served_N) <= 2 * noise:
        return "keeps old weights: its log-probs of fixed texts did not move, and those of the published weights did"
    return OLD_HEAD if has_old_head(now) else ""


def has_old_head(now: Answers) -> bool:
    """Return whether the old head explains over half of its effect, and clearly more than chance would."""
    step_N, off_N = now.old_head_N - now.copy_N, now.served_N - now.copy_N
    size = float(np.linalg.norm(step_N))
    share = float(off_N @ step_N) / size**2 if size else 0.0
    return share > 0.5 and share * size > MIN_HEAD_EFFECT * apart(off_N, share * step_N)


def objection_to(now: Checksums, first: Checksums) -> str:
    """Return which tensors of the server are those of its first load, although the copy's changed; empty if none."""
    unchanged = [name for name, sums in now.served.items() if sums == first.served.get(name)]
    changed = {name for name, sum in now.copy.items() if sum != first.copy[name]}
    parts = {name: parts_of(name.rpartition(":")[2], now.copy.keys()) for name in unchanged}
    if not (old := [name for name in unchanged if parts[name] and changed.issuperset(parts[name])]):
        return ""
    return f"keeps old weights in {len(old)} of its {len(now.served)} tensors, such as {old[0]}"


def parts_of(name: str, names: Collection[str]) -> list[str]:
    """Return the copy's tensors that make a tensor of the server, which joins several of one module under a new name.

    They are the tensor of this name, or all of its kind in the smallest module around it that has any.
    """
    inside, around = [name] if name in names else list[str](), name
    while not inside:
        around = around.rpartition(".")[0]
        inside = [each for each in names if each.startswith(f"{around}." if around else "")]
    return [each for each in inside if kind_of(each) == kind_of(name)]


def kind_of(name: str) -> str:
    return next((kind for kind in ("bias", "scale") if kind in name.rpartition(".")[2]), "weight")
