// Asks for the status once a second and shows it; says clearly when nobody answers.
import { render, renderState } from "./view.js";

const PERIOD_MS = 1000;
const LIMIT_MS = 5000;
let lastGoodMs = null;

async function ask() {
  const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error ? document.error.message : `HTTP ${answer.status}`);
  return document;
}

function complain(error) {
  const silent = error instanceof TypeError || error.name === "TimeoutError" || error instanceof SyntaxError;
  const what = silent ? "The endpoint does not answer." : `The supernode does not answer: ${error.message}`;
  const since = lastGoodMs === null
    ? "Nothing has been received yet."
    : `What you see is ${Math.round((Date.now() - lastGoodMs) / 1000)} s old.`;
  const alert = document.getElementById("alert");
  const text = `${what} ${since}`;
  if (alert.textContent !== text) alert.textContent = text;
  alert.hidden = false;
  document.body.classList.add("stale");
  renderState(silent ? "unreachable" : "no controller", "bad");
}

async function step() {
  try {
    const status = await ask();
    lastGoodMs = Date.now();
    document.getElementById("alert").hidden = true;
    document.body.classList.remove("stale");
    render(status, new Date());
  } catch (error) {
    complain(error);
  }
  setTimeout(step, PERIOD_MS);
}

step();
