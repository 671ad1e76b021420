// The canvas: one panel for each timeline shown, a lane a rank, all on one time axis.

const canvas = byId("canvas"), pen = canvas.getContext("2d");
const LEFT = 64, RIGHT = 66, TITLE = 26, AXIS = 34;
const FONT = "12px system-ui, sans-serif";
let colours = {};

function laneHeight(timeline) {
  return timeline.rows.length > 8 ? 28 : 40;
}

function panelHeight(timeline) {
  return TITLE + laneHeight(timeline) * timeline.rows.length + AXIS;
}

// Panels from top to bottom: {timeline, top}.
function panelsOf(timelines) {
  let top = 0;
  return timelines.map((timeline) => {
    const panel = { timeline, top };
    top += panelHeight(timeline);
    return panel;
  });
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "text", "soft", "idle", "held", "line", "edge", "mark"]) {
    colours[name] = style.getPropertyValue("--" + name).trim();
  }
}

function resize(panels) {
  const width = canvas.clientWidth;
  const height = panels.reduce((sum, { timeline }) => sum + panelHeight(timeline), 0);
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return width;
}

function xOf(moment, view, width) {
  return LEFT + ((moment - view.start) / (view.end - view.start)) * (width - LEFT - RIGHT);
}

// Where an action's bar lies: {x, y, width, height}.
function boxOf(panel, i, view, width) {
  const { timeline, top } = panel;
  const lane = laneHeight(timeline);
  const x = xOf(timeline.start[i], view, width);
  return { x, y: top + TITLE + timeline.rank[i] * lane + 2, width: xOf(timeline.end[i], view, width) - x, height: lane * 0.62 };
}

function draw(panels, state) {
  readColours();
  const width = resize(panels);
  pen.font = FONT;
  for (const panel of panels) {
    drawFrame(panel, state, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, panel.top, width - LEFT - RIGHT, panelHeight(panel.timeline));
    pen.clip();
    drawBars(panel, state, width);
    drawHeld(panel, state, width);
    if (state.showPath) drawPath(panel, state, width);
    if (state.selected && state.selected.timeline === panel.timeline) drawLinks(panel, state, width);
    if (state.cursor !== null) drawCursor(panel, state, width);
    pen.restore();
  }
}

function drawFrame({ timeline, top }, { view }, width) {
  const lane = laneHeight(timeline), bottom = top + TITLE + lane * timeline.rows.length;
  pen.fillStyle = colours.text;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  fitText(titleOf(timeline), LEFT, top + TITLE / 2, width - LEFT - 8);
  timeline.rows.forEach((row, rank) => {
    const y = top + TITLE + rank * lane;
    pen.fillStyle = colours.text;
    pen.textAlign = "right";
    pen.fillText("rank " + rank, LEFT - 8, y + 2 + lane * 0.31);
    pen.textAlign = "left";
    pen.fillStyle = colours.soft;
    const cap = timeline.caps ? " of " + timeline.caps[rank] : "";
    pen.fillText(timeline.peaks[rank] + cap, width - RIGHT + 6, y + lane * 0.82);
  });
  pen.strokeStyle = pen.fillStyle = colours.soft;
  pen.textAlign = "center";
  const step = tick((view.end - view.start) / Math.max(2, (width - LEFT - RIGHT) / 110));
  for (let at = Math.ceil(view.start / step) * step; at <= view.end + 1e-9; at += step) {
    const x = xOf(at, view, width);
    pen.beginPath();
    pen.moveTo(x, bottom);
    pen.lineTo(x, bottom + 4);
    pen.stroke();
    pen.fillText(Number(at.toPrecision(6)), x, bottom + 13);
  }
  pen.textAlign = "left";
  pen.fillText(timeline.unit, width - RIGHT + 6, bottom + 13);
}

function fitText(text, x, y, room) {
  while (text.length > 4 && pen.measureText(text).width > room) text = text.slice(0, -2).trimEnd() + "…";
  pen.fillText(text, x, y);
}

// 1, 2 or 5 times a power of ten, not below `least`.
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

