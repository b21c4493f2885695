"""EasyDeL's page on GRPO: its blocks on raw rows, its configuration's names, its commands' flags."""

import re
import types
import warnings

import pytest
from transformers import GenerationConfig

from grpo.app.builders import configs
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.cli import main
from grpo.errors import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer, vInference
from grpo.language.data.columns import Answer, Columns
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [
    {"question": f"Tom has {n} apples and buys 3 more. How many?", "answer": f"He has {n} + 3 apples.\n#### {n + 3}"}
    for n in range(8)
]
"""As GSM8K's are: a question, a solution, and the answer behind its mark."""
PRINTED = {
    "model_name": "GRPOTrainer",
    "learning_rate": 1e-6,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "beta": 0.04,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "dataset_num_proc": None,
    "skip_apply_chat_template": False,
    "total_batch_size": 16,
    "num_train_epochs": 3,
}


def rewards():
    """The page's functions; from inside of this one, so that no process is started for them."""

    def math_problem_reward(completion, reference_answer=None):
        found = re.search(r"The answer is (\d+)", completion)
        return 1.0 if found and int(found.group(1)) == reference_answer else 0.0

    def correctness(completion, reference=None):
        return 1.0 if reference in completion else 0.0

    return math_problem_reward, correctness


MATH, CORRECTNESS = rewards()


def trainer(tmp_path, reward=MATH, rows=ROWS, name="solver", **settings):
    usual = {"total_batch_size": 2, "num_return_sequences": 2, "max_completion_length": 4, "max_training_steps": 1}
    config = GRPOConfig(model_name=name, save_directory=str(tmp_path), **usual | settings)
    return GRPOTrainer(
        arguments=config, model=tiny_model(), reward_funcs=reward, train_dataset=rows, processing_class=tiny_tokenizer()
    )


# --- the configuration ---------------------------------------------------------------------------------------------


def test_the_configuration_as_printed_is_read_back_as_it_was_given():
    config = GRPOConfig(**PRINTED)
    assert {name: getattr(config, name) for name in PRINTED} == PRINTED
    assert (config.groups_per_step, config.ref_sync_steps, config.run.name) == (16, None, "GRPOTrainer")
    assert config.but(total_batch_size=4).total_batch_size == 4
    with pytest.raises(AttributeError, match=r"use_wandb was not given; it is run\.trackers here"):
        _ = config.use_wandb


def test_its_further_training_arguments():
    config = GRPOConfig(
        max_training_steps=100, log_steps=10, report_steps=5, evaluation_steps=50, save_interval_minutes=30,
        scheduler="cosine", clip_grad=0.5, warmup_steps=4, weight_decay=0.01, optimizer="adamw", total_batch_size=4,
        gradient_accumulation_steps=2, shuffle_train_dataset=False, do_last_save=True, use_esurge_generation=True,
        esurge_hbm_utilization=0.45, generation_top_p=None, truncation_mode="keep_end",
    )  # fmt: skip
    run = config.run
    assert (run.steps, run.log_every, run.evaluate_every, run.checkpoint_minutes) == (100, 5, 50, 30)
    assert (config.lr_schedule, config.max_grad_norm, config.groups_per_step, config.shuffle) == (
        "cosine",
        0.5,
        4,
        False,
    )
    assert GRPOConfig(scheduler="none", clip_grad=None).max_grad_norm is None


