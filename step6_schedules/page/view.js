// What is shown, and what the reader does: zoom, move, point, step, switch, compare.

const state = { main: 0, other: -1, view: { start: 0, end: 1 }, cursor: null, selected: null, showPath: false };
const PLAY_MS = 350;
let timer = null, drag = null;

function shown() {
  return [data.timelines[state.main], ...(state.other >= 0 ? [data.timelines[state.other]] : [])];
}

// Two timelines share an axis when they count time in one unit.
function comparable(index) {
  return index !== state.main && data.timelines[index].unit === data.timelines[state.main].unit;
}

function longest() {
  return Math.max(...shown().map((timeline) => timeline.makespan));
}

function redraw() {
  const panels = panelsOf(shown());
  draw(panels, state);
  byId("time").value = state.cursor === null ? 0 : Math.round((1000 * state.cursor) / longest());
  const { selected, cursor } = state;
  if (selected) describe(selected.timeline, selected.action);
  else if (cursor !== null) describeMoment(data.timelines[state.main], cursor);
  else describeNothing();
}

function fit() {
  state.view = { start: 0, end: longest() };
  redraw();
}

function zoom(factor, around = (state.view.start + state.view.end) / 2) {
  const { start, end } = state.view, length = longest();
  const wanted = Math.min(length, Math.max((end - start) * factor, length / 2000));
  const share = (around - start) / (end - start);
  place(around - share * wanted, wanted);
}

function place(start, length) {
  const first = Math.min(Math.max(start, 0), longest() - length);
  state.view = { start: first, end: first + length };
  redraw();
}

function move(share) {
  const { start, end } = state.view;
  place(start + share * (end - start), end - start);
}

function fillSelects() {
  const entry = (text, value) => Object.assign(document.createElement("option"), { textContent: text, value });
  byId("main").replaceChildren(...data.timelines.map((timeline, n) => entry(labelOf(timeline), n)));
  const others = data.timelines.map((timeline, n) => [timeline, n]).filter(([, n]) => comparable(n));
  byId("other").replaceChildren(entry("nothing", -1), ...others.map(([timeline, n]) => entry(labelOf(timeline), n)));
  byId("main").value = state.main;
  byId("other").value = state.other;
}

function choose(main, other) {
  state.main = main;
  state.other = other >= 0 && comparable(other) ? other : -1;
  state.selected = state.cursor = null;
  fillSelects();
  explainColours(shown());
  fit();
}

// Predicted and measured of one table take turns.
function switchKind() {
  const now = data.timelines[state.main];
  const twin = data.timelines.findIndex((other) => other.name === now.name && other.measured !== now.measured);
  if (twin >= 0) choose(twin, state.other === twin ? state.main : state.other);
}

function compareNext() {
  const candidates = [-1, ...data.timelines.keys()].filter((n) => n < 0 || comparable(n));
  choose(state.main, candidates[(candidates.indexOf(state.other) + 1) % candidates.length]);
}

// All actions of the main timeline by their start.
function inTime(timeline) {
  timeline.sorted ||= [...timeline.start.keys()].sort((a, b) => timeline.start[a] - timeline.start[b] || timeline.rank[a] - timeline.rank[b]);
  return timeline.sorted;
}

function step(by) {
  const timeline = data.timelines[state.main], order = inTime(timeline);
  const here = state.selected && state.selected.timeline === timeline ? order.indexOf(state.selected.action) : by > 0 ? -1 : 0;
  const next = Math.min(Math.max(here + by, 0), order.length - 1);
  select(timeline, order[next]);
  state.cursor = timeline.start[order[next]];
  const { start, end } = state.view;
  if (timeline.end[order[next]] > end || timeline.start[order[next]] < start) place(state.cursor - (end - start) / 3, end - start);
  else redraw();
  if (here + by >= order.length) stop();
}

function select(timeline, action) {
  state.selected = { timeline, action };
}

function stop() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "play";
}

function play() {
  if (timer !== null) return stop();
  byId("play").textContent = "stop";
  timer = setInterval(() => step(1), PLAY_MS);
}

function leave() {
  stop();
  state.selected = state.cursor = null;
  redraw();
}

function momentAt(x) {
  const width = canvas.clientWidth;
  return state.view.start + ((x - LEFT) / (width - LEFT - RIGHT)) * (state.view.end - state.view.start);
}

function actionAt(x, y) {
  for (const panel of panelsOf(shown())) {
    const { timeline, top } = panel, lane = laneHeight(timeline);
    const rank = Math.floor((y - top - TITLE) / lane);
    if (rank < 0 || rank >= timeline.rows.length || x < LEFT || x > canvas.clientWidth - RIGHT) continue;
    const moment = momentAt(x);
    const found = timeline.rows[rank].find((i) => timeline.start[i] <= moment && moment < timeline.end[i]);
    if (found !== undefined) return { timeline, action: found };
  }
  return null;
}

// The middle of an action's bar, in pixels of the page's window: for tests, and for readers' own scripts.
function locate(index, name) {
  const panel = panelsOf(shown()).find(({ timeline }) => timeline === data.timelines[index]);
  const i = panel.timeline.start.findIndex((_, n) => nameOf(panel.timeline, n) === name);
  const box = boxOf(panel, i, state.view, canvas.clientWidth), page = canvas.getBoundingClientRect();
  return [page.left + box.x + box.width / 2, page.top + box.y + box.height / 2];
}

const KEYS = {
  "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), "0": fit, Home: fit,
  ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), n: () => step(1), ".": () => step(1),
  p: () => step(-1), ",": () => step(-1), " ": play, m: switchKind, c: compareNext, k: () => byId("path").click(),
  Escape: leave, "?": () => byId("keys").click(),
};

document.addEventListener("keydown", (event) => {
  const own = ["SELECT", "INPUT"].includes(event.target.tagName) || (event.target.tagName === "BUTTON" && event.key === " ");
  if (own || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, momentAt(event.offsetX));
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, start: state.view.start };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointermove", (event) => {
  const length = state.view.end - state.view.start;
  if (drag) return place(drag.start - ((event.offsetX - drag.x) / (canvas.clientWidth - LEFT - RIGHT)) * length, length);
  const found = actionAt(event.offsetX, event.offsetY);
  if (!found || (state.selected && state.selected.timeline === found.timeline && state.selected.action === found.action)) return;
  state.selected = found;
  redraw();
});
byId("main").addEventListener("change", (event) => choose(Number(event.target.value), state.other));
byId("other").addEventListener("change", (event) => choose(state.main, Number(event.target.value)));
byId("path").addEventListener("change", (event) => { state.showPath = event.target.checked; redraw(); });
byId("in").addEventListener("click", () => zoom(1 / 1.4));
byId("out").addEventListener("click", () => zoom(1.4));
byId("fit").addEventListener("click", fit);
byId("next").addEventListener("click", () => step(1));
byId("back").addEventListener("click", () => step(-1));
byId("play").addEventListener("click", play);
byId("keys").addEventListener("click", (event) => {
  byId("help").hidden = !byId("help").hidden;
  event.target.setAttribute("aria-expanded", String(!byId("help").hidden));
  redraw();
});
byId("time").addEventListener("input", (event) => {
  state.selected = null;
  state.cursor = (Number(event.target.value) / 1000) * longest();
  redraw();
});
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

byId("note").textContent = data.note;
choose(0, data.timelines.findIndex((timeline) => timeline.name === data.timelines[0].name && timeline.measured));
