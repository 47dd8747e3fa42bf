// The page as a whole: reads the events, keeps the history, draws the moment shown.

import { ask, readEvents, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { History, figures } from "./history.js";
import { Knobs } from "./knobs.js";
import { drawPages, pagesPerCell } from "./pages.js";
import { forgetPalette } from "./paint.js";
import { drawSlots, drawTokens } from "./slots.js";

const at = (id) => document.getElementById(id);
const WHAT = ["prompt chunk", "one token", "computed again"];
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let history = new History();
let shown = null; // number of the step shown; null: the newest
let connection = { state: "off", words: "connecting" };
let drawn = 0;
let isDue = false;
let hasKey = null; // settles when a key is given

const knobs = new Knobs(at("knobs"));
const chat = new Chat({
  log: at("log"), send: at("send"), stop: at("stop"), system: at("system"), temperature: at("temperature"),
  maxTokens: at("max-tokens"), crowdStatus: at("crowd-status"), crowd: at("crowd"),
});

// ---- events in

async function follow() {
  for (let pause = 1; ; pause = Math.min(2 * pause, 10)) {
    try {
      const response = await ask("/v1/batch/events");
      link("live", "live");
      pause = 0.5;
      for await (const event of readEvents(response)) take(event);
      link("off", "the server ended the stream; trying again");
    } catch (error) {
      if (error.status === 401) {
        await askForKey(error.message);
        pause = 0;
      } else {
        link("off", error.status ? error.message : "no connection; trying again");
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
  }
}

function take(event) {
  if (event.object === "batch.state") {
    if (history.frames.length && event.step < history.frames.at(-1).step) { // another server
      history = new History();
      shown = null;
    }
    history.begin(event);
    knobs.load(history.limits).catch((error) => { at("knobs-hint").textContent = error.message; });
  } else if (event.object === "batch.status") {
    history.status = event;
    history.knobs = event.knobs;
    knobs.show(event.knobs);
    at("model").textContent = event.model;
    document.title = `${event.running} running · jcb playground`;
  } else {
    for (const step of event.steps) history.add(step);
  }
  due();
}

function link(state, words) {
  connection = { state, words };
  showLink();
}

function showLink() {
  const isPaused = connection.state === "live" && shown !== null;
  const { state, words } = isPaused ? { state: "paused", words: "paused" } : connection;
  const pill = at("link");
  if (pill.textContent !== words) pill.textContent = words;
  pill.dataset.state = state;
}

async function askForKey(message) {
  link("off", "an API key is needed");
  at("key-error").textContent = at("key").value ? message : "";
  at("key-panel").hidden = false;
  await new Promise((resolve) => { hasKey = resolve; });
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key-panel").hidden = true;
  hasKey?.();
});

// ---- the moment shown

function due() {
  if (isDue || document.hidden) return;
  isDue = true;
  const wait = Math.max(0, (calm.matches ? 500 : 50) - (performance.now() - drawn));
  setTimeout(() => requestAnimationFrame(draw), wait);
}

function position() {
  const { frames } = history;
  if (shown === null || !frames.length) return frames.length - 1;
  const index = frames.findIndex((frame) => frame.step >= shown);
  return index < 0 ? frames.length - 1 : index;
}

function draw() {
  isDue = false;
  drawn = performance.now();
  const { frames, limits } = history;
  const end = position();
  const frame = frames[end];
  drawSlots(at("slots"), history, end);
  drawTokens(at("tokens"), history, end);
  at("pages-summary").textContent = drawPages(at("pages"), history, frame);
  const each = pagesPerCell(limits.pages);
  at("pages-note").textContent = `${each === 1 ? "a cell is a page" : `a cell is ${each} pages`} of ${limits.page_size} tokens`;
  const slider = at("time");
  slider.max = Math.max(frames.length - 1, 0);
  slider.value = Math.max(end, 0);
  if (frame) drawFigures(frame, end);
}

function drawFigures(frame, end) {
  const { frames, limits } = history;
  const numbers = figures(frames, end);
  const texts = {
    rate: numbers.rate.toFixed(numbers.rate < 100 ? 1 : 0),
    ttft: time(numbers.ttft),
    itl: time(numbers.itl50, numbers.itl95),
    running: `${frame.running} of ${history.knobs?.max_num_seqs.value ?? limits.slots}`,
    waiting: String(shown === null ? history.status.waiting ?? frame.waiting : frame.waiting),
    padding: `${Math.round(100 * numbers.padding)} %`,
    used: `${Math.round((100 * frame.used) / Math.max(limits.pages, 1))} %`,
    hits: `${Math.round(100 * numbers.hits)} %`,
  };
  for (const [id, text] of Object.entries(texts)) if (at(id).textContent !== text) at(id).textContent = text;
  const words = describe(frame);
  at("summary").textContent = words;
  at("time").setAttribute("aria-valuetext", words);
  const behind = shown === null ? "" : `paused, ${(frames.at(-1).t - frame.t).toFixed(1)} s before the newest step`;
  at("moment").textContent = [behind, history.lost ? `${history.lost} steps lost on the way` : ""].filter(Boolean).join("; ");
  if (at("rows-panel").open) drawRows(frame);
}

// Milliseconds as a person reads them, in one unit.
function time(...values) {
  const most = Math.max(...values);
  if (Number.isNaN(most)) return "–";
  const texts = values.map((value) => (most >= 1000 ? (value / 1000).toFixed(2) : value.toFixed(most < 10 ? 1 : 0)));
  return `${texts.join(" / ")} ${most >= 1000 ? "s" : "ms"}`;
}

function describe(frame) {
  const counts = [0, 0, 0];
  for (const row of frame.rows) counts[row[4]]++;
  const parts = counts.map((count, kind) => (count ? `${count} × ${WHAT[kind]}` : "")).filter(Boolean);
  const time = frame.device_ms === null ? "" : `, ${frame.device_ms} ms on the device, ${frame.host_ms} ms on the host`;
  return `Step ${frame.step}: ${parts.join(", ") || "nothing to run"}; ${frame.waiting} waiting${time}.`;
}

function drawRows(frame) {
  const rows = [...frame.rows].sort((a, b) => a[1] - b[1]).map(([id, slot, start, tokens, kind]) => {
    const row = document.createElement("tr");
    const person = history.people.get(id) ?? {};
    const pages = frame.tables.get(id)?.length ?? 0;
    for (const value of [slot, `#${id}`, WHAT[kind], tokens, start, person.prompt ?? "", person.cached ?? "", pages]) {
      row.insertCell().textContent = value;
    }
    return row;
  });
  at("rows").replaceChildren(...rows);
}

// ---- hands on

function show(step) {
  shown = step;
  const isPaused = step !== null;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("live").disabled = !isPaused;
  showLink();
  draw();
  if (isPaused && history.frames.length) at("said").textContent = describe(history.frames[position()]);
}

at("pause").addEventListener("click", () => show(shown === null ? history.frames.at(-1)?.step ?? null : null));
at("live").addEventListener("click", () => { show(null); at("pause").focus(); });
at("time").addEventListener("input", (event) => show(history.frames[event.target.valueAsNumber]?.step ?? null));
at("rows-panel").addEventListener("toggle", due);
at("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("message").value.trim();
  if (!text || chat.running) return;
  at("message").value = "";
  chat.send(text);
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("chat").requestSubmit();
  }
});
at("stop").addEventListener("click", () => chat.stop());
at("clear").addEventListener("click", () => chat.clear());
at("crowd").addEventListener("click", () => { if (at("crowd-size").reportValidity()) chat.sendCrowd(at("crowd-size").valueAsNumber); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetPalette(); due(); });
document.addEventListener("visibilitychange", due);
new ResizeObserver(due).observe(at("batch"));

due();
follow();
