// Asks the built site: blocks of code that are cut, and what is wider than the window, by page; and what the search finds.
//   node site.mjs URL CHROMIUM PROFILE < {"pages": […], "queries": […]}

import { readFileSync } from 'node:fs';
import { WAIT, driven } from './page.mjs';

const [url, chromium, profile] = process.argv.slice(2);
const { pages, queries } = JSON.parse(readFileSync(0, 'utf8'));

// Lines of at most 120 columns that do not fit into their block.
const cut = () => [...document.querySelectorAll('.md-content__inner > .highlight code, .md-content__inner > pre code')]
  .filter(code => code.scrollWidth > code.clientWidth + 1)
  .map(code => code.innerText.split('\n').map(line => line.length).reduce((a, b) => Math.max(a, b)))
  .filter(columns => columns <= 120);

await driven(chromium, profile, async (page, facts) => {
  Object.assign(facts, { cut: {}, wide: {}, split: [], found: {} });
  for (const width of [1280, 400]) {
    await page.setViewport({ width, height: 900 });
    for (const path of pages) {
      await page.goto(`${url}${path}`);
      if (width > 1000) {
        const columns = await page.evaluate(cut);
        if (columns.length) facts.cut[path] = columns;
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      if (wide > width) facts.wide[`${path} at ${width}`] = wide;
    }
  }
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(`${url}schedules.html`);
  // A name in two lines has two boxes.
  facts.split = await page.$$eval('table td:first-child > code',
    names => names.filter(name => name.getClientRects().length > 1).map(name => name.innerText));
  for (const query of queries) {
    await page.goto(`${url}index.html?q=${encodeURIComponent(query)}`);
    await page.waitForSelector('.md-search-result__item', WAIT);
    facts.found[query] = await page.$$eval('.md-search-result__item', items => items.slice(0, 3)
      .map(item => new URL(item.querySelector('a').href).pathname.replace(/^\//, '')));
  }
});
