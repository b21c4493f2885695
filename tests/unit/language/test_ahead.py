"""Language runs that ask ahead in one process: a copy samples the next step while this one is learned from."""

import json
import re
import threading
import types
import warnings

import pytest
import torch

from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.build import Given, pictures_of, player_of
from grpo.language.engines.copied import CopyEngine

from .tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{i} and {i + 1} make", "answer": str(2 * i + 1)} for i in range(40)]


def made(steps=5, model=None, rows=None, **settings) -> GRPOTrainer:
    warnings.simplefilter("ignore")
    settings = {"beta": 0.0, "engine": "inline", "num_iterations": 1} | settings
    config = GRPOConfig(
        max_steps=steps, num_generations=4, prompts_per_step=4, max_completion_length=6, preflight=False,
        learning_rate=1e-2, seed=3, **settings,
    )  # fmt: skip

    def digits(completions, **_):  # made here: it runs here
        return [float(len(re.findall(r"\d", completion))) for completion in completions]

    return GRPOTrainer(
        model=model or tiny_model(), processing_class=tiny_tokenizer(), reward_funcs=digits, args=config,
        train_dataset=rows or ROWS,
    )  # fmt: skip


def prompts_of(report):
    return [sample.prompt.row for sample in report.experience.rollouts.inputs]


@pytest.mark.parametrize(("staleness", "old"), [(1.0, 1.0), (0.5, 0.5)])
def test_a_copy_samples_ahead_and_every_token_knows_its_weights(staleness, old):
    ahead, plain = made(staleness=staleness), made()
    ahead.pace.until = 5
    assert isinstance(ahead.source.engine, CopyEngine)
    first = ahead.policy.model.state_dict()["lm_head.weight"].clone()
    for step in range(5):
        one, other = ahead.step(), plain.step()
        assert prompts_of(one) == prompts_of(other)  # the same data in the same order
        version_NT = one.experience.rollouts.version_NT
        found = set(version_NT[one.experience.rollouts.mask_NT].tolist())
        assert found == ({0} if step == 0 else {step - 1} if staleness == 1.0 else {step - 1, step})
        assert one.metrics["num_tokens"] > 0 and "rewards/digits/mean" in one.metrics
    assert one.metrics["staleness"] == pytest.approx(old, abs=0.25)
    assert one.metrics["mismatch_kl"] > 0 and ahead.config.recipe.mismatch == "truncate"
    assert not torch.equal(first, ahead.policy.model.state_dict()["lm_head.weight"])
    ahead.source.close(), plain.source.close()


def test_recorded_log_probs_are_those_of_the_weights_that_sampled():
    trainer = made(staleness=1)
    before = tiny_model()
    trainer.step()
    rollouts = trainer.step().experience.rollouts  # made before the first update
    for row, sample in enumerate(rollouts.inputs):
        ids = torch.tensor([[*sample.prompt.ids, *sample.ids.tolist()]])
        with torch.no_grad():
            logp = before(ids).logits[0].log_softmax(-1)[len(sample.prompt.ids) - 1 : -1]
        own = logp.gather(-1, sample.ids[:, None])[:, 0]
        torch.testing.assert_close(rollouts.sampled_logp_NT[row, : len(own)], own, rtol=1e-4, atol=1e-4)
    trainer.source.close()


