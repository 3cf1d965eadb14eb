// What charts and timelines share: units, ticks, a canvas that knows its size and colours, and zooming by mouse and keyboard.
// A view is an interval of the horizontal axis; plots with the same group have the same view.

const UNITS = {
  bytes: { base: 1024, names: ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] },
  seconds: { base: 1000, names: ["s", "ks"], below: ["ms", "µs", "ns", "ps"] },
  joules: { base: 1000, names: ["J", "kJ", "MJ", "GJ", "TJ", "PJ"], below: ["mJ", "µJ"] },
  watts: { base: 1000, names: ["W", "kW", "MW", "GW"], below: ["mW"] },
  flops: { base: 1000, names: ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"] },
  operations: { base: 1000, names: ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"] },
  rate: { base: 1000, names: ["tokens/s", "k tokens/s", "M tokens/s", "G tokens/s"] },
  count: { base: 1000, names: ["", "k", "M", "G", "T", "P"] },
};

/** At most four significant digits, without an exponent where people would not write one. */
function digits(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

const DAY = 86400;

/** Seconds as people say them: 42.5 s, 12 min 5 s, 3 h 20 min, 2 d 4 h. */
function duration(seconds) {
  if (seconds < 60) return withUnit(seconds, "seconds");
  const [size, name, part, partName] = seconds < 3600 ? [60, "min", 1, "s"] : seconds < DAY ? [3600, "h", 60, "min"] : [DAY, "d", 3600, "h"];
  const parts = Math.round((seconds % size) / part) % (size / part);
  const whole = Math.floor((seconds + part / 2) / size);
  return `${whole} ${name}${parts > 0 ? ` ${parts} ${partName}` : ""}`;
}

/** A value with its unit, as in 12.5 GiB. */
function withUnit(value, unit) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (unit === "duration") return duration(value);
  if (unit === "share") return `${digits(100 * value)} %`;
  if (unit === "step") return Math.round(value).toLocaleString("en");
  const known = UNITS[unit];
  if (!known) return digits(value);
  let [size, at] = [Math.abs(value), 0];
  if (unit === "count" && size < 1e5) return digits(value);
  while (size >= known.base && at + 1 < known.names.length) { size /= known.base; at += 1; }
  let name = known.names[at];
  for (let i = 0; size !== 0 && size < 1 && known.below && i < known.below.length; i += 1) { size *= 1000; name = known.below[i]; }
  return `${digits(Math.sign(value) * size)} ${name}`.trim();
}

/** A value beside an axis whose label has the name of the unit: 12.5 k for tokens per second. */
function onAxis(value, unit) {
  return withUnit(value, unit).replace(/ ?(tokens\/s|FLOP\/s)$/, "");
}

/** Round places on an axis, about `count` of them. */
function ticks(low, high, count, unit, logarithmic) {
  if (!(high > low)) return [low];
  if (logarithmic) {
    const places = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) {
      for (const factor of high / low < 100 ? [1, 2, 5] : [1]) {
        const place = factor * 10 ** power;
        if (place >= low * 0.999 && place <= high * 1.001) places.push(place);
      }
    }
    return places.length > 1 ? places : ticks(low, high, count, unit, false);
  }
  const rough = (high - low) / count;
  const round = unit === "duration" && rough > 1 && [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200, DAY].find((size) => size >= rough);
  // Steps of bytes are round in the unit that the largest value has.
  const base = unit === "bytes" && high >= 1 ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(rough / base));
  let step = base * power * ([1, 2, 2.5, 5].find((m) => m * power * base >= rough) ?? 10);
  if (unit === "step") step = Math.max(1, Math.round(step));
  if (round) step = round; else if (unit === "duration" && rough > DAY) step = DAY * Math.ceil(rough / DAY);
  const places = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) places.push(i * step);
  return places;
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Colours of the present scheme, by the name of their variable. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return { read, text: read("text"), dim: read("dim"), line: read("line"), band: read("band"), card: read("card"), focus: read("focus"),
    series: (i) => read(`s${i % 16}`) };
}

const FONT = "12px system-ui, 'DejaVu Sans', sans-serif";
const plots = new Set();
let pending = false;

/** Draws what has changed, once in a frame. */
function redraw(...changed) {
  for (const plot of changed) plot.stale = true;
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    for (const plot of plots) if (plot.stale && plot.visible) plot.draw();
  });
}

