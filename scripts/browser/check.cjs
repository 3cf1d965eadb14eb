// Drives the pages in a real browser. Usage: node check.cjs FOLDER, with CHROMIUM and KINTSUGI in the environment.
"use strict";
const assert = require("node:assert");
const { execFileSync, spawn } = require("node:child_process");
const fs = require("node:fs");
const path = require("node:path");
const { chromium } = require("playwright-core");
const behaviour = require("./behaviour.cjs");

const folder = path.resolve(process.argv[2]);
const work = path.join(folder, "work");
const hostile = "</script><script>document.title='broken'</script><img src=x onerror=document.title='broken'>";

fs.rmSync(work, { recursive: true, force: true });
fs.mkdirSync(work, { recursive: true });

const tiny = ["model.layers=2", "model.hidden=32", "model.heads=2", "batch.sequence=16", "batch.micro=1", "batch.global=4"];
const set = (...values) => values.flatMap((value) => ["--set", value]);

function kintsugi(...args) {
  return execFileSync(process.env.KINTSUGI, args, { cwd: work, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
}

/** A run of many steps, as files. */
function synthetic(name, steps, spans) {
  const out = path.join(work, name);
  fs.mkdirSync(out, { recursive: true });
  const lines = [];
  for (let step = 1; step <= steps; step += 1) {
    const noise = Math.sin(step * 12.9898) * 0.05;
    lines.push(JSON.stringify({
      schema: 1, time: 1.8e9 + step * 0.4, step, loss: step === 777 ? 25 : 2 + 8 / Math.sqrt(step) + noise, grad_norm: 1 + noise, lr: 3e-4 * Math.min(1, step / 2000),
      tokens: step * 4096, tokens_per_s: 10000 + 900 * noise, step_s: 0.41 + noise / 10, mfu: 0.4 + noise, loss_scale: 1, skipped: step % 25013 === 0, energy_j: 120 + noise,
      ...(step % Math.ceil(steps / 20) === 0 ? { checkpoint_s: 0.01, validation_loss: 2.2 + 8 / Math.sqrt(step) } : {}), samples: step * 4,
    }));
  }
  fs.writeFileSync(path.join(out, "metrics.jsonl"), `${lines.join("\n")}\n`);
  const events = [];
  for (let i = 0; i < spans; i += 1) {
    const rank = i % 8;
    events.push({ ph: "X", name: `forward layer ${i % 4}, micro-batch ${i >> 3}`, cat: "compute", pid: rank, tid: 0, ts: (i >> 3) * 1000, dur: 900,
      args: { stage: rank >> 1, kind: i % 3 === 0 ? "backward" : "forward", micro: i >> 3, flops: 1e9, bytes: 4096 } });
  }
  if (spans > 0) fs.writeFileSync(path.join(out, "trace.json"), JSON.stringify({ displayTimeUnit: "ms", traceEvents: events }));
}

/** A page that fails the check if it prints an error or asks for anything beyond what it may. */
async function open(browser, url, scheme = "light", width = 1360) {
  const page = await browser.newPage({ colorScheme: scheme, viewport: { width, height: 900 } });
  await page.addInitScript(behaviour.record);
  page.problems = [];
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) page.problems.push(message.text()); });
  page.on("pageerror", (error) => page.problems.push(String(error)));
  page.on("request", (request) => { if (!request.url().startsWith(new URL(url).origin === "null" ? "file:" : new URL(url).origin)) page.problems.push(`asks for ${request.url()}`); });
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.ready === "true");
  return page;
}

