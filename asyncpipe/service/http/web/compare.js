// Several jobs over the same axes, and in which of their values they differ.

import { ask } from './api.js';
import { Chart } from './charts.js';
import { isSame, textOf, valueOf } from './fields.js';
import { $, fill, make } from './text.js';

const MOST = 8, POINTS = 300;
// What can be drawn over steps from the rows that the API has of each step.
const OF_ROWS = {
  loss: { label: 'Loss', of: row => row.loss },
  learning_rate: { label: 'Learning rate', of: row => row.learning_rate },
  gradient_norm: { label: 'Gradient norm', of: row => row.gradient_norm },
  seconds: { label: 'Seconds per step', of: row => row.seconds },
  rate: { label: 'Tokens per second', of: row => row.tokens && row.seconds ? row.tokens / row.seconds : null },
};
const chart = new Chart($('compare-chart'), 320);
const found = new Map();  // id -> { job, rows } as it was at its step of then
let shown = [];

// Shows the first of the jobs `ids`, which are separated by commas, with what is new of each.
export async function show(ids = '') {
  const wanted = ids.split(',').filter(Boolean).slice(0, MOST);
  $('compare').hidden = !wanted.length;
  for (const id of wanted) {
    const job = await ask(`v1/jobs/${id}`).catch(error => { if (error.status !== 404) throw error; });
    if (!job || found.get(id)?.job.step === job.step) continue;
    const { losses } = await ask(`v1/jobs/${id}/losses?points=${POINTS}`);
    found.set(id, { job, rows: losses });
  }
  shown = wanted.map(id => found.get(id)).filter(Boolean);
  draw();
}

function draw() {
  const { of } = OF_ROWS[$('compare-figure').value];
  chart.draw(shown.map(({ job, rows }) => ({ name: job.name, points: rows.map(row => [row.step, of(row)]) })));
  const tables = shown.map(({ job }) => ({ entry: job.entry, ...job.document }));
  const keys = tables.flatMap(table => Object.entries(table).flatMap(([name, own]) =>
    own !== null && typeof own === 'object' ? Object.keys(own).map(key => `${name}.${key}`) : [name]));
  const other = [...new Set(keys)].filter(key => tables.some(table => !isSame(valueOf(table, key), valueOf(tables[0], key))));
  const line = (key, texts, cell) => {
    const made = make('tr');
    made.append(make('th', key, { scope: 'row' }), ...texts.map(text => make(cell, text, cell === 'th' ? { scope: 'col' } : {})));
    return made;
  };
  fill($('compare-values'), [shown.map(({ job }) => job.name), other, tables], () => !other.length ? [] : [
    line('Differ in', shown.map(({ job }) => job.name), 'th'), ...other.map(key => line(key, tables.map(table => textOf(valueOf(table, key))), 'td'))]);
}

export function focus() {
  $('compare').hidden = false;
  $('compare-title').focus();
}

$('compare-figure').append(...Object.entries(OF_ROWS).map(([value, { label }]) => make('option', label, { value })));
$('compare-figure').addEventListener('change', draw);
$('compare-log').addEventListener('change', event => { chart.log = event.target.checked; chart.redraw(); });
