// Drives the live page in a headless browser: node live.mjs URL CHROMIUM PROFILE [FOLDER FOR PICTURES]
//
// Writes a JSON object a line. {"ask": …} asks the test for something: "close" (end the server), "open" (start it
// again on the same port). The test answers with a line when it is done. The last line is {"facts": …}; the test
// judges them.

import { createInterface } from 'node:readline';
import puppeteer from 'puppeteer-core';

const [url, executablePath, userDataDir, pictures] = process.argv.slice(2);
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ARGUMENTS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
];
const WAIT = { timeout: 15_000, polling: 50 };

async function ask(what) {
  console.log(JSON.stringify({ ask: what }));
  await answers.next();
}

// What a reader sees.
const look = page => page.evaluate(() => {
  const text = id => document.getElementById(id).textContent;
  const marks = [...document.querySelectorAll('#timeline .task')];
  return {
    connection: text('connection-text'), job: text('job'), about: text('about'), loss: text('loss'),
    rate: text('rate'), seconds: text('seconds'), bubble: text('bubble'), ideal: text('bubble-below'),
    finding: text('finding'), starts: marks.map(mark => mark.firstElementChild.getAttribute('x')).join(),
    tasks: marks.length, kinds: [...new Set(marks.map(mark => mark.dataset.kind))].sort(),
    widest: Math.max(...marks.map(mark => mark.getBoundingClientRect().right)),
    curve: document.querySelectorAll('#curve canvas').length,
    stages: [...document.querySelectorAll('#stages li')].map(row => row.innerText.replace(/\s+/g, ' ')),
    bars: [...document.querySelectorAll('#stages .bar')].map(bar => bar.firstElementChild.getBoundingClientRect().width),
    workers: [...document.querySelectorAll('#workers-rows tr')].map(row => row.innerText.replace(/\s+/g, ' ').trim()),
    reasons: [...document.querySelectorAll('#reasons li')].map(reason => reason.textContent),
    scroll: document.documentElement.scrollWidth, width: innerWidth,
  };
});

// The middle of the widest task of the timeline.
const widest = page => page.evaluate(() => {
  document.getElementById('timeline').scrollIntoView({ block: 'center' });
  const marks = [...document.querySelectorAll('#timeline .task')].map(mark => mark.getBoundingClientRect());
  const { x, y, width, height } = marks.reduce((best, one) => one.width > best.width ? one : best);
  return [x + width / 2, y + height / 2];
});

// Hovers over a task, then goes to the first one by key.
async function point(page) {
  const said = () => page.$eval('#story', story => story.textContent);
  let hovered = '';
  // Another step may be drawn between the look and the move.
  for (let attempt = 0; attempt < 20 && !hovered; attempt += 1) {
    await page.mouse.move(...await widest(page));
    hovered = await said();
  }
  await page.mouse.move(2, 2);
  await page.evaluate(() => document.getElementById('timeline').focus());
  await page.keyboard.press('ArrowRight');
  const keyed = await said();
  await page.keyboard.press('Escape');
  const after = await said();
  await page.focus('#curve');
  await page.keyboard.press('End');
  return { hovered, keyed, after, read: await page.$eval('#curve [role=status]', status => status.textContent) };
}

async function resize(page, width, scheme) {
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }]);
  // Twice: the page measures itself and draws in the frame after the one that it learns of its width in.
  await page.evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));
  await page.evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));
  if (pictures) await page.screenshot({ path: `${pictures}/live-${width}-${scheme}.png`, fullPage: true });
}

const connected = (page, name) => page.waitForSelector(`#connection[data-state=${name}]`, WAIT);

async function drive(page, facts) {
  let watching = true;
  const note = text => watching && facts.wrong.push(text);
  page.on('console', message => ['error', 'warn'].includes(message.type()) && note(`console: ${message.text()}`));
  page.on('pageerror', error => note(`error: ${error.message}`));
  page.on('requestfailed', request => note(`failed: ${request.url()} ${request.failure()?.errorText}`));
  page.on('response', response => response.status() >= 400 && note(`${response.status()}: ${response.url()}`));
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(url);
  await connected(page, 'live');
  await page.waitForFunction(() => document.querySelectorAll('#timeline .task').length > 0, WAIT);
  facts.first = await look(page);
  await page.waitForFunction(before =>
    ['loss', 'about', 'seconds', 'rate'].every(id => document.getElementById(id).textContent !== before[id])
    && document.querySelector('#loss-spark .line').getAttribute('d').split('L').length > 5,
  WAIT, facts.first);
  facts.second = await look(page);
  for (const scheme of ['light', 'dark']) {
    for (const width of [400, 1280]) {
      await resize(page, width, scheme);
      facts.sizes[`${width} ${scheme}`] = await look(page);
    }
  }
  facts.pointed = await point(page);
  watching = false;
  await ask('close');
  await connected(page, 'ended');
  facts.ended = await look(page);
  await ask('open');
  await connected(page, 'live');
  facts.again = await look(page);
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