/** Every chart and timeline has points, pixels, a tip on hovering, and zooms by mouse and by keyboard. */
async function exercise(page) {
  const canvases = await page.locator("canvas").all();
  assert(canvases.length > 0, "a page without charts");
  for (const canvas of canvases) {
    await canvas.scrollIntoViewIfNeeded();
    await page.waitForTimeout(60);
    const label = await canvas.getAttribute("aria-label");
    const points = Number(await canvas.getAttribute("data-points"));
    assert(points > 0, `${label}: no points`);
    const painted = await canvas.evaluate((node) => node.getContext("2d").getImageData(0, 0, node.width, node.height).data.some((value, i) => i % 4 === 3 && value > 0));
    assert(painted, `${label}: nothing is drawn`);
    const box = await canvas.boundingBox();
    const tip = canvas.locator("xpath=../div[contains(@class, 'tip')]");
    let shown = false;
    for (const [fx, fy] of [[0.5, 0.5], [0.3, 0.3], [0.2, 0.15], [0.7, 0.7], [0.12, 0.8], [0.15, 0.6], [0.9, 0.5]]) {
      await page.mouse.move(box.x + box.width * fx, box.y + box.height * fy);
      await page.waitForTimeout(20);
      shown ||= await tip.isVisible();
      if (shown) break;
    }
    const scattered = /Time and (memory|energy)/.test(label);
    assert(shown || scattered, `${label}: no tip on hovering`);
    const whole = await canvas.getAttribute("data-range");
    const zoomed = async (what) => {
      await page.waitForTimeout(60);
      const now = await canvas.getAttribute("data-range");
      assert.notStrictEqual(now, whole, `${label}: ${what} does not zoom`);
    };
    const reset = async () => {
      await canvas.focus();
      await page.keyboard.press("0");
      await page.waitForTimeout(60);
      assert.strictEqual(await canvas.getAttribute("data-range"), whole, `${label}: 0 does not show the whole range`);
    };
    await page.mouse.move(box.x + box.width * 0.4, box.y + box.height * 0.4);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.6, box.y + box.height * 0.4, { steps: 4 });
    await page.mouse.up();
    await zoomed("dragging");
    await reset();
    await canvas.focus();
    await page.keyboard.press("ArrowRight");
    await page.waitForTimeout(30);
    assert(await tip.isVisible(), `${label}: no tip by keyboard`);
    await page.keyboard.press("+");
    await zoomed("+");
    await page.keyboard.press("Shift+ArrowRight");
    await reset();
  }
  assert.deepStrictEqual(page.problems, [], "problems of the page");
  return canvases.length;
}

async function waitFor(what, check, seconds = 30) {
  const end = Date.now() + seconds * 1000;
  while (Date.now() < end) {
    if (await check()) return;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  assert.fail(`${what} has not come within ${seconds} s`);
}

async function files(browser) {
  kintsugi("train", ...set(...tiny, "run.steps=40", "run.eval_every=10", "run.checkpoint_every=20", "run.out=a"), "--trace", "a/trace.json");
  kintsugi("train", ...set(...tiny, "run.steps=30", "run.eval_every=10", `run.out="${hostile.replaceAll("/", "_")}"`, "optimizer.lr=1e-3"));
  kintsugi("report", "a", "--out", "run.html");
  kintsugi("report", "a", hostile.replaceAll("/", "_"), "--out", "runs.html");
  kintsugi("report", "--set", "model.layers=8", "--set", "parallel.pp=4", "--set", "cluster.preset=h200", "--out", "plan.html");
  kintsugi("report", "--search", "--set", "cluster.preset=h200", "--out", "search.html");
  const many = [...Array(12).keys()].map((i) => `experiment-with-a-long-name-${i}`);
  for (const name of many) synthetic(name, 60, 0);
  kintsugi("report", ...many, "--out", "many.html");
  // Three levels of links, each with several operations.
  kintsugi("report", ...set("cluster.preset=frontier", "cluster.nodes=4", "model.layers=8", "parallel.tp=1", "parallel.pp=2", "parallel.dp=16", "batch.micro=1", "batch.global=64",
    "sharding.weights=package", "sharding.gradients=node", "sharding.states=cluster"), "--out", "traffic.html");
  for (const name of ["run", "runs", "many", "plan", "traffic", "search"]) {
    for (const [scheme, device] of [["light", "desktop"], ["dark", "desktop"], ["light", "phone"], ["dark", "phone"]]) {
      const page = await open(browser, `file://${work}/${name}.html`, scheme, behaviour.WIDTHS[device]);
      await behaviour.frames(page, name === "search");
      await behaviour.names(page);
      if (scheme === "light" && device === "desktop") console.log(`${name}: ${await exercise(page)} charts`);
      assert(!(await page.title()).includes("broken"), "a name ran as a script");
      await page.evaluate(() => window.scrollTo(0, 0));
      await page.mouse.move(2, 2);
      await page.waitForTimeout(100);
      await page.screenshot({ path: path.join(folder, `${name}-${scheme}-${device}.png`), fullPage: true });
      await page.close();
    }
  }
  const check = async (name, ...checks) => {
    const page = await open(browser, `file://${work}/${name}.html`);
    for (const one of checks) await one(page);
    assert.deepStrictEqual(page.problems, []);
    await page.close();
  };
  await check("run", behaviour.whole, behaviour.smoothing, (page) => behaviour.axes(page, 64));
  await check("search", behaviour.pick);
  await check("many", (page) => behaviour.manyRuns(page, many.length));
  await check("runs", behaviour.whole, behaviour.tips, async (page) => {
    assert((await page.textContent("#report")).includes("<script>"), "the hostile name is shown as text");
  });
}

async function large(browser) {
  synthetic("large", 100000, 2000);
  kintsugi("report", "large", "--out", "large.html");
  const page = await open(browser, `file://${work}/large.html`);
  const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime);
  const frames = await page.evaluate(async () => {
    const canvas = document.querySelector("canvas");
    canvas.scrollIntoView();
    canvas.focus();
    const times = [];
    let last = performance.now();
    for (let i = 0; i < 40; i += 1) {
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key: i % 8 < 4 ? "+" : "-" }));
      await new Promise(requestAnimationFrame);
      times.push(performance.now() - last);
      last = performance.now();
    }
    return times.sort((a, b) => a - b);
  });
  const size = fs.statSync(path.join(work, "large.html")).size;
  console.log(`100,000 steps and 2,000 spans: ${(size / 1e6).toFixed(2)} MB, first paint after ${Math.round(paint)} ms, frames while zooming `
    + `${frames[20].toFixed(0)} ms (median), ${frames[39].toFixed(0)} ms (longest)`);
  assert((await page.textContent("body")).length > 0);
  assert.deepStrictEqual(page.problems, []);
  await page.close();
}

