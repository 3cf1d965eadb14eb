// What a reader chooses for all charts over steps: the horizontal axis, how much noisy curves are smoothed, and which runs are
// shown. Series have steps; the report says where the steps of each run are in tokens and in time.

const AXES = {
  step: { label: "step", unit: "step", button: "steps" },
  tokens: { label: "tokens", unit: "count", button: "tokens" },
  seconds: { label: "wall time since the run began", unit: "duration", button: "wall time" },
};
const choice = { axis: "step", smoothing: 0, hidden: new Set(), marked: null };
let runs = [];

/** The place of a run's step on the chosen axis, between the steps that the report has. */
function placeOfStep(run, step) {
  const places = choice.axis === "step" ? null : runs[run]?.[choice.axis];
  if (!places) return step;
  const steps = runs[run].step;
  const i = nearest(steps, step);
  const other = Math.max(0, Math.min(steps.length - 1, i + Math.sign(step - steps[i])));
  return other === i ? places[i] : places[i] + ((places[other] - places[i]) * (step - steps[i])) / (steps[other] - steps[i]);
}

/** A smooth curve: at each step the value of a line that is fitted to the points around it, which weigh exp(−distance / window).
    A mean would lag behind a curve that falls, and be wrong at its ends. A gap stays a gap. */
function smoothCurve(steps, values, window) {
  // Weighted sums at each point of 1, d, d², y and d·y, where d is the distance to another point in windows.
  const sums = values.map((value) => [1, 0, 0, value, 0]);
  const add = (order, sign) => {
    let [one, d, dd, y, dy, last] = [0, 0, 0, 0, 0, null];
    for (const i of order) {
      if (values[i] === null) continue;
      const moved = last === null ? 0 : Math.abs(steps[i] - steps[last]) / window;
      const decay = Math.exp(-moved);
      [dd, dy] = [decay * (dd + 2 * moved * d + moved * moved * one), decay * (dy + moved * y)];
      [d, one, y, last] = [decay * (d + moved * one), decay * one, decay * y, i];
      [one, sign * d, dd, y, sign * dy].forEach((sum, k) => { sums[i][k] += sum; });
      [one, y] = [one + 1, y + values[i]];
    }
  };
  const order = [...values.keys()];
  add(order, -1);
  add(order.reverse(), 1);
  return sums.map(([one, d, dd, y, dy], i) => {
    if (values[i] === null) return null;
    const spread = one * dd - d * d;
    return spread > 1e-9 * one * one ? (dd * y - d * dy) / spread : y / one;
  });
}

/** A series on the chosen axis, with its smooth curve if one is wanted. */
function onChosenAxis(series) {
  if (series.run === null) return { ...series, steps: series.x };
  const place = (step) => placeOfStep(series.run, step);
  const [steps, values] = series.means.x.length > 0 ? [series.means.x, series.means.y] : [series.x, series.y];
  const smooth = choice.smoothing > 0 && series.noisy && { x: steps.map(place), y: smoothCurve(steps, values, choice.smoothing) };
  return { ...series, steps: series.x, x: series.x.map(place), smooth };
}

/** Applies what was chosen to every chart. */
function applyChoice() {
  for (const plot of plots) if (plot instanceof Chart) plot.arrange();
}

function toggleRun(name) {
  if (!choice.hidden.delete(name)) choice.hidden.add(name);
  for (const button of document.querySelectorAll("button.run")) button.setAttribute("aria-pressed", String(!choice.hidden.has(button.title)));
  redrawAll();
}

/** A run's name without the long beginning that all names share, which would be all that there is room for. */
function shortName(name) {
  let shared = 0;
  while (runs.every((run) => run.name.length > shared && run.name[shared] === name[shared])) shared += 1;
  const cut = name.slice(0, Math.max(0, shared - 8)).search(/[^-_/. ]*$/);
  return runs.length > 1 && cut >= 8 ? `…${name.slice(cut)}` : name;
}

/** A button that shows and hides a run on all charts; while the pointer is on it, other runs are faint. */
function runButton(run) {
  const { name } = runs[run];
  const swatch = element("span", { class: "swatch" });
  swatch.style.background = `var(--s${run % 16})`;
  const button = element("button", { type: "button", class: "run", title: name, "aria-pressed": String(!choice.hidden.has(name)) }, swatch, shortName(name));
  const mark = (marked) => { choice.marked = marked; redrawAll(); };
  button.addEventListener("click", () => toggleRun(name));
  for (const [event, marked] of [["pointerenter", run], ["focus", run], ["pointerleave", null], ["blur", null]]) button.addEventListener(event, () => mark(marked));
  return button;
}

/** Windows of smoothing that make sense for runs of so many steps; the first is none. */
function windows(steps) {
  const all = [0];
  for (let power = 1; power <= steps; power *= 10) all.push(...[1, 2, 5].map((factor) => factor * power).filter((window) => window > 1 && window <= steps / 4));
  return all;
}

/** The bar with the choices, if the page has charts over steps. */
function showControls(report) {
  const bar = document.getElementById("controls");
  const charts = report.sections.flatMap((section) => section.items).filter((item) => item.type === "chart" && item.x.unit === "step");
  const axes = Object.keys(AXES).filter((axis) => axis === "step" || runs.every((run) => run[axis].length > 0));
  const sizes = windows(Math.max(0, ...runs.map((run) => run.step.at(-1) ?? 0)));
  const key = JSON.stringify([axes, sizes]);
  bar.hidden = charts.length === 0;
  // A control that somebody is about to use stays.
  if (bar.hidden || key === bar.dataset.key) return;
  bar.dataset.key = key;
  if (!axes.includes(choice.axis)) choice.axis = "step";
  const buttons = axes.map((axis) => element("button", { type: "button", "data-axis": axis, "aria-pressed": String(axis === choice.axis) }, AXES[axis].button));
  for (const button of buttons) {
    button.addEventListener("click", () => {
      choice.axis = button.dataset.axis;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      applyChoice();
    });
  }
  const range = element("input", { type: "range", id: "smoothing", min: "0", max: String(sizes.length - 1), value: String(Math.max(0, sizes.indexOf(choice.smoothing))) });
  const said = element("output", { for: "smoothing" });
  const smooth = () => {
    choice.smoothing = sizes[range.value];
    said.textContent = choice.smoothing === 0 ? "off" : `over ${withUnit(choice.smoothing, "step")} steps`;
    range.setAttribute("aria-valuetext", said.textContent);
    applyChoice();
  };
  range.addEventListener("input", smooth);
  bar.replaceChildren(element("span", { class: "group", role: "group", "aria-label": "horizontal axis" }, element("span", { class: "dim" }, "x axis"), ...buttons),
    element("span", { class: "group", ...(sizes.length === 1 ? { hidden: "" } : {}) }, element("label", { class: "dim", for: "smoothing" }, "smoothing"), range, said));
  smooth();
}
