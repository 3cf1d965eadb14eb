// A chart: lines, points and bars over one horizontal axis. The description is the one that the command line draws as SVG
// (crates/draw/src/chart); this file adds what a picture cannot do: hovering, zooming and hiding series.

const isPoints = (series) => series.style === "points" || series.style === "ring";

class Chart extends Plot {
  constructor(data) {
    super(data.series.some(isPoints) ? 340 : 250, "", null);
    this.hidden = new Set();
    this.title = element("h3");
    this.question = element("p");
    this.legend = element("div", { class: "legend" });
    this.caption = element("p", { class: "caption" });
    this.log = element("button", { type: "button", "aria-pressed": "false" }, "log scale");
    this.reset = element("button", { type: "button" }, "whole range");
    this.log.addEventListener("click", () => { this.logY = !this.logY; this.log.setAttribute("aria-pressed", this.logY); redraw(this); });
    this.reset.addEventListener("click", () => this.show(null));
    this.tools = element("div", { class: "tools" }, this.log, this.reset);
    this.figure = element("figure", {}, element("figcaption", {}, this.title, this.tools, this.question), this.box, this.legend, this.caption);
    this.update(data);
  }

  /** Shows other data in the same chart; the view stays. */
  update(data) {
    this.source = data;
    this.categories = data.x.categories.length > 0;
    this.logarithmic = data.x.scale === "log";
    this.scattered = data.series.some(isPoints);
    this.inset = this.categories ? 0 : 9;
    this.logY = data.y.scale === "log" || this.logY === true;
    this.title.textContent = data.title;
    this.question.textContent = data.question;
    this.caption.textContent = data.caption;
    const count = data.series.reduce((sum, series) => sum + series.x.length, 0);
    this.canvas.setAttribute("aria-label", `${data.title}: ${data.y.label} over ${data.x.label}, ${data.series.map((s) => s.name).join(", ")}`);
    this.canvas.dataset.points = count;
    this.log.setAttribute("aria-pressed", this.logY);
    this.log.hidden = this.categories || data.series.some((series) => series.y.some((y) => y !== null && y <= 0));
    this.arrange();
    this.drawLegend();
  }

  /** Puts the data on the axis that was chosen for charts over steps. Another axis is shown whole. */
  arrange() {
    const axis = this.source.x.unit === "step" ? { ...this.source.x, ...AXES[choice.axis] } : this.source.x;
    if (axis.label !== this.data?.x.label) { this.view = null; this.hideTip(); }
    const marks = this.source.marks.map((mark) => ({ ...mark, x: mark.run === null ? mark.x : placeOfStep(mark.run, mark.x) }));
    this.data = { ...this.source, x: axis, series: this.source.series.map(onChosenAxis), marks };
    this.group = this.categories || this.scattered ? null : axis.label;
    redraw(this);
  }

  /** Whether series belong to several runs, which are shown and hidden on all charts together. */
  byRun() { return runs.length > 1 && this.source.series.every((series) => series.run !== null); }

  drawLegend() {
    const { series, marks } = this.source;
    const signs = [...new Set(marks.map((mark) => mark.kind))].map((kind) => `${MARKS[kind].sign} ${MARKS[kind].name}`);
    if (series.some((one) => one.hollow.includes(true))) signs.push("○ does not fit");
    const key = JSON.stringify([series.map(({ name, style, colour, run }) => [name, style, colour, run]), signs, runs.length]);
    // A button that somebody is about to press stays.
    if (key === this.legendKey) return;
    this.legendKey = key;
    const ofRuns = () => [...new Set(series.map(({ run }) => run))].map(runButton);
    const entries = this.byRun() ? ofRuns() : series.map((one, i) => this.legendButton(one, i));
    if (this.byRun()) {
      const dashed = series.find((one) => one.style === "guide");
      if (dashed) signs.unshift(`╌ ${dashed.name.slice(runs[dashed.run].name.length + 2)}`);
    }
    // The title says what a single curve is.
    this.legend.hidden = entries.length === 1 && signs.length === 0;
    this.legend.className = this.byRun() && entries.length > 6 ? "legend many" : "legend";
    this.legend.replaceChildren(...entries, ...signs.map((sign) => element("span", { class: "dim" }, sign)));
  }

