// The losses of several jobs over the same axes.

import { ask } from './api.js';
import { Chart, add, readable, set, teller } from './charts.js';
import { choose, filter } from './filters.js';
import { jobs, keep } from './list.js';
import { $, lossText, write } from './text.js';

const MOST = 8, POINTS = 300;
const chart = new Chart($('compare-chart'), { height: 320 });
const lines = new Map();  // id -> { points, asked: the step at which they were asked for }
let opener = null;

const shown = () => filter('compare').split(',').filter(Boolean).slice(0, MOST);

// Opens the comparison of `ids`; those without a step come last.
export async function open(ids) {
  opener = document.activeElement;
  const begun = ids.filter(id => jobs.get(id)?.step > 0), rest = ids.filter(id => !begun.includes(id));
  choose({ compare: [...begun, ...rest].slice(0, MOST).join(',') });
  write($('compare-title'), ids.length > MOST ? `Losses compared: the first ${MOST} of ${ids.length} jobs` : 'Losses compared');
  await refresh();
  $('compare').scrollIntoView({ block: 'nearest' });
  $('compare-title').focus({ preventScroll: true });
}

function close() {
  choose({ compare: '' });
  $('compare').hidden = true;
  lines.clear();
  (opener?.isConnected && opener.offsetParent ? opener : $('title')).focus();
}

// Asks for what is new of the jobs that are compared.
export async function refresh() {
  const ids = shown();
  $('compare').hidden = !ids.length;
  for (const id of ids) {
    const job = jobs.get(id) ?? await found(id);
    if (!job || lines.get(id)?.asked === job.step) continue;
    const { losses } = await ask(`v1/jobs/${id}/losses?points=${POINTS}`);
    lines.set(id, { points: losses.map(row => [row.step, row.loss]), asked: job.step });
  }
  if (ids.length) show();
}

async function found(id) {
  try {
    const job = await ask(`v1/jobs/${id}`);
    keep(job);
    return job;
  } catch (error) {
    if (error.status !== 404) throw error;
    choose({ compare: shown().filter(other => other !== id).join(',') });
    return null;
  }
}

// Names that tell jobs apart: with the beginning of the id where two have the same.
function names(ids) {
  const all = ids.map(id => jobs.get(id)?.name ?? id);
  return all.map((name, index) => all.indexOf(name) === all.lastIndexOf(name) ? name : `${name} (${ids[index].slice(-5)})`);
}

function show() {
  const ids = shown(), named = names(ids);
  const drawn = ids.map((id, index) => ({ name: named[index], points: lines.get(id)?.points ?? [], index }));
  const some = drawn.some(line => line.points.some(([, loss]) => loss !== null));
  $('compare-empty').hidden = some;
  $('compare-chart').toggleAttribute('hidden', !some);
  if (some) chart.draw(drawn);
  $('compare-chart').setAttribute('aria-label', `Loss over steps of ${named.join(', ')}. Arrow keys go from step to step.`);
  const key = JSON.stringify(drawn.map(({ name, points }, index) => [ids[index], name, points.at(-1)]));
  const list = $('compare-legend');
  if (list.dataset.shown === key) return;
  list.dataset.shown = key;
  const focused = document.activeElement?.closest('#compare-legend li')?.dataset.job;
  list.replaceChildren(...drawn.map((line, index) => legend(ids[index], line)));
  if (focused) (list.querySelector(`[data-job="${focused}"] button`) ?? $('compare-title')).focus({ preventScroll: true });
}

function legend(id, { name, points, index }) {
  const item = document.createElement('li'), link = document.createElement('a'), remove = document.createElement('button');
  item.dataset.job = id;
  const svg = add(item, 'svg', { viewBox: '0 0 28 10', 'aria-hidden': 'true' });
  set(svg, { class: 'chart' });
  svg.style.setProperty('--colour', `var(--line-${index})`);
  add(svg, 'path', { class: `line${index > 3 ? ' dashed' : ''}`, d: 'M1 5L27 5' });
  link.href = `jobs/${id}/`;
  link.textContent = name;
  const loss = document.createElement('b'), last = points.at(-1);
  loss.textContent = last ? lossText(last[1]) : '–';
  loss.title = last ? `loss of step ${last[0]}` : 'no loss yet';
  remove.type = 'button';
  remove.textContent = '×';
  remove.title = 'Remove';
  remove.setAttribute('aria-label', `Remove ${name}`);
  remove.addEventListener('click', () => {
    choose({ compare: shown().filter(other => other !== id).join(',') });
    if (shown().length) show(); else close();
  });
  item.append(link, loss, remove);
  return item;
}

readable(chart, teller($('tip')));
$('compare-log').addEventListener('change', event => { chart.log = event.target.checked; chart.redraw(); });
$('compare-close').addEventListener('click', close);
new ResizeObserver(() => chart.redraw()).observe($('compare'));
