// Drives the pages of a service in a headless browser: node jobs.mjs URL CHROMIUM PROFILE [FOLDER FOR PICTURES]
//
// The service has the jobs that test_jobs_browser.py has submitted. Writes {"facts": …} at the end, for the test to judge;
// before that {"ask": "go on"}, when the test shall let the running job go on, and waits for a line.

import { createInterface } from 'node:readline';
import { WAIT, audit, driven, focus, open, resize, tabTo } from './page.mjs';

const [url, chromium, profile, pictures] = process.argv.slice(2);
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const SIZES = [[400, 'dark'], [400, 'light'], [1280, 'dark'], [1280, 'light']], TWO = [SIZES[0], SIZES[3]];

// What a reader sees.
const look = page => page.evaluate(() => ({
  connection: document.getElementById('connection-text').textContent,
  about: document.getElementById('about').textContent,
  notice: document.getElementById('refused').hidden ? '' : document.getElementById('refused-text').textContent,
  chips: [...document.querySelectorAll('#states button:not([hidden])')].map(chip => chip.textContent),
  rows: [...document.querySelectorAll('.job')].map(row => ({
    name: row.querySelector('.name').textContent,
    cells: Object.fromEntries([...row.querySelectorAll('[data-column]')].map(cell => [cell.dataset.column, cell.textContent])),
    state: row.querySelector('.state').textContent, steps: row.querySelector('.done').textContent,
    pace: row.querySelector('.pace').textContent, facts: row.querySelector('.facts').textContent, cause: row.querySelector('.cause').textContent,
    bar: row.querySelector('.bar > div').getBoundingClientRect().width,
    buttons: [...row.querySelectorAll('.buttons button')].map(button => button.dataset.act),
  })),
}));

const row = (page, name, what) => page.waitForFunction((name, what) => [...document.querySelectorAll('.job')]
  .find(row => row.querySelector('.name').textContent === name && row.matches(what)), WAIT, name, what);

// Every action by keys alone: the focus is always seen, and stays with its job when that moves.
async function keys(page, facts) {
  const on = (act, name) => at => at.name === `${act} ${name}`;
  await page.focus('#title');
  const passed = await tabTo(page, on('Pause', 'waits'));
  facts.unseen = passed.filter(at => !at.ring && at.tag !== 'BODY');
  await page.keyboard.press('Enter');
  await row(page, 'waits', '[data-state=paused]');
  facts.moved = await focus(page);
  await tabTo(page, on('Resume', 'waits'));
  await page.keyboard.press('Enter');
  await row(page, 'waits', '[data-state=queued]');
  await tabTo(page, on('Cancel', 'waits'));
  facts.asked = [];
  page.on('dialog', async dialog => {
    facts.asked.push(dialog.message());
    await (facts.asked.length === 1 ? dialog.dismiss() : dialog.accept());
  });
  await page.keyboard.press('Enter');
  facts.kept = await focus(page);
  await page.keyboard.press('Enter');
  await row(page, 'waits', '[data-state=cancelled]');
  facts.cancelled = await focus(page);
}

// The losses of two jobs over the same axes, by their boxes.
async function compare(page, facts) {
  for (const name of ['runs', 'done']) {
    await page.evaluate(name => [...document.querySelectorAll('.pick')].find(box => box.ariaLabel === `Choose ${name}`).focus(), name);
    await page.keyboard.press('Space');
  }
  facts.chosen = await page.$eval('#chosen-text', text => text.textContent);
  await page.focus('#chosen-compare');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelectorAll('#compare-chart .u-series').length === 3, WAIT);
  await page.focus('#compare-chart');
  await page.keyboard.press('End');
  facts.compared = await page.evaluate(() => ({
    names: [...document.querySelectorAll('#compare-chart .u-label')].map(label => label.textContent),
    said: document.querySelector('#compare-chart [role=status]').textContent, place: location.search,
  }));
  facts.compared.audit = await audit(page);
  if (pictures) await page.screenshot({ path: `${pictures}/compare.png` });
  await page.focus('#compare-close');
  await page.keyboard.press('Enter');
  await page.focus('#chosen-clear');
  await page.keyboard.press('Enter');
}

const fill = (page, key, text) => page.$eval(`[id="field-${key}"]`, (field, text) => { field.value = text; field.dispatchEvent(new Event('input')); }, text);
const wrong = page => page.$$eval('[aria-invalid=true]', fields => fields.map(field => [field.id, field.closest('.field').querySelector('.wrong').textContent]));

