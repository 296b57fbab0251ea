"""Pages of docs/findings by scripts: each at a size at which it says nothing yet, and the laws of its verdicts."""

import sys
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import pytest
import torch

from findings import VERDICT
from slipstream.statistics import Estimate

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = import_module(request.param)
    sizes = {
        "frontier": {
            "LENGTHS": (8, 16),
            "LONG": 10,
            "WALKS": 32,
            "AT_ONCE": 32,
            "RESPONSES": 32,
            "FRESH": 128,
            "REAL_LENGTHS": (8, 16),
        },
        "router": {"LENGTHS": (8, 16), "SEEDS": 2, "REAL_SEEDS": 2, "REAL_EXPERTS": (4, 8), "REAL_LENGTHS": (3, 6)},
    }
    no_study = {"Sweep": lambda path: None, "conditions": lambda sweep, variation: ()}
    sizes["budget"] = {"UPDATES": 2, "PRECISIONS": {"int8": {"quantisation": "int8"}}} | no_study
    sizes["router"] |= {"REAL_LENGTH": 6, "REAL_PART": 4, "PARTS": (4, 2)}
    for name, value in sizes.get(request.param, {}).items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("frontier", ["--seeds", "2"]),
        pytest.param("frontier", ["--seeds", "2", "--model"], marks=pytest.mark.slow),
        ("router", []),
        pytest.param("router", ["--model"], marks=pytest.mark.slow),
        ("budget", ["runs/precision", "--precisions"]),
    ],
    indirect=["script"],
    ids=["frontier", "frontier of a transformer", "router", "router of a mixture", "budget of precisions"],
)
def test_a_script_writes_a_page_with_a_verdict(
    script: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *words])
    script.main()
    page = capsys.readouterr().out
    assert page.startswith("\n## " if words and words[-1] in ("--model", "--precisions") else "# ")
    assert f"> docs/findings/{script.__name__}.md" in page
    assert "onjecture" in page and VERDICT.search(page) and "nan" not in page


@pytest.mark.parametrize("script", ["frontier"], indirect=True)
def test_who_is_best_at_all_lengths_and_in_all_cases(script: ModuleType) -> None:
    between, extreme, neither = (script.seen({each}) for each in ("holds", "does not hold", "open"))
    assert (between, extreme) == ("something between is best", "an extreme is best")
    assert script.seen({"holds", "open"}) == "it differs by length"
    says = [("holds", [between, neither]), ("fails", [extreme, neither]), ("is open", [neither])]
    says += [("differs by case", [between, extreme]), ("differs by case", [extreme, script.DIFFERS])]
    for word, tables in says:
        assert script.verdict_of(tables).startswith(f"The conjecture {word} here: ")
    assert script.verdict_of([extreme, neither, extreme]).endswith(
        "in 2 of 3 an extreme is best; in 1 of 3 neither is seen to be best."
    )


@pytest.mark.parametrize("script", ["router"], indirect=True)
def test_what_refutes_a_law_of_flips_and_what_is_said_beside_it(script: ModuleType) -> None:
    assert "holds here" in script.verdict(linear=True, told=False, grows=True)
    assert "holds in part here" in script.verdict(linear=True, told=False, grows=False)
    assert "fails here: the bias is not linear" in script.verdict(linear=False, told=False, grows=True)
    assert "fails here: token KL alone tells it" in script.verdict(linear=True, told=True, grows=True)


@pytest.mark.parametrize("script", ["frontier"], indirect=True)
def test_small_batches_give_mean_and_variance_of_their_gradients(script: ModuleType) -> None:
    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments = script.Moments(torch.zeros(4, dtype=torch.float64))
    for gradient in gradients:
        moments.add(gradient)
    assert torch.allclose(moments.mean, gradients.mean(0))
    assert moments.variance == pytest.approx(gradients.var(0).sum().item())


@pytest.mark.parametrize("script", ["frontier"], indirect=True)
def test_without_drift_all_weights_make_the_same_progress(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "REAL_KL", 0.0)
    found = script.real_progress(1, 8)
    assert found.pop(script.ESS) == pytest.approx(1.0, abs=1e-4)
    assert max(found.values()) - min(found.values()) < 1e-3 < max(found.values())


