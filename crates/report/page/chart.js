// A chart: lines, points and bars over one horizontal axis. The description is the one that the command line draws as SVG
// (crates/draw/src/chart); this file adds what a picture cannot do: hovering, zooming and hiding series.

class Chart extends Plot {
  constructor(data) {
    super(data.series.some((series) => series.style === "points") ? 340 : 250, "", null);
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
    this.figure = element("figure", {}, element("figcaption", {}, this.title, this.question), this.box, this.legend, this.caption, this.tools);
    this.update(data);
  }

  /** Shows other data in the same chart; the view stays. */
  update(data) {
    this.data = data;
    this.categories = data.x.categories.length > 0;
    this.logarithmic = data.x.scale === "log";
    this.logY = data.y.scale === "log" || this.logY === true;
    this.group = this.categories || data.series.some((series) => series.style === "points") ? null : data.x.label;
    this.title.textContent = data.title;
    this.question.textContent = data.question;
    this.caption.textContent = data.caption;
    const count = data.series.reduce((sum, series) => sum + series.x.length, 0);
    this.canvas.setAttribute("aria-label", `${data.title}: ${data.y.label} over ${data.x.label}, ${data.series.map((s) => s.name).join(", ")}`);
    this.canvas.dataset.points = count;
    this.log.setAttribute("aria-pressed", this.logY);
    this.log.hidden = this.categories || data.series.some((series) => series.y.some((y) => y !== null && y <= 0));
    if (data.series.some((series) => series.style === "points")) this.margin.bottom = 40;
    this.drawLegend();
    redraw(this);
  }

  drawLegend() {
    const { series, marks: found } = this.data;
    const key = JSON.stringify([series.map(({ name, style, colour, hollow }) => [name, style, colour, hollow.includes(true)]), [...new Set(found.map((mark) => mark.kind))]]);
    // A button that somebody is about to press stays.
    if (key === this.legendKey) return;
    this.legendKey = key;
    const entries = this.data.series.map((series, i) => {
      const swatch = element("span", { class: `swatch${series.style === "guide" ? " dash" : series.style === "points" ? " dot" : ""}` });
      swatch.style.color = `var(--s${series.colour % 8})`;
      if (series.style !== "guide") swatch.style.background = `var(--s${series.colour % 8})`;
      const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(i)) }, swatch, series.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
        redraw(this);
      });
      return button;
    });
    const marks = [...new Set(this.data.marks.map((mark) => mark.kind))].map((kind) => element("span", { class: "dim" }, `${MARKS[kind].sign} ${MARKS[kind].name}`));
    if (this.data.series.some((series) => series.hollow.includes(true))) marks.push(element("span", { class: "dim" }, "○ does not fit"));
    this.legend.replaceChildren(...entries, ...marks);
  }

  shown() { return this.data.series.map((series, i) => ({ series, i })).filter(({ i }) => !this.hidden.has(i)); }

  extent() {
    if (this.categories) return [-0.5, this.data.x.categories.length - 0.5];
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of this.data.series) {
      for (const value of [x[0], x[x.length - 1]]) if (value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (this.data.series.some((series) => series.style === "points")) {
      for (const { x } of this.data.series) for (const value of x) { low = Math.min(low, value); high = Math.max(high, value); }
      const room = (high - low) * 0.04 || Math.abs(high) * 0.1;
      [low, high] = this.logarithmic ? [low / 1.1, high * 1.1] : [Math.max(0, low - room), high + room];
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
    if (this.logY && low > 0) return [low / 1.05, high * 1.05];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    if (bars || this.data.y.zero) return [Math.min(0, low), high + room];
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  draw() {
    const context = this.begin();
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
    context.fillText(this.data.y.label, 2, 2);
    if (this.categories) this.drawCategories(context, colour); else this.drawTime(context, colour, this.data.x.unit, this.data.x.label);
    context.save();
    context.beginPath(); context.rect(left, top - 4, right - left, bottom - top + 8); context.clip();
    this.drawMarks(context, colour);
    this.drawBars(context, colour, y);
    for (const { series } of this.shown()) {
      if (series.style === "line" || series.style === "guide") this.drawLine(context, series, colour, y);
      if (series.style === "points") this.drawPoints(context, series, colour, y);
    }
    if (this.cursor !== null) this.drawCursor(context, colour, y);
    this.drawSelection(context);
    context.restore();
  }

  drawCategories(context, colour) {
    const { left, right, bottom } = this.area();
    const [from, to] = this.range();
    const names = this.data.x.categories;
    const room = (right - left) / Math.max(1, Math.min(to, names.length) - Math.max(from, 0));
    const every = Math.max(1, Math.ceil(46 / room));
    context.textAlign = "center";
    context.textBaseline = "top";
    context.fillStyle = colour.dim;
    names.forEach((name, i) => {
      if (i < from || i > to || i % every !== 0) return;
      let text = name;
      while (text.length > 3 && context.measureText(text).width > room * every - 6) text = `${text.slice(0, -2)}…`;
      context.fillText(text, this.toPixel(i), bottom + 6);
    });
    context.fillText(this.data.x.label, (left + right) / 2, bottom + 23);
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
    if (series.style === "line" && series.x.length <= 60) {
      context.fillStyle = colour.series(series.colour);
      for (let i = 0; i < series.x.length; i += 1) {
        if (series.y[i] === null) continue;
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
      if (mark.x < from || mark.x > to) continue;
      const x = this.toPixel(mark.x);
      context.fillStyle = context.strokeStyle = colour.read(MARKS[mark.kind].colour);
      if (MARKS[mark.kind].line) { context.globalAlpha = 0.35; context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke(); context.globalAlpha = 1; }
      context.fillText(MARKS[mark.kind].sign, x, bottom + 2);
    }
  }

  drawCursor(context, colour, y) {
    const { top, bottom } = this.area();
    const points = this.shown().some(({ series }) => series.style === "points");
    context.strokeStyle = colour.text;
    const found = this.under(this.cursor);
    if (!points) {
      context.globalAlpha = 0.4;
      context.beginPath(); context.moveTo(this.toPixel(this.cursor.x), top); context.lineTo(this.toPixel(this.cursor.x), bottom); context.stroke();
      context.globalAlpha = 1;
    }
    for (const { series, i } of found) {
      if (series.style === "bars" || series.style === "stack" || series.y[i] === null) continue;
      context.beginPath(); context.arc(this.toPixel(series.x[i]), y(series.y[i]), 5, 0, 7); context.stroke();
    }
  }

  /** The points at the cursor: of every series the nearest, or of all points the one that was chosen. */
  under(cursor) {
    if (cursor.point) return [cursor.point];
    return this.shown().filter(({ series }) => series.x.length > 0).map(({ series }) => ({ series, i: nearest(series.x, cursor.x) }))
      .filter(({ series, i }) => series.style === "guide" || !this.categories || series.x[i] === Math.round(cursor.x));
  }

  hover(px, py) {
    const { left, right, top, bottom } = this.area();
    if (px < left - 8 || px > right + 8 || py < top - 8 || py > bottom + 8) { this.hideTip(); return; }
    const scattered = this.shown().filter(({ series }) => series.style === "points");
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
    const lines = found.map(({ series, i }) => ({ text: `${series.name}: ${withUnit(series.y[i], this.data.y.unit)}`, colour: colour.series(series.colour) }));
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
    const points = this.shown().filter(({ series }) => series.style === "points" && series.x.length > 0);
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

/** The index of the place nearest to `x` in a sorted list. */
function nearest(places, x) {
  let [low, high] = [0, places.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - places[low - 1] <= places[low] - x ? low - 1 : low;
}
