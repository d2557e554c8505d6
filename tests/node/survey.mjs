// Looks at the list of a service and at the page of its first job: node survey.mjs URL CHROMIUM PROFILE
//
// Writes {"facts": …}: what axe finds at each width and scheme, how soon the list is there and what it asked for, and what
// the Tab key reaches.

import { WAIT, audit, driven, focus, open, resize } from './page.mjs';

const [url, chromium, profile] = process.argv.slice(2);

async function audits(page) {
  const found = [];
  for (const scheme of ['light', 'dark']) {
    for (const width of [400, 1280]) {
      await resize(page, width, scheme);
      found.push(await audit(page));
    }
  }
  return found;
}

// Everything that can be used, and what of it Tab reaches with a ring around it.
async function keys(page) {
  const usable = await page.evaluate(() => {
    const all = document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]');
    const seen = [...all].filter(element => !element.disabled && element.checkVisibility({ visibilityProperty: true }));
    seen.forEach((element, index) => { element.dataset.survey = index; });
    document.activeElement?.blur();
    return seen.length;
  });
  const reached = new Set();
  let unseen = 0;
  for (let presses = 0; presses < usable + 20 && reached.size < usable; presses += 1) {
    await page.keyboard.press('Tab');
    const mark = await page.evaluate(() => document.activeElement.dataset.survey);
    if (mark !== undefined) reached.add(mark);
    const at = await focus(page);
    if (!at.ring && at.tag !== 'BODY') unseen += 1;
  }
  return { usable, reached: reached.size, unseen };
}

await driven(chromium, profile, async (page, facts) => {
  let asked = 0;
  page.on('request', () => { asked += 1; });
  const begun = Date.now();
  await open(page, facts, url);
  await page.waitForFunction(() => document.querySelector('.job') || !document.getElementById('nothing').hidden, WAIT);
  facts.milliseconds = Date.now() - begun;
  await page.waitForSelector('#connection[data-state=live]', WAIT);
  await new Promise(done => setTimeout(done, 3000));
  facts.asked = asked;
  facts.rows = await page.$$eval('.job', rows => rows.length);
  facts.audits = await audits(page);
  facts.keys = await keys(page);
  facts.found = -1;
  if (facts.rows > 100 || await page.$('.more:not([hidden])')) {
    const before = Date.now();
    await page.type('#text', 'number 17');
    await page.waitForFunction(() => [...document.querySelectorAll('.name')].length > 0
      && [...document.querySelectorAll('.name')].every(name => name.textContent.includes('number 17')), WAIT);
    facts.found = Date.now() - before;
    facts.audits.push(...await audits(page));
  }
  if (facts.rows) {
    await Promise.all([page.waitForNavigation(), page.evaluate(() => document.querySelector('.job .name').click())]);
    await page.waitForFunction(() => document.querySelectorAll('#facts dt').length > 3, WAIT);
    facts.audits.push(...await audits(page));
    const there = await keys(page);
    for (const key of ['usable', 'reached', 'unseen']) facts.keys[key] += there[key];
  }
});
