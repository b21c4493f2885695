"""Tools, environments and rollouts as TRL's scripts give them."""

import json
from typing import ClassVar

import pytest
from datasets import Dataset

from grpo.config import ConfigError
from tests.compat.scripts import CHATS, Said, learns, tokenizer, train, trainer
from tests.compat.tools import async_multiply_tool, multiply_tool

TURNS = {"max_completion_length": 512, "overlap_rewards": False}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Counter:
    def reset(self, **row):
        self.count = 0

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Value to add.

        Returns:
            The new value.
        """
        self.count += step
        return self.count


class Scored(Counter):
    def get_reward(self):
        return float(self.count)


class Later(Counter):
    async def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Value to add.

        Returns:
            The new value.
        """
        return Counter.increment(self, step)

    async def get_reward(self):
        return float(self.count)


class Echo:
    seen: ClassVar[list] = []

    def reset(self, **row):
        Echo.seen.append(row)
        return "Echo."

    def shout(self, text: str) -> str:
        """Shout.

        Args:
            text: What to shout.

        Returns:
            The text in capitals.
        """
        return text.upper()


class Word:
    def reset(self, **row):
        return "Guess the word."


def said(made, *turns):
    made.source.engine = Said(*turns)
    return made


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [multiply_tool, async_multiply_tool])
def test_tools_are_called_and_their_failures_counted(tmp_path, tool):
    name = tool.__name__
    made = trainer(tmp_path, data=CHATS, given={"tools": [tool]}, **TURNS)
    said(made, [call(name, a=3, b=4), call(name, a=3, c=4), "I know none"], ["Done!", "Done!"])
    row = learns(made).state.log_history[-1]
    assert row["tools/call_frequency"] == pytest.approx(2 / 3)
    assert row["tools/failure_frequency"] == pytest.approx(1 / 2)
    answered = made.source.engine.asked[1]
    assert "12" in answered[0] and "error" in answered[1]


def test_calls_that_cannot_be_read_are_told_to_the_model(tmp_path):
    made = trainer(tmp_path, data=CHATS, given={"tools": [multiply_tool]}, **TURNS)
    said(made, ['<tool_call>{"arguments": {"a": 3}}</tool_call>', "<toolcall>", "<tool_call>{a: 3}</tool_call>"],
         ["Done!", "Done again!"])  # fmt: skip
    assert learns(made).state.log_history[-1]["tools/failure_frequency"] == 1.0


# --- environments -----------------------------------------------------------------------------------------------------


