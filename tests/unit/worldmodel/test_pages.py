"""The page that lists every setting says what the code says."""

from pathlib import Path

from grpo.app.explain import settings_text

PAGE = Path(__file__).parents[3] / "docs" / "worldmodel_settings.md"


def test_the_page_of_settings_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition("```text\n")[2].removesuffix("\n```\n") == settings_text("worldmodel").rstrip()