// Columns and their order, by the panel and by the heads of the table.
async function columns(page, facts) {
  await page.click('#panel summary');
  for (const name of ['tags', 'waited']) await page.click(`#columns [value=${name}]`);
  await page.waitForSelector('.job [data-column=waited]', WAIT);
  for (const way of ['ascending', 'descending']) {
    await page.click('[data-column=loss] button');
    await page.waitForSelector(`th[data-column=loss][aria-sort=${way}]`, WAIT);
    facts[way] = (await look(page)).rows.slice(0, 2).map(row => row.name);
  }
  facts.columns = await page.evaluate(() => ({
    heads: [...document.querySelectorAll('th')].map(head => head.textContent), place: location.search, focus: document.activeElement.textContent,
    kept: localStorage.getItem('asyncpipe columns'),
  }));
  facts.columns.audit = await audit(page);
  await page.evaluate(() => localStorage.clear());
}

// A fork with other values: first with wrong ones, which are told at their fields.
async function fork(page, facts) {
  await page.click('[data-act=fork]');
  await page.waitForSelector('dialog .field', WAIT);
  facts.dialog = { audits: [] };
  await fill(page, 'training.learning_rate', 'fast');
  await fill(page, 'parameters.width', '16');
  await page.focus('dialog [type=submit]');
  await page.keyboard.press('Enter');
  await page.waitForSelector('[aria-invalid=true]', WAIT);
  facts.dialog.wrong = await wrong(page);
  facts.dialog.focus = (await focus(page)).id;
  for (const [width, scheme] of TWO) {
    await resize(page, width, scheme, pictures && `${pictures}/fork`);
    facts.dialog.audits.push(await audit(page));
  }
  await fill(page, 'training.learning_rate', '5e-1');
  await Promise.all([page.waitForNavigation(), page.click('dialog [type=submit]')]);
  await page.waitForSelector('#changed tr', WAIT);
  facts.dialog.given = await page.$$eval('#changed tr', rows => rows.map(row => [...row.children].map(cell => cell.textContent)));
  facts.dialog.unchanged = await page.$$eval('#unchanged tr', rows => rows.length);
}

// Another job like the first one, by the form.
async function submit(page, facts) {
  await Promise.all([page.waitForNavigation(), page.click('#like')]);
  await page.waitForSelector('.field', WAIT);
  facts.form = { audits: [], name: await page.$eval('[id="field-name"]', field => field.value) };
  for (const [key, text] of [['name', ''], ['training.steps', '0'], ['pipeline.devices', 'cpu:0, moon']]) await fill(page, key, text);
  await page.click('[type=submit]');
  await page.waitForSelector('[aria-invalid=true]', WAIT);
  facts.form.wrong = await wrong(page);
  facts.form.told = await page.$eval('#wrong', text => text.textContent);
  for (const [width, scheme] of TWO) {
    await resize(page, width, scheme, pictures && `${pictures}/submit`);
    facts.form.audits.push(await audit(page));
  }
  for (const [key, text] of [['name', 'by hand'], ['training.steps', '9'], ['pipeline.devices', '']]) await fill(page, key, text);
  await page.click('[aria-label=Devices] button');
  await Promise.all([page.waitForNavigation(), page.click('[type=submit]')]);
  await page.waitForSelector('#facts dt', WAIT);
  facts.form.made = await page.evaluate(() => [document.getElementById('job').textContent, document.getElementById('facts').textContent]);
}

// Who uses which device.
async function devices(page, facts) {
  await Promise.all([page.waitForNavigation(), page.click('nav [href$=devices]')]);
  await page.waitForSelector('.device', WAIT);
  facts.devices = await page.evaluate(() => ({
    rows: [...document.querySelectorAll('.device')].map(row => [row.querySelector('h3').textContent, row.querySelector('.now').textContent, row.querySelectorAll('rect').length]),
    users: [...document.querySelectorAll('#users li')].map(user => user.textContent),
    hours: [...document.querySelectorAll('#hours tr')].map(row => [...row.children].map(cell => cell.textContent)),
  }));
  facts.devices.audits = [];
  for (const [width, scheme] of TWO) {
    await resize(page, width, scheme, pictures && `${pictures}/devices`);
    facts.devices.audits.push(await audit(page));
  }
}

