"""The trainer as an object: what scripts read of it, its log, its callbacks and the files they ask for."""

import json
import logging
import types
from pathlib import Path

import pytest
import torch
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

from grpo.config import ConfigError
from grpo.language.compat import arguments
from grpo.language.compat.history import earlier_rows
from grpo.run import hub
from grpo.run.folder import RunFolder
from tests.compat.scripts import STANDARD, settings, spread, tokenizer, train, trainer

TRLS = {
    "loss", "grad_norm", "learning_rate", "num_tokens", "completions/mean_length", "completions/min_length",
    "completions/max_length", "completions/clipped_ratio", "completions/mean_terminated_length",
    "completions/min_terminated_length", "completions/max_terminated_length", "rewards/spread/mean",
    "rewards/spread/std", "reward", "reward_std", "frac_reward_zero_std", "entropy", "clip_ratio/low_mean",
    "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max", "step_time", "epoch",
    "step",
}  # fmt: skip
"""What TRL 1.16 logs of a step."""
LAST = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss"}


def test_what_scripts_read_of_a_trainer(tmp_path):
    made = trainer(tmp_path, beta=0.1)
    assert made.args.num_generations == 3 and made.args.output_dir == str(tmp_path / "run")
    assert made.train_dataset is STANDARD and made.eval_dataset is None
    assert made.processing_class is tokenizer() and made.reward_funcs == [spread]
    assert made.reward_func_names == ["spread"] and made.reward_processing_classes == [None]
    assert isinstance(made.ref_model, torch.nn.Module) and made.ref_model is not made.model
    assert made.is_world_process_zero() and made.tools == [] and made.environments is None
    assert made.state.global_step == 0 and "policy" in str(sorted(made.state().arrays))