  legendButton(series, i) {
    const kind = { guide: " dash", points: " dot", ring: " ring" }[series.style] ?? "";
    const swatch = element("span", { class: `swatch${kind}` });
    swatch.style.color = kind === " ring" ? "var(--text)" : `var(--s${series.colour % 16})`;
    if (kind === "" || kind === " dot") swatch.style.background = `var(--s${series.colour % 16})`;
    const button = element("button", { type: "button", title: series.name, "aria-pressed": String(!this.hidden.has(i)) }, swatch, series.name);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(i)) this.hidden.add(i);
      button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
      redraw(this);
    });
    return button;
  }

  shown() {
    const hidden = this.byRun() ? ({ series }) => choice.hidden.has(runs[series.run].name) : ({ i }) => this.hidden.has(i);
    return this.data.series.map((series, i) => ({ series, i })).filter((one) => !hidden(one));
  }

  extent() {
    if (this.categories) return [-0.5, this.data.x.categories.length - 0.5];
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of this.data.series) {
      for (const value of [x[0], x[x.length - 1]]) if (value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (this.scattered) {
      for (const { x } of this.data.series) for (const value of x) { low = Math.min(low, value); high = Math.max(high, value); }
      if (high === low) [low, high] = [low * 0.9, high * 1.1];
    }
    if (!(high > low)) return [low - 0.5, low + 0.5];
    return [low, high];
  }

  /** The vertical interval of what is in view. */
  span() {
    const [from, to] = this.range();
    let [low, high] = [Infinity, -Infinity];
    const stacks = new Map();
    for (const { series } of this.shown()) {
      const guide = series.style === "guide";
      for (let i = 0; i < series.x.length; i += 1) {
        let y = series.y[i];
        if (y === null || (!guide && (series.x[i] < from || series.x[i] > to))) continue;
        if (series.style === "stack") { y += stacks.get(series.x[i]) ?? 0; stacks.set(series.x[i], y); }
        low = Math.min(low, y); high = Math.max(high, y);
      }
    }
    if (low === Infinity) return [0, 1];
    const bars = this.data.series.some((series) => series.style === "bars" || series.style === "stack");
    const factor = Math.max((high / low) ** 0.06, 1.001);
    if (this.logY && low > 0) return [low / factor, high * factor];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    if (bars || this.data.y.zero) return [Math.min(0, low), high + room];
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  draw() {
    if (this.categories) this.fitCategories();
    const context = this.begin();
    this.reset.hidden = this.view === null;
    const colour = colours();
    const { left, right, top, bottom } = this.area();
    const [low, high] = this.span();
    const log = this.logY && low > 0;
    const y = (value) => bottom - ((log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low)) || 0) * (bottom - top);
    this.toY = y;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const place of ticks(low, high, 5, this.data.y.unit, log)) {
      context.strokeStyle = colour.line;
      context.beginPath(); context.moveTo(left, y(place)); context.lineTo(right, y(place)); context.stroke();
      context.fillStyle = colour.dim;
      context.fillText(onAxis(place, this.data.y.unit), left - 6, y(place));
    }
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(axisTitle(this.data.y.label, log), 2, 2);
    if (this.categories) this.drawCategories(context, colour); else this.drawTime(context, colour, this.data.x.unit, axisTitle(this.data.x.label, this.logarithmic));
    context.save();
    context.beginPath(); context.rect(left, top - 7, right - left, bottom - top + 14); context.clip();
    this.drawMarks(context, colour);
    this.drawBars(context, colour, y);
    for (const { series } of this.shown()) {
      context.globalAlpha = this.byRun() && choice.marked !== null && series.run !== choice.marked ? 0.12 : 1;
      if (series.style === "line" || series.style === "guide") this.drawCurve(context, series, colour, y);
      if (series.style === "points") this.drawPoints(context, series, colour, y);
      if (series.style === "ring") this.drawRing(context, series, colour, y);
    }
    context.globalAlpha = 1;
    if (this.cursor !== null) this.drawCursor(context, colour, y);
    this.drawSelection(context);
    context.restore();
  }

  /** Chooses how names are written below the axis so that none touches the next, and makes room: in a line, in two, or slanted. */
  fitCategories() {
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const width = (text) => context.measureText(text).width;
    const names = this.data.x.categories;
    const { left, right } = this.area();
    const room = (right - left) / names.length - 10;
    const two = names.map((name) => { const at = name.indexOf(" "); return at < 0 ? [name] : [name.slice(0, at), name.slice(at + 1)]; });
    const fit = (lines) => lines.every((parts) => parts.every((part) => width(part) <= room));
    const lines = [names.map((name) => [name]), two].find(fit);
    const shorten = (text) => { let short = text; while (width(short) > 150) short = `${short.slice(0, -2)}…`; return short; };
    this.names = lines ?? names.map((name) => [shorten(name)]);
    this.slant = lines === undefined;
    // A name that is slanted is as high as its line is thick; of very many, some are left out.
    this.every = this.slant ? Math.max(1, Math.ceil(17 / (room + 10))) : 1;
    const below = this.slant ? 32 + 0.8 * Math.max(...this.names.map(([name]) => width(name))) : 26 + 14 * Math.max(...this.names.map((parts) => parts.length));
    this.height += Math.round(below) - this.margin.bottom;
    this.margin.bottom = Math.round(below);
    this.canvas.style.height = `${this.height}px`;
  }

  drawCategories(context, colour) {
    const { left, right, bottom, height } = this.area();
    const [from, to] = this.range();
    context.fillStyle = colour.dim;
    context.textAlign = this.slant ? "right" : "center";
    context.textBaseline = this.slant ? "middle" : "top";
    this.names.forEach((parts, i) => {
      if (i < from || i > to || i % this.every !== 0) return;
      context.save();
      context.translate(this.toPixel(i), bottom + (this.slant ? 8 : 6));
      if (this.slant) context.rotate(-0.9);
      parts.forEach((part, line) => context.fillText(part, 0, 14 * line));
      context.restore();
    });
    context.textAlign = "center";
    context.textBaseline = "bottom";
    context.fillText(this.data.x.label, (left + right) / 2, height - 1);
  }

  /** A curve; if it is smoothed, what was measured is faint beneath it. */
  drawCurve(context, series, colour, y) {
    const alpha = context.globalAlpha;
    if (series.smooth) context.globalAlpha = 0.25 * alpha;
    this.drawLine(context, series, colour, y);
    context.globalAlpha = alpha;
    if (series.smooth) this.drawLine(context, { ...series, ...series.smooth, bare: true }, colour, y);
  }

  drawLine(context, series, colour, y) {
    const [from, to] = this.range();
    const toX = this.mapper();
    context.strokeStyle = colour.series(series.colour);
    context.lineWidth = series.style === "guide" ? 1.5 : 1.7;
    context.setLineDash(series.style === "guide" ? [6, 4] : []);
    context.beginPath();
    let drawing = false;
    const first = Math.max(0, nearest(series.x, from) - 2);
    for (let i = first; i < series.x.length; i += 1) {
      if (series.y[i] === null || (this.logY && series.y[i] <= 0)) { drawing = false; continue; }
      const [px, py] = [toX(series.x[i]), y(series.y[i])];
      if (drawing) context.lineTo(px, py); else context.moveTo(px, py);
      drawing = true;
      if (series.x[i] > to) break;
    }
    context.stroke();
    context.setLineDash([]);
    if (series.style === "line" && !series.bare) {
      context.fillStyle = colour.series(series.colour);
      // Points that are dense or of many curves would hide the curves. A point without neighbours has no curve.
      const few = this.data.series.length <= 6 && (toX(series.x.at(-1)) - toX(series.x[0])) / series.x.length >= 7;
      for (let i = first; i < series.x.length && series.x[i] <= to; i += 1) {
        const alone = (series.y[i - 1] ?? null) === null && (series.y[i + 1] ?? null) === null;
        if (series.y[i] === null || !(few || alone)) continue;
        context.beginPath(); context.arc(this.toPixel(series.x[i]), y(series.y[i]), 2.5, 0, 7);
        if (series.hollow[i]) context.stroke(); else context.fill();
      }
    }
    context.lineWidth = 1;
  }

  drawPoints(context, series, colour, y) {
    const many = this.data.series.some((other) => other.x.length > 400);
    context.fillStyle = colour.series(series.colour);
    context.globalAlpha = many ? 0.45 : 0.95;
    const size = many ? 2 : 4.5;
    const toX = this.mapper();
    for (let i = 0; i < series.x.length; i += 1) {
      if (series.y[i] === null) continue;
      const [px, py] = [toX(series.x[i]), y(series.y[i])];
      if (many) context.fillRect(px - size, py - size, 2 * size, 2 * size);
      else { context.beginPath(); context.arc(px, py, size, 0, 7); context.fill(); }
    }
    context.globalAlpha = 1;
  }

  /** A ring with its name on the side that has room. */
  drawRing(context, series, colour, y) {
    const { left, right } = this.area();
    series.x.forEach((x, i) => {
      const [px, py] = [this.toPixel(x), y(series.y[i])];
      const side = px > (left + right) / 2 ? -1 : 1;
      context.textAlign = side < 0 ? "right" : "left";
      context.textBaseline = "bottom";
      for (const [stroke, wide] of [[colour.card, 5], [colour.text, 2]]) {
        context.strokeStyle = stroke;
        context.lineWidth = wide;
        context.beginPath(); context.arc(px, py, 7, 0, 7); context.stroke();
        if (wide === 5) context.strokeText(series.name, px + 11 * side, py - 5);
      }
      context.fillStyle = colour.text;
      context.fillText(series.name, px + 11 * side, py - 5);
      context.lineWidth = 1;
    });
  }

  drawBars(context, colour, y) {
    const bars = this.shown().filter(({ series }) => series.style === "bars");
    const stacks = this.shown().filter(({ series }) => series.style === "stack");
    const wide = Math.abs(this.toPixel(1) - this.toPixel(0)) * 0.72;
    bars.forEach(({ series }, place) => {
      context.fillStyle = colour.series(series.colour);
      series.x.forEach((x, i) => {
        if (series.y[i] === null) return;
        const each = wide / bars.length;
        context.fillRect(this.toPixel(x) - wide / 2 + place * each, y(series.y[i]), Math.max(1, each - 2), y(0) - y(series.y[i]));
      });
    });
    const base = new Map();
    for (const { series } of stacks) {
      context.fillStyle = colour.series(series.colour);
      series.x.forEach((x, i) => {
        const below = base.get(x) ?? 0;
        const above = below + (series.y[i] ?? 0);
        base.set(x, above);
        context.fillRect(this.toPixel(x) - wide / 2, y(above), Math.max(1, wide), Math.max(0, y(below) - y(above) - 0.5));
      });
    }
  }

  drawMarks(context, colour) {
    const { top, bottom } = this.area();
    const [from, to] = this.range();
    context.textAlign = "center";
    context.textBaseline = "bottom";
    for (const mark of this.data.marks) {
      if (mark.x < from || mark.x > to || (this.byRun() && choice.hidden.has(runs[mark.run].name))) continue;
      const x = this.toPixel(mark.x);
      context.fillStyle = context.strokeStyle = colour.read(MARKS[mark.kind].colour);
      if (MARKS[mark.kind].line) { context.globalAlpha = 0.35; context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke(); context.globalAlpha = 1; }
      context.fillText(MARKS[mark.kind].sign, x, bottom + 2);
    }
  }

  drawCursor(context, colour, y) {
    const { top, bottom } = this.area();
    context.strokeStyle = colour.text;
    const found = this.under(this.cursor);
    if (!this.scattered) {
      context.globalAlpha = 0.4;
      context.beginPath(); context.moveTo(this.toPixel(this.cursor.x), top); context.lineTo(this.toPixel(this.cursor.x), bottom); context.stroke();
      context.globalAlpha = 1;
    }
    for (const { series, i } of found) {
      if (series.style === "bars" || series.style === "stack" || series.y[i] === null) continue;
      context.beginPath(); context.arc(this.toPixel(series.x[i]), y(series.y[i]), 5, 0, 7); context.stroke();
    }
  }

  /** The points at the cursor: of every series one that is at most a few pixels away, or of all points the one that was chosen. */
  under(cursor) {
    if (cursor.point) return [cursor.point];
    const toX = this.mapper();
    const near = (x) => Math.abs(toX(x) - toX(cursor.x)) <= NEAR;
    return this.shown().filter(({ series }) => series.x.length > 0).map(({ series }) => ({ series, i: nearest(series.x, cursor.x) })).filter(({ series, i }) => {
      if (isLevel(series)) return near(series.x[i]) || (cursor.x >= series.x[0] && cursor.x <= series.x.at(-1));
      return this.categories ? series.x[i] === Math.round(cursor.x) : near(series.x[i]);
    });
  }

  /** A value of the tip: with its own place if that is not the cursor's, and with the smooth one. */
  said({ series, i }, cursor) {
    let text = `${series.name}: ${withUnit(series.y[i], this.data.y.unit)}`;
    if (series.smooth) text += `, smooth ${withUnit(series.smooth.y[nearest(series.smooth.x, series.x[i])], this.data.y.unit)}`;
    if (this.categories || isLevel(series) || series.x[i] === cursor.x) return text;
    return `${text} (at ${this.source.x.label} ${withUnit(series.steps[i], this.source.x.unit)})`;
  }

  hover(px, py) {
    const { left, right, top, bottom } = this.area();
    if (px < left - 8 || px > right + 8 || py < top - 8 || py > bottom + 8) { this.hideTip(); return; }
    const scattered = this.shown().filter(({ series }) => isPoints(series));
    if (scattered.length === 0) { this.point({ x: this.snapped(this.fromPixel(px)) }, py); return; }
    let best = { distance: 400 };
    const toX = this.mapper();
    for (const { series } of scattered) {
      for (let i = 0; i < series.x.length; i += 1) {
        if (series.y[i] === null) continue;
        const distance = (toX(series.x[i]) - px) ** 2 + (this.toY(series.y[i]) - py) ** 2;
        if (distance < best.distance) best = { distance, series, i };
      }
    }
    if (best.series) this.point({ x: best.series.x[best.i], point: best }, py); else this.hideTip();
  }

  /** The place of a point that is nearest to one on the axis. */
  snapped(x) {
    if (this.categories) return Math.max(0, Math.min(this.data.x.categories.length - 1, Math.round(x)));
    const places = this.shown().filter(({ series }) => series.style !== "guide" && series.x.length > 0).map(({ series }) => series.x[nearest(series.x, x)]);
    return places.reduce((best, place) => (Math.abs(place - x) < Math.abs(best - x) ? place : best), places[0] ?? x);
  }

  point(cursor, py) {
    this.cursor = cursor;
    const found = this.under(cursor);
    const colour = colours();
    const label = found.map(({ series, i }) => series.labels[i]).find((text) => text);
    const at = this.categories ? this.data.x.categories[cursor.x] : `${this.data.x.label} ${withUnit(cursor.x, this.data.x.unit)}`;
    // Of many runs the values are in the order of their curves, and the tip stays shorter than the chart.
    if (this.byRun()) found.sort((a, b) => (b.series.y[b.i] ?? -Infinity) - (a.series.y[a.i] ?? -Infinity));
    const lines = found.slice(0, MAX_LINES).map((one) => ({ text: this.said(one, cursor), colour: colour.series(one.series.colour) }));
    if (found.length > MAX_LINES) lines.push({ text: `and ${found.length - MAX_LINES} more` });
    const stack = found.filter(({ series }) => series.style === "stack");
    if (stack.length > 1) lines.push({ text: `total: ${withUnit(stack.reduce((sum, { series, i }) => sum + (series.y[i] ?? 0), 0), this.data.y.unit)}` });
    for (const mark of this.data.marks) {
      if (Math.abs(this.toPixel(mark.x) - this.toPixel(cursor.x)) < 3) lines.push({ text: `${MARKS[mark.kind].sign} ${mark.text}` });
    }
    if (label) lines.push({ text: label });
    this.showTip(this.toPixel(cursor.x), py ?? 30, at, lines);
    redraw(this);
  }

  cursorPlace() { return this.cursor?.x; }

  /** Moves the cursor to another point; up and down change the series of a chart of points. */
  move(by, across) {
    const points = this.shown().filter(({ series }) => isPoints(series) && series.x.length > 0);
    if (points.length > 0) {
      const now = this.cursor?.point;
      const which = Math.max(0, points.findIndex(({ series }) => series === now?.series));
      const { series } = points[(which + across + points.length) % points.length];
      const i = now ? Math.max(0, Math.min(series.x.length - 1, now.i + by)) : 0;
      this.point({ x: series.x[i], point: { series, i } });
      return;
    }
    if (across !== 0) return;
    const first = this.shown().find(({ series }) => series.style !== "guide" && series.x.length > 0);
    if (!first) return;
    const [from, to] = this.range();
    const places = first.series.x;
    const now = this.cursor === null ? nearest(places, by > 0 ? from : to) - by : nearest(places, this.cursor.x);
    const next = Math.max(0, Math.min(places.length - 1, by === -Infinity ? nearest(places, from) : by === Infinity ? nearest(places, to) : now + by));
    if (places[next] < from || places[next] > to) this.pan(by > 0 ? 0.2 : -0.2);
    this.point({ x: places[next] });
  }
}

const MARKS = {
  checkpoint: { sign: "◆", name: "checkpoint", colour: "dim", line: false },
  skipped: { sign: "×", name: "skipped step", colour: "s1", line: true },
  "not-possible": { sign: "×", name: "not possible", colour: "s7", line: false },
};

/** Pixels between the cursor and a point of which the tip says something. */
const NEAR = 12;
/** Lines of a tip. */
const MAX_LINES = 12;

/** Whether a series is a horizontal line, which has its value everywhere between its ends. */
const isLevel = (series) => series.style === "guide" && series.x.length === 2 && series.y[0] === series.y[1];

const axisTitle = (label, logarithmic) => (logarithmic ? `${label} (logarithmic)` : label);

/** The index of the place nearest to `x` in a sorted list. */
function nearest(places, x) {
  let [low, high] = [0, places.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - places[low - 1] <= places[low] - x ? low - 1 : low;
}