function drawBars(panel, state, width) {
  const { timeline, top } = panel, { view } = state, lane = laneHeight(timeline);
  const scale = (width - LEFT - RIGHT) / (view.end - view.start);
  timeline.rows.forEach((row, rank) => {
    pen.fillStyle = colours.idle;
    const x = xOf(0, view, width);
    pen.fillRect(x, top + TITLE + rank * lane + 2, xOf(timeline.makespan, view, width) - x, lane * 0.62);
    for (const i of row) {
      if (timeline.end[i] < view.start || timeline.start[i] > view.end) continue;
      const box = boxOf(panel, i, view, width), op = data.ops[timeline.op[i]];
      const isLater = state.cursor !== null && timeline.start[i] > state.cursor;
      pen.globalAlpha = timeline.opacity[i] * (isLater ? 0.25 : 1);
      pen.fillStyle = op.colour;
      // A gap between bars only where it takes little of them; else it would look like idle time.
      pen.fillRect(box.x, box.y, Math.max(box.width - (box.width > 6 ? 1 : 0), 0.5), box.height);
      pen.globalAlpha = 1;
      const onColour = op.light && timeline.opacity[i] > 0.8 ? "#ffffff" : "#000000";
      drawNumber(timeline, i, box, isLater ? colours.text : onColour, scale);
    }
  });
}

// What fits into a cell of the usual width of its op: all such cells say as much.
function drawNumber(timeline, i, box, colour, scale) {
  const short = String(timeline.microbatch[i]), long = nameOf(timeline, i);
  const usual = timeline.usual[timeline.op[i]] * scale;
  const text = usual > long.length * 7.5 + 4 ? long : usual > short.length * 7.5 + 2 ? short : "";
  if (!text || box.width < text.length * 6) return;
  pen.fillStyle = colour;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, box.x + box.width / 2, box.y + box.height / 2 + 0.5);
}

function drawHeld({ timeline, top }, { view }, width) {
  const lane = laneHeight(timeline), most = Math.max(...timeline.peaks, ...(timeline.caps || []));
  timeline.held.forEach((curve, rank) => {
    const bottom = top + TITLE + (rank + 1) * lane - 2, height = lane * 0.28;
    pen.fillStyle = colours.held;
    curve.forEach(([at, count], n) => {
      const x = xOf(at, view, width), next = n + 1 < curve.length ? curve[n + 1][0] : at;
      const h = (height * count) / most;
      pen.fillRect(x, bottom - h, xOf(next, view, width) - x + 0.3, h);
    });
    if (!timeline.caps) return;
    pen.strokeStyle = colours.line;
    pen.setLineDash([4, 3]);
    line(xOf(0, view, width), bottom - (height * timeline.caps[rank]) / most, xOf(timeline.makespan, view, width));
    pen.setLineDash([]);
  });
}

function line(x, y, x2, y2 = y) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x2, y2);
  pen.stroke();
}

function outline(panel, i, state, width, colour, thickness) {
  const box = boxOf(panel, i, state.view, width);
  pen.strokeStyle = colour;
  pen.lineWidth = thickness;
  pen.strokeRect(box.x, box.y, Math.max(box.width, 1), box.height);
  pen.lineWidth = 1;
}

// A line from the end of one action to the start of another.
function join(panel, from, to, state, width) {
  const a = boxOf(panel, from, state.view, width), b = boxOf(panel, to, state.view, width);
  line(a.x + a.width, a.y + a.height / 2, b.x, b.y + b.height / 2);
}

function drawPath(panel, state, width) {
  const path = panel.timeline.path;
  path.forEach((i, n) => {
    outline(panel, i, state, width, colours.line, 2);
    pen.lineWidth = 1.5;
    if (n && panel.timeline.rank[path[n - 1]] !== panel.timeline.rank[i]) join(panel, path[n - 1], i, state, width);
    pen.lineWidth = 1;
  });
}

function drawLinks(panel, state, width) {
  const { timeline } = panel, i = state.selected.action;
  pen.strokeStyle = colours.mark;
  for (const [j] of timeline.needs[i].filter(([j]) => j >= 0)) {
    outline(panel, j, state, width, colours.mark, 2);
    pen.lineWidth = 2;
    join(panel, j, i, state, width);
  }
  pen.setLineDash([5, 4]);
  for (const [j] of timeline.waiters[i]) {
    outline(panel, j, state, width, colours.mark, 2);
    pen.lineWidth = 2;
    join(panel, i, j, state, width);
  }
  pen.setLineDash([]);
  outline(panel, i, state, width, colours.line, 3);
}

function drawCursor(panel, state, width) {
  const x = xOf(state.cursor, state.view, width);
  pen.strokeStyle = colours.mark;
  pen.lineWidth = 2;
  line(x, panel.top + TITLE - 4, x, panel.top + panelHeight(panel.timeline) - AXIS);
  pen.lineWidth = 1;
}
