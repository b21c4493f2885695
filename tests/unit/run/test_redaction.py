"""What is a secret, and what only sounds like one."""

import json

import pytest

from grpo.config import GRPOConfig
from grpo.control import ControlConfig
from grpo.language import LanguageConfig
from grpo.recipes import column_types
from grpo.run.config import RunConfig
from grpo.run.redaction import Redactor, hidden_in, names_a_secret, same_but_hidden
from grpo.worldmodel import WorldModelConfig


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


# --- a table of each: what must be hidden, what must not --------------------------------------------------------------

VARIABLES = """
    OPENAI_API_KEY OPENAI_KEY ANTHROPIC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACEHUB_API_TOKEN WANDB_API_KEY
    GITHUB_TOKEN GITHUB_PAT GH_PAT AZURE_DEVOPS_EXT_PAT AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID
    AZURE_STORAGE_KEY AZURE_CLIENT_SECRET PGPASSWORD MYSQL_PWD MYSQL_ROOT_PASSWORD DB_PASS DB_PW DATABASE_PASSWORD
    REDIS_PASSWORD SSHPASS SMTP_PASS FTP_PASSWD JWT_SECRET JWT SECRET_KEY_BASE DJANGO_SECRET_KEY STRIPE_SECRET
    SLACK_TOKEN MISTRAL_KEY DEEPL_AUTH_KEY SESSION_COOKIE VAULT_SECRET_ID NPM_TOKEN NPM_AUTHTOKEN KAGGLE_KEY ACCESSKEY
    ENCRYPTION_KEY GPG_PASSPHRASE API_KEYS REFRESH_TOKENS PROXY_AUTH MY_CREDENTIALS SIGNING_KEY accessToken clientSecret
    PASSWORD2 SECRET1 API_KEY2 OPENAI_KEY2 GITHUB_TOKEN_2 GITHUB_TOKEN_PROD HF_TOKEN_READ DB_PASS_PROD STRIPE_KEY_LIVE
    TOKEN_HF ADMIN_PASSWORD_MODE HF_TOKEN_V2 apiKey2 SOME_COMPANY_KEY ACME_TOKEN_DEV
"""
PLACES = """
    PATH PWD OLDPWD HOME USER SHELL LANG TERM PYTHONPATH VIRTUAL_ENV TMPDIR EDITOR HOSTNAME KEYBOARD XDG_SESSION_TYPE
    COLORTERM COMPASS DISPLAY SSH_AUTH_SOCK SSH_CONNECTION HF_HOME HF_TOKEN_PATH TOKENIZERS_PARALLELISM GPG_AGENT_INFO
    PGPASSFILE GOOGLE_APPLICATION_CREDENTIALS_FILE XAUTHORITY GIT_AUTHOR_NAME LESSKEYIN_SYSTEM
"""
WORDS = """
    eos_token pad_token max_tokens tokens_per_step token_mean token_level new_tokens key keys keyboard author authors
    pass_at_k forward_pass compass keep_last sort_key group_key obs_key observation_key query_key primary_key prompt_key
    password_length token_type tokenizer monkey turkey secretary passenger spat path auth_mode auth_type top_k bypass
    use_cache stop_token image_token credentials_path num_tokens hub_model_id keys_seen task.key task.loss_type
    num_keys success_key solution_key mlp_keys cnn_keys camera_key door_key separator_token n_pass pass_1 key_2
"""
SECRET = "tr0ub4dor-and-3"


@pytest.mark.parametrize("name", VARIABLES.split())
def test_variables_that_hold_secrets(name):
    redactor = Redactor(environ={name: SECRET})
    assert redactor.text(f"401 for {SECRET}!") == "401 for [redacted]!"
    assert redactor.tree({name.lower(): SECRET, "x": [SECRET]}) == {name.lower(): "[redacted]", "x": ["[redacted]"]}


@pytest.mark.parametrize("name", PLACES.split())
def test_variables_that_hold_none(name, tmp_path):
    value = f"{tmp_path}/project"
    assert Redactor(environ={name: value}).text(f"{value}/walk.py") == f"{value}/walk.py"
    assert Redactor(environ={name: "anything-else-1"}).text("anything-else-1") == "anything-else-1"


