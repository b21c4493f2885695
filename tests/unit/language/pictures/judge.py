"""A reward for models that know nothing; loaded without PyTorch where rewards are computed."""


def letters(completions: list[str]) -> list[float]:
    """How many letters of the first half of the alphabet an answer has."""
    return [float(sum(letter in "abcdefghijklm" for letter in text)) for text in completions]