@pytest.mark.parametrize("script", ["real_experts"], indirect=True)
def test_the_gradient_over_all_responses_is_a_difference_of_expected_rewards(script: ModuleType) -> None:
    mixture = script.Mixture(1, 4, 4)
    reward_B, weight = mixture.all.rewards_KB[1], mixture.lm.head.weight

    def expected() -> torch.Tensor:
        return (mixture.logp(script.Choices(mixture.routers)).sum(-1).exp() * reward_B).sum()

    (gradient,) = torch.autograd.grad(expected(), weight)
    with torch.no_grad():
        weight[0, 0] += 1e-4
        above = expected()
        weight[0, 0] -= 2e-4
        below = expected()
    assert gradient[0, 0].item() == pytest.approx(((above - below) / 2e-4).item(), rel=1e-3)
    assert sorted(reward_B.tolist()) == [0.0] * 11 + [1.0] * 5, "none of four tokens is a one, or three are"


@pytest.mark.parametrize("script", ["real_experts"], indirect=True)
def test_each_choice_is_swapped_in_one_of_the_parts(script: ModuleType) -> None:
    mixture, free = script.Mixture(1, 4, 4), []
    mixture.logp(own := script.Choices(mixture.routers))
    for number in range(3):
        swaps = mixture.swaps(3, number)
        mixture.logp(swaps)
        kept = (swaps.used[0] == own.used[0]).all(-1)
        assert torch.equal(kept, ~swaps.swapped_NR[:, 0]), "the first router sees no other swaps"
        free.append(swaps.swapped_NR)
    assert torch.equal(sum(each.long() for each in free), torch.ones_like(free[0]).long())
    mixture.hold_kl(3, 1e-3)
    assert mixture.kl(3) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("script", ["collapse"], indirect=True)
def test_a_collapse_stays_and_is_more_than_the_last_window(script: ModuleType) -> None:
    high, low = [0.6] * 40, [0.1] * 40
    assert script.collapse(high + low) is not None and script.collapse(low + high) is None
    assert script.collapse(high + low + high) is None, "it came back"
    assert script.collapse(high + low[:12]) is None, "nobody knows if it stays"


def run_that_collapses(end: int, seed: int, *, told: bool) -> list[dict[str, float]]:
    """At an update, or never: what is told of it falls fifty updates before, or does not."""
    noise, lines = Random(seed), list[dict[str, float]]()
    for update in range(1, 181):
        near = max(0.0, min(1.0, (update - end + 50) / 50)) if told else 0.0
        line = {"reward/exact": 0.5 if update < end else 0.1, "lag/mean": 0.0, "lr": 1e-3, "drift/ess_seq": 1 - near}
        others = ("drift/chi2_row_p95", "length/mean", "student/entropy", "grad_norm", "drift/k3_kl")
        lines.append(line | {name: noise.random() for name in others})
    return lines


