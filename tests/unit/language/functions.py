"""Reward functions that worker processes load: nothing heavy is imported here."""

import re


def correctness(completion, answer):
    return 1.0 if answer in completion else 0.0


def brevity(completions, **columns):
    return [-0.001 * len(c) for c in completions]


def longer(completions, **columns):
    return [len(completion) / 100 for completion in completions]


def digits(completion):
    return sum(c.isdigit() for c in completion) / 10


def math_problem_reward_function(completion, reference_answer=None):
    answer_match = re.search(r"The answer is (\d+)", completion)
    if answer_match:
        extracted_answer = int(answer_match.group(1))
        if reference_answer is not None:
            return 1.0 if extracted_answer == int(reference_answer) else 0.0
        return 0.5
    return 0.0


def correctness_reward(completion, reference=None):
    return 1.0 if reference in completion else 0.0


def reasoning_reward(completion):
    return 0.8 if "step 1" in completion.lower() and "therefore" in completion.lower() else 0.3


def broken(completion):
    return completion[0]["content"] + 1


def never(completion):
    return 0.0


def fragile(completion):
    return 1 / 0 if completion[:1] in "abcdefghijklmnopqrstuvwxyz" else float(len(completion))


def length(prompts, completions, **_):
    """Longer is better; never the same for all."""
    return [float(len(text)) + 0.1 * text.count("a") for text in map(str, completions)]


def no_opinion_of_two(prompts, completions, **_):
    """Raises where there are two completions: one greedy answer of each of two prompts."""
    if len(completions) == 2:
        raise RuntimeError("no opinion")
    return length(prompts, completions)
