"""The screenshot of ``pols serve`` in README and docs.

Starts a server for a run and a folder of pictures, looks at it with chromium, and writes ``docs/images/serve.png``. Without a folder
of pictures it draws one: the test pictures of the run's own data set, each several times, moved and turned a little::

    python results/tools/serve_screenshot.py runs/glyphs/noise_contrastive_estimation "digit seven"
"""

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pols_jax.files import write_bytes

# Nothing that asks the network, and no graphics card.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)
SIZE = {"width": 1280, "height": 800}


def find_chromium() -> str | None:
    """Where chromium is; None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def browser_page(chromium: str, **options: Any) -> Iterator[Any]:
    """Opens a page of a browser that has nothing of an earlier one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, headless=True, args=FLAGS.split(), viewport=SIZE, **options
        )
        try:
            yield context.pages[0]
        finally:
            context.close()


def ask_for(page: Any, typed: str) -> None:
    """Types into the search box, takes the first class that it offers, and waits for the pictures."""
    page.get_by_role("combobox").fill("")
    page.get_by_role("combobox").press_sequentially(typed)
    page.keyboard.press("Enter")
    page.locator("#title").wait_for()


def screenshot(page: Any) -> bytes:
    """The page as a PNG file, when all pictures that can be seen are there; with few colors, which the eye does not miss."""
    # Pictures below the edge are loaded when somebody scrolls to them.
    seen = "image.getBoundingClientRect().top < innerHeight"
    page.wait_for_function(f"() => [...document.images].every((image) => image.complete || !({seen}))")
    page.get_by_role("combobox").blur()
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    content = io.BytesIO()
    image.quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        content, "PNG", optimize=True
    )
    return content.getvalue()


def draw_pictures(
    run_dir: Path, folder: Path, *, num_classes: int = 200, copies: int = 20, seed: int = 0
) -> None:
    """Writes test pictures of a run's data set, of some classes, augmented as in training."""
    import jax

    from pols_jax.training.runs import Run

    dataset = Run.open(run_dir).load_dataset()
    of_some = np.flatnonzero(dataset.test.labels < num_classes)
    chosen = np.random.default_rng(seed).permutation(np.repeat(of_some, copies))
    keys = jax.random.split(jax.random.key(seed), len(chosen))
    pixels = np.asarray(jax.jit(dataset.augment)(keys, dataset.test.images[chosen]))
    pixels = ((pixels[..., 0] + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).resize((112, 112), Image.Resampling.LANCZOS).save(folder / f"IMG_{i:05d}.png")


def main() -> int:
    """Makes the screenshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("query")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "docs" / "images" / "serve.png"
    )
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print("There is no chromium; install it with apt-get install chromium.", file=sys.stderr)
        return 2
    from pols_jax.search.class_bank import ClassBank
    from pols_jax.search.serving import Collection, Server, make_app
    from pols_jax.search.serving.live import Feed, FolderIndex
    from pols_jax.search.serving.running import listen

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.pictures or Path(temporary) / "pictures"
        if arguments.pictures is None:
            folder.mkdir()
            draw_pictures(arguments.run_dir, folder)
        bank, feed = ClassBank.open(arguments.run_dir), Feed()
        index, _ = FolderIndex(bank, str(folder), f"{temporary}/index").update()
        collection = Collection(bank, index, name=arguments.run_dir.name, folder="pictures")
        collection.warm_up()
        server = Server(make_app(collection, feed=feed), listen("127.0.0.1", 0), on_stop=feed.close)
        with server, browser_page(chromium) as page:
            page.goto(server.address)
            ask_for(page, arguments.query)
            best = page.locator(".card .name").first.inner_text()
            page.locator("#upload").set_input_files(folder / best)
            page.locator("#decision.yes").wait_for()
            write_bytes(arguments.out, screenshot(page))
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
