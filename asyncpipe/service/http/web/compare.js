// The losses of several jobs over the same axes.

import { ask } from './api.js';
import { Chart } from './charts.js';
import { $ } from './text.js';

const MOST = 8, POINTS = 300;
const chart = new Chart($('compare-chart'), 320);
const lines = new Map();  // id -> { name, points, step: that at which they were asked for }

// Shows the first of the jobs `ids`, which are separated by commas, with what is new of each.
export async function show(ids = '') {
  const wanted = ids.split(',').filter(Boolean).slice(0, MOST);
  $('compare').hidden = !wanted.length;
  for (const id of wanted) {
    const job = await ask(`v1/jobs/${id}`).catch(error => { if (error.status !== 404) throw error; });
    if (!job || lines.get(id)?.step === job.step) continue;
    const { losses } = await ask(`v1/jobs/${id}/losses?points=${POINTS}`);
    lines.set(id, { name: job.name, points: losses.map(row => [row.step, row.loss]), step: job.step });
  }
  chart.draw(wanted.map(id => lines.get(id)).filter(Boolean));
}

export function focus() {
  $('compare').hidden = false;
  $('compare-title').focus();
}

$('compare-log').addEventListener('change', event => { chart.log = event.target.checked; chart.redraw(); });
