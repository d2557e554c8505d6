// Drives the page of jobs in a headless browser: node jobs.mjs URL CHROMIUM PROFILE [FOLDER FOR PICTURES]
//
// The page has a job called "runs", one called "waits" and one called "done". Writes {"facts": …} at the end, for the
// test to judge; before that {"ask": "go on"}, when the test shall let the running job go on, and waits for a line.

import { createInterface } from 'node:readline';
import puppeteer from 'puppeteer-core';

const [url, executablePath, userDataDir, pictures] = process.argv.slice(2);
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ARGUMENTS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
];
const WAIT = { timeout: 15_000, polling: 50 };

// What a reader sees.
const look = page => page.evaluate(() => ({
  connection: document.getElementById('connection-text').textContent,
  about: document.getElementById('about').textContent,
  notice: document.getElementById('notice').hidden ? '' : document.getElementById('notice-text').textContent,
  rows: [...document.querySelectorAll('.jobs > li')].map(row => ({
    name: row.querySelector('.name').textContent, list: row.parentElement.id,
    state: row.querySelector('.state').textContent, steps: row.querySelector('.steps p').textContent,
    loss: row.querySelector('.loss').textContent, cause: row.querySelector('.cause').textContent,
    points: (row.querySelector('.spark .line')?.getAttribute('d') ?? '').split(/[ML]/).length - 1,
    bar: row.querySelector('.bar > div').getBoundingClientRect().width,
    buttons: [...row.querySelectorAll('button')].filter(button => !button.hidden).map(button => button.dataset.act),
    link: row.querySelector('.name').href,
  })),
  scroll: document.documentElement.scrollWidth, width: innerWidth,
}));

const stateIs = (page, name, state) => page.waitForFunction((name, state) => [...document.querySelectorAll('.jobs > li')]
  .some(row => row.querySelector('.name').textContent === name && row.dataset.state === state), WAIT, name, state);

async function press(page, name, act) {
  const button = await page.evaluateHandle((name, act) => [...document.querySelectorAll('.jobs > li')]
    .find(row => row.querySelector('.name').textContent === name).querySelector(`[data-act=${act}]`), name, act);
  await button.click();
}

async function resize(page, width, scheme) {
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }]);
  await page.evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));
  if (pictures) await page.screenshot({ path: `${pictures}/jobs-${width}-${scheme}.png`, fullPage: true });
}

async function drive(page, facts) {
  let watching = true;
  const note = text => watching && facts.wrong.push(text);
  page.on('console', message => ['error', 'warn'].includes(message.type()) && note(`console: ${message.text()}`));
  page.on('pageerror', error => note(`error: ${error.message}`));
  page.on('requestfailed', request => note(`failed: ${request.url()} ${request.failure()?.errorText}`));
  page.on('response', response => response.status() >= 400 && note(`${response.status()}: ${response.url()}`));
  await page.setViewport({ width: 1280, height: 900 });
  const { host, password, pathname } = new URL(url);
  if (password) await page.authenticate({ username: 'me', password });
  // The browser asks without the password first, and is told that there is one.
  watching = false;
  await page.goto(`http://${host}${pathname}`);
  watching = true;
  await page.waitForSelector('#connection[data-state=live]', WAIT);
  await page.waitForFunction(() => document.querySelectorAll('.spark .line').length > 0, WAIT);
  facts.first = await look(page);
  for (const scheme of ['light', 'dark']) {
    for (const width of [400, 1280]) {
      await resize(page, width, scheme);
      facts.sizes[`${width} ${scheme}`] = await look(page);
    }
  }
  console.log(JSON.stringify({ ask: 'go on' }));
  await answers.next();
  await page.waitForFunction(() => document.body.textContent.includes('step 60 of'), WAIT);
  await press(page, 'waits', 'pause');
  await stateIs(page, 'waits', 'paused');
  await press(page, 'waits', 'resume');
  await stateIs(page, 'waits', 'queued');
  await press(page, 'waits', 'cancel');
  await page.waitForSelector('dialog[open]', WAIT);
  await page.click('dialog button[value=no]');
  await press(page, 'waits', 'cancel');
  await page.waitForSelector('dialog[open]', WAIT);
  await page.click('dialog button[value=yes]');
  await stateIs(page, 'waits', 'cancelled');
  facts.second = await look(page);
  watching = false;
  await press(page, 'runs', 'pause');
  await page.waitForSelector('#notice:not([hidden])', WAIT);
  facts.refused = await look(page);
  watching = true;
  await Promise.all([page.waitForNavigation(), page.evaluate(() => document.querySelector('#active .name').click())]);
  await page.waitForSelector('#connection[data-state=live]', WAIT);
  facts.live = await page.evaluate(() => ({
    place: location.pathname, job: document.getElementById('job').textContent,
    loss: document.getElementById('loss').textContent,
  }));
}

const browser = await puppeteer.launch({ executablePath, userDataDir, args: ARGUMENTS, headless: true });
const facts = { wrong: [], sizes: {} };
try {
  await drive(await browser.newPage(), facts);
  console.log(JSON.stringify({ facts }));
} catch (error) {
  // What went wrong before says more than what was waited for in vain.
  console.error(facts.wrong.join('\n'));
  throw error;
} finally {
  await browser.close();
}
process.exit(0);
