// The page of `pols serve`: one state, one function per part of the page, and nothing from elsewhere.

import { $, ask, attempt, running } from "./server.js";
import { costLine, count, element, idOf, percent, score, svg, whole } from "./words.js";

const PAGE_SIZE = 60;
const SMALL = 96; // pixels; smaller pictures are shown with sharp edges
const RULES = { "recall=0.9": "recall 0.9", "recall=0.99": "recall 0.99", "precision=0.9": "precision 0.9", f1: "best F1" };

const state = {
  health: null,
  asked: null, // the class
  threshold: null, // a rule or a number, as the server takes it; null for its default
  curve: null,
  answer: null,
  hits: [],
  fresh: new Set(),
  stream: null,
};

// The search box

const box = { choices: [], typed: "", active: -1 };

function showChoices(choices, typed) {
  box.choices = choices;
  box.typed = typed;
  box.active = choices.length ? 0 : -1;
  const items = choices.map((choice, i) => {
    const item = element("li", { id: `name-${i}` });
    item.setAttribute("role", "option");
    if (choice.character !== null) item.append(element("span", { className: "letter", textContent: choice.character }));
    item.append(marked(choice.name, typed));
    item.addEventListener("mousedown", (event) => event.preventDefault());
    item.addEventListener("click", () => choose(choice));
    return item;
  });
  if (!items.length) {
    const none = element("li", { className: "none", textContent: `No class has “${typed}” in its name.` });
    none.setAttribute("role", "option");
    none.setAttribute("aria-disabled", "true");
    items.push(none);
  }
  $("names").replaceChildren(...items);
  openNames(true);
  markActive();
}

function marked(name, typed) {
  const place = typed ? name.toLowerCase().indexOf(typed.toLowerCase()) : -1;
  const shown = element("span");
  if (place < 0) shown.textContent = name;
  else shown.append(name.slice(0, place), element("mark", { textContent: name.slice(place, place + typed.length) }), name.slice(place + typed.length));
  return shown;
}

function openNames(isOpen) {
  $("names").hidden = !isOpen;
  $("query").setAttribute("aria-expanded", String(isOpen));
  if (!isOpen) $("query").removeAttribute("aria-activedescendant");
}

function markActive() {
  [...$("names").children].forEach((item, i) => item.setAttribute("aria-selected", String(i === box.active)));
  if (box.active < 0) return;
  $("query").setAttribute("aria-activedescendant", `name-${box.active}`);
  $("names").children[box.active].scrollIntoView({ block: "nearest" });
}

async function complete() {
  const typed = $("query").value.trim();
  const answer = await ask("/api/classes", { query: typed });
  if (document.activeElement === $("query")) showChoices(answer.classes, typed);
}

function choose(asked) {
  running["/api/classes"]?.abort();
  openNames(false);
  $("query").value = asked.name;
  $("query").select();
  attempt(() => askFor(idOf(asked), null));
}

// Takes the marked name, or the best one for what is typed if the list is of an earlier letter.
async function enter() {
  const typed = $("query").value.trim();
  if (!typed) return;
  const isCurrent = !$("names").hidden && box.typed === typed;
  const { choices, active } = isCurrent ? box : { choices: (await ask("/api/classes", { query: typed })).classes, active: 0 };
  if (choices.length) return choose(choices[active]);
  openNames(false);
  await askFor(typed, null);
}

$("query").addEventListener("input", () => attempt(complete));
$("query").addEventListener("focus", () => $("query").select());
$("query").addEventListener("blur", () => openNames(false));
$("query").addEventListener("keydown", (event) => {
  const isOpen = !$("names").hidden;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && isOpen && box.choices.length) {
    event.preventDefault();
    box.active = (box.active + step + box.choices.length) % box.choices.length;
    markActive();
  } else if (step) {
    event.preventDefault();
    attempt(complete);
  } else if (event.key === "Enter" && !event.isComposing) {
    event.preventDefault();
    attempt(enter);
  } else if (event.key === "Escape") {
    openNames(false);
  }
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input:not([type=range]), textarea, dialog");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("query").focus();
  }
});

// A class is asked for

async function askFor(name, threshold) {
  state.health ??= await ask("/api/health");
  const first = await ask("/api/search", { class: name, threshold, limit: PAGE_SIZE });
  state.asked = first.class;
  state.threshold = threshold;
  state.fresh.clear();
  state.curve = null;
  if (state.health.has_thresholds) state.curve = await ask("/api/thresholds", { class: idOf(first.class) });
  showAnswer(first);
  showCurve();
  forgetDecision();
  listen();
}

async function searchAgain() {
  if (!state.asked) return;
  showAnswer(await ask("/api/search", { class: idOf(state.asked), threshold: state.threshold, limit: PAGE_SIZE }));
}

