"""A browser that waits: every question is asked again until the page has an answer."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 60.0
"""Seconds; a loaded machine is slow, a broken page is slow for ever."""
QUIET = [f"--disable-{name}" for name in ("background-networking", "component-update", "extensions", "sync")]
QUIET += ["--no-first-run", "--mute-audio", "--renderer-process-limit=1", "--disable-features=IsolateOrigins,Translate"]
"""Chromium's own errands and processes, which no page here asks for."""
DESK, PHONE = (1280, 900), (390, 844)


def installed() -> tuple[str, str] | None:
    """Chromium and its driver, where both are here."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def launch(browser: str, driver: str) -> webdriver.Chrome:
    """A browser without a window and without a memory."""
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = [
        "--headless=new",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        *QUIET,
    ]
    flags += [f"--user-data-dir={tempfile.mkdtemp(prefix='grpo-browser-')}"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Page:
    """The page under test."""

    def __init__(self, driver: webdriver.Chrome, url: str, pictures: Path | None) -> None:
        self.driver, self.url, self._pictures = driver, url.rstrip("/"), pictures
        self.resize(DESK)

    # --- going places -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Go away, so that nothing listens to a server that is about to end."""
        self.driver.get("about:blank")

    def open(self, address: str = "#/", url: str | None = None) -> None:
        """A fresh visit: nothing of the page before is left."""
        self.leave()
        self.driver.get(f"{url or self.url + '/'}{address}")

    def resize(self, size: tuple[int, int], dark: bool = False) -> None:
        """Another screen."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    @property
    def address(self) -> str:
        """What stands behind the server's name."""
        return str(self.driver.execute_script("return location.hash"))

    # --- looking ----------------------------------------------------------------------------------------------------

    def until(self, ask: Callable[[], Any], what: str) -> Any:
        """The first true answer."""
        waiting = WebDriverWait(self.driver, PATIENCE, 0.1, ignored_exceptions=[StaleElementReferenceException])
        return waiting.until(lambda _: ask(), f"never came: {what}; the page says: {self.body()[:600]}")

    def body(self) -> str:
        """All text of the page."""
        return str(self.driver.execute_script("return document.body ? document.body.innerText : ''"))

    def all(self, css: str) -> list[WebElement]:
        """What is there now."""
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str, text: str = "") -> WebElement:
        """The first such element that has this text, once it is there."""
        found = lambda: next((e for e in self.all(css) if text in e.text), None)  # noqa: E731
        return self.until(found, f"{css} with {text!r}")

    def says(self, text: str, css: str = "body") -> None:
        """Wait until this can be read."""
        self.one(css, text)

    def texts(self, css: str) -> list[str]:
        """The texts of all such elements."""
        return list(
            self.driver.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", css)
        )

    def script(self, code: str, *arguments: Any) -> Any:
        """Ask the page itself."""
        return self.driver.execute_script(code, *arguments)

    # --- acting -----------------------------------------------------------------------------------------------------

    def click(self, css: str, text: str = "") -> None:
        """Click it, in the middle of the screen."""
        element = self.one(css, text)
        self.script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).click().perform()

    def hover(self, element: WebElement) -> None:
        """Move the pointer there."""
        self.script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        """Keys of the whole page."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def choose(self, css: str, value: str) -> None:
        """An option of a selector, by its value."""
        self.one(css)
        self.script(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('change', {bubbles: true}))",
            css,
            value,
        )

    # --- keeping ----------------------------------------------------------------------------------------------------

    def picture(self, name: str) -> None:
        """A screenshot, where they are made for the docs."""
        if self._pictures is not None:
            self.driver.save_screenshot(str(self._pictures / f"view-{name}.png"))

    def complaints(self) -> list[str]:
        """What the browser logged as an error since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
