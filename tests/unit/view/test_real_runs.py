"""What real runs leave for the viewer: how they ended, and every number that made the gradient."""

import json

import numpy as np
import pytest
import torch

import grpo
from grpo.bandit import BanditConfig
from grpo.bandit import make_trainer as make_bandit
from grpo.core import ratios, reductions
from grpo.experience import Experience, with_gates
from grpo.objective import objective, per_decision
from grpo.recipes import RECIPES
from grpo.report import StepReport
from grpo.rollouts import Scores
from grpo.run.exhibits import exhibit
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.view.library import Library
from grpo.view.objective import describe, limits
from tests.batches import numbers, rollouts
from tests.faults.tiny import QUICK, make_folder, make_trainer, train

SAID = ("formula", "limits", "when_held")


def status(path):
    return json.loads((path / "status.json").read_text())


def state(path):
    return Library(path.parent).answer("/api/runs")["runs"][0]["state"]


# --- how it ended -----------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_and_how_it_ended(tmp_path):
    seen = {}

    def at(point):
        seen["status"], seen["state"] = status(tmp_path / "run"), state(tmp_path / "run")

    train(tmp_path / "run", 6, at=at)
    assert seen["state"] == "running" and seen["status"]["reason"] is None and seen["status"]["steps"] == 6
    assert status(tmp_path / "run")["reason"] == "done" and state(tmp_path / "run") == "finished"
    recipe = status(tmp_path / "run")["recipe"]
    assert (recipe["surrogate"], recipe["epsilon"], recipe["limits"]) == ("clip", 0.2, [0.8, 1.2])
    assert recipe["formula"] == "−min(r·A, clip(r, 0.8, 1.2)·A)"


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_run_says_of_its_surrogate_is_what_older_folders_are_read_as(name):
    """Folders from before the formula was written have the numbers alone."""
    row = RECIPES[name]
    told = json.loads(json.dumps(row.told()))
    now, before = describe(told), describe({name: told[name] for name in told if name not in SAID})
    assert now["formula"] == row.surrogate.formula and now["when_held"] == row.surrogate.when_held
    assert (now["ratio_low"], now["ratio_high"]) == (row.surrogate.limits or (None, None)) == limits(row.columns())
    if row.surrogate.kind in ("clip", "geometric", "cispo", "dro", "unclipped", "policy_gradient"):
        assert before["formula"] == now["formula"]
    assert before.keys() == now.keys()
    assert before["formula"] or row.surrogate.kind == "topr"  # newer than such folders


def test_a_surrogate_that_nobody_has_heard_of_is_shown_by_its_own_words():
    mine = {"surrogate": "mine", "formula": "−A²", "limits": [0.5, 2], "when_held": "halved"}
    found = describe(mine)
    assert (found["formula"], found["ratio_low"], found["ratio_high"], found["when_held"]) == ("−A²", 0.5, 2, "halved")
    for hostile in ({"formula": {}, "limits": "ab", "when_held": 3}, {"limits": [None, 1]}, {"limits": [1, 2, 3]}):
        found = describe({"surrogate": "mine", **hostile})
        assert (found["formula"], found["ratio_low"], found["ratio_high"]) == (None, None, None)


def test_a_crash_and_its_resumption_are_seen(tmp_path):
    class Crash(RuntimeError):
        pass

    def at(point):
        if point == "step" and len(RunFolder.open(tmp_path / "run").metrics()) == 7:
            raise Crash

    with pytest.raises(Crash):
        train(tmp_path / "run", 12, at=at)
    assert status(tmp_path / "run")["reason"] == "Crash" and state(tmp_path / "run") == "crashed"
    train(tmp_path / "run", 12)
    (line,) = Library(tmp_path).answer("/api/runs")["runs"]
    assert (line["state"], line["resumed"], line["step"], line["steps"]) == ("finished", 1, 12, 12)


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path):
    folder = make_folder(tmp_path / "run")
    (tmp_path / "run" / "status.json").mkdir()
    assert run(make_trainer(), 3, folder, **QUICK).reason == "done"


def test_memory_is_told_beside_the_time(tmp_path):
    train(tmp_path / "run", 3)
    assert all(0.01 < row["memory/host_gib"] < 1000 for row in RunFolder.open(tmp_path / "run").timing())