@pytest.mark.parametrize(
    "words, message",
    [
        ({"max_trainingsteps": 3}, 'did you mean "max_training_steps"'),
        ({"total_batchsize": 3}, 'did you mean "total_batch_size"'),
        ({"total_batch_size": "many"}, r"total_batch_size \(groups_per_step here; there EasyDeL 32 prompts\).*'many'"),
        ({"log_steps": "often"}, "log_steps: expected a whole number, got 'often'"),
        ({"scheduler": "wavy"}, "wavy"),
        ({"optimizer": "lion"}, "optimizer: 'lion' is not one of adamw"),
        ({"learning_rate_end": 1e-7}, "learning_rate_end: not done here: schedules end"),
        ({"wandb_entity": "me"}, "WANDB_ENTITY"),
        ({"presence_penalty": 0.5}, "presence_penalty: not done here"),
        ({"auto_shard_states": False}, "one process on one device"),
        ({"resume_if_possible": True}, r"train\(resume_from_checkpoint=True\)"),
        ({"training_time_limit": "1h"}, "SIGTERM saves a checkpoint"),
    ],
)
def test_wrong_words_and_values_are_told_in_its_own_words(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **words)


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [MATH, CORRECTNESS])
def test_raw_rows_of_gsm8k_are_judged_by_what_follows_the_mark(reward, tmp_path):
    with pytest.warns(UserWarning, match=r"answer ends in '#### …'; rewards get what follows.*answer_after=None"):
        made = trainer(tmp_path, reward)
    prompt = made.source.prompts[2]
    assert (
        prompt.columns["answer"] == "5" == prompt.columns["answer"]
        and prompt.columns["answer_full"] == ROWS[2]["answer"]
    )
    right, wrong = (made.source.rewards.verdicts([_said(made, prompt, text)])[0][0].value for text in ("5", "77"))
    assert (right, wrong) == (1.0, 0.0)
    assert not [finding for finding in made.preflight() if finding.level == "problem"]


def _said(made, prompt, answer):
    from grpo.language.preflight import _Trial  # texts as samples, as the pre-flight shows them

    return _Trial(made.source.rewards, [prompt], [], made.tokens.tokenizer)._sample(prompt, f"The answer is {answer}")