function redrawAll() { redraw(...plots); }

/** Draws everything at once in the colours of paper. */
function drawForPrint() { for (const plot of plots) { plot.visible = true; plot.draw(); } }

const seen = typeof IntersectionObserver === "undefined" ? null : new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const plot = entry.target.plot;
    plot.visible = entry.isIntersecting;
    if (plot.visible && plot.stale) redraw(plot);
  }
}, { rootMargin: "300px" });

const resized = new ResizeObserver((entries) => redraw(...entries.map((entry) => entry.target.plot)));

/** A canvas with a horizontal view, a pointer, and a keyboard. Subclasses say what is drawn and what is under the pointer. */
class Plot {
  constructor(height, label, group) {
    this.height = height;
    this.group = group;
    this.view = null;
    this.cursor = null;
    this.stale = true;
    this.visible = true;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.canvas.style.height = `${height}px`;
    this.canvas.plot = this;
    this.tip = element("div", { class: "tip", role: "status", "aria-live": "polite", hidden: "" });
    this.box = element("div", { class: "plot" }, this.canvas, this.tip);
    this.margin = { left: 66, right: 14, top: 24, bottom: 40 };
    // Pixels between the ends of the axis and the edges of the area, so that what is drawn at an end is not cut.
    this.inset = 0;
    this.listen();
    plots.add(this);
    resized.observe(this.canvas);
    if (seen) seen.observe(this.canvas);
  }

  /** Forgets a plot that is no longer on the page. */
  remove() {
    plots.delete(this);
    resized.unobserve(this.canvas);
    if (seen) seen.unobserve(this.canvas);
  }

  /** The whole horizontal axis. */
  extent() { return [0, 1]; }

  range() { return this.view ?? this.extent(); }

  /** Shows an interval of the axis here and on all plots of the group; null shows all of it. */
  show(view) {
    const same = this.group ? [...plots].filter((plot) => plot.group === this.group) : [this];
    for (const plot of same) {
      const [low, high] = plot.extent();
      if (view === null) { plot.view = null; continue; }
      const smallest = plot.smallest ?? (high - low) * 1e-6;
      let [from, to] = view;
      if (to - from < smallest) [from, to] = [(from + to - smallest) / 2, (from + to + smallest) / 2];
      plot.view = from <= low && to >= high ? null : [from, to];
    }
    redraw(...same);
  }

  zoom(factor, at) {
    const [from, to] = this.range();
    const [low, high] = this.extent();
    const middle = at ?? (from + to) / 2;
    this.show([Math.max(low, middle - (middle - from) * factor), Math.min(high, middle + (to - middle) * factor)]);
  }

  pan(share) {
    const [from, to] = this.range();
    const [low, high] = this.extent();
    const by = Math.max(low - from, Math.min(high - to, share * (to - from)));
    this.show([from + by, to + by]);
  }

  /** Pixels of the plot's area. */
  area() {
    const { left, right, top, bottom } = this.margin;
    const [width, height] = [this.canvas.clientWidth, this.height];
    return { left, top, right: Math.max(left + 10, width - right), bottom: height - bottom, width, height };
  }

  /** Maps the axis to pixels, for as long as neither the view nor the size changes. */
  mapper() {
    const [{ left, right }, [from, to]] = [this.area(), this.range()];
    const [first, last, begin] = [this.along(from), this.along(to), left + this.inset];
    const scale = (right - this.inset - begin) / (last - first || 1);
    return this.logarithmic ? (x) => begin + (this.along(x) - first) * scale : (x) => begin + (x - first) * scale;
  }

  toPixel(x) { return this.mapper()(x); }

  fromPixel(pixel) {
    const [{ left, right }, [from, to]] = [this.area(), this.range()];
    return this.back(this.along(from) + ((pixel - left - this.inset) / (right - left - 2 * this.inset)) * (this.along(to) - this.along(from)));
  }

  along(x) { return this.logarithmic ? Math.log(Math.max(x, 1e-300)) : x; }
  back(x) { return this.logarithmic ? Math.exp(x) : x; }

