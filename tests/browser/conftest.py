"""A headless Chromium over a gateway with a seeded log; screenshots go to `.ci-artifacts/browser/`."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright
from tests.browser.seeded import Seeded, seed, write_tokenizer
from tests.gateway.conftest import gateway_settings, running

from headrace.core.settings import BaseModelEntry
from headrace.core.topic_admin import apply

ARTIFACTS = Path(__file__).parents[2] / ".ci-artifacts" / "browser"
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
# No chart is drawn for another width than it has; nothing is broader than the window. Looked at in each frame by the page itself:
# playwright's `wait_for_function` calls eval from a frame's callback, which the page's own policy forbids from the second time on.
DRAWN = """async () => {
  const charts = () => [...document.querySelectorAll('.chart svg')];
  const fits = () => charts().every(s => Math.abs(s.viewBox.baseVal.width - s.clientWidth) < 2)
    && document.documentElement.scrollWidth <= window.innerWidth;
  while (!fits()) await new Promise(requestAnimationFrame);
}"""
QUIET = ("--disable-component-update", "--disable-sync")


@dataclass
class Served:
    """A gateway, and the log behind it."""

    address: str
    seeded: Seeded


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A gateway without tokens."""
    folder = tmp_path_factory.mktemp("dashboard")
    settings = gateway_settings(kafka, f"{folder.name}.", folder)
    base = BaseModelEntry(path=str(write_tokenizer(folder / "base")))
    settings = settings.model_copy(update={"base_models": {"tiny": base}})
    await apply(settings)
    seeded = await seed(settings, folder)
    async with running(settings) as client:
        yield Served(str(client.base_url), seeded)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for the module."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: `make chromium` installs Debian's, as root")
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *QUIET])
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A new page; at the end nothing may have gone wrong in it: no exception, nothing that its policy forbade."""
    context = await browser.new_context(viewport={"width": 1600, "height": 1000}, locale="en-GB", timezone_id="UTC")
    opened = await context.new_page()
    faults: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # A refused key is an answer, which browsers log all the same.
        if message.type == "error" and "status of 401" not in message.text:
            faults.append(message.text)

    opened.on("console", note)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    yield opened
    await context.close()
    assert not faults


async def picture(page: Page, name: str) -> None:
    """Screenshots of a page in both schemes, broad and narrow; the page stays as it was."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for width, scheme in ((1600, "light"), (400, "dark"), (1600, "dark"), (400, "light")):
        await page.set_viewport_size({"width": width, "height": 1000})
        await page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        async with asyncio.timeout(30):
            await page.evaluate(DRAWN)
        await page.screenshot(path=ARTIFACTS / f"{name}-{width}-{scheme}.png", full_page=True)
    await page.set_viewport_size({"width": 1600, "height": 1000})
    await page.emulate_media(color_scheme="light")
