"""What is a secret, and what only sounds like one."""

import pytest

from grpo.run.redaction import Redactor, names_a_secret


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "hf_token",
        "token",
        "password",
        "--judge.api-key",
        "AWS_SECRET_ACCESS_KEY",
        "auth",
        "wandbToken",
    ],
)
def test_names_of_secrets(name):
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "pad_token", "eos_token", "token_mean", "author", "key", "keep_last", "tokens_per_step", ""]
)
def test_names_that_only_sound_like_it(name):
    assert not names_a_secret(name)


def test_values_are_taken_out_wherever_they_are():
    redactor = Redactor(
        {"judge": [{"password": "tulip-field"}]}, ["x", "--token", "rose-garden"], {"MY_API_KEY": "daisychain"}
    )
    text = "tulip-field rose-garden daisychain fine"
    assert redactor.text(text) == "[redacted] [redacted] [redacted] fine"
    assert redactor.tree({"a": ["x daisychain"], "tulip-field": 1}) == {"a": ["x [redacted]"], "[redacted]": 1}


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop1234",
        "hf_ABCDEFGHIJKLMNOPQRST",
        "ghp_ABCDEFGHIJKLMNOPQRST",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_values_that_look_like_secrets(secret):
    assert Redactor().text(f"a {secret} b") == "a [redacted] b"


def test_urls_and_bearers_keep_the_rest():
    assert Redactor().text("https://me:hunter22@host/x") == "https://[redacted]@host/x"
    assert Redactor().text("Authorization: Bearer abcdefgh123") == "Authorization: Bearer [redacted]"


def test_ordinary_settings_are_left_alone():
    config = {"learning_rate": 1e-3, "token_budget": 5, "model": "org/sk-model", "use_auth": True, "password": None}
    assert Redactor(config).tree(config) == config


def test_short_secrets_do_not_blank_every_word():
    redactor = Redactor({"password": "a"})
    assert redactor.tree({"password": "a", "note": "a man"}) == {"password": "[redacted]", "note": "a man"}


def test_command_lines():
    argv = ["grpo", "--api-key", "abcdefg", "--token=hijklmn=", "--set", "judge.secret=opqrstu", "--steps", "5"]
    cleaned = Redactor(argv=argv).argv(argv)
    assert cleaned == [
        "grpo",
        "--api-key",
        "[redacted]",
        "--token=[redacted]",
        "--set",
        "judge.secret=[redacted]",
        "--steps",
        "5",
    ]
