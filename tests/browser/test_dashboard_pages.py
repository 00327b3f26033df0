"""The dashboard and the trajectory page in a real browser, as somebody who looks sees them."""

from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, Page, Request, expect
from tests.browser.conftest import Served, picture
from tests.browser.seeded import AGENT, SCRIPT, STEPS
from tests.gateway.conftest import gateway_settings, running

from headrace.core.topic_admin import apply
from headrace.gateway.tokens import create_token
from headrace.schemas.jobs import JobState

pytestmark = pytest.mark.asyncio(loop_scope="module")
HIDDEN = """hidden => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
ODD = quote("<b>odd</b> & id")


async def test_models_and_jobs_are_listed_and_a_new_job_appears_by_itself(page: Page, served: Served):
    await page.goto(served.address)
    model = page.get_by_role("row", name="shop-agent").first
    await expect(model).to_contain_text("active")
    await expect(model).to_contain_text("zero variance 12")
    await expect(model).to_contain_text("engine-a v60")
    await expect(page.get_by_text("hidden-agent")).to_have_count(0)  # another account's
    failed = page.get_by_role("row", name="job-failed")
    await expect(failed).to_contain_text("group greeting can't be tokenized: <i>no</i> template")
    await picture(page, "overview")
    await expect(page.get_by_role("status")).to_have_text("live")
    await served.seeded.job("job-new", JobState.RUNNING)
    await expect(page.get_by_role("row", name="job-new")).to_contain_text("running")


async def test_a_tab_that_nobody_looks_at_follows_nothing_and_catches_up(page: Page, served: Served):
    await page.goto(served.address)
    state = page.get_by_role("status")
    await expect(state).to_have_text("live")
    await page.evaluate(HIDDEN, True)
    await expect(state).to_have_text("paused")
    await served.seeded.job("job-meanwhile", JobState.PENDING)
    await page.evaluate(HIDDEN, False)
    await expect(page.get_by_role("row", name="job-meanwhile")).to_be_visible()


async def test_a_job_is_cancelled_by_its_button(page: Page, served: Served):
    await served.seeded.job("job-unwanted", JobState.PENDING)
    await page.goto(served.address)
    page.on("dialog", lambda dialog: dialog.accept())
    row = page.get_by_role("row", name="job-unwanted")
    await row.get_by_role("button", name="Cancel").click()
    await expect(row).to_contain_text("cancelling")
    await expect(row.get_by_role("button")).to_have_count(0)


async def test_curves_have_the_steps_values_and_a_new_step_appears_by_itself(page: Page, served: Served):
    await page.goto(served.address)
    await page.get_by_role("link", name="shop-agent").first.click()
    reward = page.get_by_role("img", name="reward_mean over steps")
    await reward.focus()
    await reward.press("ArrowRight")
    await expect(page.locator(".tip")).to_contain_text(f"step {served.seeded.version}\nreward_mean 0.88")
    timeline = page.get_by_role("img", name="policy versions over time")
    await timeline.focus()
    await timeline.press("ArrowRight")
    await expect(page.locator(".tip")).to_contain_text(f"engine-a serves version {STEPS}")
    await expect(page.locator(".tip")).to_contain_text("0.8 s after the step")
    lag = page.get_by_role("img", name="tokens by lag")
    await lag.focus()
    await lag.press("ArrowRight")
    await expect(page.locator(".tip")).to_contain_text("lag 16+\n150 tokens")
    await expect(page.get_by_text("zero variance", exact=True)).to_be_visible()
    await page.locator("body").click(position={"x": 1, "y": 500})
    await picture(page, "model")
    await expect(page.get_by_role("status")).to_have_text("live")
    await served.seeded.step(reward_mean=1.5)
    await expect(page.get_by_role("link", name=str(served.seeded.version), exact=True)).to_be_visible()
    await reward.focus()
    await reward.press("ArrowRight")
    await expect(page.locator(".tip")).to_contain_text(f"step {served.seeded.version}\nreward_mean 1.5")


async def test_from_a_model_to_its_step_to_a_trajectory(page: Page, served: Served):
    await page.goto(f"{served.address}/#/models/{AGENT}")
    await page.get_by_role("link", name=str(STEPS), exact=True).first.click()
    await expect(page.get_by_role("heading", name=f"Step {STEPS}")).to_be_visible()
    await picture(page, "step")
    await page.get_by_title("trajectory 1: reward 0").first.click()
    await expect(page.get_by_role("heading", name="Trajectory 1 of greeting")).to_be_visible()
    await page.get_by_role("link", name=f"step {STEPS}").click()
    await expect(page.get_by_role("heading", name=f"Step {STEPS}")).to_be_visible()


async def test_tokens_are_coloured_by_advantage_times_ratio_and_say_their_values(page: Page, served: Served):
    await page.goto(f"{served.address}/trajectory?model={AGENT}&step={STEPS}&group=greeting")
    turn = page.locator(".message.assistant .token")
    await expect(turn).to_have_text(["the", " secret", " is", " cat", " <end>"])
    strengths = [0.75, 0.9375, 0.375, 1.5, 0.75]  # advantage × ratio
    alphas = [await _alpha(page, i) for i in range(5)]
    assert [alpha / max(alphas) for alpha in alphas] == pytest.approx([strength / max(strengths) for strength in strengths], abs=0.02)
    likelier = await _channel(page, 3)
    await turn.nth(3).hover()
    tip = page.locator(".tip")
    for said in ('token " cat"', "id 11", "advantage × ratio 1.5", "advantage 0.75", "ratio 2", "old -0.5", "new 0.1931"):
        await expect(tip).to_contain_text(said)
    await picture(page, "trajectory")
    await page.get_by_title("trajectory 1: reward 0").click()
    await expect(page.get_by_role("heading", name="Trajectory 1 of greeting")).to_be_visible()
    less_likely = await _channel(page, 3)
    assert (likelier, less_likely) == ("blue", "red")


async def test_what_a_trajectory_holds_stays_text(page: Page, served: Served):
    await page.goto(f"{served.address}/trajectory?model={AGENT}&step={STEPS}&group={ODD}")
    await expect(page.get_by_text(SCRIPT, exact=True)).to_have_count(1)  # as the user's message
    await expect(page.get_by_role("heading", name="Trajectory 0 of <b>odd</b> & id")).to_be_visible()
    await page.get_by_text("metadata").click()
    assert await page.evaluate("document.body.dataset.hacked") is None
    assert await page.locator("main img, main script, main b").count() == 0


async def test_without_kept_rows_the_messages_are_shown_and_which_option_keeps_them(page: Page, served: Served):
    await page.goto(f"{served.address}/trajectory?model={AGENT}&step={STEPS - 1}&group=greeting")
    await expect(page.locator(".note")).to_contain_text("worker.report_rows")
    await expect(page.locator(".message.assistant .text")).to_have_text("the secret is cat")
    await expect(page.locator(".token")).to_have_count(0)


async def test_a_key_is_asked_for_once_and_never_stands_in_an_address(browser: Browser, page: Page, served: Served, tmp_path: Path):
    file = tmp_path / "tokens"
    _, token = create_token(file, account="default", owner="me")
    settings = served.seeded.settings
    guarded = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"tokens_file": file, "instance": "guarded"})})
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))  # noqa: PLW0108 - playwright marks the handler
    async with running(guarded) as client:
        await page.goto(str(client.base_url))
        await page.get_by_label("Key").fill("hr_00000000_wrong")
        await page.get_by_role("button", name="Open").click()
        await expect(page.get_by_text("the key is not one of this gateway's")).to_be_visible()
        await page.get_by_label("Key").fill(token)
        await page.get_by_role("button", name="Open").click()
        await expect(page.get_by_role("row", name="shop-agent").first).to_be_visible()
        await expect(page.get_by_role("status")).to_have_text("live")
        await page.goto(f"{client.base_url}/trajectory?model={AGENT}&step={STEPS}&group=greeting")
        await expect(page.get_by_role("heading", name="Trajectory 0 of greeting")).to_be_visible()
        await page.goto("about:blank")
    streamed = [request for request in asked if request.url.endswith("/stream")]
    assert streamed
    assert streamed[-1].headers["authorization"] == f"Bearer {token}"
    assert not [request.url for request in asked if token in request.url]


async def test_where_nothing_is_there_yet_the_page_says_so(page: Page, kafka: str, topic_prefix: str, tmp_path: Path):
    settings = gateway_settings(kafka, topic_prefix, tmp_path)
    await apply(settings)
    async with running(settings) as client:
        await page.goto(str(client.base_url))
        await expect(page.get_by_text("No model yet")).to_be_visible()
        await page.goto("about:blank")


async def _style(page: Page, i: int) -> str:
    found: str = await page.locator(".message.assistant .token").nth(i).evaluate("e => getComputedStyle(e).backgroundColor")
    return found


async def _alpha(page: Page, i: int) -> float:
    return float((await _style(page, i)).removesuffix(")").split(",")[3])


async def _channel(page: Page, i: int) -> str:
    red, _, blue, _ = (await _style(page, i)).removeprefix("rgba(").split(",")
    return "red" if float(red) > float(blue) else "blue"
