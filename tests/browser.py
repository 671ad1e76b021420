"""A headless Chromium that a test drives, and that leaves no process behind."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.scoreboard import BROWSERS

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1200,900",
)  # fmt: skip


@contextlib.contextmanager
def browser() -> Iterator:
    """A selenium driver; its console is kept for `get_log("browser")`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(30)
            yield driver
        finally:
            driver.quit()


class Page:
    """A timeline's page, and what a reader does on it."""

    def __init__(self, driver, file: Path) -> None:
        self.driver = driver
        driver.get(file.as_uri())

    def ask(self, script: str, *arguments):
        return self.driver.execute_script(f"return {script}", *arguments)

    def press(self, keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def point_at(self, timeline: int, action: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        x, y = self.ask("locate(arguments[0], arguments[1])", timeline, action)
        chain = ActionChains(self.driver)
        chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        chain.perform()

    def choose(self, select: str, text: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.driver.find_element("id", select)).select_by_visible_text(text)

    def said(self) -> list[str]:
        """The lines of the text about what is selected."""
        return self.driver.find_element("id", "about").text.splitlines()