/** Starts `kintsugi watch` and waits for its address. */
async function watch(...args) {
  const server = spawn(process.env.KINTSUGI, ["watch", ...args], { cwd: work, stdio: ["ignore", "pipe", "inherit"] });
  let said = "";
  server.stdout.on("data", (data) => { said += data; });
  await waitFor("the address", () => /http:\S+/.test(said));
  return { server, url: said.match(/http:\S+/)[0] };
}

async function live(browser) {
  fs.mkdirSync(path.join(work, "runs"));
  for (let i = 0; i < 50; i += 1) synthetic(`runs/old-${String(i).padStart(2, "0")}`, 20, 0);
  const settings = set(...tiny, "run.steps=100000", "run.eval_every=0", "run.checkpoint_every=20", "run.out=runs/now");
  const start = (...more) => spawn(process.env.KINTSUGI, ["train", ...settings, ...more], { cwd: work, stdio: "ignore" });
  let run = start();
  const { server, url } = await watch("runs", "--port", "0");
  try {
    const metrics = path.join(work, "runs/now/metrics.jsonl");
    await waitFor("the first steps", () => fs.existsSync(metrics) && fs.readFileSync(metrics, "utf8").split("\n").length > 25);
    const page = await open(browser, `${url}#run=now`);
    const second = await open(browser, `${url}#run=now&run=old-07`);
    const last = async (from) => Number(((await from.textContent("#runs label:has(input[value=now])")).match(/step ([\d,]+)/)?.[1] ?? "0").replaceAll(",", ""));
    assert.strictEqual(await page.locator("#runs label").count(), 51);
    assert.strictEqual(new URL(page.url()).search, "", "the token stays in the address");
    await waitFor("a later step", async () => (await last(page)) > 25);
    const before = await last(page);
    await waitFor("a step after that", async () => (await last(page)) > before);
    run.kill("SIGKILL");
    await new Promise((resolve) => run.once("exit", resolve));
    fs.appendFileSync(metrics, "{\"step\": 12");
    await page.waitForTimeout(2500);
    const stopped = await last(page);
    run = start("--resume");
    await waitFor("a step of the resumed run", async () => (await last(page)) > stopped, 60);
    await waitFor("the second client", async () => (await last(second)) > stopped);
    assert((await second.textContent("h1")).includes("2 runs"));
    await page.locator("#runs input[value='old-03']").check();
    await waitFor("the second run of the page", async () => (await page.textContent("h1")).includes("2 runs"));
    await page.screenshot({ path: path.join(folder, "watch-light.png") });
    assert.deepStrictEqual(page.problems, []);
    await page.close();
    await second.close();
    console.log(`watch: 51 runs, killed after step ${stopped} and resumed, two clients`);
  } finally {
    run.kill("SIGKILL");
    server.kill();
  }
  const open_ = await watch("runs", "--port", "0", "--address", "0.0.0.0");
  try {
    const right = new URL(open_.url);
    right.hostname = "127.0.0.1";
    const wrong = new URL(right);
    wrong.searchParams.set("token", "0".repeat(32));
    const answer = await fetch(right, { redirect: "manual" });
    assert.strictEqual(answer.status, 303);
    const cookie = answer.headers.get("set-cookie").split(";")[0];
    assert.strictEqual((await fetch(new URL("/", right), { headers: { cookie } })).status, 200);
    for (const refused of [wrong, new URL("/", right), new URL("/events", right)]) assert.strictEqual((await fetch(refused)).status, 403);
    console.log("watch: a wrong token and none are refused");
  } finally {
    open_.server.kill();
  }
}

/** No window, and nothing that asks the network by itself. */
const ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ARGUMENTS });
  try {
    await files(browser);
    await large(browser);
    await live(browser);
    console.log(`all well; screenshots are in ${folder}`);
  } finally {
    await browser.close();
  }
})().catch((error) => { console.error(error); process.exit(1); });