def test_a_trainer_shows_its_own_run(tmp_path):
    _, trainer = train(tmp_path / "run", 5)
    assert trainer.run_folder == tmp_path / "run"
    assert "grpo-export" in grpo.show(trainer).html


# --- every number of the gradient -------------------------------------------------------------------------------------


ANYWHERE = [name for name in RECIPES if name not in ("otb", "remax", "gigpo")]
"""Rows that need nothing of the language room."""


@pytest.mark.parametrize("name", ANYWHERE)
def test_what_is_shown_of_each_decision_adds_up_to_the_loss(name):
    """gate · (term + penalty) · mismatch · weight, reduced as the recipe says, is the policy loss; the KL its mean."""
    row = RECIPES[name]
    adds_up(row.but(beta=0.04, length=8.0 if row.reduction == "fixed_length" else None))


@pytest.mark.parametrize(
    "more",
    [
        {"top_entropy": 0.4},
        {"clip_cov": 0.3, "clip_cov_low": -100.0, "clip_cov_high": 100.0},
        {"kl_cov": 0.3},
        {"kl_cov": 0.3, "clip_cov": 0.3, "clip_cov_low": -100.0, "clip_cov_high": 100.0},
        {"off_policy_threshold": 0.05},
        {"mismatch": "truncate", "mismatch_high": 1.1},
        {"mismatch": "mask", "mismatch_high": 1.1, "off_policy_threshold": 0.05, "top_entropy": 0.6},
        {"ratio": "chunk", "chunk_size": 2, "mismatch": "truncate", "off_policy_threshold": 0.05},
        {"ratio": "trajectory"},
        {"ratio": "sequence", "kl_cov": 0.3},
        {"surrogate": "geometric", "mismatch": "truncate", "top_entropy": 0.4},
    ],
    ids=str,
)
def test_what_is_shown_adds_up_with_every_gate_and_weight(more):
    found, mask_NT = adds_up(RECIPES["grpo"].but(beta=0.04, **more), weighted=True)
    assert ("mismatch" in found) == ("mismatch" in more) and ("penalty" in found) == ("kl_cov" in more)
    if more.keys() & {"top_entropy", "clip_cov", "off_policy_threshold"} and more.get("surrogate") != "geometric":
        assert (found["gate"] != mask_NT).any()


def adds_up(recipe, weighted=False):
    """What is told of each decision, after it was found to be the loss."""
    x = numbers(3)
    given = rollouts(x, torch.as_tensor)
    if recipe.baseline in ("given", "role_mean", "optimal_value"):
        given = given.but(baseline_NT=torch.zeros(given.mask_NT.shape, dtype=torch.float64))
    if recipe.credit == "reward_to_go":
        given = given.but(
            reward_parts_NK=None, reward_NT=torch.as_tensor(x["parts"])[:, :1].expand(given.mask_NT.shape)
        )
    draw = torch.Generator().manual_seed(1)
    uniform_NT = torch.rand(given.mask_NT.shape, generator=draw, dtype=torch.float64)
    if weighted:
        given = given.but(weight_NT=0.5 + uniform_NT)
    batch = Experience.build(given, recipe, torch.as_tensor(x["ref"]))
    scores = Scores(torch.as_tensor(x["logp"]), uniform_NT)
    batch = with_gates(batch, scores, recipe, uniform_NT.flip(0))
    found = per_decision(scores, batch, recipe)
    terms, over = objective(scores, batch, recipe), batch.denominators
    size = recipe.fold_size(batch.mask_NT.shape[1])
    folded = ratios.fold_mask(batch.mask_NT, size)

    def whole(array_NT):
        return ratios.fold_mean(array_NT, batch.mask_NT, size)

    made = found["gate"] * (found["term"] + found.get("penalty", 0.0))
    made = made * found.get("mismatch", 1.0) * found.get("weight", 1.0)
    reduced = getattr(reductions, recipe.reduction)(whole(made), folded, over)
    assert float(reduced) == pytest.approx(float(terms.policy_loss), rel=1e-9, abs=1e-12)
    shown = reductions.token_mean(whole(found["ratio"]), folded, over)
    assert float(shown) == pytest.approx(float(terms.metrics["ratio"]))
    if terms.kl is not None and not recipe.kl_importance:
        kl = ratios.fold(found["kl"], batch.mask_NT, size)
        assert float(reductions.token_mean(kl, folded, over)) == pytest.approx(float(terms.kl))
    return found, batch.mask_NT