async function searchMore() {
  const parameters = { class: idOf(state.asked), threshold: state.threshold, limit: PAGE_SIZE, offset: state.hits.length };
  const answer = await ask("/api/search", parameters);
  const known = new Set(state.hits.map((hit) => hit.picture));
  showAnswer(answer, [...state.hits, ...answer.hits.filter((hit) => !known.has(hit.picture))]);
}

function showAnswer(answer, hits = answer.hits) {
  state.answer = answer;
  state.hits = hits;
  const { class: asked, threshold } = answer;
  document.title = `${asked.name} · pols`;
  if (document.activeElement !== $("query")) $("query").value = asked.name;
  $("title").hidden = false;
  $("heading").textContent = asked.name;
  $("character").textContent = asked.character ?? "";
  $("character").hidden = asked.character === null;
  $("upload-class").textContent = asked.name;
  $("cost").textContent = costLine(answer.cost);
  $("more").hidden = hits.length >= answer.num_hits;
  $("grid").setAttribute("aria-label", `Pictures of ${asked.name}`);
  showCount();
  showThreshold(threshold);
  showTotals(answer.cost.num_pictures);
  showGrid();
  const place = new URLSearchParams({ class: asked.name });
  if (state.threshold !== null) place.set("threshold", state.threshold);
  history.replaceState(null, "", `?${place}`);
}

function showCount() {
  const { num_hits: found, threshold, cost } = state.answer;
  $("count").textContent = threshold === null ? `All ${count(found, "picture", "pictures")}, best first` : count(found, "picture", "pictures");
  $("empty").hidden = found > 0;
  if (found) return;
  const heading = cost.num_pictures ? "No picture reaches this threshold" : "There are no pictures here yet";
  const advice = cost.num_pictures
    ? "Move the slider to the right to find more, with less certainty."
    : "Start the server with an index, or with --folder FOLDER; a picture can be uploaded on the left.";
  showEmpty(heading, advice, []);
}

function showEmpty(heading, advice, examples) {
  $("empty").hidden = false;
  $("empty").querySelector("h1").textContent = heading;
  $("empty").querySelector("p").textContent = advice;
  $("examples").replaceChildren(
    ...examples.map((example) => {
      const label = example.character === null ? example.name : `${example.character}  ${example.name}`;
      const button = element("button", { type: "button", textContent: label });
      button.addEventListener("click", () => choose(example));
      return button;
    }),
  );
}

function showTotals(pictures) {
  $("totals").textContent = `${count(pictures, "picture", "pictures")} · ${count(state.health.num_classes, "class", "classes")}`;
}

function showGrid() {
  const old = new Map([...$("grid").children].map((item) => [item.dataset.key, item]));
  const items = state.hits.map((hit) => old.get(keyOf(hit)) ?? card(hit));
  $("grid").replaceChildren(...items);
}

const keyOf = (hit) => `${hit.picture} ${hit.score} ${state.fresh.has(hit.picture)}`;
const pictureOf = (hit, size) => `/api/pictures/${encodeURIComponent(hit.picture)}?size=${size}`;

function card(hit) {
  const isFresh = state.fresh.has(hit.picture);
  const picture = element("img", { src: pictureOf(hit, 256), alt: "", loading: "lazy", decoding: "async" });
  sharpen(picture);
  picture.addEventListener("error", () => picture.replaceWith(element("span", { className: "muted", textContent: "gone" })));
  const line = element("span", { className: "score" }, score(hit.score));
  if (isFresh) line.append(element("span", { className: "new", textContent: "new" }));
  const caption = element("span", { className: "caption" }, line, element("span", { className: "name", textContent: hit.name }));
  const button = element("button", { type: "button", className: isFresh ? "card fresh" : "card", title: hit.name });
  button.setAttribute("aria-label", `${hit.name}, score ${score(hit.score)}${isFresh ? ", new" : ""}`);
  button.append(element("span", { className: "picture" }, picture), caption);
  button.addEventListener("click", () => view(hit.picture));
  const item = element("div", {}, button);
  item.setAttribute("role", "listitem");
  item.dataset.key = keyOf(hit);
  return item;
}

function sharpen(picture) {
  picture.addEventListener("load", () => picture.classList.toggle("small", Math.max(picture.naturalWidth, picture.naturalHeight) <= SMALL));
}

$("more").addEventListener("click", () => attempt(searchMore));

// One picture, large

let viewed = null;

function view(picture) {
  const hit = state.hits.find((other) => other.picture === picture);
  if (!hit) return;
  viewed = picture;
  $("viewer-picture").src = pictureOf(hit, 1280);
  $("viewer-picture").alt = hit.name;
  $("viewer-name").textContent = hit.name;
  $("viewer-score").textContent = `score ${score(hit.score)}`;
  if (!$("viewer").open) $("viewer").showModal();
}

