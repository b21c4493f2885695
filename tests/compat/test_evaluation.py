"""Held-out rows in every form that TRL takes, streams, and when evaluations come."""

import pytest
from datasets import DatasetDict, IterableDatasetDict

from grpo.config import ConfigError
from tests.compat.scripts import STANDARD, learns, spread, train, trainer
from tests.unit.language import functions

FORMS = ["dataset", "iterable_dataset", "dataset_dict", "iterable_dataset_dict", "dict_of_dataset",
         "dict_of_iterable_dataset"]  # fmt: skip


def held_out(form):
    rows = STANDARD.select(range(2))
    rows = rows.to_iterable_dataset() if "iterable" in form else rows
    if form in ("dataset", "iterable_dataset"):
        return rows
    kind = dict if form.startswith("dict_of") else IterableDatasetDict if "iterable" in form else DatasetDict
    return kind({"data1": rows, "data2": rows})


@pytest.mark.parametrize("form", [*FORMS, "none"])
def test_held_out_rows_may_be_given_in_every_form(tmp_path, form):
    rows = None if form == "none" else held_out(form)
    made = trainer(tmp_path, given={"eval_dataset": rows})
    assert made.eval_dataset is rows


def test_evaluations_come_every_share_of_the_run_after_a_delay(tmp_path):
    how = {"save_strategy": "no", "save_steps": 5}  # as TRL, the second is not read
    how |= {"eval_strategy": "steps", "eval_steps": 0.3, "eval_delay": 3, "logging_steps": 0.5, "max_steps": 4}
    made = train(trainer(tmp_path, given={"eval_dataset": held_out("dataset")}, **how))
    rows = made.state.log_history
    assert [row["step"] for row in rows if "eval_reward" in row] == [4]  # every second step, from the third on
    assert [row["step"] for row in rows if "loss" in row and "train_loss" not in row] == [2, 4]
    assert (made.args.eval_steps, made.state.eval_steps, made.state.logging_steps) == (0.3, 2, 2)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_are_evaluated_on_without_having_been_given_before(tmp_path, form):
    made = trainer(tmp_path, num_generations_eval=2)
    found = made.evaluate(eval_dataset=held_out(form))
    names = ["eval"] if form in ("dataset", "iterable_dataset") else ["eval_data1", "eval_data2"]
    assert all({f"{n}_loss", f"{n}_reward", f"{n}_rewards/spread/mean"} <= found.keys() for n in names)
    assert all(isinstance(value, float) for value in found.values())
    assert made.state.log_history[-1].keys() >= found.keys()


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4]),
        ({"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1}, [2, 4]),
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "loss_type": "grpo"}, [2, 4]),
        ({"eval_strategy": "steps", "logging_steps": 2}, [2, 4]),
        ({"eval_strategy": "epoch", "per_device_train_batch_size": 9}, [2, 4]),
        ({"eval_strategy": "no"}, []),
    ],
    ids=str,
)
def test_evaluations_come_when_they_are_asked_for(tmp_path, more, steps):
    how = {"per_device_eval_batch_size": 3, "num_generations_eval": 2, "max_steps": 4} | more
    made = train(trainer(tmp_path, given={"eval_dataset": held_out("dataset")}, **how))
    rows = [row for row in made.state.log_history if "eval_reward" in row]
    assert [row["step"] for row in rows] == steps


@pytest.mark.parametrize("kind", ["dataset", "dict_of_dataset"])
def test_a_run_that_goes_on_has_the_evaluations_of_before_in_its_log(tmp_path, kind):
    how = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    how |= {"num_generations_eval": 2, "per_device_eval_batch_size": 3}

    def made(folder, steps):
        given = {"eval_dataset": held_out(kind)}
        return trainer(tmp_path / folder, rewards=[spread, functions.longer], given=given, max_steps=steps, **how,
                       reward_weights=[2.0, 0.5])  # fmt: skip

    whole = train(made("whole", 3)).state.log_history
    train(made("cut", 2))
    found = train(made("cut", 3), resume_from_checkpoint=True).state.log_history
    told = "eval_reward" if kind == "dataset" else "eval_data1_reward"
    assert [(row["step"], told in row) for row in found] == [(row["step"], told in row) for row in whole]
    for one, other in zip(whole, found, strict=True):
        if told in one:
            assert other.keys() <= one.keys() and {told, "step", "epoch"} <= other.keys()
            for name in other:
                if "runtime" not in name and "per_second" not in name:
                    assert other[name] == pytest.approx(one[name], rel=1e-6), name


def test_several_sets_are_told_apart_in_log_and_metrics(tmp_path):
    made = trainer(tmp_path, given={"eval_dataset": held_out("dict_of_dataset")}, eval_steps=1)
    reports = made.train(progress=None)
    assert {"eval/data1/rewards/spread", "eval/data2/rewards/spread"} <= set(reports[0])
    row = next(row for row in made.state.log_history if "eval_data1_reward" in row)
    assert "eval_data2_completions/mean_length" in row


def test_a_stream_is_trained_on_for_so_many_steps(tmp_path):
    data = STANDARD.to_iterable_dataset()
    learns(trainer(tmp_path, data=data, max_steps=2))
    with pytest.raises(ConfigError, match=r"say how long to train with max_steps"):
        train(trainer(tmp_path / "endless", data=data, max_steps=-1))


@pytest.mark.parametrize("workers", [0, 4])
def test_loaders_of_streams_and_of_rows_need_no_settings(tmp_path, workers):
    made = trainer(
        tmp_path, data=STANDARD.to_iterable_dataset(), dataloader_num_workers=workers,
        accelerator_config={"dispatch_batches": workers == 4}, given={"eval_dataset": held_out("iterable_dataset")},
    )  # fmt: skip
    train(made)
    assert made.args.dataloader_num_workers == workers and made.args.not_needed


def test_predictions_are_completions_with_what_the_rewards_say(tmp_path):
    found = trainer(tmp_path, num_generations_eval=2).predict(held_out("dataset"))
    assert len(found.predictions) == 4 and all(isinstance(text, str) for text in found.predictions)
    assert found.metrics["test_reward"] > 0