@pytest.mark.parametrize("script", ["collapse"], indirect=True)
@pytest.mark.parametrize(("told", "says"), [(True, "The conjecture holds here"), (False, "The conjecture fails here")])
@pytest.mark.parametrize("ahead", [50, 40])
def test_a_collapse_that_is_told_of_is_foreseen_and_another_is_not(
    script: ModuleType,
    told: bool,
    says: str,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cell(arm: str, seed: int, end: int) -> SimpleNamespace:
        run = SimpleNamespace(metrics=run_that_collapses(end, seed, told=told))
        return SimpleNamespace(path=arm, run=run, point=SimpleNamespace(arm=arm, name=arm))

    ends = ((100, 130, 150, 999), (90, 120, 140, 999))
    cells = [cell(arm, seed, end) for arm, of in zip("ab", ends, strict=True) for seed, end in enumerate(of)]
    monkeypatch.setattr(script, "Sweep", lambda path: SimpleNamespace(finished=cells))
    monkeypatch.setattr(sys, "argv", ["collapse", "runs/planted", "--ahead", str(ahead)])
    script.main()
    page = capsys.readouterr().out
    assert f"it comes within {ahead} updates" in page
    assert says in page and "a clock alone tells 0.50" in page and "6 of 8 runs have collapsed" in page


@pytest.mark.parametrize("script", ["ladder"], indirect=True)
def test_how_far_a_run_falls_and_whether_that_is_a_collapse(script: ModuleType) -> None:
    high = [0.5] * 100
    assert script.fall(high) == (0.5, 0.0, False)
    assert script.fall(high + [0.2] * 30) == (0.5, pytest.approx(0.3), True)
    assert script.fall(high + [0.35] * 30)[2] is False, "30 % below"
    assert script.fall(high + [0.0] * 10)[2] is False, "not long enough"


@pytest.mark.parametrize("script", ["budget"], indirect=True)
def test_what_corrections_add_within_the_budget_is_seen_or_not(script: ModuleType) -> None:
    small, large, unclear = Estimate(5, 0.0, 0.001), Estimate(5, 0.02, 0.005), Estimate(5, 0.002, 0.004)
    assert script.verdict({}) == "is not tested"
    assert script.verdict({"a": small}) == "holds" and script.verdict({"a": small, "b": large}) == "fails"
    assert script.verdict({"a": small, "b": unclear}) == "is open"


def test_what_agreeing_engines_and_corrections_add_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    budget = import_module("budget")
    accuracy = {("draws, not weighed", "agree"): 0.40, ("draws, not weighed", "int8"): 0.30}
    accuracy |= {("draws, weighed", "agree"): 0.43, ("draws, weighed", "int8"): 0.35}
    accuracy |= {("draws, responses rejected", "agree"): 0.40, ("draws, responses rejected", "int8"): 0.1}
    points = [SimpleNamespace(arm=arm, x=x) for arm, x in accuracy]

    def by_seed(of: list[SimpleNamespace], measure: str) -> list[dict[int, float]]:
        at = {"eval/accuracy": accuracy, "drift/tv_p95": dict.fromkeys(accuracy, 2e-4)}.get(measure, {})
        return [{seed: at.get((each.arm, each.x), 0.0) + 0.01 * seed for seed in (1, 2)} for each in of]

    sweep = SimpleNamespace(study=SimpleNamespace(points=points), by_seed=by_seed)
    agree, int8 = budget.conditions(sweep, "drift/tv_p95")
    assert (int8.best, agree.best) == ("draws, weighed", "draws, weighed")
    gains = [each.mean for each in (int8.gain, int8.repair, int8.both, agree.gain, agree.repair, agree.both)]
    assert gains == pytest.approx([0.05, 0.1, 0.13, 0.03, 0.0, 0.03])
    assert not int8.within, "a total variation of 0.0152 at the 95th percentile"


@pytest.mark.parametrize("script", ["tolerance"], indirect=True)
def test_the_law_of_lag_is_found_where_one_was_planted(script: ModuleType) -> None:
    runs = [
        script.Seen(seed, lag, ess, lag <= 40 * ess**1.5)
        for seed in (1, 2)
        for lag in (1, 5, 10, 20, 40)
        for ess in (0.1, 0.2, 0.4, 0.6, 0.9)
    ]
    share, (low, high) = script.row("planted", runs)
    assert share == 1.0 and low <= 1.5 <= high
    assert script.unseen(runs) == 1.0
    other = [script.Seen(3, each.lag, each.ess, each.lag <= 5 * each.ess**1.5) for each in runs if each.seed == 1]
    assert script.unseen([*runs, *other]) < 1.0 == script.unseen(runs), "a law of two seeds is not that of the third"
    apart = [script.Seen(seed, lag, 0.5, lag < 20) for seed in (1, 2) for lag in (1, 5, 10, 20, 40)]
    assert script.unseen(apart) == 1.0 and script.unseen([each for each in apart if each.stable or each.seed == 1])
    assert script.best(runs, 0.0)[0] < 1.0, "lag alone does not tell"