sharpen($("viewer-picture"));
sharpen($("preview"));
$("viewer-close").addEventListener("click", () => $("viewer").close());
$("viewer").addEventListener("click", (event) => event.target === $("viewer") && $("viewer").close());
$("viewer").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = step && state.hits[state.hits.findIndex((hit) => hit.picture === viewed) + step];
  if (next) view(next.picture);
});

// The threshold

const CHART = { left: 22, right: 260, top: 6, bottom: 106 };
const across = (recall) => CHART.left + recall * (CHART.right - CHART.left);
const up = (precision) => CHART.bottom - precision * (CHART.bottom - CHART.top);

function showCurve() {
  const { curve } = state;
  $("threshold-body").hidden = !curve;
  if (!curve) {
    $("threshold-note").textContent = `This run has no thresholds for ${state.asked.name}: evaluate it with pols eval to see what validation promises. All pictures are shown, best first.`;
    return;
  }
  const points = curve.recall.map((recall, i) => `${across(recall).toFixed(1)},${up(curve.precision[i]).toFixed(1)}`);
  const ends = `${across(curve.recall.at(-1) ?? 0).toFixed(1)},${CHART.bottom} ${across(curve.recall[0] ?? 0).toFixed(1)},${CHART.bottom}`;
  $("chart").replaceChildren(
    svg("polygon", { class: "area", points: `${points.join(" ")} ${ends}` }),
    svg("path", { class: "frame", d: `M${CHART.left} ${CHART.top}V${CHART.bottom}H${CHART.right}` }),
    svg("polyline", { class: "line", points: points.join(" ") }),
    svg("path", { class: "guide", id: "guide", d: "" }),
    svg("circle", { class: "point", id: "point", r: 5.5, cx: -20, cy: -20 }),
    svg("text", { x: 0, y: CHART.top + 7 }, "100"),
    svg("text", { x: 12, y: CHART.bottom + 3 }, "0"),
    svg("text", { x: CHART.right, y: CHART.bottom + 14, "text-anchor": "end" }, "recall →"),
    svg("text", { x: CHART.left, y: CHART.bottom + 14 }, "↑ precision"),
  );
  $("slider").max = String(Math.max(0, curve.thresholds.length - 1));
  $("slider").disabled = curve.thresholds.length < 2;
  $("rules").replaceChildren(
    ...Object.entries(RULES).map(([rule, label]) => {
      const button = element("button", { type: "button", textContent: label, disabled: curve.rules[rule] === null });
      button.dataset.rule = rule;
      button.addEventListener("click", () => {
        state.threshold = rule;
        attempt(searchAgain).then(thresholdChanged);
      });
      return button;
    }),
  );
  $("threshold-note").textContent =
    curve.origin === "class"
      ? `What validation promises, from the ${whole(curve.num_examples)} validation pictures of this class.`
      : `What validation promises, from all ${whole(state.health.num_classes)} classes together: this class has ${count(curve.class_examples, "validation picture", "validation pictures")}, too few for a threshold of its own.`;
  showThreshold(state.answer.threshold);
}

// Which point of the curve a threshold is at: the last one that is not below it.
function pointOf(value) {
  let point = 0;
  state.curve.thresholds.forEach((threshold, i) => {
    if (threshold >= value) point = i;
  });
  return point;
}

function showThreshold(threshold, { fromSlider = false } = {}) {
  if (!state.curve || threshold === null) return;
  $("precision").textContent = percent(threshold.precision);
  $("recall").textContent = percent(threshold.recall);
  $("threshold").textContent = score(threshold.value);
  if (!fromSlider) $("slider").value = String(pointOf(threshold.value));
  $("slider").setAttribute("aria-valuetext", `threshold ${score(threshold.value)}, precision ${percent(threshold.precision)}, recall ${percent(threshold.recall)}`);
  const current = state.threshold ?? "recall=0.9";
  for (const button of $("rules").children) button.setAttribute("aria-pressed", String(button.dataset.rule === current));
  const [x, y] = threshold.precision === null ? [-20, -20] : [across(threshold.recall), up(threshold.precision)];
  $("point")?.setAttribute("cx", x);
  $("point")?.setAttribute("cy", y);
  $("guide")?.setAttribute("d", x < 0 ? "" : `M${x} ${y}V${CHART.bottom}M${x} ${y}H${CHART.left}`);
}

let slid = 0;

$("slider").addEventListener("input", () => {
  const { thresholds, precision, recall } = state.curve;
  const i = Number($("slider").value);
  state.threshold = String(thresholds[i]);
  showThreshold({ value: thresholds[i], precision: precision[i], recall: recall[i] }, { fromSlider: true });
  clearTimeout(slid);
  slid = setTimeout(() => attempt(searchAgain), 60);
});
$("slider").addEventListener("change", thresholdChanged);

