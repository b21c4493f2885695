"""Reward functions as TRL's users write them: plain and asynchronous, of text and of chats, models, None, weights."""

import asyncio

import pytest

from grpo.config import ConfigError
from grpo.language import rewards as known
from tests.compat.scripts import CHATS, STANDARD, TEXTS, judge, learns, tokenizer, train, trainer


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def of_chats(completions, **columns):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def local(function):
    """The same function, as one that must run in this process."""

    def inner(*given, **named):
        return function(*given, **named)

    async def later(*given, **named):
        return await function(*given, **named)

    made = later if asyncio.iscoroutinefunction(function) else inner
    made.__name__ = function.__name__
    made.__wrapped__ = function
    return made


async def patient(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(set(completion))) for completion in completions]


def nothing(completions, **columns):
    return [None] * len(completions)


def by_column(completions, some, **columns):
    return [float(len(completion) + number) for completion, number in zip(completions, some, strict=True)]


def one(completions, **columns):
    return [1.0] * len(completions)


def zero(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("rewards", "data"),
    [
        ([length], STANDARD),
        ([of_chats], CHATS),
        ([length, of_chats], CHATS),
        ([length, patient], STANDARD),
        ([length, nothing], STANDARD),
        ([judge()], STANDARD),
        ([judge()], CHATS),
        ([judge(), length], STANDARD),
        ([by_column], STANDARD.add_column("some", list(range(len(TEXTS))))),
    ],
    ids=["text", "chats", "several", "asynchronous", "none", "model", "model_of_chats", "mixed", "column"],
)
def test_rewards_of_every_kind_teach(tmp_path, rewards, data):
    chosen = [local(reward) if not hasattr(reward, "forward") else reward for reward in rewards]
    made = learns(trainer(tmp_path, rewards=chosen, data=data, given={"reward_processing_classes": [
        tokenizer() if hasattr(reward, "forward") else None for reward in chosen]}))  # fmt: skip
    row = made.state.log_history[-1]
    told = [reward for reward in rewards if not hasattr(reward, "forward") and reward is not nothing]
    assert all({f"rewards/{r.__name__}/mean", f"rewards/{r.__name__}/std"} <= row.keys() for r in told)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("sum_then_normalize", [0.7, 0.3]), ("normalize_then_sum", [0.7, 0.3]), (None, [2.0, 0.5])],
)
def test_the_reward_that_is_logged_is_weighted(tmp_path, aggregation, weights):
    how = {"multi_objective_aggregation": aggregation} if aggregation else {}
    made = trainer(tmp_path, rewards=[local(one), local(zero)], reward_weights=weights, **how)
    assert train(made).state.log_history[-1]["reward"] == pytest.approx(weights[0])
    assert made.reward_weights.tolist() == pytest.approx(weights)


def test_several_weighted_rewards_that_are_compared_one_by_one(tmp_path):
    learns(trainer(tmp_path, rewards=[local(length), local(one)], reward_weights=[0.7, 0.3],
                   multi_objective_aggregation="normalize_then_sum"))  # fmt: skip


def test_a_step_that_nobody_judges_is_warned_of_and_teaches_nothing(tmp_path):
    made = trainer(tmp_path, rewards=[local(nothing)])
    with pytest.warns(UserWarning, match="all reward functions returned None for some"):
        made.train(progress=None)
    assert made.state.global_step == 1 and made.state.log_history[0]["loss"] == pytest.approx(0.0)


def test_rows_that_nobody_judges_leave_the_others_alone(tmp_path):
    def some(completions, **columns):
        return [None if number % 3 == 0 else float(number) for number, _ in enumerate(completions)]

    row = train(trainer(tmp_path, rewards=some)).state.log_history[0]
    assert row["reward"] == pytest.approx(1.5) and row["failed"] == 0.0


@pytest.mark.parametrize("wanted", ["trainer_state", "log_extra", "log_metric"])
def test_a_reward_reads_the_state_and_logs_columns_and_metrics(tmp_path, wanted):
    steps = []

    def reading(completions, trainer_state, **columns):
        steps.append(trainer_state.global_step)
        return length(completions)

    def telling(completions, log_extra, **columns):
        log_extra("beginning", [completion[:2] for completion in completions])
        return length(completions)

    def measuring(completions, log_metric, **columns):
        log_metric("custom_accuracy", 0.75)
        return length(completions)

    asks = {"trainer_state": reading, "log_extra": telling, "log_metric": measuring}[wanted]
    made = train(trainer(tmp_path, rewards=asks, log_completions=wanted == "log_extra"))
    assert ({*steps} == {0}) == (wanted == "trainer_state")
    assert made.state.log_history[0].get("custom_accuracy") == (0.75 if wanted == "log_metric" else None)
    if wanted == "log_extra":
        import pyarrow.parquet

        (path,) = (tmp_path / "run" / "completions").glob("*.parquet")
        table = pyarrow.parquet.read_table(path).to_pydict()
        assert path.name == "completions_00001.parquet" and len(table["beginning"]) == 3
        assert {"step", "prompt", "completion", "telling", "advantage"} <= set(table)


@pytest.mark.parametrize("count", [2, 3])
def test_tokenizers_of_reward_models_are_as_many_as_these(tmp_path, count):
    judges = [judge(), judge()]
    how = {"rewards": judges, "given": {"reward_processing_classes": [tokenizer()] * count}}
    if count == 3:
        with pytest.raises(ConfigError, match="3 reward_processing_classes for 2 rewards"):
            trainer(tmp_path, **how)
    else:
        made = trainer(tmp_path, **how)
        assert len(made.reward_processing_classes) == 2 and made.reward_funcs == judges


def test_one_reward_model_with_one_tokenizer(tmp_path):
    made = trainer(tmp_path, rewards=judge(), given={"reward_processing_classes": tokenizer()})
    assert made.reward_processing_classes == [tokenizer()]


def test_without_a_reward_nothing_is_begun(tmp_path):
    with pytest.raises(ConfigError, match="there is no reward: give reward_funcs"):
        trainer(tmp_path, rewards=None)


def chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_rewards_that_scripts_import_from_trl():
    texts = chat(r"My answer is \boxed{\frac{1}{3}}", r"My answer is \boxed{\frac{1}{2}}", "12")
    assert known.accuracy_reward(texts, [r"\frac{1}{3}", r"\frac{1}{3}", ""]) == [1.0, 0.0, None]
    thought = chat(r"<think> so </think> It is \boxed{5}", r"<think> \boxed{5}", "<think>a</think><think>b</think>")
    assert known.reasoning_accuracy_reward(thought, ["5"] * 3) == [1.0, 0.0, 0.0]
    assert known.think_format_reward(thought) == [1.0, 0.0, 0.0]
    scaled = known.get_cosine_scaled_reward(max_len=100)
    ids = [[1] * 50, [1] * 200, []]
    assert scaled(texts, [r"\frac{1}{3}"] * 2 + [""], completion_ids=ids) == [pytest.approx(0.75), -0.5, None]
    assert known.get_repetition_penalty_reward(2)([[1, 2, 3, 4], [5] * 5, [1]]) == [0.0, -0.75, 0.0]
    assert known.get_soft_overlong_punishment(100, 20)([[1] * 90, [1] * 10, [1] * 101]) == [-0.5, 0.0, -1.0]
    assert scaled.__name__ == "cosine_scaled_reward"
