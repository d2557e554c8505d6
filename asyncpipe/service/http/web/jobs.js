// The jobs of a service: asks the API every two seconds, and shows what it says. Which jobs are shown is kept in the
// page's address, so that a list can be bookmarked and sent to somebody. Data goes into the page as text, never as markup.

import { agreed, carryOut, complain, devicesText, pace, possible, showButtons } from './actions.js';
import { address, ask, turns } from './api.js';
import * as compare from './compare.js';
import { $, ago, count, make, whole, write } from './text.js';
import * as workers from './workers.js';

const SECONDS = 2, PAGE = 50;
const CHIPS = { '': 'All', failed: 'Failed', quarantined: 'Quarantined', running: 'Running', queued: 'Waiting', paused: 'Paused',
  finished: 'Finished', cancelled: 'Cancelled' };

let jobs = new Map();         // id -> what the API last said of it, in the order of the list
let counts = {};              // jobs by state
let wanted = PAGE;            // how many jobs are shown, if there are as many
const picked = new Set();     // ids of the jobs whose boxes are ticked

// ---- Turns

async function refresh() {
  const { text, state } = filters(), found = new Map();
  counts = (await ask('v1/counts')).states;
  let after = null;
  do {
    const query = { limit: PAGE, ...(text && { text }), ...(state && { state }), ...(after && { after }) };
    const page = await ask(`v1/jobs?${new URLSearchParams(query)}`);
    for (const job of page.jobs) found.set(job.id, job);
    after = page.next;
  } while (after && found.size < wanted);
  $('more').hidden = !after;
  jobs = found;
  workers.show((await ask('v1/workers')).workers, jobs);
  show();
  await compare.show(filters().compare);
}

const turn = turns(refresh, SECONDS);

function show() {
  const all = Object.values(counts).reduce((sum, number) => sum + number, 0);
  write($('about'), [['running', 'running'], ['queued', 'waiting'], ['failed', 'failed']]
    .filter(([state]) => counts[state]).map(([state, word]) => `${whole(counts[state])} ${word}`).join(' · '));
  document.title = counts.failed ? `${counts.failed} failed · Jobs · asyncpipe` : 'Jobs · asyncpipe';
  $('nothing').hidden = jobs.size > 0;
  write($('nothing'), all ? 'No job matches.' : 'No job has been submitted yet. From a checkout of asyncpipe, submit the example: ' +
    `asyncpipe jobs submit examples/charlm/charlm.toml --url ${address('.').replace(/\/$/, '')}`);
  showFilters(all);
  showRows();
  showChosen();
}

// ---- Filters

const filters = () => Object.fromEntries(new URLSearchParams(location.search));

function choose(change) {
  const chosen = Object.entries({ ...filters(), ...change }).filter(([, value]) => value);
  history.replaceState(null, '', chosen.length ? `?${new URLSearchParams(chosen)}` : location.pathname);
  wanted = PAGE;
  turn();
}

function showFilters(all) {
  const { text = '', state = '' } = filters();
  if (document.activeElement !== $('text')) $('text').value = text;
  for (const chip of $('states').children) {
    const number = chip.dataset.state ? counts[chip.dataset.state] ?? 0 : all;
    chip.hidden = !number && chip !== document.activeElement && state !== chip.dataset.state;
    chip.setAttribute('aria-pressed', state === chip.dataset.state);
    write(chip.lastElementChild, whole(number));
  }
}

for (const [state, label] of Object.entries(CHIPS)) {
  const chip = make('button', `${label} `, { type: 'button', 'data-state': state });
  chip.append(make('b'));
  chip.addEventListener('click', () => choose({ state: filters().state === state ? '' : state }));
  $('states').append(chip);
}
let typing = 0;
$('text').addEventListener('input', event => {
  clearTimeout(typing);
  typing = setTimeout(() => choose({ text: event.target.value.trim() }), 250);
});
$('filters').addEventListener('submit', event => event.preventDefault());
$('more').addEventListener('click', () => { wanted = jobs.size + PAGE; turn(); });

// ---- Rows: a row is the same element as long as its job is shown