// What has been asked with the old threshold is asked again.
function thresholdChanged() {
  attempt(decideAgain);
  listen();
}

// An upload

let uploaded = null;

function forgetDecision() {
  $("decision").textContent = "";
  $("decision").className = "decision";
  attempt(decideAgain);
}

async function decideAgain() {
  if (uploaded && state.asked) await decide(uploaded);
}

async function decide(file) {
  const shown = $("decision");
  const say = (text, kind) => {
    shown.textContent = text;
    shown.className = `decision ${kind}`;
  };
  uploaded = file;
  const before = $("preview").src;
  $("preview").src = URL.createObjectURL(file);
  if (before) URL.revokeObjectURL(before);
  $("preview").hidden = false;
  $("preview").alt = file.name;
  $("drop-text").textContent = file.name;
  if (!state.asked) return say("Ask for a class first.", "wrong");
  if (file.size > state.health.max_upload_bytes) return say(`A picture may have at most ${state.health.max_upload_bytes >> 20} MB.`, "wrong");
  try {
    const options = { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } };
    const answer = await ask("/api/decide", { class: idOf(state.asked), threshold: state.threshold }, options);
    const value = score(answer.score);
    if (answer.is_class === null) say(`Score ${value}; this run has no thresholds to compare it with.`, "no");
    else if (answer.is_class) say(`Yes: its score, ${value}, is at least ${score(answer.threshold.value)}.`, "yes");
    else say(`No: its score, ${value}, is below ${score(answer.threshold.value)}.`, "no");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "wrong");
  }
}

$("upload").addEventListener("change", () => {
  if ($("upload").files.length) attempt(() => decide($("upload").files[0]));
  $("upload").value = "";
});
$("preview").addEventListener("error", () => ($("preview").hidden = true));
for (const name of ["dragenter", "dragover"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) $("drop").addEventListener(name, () => $("drop").classList.remove("over"));
$("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) attempt(() => decide(event.dataTransfer.files[0]));
});

// Live

function listen() {
  state.stream?.close();
  state.stream = null;
  $("live").classList.remove("lost");
  if ($("live").getAttribute("aria-pressed") !== "true" || !state.asked) return;
  const threshold = state.threshold === null ? {} : { threshold: state.threshold };
  const stream = new EventSource(`/api/live?${new URLSearchParams({ class: idOf(state.asked), ...threshold })}`);
  state.stream = stream;
  const on = (name, action) => stream.addEventListener(name, (event) => state.stream === stream && action(JSON.parse(event.data)));
  on("start", (news) => {
    $("live").classList.remove("lost");
    $("live").title = `Watching ${state.health.folder}`;
    if (news.num_pictures !== state.answer.cost.num_pictures) attempt(searchAgain);
  });
  on("hit", (hit) => {
    if (state.hits.some((known) => known.picture === hit.picture)) return;
    state.fresh.add(hit.picture);
    state.hits.unshift(hit);
    state.answer.num_hits += 1;
    showCount();
    showGrid();
    $("news").textContent = `New picture of ${state.asked.name}: ${hit.name}`;
  });
  on("pictures", (news) => {
    state.answer.cost.num_pictures = news.num_pictures;
    showTotals(news.num_pictures);
  });
  on("changed", () =>
    attempt(async () => {
      const before = new Set(state.hits.map((hit) => hit.name));
      state.fresh.clear();
      await searchAgain();
      for (const hit of state.hits) if (!before.has(hit.name)) state.fresh.add(hit.picture);
      showGrid();
    }),
  );
  on("trouble", (news) => attempt(() => { throw new Error(news.error); }));
  stream.addEventListener("error", () => {
    if (state.stream !== stream) return;
    $("live").classList.add("lost");
    $("live").title = "The connection is lost; trying again";
  });
}

$("live").addEventListener("click", () => {
  const isOn = $("live").getAttribute("aria-pressed") === "true";
  $("live").setAttribute("aria-pressed", String(!isOn));
  listen();
});

// The beginning

attempt(async () => {
  state.health = await ask("/api/health");
  $("run").textContent = state.health.run;
  showTotals(state.health.num_pictures);
  $("live").hidden = state.health.folder === null;
  $("live").setAttribute("aria-pressed", String(state.health.folder !== null));
  const place = new URLSearchParams(location.search);
  const examples = await ask("/api/classes", { limit: 8 });
  if (!state.asked) showEmpty("Which class are you looking for?", "One row of the output layer answers, however many classes there are.", examples.classes);
  if (place.get("class")) await askFor(place.get("class"), place.get("threshold"));
});