@pytest.mark.parametrize("name", WORDS.split())
def test_settings_that_only_sound_like_secrets(name):
    assert not names_a_secret(name)
    config = {name: "some-long-value", "nested": {name: [3, "some-long-value"]}}
    assert Redactor(config).tree(config) == config


@pytest.mark.parametrize(
    "tree",
    [
        {"api_key": SECRET},
        {"judge": {"apiKey": SECRET}},
        {"api_keys": [SECRET, "x"]},
        {"api_keys": {"first": SECRET, "second": {"deep": [SECRET]}}},
        {"passwords": (SECRET,)},
        {"auth": {"user": "me", "password": SECRET}},
        {"auth": ["me", SECRET]},
        {"headers": {"Authorization": SECRET}},
        {"headers": ["Authorization: Bearer " + SECRET]},
        {"header": f"Authorization: Basic {'dHIwdWI0ZG9yLWFuZC0z'}"},
        {"cookies": {"session": SECRET}},
        {"url": f"https://host/v1?api_key={SECRET}"},
        {"url": f"https://host/v1?q=1&key={SECRET}&page=2"},
        {"url": f"https://host/v1?access_token={SECRET}#top"},
        {"url": f"https://host/blob?sv=1&sig={SECRET}"},
        {"url": f"https://host/x?X-Amz-Signature={SECRET}"},
        {"url": f"https://host/#access_token={SECRET}"},
        {"url": f"redis://:{SECRET}@host:6379/0"},
        {"url": f"postgres://me:{SECRET}@host/db"},
        {"url": f"postgres://me:{SECRET}@more@host/db"},
        {"url": f"https://{SECRET}@github.com/me/x.git"},
        {"dsn": f"Server=host;Password={SECRET};Database=x"},
        {"dsn": f"password={SECRET} host=db"},
        {"db_pass": SECRET},
        {"pwd": SECRET},
        {"github_pat": SECRET},
        {"token": SECRET},
        {"GITHUB_TOKEN_2": SECRET},
        {"db_pass_prod": SECRET},
        {"smtp": {"pass": SECRET}},
        {"my_key": f"9f8a7b6c5d4e3f2a{SECRET}"},
        {"url": f"postgres://me:pa/{SECRET}@host/db"},
    ],
    ids=str,
)
def test_settings_that_hold_secrets(tree):
    for redactor in (Redactor(), Redactor(tree)):
        told = json.dumps(redactor.tree(tree))
        assert SECRET not in told and "dHIwdWI0" not in told and "[redacted]" in told
        assert "host" in told or "host" not in json.dumps(tree)  # the rest stays


def test_numbers_and_answers_are_no_secrets():
    config = {"api_keys": 3, "auth": True, "password": None, "secret": 0.5, "tokens": {"hf_token": 12345678}}
    assert Redactor(config).tree({**config, "note": "12345678"}) == {**config, "note": "12345678"}


@pytest.mark.parametrize(
    "value", ["door", "blue-castle", "2026111512", "level-9", "gsm8k-main", "Qwen2.5-0.5B", "Llama-3.2-1B-Instruct"]
)
def test_plain_words_of_a_variable_are_not_searched_for(value):
    assert Redactor(environ={"DOOR_KEY": value}).text(f"{value} is shut") == f"{value} is shut"


@pytest.mark.parametrize("value", ["9f8a7b6c", "Xkcdqwepoirhjasdkj3q"])
def test_random_values_of_a_variable_are(value):
    assert Redactor(environ={"DOOR_KEY": value}).text(f"401 for {value}") == "401 for [redacted]"


def test_addresses_that_hold_no_password_are_kept():
    for text in ("http://host:8080/a@b", "https://host/a:b@c", "git@github.com:me/x.git", "see http://h:1/x, me@h"):
        assert Redactor().text(text) == text