// The page of a job, and the way back.
async function visit(page, facts, name) {
  await Promise.all([page.waitForNavigation(), page.evaluate(name => [...document.querySelectorAll('.name')]
    .find(link => link.textContent === name).click(), name)]);
  await page.waitForFunction(() => document.querySelectorAll('#facts dt').length > 3
    && ['live', 'ended'].includes(document.getElementById('connection').dataset.state)
    && (document.querySelector('#log p') || document.getElementById('state').textContent === 'finished')
    && (document.getElementById('failure').hidden || document.getElementById('failure-lines').textContent), WAIT);
  facts[name] = await page.evaluate(() => ({
    place: location.pathname, job: document.getElementById('job').textContent, loss: document.getElementById('loss').textContent,
    state: document.getElementById('state').textContent, connection: document.getElementById('connection-text').textContent,
    failure: document.getElementById('failure').hidden ? '' : document.getElementById('failure').innerText,
    facts: Object.fromEntries([...document.querySelectorAll('#facts > div')].map(pair => [...pair.children].map(each => each.textContent))),
    buttons: [...document.querySelectorAll('#buttons button')].map(button => button.dataset.act),
  }));
  Object.assign(facts[name], await page.evaluate(() => ({
    trace: document.getElementById('failure-lines').textContent, marks: document.querySelectorAll('#log img').length,
    log: [...document.querySelectorAll('#log p')].map(line => line.textContent),
  })));
  if (facts[name].log.length > 1) {
    await page.type('#log-text', 'EPOCH');
    facts[name].found = await page.evaluate(() => [document.getElementById('log-about').textContent, document.querySelectorAll('#log p:not([hidden])').length]);
  }
  await page.click('#files summary');
  await page.waitForSelector('#artifacts a', WAIT);
  facts[name].files = await page.evaluate(async () => Object.fromEntries(await Promise.all(
    [...document.querySelectorAll('#artifacts a')].map(async link => [link.textContent, (await fetch(link.href)).status]))));
  facts[name].audits = [];
  for (const [width, scheme] of SIZES) {
    await resize(page, width, scheme, pictures && `${pictures}/job-${facts[name].state}`);
    facts[name].audits.push(await audit(page));
  }
  await Promise.all([page.waitForNavigation(), page.click('#nav a')]);
  await page.waitForSelector('#connection[data-state=live]', WAIT);
  facts[name].back = await page.evaluate(() => location.pathname + location.search);
}

await driven(chromium, profile, async (page, facts) => {
  await open(page, facts, url);
  await page.waitForSelector('#connection[data-state=live]', WAIT);
  await page.waitForSelector('.job', WAIT);
  facts.first = await look(page);
  facts.sizes = {};
  for (const [width, scheme] of SIZES) {
    await resize(page, width, scheme, pictures && `${pictures}/jobs`);
    facts.sizes[`${width} ${scheme}`] = await audit(page);
  }
  console.log(JSON.stringify({ ask: 'go on' }));
  await answers.next();
  await page.waitForFunction(() => document.body.textContent.includes('step 60 of'), WAIT);
  await keys(page, facts);
  facts.second = await look(page);
  facts.watching = false;
  const pause = await row(page, 'runs', '[data-state=running]');
  await (await pause.$('[data-act=pause]')).click();
  await page.waitForSelector('#refused:not([hidden])', WAIT);
  facts.refused = await look(page);
  await page.click('#dismiss');
  facts.watching = true;
  await page.type('#text', 'QUITE A LONG');
  await page.waitForFunction(() => document.querySelectorAll('.job').length === 1, WAIT);
  facts.searched = await look(page);
  facts.searched.place = await page.evaluate(() => location.search);
  await page.$eval('#text', text => { text.value = ''; text.dispatchEvent(new Event('input')); });
  await page.waitForFunction(() => document.querySelectorAll('.job').length > 5, WAIT);
  await columns(page, facts);
  await compare(page, facts);
  await visit(page, facts, 'runs');
  await visit(page, facts, 'done');
  await page.evaluate(() => [...document.querySelectorAll('.states button')].find(chip => chip.dataset.state === 'failed').click());
  await page.waitForFunction(() => document.querySelectorAll('.job').length === 1, WAIT);
  await page.waitForSelector('#failure-rows button', WAIT);
  facts.failures = await look(page);
  facts.causes = await page.$$eval('#failure-rows button', buttons => buttons.map(button => button.textContent));
  await visit(page, facts, facts.failures.rows[0].name);
  await Promise.all([page.waitForNavigation(), page.evaluate(() => document.querySelector('.job .name').click())]);
  await page.waitForSelector('#changed tr', WAIT);
  facts.watching = false;
  await fork(page, facts);
  facts.watching = true;
  await page.waitForSelector('#curve-figure option[value=gradient_norm]', WAIT);
  await page.select('#curve-figure', 'gradient_norm');
  await page.waitForFunction(() => document.getElementById('curve-title').textContent === 'Gradient norm over steps', WAIT);
  facts.watching = false;
  await submit(page, facts);
  facts.watching = true;
  await devices(page, facts);
});
