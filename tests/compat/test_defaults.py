"""The door with TRL's own defaults: what nobody says is as it is there, and updates are counted as there."""

import pytest

from grpo.language.compat.arguments import defaults
from grpo.language.trl import THEIRS, GRPOConfig, GRPOTrainer
from tests.compat.scripts import CHATS, STANDARD, model, spread, tokenizer, train


def test_what_nobody_says_is_trls():
    config = GRPOConfig()
    known = {name: value for name, (value, _) in THEIRS.items() if name in defaults() and name != "output_dir"}
    assert known == {name: defaults()[name] for name in known} and len(known) >= 8
    assert {name: getattr(config, name) for name in known} == known
    assert (config.output_dir, config.num_generations_eval, config.groups_per_step) == ("trainer_output", 8, 1)
    assert GRPOConfig(beta=0.1).kl_importance and not GRPOConfig(beta=0.1, use_bias_correction_kl=False).kl_importance


def test_other_words_for_the_same_thing_are_heard():
    config = GRPOConfig("x", max_new_tokens=9, prompts_per_step=3, save_strategy="no", eval_samples=1)
    assert (config.max_completion_length, config.groups_per_step, config.eval_samples) == (9, 3, 1)
    assert (config.run.checkpoint_every, config.run.logdir, config.but(seed=3).groups_per_step) == (None, "x", 3)


def test_updates_are_counted_as_there():
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    config = GRPOConfig(**batches, num_iterations=2, max_steps=100, warmup_steps=10, eval_strategy="steps")
    run = config.run
    assert (run.steps, config.warmup_steps, run.evaluate_every, run.log_every, run.checkpoint_every) == (
        25,
        3,
        3,
        3,
        125,
    )
    config.num_iterations = 1
    assert (config.run.steps, config.warmup_steps) == (50, 5)


@pytest.mark.parametrize(("rows", "bare"), [(STANDARD, True), (CHATS, False), (list(STANDARD), True)])
def test_bare_text_gets_no_chat_template(tmp_path, rows, bare):
    args = GRPOConfig(str(tmp_path / "run"), max_steps=1, max_completion_length=4, use_cpu=True, preflight=False,
                      num_generations=2, per_device_train_batch_size=2)  # fmt: skip
    made = GRPOTrainer(model(), spread, args, rows, processing_class=tokenizer())
    assert made.config.skip_apply_chat_template == bare and isinstance(made.config, GRPOConfig)
    if rows is STANDARD:
        assert train(made).state.global_step == 1
