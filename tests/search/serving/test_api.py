"""The HTTP API: the right answers, and one sentence for every request that is wrong."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pols_jax.metrics.thresholds import Rule
from pols_jax.schema import decode
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.pictures import find_pictures
from pols_jax.search.searching import make_queries, search
from pols_jax.search.serving import Collection, Server, make_app
from pols_jax.search.serving.app import ENDPOINTS
from pols_jax.search.serving.completion import NameCompletion
from pols_jax.search.serving.guard import Guard
from pols_jax.search.serving.running import listen


def png(image) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("rule", ["recall=0.9", "f1", "-1e9", "2.0"])
def test_a_search_finds_what_a_direct_search_finds(client, bank, pictures, rule):
    queries = make_queries(bank, ["digit seven"], Rule.parse(rule))
    expected = search(bank, queries, find_pictures([str(pictures)])).best_first()
    found = client.json("/api/search", class_="Digit Seven", threshold=rule, limit=100)
    names = [hit.picture.rpartition("/")[2] for hit in expected]
    assert [hit["name"] for hit in found["hits"]] == names
    assert found["num_hits"] == len(names) > 0
    np.testing.assert_allclose(
        [hit["score"] for hit in found["hits"]], [hit.logit for hit in expected], atol=1e-5
    )
    assert found["threshold"]["value"] == queries[0].threshold.value
    assert found["class"] == {"id": 7, "name": "DIGIT SEVEN", "character": "7"}
    cost = found["cost"]
    assert (cost["rows"], cost["num_classes"], cost["num_pictures"], cost["normalizer_rows"]) == (
        1,
        10,
        30,
        0,
    )


def test_pages_of_hits_put_together_are_all_hits(client):
    options = {"class_": "digit one", "threshold": "-1e9"}
    whole = client.json("/api/search", limit=100, **options)["hits"]
    parts = [client.json("/api/search", limit=7, offset=i, **options)["hits"] for i in range(0, 35, 7)]
    assert [hit for part in parts for hit in part] == whole
    assert len(whole) == 30


def test_a_class_is_found_by_name_by_id_and_by_its_character(client):
    for name in ("DIGIT SEVEN", "digit seven", "#7", "7"):
        assert client.json("/api/search", class_=name)["class"]["id"] == 7
    error = client.json("/api/search", 404, class_="digit sven")["error"]
    assert "no class named 'digit sven'" in error
    assert "DIGIT SEVEN" in error
    assert "Class ids are from 0 to 9" in client.json("/api/search", 404, class_="#10")["error"]


def test_completion_puts_the_beginning_first_and_is_the_same_as_a_plain_search_of_all_names():
    rng = np.random.default_rng(0)
    words = ["LATIN", "SMALL", "LETTER", "A", "WITH", "ACUTE", "Ünder", "seven", "SEVENTH"]
    names = sorted({" ".join(rng.choice(words, size=rng.integers(1, 5))) for _ in range(2000)})
    completing = NameCompletion(names)
    for text in (
        "a",
        "letter",
        "sev",
        "LATIN SMALL",
        "ünder a",
        "h a",
        "none of them",
        "x" * 300,
        "\n",
        "a\nb",
    ):
        wanted = " ".join(text.casefold().split())
        ranks = {
            i: (f"\n{n}".find(f"\n{wanted}") < 0, f" {wanted}" not in f" {n}")
            for i, n in enumerate(map(str.casefold, names))
            if wanted in n
        }
        expected = sorted(ranks, key=lambda i: (names[i].casefold() != wanted, *ranks[i], i))
        if wanted:
            assert completing.complete(text, limit=5000) == expected, text
            assert completing.complete(text, limit=12) == expected[:12]
    assert len(completing.complete("", limit=12)) == 12
    assert NameCompletion(["cat", "dog"]).character(0) is None, "not an emoji"
    assert NameCompletion(["DIGIT SEVEN", "SEVENTH 7"]).complete("7", limit=3) == [0, 1]


def test_a_threshold_comes_with_what_validation_found_at_it(client, bank):
    curve = client.json("/api/thresholds", class_="digit seven")
    assert curve["origin"] == "all classes"
    assert curve["class_examples"] == 1
    assert curve["thresholds"] == sorted(curve["thresholds"], reverse=True)
    logits, thresholds = bank.thresholds.logits, bank.thresholds
    for value, precision, recall in zip(
        curve["thresholds"], curve["precision"], curve["recall"], strict=True
    ):
        passing = logits >= value
        assert recall == np.mean(passing)
        false = thresholds.false_passing[passing].max()
        assert precision == passing.sum() / (passing.sum() + false)
        threshold = client.json("/api/search", class_="#7", threshold=str(value))["threshold"]
        assert threshold == {
            "value": value,
            "origin": "given",
            "promise": "all classes",
            "precision": precision,
            "recall": recall,
        }
    for rule, value in curve["rules"].items():
        assert value == bank.threshold(7, rule).value


def test_an_upload_is_decided_as_the_bank_decides(client, bank, digits):
    for label in (7, 3):
        image = digits.test.images[np.flatnonzero(digits.test.labels == label)[0]]
        answer = client.json("/api/decide", method="POST", body=png(image[..., 0]), class_="digit seven")
        assert answer["is_class"] == (label == 7) == bool(bank.decide(image[None], 7)[0])
        assert answer["score"] == pytest.approx(float(bank.logits(image[None], 7)[0]), abs=1e-5)
        assert answer["cost"]["num_pictures"] == 1


def events_of(stream):
    """The events of a stream, as they come."""
    name = None
    for line in iter(stream.readline, b""):
        key, _, value = line.decode().rstrip("\n").partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def test_new_changed_and_vanished_pictures_of_the_folder_are_told(client, collection, digits):
    folder, before = Path(collection.folder), client.json("/api/health")["num_pictures"]
    seven, three = (
        digits.test.images[np.flatnonzero(digits.test.labels == label)[0], ..., 0] for label in (7, 3)
    )
    connection = client.connect()
    connection.request("GET", "/api/live?class=digit%20seven")
    stream = connection.getresponse()
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream)
    assert next(events) == ("start", {"num_pictures": before})
    Image.fromarray(three).save(folder / "zz_new_3.png")
    assert next(events) == ("pictures", {"num_pictures": before + 1}), "it is no seven"
    Image.fromarray(seven).save(folder / "zz_new_7.png")
    name, hit = next(events)
    assert (name, hit["name"]) == ("hit", "zz_new_7.png")
    assert client.ask(f"/api/pictures/{hit['picture']}")[0] == 200
    assert next(events) == ("pictures", {"num_pictures": before + 2})
    (folder / "zz_new_7.png").unlink()
    (folder / "zz_new_3.png").unlink()
    while (event := next(events)) != ("changed", {"num_pictures": before}):
        assert event[0] == "changed"
    assert client.json(f"/api/pictures/{hit['picture']}", 404)["error"].endswith("search again.")
    connection.close()


def test_a_run_that_was_not_evaluated_shows_everything_and_says_so(
    make_client, digits, run_dir, collection, tmp_path
):

    shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("thresholds*"))
    plain = Collection(ClassBank.open(tmp_path / "run"), collection.view.index)
    with Server(make_app(plain), listen("127.0.0.1", 0)) as server:
        client = make_client(server.address)
        assert client.json("/api/health")["has_thresholds"] is False
        found = client.json("/api/search", class_="#7")
        assert (found["threshold"], found["num_hits"]) == (None, 30)
        assert "has no thresholds yet" in client.json("/api/thresholds", 409, class_="#7")["error"]
        assert (
            "has no thresholds yet" in client.json("/api/search", 409, class_="#7", threshold="f1")["error"]
        )
        given = client.json("/api/search", class_="#7", threshold="1.5")["threshold"]
        assert given == {"value": 1.5, "origin": "given", "promise": None, "precision": None, "recall": None}
        assert "No folder is watched" in client.json("/api/live", 404, class_="#7")["error"]
        image = png(digits.test.images[0, ..., 0])
        assert client.json("/api/decide", method="POST", body=image, class_="#7")["is_class"] is None


def test_openapi_describes_every_route_and_every_answer_is_as_described(client, collection, digits):
    document = client.json("/api/openapi.json")
    assert document["openapi"] == "3.1.0"
    app = make_app(collection)
    assert isinstance(app, Guard)
    routes = {
        (route.path, method)
        for route in app.app.routes
        for method in route.methods - {"HEAD"}
        if route.path.startswith("/api/")
    }
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    assert routes == described == {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS}
    schemas = document["components"]["schemas"]
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        assert {p["name"] for p in operation["parameters"]} == {p.name for p in endpoint.parameters}
        if isinstance(endpoint.answer, tuple) or endpoint.answer is dict:
            continue
        asked = {"class_": "#7"} if any(p.name == "class" for p in endpoint.parameters) else {}
        body = png(digits.test.images[0, ..., 0]) if endpoint.method == "POST" else None
        answer = client.json(endpoint.path, method=endpoint.method, body=body, **asked)
        decode(endpoint.answer, answer)  # every field is there, of its type, and no other
        schema = schemas[endpoint.answer.__name__]
        assert set(schema["required"]) == set(schema["properties"]) == set(answer)


def test_the_server_sends_its_page_and_the_page_asks_nobody_else(client):
    page = client.ask("/")[2].decode()
    script = client.ask("/page.js")[2].decode()
    for path in ("page.js", "page.css", "icon.svg", "server.js", "words.js"):
        assert path in page + script
        status, headers, content = client.ask(f"/{path}")
        assert status == 200
        assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in content
        assert client.ask(f"/{path}", headers={"If-None-Match": headers["etag"]})[0] == 304
    assert "<style" not in page
    assert " style=" not in page