GATED = {
    "top_entropy": {"top_entropy": 0.2},
    "clip_cov": {"clip_cov": 0.2, "clip_cov_low": -100.0, "clip_cov_high": 100.0},
    "off_policy_threshold": {"off_policy_threshold": 1e-6},
}


@pytest.mark.parametrize("gate", GATED)
def test_the_gates_of_the_last_pass_are_kept(tmp_path, gate):
    """Also where minibatches took the rows apart."""
    pytest.importorskip("gymnasium")
    from grpo.control import GRPOTrainer

    more = {"num_iterations": 2, "groups_per_minibatch": 1, "learning_rate": 0.05, "recipe": GATED[gate]}
    trainer = GRPOTrainer(
        env="CartPole-v1", group_size=4, groups_per_step=2, hidden=(8,), seed=5, video=False, loss_type="grpo", **more
    )
    report = trainer.step()
    rows, arrays = exhibit(report, trainer.source, None, trainer.recipe)
    taught = int((arrays["gate"] & arrays["mask"]).sum())
    assert 0 < taught < int(arrays["mask"].sum()) and taught == sum(row["teaching"] for row in rows)
    if gate == "top_entropy":
        assert taught == pytest.approx(0.2 * arrays["mask"].sum(), rel=0.1)
    trainer.source.close()


def test_small_differences_keep_their_digits():
    """float16 of two log-probs near −12 differ by multiples of 1/128."""
    x = numbers(3)
    given = rollouts(x, torch.as_tensor)
    shape = given.mask_NT.shape
    given = given.but(
        old_logp_NT=torch.full(shape, -12.0, dtype=torch.float64),
        sampled_logp_NT=torch.full(shape, -12.0005, dtype=torch.float64),
    )
    recipe = RECIPES["grpo"].but(beta=0.04, kl_estimator="k1")
    experience = Experience.build(given, recipe, torch.full(shape, -12.001, dtype=torch.float64))
    report = StepReport(1, {}, experience, Scores(torch.full(shape, -11.9998, dtype=torch.float64)))
    _, arrays = exhibit(report, Shows(), None, recipe)
    expected = {"log_ratio": 0.0002, "sampler": 0.0005, "kl": 0.0012}
    for name, value in expected.items():
        assert arrays[name].dtype == np.float16
        assert arrays[name][arrays["gate"]] == pytest.approx(value, rel=1e-2)


class Shows:
    """A source that only shows."""

    def show(self, rollouts):
        return [{}] * len(rollouts)


@pytest.mark.parametrize("method", ["show", "entropies"])
def test_a_source_that_cannot_be_shown_ends_no_run(tmp_path, method):
    folder, trainer = make_folder(tmp_path / "run"), make_trainer()

    def broken(rollouts):
        raise RuntimeError("nothing to see")

    setattr(trainer.source, method, broken)
    assert run(trainer, 12, folder, **QUICK).reason == "done"
    (event,) = [row for row in folder.events() if row["event"] == "samples_not_kept"]
    assert "nothing to see" in event["message"] and event["step"] == 1


def test_the_page_has_the_numbers_of_the_run(tmp_path):
    """Of the last pass: ratio, clipped term and KL, from a run with a reference and several updates."""
    folder = make_folder(tmp_path / "run")
    run(make_trainer(learning_rate=2.0), 5, folder, **QUICK)
    library = Library(tmp_path)
    groups = library.answer("/api/runs/run/steps/5/groups")["groups"]
    clipped = 0
    for group in groups:
        path = f"/api/runs/run/steps/5/groups/{group['group']}"
        told = library.answer(path)
        assert told["objective"]["known"] and told["objective"]["beta"] == 0.05
        low, high = told["objective"]["ratio_low"], told["objective"]["ratio_high"]
        for row in library.answer(f"{path}/tokens")["rows"]:
            (ratio,), (advantage,), (term,), (clip,) = (row[name] for name in ("ratio", "advantage", "term", "clip"))
            assert ratio == pytest.approx(np.exp(row["logp"][0] - row["old_logp"][0]), rel=2e-2)
            expected = -min(ratio * advantage, np.clip(ratio, low, high) * advantage)
            assert term == pytest.approx(expected, rel=5e-3, abs=5e-3)
            gap = row["logp"][0] - row["ref_logp"][0]
            assert told["objective"]["kl_formula"] == "p − q" and row["kl"][0] == pytest.approx(gap, abs=5e-3)
            assert clip == (advantage > 0 and ratio > high) - (advantage < 0 and ratio < low)
            clipped += abs(clip)
    assert clipped  # or nothing was shown