def test_the_methods_of_an_environment_are_tools(tmp_path):
    made = trainer(tmp_path, data=None, given={"environment_factory": Counter}, max_steps=2, **TURNS)
    said(made, [call("increment", step=1), call("decrement", step=2), "I will not"], ["Done!", "Done!"])
    row = learns(made).state.log_history[-1]
    assert row["tools/call_frequency"] == pytest.approx(2 / 3)
    assert row["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert [environment.count for environment in made.environments] == [1, 0, 0]


@pytest.mark.parametrize("kind", [Scored, Later])
def test_an_environment_may_judge_by_itself(tmp_path, kind):
    made = trainer(tmp_path, data=None, rewards=None, given={"environment_factory": kind}, **TURNS)
    assert made.reward_func_names == [kind.__name__] and made.reward_weights.tolist() == [1.0]
    assert [tool.__name__ for tool in made.tools] == ["increment"]
    said(made, [call("increment", step=1), call("decrement", step=2), "I will not"], ["Done!", "Done!"])
    assert learns(made).state.log_history[-1][f"rewards/{kind.__name__}/mean"] == pytest.approx(1 / 3)


def test_an_environments_reward_stands_beside_functions(tmp_path):
    def form(completions, environments, **columns):
        return [0.5 + environment.count for environment in environments]

    made = trainer(tmp_path, data=None, rewards=form, reward_weights=[0.5], given={"environment_factory": Scored},
                   **TURNS)  # fmt: skip
    assert made.reward_func_names == ["form", "Scored"] and made.reward_weights.tolist() == [0.5, 1.0]
    assert len(made.reward_funcs) == 2
    said(made, [call("increment", step=1), "no", "no!"], ["Done!"])
    row = train(made).state.log_history[0]
    assert row["rewards/form/mean"] == pytest.approx(0.5 + 1 / 3)


def test_several_environments_in_one_run(tmp_path):
    Echo.seen = []
    rows = Dataset.from_dict({"environment": ["counter", "echo"] * 2, "level": [1, 2, 3, 4]})
    made = trainer(
        tmp_path, data=rows, given={"environment_factory": {"counter": Scored, "again": Scored, "echo": Echo}},
        per_device_train_batch_size=4, num_generations=2, shuffle_dataset=False, **TURNS,
    )  # fmt: skip
    assert made.reward_func_names == ["spread", "Scored"]
    said(made, [call("increment", step=1), "I will not", call("shout", text="hi"), "Done!"], ["Done!", "Done!"])
    row = learns(made).state.log_history[-1]
    assert row["tools/call_frequency"] == pytest.approx(2 / 4) and row["tools/failure_frequency"] == 0.0
    first, answered = made.source.engine.asked[:2]
    assert "increment" in first[0] and "shout" not in first[0] and "Echo." in first[2] and "shout" in first[2]
    assert "HI" in answered[1]
    assert Echo.seen and all(set(seen) == {"level"} for seen in Echo.seen)
    assert row["rewards/Scored/mean"] == pytest.approx(0.5)  # of those conversations alone


def test_an_environments_reward_has_no_opinion_of_others(tmp_path):
    rows = Dataset.from_dict({"environment": ["scored", "plain"]})
    made = trainer(tmp_path, data=rows, given={"environment_factory": {"scored": Scored, "plain": Counter}}, **TURNS)
    scored, plain = Scored(), Counter()
    scored.reset()
    plain.reset()
    assert made.reward_funcs[-1](environments=[scored, plain]) == [0.0, None]


def test_an_environment_may_own_the_data(tmp_path):
    made = trainer(tmp_path, data=None, given={"environment_factory": Word}, **TURNS)
    said(made, ["Done!", "DoneDone!", "DoneDoneDone!"])
    learns(made)
    assert all("Guess the word." in prompt for prompt in made.source.engine.asked[0])


@pytest.mark.parametrize(
    ("given", "data", "more", "message"),
    [
        ({"counter": Counter}, Dataset.from_dict({"prompt": ["a"], "environment": ["unknown"]}), {},
         "row 0: environment='unknown' is not among the environments of environment_factory: counter"),
        (Word, None, {"max_steps": -1}, "needs max_steps"),
        ({"a": Counter, "b": Echo}, None, {}, "several environments need train_dataset, with a column 'environment'"),
        (None, None, {}, "there are no prompts: give train_dataset"),
        (object, None, {}, "has no method reset"),
        ({}, None, {}, "environment_factory is empty"),
        (Counter(), None, {}, "environment_factory is an object of Counter; give the class"),
        ({"a": Counter()}, Dataset.from_dict({"prompt": ["a"], "environment": ["a"]}), {}, r"factory\['a'\] is an obj"),
    ],
    ids=["unknown", "endless", "no_rows", "nothing", "no_reset", "empty", "instance", "one_instance"],
)  # fmt: skip
def test_what_an_environment_lacks_is_named(tmp_path, given, data, more, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, data=data, given={"environment_factory": given}, **TURNS | more)


# --- rollouts of the user's own ---------------------------------------------------------------------------------------


def test_a_rollout_function_makes_the_completions(tmp_path):
    asked = []

    def rollout(prompts, trainer):
        asked.append((len(prompts), trainer))
        ids = [tokenizer()(f"say {number}", add_special_tokens=False)["input_ids"] for number in range(len(prompts))]
        masks = [[0] + [1] * (len(i) - 1) for i in ids]
        return {"prompt_ids": [[5, 6]] * len(ids), "completion_ids": ids, "logprobs": [[-1.0] * len(i) for i in ids],
                "env_mask": masks, "worth": [float(n) for n in range(len(ids))]}  # fmt: skip

    def worth_of(completions, worth, **columns):
        return worth

    made = trainer(tmp_path, rewards=worth_of, given={"rollout_func": rollout})
    row = learns(made).state.log_history[0]
    assert asked == [(3, made)] and row["reward"] == 1.0
    assert row["completions/mean_length"] == 4.0, "what others said does not count"


def test_weights_reach_the_engine_before_a_rollout_function_uses_it(tmp_path):
    events = []

    def rollout(prompts, trainer):
        events.append("rollout")
        return {"prompt_ids": [[5]] * 3, "completion_ids": [[9, n] for n in (10, 11, 12)], "logprobs": [[0.0, 0.0]] * 3}

    made = trainer(tmp_path, given={"rollout_func": rollout}, max_steps=2)
    made.source.engine.refresh = lambda version=0: events.append("weights")
    train(made)
    assert events == ["weights", "rollout", "weights", "rollout"]


def test_a_rollout_that_lacks_something_names_it(tmp_path):
    made = trainer(tmp_path, given={"rollout_func": lambda prompts, trainer: {"prompt_ids": [], "completion_ids": []}})
    with pytest.raises(ValueError, match="rollout_func must return keys logprobs"):
        train(made)