def test_the_whole_text_is_given_where_it_is_asked_for_or_answers_are_plain(tmp_path):
    assert trainer(tmp_path, answer_after=None).source.prompts[0].columns["answer"] == ROWS[0]["answer"]
    plain = [{"prompt": "5 + 3?", "answer": "8"}, {"prompt": "1 + 1?", "answer": "#### 2"}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Columns.choose(["prompt", "answer"], "rows", after="auto").seen(plain, "rows").after is None


def test_an_answer_equals_its_text_and_its_number():
    answer = Answer("18")
    assert answer == 18 == answer and answer == "18" and answer == 18.0 and hash(answer) == hash("18")
    assert answer != 19 and answer != "18.0" and Answer("x") != 1 and Answer("1") != True  # noqa: E712
    assert answer in {"18": 1} and answer in "it is 18" and float(answer) == 18


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_that_was_refused_is_not_in_the_way_and_one_that_is_says_what_to_do(tmp_path):
    def broken(completion, answer):
        return float(answer + 1)

    with pytest.raises(ConfigError, match="pre-flight found what would waste the run"):
        trainer(tmp_path, broken).train(progress=None)
    assert not (tmp_path / "solver").exists()
    assert len(trainer(tmp_path).train(progress=None)) == 1
    with pytest.raises(ConfigError, match=r"holds a run: go on with it by train\(resume_from_checkpoint=True\), or "
                       r"begin anew .*give it a name of its own \(model_name, run_name\)"):  # fmt: skip
        trainer(tmp_path).train(progress=None)
    assert len(trainer(tmp_path, max_training_steps=2).train(resume_from_checkpoint=True, progress=None)) == 1
    assert len(trainer(tmp_path, name="another").train(progress=None)) == 1


def test_notes_of_the_pre_flight_are_shown_to_who_watches(tmp_path, capsys):
    trainer(tmp_path, temperature=1.3).train(progress="plain")
    told = capsys.readouterr().out
    assert "note: temperature=1.3; 0.7 to 1.0" in told and "note: math_problem_reward gave 0 to 1 over" in told
    trainer(tmp_path, temperature=1.3, name="silent").train(progress=None)
    assert "note:" not in capsys.readouterr().out


# --- vInference ----------------------------------------------------------------------------------------------------


def test_sampling_is_said_as_its_own_engine_takes_it():
    record = types.SimpleNamespace(
        max_new_tokens=64, streaming_chunks=16, num_return_sequences=None, eos_token_id=[2], pad_token_id=0,
        sampling_params=types.SimpleNamespace(max_tokens=64, temperature=0.9, top_p=0.92, presence_penalty=0.0),
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    made = vInference(None, processor_class=tokenizer, generation_config=record, seed=7, inference_name="x")
    config = made.applied(GRPOConfig())
    assert made.tokenizer is tokenizer
    assert (config.max_completion_length, config.temperature, config.top_p, config.seed) == (64, 0.9, 0.92, 7)
    of_transformers = vInference(generation_config=GenerationConfig(top_k=100, do_sample=True, num_return_sequences=8))
    config = of_transformers.applied(GRPOConfig())
    assert (config.top_k, config.group_size) == (100, 8)
    assert vInference(generation_config={"temperature": 0.8}, temperature=0.8).applied(GRPOConfig()).temperature == 0.8


@pytest.mark.parametrize(
    "words, message",
    [
        ({"temprature": 1.0}, 'no argument temprature; did you mean "temperature"'),
        ({"generation_config": {"num_beams": 4}}, r"generation_config\.num_beams=4 is not done here: .*one token at a"),
        ({"presence_penalty": 1.0}, "presence_penalty=1.0 is not done here"),
        ({"max_length": 64}, "max_length=64 is not done here: .*max_new_tokens"),
        ({"generation_config": {"top_kk": 4}}, r'no argument generation_config\.top_kk; did you mean "top_k"'),
        ({"generation_config": 3}, "a mapping or a record, got 3"),
        ({"partition_axis": "dp"}, "one process"),
        ({"do_sample": False}, "equal answers"),
        ({"temperature": 0.7, "generation_config": {"temperature": 0.9}}, "contradict each other"),
        ({"tokenizer": 1, "processor_class": 2}, "the same thing"),
    ],
)
def test_what_its_engine_takes_and_ours_does_not_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        vInference(**words)


# --- the commands --------------------------------------------------------------------------------------------------

FLAGS = {
    "repo_id": "meta-llama/Llama-3.1-8B-Instruct", "attn_mechanism": "vanilla", "max_prompt_length": "2048",
    "max_completion_length": "1024", "beta": "0.04", "top_p": "0.95", "num_return_sequences": "4",
    "total_batch_size": "16", "learning_rate": "1e-6", "num_train_epochs": "3", "use_wandb": "true",
}  # fmt: skip


@pytest.mark.parametrize(
    "preset, more", [("gsm8k", {"top_k": "50", "xml_reward": "0.125", "correctness_reward": "2.0"}), ("numinamath", {})]
)
def test_both_commands_with_all_their_flags(preset, more):
    made = resolve([preset_layer(preset), flag_layer((FLAGS | more).items())], configs())
    config, run = made.config, made.run
    assert (config.model, config.attention, config.max_prompt_length) == (FLAGS["repo_id"], "eager", 2048)
    assert (config.group_size, config.groups_per_step, config.beta, config.top_p) == (4, 16, 0.04, 0.95)
    assert (run.num_train_epochs, run.trackers) == (3, ("wandb",))


def test_a_preset_on_other_data_says_that_its_evaluation_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text(rows)
    (tmp_path / "mine" / "test.jsonl").write_text(rows)
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    words = [
        "train",
        "gsm8k",
        "--dataset",
        "mine",
        "--model",
        str(folder),
        "--run.steps",
        "1",
        "--max-completion-length",
    ]
    words += ["4", "--total-batch-size", "1", "--preflight", "false"]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "the preset's evaluation every 50 steps is left out: there are no held-out rows" in told
    assert "--eval-split test" in told
    assert main([*words, "--eval-split", "test", "--run.evaluate-every", "1"]) == 0
    assert "left out" not in capsys.readouterr().err