const rows = new Map();

function showRows() {
  for (const [id, row] of rows) if (!jobs.has(id)) { row.remove(); rows.delete(id); picked.delete(id); }
  [...jobs.values()].forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    if ($('jobs').children[index] !== row) $('jobs').insertBefore(row, $('jobs').children[index] ?? null);
    fillRow(row, job);
  });
}

function newRow(job) {
  const row = $('job').content.firstElementChild.cloneNode(true);
  row.querySelector('.name').href = `jobs/${job.id}/`;
  row.querySelector('.pick').addEventListener('change', event => {
    picked[event.target.checked ? 'add' : 'delete'](job.id);
    showChosen();
  });
  rows.set(job.id, row);
  return row;
}

function fillRow(row, job) {
  const part = name => row.querySelector(name), { step, steps } = job, places = job.devices ?? [];
  row.dataset.state = job.state;
  part('.pick').checked = picked.has(job.id);
  part('.pick').setAttribute('aria-label', `Choose ${job.name}`);
  write(part('.name'), job.name);
  write(part('.tags'), job.tags.join(', '));
  write(part('.facts'), [
    job.entry, job.schedule, job.replicas > 1 ? count(job.replicas, 'replica') : '',
    places.length > 2 && job.state !== 'queued' ? count(places.length, 'device') : devicesText(job),
    job.priority_class === 'background' ? 'background' : '', ago(job.updated),
  ].filter(Boolean).join(' · '));
  write(part('.state'), job.asked ? `${job.state}, to be ${job.asked}` : job.state);
  part('.bar').hidden = !steps;
  part('.bar').setAttribute('aria-label', `Training steps of ${job.name}`);
  part('.bar').setAttribute('aria-valuemax', steps ?? 0);
  part('.bar').setAttribute('aria-valuenow', Math.min(step, steps ?? step));
  part('.bar > div').style.width = `${steps ? Math.min(step / steps, 1) * 100 : 0}%`;
  write(part('.done'), `step ${whole(step)}${steps ? ` of ${whole(steps)}` : ''}`);
  write(part('.pace'), pace(job));
  write(part('.cause'), job.waits_for ?? (['running', 'finished'].includes(job.state) || job.cause === 'submitted' ? '' : job.cause));
  showButtons(part('.buttons'), possible(job), job.name, what => act(what, [job.id]));
}

// ---- Acting

async function act(what, ids) {
  const able = ids.filter(id => jobs.has(id) && possible(jobs.get(id)).includes(what)), problems = [];
  const which = able.length === 1 ? `“${jobs.get(able[0]).name}”` : count(able.length, 'job');
  if (!able.length || !agreed(what, which)) return;
  for (const id of able) {
    try {
      const job = await carryOut(what, id);
      if (!job) jobs.delete(id);
      else if (job.id === id) jobs.set(id, job);
    } catch (error) {
      problems.push(error.message);
    }
  }
  complain([...new Set(problems)].join(' '));
  write($('said'), problems.length ? '' : `${what}: ${which}`);
  show();
  // The button is gone: the next one of the row takes its place, or the title.
  if (document.activeElement === document.body) (rows.get(able[0])?.querySelector('.buttons button') ?? $('title')).focus();
  turn();
}

// The bar for the jobs whose boxes are ticked: what can be done to at least one of them.
function showChosen() {
  const chosen = [...picked].map(id => jobs.get(id)).filter(Boolean);
  $('chosen').hidden = !chosen.length;
  write($('chosen-text'), `${count(chosen.length, 'job')} chosen`);
  showButtons($('chosen-acts'), [...new Set(chosen.flatMap(possible))], 'the chosen jobs', what => act(what, [...picked]));
}

$('chosen-compare').addEventListener('click', () => { choose({ compare: [...picked].join(',') }); compare.focus(); });
$('chosen-clear').addEventListener('click', () => { picked.clear(); show(); $('title').focus(); });
$('compare-close').addEventListener('click', () => { choose({ compare: '' }); $('title').focus(); });
addEventListener('popstate', turn);
turn();
