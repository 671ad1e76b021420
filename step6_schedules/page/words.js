// What the page says in words about timelines and actions.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// For each op its usual (median) length, and for each action those that need what it makes.
for (const timeline of data.timelines) {
  timeline.usual = {};
  for (const op of new Set(timeline.op)) {
    const lengths = timeline.start.map((start, i) => timeline.end[i] - start).filter((_, i) => timeline.op[i] === op);
    timeline.usual[op] = lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 2)];
  }
  timeline.waiters = timeline.needs.map(() => []);
  timeline.needs.forEach((needs, i) => needs.forEach(([j, kind]) => { if (j >= 0) timeline.waiters[j].push([i, kind]); }));
}

function nameOf(timeline, i) {
  return timeline.stage[i] + timeline.op[i] + timeline.microbatch[i];
}

function plural(count, word) {
  return count + " " + word + (count === 1 ? "" : "s");
}

function time(value, unit) {
  return Number(value.toPrecision(5)) + (unit === "slots" ? " " + (value === 1 ? "slot" : "slots") : " " + unit);
}

function labelOf(timeline) {
  return timeline.name + ", " + (timeline.measured ? "measured" : "predicted");
}

function titleOf(timeline) {
  const how = timeline.measured ? "measured" : "predicted with " + timeline.cost;
  const note = timeline.note ? " " + timeline.note : "";
  const most = Math.max(...timeline.peaks);
  return `${timeline.name}, ${how}${note}: makespan ${time(timeline.makespan, timeline.unit)}, ` +
    `bubble ${timeline.bubble.toFixed(3)}, at most ${most} in flight`;
}

function element(name, text, children = []) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function needLine(timeline, [j, kind]) {
  const [made, given] = data.kinds[kind];
  if (j < 0) return given;
  const at = `rank ${timeline.rank[j]}, ended at ${time(timeline.end[j], timeline.unit)}`;
  return `${made} ${nameOf(timeline, j)} (${at})`;
}

// The action that ended last of those this one had to wait for: its sources, and the one before it on its rank.
function lastWaitedFor(timeline, i) {
  const found = timeline.needs[i].map(([j]) => j).filter((j) => j >= 0);
  if (timeline.before[i] >= 0) found.push(timeline.before[i]);
  return found.length ? found.reduce((a, b) => (timeline.end[b] > timeline.end[a] ? b : a)) : -1;
}

function idleBefore(timeline, i) {
  const before = timeline.before[i];
  return timeline.start[i] - (before < 0 ? 0 : timeline.end[before]);
}

function describe(timeline, i) {
  const { unit } = timeline;
  const op = data.ops[timeline.op[i]].name;
  const place = `${op} of microbatch ${timeline.microbatch[i]} on stage ${timeline.stage[i]}, rank ${timeline.rank[i]}`;
  const length = time(timeline.end[i] - timeline.start[i], unit);
  const idle = idleBefore(timeline, i);
  const last = lastWaitedFor(timeline, i);
  const when = `From ${time(timeline.start[i], unit)} to ${time(timeline.end[i], unit)}: ${length}. ` +
    (idle > 1e-9 ? `Its rank was idle for ${time(idle, unit)} before. ` : "Its rank was not idle before. ") +
    (last >= 0 ? `It waited last for ${nameOf(timeline, last)}.` : "It waited for nothing.");
  const waiters = timeline.waiters[i].map(([j]) =>
    element("li", `${nameOf(timeline, j)} (rank ${timeline.rank[j]}, starts at ${time(timeline.start[j], unit)})`));
  byId("about").replaceChildren(
    element("h2", `${nameOf(timeline, i)}: ${place} (${labelOf(timeline)})`),
    element("p", when),
    element("div", "Needs:", [element("ul", "", timeline.needs[i].map((need) => element("li", needLine(timeline, need))))]),
    element("div", waiters.length ? "Waiting for what it makes:" : "Nobody waits for what it makes.", [
      element("ul", "", waiters)]));
}

// The colours of what is shown.
function explainColours(timelines) {
  const ops = Object.entries(data.ops).filter(([op]) => timelines.some((timeline) => timeline.op.includes(op)));
  const chunks = timelines.some((timeline) => timeline.opacity.some((opacity) => opacity < 1));
  byId("legend").replaceChildren(
    ...ops.map(([, op]) => {
      const box = element("i");
      box.style.background = op.colour;
      return element("span", "", [box, op.name]);
    }),
    ...(chunks ? [element("span", "paler: a later chunk of the rank")] : []),
    element("span", "below the bars: activations in flight (right: the most)"));
}

function heldAt(timeline, rank, moment) {
  let held = 0;
  for (const [at, count] of timeline.held[rank]) if (at <= moment) held = count;
  return held;
}

// What each rank does at a moment.
function describeMoment(timeline, moment) {
  const lines = timeline.rows.map((row, rank) => {
    const now = row.find((i) => timeline.start[i] <= moment && moment < timeline.end[i]);
    const what = now === undefined ? "idle" : nameOf(timeline, now);
    return element("li", `rank ${rank}: ${what}, holds ${plural(heldAt(timeline, rank, moment), "activation")}`);
  });
  byId("about").replaceChildren(
    element("h2", `At ${time(moment, timeline.unit)} (${labelOf(timeline)})`), element("ul", "", lines));
}

function describeNothing() {
  byId("about").replaceChildren(
    element("p", "Point at an action, or press n, to see what it needs and what waits for it. Press ? for all keys."));
}
