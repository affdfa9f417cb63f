"""Many clients ask ``pols serve`` at once: how long each of them waits, and whether one gets an error.

A server of its own process serves a run and a folder of pictures, as in ``pols serve RUN --folder FOLDER``. Clients ask it
without a pause, each over one connection: mostly for pictures of random classes, and in between for names, thresholds,
thumbnails and decisions. Completion of names is timed without a server as well, for 42,174 of them::

    python results/tools/serve_load.py results/serve.json runs/glyphs/noise_contrastive_estimation
"""

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
from serve_screenshot import draw_pictures

from pols_jax.benchmarking.records import describe_environment
from pols_jax.files import write_json
from pols_jax.search.serving.completion import NameCompletion

NUM_NAMES = 42_174
# How often each question is asked, of a hundred.
MIX = {"search": 60, "names": 15, "thumbnail": 15, "thresholds": 5, "decide": 5}
TYPED = ("se", "letter", "small%20a", "x")


@contextlib.contextmanager
def serving(run_dir: Path, folder: Path) -> Iterator[int]:
    """Starts a server in a process of its own; gives its port."""
    command = [sys.executable, "-c", "import sys; from pols_jax.cli import main; sys.exit(main())"]
    words = ["serve", str(run_dir), "--folder", str(folder), "--port", "0"]
    server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield int(re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())[1])  # type: ignore[index]
    finally:
        server.terminate()
        server.wait(30)


def questions(
    num_classes: int, pictures: list[Path], seed: int
) -> Iterator[tuple[str, str, str, bytes | None]]:
    """What a client asks, without an end: the kind of question, and its request."""
    rng = random.Random(seed)
    uploads = [picture.read_bytes() for picture in rng.sample(pictures, 20)]
    while True:
        (kind,) = rng.choices(list(MIX), list(MIX.values()))
        class_id = quote(f"#{rng.randrange(num_classes)}")
        yield {
            "search": ("search", "GET", f"/api/search?class={class_id}", None),
            "names": ("names", "GET", f"/api/classes?query={rng.choice(TYPED)}", None),
            "thumbnail": ("thumbnail", "GET", f"/api/pictures/0-{rng.randrange(len(pictures))}", None),
            "thresholds": ("thresholds", "GET", f"/api/thresholds?class={class_id}", None),
            "decide": ("decide", "POST", f"/api/decide?class={class_id}", rng.choice(uploads)),
        }[kind]


def ask(port: int, questions: Any, until: float, times: dict[str, list[float]], errors: list[str]) -> None:
    """One client: asks until the time is over."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for kind, method, path, body in questions:
        start = time.perf_counter()
        if start > until:
            break
        try:
            connection.request(method, path, body=body)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                errors.append(f"{kind}: {answer.status} {content[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            errors.append(f"{kind}: {error!r}")
            connection.close()
        times[kind].append(1e3 * (time.perf_counter() - start))
    connection.close()


def quantiles(times_ms: list[float]) -> dict[str, float]:
    """How long one waits, in milliseconds."""
    median, p90, p99 = np.quantile(times_ms, [0.5, 0.9, 0.99])
    values = {"median_ms": median, "p90_ms": p90, "p99_ms": p99, "max_ms": max(times_ms)}
    return {"num_requests": len(times_ms), **{name: round(float(value), 2) for name, value in values.items()}}


def load(port: int, pictures: list[Path], *, num_clients: int, seconds: float) -> dict[str, Any]:
    """Lets clients ask at the same time."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=30) as answer:
        health = json.load(answer)
    times: dict[str, list[float]] = collections.defaultdict(list)
    errors: list[str] = []
    until = time.perf_counter() + seconds
    asked = [questions(health["num_classes"], pictures, i) for i in range(num_clients)]
    with ThreadPoolExecutor(num_clients) as clients:
        list(clients.map(lambda questions: ask(port, questions, until, times, errors), asked))
    everything = list(itertools.chain.from_iterable(times.values()))
    return {
        "num_clients": num_clients,
        "seconds": seconds,
        "num_classes": health["num_classes"],
        "num_pictures": health["num_pictures"],
        "normalizer_rows": health["normalizer_rows"],
        "num_errors": len(errors),
        "errors": errors[:10],
        "requests_per_second": round(len(everything) / seconds, 1),
        "all": quantiles(everything),
        "kinds": {kind: quantiles(times[kind]) for kind in MIX},
    }


def completion(num_names: int = NUM_NAMES) -> dict[str, Any]:
    """Times the completion of names, of as many ideographs, letter by letter as they are typed; and one that is in none."""
    points = (chr(point) for point in range(0x3400, 0x2FFFF) if unicodedata.category(chr(point)) == "Lo")
    names = [unicodedata.name(character) for character in itertools.islice(points, num_names)]
    start = time.perf_counter()
    completing = NameCompletion(names)
    seconds = time.perf_counter() - start
    typed = [
        text[:length]
        for text in ("ideograph-9f", "cjk unified", "9f8d", "not there")
        for length in range(1, 13)
    ]
    times = []
    for text in typed * 5:
        start = time.perf_counter()
        completing.complete(text, limit=12)
        times.append(1e3 * (time.perf_counter() - start))
    return {"num_names": len(names), "open_ms": round(1e3 * seconds, 1), **quantiles(times)}


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder of pictures; by default it is drawn")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.pictures or Path(temporary)
        if arguments.pictures is None:
            draw_pictures(arguments.run_dir, folder)
        pictures = sorted(folder.iterdir())
        command = ["python", "results/tools/serve_load.py", *sys.argv[1:]]
        record: dict[str, Any] = {"environment": describe_environment(jax.local_devices(), command=command)}
        record["completion"] = completion()
        with serving(arguments.run_dir, folder) as port:
            record["load"] = load(port, pictures, num_clients=arguments.clients, seconds=arguments.seconds)
    write_json(arguments.record, {"serve": record})
    print(json.dumps(record["load"], indent=1))


if __name__ == "__main__":
    main()
