// Builds the page from its data: sections of charts, timelines, tables and texts. All text is set as text, never as HTML.
// A live page gets its data from the server, as events; charts that stay keep their view.

const shownItems = new Map();

/** A table in a frame that it scrolls in. The last column of a wide one is a sentence: it gets a line of its own, which stays in view. */
function table(data) {
  const numeric = data.header.map((_, column) => column > 0 && data.rows.every((row) => !row[column] || /^[-+–\d]/.test(row[column])));
  const last = data.header.length - 1;
  const apart = last > 8 && !numeric[last] && !data.of_runs ? last : Infinity;
  const kind = (text, column) => (numeric[column] ? { class: "number" } : text.length > 60 ? { class: "sentence" } : {});
  const name = (text, row) => (data.of_runs ? runButton(row) : text);
  const cell = (text, column, row) => (column === 0 ? element("th", { scope: "row" }, name(text, row)) : element("td", kind(text, column), text));
  const named = data.header.slice(0, apart).map((title, column) => element("th", { scope: "col", ...(numeric[column] ? { class: "number" } : {}) }, title));
  const rows = data.rows.flatMap((row, i) => {
    const cells = element("tr", apart < Infinity ? { class: "first" } : {}, ...row.slice(0, apart).map((text, column) => cell(text, column, i)));
    if (apart === Infinity) return [cells];
    return [cells, element("tr", { class: "reason" }, element("td", { colspan: String(apart) }, element("p", {}, row[apart])))];
  });
  const kindOf = data.header.length <= 2 ? { class: "facts" } : {};
  return element("div", { class: "card wide" }, element("h3", {}, data.title), element("p", { class: "dim" }, data.question),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": data.title || data.question },
      element("table", kindOf, element("thead", {}, element("tr", {}, ...named)), element("tbody", {}, ...rows))));
}

function text(data) {
  return element("details", { class: "card wide" }, element("summary", {}, data.title), element("pre", {}, data.text));
}

/** The node of an item; a chart or timeline that is already on the page is updated. */
function itemNode(key, item) {
  const known = shownItems.get(key);
  if (item.type === "chart" || item.type === "timeline") {
    const kept = known && (item.type === "chart" || known.data.rows.length === item.rows.length) ? known : null;
    if (kept) { kept.used = true; kept.update(item); return kept.figure; }
    if (known) known.remove();
    const plot = item.type === "chart" ? new Chart(item) : new TimelinePlot(item);
    plot.used = true;
    shownItems.set(key, plot);
    return plot.figure;
  }
  return item.type === "table" ? table(item) : text(item);
}

function showReport(report) {
  document.title = report.title;
  document.getElementById("title").textContent = report.title;
  document.getElementById("subtitle").textContent = report.subtitle;
  runs = report.runs;
  showControls(report);
  for (const plot of shownItems.values()) plot.used = false;
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  const notes = report.notes.map((note) => element("p", { class: "note" }, note));
  const sections = report.sections.map((section) => {
    const items = section.items.map((item) => itemNode(`${section.title}\n${item.title}`, item));
    return element("section", {}, element("h2", {}, section.title), element("div", { class: "grid" }, ...items));
  });
  const focused = document.activeElement;
  const frames = () => document.querySelectorAll(".scroll");
  const scrolled = [...frames()].map((frame) => [frame.scrollLeft, frame.scrollTop]);
  document.getElementById("report").replaceChildren(...notes, ...sections);
  [...frames()].forEach((frame, i) => { [frame.scrollLeft, frame.scrollTop] = scrolled[i] ?? [0, 0]; });
  if (!document.querySelector("button.run:is(:hover, :focus)")) choice.marked = null;
  for (const details of document.querySelectorAll("details")) if (open.has(details.firstChild.textContent)) details.open = true;
  if (focused instanceof HTMLElement && focused.isConnected) focused.focus({ preventScroll: true });
  for (const [key, plot] of shownItems) if (!plot.used) { plot.remove(); shownItems.delete(key); }
  document.body.dataset.ready = "true";
}

function chosenRuns() { return new URLSearchParams(location.hash.slice(1)).getAll("run"); }

/** The list of a folder's runs, each with a box that shows it. */
function showRuns(listed) {
  const list = document.getElementById("runs");
  const chosen = new Set(chosenRuns());
  if (chosen.size === 0 && listed.length > 0) chosen.add(listed[0].name);
  const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
  list.replaceChildren(...listed.map((run) => {
    const box = element("input", { type: "checkbox", value: run.name });
    box.checked = chosen.has(run.name);
    box.addEventListener("change", choose);
    return element("label", {}, box, element("span", {}, run.name), element("span", { class: `state-${run.state}` }, run.state),
      element("span", {}, run.step === null ? "–" : `step ${withUnit(run.step, "step")}`), element("span", {}, run.loss === null ? "–" : `loss ${digits(run.loss)}`),
      element("span", {}, withUnit(run.tokens_per_s, "rate")));
  }));
  if (focused !== null) [...list.querySelectorAll("input")].find((box) => box.value === focused)?.focus({ preventScroll: true });
}

function choose() {
  const names = [...document.querySelectorAll("#runs input:checked")].map((box) => ["run", box.value]);
  history.replaceState(null, "", `${location.pathname}#${new URLSearchParams(names)}`);
  connect();
}

let source = null;

function connect() {
  if (source) source.close();
  const query = new URLSearchParams(chosenRuns().map((name) => ["run", name]));
  source = new EventSource(`events?${query}`);
  const state = document.getElementById("state");
  source.onopen = () => { state.textContent = "live"; document.body.dataset.connected = "true"; };
  // A browser gives up on a server that answers with an error, as one that was started again does: it has another token.
  const refused = "the server refuses this page; open the address that kintsugi watch printed";
  source.onerror = (event) => {
    state.textContent = event.target.readyState === EventSource.CLOSED ? refused : "the server does not answer; trying again";
    document.body.dataset.connected = "false";
  };
  source.addEventListener("runs", (event) => showRuns(JSON.parse(event.data)));
  source.addEventListener("report", (event) => showReport(JSON.parse(event.data)));
}

if (document.body.dataset.live) {
  window.addEventListener("hashchange", connect);
  connect();
} else {
  showReport(JSON.parse(document.getElementById("data").textContent));
}
