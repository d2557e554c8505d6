// What scripts that drive a page in a headless browser have in common.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import puppeteer from 'puppeteer-core';

const ARGUMENTS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
];
export const WAIT = { timeout: 20_000, polling: 50 };

// Runs `drive(page, facts)` and prints {"facts": …}; `facts.wrong` has what a page complained of while `facts.watching`.
export async function driven(executablePath, userDataDir, drive) {
  const browser = await puppeteer.launch({ executablePath, userDataDir, args: ARGUMENTS, headless: true });
  const facts = { wrong: [], watching: true };
  try {
    const page = await browser.newPage(), note = text => facts.watching && facts.wrong.push(text);
    page.on('console', message => ['error', 'warn'].includes(message.type()) && note(`console: ${message.text()}`));
    page.on('pageerror', error => note(`error: ${error.message}`));
    // A page that is left aborts what it still waits for.
    page.on('requestfailed', request => request.failure()?.errorText !== 'net::ERR_ABORTED'
      && note(`failed: ${request.url()} ${request.failure()?.errorText}`));
    page.on('response', response => response.status() >= 400 && note(`${response.status()}: ${response.url()}`));
    await page.setViewport({ width: 1280, height: 900 });
    await drive(page, facts);
    console.log(JSON.stringify({ facts }));
  } catch (error) {
    // What went wrong before says more than what was waited for in vain.
    console.error(facts.wrong.join('\n'));
    throw error;
  } finally {
    await browser.close();
  }
  process.exit(0);
}

// Opens a page of a server that may want a password: then the browser asks without it first, and is told so.
export async function open(page, facts, url) {
  const { origin, password, pathname, search } = new URL(url);
  if (password) await page.authenticate({ username: 'me', password });
  facts.watching = false;
  await page.goto(`${origin}${pathname}${search}`);
  facts.watching = true;
}

const drawn = page => page.evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));

export async function resize(page, width, scheme, picture) {
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }]);
  await drawn(page);
  // A page measures itself, and draws in the frame after the one in which it learns its width.
  await drawn(page);
  if (picture) await page.screenshot({ path: `${picture}-${width}-${scheme}.png`, fullPage: true });
}

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

// What axe finds wrong with the page, and how wide the page is.
export async function audit(page) {
  await page.evaluate(AXE);
  return page.evaluate(async () => {
    const { violations } = await axe.run(document, { resultTypes: ['violations'] });
    return {
      violations: violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(node => node.target.join(' ')).join(', ')}`),
      scroll: document.documentElement.scrollWidth, width: innerWidth,
    };
  });
}

// Where the focus is, as a reader would say it; `ring` is whether it can be seen.
export const focus = page => page.evaluate(() => {
  const { activeElement: element } = document, style = getComputedStyle(element);
  return {
    row: element.closest('.job')?.querySelector('.name').textContent ?? null,
    name: element.getAttribute('aria-label') ?? element.textContent.trim().slice(0, 60), id: element.id, tag: element.tagName,
    dialog: element.closest('dialog[open]') !== null,
    ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
  };
});

// Presses Tab until the focus is on what `wanted` accepts; gives what it passed.
export async function tabTo(page, wanted, most = 300) {
  const passed = [];
  for (let presses = 0; presses < most; presses += 1) {
    await page.keyboard.press('Tab');
    const at = await focus(page);
    passed.push(at);
    if (wanted(at)) return passed;
  }
  throw new Error(`Tab does not get there; it passed ${JSON.stringify(passed.slice(-12))}`);
}
