"""The page in a real browser: type a name, see its pictures, move the slider, upload, and watch new pictures come."""

import io
import re
import shutil

import pytest
from PIL import Image
from serve_screenshot import ask_for, browser_page, find_chromium, screenshot

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def page(client):
    """One browser for all tests; whatever it says in its console is in ``page.said``, whom it asked in ``page.asked``."""
    pytest.importorskip(
        "playwright", reason="the browser is driven by playwright, which is in the extra `test`"
    )
    with browser_page(CHROMIUM) as page:
        page.set_default_timeout(20_000)
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        yield page


@pytest.fixture(autouse=True)
def fresh(page, client):
    """Every test begins with the page as it is opened."""
    page.goto(client.address)
    page.locator("#examples button").first.wait_for()
    yield
    assert page.said == [], "no test makes the browser complain"
    assert all(url.startswith((client.address, "blob:")) for url in page.asked)


def names_shown(page):
    page.wait_for_function("() => [...document.images].every((image) => image.complete)")
    return page.locator(".card .name").all_inner_texts()


def wait_for_hits(page, number):
    page.wait_for_function("(number) => document.querySelectorAll('.card').length === number", arg=number)


def test_a_typed_name_shows_the_right_pictures_with_scores_and_the_cost(page, client):
    page.get_by_role("combobox").press_sequentially("sev")
    page.keyboard.press("Enter")  # at once: what was typed last counts, not what the list showed before
    page.get_by_role("heading", name="DIGIT SEVEN", exact=True).wait_for()
    expected = client.json("/api/search", class_="digit seven")
    assert names_shown(page) == [hit["name"] for hit in expected["hits"]]
    assert expected["num_hits"] == 3
    scores = [f"{hit['score']:.2f}" for hit in expected["hits"]]
    assert page.locator(".card .score").all_inner_texts() == scores
    assert page.locator("#count").inner_text() == "3 pictures"
    cost = page.locator("#cost").inner_text()
    assert re.fullmatch(r"1 of 10 rows, [\d.]+ ms( \(scores from memory\))?, 30 pictures", cost)
    assert page.evaluate(
        "[...document.querySelectorAll('.card img')].every((image) => image.naturalWidth === 32)"
    )
    picture = screenshot(page)
    assert Image.open(io.BytesIO(picture)).size == (1280, 800)


def test_the_keyboard_alone_finds_a_class_and_opens_a_picture(page):
    page.keyboard.press("Tab")
    page.keyboard.press("/")
    page.keyboard.type("digit t")
    page.wait_for_function("() => document.querySelectorAll('#names li').length === 2")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="DIGIT THREE", exact=True).wait_for()
    assert "class=DIGIT+THREE" in page.url
    page.locator(".card").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    first = page.locator("#viewer-name").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#viewer-name").inner_text() != first
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    page.reload()
    page.get_by_role("heading", name="DIGIT THREE", exact=True).wait_for()


def test_the_slider_shows_what_validation_promises_and_changes_what_is_found(page, client):
    ask_for(page, "digit seven")
    wait_for_hits(page, 3)
    curve = client.json("/api/thresholds", class_="digit seven")
    slider = page.get_by_role("slider")
    for point in (0, len(curve["thresholds"]) - 1, 3):
        slider.fill(str(point))
        threshold = curve["thresholds"][point]
        assert page.locator("#threshold").inner_text() == f"{threshold:.2f}"
        assert page.locator("#recall").inner_text() == f"{100 * curve['recall'][point]:.0f} %"
        assert page.locator("#precision").inner_text() == f"{100 * curve['precision'][point]:.0f} %"
        expected = client.json("/api/search", class_="digit seven", threshold=str(threshold))
        wait_for_hits(page, expected["num_hits"])
        assert f"recall {100 * curve['recall'][point]:.0f} %" in slider.get_attribute("aria-valuetext")
    assert (
        "from all 10 classes together: this class has 1 validation picture"
        in page.locator("#threshold-note").inner_text()
    )
    page.get_by_role("button", name="recall 0.99").click()
    page.locator("#rules [aria-pressed=true]", has_text="recall 0.99").wait_for()
    assert page.locator("#recall").inner_text() == "100 %"


def test_an_upload_is_answered_and_what_is_no_picture_is_said_to_be_none(page, pictures, tmp_path):
    ask_for(page, "digit seven")
    page.locator("#upload").set_input_files(pictures / "digit_seven_07.png")
    page.locator("#decision.yes").wait_for()
    assert page.locator("#decision").inner_text().startswith("Yes: its score, ")
    page.locator("#upload").set_input_files(pictures / "digit_three_03.png")
    page.locator("#decision.no").wait_for()
    assert page.locator("#decision").inner_text().startswith("No: its score, ")
    (tmp_path / "notes.png").write_text("no picture")
    page.locator("#upload").set_input_files(tmp_path / "notes.png")
    page.locator("#decision.wrong").wait_for()
    assert "cannot be decoded: it is not a picture" in page.locator("#decision").inner_text()
    assert page.said.pop().startswith("Failed to load resource"), "the 415 that was asked for"


def test_new_pictures_of_the_folder_appear_as_they_come(page, live, pictures):
    folder, _ = live
    ask_for(page, "digit seven")
    wait_for_hits(page, 3)
    assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "true"
    shutil.copy(pictures / "digit_seven_07.png", folder / "zz_came_later.png")
    try:
        page.locator(".card.fresh", has_text="zz_came_later.png").wait_for()
        assert page.locator("#count").inner_text() == "4 pictures"
        assert page.locator("#totals").inner_text().startswith("31 pictures")
        assert "zz_came_later.png" in page.locator("#news").inner_text()
    finally:
        (folder / "zz_came_later.png").unlink()
    wait_for_hits(page, 3)


def test_an_unknown_class_and_an_empty_result_are_said_on_the_page(page, client):
    page.get_by_role("combobox").press_sequentially("cat")
    page.get_by_text("No class has “cat” in its name.").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="There is no class named 'cat'").wait_for()
    assert page.said.pop().startswith("Failed to load resource"), "the 404 that was asked for"
    page.goto(f"{client.address}/?class=digit+seven&threshold=1e9")
    page.get_by_text("No picture reaches this threshold").wait_for()
    assert page.locator("#precision").inner_text() == "–"


def test_dark_and_light_follow_the_system(page):
    backs = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.emulate_media(color_scheme="light")
    assert backs == ["rgb(246, 247, 249)", "rgb(15, 17, 21)"]
