"""The page at ``/`` in a real browser, and the routes that only it asks for at first."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gerund.inference.encode.texts import text_tokens

pytest.importorskip("fastapi", reason="needs gerund[serve]")

from gerund.entry import load
from gerund.errors import DataError
from gerund.server.config import ServerConfig
from gerund.server.service import Service
from tests.server.conftest import DOCUMENTS, Running, index_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Without these a browser asks its maker's hosts for things.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def basic(key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}"}


@pytest.mark.slow
def test_files_pass_the_gate_and_run_under_a_policy(indexed: Running) -> None:
    names = ["", *(f"page/{name}" for name in ("style.css", "main.js", "api.js", "form.js", "write.js"))]
    for name in names:
        refused = httpx.get(f"{indexed.url}/{name}")
        assert refused.status_code == 401
        assert "Basic" in refused.headers["www-authenticate"]
        found = httpx.get(f"{indexed.url}/{name}", headers=basic("secret"))
        assert found.status_code == 200
        assert "script-src 'self'" in found.headers["content-security-policy"]
    assert httpx.get(f"{indexed.url}/", headers=basic("wrong")).status_code == 401
    assert httpx.get(f"{indexed.url}/", headers={"Authorization": "Basic %%%"}).status_code == 401


def test_a_password_that_another_sites_page_makes_a_browser_send_does_not_count(indexed: Running) -> None:
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401)):
        headers = {**basic("secret"), "Sec-Fetch-Site": site}
        assert httpx.get(f"{indexed.url}/v1/models", headers=headers).status_code == status, site


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "%2e%2e%2fapp.py", "__init__.py", "index.html.bak"])
def test_no_other_file_is_given_away(indexed: Running, name: str) -> None:
    found = indexed.client.get(f"/page/{name}")
    assert found.status_code == 404
    assert found.json()["error"]["message"]


def test_search_says_what_was_ranked_again(indexed: Running) -> None:
    assert indexed.ok("/v1/search", query="flour", k=1)["rerank"] is None
    assert indexed.ok("/v1/search", query="flour", k=1, rerank=2)["rerank"]["offered"] == 2
    assert indexed.post("/v1/search").json()["error"]["param"] == "query"


@pytest.mark.slow
def test_an_index_that_is_migrated_is_opened_again(served_folder: Path, tmp_path: Path) -> None:
    lm = load(served_folder)
    where = index_of(tmp_path / "my.index", lm)
    from gerund.retrieval.documents import Chunking
    from gerund.retrieval.index import open_index

    with Running(load(served_folder), ServerConfig(index=where), []) as running:
        assert running.ok("/v1/search", query="rails", k=1)["data"][0]["source"] == "rail"
        assert open_index(where, lm).migrate(chunking=Chunking(tokens=64)) == len(DOCUMENTS)
        assert running.ok("/v1/search", query="rails", k=1)["data"][0]["source"] == "rail"
        other = load(served_folder, attention="causal")
        assert open_index(where, other.spec).migrate() == len(DOCUMENTS)
        found = running.post("/v1/search", query="rails")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "index_replaced")
        assert open_index(where, lm.spec).migrate() == len(DOCUMENTS)
        assert running.ok("/v1/search", query="rails", k=1)["data"][0]["source"] == "rail"


def test_search_without_an_index_says_how_to_get_one(live: Running) -> None:
    found = live.post("/v1/search", query="bread")
    assert found.status_code == 404
    assert "gerund index" in found.json()["error"]["message"]
    assert live.client.get("/v1/playground").json()["index"] is False


def test_an_index_that_is_not_there_or_anothers_is_refused_at_start(
    indexed: Running, tmp_path: Path, bundled: Any
) -> None:
    with pytest.raises(DataError, match="no such index"):
        Service(ServerConfig(index=str(tmp_path / "none")), ("tiny",)).start(indexed.lm)
    with pytest.raises(Exception, match="was made with"):
        Service(indexed.service.settings, ("tiny",)).start(bundled)


def test_attention_is_what_the_library_records(live: Running, served_lm: Any) -> None:
    from gerund.inference.inspection import attention_maps, causal_plan

    found = live.ok("/v1/attention", text="The old man.", plan="bidir")
    [before, after] = [np.array(found["layers"][1][name]) for name in ("before", "after")]
    assert np.allclose(before.sum(-1), 1, atol=0.02)
    assert np.all(np.triu(before, 1) == 0)
    assert np.any(np.triu(after[0], 1) > 0)
    ids = text_tokens(served_lm.runtime, ["The old man."])[0].ids
    reference = attention_maps(served_lm.model, ids, causal_plan(served_lm.n_layers))[1].weights.mean(0)
    assert np.allclose(before, reference.numpy(), atol=1e-3)
    assert len(found["tokens"]) == len(ids) == len(before)
    assert found["plan"].startswith("bidir")


def test_attention_obeys_every_setting_of_a_plan(live: Running) -> None:
    found = live.ok("/v1/attention", text="The old man.", plan="mask0+bidir", k=2, k0=1, sink_tokens=2)
    assert found["plan"] == "mask0+bidir, k=2, k0=1, sink_tokens=2"
    hidden = [np.array(one["after"][0])[2:, :2].max() for one in found["layers"]]
    assert sum(weight == 0 for weight in hidden) == 1
    assert live.ok("/v1/attention", text="a b", plan="mask0-bidir")["plan"] == "mask0-bidir, k=1"


def test_attention_is_drawn_of_a_plan_with_skips(live: Running) -> None:
    text = "The old man looked at the sea."
    found = live.ok("/v1/attention", text=text, plan="causal", skips=1)
    assert found["plan"] == "causal, skips=1"
    first, *others = [[np.array(own) for own in (one["before"], one["after"][0])] for one in found["layers"]]
    assert np.array_equal(*first)  # nothing was saved yet
    assert all(np.abs(before - after).max() > 1e-3 for before, after in others)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, indexed: Running) -> Iterator[Any]:
    """The page on a narrow dark screen, with whatever it complains of."""
    context = browser.new_context(
        http_credentials={"username": "me", "password": "secret"}, viewport={"width": 420, "height": 800},
        color_scheme="dark",
    )  # fmt: skip
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(indexed.url)
    page.wait_for_selector("body[data-ready]")
    yield page
    context.close()
    expected = ("status of 400", "status of 500", "status of 503")  # what a test makes the server answer
    assert [one for one in complaints if not any(status in one for status in expected)] == []


@pytest.mark.slow
def test_write_and_chat(page: Any) -> None:
    page.fill("#write-settings [name=max_tokens]", "4")
    page.press("#complete-text", "Control+Enter")
    page.wait_for_selector("#complete-note:has-text('4 tokens in')")
    assert page.inner_text("#complete-output").startswith("The old man looked at the sea, and")
    for count in (2, 4):
        page.fill("#chat-text", "Hello")
        page.press("#chat-text", "Control+Enter")
        page.wait_for_selector("#chat [type=submit]:enabled")
        assert page.locator("#chat-messages li").count() == count
    page.click("#chat-new")
    assert page.locator("#chat-messages li").count() == 0
    # What the server refuses is said in its words, and what was typed is still there.
    page.fill("#chat-text", "raise")
    page.press("#chat-text", "Control+Enter")
    page.wait_for_selector("#chat .problem:has-text('no such turn')")
    assert page.input_value("#chat-text") == "raise"


@pytest.mark.slow
def test_a_page_that_is_opened_early_waits_for_the_model(page: Any) -> None:
    early = [503, 503]

    def refuse(route: Any) -> None:
        if early:
            route.fulfill(status=early.pop(), json={"error": {"message": "the model is being loaded; try again"}})
        else:
            route.continue_()

    page.route("**/v1/playground", refuse)
    page.reload()
    page.get_by_text("The model is being loaded").wait_for()
    page.wait_for_selector("body[data-ready]")
    assert not early
    assert page.locator(".problem:visible").count() == 0
    page.route("**/v1/playground", lambda route: route.fulfill(status=500, json={"error": {"message": "no such luck"}}))
    page.reload()
    page.get_by_text("no such luck").wait_for()


@pytest.mark.slow
def test_gaps_search_and_ranking(page: Any) -> None:
    page.click("#tab-fill")
    page.fill("#fill-text", "The old man")
    page.press("#fill-text", "Control+Enter")
    page.wait_for_selector("#fill .problem:has-text('[blank]')")
    page.press("#fill-text", "Alt+g")
    page.fill("#fill [name=max_tokens]", "1")
    page.press("#fill-text", "Control+Enter")
    page.wait_for_selector("#fill-output mark", state="attached")
    page.click("#fill-keep")
    assert "[blank]" not in page.input_value("#fill-text")

    page.press("#tab-fill", "ArrowRight")
    assert page.evaluate_handle("document.activeElement").get_attribute("id") == "tab-search"
    page.fill("#search-text", "the flour of it")
    page.press("#search-text", "Enter")
    page.wait_for_selector("#search-output li:has-text('Bread') mark:has-text('flour')")
    assert {one.lower() for one in page.locator("#search-output mark").all_inner_texts()} == {"flour"}

    page.click("#tab-rank")
    page.fill("#candidates [name=max_tokens]", "3")
    page.select_option("#candidates [name=scorer]", "overlap")
    page.press("#candidates-text", "Control+Enter")
    page.wait_for_selector("#candidates-output li")
    page.press("#documents-text", "Control+Enter")
    page.wait_for_selector("#documents-output li:nth-child(4)")


@pytest.mark.slow
def test_attention_of_a_sentence(page: Any) -> None:
    page.click("#tab-attention")
    page.select_option("#attention [name=plan]", "bidir")
    page.press("#attention-text", "Enter")
    page.wait_for_selector("#maps:not([hidden])")
    first = page.get_attribute("#map-before", "aria-label")
    page.press("#attention [name=layer]", "ArrowRight")
    assert page.inner_text("#layer-number") == "1"
    assert page.get_attribute("#map-before", "aria-label") != first
    assert _fits(page)


def _fits(page: Any) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(page.locator("html").evaluate("(root) => root.scrollWidth <= root.clientWidth"))


@pytest.mark.slow
def test_a_dark_and_narrow_screen_gets_a_dark_and_narrow_page(page: Any) -> None:
    brightness = "(root) => getComputedStyle(root).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    assert max(page.locator("body").evaluate(brightness)) < 80
    page.emulate_media(color_scheme="light")
    assert min(page.locator("body").evaluate(brightness)) > 200
    page.set_viewport_size({"width": 360, "height": 700})
    tabs = page.locator("[role=tab]")
    assert tabs.count() == 5
    for number in range(tabs.count()):
        tabs.nth(number).click()
        assert _fits(page), tabs.nth(number).inner_text()