@pytest.mark.parametrize(
    "piece", ["eyJ", "eyJaaaaaaaa.", "://a:", "a://b:c/", "sk-", "-----BEGIN ", "key=", "?a=", "Bearer "]
)
def test_long_text_is_read_once(piece):
    """Quadratic work on 200 KB would take minutes."""
    assert len(Redactor().text(piece * (200_000 // len(piece)))) > 5


def test_what_was_hidden_may_be_another():
    before = {"a": "[redacted]", "url": "redis://[redacted]@host/0", "b": [1, "[redacted]"]}
    assert same_but_hidden(before, {"a": 3, "url": "redis://:new@host/0", "b": [1, "x"]})
    assert not same_but_hidden(before, {"a": 3, "url": "redis://:new@other/0", "b": [1, "x"]})
    assert not same_but_hidden(before, {"a": 3, "url": "redis://:new@host/0", "b": [2, "x"]})
    assert hidden_in({"x": 1, "y": [{"z": "[redacted]"}]}) == "y[0].z" and hidden_in({"x": 1}) is None


def test_many_hidden_parts_are_compared_in_one_pass():
    """Trying every way to share the text out among them would never end."""
    assert same_but_hidden("a [redacted]b[redacted] c", "a 1b2 c") and not same_but_hidden("ab[redacted]b", "ab")
    assert not same_but_hidden("[redacted]b[redacted]a[redacted]", "ab")
    before, now = "a[redacted]" * 20_000, "a" * 100_000
    assert same_but_hidden(before, now) and not same_but_hidden(before + "ba[redacted]", now)


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"system_prompt": "replace names with [redacted], see https://host/rules"}, None),
        ({"prompts": ["name=[redacted]"]}, None),
        ({"url": "redis://[redacted]@host/0"}, "url"),
        ({"system_prompt": "see https://h/?token=[redacted]"}, "system_prompt"),
        ({"dsn": "Server=host;Password=[redacted];Database=x"}, "dsn"),
        ({"headers": ["Authorization: Bearer [redacted]"]}, "headers[0]"),
        ({"judge": {"api_keys": ["a [redacted]"]}}, "judge.api_keys[0]"),
    ],
)
def test_a_text_about_the_mark_is_no_secret_that_was_taken_out(tree, where):
    assert hidden_in(tree) == where


def test_a_secret_of_an_address_is_known_without_it():
    redactor = Redactor({"url": "redis://:p%40ss-w0rd-1@host/0"}, ["--db=mysql://me:s3cret-s3cret@h/x"])
    assert redactor.text("p%40ss-w0rd-1 p@ss-w0rd-1 s3cret-s3cret") == "[redacted] [redacted] [redacted]"


@pytest.mark.parametrize(
    ("words", "cleaned"),
    [
        (["--api-keys", "abc", "def", "--steps", "5"], ["--api-keys", "[redacted]", "[redacted]", "--steps", "5"]),
        (["--token", "a", "data.jsonl"], ["--token", "[redacted]", "data.jsonl"]),
        (["--engine-kwargs", '{"api_key": "abc", "n": 1}'], ["--engine-kwargs", '{"api_key": "[redacted]", "n": 1}']),
        (["--engine-kwargs={api_key: abc, n: 1}"], ["--engine-kwargs={api_key: [redacted], n: 1}"]),
        (["--url", "https://h/?token=abc&n=1"], ["--url", "https://h/?token=[redacted]&n=1"]),
        (["OPENAI_KEY=abc"], ["OPENAI_KEY=[redacted]"]),
        (["--rewards", "secrets.py:correctness"], ["--rewards", "secrets.py:correctness"]),
        (["--use-auth", "--eos-token", "</s>"], ["--use-auth", "--eos-token", "</s>"]),
    ],
)
def test_words_of_a_command_line(words, cleaned):
    redactor = Redactor(argv=words)
    assert redactor.argv(words) == cleaned
    assert redactor.text("data.jsonl correctness </s>") == "data.jsonl correctness </s>"


def test_no_setting_of_ours_is_taken_for_a_secret():
    """Else a run could not be gone on with: config.json would have lost it."""
    known = {name for config in (GRPOConfig, ControlConfig, LanguageConfig, WorldModelConfig, RunConfig)
             for name in config.model_fields} | {*column_types()}  # fmt: skip
    assert not [name for name in known if names_a_secret(name) or names_a_secret(f"task.{name}")]


def test_a_file_with_a_key_in_it_is_a_path(tmp_path):
    place = str(tmp_path / "key.json")
    config = {"credentials": place, "api_key": place}
    assert Redactor(config, environ={"GOOGLE_APPLICATION_CREDENTIALS": place}).tree(config) == config
    assert Redactor(environ={"X_API_KEY": "/9j4AAQSkZJRgABAQ"}).text("/9j4AAQSkZJRgABAQ") == "[redacted]"
