// Asks the server, and shows on the page what goes wrong.

export const $ = (id) => document.getElementById(id);

export const running = {};

export async function ask(path, parameters = {}, { slot = path, ...options } = {}) {
  running[slot]?.abort();
  const control = (running[slot] = new AbortController());
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  let response;
  try {
    response = await fetch(`${path}?${new URLSearchParams(given)}`, { ...options, signal: control.signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; is it still running?");
  }
  let content;
  try {
    content = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server answered with status ${response.status}.`);
  }
  if (!response.ok) throw new Error(content.error);
  return content;
}

// Runs what may fail: what is wrong is shown on the page, and a question that a newer one replaced is no mistake.
export async function attempt(action) {
  try {
    await action();
    $("error").hidden = true;
  } catch (error) {
    if (error.name === "AbortError") return;
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
}
