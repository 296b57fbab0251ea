"""What the teacher of self_best.toml sees."""


def shown(prompt: str, best: str, best_reward: float | None) -> str:
    """Behind an attempt that was right, as soon as there is one; until then what the student sees."""
    return best + prompt if best_reward == 1.0 else prompt