  /** A context in pixels of the page, cleared. */
  begin() {
    this.stale = false;
    const scale = Math.min(window.devicePixelRatio || 1, 3);
    const width = this.canvas.clientWidth;
    const [w, h] = [Math.round(width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.font = FONT;
    const [from, to] = this.range();
    this.canvas.dataset.range = `${from} ${to}`;
    return context;
  }

  showTip(x, y, title, lines) {
    this.tip.replaceChildren(element("b", {}, title));
    for (const { text, colour } of lines) {
      const mark = element("i", {}, colour ? "\n■ " : "\n");
      if (colour) mark.style.color = colour;
      this.tip.append(mark, text);
    }
    this.tip.hidden = false;
    const { width } = this.area();
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${x + 14 + wide > width ? Math.max(0, x - wide - 14) : x + 14}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y, this.height - this.tip.offsetHeight))}px`;
  }

  hideTip() {
    this.tip.hidden = true;
    if (this.cursor !== null) { this.cursor = null; redraw(this); }
  }

  listen() {
    const canvas = this.canvas;
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let begun = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      begun = { at: place(event), view: this.range(), pans: event.shiftKey };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (begun && begun.pans) {
        const [from, to] = begun.view;
        const { left, right } = this.area();
        const by = ((begun.at[0] - x) / (right - left)) * (to - from);
        const [low, high] = this.extent();
        const clipped = Math.max(low - from, Math.min(high - to, by));
        this.show([from + clipped, to + clipped]);
      } else if (begun && Math.abs(x - begun.at[0]) > 4) {
        this.selection = [begun.at[0], x];
        this.tip.hidden = true;
        redraw(this);
      } else {
        this.hover(x, y);
      }
    });
    canvas.addEventListener("pointerup", () => {
      if (this.selection) {
        const [a, b] = this.selection.map((pixel) => this.fromPixel(pixel));
        const [low, high] = this.extent();
        this.selection = null;
        this.show([Math.max(low, Math.min(a, b)), Math.min(high, Math.max(a, b))]);
      }
      begun = null;
    });
    canvas.addEventListener("pointercancel", () => { begun = null; this.selection = null; redraw(this); });
    canvas.addEventListener("pointerleave", () => { if (!begun) this.hideTip(); });
    canvas.addEventListener("dblclick", () => this.show(null));
    canvas.addEventListener("blur", () => this.hideTip());
    // The wheel alone scrolls the page.
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.fromPixel(place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const keys = {
        "+": () => this.zoom(0.5, this.cursorPlace()), "=": () => this.zoom(0.5, this.cursorPlace()), "-": () => this.zoom(2, this.cursorPlace()),
        0: () => this.show(null), Escape: () => { this.show(null); this.hideTip(); },
        ArrowLeft: () => (event.shiftKey ? this.pan(-0.2) : this.move(-1, 0)), ArrowRight: () => (event.shiftKey ? this.pan(0.2) : this.move(1, 0)),
        ArrowUp: () => this.move(0, -1), ArrowDown: () => this.move(0, 1), Home: () => this.move(-Infinity, 0), End: () => this.move(Infinity, 0),
      };
      const act = keys[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  cursorPlace() { return undefined; }

  drawSelection(context) {
    if (!this.selection) return;
    const { top, bottom } = this.area();
    context.fillStyle = colours().band;
    context.fillRect(Math.min(...this.selection), top, Math.abs(this.selection[1] - this.selection[0]), bottom - top);
  }

  /** Vertical grid lines with their values below, and the axis' label. */
  drawTime(context, colour, unit, label) {
    const { left, right, top, bottom } = this.area();
    const [from, to] = this.range();
    context.textAlign = "center";
    context.textBaseline = "top";
    let free = -Infinity;
    for (const place of ticks(from, to, Math.max(2, (right - left) / 110), unit, this.logarithmic)) {
      const x = this.toPixel(place);
      context.strokeStyle = colour.line;
      context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke();
      context.fillStyle = colour.dim;
      const text = onAxis(place, unit);
      const half = context.measureText(text).width / 2;
      const middle = Math.min(x, this.canvas.clientWidth - half - 1);
      if (middle - half < free) continue;
      free = middle + half + 8;
      context.fillText(text, middle, bottom + 6);
    }
    context.fillStyle = colour.dim;
    context.fillText(label, (left + right) / 2, bottom + 23);
  }
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
window.addEventListener("beforeprint", drawForPrint);
window.addEventListener("afterprint", redrawAll);
window.matchMedia("print").addEventListener("change", drawForPrint);