def test_a_run_that_asks_ahead_goes_on_from_its_checkpoint_with_the_counters_right(tmp_path):
    def run(folder, steps, **settings):
        trainer = made(steps, staleness=1, output_dir=str(folder), save_steps=1, **settings)
        asked, lock = [], threading.Lock()
        begun = trainer.source.prompts.batch

        def batch(step, size):
            with lock:
                asked.append(step)
            return begun(step, size)

        trainer.source.prompts.batch = batch
        trainer.train(progress=None, resume_from_checkpoint=(folder / "run.json").exists() or None)
        return trainer, asked

    trainer, asked = run(tmp_path / "run", 3)
    assert asked == [0, 1, 2]
    again, asked = run(tmp_path / "run", 6)
    assert again.steps_done == 6 and asked == [3, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    tokens = [line["num_tokens"] for line in lines]
    assert tokens == sorted(tokens) and tokens[-1] == again.source.num_tokens
    assert tokens[2] == trainer.source.num_tokens
    timing = (tmp_path / "run" / "timing.jsonl").read_text()
    assert "learner_waits" in timing and "sampler_waits" in timing


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("point", ["sampling step 3 ahead", "step 2 is told", "the update of step 3", "a checkpoint"])
def test_a_learner_that_is_killed_at_any_point_goes_on_with_nothing_lost_and_nothing_twice(tmp_path, point):
    learned = []

    def run(dies):
        trainer = made(4, staleness=1, output_dir=str(tmp_path / "run"), save_steps=1)
        source = trainer.source
        part, update, state = source.collect_part, trainer._update, source.state

        def collect_part(request):
            if dies and point == "sampling step 3 ahead" and request.step == 2 and request.slots.of(4):
                raise Killed
            return part(request)

        def updated(rows, batch):
            if dies and point == "the update of step 3" and trainer.steps_done == 2:
                raise Killed
            return update(rows, batch)

        def told(report):
            if dies and point == "step 2 is told" and report.step == 2:
                raise Killed
            learned.append((report.step, prompts_of(report)[::4]))

        def saved():
            if dies and point == "a checkpoint" and trainer.steps_done == 3:
                raise Killed
            return state()

        source.collect_part, trainer._update, source.state = collect_part, updated, saved
        there = (tmp_path / "run" / "run.json").exists()
        trainer.train(progress=None, callbacks=[told], resume_from_checkpoint=there or None)
        return trainer

    with pytest.raises(Killed):
        run(dies=True)
    trainer = run(dies=False)
    rows = dict(learned)  # a step that was cut is learned from again, as what it was
    assert sorted(rows) == [1, 2, 3, 4]
    places = [row for step in sorted(rows) for row in rows[step]]
    assert len(set(places)) == len(places) == 16
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["num_tokens"] == trainer.source.num_tokens
    trainer.source.close()


def test_evaluation_and_replies_use_the_present_weights_between_steps():
    trainer = made(staleness=1)
    trainer.step()
    assert trainer.source.engine._version == 0
    trainer.evaluate(ROWS[:2])
    assert trainer.source.engine._version == 1
    report = trainer.step()
    assert set(report.experience.rollouts.version_NT[report.experience.mask_NT].tolist()) <= {0, 1}
    trainer.source.close()


def test_a_greedy_try_is_sampled_by_the_copy_and_the_policy_is_left_alone():
    trainer = made(staleness=1, loss_type="remax")
    followed, follow = [], trainer.source.follow

    def told(version):
        followed.append(threading.current_thread() is threading.main_thread())
        return follow(version)

    trainer.source.follow = told
    trainer.pace.until = 3
    for _ in range(3):
        assert trainer.step().experience.rollouts.baseline_NT is not None
    assert all(followed)
    trainer.source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "transformers", "staleness": 1}, "transformers cannot go ahead"),
        ({"engine": "vllm", "staleness": 1}, "needs servers=http://host:port"),
        ({"engine": "inline", "servers": ("http://a:1",)}, "set engine=vllm"),
        ({"engine": "inline", "staleness": 1, "speculate": 1}, "leave one of them out"),
        ({"engine": "inline", "staleness": 1, "loss_type": "otb"}, "otb.* scores tries with the policy while"),
    ],
)
def test_what_cannot_go_together_is_refused_before_a_model_is_loaded(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


def test_image_text_models_and_functions_that_use_the_trainer_are_not_asked_ahead():
    with pytest.raises(ConfigError, match="whose model learns meanwhile; leave out staleness"):
        player_of(GRPOConfig(staleness=1), None, None, Given(rollout_func=lambda prompts, trainer: {}))
    reads_images = types.SimpleNamespace(image_processor=object())
    with pytest.raises(ConfigError, match="staleness reads text alone so far"):
        pictures_of(GRPOConfig(staleness=1), reads_images, Given())