def test_the_log_has_trls_keys_and_floats(tmp_path):
    made = trainer(tmp_path, max_steps=2, report_entropy=True)
    result = made.train(progress=None)
    first, second, last = made.state.log_history
    assert first.keys() >= TRLS and last.keys() >= LAST and (first["step"], second["step"]) == (1, 2)
    assert all(isinstance(value, int | float) for row in made.state.log_history for value in row.values())
    assert (result.global_step, result.training_loss) == (2, last["train_loss"]) and len(result) == 2
    assert last["train_loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert result.metrics["train_loss"] == last["train_loss"]


def test_several_steps_are_logged_as_their_mean(tmp_path):
    every = train(trainer(tmp_path / "every", max_steps=4)).state.log_history
    made = train(trainer(tmp_path / "some", max_steps=4, logging_steps=2)).state.log_history
    assert [row["step"] for row in made] == [2, 4, 4]
    assert made[0]["reward"] == pytest.approx((every[0]["reward"] + every[1]["reward"]) / 2)
    assert made[1]["num_tokens"] == every[3]["num_tokens"]


class Watch(TrainerCallback):
    """Remembers its events, and wishes for things."""

    def __init__(self, **wishes):
        self.events, self.wishes, self.seen = [], wishes, []

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append("on_step_end")
        assert args.num_generations == 3 and state.global_step >= 1 and "model" in kwargs
        for flag, step in self.wishes.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control


def _event(name):
    def heard(self, args, state, control, **kwargs):
        self.events.append(name)
        self.seen.append((name, kwargs.get("logs") or kwargs.get("metrics")))

    return heard


HEARD = ("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_log",
         "on_evaluate", "on_save", "on_predict")  # fmt: skip
for _name in HEARD:
    setattr(Watch, _name, _event(_name))


def test_callbacks_hear_of_everything_in_its_order(tmp_path):
    watch = Watch()
    train(trainer(tmp_path, given={"callbacks": [watch], "eval_dataset": STANDARD.select([0])}, eval_steps=1))
    assert watch.events[:5] == ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end"]
    assert watch.events[5:8] == ["on_log", "on_log", "on_evaluate"] and watch.events[-1] == "on_train_end"
    assert dict(watch.seen)["on_evaluate"]["eval_reward"] is not None


@pytest.mark.parametrize(
    ("wish", "steps", "found"),
    [
        ("should_training_stop", 1, lambda made, watch: made.state.global_step == 1),
        ("should_save", 3, lambda made, watch: "on_save" in watch.events),
        ("should_evaluate", 3, lambda made, watch: any("eval_reward" in row for row in made.state.log_history)),
        ("should_log", 3, lambda made, watch: made.state.log_history[0]["step"] == 1),
    ],
)
def test_what_a_callback_wishes_is_done(tmp_path, wish, steps, found):
    watch = Watch(**{wish: 1})
    made = trainer(tmp_path, max_steps=3, logging_steps=10, given={"eval_dataset": STANDARD.select([0])})
    made.add_callback(watch)
    train(made)
    assert made.state.global_step == steps and found(made, watch)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert ("step-00000001" in kept) == (wish in ("should_save", "should_training_stop"))


def test_an_epoch_cannot_be_cut_short(tmp_path):
    made = trainer(tmp_path, given={"callbacks": [Watch(should_epoch_stop=1)]})
    with pytest.raises(ConfigError, match="set should_training_stop"):
        train(made)


def test_callbacks_come_and_go(tmp_path):
    made, watch = trainer(tmp_path), Watch()
    made.add_callback(watch)
    assert made.pop_callback(Watch) is watch and made.pop_callback(watch) is None
    made.add_callback(Watch)
    made.remove_callback(Watch)
    train(made)
    assert not watch.events


def test_a_script_logs_numbers_of_its_own(tmp_path):
    class Logs(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            made.log({"mine": 3.0 + state.global_step})

    made = trainer(tmp_path, max_steps=2, given={"callbacks": [Logs]})
    reports = made.train(progress=None)
    assert [report["mine"] for report in reports] == [3.0, 4.0]
    assert {"mine": 3.0, "step": 0}.items() <= made.state.log_history[0].items()


def test_the_files_that_scripts_ask_for(tmp_path, capsys, monkeypatch):
    made = trainer(tmp_path)
    result = train(made) and made.state.log_history[-1]
    made.save_state()
    made.log_metrics("train", result)
    made.save_metrics("train", result)
    made.create_model_card(model_name="mine", dataset_name="zen", tags=["toy"])
    place = tmp_path / "run"
    assert json.loads((place / "trainer_state.json").read_text())["log_history"] == made.state.log_history
    assert json.loads((place / "train_results.json").read_text()).keys() == result.keys()
    assert json.loads((place / "all_results.json").read_text()).keys() == result.keys()
    assert "train metrics" in capsys.readouterr().out
    card = (place / "README.md").read_text()
    assert "# mine trained with GRPO" in card and "- toy" in card and "| data | zen |" in card
    uploads = []
    monkeypatch.setattr(hub, "push", lambda path, repo, private, **how: uploads.append((path.name, how)) or repo)
    made.push_to_hub("End of training", dataset_name="zen")
    made.save_model(str(tmp_path / "else"))
    assert uploads == [("model", {"message": "End of training"})] and (tmp_path / "else" / "config.json").exists()


def test_completions_are_printed_as_a_table(tmp_path, capsys):
    made = trainer(tmp_path, log_completions=True, num_completions_to_print=1)
    made.train(progress="plain")
    told = capsys.readouterr().out
    assert "advantage" in told and "completion" in told and "spread" in told


def test_a_run_is_resumed_as_scripts_do_it(tmp_path):
    how = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = train(trainer(tmp_path / "whole", max_steps=3, **how))
    train(trainer(tmp_path / "cut", max_steps=2, **how))
    place = tmp_path / "cut" / "run"
    assert get_last_checkpoint(place) == str(place / "checkpoint-2")
    names = dict(whole.model.named_parameters())
    for resumed in (True, get_last_checkpoint(place), place / "checkpoints" / "step-00000001", str(place)):
        again = train(trainer(tmp_path / "cut", max_steps=3, **how), resume_from_checkpoint=resumed)
        assert again.steps_done == 3 and json.loads((place / "checkpoint-3" / "trainer_state.json").read_text())
        assert all(torch.equal(p, names[name]) for name, p in again.model.named_parameters())
    told = [event["message"] for event in RunFolder.open(place).events() if event["event"] == "resumed"]
    assert told == ["from step-00000002", "from step-00000002", "from step-00000001", "from step-00000003"]


def test_checkpoints_that_are_gone_leave_no_folder_but_what_callbacks_keep_there(tmp_path):
    made = trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1)
    kept = tmp_path / "run" / "checkpoint-1" / "adapter.bin"

    class Keeps(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 1:
                (Path(args.output_dir) / "checkpoint-1" / "adapter.bin").touch()

    made.add_callback(Keeps)
    train(made)
    found = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    there = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert found == {"checkpoint-1", *(f"checkpoint-{step}" for step in there)} and kept.exists()
    with pytest.raises(ConfigError, match=r"train\(resume_from_checkpoint=True\)"):  # the same trainer, a second time
        train(made)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    how = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True,
           "metric_for_best_model": "eval_completions/mean_length", "greater_is_better": False}  # fmt: skip
    made = train(trainer(tmp_path, max_steps=3, given={"eval_dataset": STANDARD.select([0])}, **how))
    lengths = [row["eval_completions/mean_length"] for row in made.state.log_history if "eval_reward" in row]
    assert lengths.index(min(lengths)) == 0 and made.state.best_global_step == 1
    assert (made.steps_done, made.state.global_step) == (1, 3)
    assert made.state.best_model_checkpoint.endswith("checkpoint-1")
    with pytest.raises(ConfigError, match="save_strategy=best needs metric_for_best_model"):
        settings(tmp_path, save_strategy="best")


def test_a_run_that_goes_on_between_two_rows_has_those_of_one_that_never_stopped():
    steps = [{"step": step, "loss": float(step), "num_tokens": 10.0 * step} for step in range(1, 6)]
    rows, waiting = earlier_rows(steps, every=2, most=9)
    assert rows == [{"step": 2, "loss": 1.5, "num_tokens": 20.0}, {"step": 4, "loss": 3.5, "num_tokens": 40.0}]
    assert waiting == [{"loss": 5.0, "num_tokens": 50.0}]
    assert earlier_rows(steps, every=2, most=1)[0] == rows[1:]
    assert earlier_rows(steps[:4], every=2, most=9) == (rows, [])


def test_a_reward_that_judged_nothing_keeps_its_place_and_its_weight():
    told = {"step": 1, "eval/rewards/a": None, "eval/rewards/b": 1.0}
    whole = {"step": 2, "eval/rewards/a": 2.0, "eval/rewards/b": 1.0}
    rows, _ = earlier_rows([told, whole], every=9, most=9, weights=[0.1, 10.0])
    assert rows == [
        {"step": 1, "eval_rewards/b/mean": 1.0},
        {"step": 2, "eval_rewards/a/mean": 2.0, "eval_rewards/b/mean": 1.0, "eval_reward": 10.2},
    ]


def test_every_word_of_trls_answers_whether_or_not_it_was_given(tmp_path, monkeypatch):
    args = trainer(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=3, bf16=False).args
    assert {name: getattr(args, name) for name in arguments.defaults()} == args.to_dict()
    assert (args.max_steps, args.eval_strategy, args.save_strategy, args.logging_strategy) == (1, "no", "no", "steps")
    assert (args.train_batch_size, args.generation_batch_size, args.steps_per_generation) == (3, 6, 2)
    assert (args.bf16, args.lr_scheduler_type, args.load_best_model_at_end) == (False, "constant", False)
    assert (args.world_size, args.process_index, args.local_rank, args.n_gpu) == (1, 0, -1, 0)
    assert args.should_log and args.should_save and args.device == torch.device("cpu")
    assert json.loads(args.to_json_string())["num_generations"] == 3
    assert (args.but(warmup_steps=0.25).get_warmup_steps(8), args.get_process_log_level()) == (2, logging.WARNING)
    assert {type(value) for value in args.to_sanitized_dict().values()} <= {str, int, float, bool}
    with pytest.raises(AttributeError):
        args.no_such_field  # noqa: B018


def test_settings_are_assigned_until_a_trainer_uses_them(tmp_path):
    args = settings(tmp_path, per_device_train_batch_size=24, eval_strategy="epoch")
    args.num_generations, args.learning_rate, args.eval_strategy = 4, 1e-5, "no"
    assert (args.group_size, args.groups_per_step, args.learning_rate, args.by_epoch) == (4, 6, 1e-5, ())
    changed = args.but(seed=3)
    changed.max_steps = 7
    assert (changed.seed, changed.run.steps, args.run.steps) == (3, 7, 1)
    for wrong, match in (({"learning_rat": 1}, "learning_rate"), ({"learning_rate": -1}, "greater than 0")):
        with pytest.raises(ConfigError, match=match):
            setattr(args, *next(iter(wrong.items())))
    made = trainer(tmp_path)
    with pytest.raises(ConfigError, match=r"args\.but"):
        made.args.learning_rate = 1.0


def test_transformers_own_callbacks_work(tmp_path, capsys):
    seen = []
    early = EarlyStoppingCallback(early_stopping_patience=1)
    board = TensorBoardCallback(types.SimpleNamespace(
        add_text=lambda tag, text: seen.append(tag), add_scalar=lambda tag, *_: seen.append(tag),
        flush=lambda: None, close=lambda: None))  # fmt: skip
    others = [board, DefaultFlowCallback, PrinterCallback, ProgressCallback, early]
    given = {"callbacks": others, "eval_dataset": STANDARD.select([0])}
    how = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_frac_reward_zero_std"}
    made = train(trainer(tmp_path, given=given, max_steps=5, logging_steps=1, **how))
    assert made.state.global_step == 2 and made.state.best_global_step == 1  # it is always 1
    assert {"args", "model_config", "train/loss", "eval/reward"} <= {*seen} and "'loss'" in capsys.readouterr().out
    assert made.control.should_training_stop and not made.is_in_train
    assert [type(one).__name__ for one in made.callback_handler.callbacks][-1] == "EarlyStoppingCallback"
    assert made.lr_scheduler.get_last_lr() == [0.1] and made.lr_scheduler.last_epoch == 2
    assert (made.num_generations, made.beta, made.temperature, made.max_completion_length) == (3, 0.0, 1.0, 8)