def test_a_bandits_choices_have_their_entropy(tmp_path):
    config = BanditConfig(group_size=4, device="cpu")
    folder = RunFolder.create(tmp_path / "run", task="bandit", config={}, created="", seed=0)
    trainer = make_bandit(config)
    run(trainer, 2, folder, sample_every=2, progress=None, curve=False)
    p_V = trainer.policy.probabilities()
    (row, *_) = Library(tmp_path).answer("/api/runs/run/steps/2/groups/0/tokens")["rows"]
    assert row["entropy"] == pytest.approx([-(p_V * np.log(p_V)).sum()], rel=1e-3)


@pytest.mark.parametrize("make", ["bandit", "control", "language"])
def test_keeping_samples_does_not_change_what_is_learned(tmp_path, make):
    files = []
    for every in (1, None):
        path = tmp_path / f"{make}-{every}"
        folder = RunFolder.create(path, task=make, config={}, created="", seed=0)
        trainer = MAKERS[make](tmp_path)
        run(trainer, 3, folder, sample_every=every, progress=None, curve=False, checkpoint_every=None)
        last = path / "checkpoints" / "step-00000003"
        files.append([(path / "metrics.jsonl").read_bytes(), (last / "arrays.safetensors").read_bytes()])
    assert files[0] == files[1]
    rows, arrays = RunFolder.open(tmp_path / f"{make}-1").samples(3)
    assert {"entropy", "log_ratio", "term"} <= {*arrays} and np.isfinite(arrays["entropy"][arrays["mask"]]).all()
    assert all(row["decisions"] == int(mask.sum()) for row, mask in zip(rows, arrays["mask"], strict=True))
    assert all(isinstance(row["reward"], float) for row in rows)


def _control(tmp_path):
    pytest.importorskip("gymnasium")
    from grpo.control import GRPOTrainer

    return GRPOTrainer(env="CartPole-v1", group_size=3, groups_per_step=2, hidden=(8,), seed=5, video=False)


def _language(tmp_path):
    pytest.importorskip("transformers")
    from grpo.language import GRPOConfig, GRPOTrainer
    from tests.unit.language.functions import digits
    from tests.unit.language.tiny import tiny_model, tiny_tokenizer

    path = tmp_path / "model"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    settings = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 6, "reward_workers": 1}
    config = GRPOConfig(output_dir=str(tmp_path / "out"), preflight=False, learning_rate=1e-3, max_steps=3, **settings)
    rows = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(6)]
    return GRPOTrainer(model=str(path), reward_funcs=digits, args=config, train_dataset=rows)


MAKERS = {
    "bandit": lambda tmp_path: make_bandit(BanditConfig(group_size=4, device="cpu")),
    "control": _control,
    "language": _language,
}


def test_observations_are_kept_where_they_are_few(tmp_path):
    trainer = _control(tmp_path)
    rows, _ = exhibit(trainer.step(), trainer.source, None)
    assert all(len(row["observations"]) == row["length"] and len(row["observations"][0]) == 4 for row in rows)
    trainer.source.close()


def test_groups_that_were_sampled_again_say_so(tmp_path):
    pytest.importorskip("gymnasium")
    from grpo.control import GRPOTrainer

    settings = {
        "advantage": "episode",
        "no_signal": "resample",
        "group_size": 3,
        "groups_per_step": 4,
        "max_attempts": 8,
    }
    trainer = GRPOTrainer(env="FrozenLake-v1", hidden=(8,), seed=1, video=False, **settings)
    folder = RunFolder.create(tmp_path / "run", task="control", config={}, created="", seed=0)
    run(trainer, 1, folder, sample_every=1, progress=None, curve=False)
    found = Library(tmp_path).answer("/api/runs/run/steps/1/groups")
    attempts = RunFolder.open(tmp_path / "run").metrics()[0]["attempts"]
    assert attempts > 1 and found["badges"].get("refilled", 0) >= 1
    trainer.source.close()
