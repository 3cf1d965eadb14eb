// What every rank did in one step: a row for each, time from left to right. Spans come as columns: the row, the start and the
// duration in seconds, the kind, the name, the micro-batch, bytes sent and FLOPs.

const KINDS = {
  forward: { letter: "F", colour: "s0", name: "forward" },
  recompute: { letter: "R", colour: "s5", name: "recompute" },
  backward: { letter: "B", colour: "s4", name: "backward" },
  "backward-input": { letter: "B", colour: "s4", name: "backward, inputs" },
  "backward-weight": { letter: "W", colour: "s2", name: "backward, weights" },
  communication: { letter: "", colour: "s3", name: "communication and waiting" },
  optimizer: { letter: "", colour: "s1", name: "optimizer" },
  other: { letter: "", colour: "s7", name: "other" },
  kernel: { letter: "", colour: "s6", name: "kernels" },
};

class TimelinePlot extends Plot {
  constructor(data) {
    const tall = Math.max(12, Math.min(26, 560 / Math.max(1, data.rows.length)));
    super(tall * data.rows.length + 54, "", null);
    this.tall = tall;
    this.margin = { left: 118, right: 14, top: 8, bottom: 44 };
    this.title = element("h3");
    this.question = element("p");
    this.caption = element("p", { class: "caption" });
    this.legend = element("div", { class: "legend" });
    const reset = element("button", { type: "button" }, "whole step");
    reset.addEventListener("click", () => this.show(null));
    this.arrows = element("button", { type: "button", "aria-pressed": "true" }, "messages");
    this.arrows.addEventListener("click", () => { this.hideFlows = !this.hideFlows; this.arrows.setAttribute("aria-pressed", String(!this.hideFlows)); redraw(this); });
    this.tools = element("div", { class: "tools" }, reset, this.arrows);
    this.figure = element("figure", { class: "wide" }, element("figcaption", {}, this.title, this.tools, this.question), this.box, this.legend, this.caption);
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.group = data.unit === "seconds" ? "time of a step" : null;
    this.title.textContent = data.title;
    this.question.textContent = data.question;
    this.caption.textContent = data.caption;
    this.arrows.hidden = data.flows.length === 0;
    this.canvas.setAttribute("aria-label", `${data.title}: ${data.rows.length} rows, ${data.start.length} spans`);
    this.canvas.dataset.points = data.start.length;
    this.byRow = data.rows.map(() => []);
    data.row.forEach((row, i) => this.byRow[row].push(i));
    for (const spans of this.byRow) spans.sort((a, b) => data.start[a] - data.start[b]);
    const kinds = data.kinds.map((kind) => KINDS[kind]);
    this.legend.replaceChildren(...kinds.map((kind) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = `var(--${kind.colour})`;
      return element("span", { class: "dim" }, swatch, `${kind.letter} ${kind.name}`.trim());
    }));
    redraw(this);
  }

  extent() { return [0, this.data.end || 1]; }

  draw() {
    const context = this.begin();
    const colour = colours();
    const { left, right, top } = this.area();
    const [from, to] = this.range();
    const { data, tall } = this;
    this.drawTime(context, colour, data.unit, data.unit === "seconds" ? "time since the step began" : "time, in forwards of a layer");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / tall);
    data.rows.forEach((name, row) => {
      if (row % every !== 0) return;
      context.fillStyle = colour.dim;
      context.fillText(name.length > 18 ? `${name.slice(0, 17)}…` : name, left - 6, top + tall * (row + 0.5));
    });
    context.save();
    context.beginPath(); context.rect(left, top, right - left, tall * data.rows.length); context.clip();
    const scale = (right - left) / (to - from);
    const paint = data.kinds.map((kind) => colour.read(KINDS[kind].colour));
    context.textAlign = "left";
    for (let row = 0; row < data.rows.length; row += 1) {
      const [y, height] = [top + tall * row + 1, tall - 2];
      let end = -Infinity;
      for (const i of this.byRow[row]) {
        const start = data.start[i];
        if (start > to) break;
        if (start + data.duration[i] < from) continue;
        const x = left + (start - from) * scale;
        const wide = data.duration[i] * scale;
        // Spans within one pixel look the same as one.
        if (wide < 0.5 && x + wide < end + 0.5) continue;
        end = x + wide;
        context.fillStyle = paint[data.kind[i]];
        context.fillRect(x, y, Math.max(0.6, wide - (wide > 4 ? 1 : 0)), height);
        const { letter } = KINDS[data.kinds[data.kind[i]]];
        if (wide > 22 && height > 9 && letter) {
          context.fillStyle = colour.card;
          context.fillText(data.micro[i] === null ? letter : `${letter}${data.micro[i]}`, x + 3, y + height / 2 + 0.5);
        }
      }
    }
    if (!this.hideFlows) this.drawFlows(context, colour, scale);
    if (this.cursor !== null) {
      const i = this.cursor;
      context.strokeStyle = colour.text;
      context.lineWidth = 2;
      context.strokeRect(left + (data.start[i] - from) * scale, top + tall * data.row[i] + 1, Math.max(2, data.duration[i] * scale), tall - 2);
      context.lineWidth = 1;
    }
    context.restore();
    this.drawSelection(context);
  }

  /** Arrows from what made a message to what used it: all of them if there are few in view, else those of the chosen span. */
  drawFlows(context, colour, scale) {
    const { data, tall } = this;
    const { left, top } = this.area();
    const [from, to] = this.range();
    const inView = data.flows.filter(([a, b]) => data.start[b] >= from && data.start[a] + data.duration[a] <= to);
    const drawn = inView.length <= 120 ? inView : inView.filter(([a, b]) => a === this.cursor || b === this.cursor);
    context.strokeStyle = context.fillStyle = colour.text;
    for (const [a, b] of drawn) {
      context.globalAlpha = a === this.cursor || b === this.cursor ? 0.95 : 0.35;
      const [x1, x2] = [left + (data.start[a] + data.duration[a] - from) * scale, left + (data.start[b] - from) * scale];
      const [y1, y2] = [top + tall * (data.row[a] + 0.5), top + tall * (data.row[b] + 0.5)];
      context.beginPath(); context.moveTo(x1, y1); context.lineTo(x2, y2); context.stroke();
      context.beginPath(); context.arc(x2, y2, 2, 0, 7); context.fill();
    }
    context.globalAlpha = 1;
  }

  hover(px, py) {
    const { top } = this.area();
    const row = Math.floor((py - top) / this.tall);
    const spans = this.byRow[row];
    if (!spans) { this.hideTip(); return; }
    const at = this.fromPixel(px);
    const close = (this.range()[1] - this.range()[0]) / 400;
    let best = null;
    for (const i of spans) {
      const gap = Math.max(this.data.start[i] - at, at - this.data.start[i] - this.data.duration[i], 0);
      if (gap <= close && (best === null || gap < best.gap)) best = { gap, i };
      if (this.data.start[i] > at + close) break;
    }
    if (best) this.choose(best.i, px, py + 14); else this.hideTip();
  }

  choose(i, px, py) {
    this.cursor = i;
    const { data } = this;
    const { left, right, top } = this.area();
    const time = (value) => (data.unit === "seconds" ? withUnit(value, "seconds") : digits(value));
    const lines = [{ text: data.rows[data.row[i]] }, { text: `${time(data.duration[i])}, from ${time(data.start[i])}` }];
    if (data.micro[i] !== null) lines.push({ text: `micro-batch ${data.micro[i]}` });
    if (data.bytes[i] > 0) lines.push({ text: `${withUnit(data.bytes[i], "bytes")} over links` });
    if (data.flops[i] > 0) {
      const rate = data.unit === "seconds" && data.duration[i] > 0 ? `, ${withUnit(data.flops[i] / data.duration[i], "flops")}` : "";
      lines.push({ text: `${withUnit(data.flops[i], "operations")}${rate}` });
    }
    const x = px ?? Math.max(left, Math.min(right, this.toPixel(data.start[i])));
    this.showTip(x, py ?? top + this.tall * (data.row[i] + 1), data.names[data.name[i]], lines);
    redraw(this);
  }

  cursorPlace() { return this.cursor === null ? undefined : this.data.start[this.cursor] + this.data.duration[this.cursor] / 2; }

  move(by, across) {
    const { data } = this;
    const rows = this.byRow;
    if (this.cursor === null) {
      const row = rows.findIndex((spans) => spans.length > 0);
      if (row >= 0) this.choose(rows[row][0]);
      return;
    }
    const row = data.row[this.cursor];
    let next = this.cursor;
    if (across !== 0) {
      const other = rows[Math.max(0, Math.min(rows.length - 1, row + across))];
      if (other.length > 0) next = other[nearest(other.map((i) => data.start[i]), data.start[this.cursor])];
    } else {
      const place = rows[row].indexOf(this.cursor);
      next = rows[row][Math.max(0, Math.min(rows[row].length - 1, place + by))];
    }
    const [from, to] = this.range();
    if (data.start[next] < from) this.pan(-0.3);
    if (data.start[next] > to) this.pan(0.3);
    this.choose(next);
  }
}
