// How the pages behave for a reader, at the width of a desktop and of a phone: values with their own steps, points and names that
// are whole, tables that scroll in their frames, smoothing, and the choice of the axis. What is drawn is recorded at the canvas.
"use strict";
const assert = require("node:assert");

const WIDTHS = { desktop: 1280, phone: 390 };

/** Runs in the page before its script: notes the texts, circles and clips of every drawing. */
function record() {
  const drawing = CanvasRenderingContext2D.prototype;
  const wrap = (name, note) => {
    const original = drawing[name];
    drawing[name] = function (...args) { note(this, ...args); return original.apply(this, args); };
  };
  wrap("clearRect", ({ canvas }) => { canvas.drawn = { texts: [], arcs: [], clips: [] }; });
  wrap("rect", ({ canvas }, x, y, width, height) => canvas.drawn?.clips.push({ left: x, top: y, right: x + width, bottom: y + height }));
  wrap("arc", (context, x, y, radius) => context.canvas.drawn?.arcs.push({ x, y, radius }));
  wrap("fillText", (context, text, x, y) => {
    const { width, fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = context.measureText(text);
    const left = x - { left: 0, center: width / 2, right: width }[context.textAlign];
    const scale = window.devicePixelRatio;
    // The box of a font is higher than its letters.
    const [above, below] = [0.8 * up, 0.8 * down];
    const corners = [[left, y - above], [left + width, y - above], [left + width, y + below], [left, y + below]];
    const placed = corners.map(([cx, cy]) => { const point = context.getTransform().transformPoint(new DOMPoint(cx, cy)); return [point.x / scale, point.y / scale]; });
    context.canvas.drawn?.texts.push({ text, corners: placed });
  });
}

/** Whether two convex shapes have a point in common: no edge of either has all of the other on its far side. */
function touch(a, b) {
  for (const shape of [a, b]) {
    for (let i = 0; i < shape.length; i += 1) {
      const [[x1, y1], [x2, y2]] = [shape[i], shape[(i + 1) % shape.length]];
      const along = (points) => points.map(([x, y]) => (x - x1) * (y2 - y1) - (y - y1) * (x2 - x1));
      const [own, other] = [along(a), along(b)];
      if (Math.max(...own) < Math.min(...other) || Math.max(...other) < Math.min(...own)) return false;
    }
  }
  return true;
}

/** The first chart with a title that begins so, in view. */
async function chart(page, title) {
  const figure = page.locator("figure", { has: page.locator("h3", { hasText: new RegExp(`^${title}`) }) }).first();
  const canvas = figure.locator("canvas");
  await canvas.scrollIntoViewIfNeeded();
  await page.waitForTimeout(80);
  return { figure, canvas, tip: figure.locator(".tip"), drawn: () => canvas.evaluate((node) => node.drawn), data: () => canvas.evaluate((node) => node.plot.data) };
}

/** Hovers over a place of the axis. */
async function hover(page, { canvas }, x) {
  const [box, at] = [await canvas.boundingBox(), await canvas.evaluate((node, place) => node.plot.toPixel(place), x)];
  await page.mouse.move(box.x + at, box.y + 60);
  await page.waitForTimeout(50);
}

/** Every value of a tip is that of the step in its title, or says of which step it is. */
async function tips(page) {
  const loss = await chart(page, "Loss");
  const { series } = await loss.data();
  let [elsewhere, left] = [0, 0];
  for (const step of [1, 5, 10, 11, 15, 20, 25, 31, 35, 40]) {
    await hover(page, loss, step);
    const [title, ...lines] = (await loss.tip.innerText()).split("\n");
    assert.strictEqual(title, `step ${step}`);
    const values = lines.map((line) => line.match(/^■ (.*): ([\d.]+)(?: \(at step (\d+)\))?$/)).filter((match) => match);
    for (const [line, name, value, own] of values) {
      const found = series.find((one) => one.name === name);
      const i = found.x.indexOf(Number(own ?? step));
      assert(i >= 0 && Math.abs(found.y[i] - Number(value)) < 0.01, `at step ${step} the tip says ${line}`);
      elsewhere += own ? 1 : 0;
    }
    left += series.length - values.length;
  }
  assert(elsewhere > 0 && left > 0, "a value near the cursor has its own step, and one that is far away is left out");
}

/** The first and the last point, and the marks, are inside of the area that is drawn. */
async function whole(page) {
  const loss = await chart(page, "Loss");
  const { texts, arcs, clips: [clip] } = await loss.drawn();
  const inside = (x, what) => assert(x >= clip.left && x <= clip.right, `${what} is cut at ${x}: the area is from ${clip.left} to ${clip.right}`);
  assert(arcs.length > 10, "the points of a short run are drawn");
  for (const { x, radius } of arcs) { inside(x - radius, "a point"); inside(x + radius, "a point"); }
  const marks = texts.filter(({ text }) => "◆×".includes(text));
  assert(marks.length > 0, "checkpoints are marked");
  for (const { corners } of marks) for (const [x] of corners) inside(x, "a mark");
}

/** No text of a chart touches another, and none is shortened. */
async function names(page) {
  for (const canvas of await page.locator("figure:not(.wide) canvas").all()) {
    await canvas.scrollIntoViewIfNeeded();
    await page.waitForTimeout(60);
    const { texts, title } = await canvas.evaluate((node) => ({ ...node.drawn, title: node.plot.data.title }));
    const fixed = texts.filter(({ text }) => !"◆×".includes(text) && text !== "the pick");
    for (const { text } of fixed) assert(!text.endsWith("…"), `${title}: "${text}" is shortened`);
    fixed.forEach((a, i) => fixed.slice(i + 1).forEach((b) => assert(!touch(a.corners, b.corners), `${title}: "${a.text}" touches "${b.text}"`)));
  }
}

/** The page is no wider than the window, and why a strategy is not first can be read wherever the table is scrolled to. */
async function frames(page, reasons) {
  const [wide, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert(wide <= window, `the page is ${wide} pixels wide in a window of ${window}`);
  const found = await page.evaluate(() => [...document.querySelectorAll(".scroll")].filter((frame) => frame.querySelector(".reason")).map((frame) => {
    const outer = frame.getBoundingClientRect();
    return [0, frame.scrollWidth].map((left) => {
      frame.scrollLeft = left;
      return [...frame.querySelectorAll(".reason p")].map((node) => {
        const box = node.getBoundingClientRect();
        return { text: node.textContent, wide: box.width, inside: box.left >= outer.left - 1 && box.right <= outer.right + 1 };
      });
    });
  }));
  assert.strictEqual(found.length > 0, reasons);
  for (const { text, wide: width, inside } of found.flat(2)) assert(text.length > 0 && inside && width >= 240, `the reason "${text}" cannot be read: ${width} pixels, inside: ${inside}`);
}

/** Smoothing is off at first; then the curve is fitted around each step, and the tip has both values. */
async function smoothing(page) {
  const loss = await chart(page, "Loss");
  const raw = async () => (await loss.data()).series[0];
  assert(!(await raw()).smooth && (await page.textContent("#controls output")) === "off");
  await page.locator("#smoothing").fill("2");
  await page.waitForTimeout(80);
  assert.strictEqual(await page.textContent("#controls output"), "over 5 steps");
  const { x, y, smooth } = await raw();
  for (const at of [0, 7, x.length - 1]) {
    // Weighted least squares by its definition.
    const sum = (term) => x.reduce((total, step, i) => total + Math.exp(-Math.abs(step - x[at]) / 5) * term(step - x[at], y[i]), 0);
    const [one, d, dd, v, dv] = [sum(() => 1), sum((far) => far), sum((far) => far * far), sum((_, value) => value), sum((far, value) => far * value)];
    const fitted = (dd * v - d * dv) / (one * dd - d * d);
    assert(Math.abs(smooth.y[at] - fitted) < 1e-9, `${smooth.y[at]} is not the fitted ${fitted} at step ${x[at]}`);
  }
  const variation = (values) => values.slice(1).reduce((sum, value, i) => sum + Math.abs(value - values[i]), 0);
  assert(variation(smooth.y) < variation(y), "the smooth curve varies less");
  await hover(page, loss, x[10]);
  assert.match(await loss.tip.innerText(), /training loss: [\d.]+, smooth [\d.]+/);
  const rate = await chart(page, "Learning rate");
  assert(!(await rate.data()).series[0].smooth, "the learning rate has no noise");
}

/** The axis is steps, tokens or wall time, on all charts over steps. */
async function axes(page, tokensPerStep) {
  const loss = await chart(page, "Loss");
  const { series: [{ x: steps }] } = await loss.data();
  const last = async () => (await loss.data()).series[0].x.at(-1);
  const labelled = async (label) => assert((await loss.drawn()).texts.some(({ text }) => text === label), `the axis is not called ${label}`);
  await page.click("[data-axis=tokens]");
  await page.waitForTimeout(80);
  assert.strictEqual(await last(), steps.at(-1) * tokensPerStep);
  await labelled("tokens");
  await page.click("[data-axis=seconds]");
  await page.waitForTimeout(80);
  assert((await last()) > 0 && (await last()) < 600, `the run took ${await last()} s`);
  await labelled("wall time since the run began");
  const norm = await chart(page, "Gradient norm");
  assert.strictEqual((await norm.data()).series[0].x.at(-1), await last(), "all charts have the same axis");
  await page.click("[data-axis=step]");
  await page.waitForTimeout(80);
  assert.strictEqual(await last(), steps.at(-1));
}

/** The pick has a ring and its name, around one of the points; the axis of time says that it is logarithmic. */
async function pick(page) {
  const memory = await chart(page, "Time and memory");
  const { texts, arcs } = await memory.drawn();
  for (const text of ["the pick", "time of a step (logarithmic)"]) assert(texts.some((one) => one.text === text), `the chart does not say "${text}"`);
  const ring = arcs.find(({ radius }) => radius === 7);
  const place = await memory.canvas.evaluate((node) => { const { x: [x], y: [y] } = node.plot.data.series.find(({ style }) => style === "ring"); return { x: node.plot.toPixel(x), y: node.plot.toY(y) }; });
  assert(ring && Math.abs(ring.x - place.x) < 1 && Math.abs(ring.y - place.y) < 1, "the ring is not at the pick");
}

/** Many runs are rows; legends stay small, and a run that is hidden is hidden on every chart. */
async function manyRuns(page, count) {
  assert.strictEqual(await page.locator("tbody").first().locator("button.run").count(), count);
  const loss = await chart(page, "Loss");
  assert((await loss.figure.locator(".legend").boundingBox()).height <= 110, "a legend that is higher than the chart");
  const shown = async (title) => (await chart(page, title)).canvas.evaluate((node) => node.plot.shown().length);
  const before = [await shown("Loss"), await shown("Learning rate")];
  await page.locator("tbody").first().locator("button.run").nth(3).click();
  const after = [await shown("Loss"), await shown("Learning rate")];
  assert.deepStrictEqual(after, [before[0] - 2, before[1] - 1], "its loss, its validation loss and its learning rate are hidden");
  assert.strictEqual(await loss.figure.locator("button.run[aria-pressed=false]").count(), 1);
}

module.exports = { WIDTHS, record, tips, whole, names, frames, smoothing, axes, pick, manyRuns };
