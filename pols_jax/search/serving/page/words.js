// Numbers in words, and the elements that they stand in.

export const whole = (number) => number.toLocaleString("en-US");
export const count = (number, one, many) => `${whole(number)} ${number === 1 ? one : many}`;
export const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share > 0.995 && share < 1 ? 2 : 1).replace(/\.0$/, "")} %`);
export const score = (value) => value.toFixed(2).replace("-", "−");
export const idOf = (asked) => `#${asked.id}`;

export function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

export function costLine(cost) {
  const normalizer = cost.normalizer_rows ? ` + ${whole(cost.normalizer_rows)} of the normalizer` : "";
  const memory = cost.from_memory ? " (scores from memory)" : "";
  const time = cost.milliseconds < 100 ? cost.milliseconds.toFixed(1) : whole(Math.round(cost.milliseconds));
  return `${cost.rows} of ${whole(cost.num_classes)} rows${normalizer}, ${time} ms${memory}, ${count(cost.num_pictures, "picture", "pictures")}`;
}

export function svg(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}
