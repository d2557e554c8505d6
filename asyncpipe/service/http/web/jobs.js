// The jobs of a service: asks the API every two seconds, and shows what it says. Which jobs are shown is kept in the
// page's address, so that a list can be bookmarked and sent to somebody. Data goes into the page as text, never as markup.

import { agreed, carryOut, complain, possible, showButtons } from './actions.js';
import { address, ask, me, turns } from './api.js';
import * as columns from './columns.js';
import * as compare from './compare.js';
import { askForValues } from './dialog.js';
import * as failures from './failures.js';
import { $, count, fill, make, whole, write } from './text.js';
import * as workers from './workers.js';

const SECONDS = 2, PAGE = 50;
const CHIPS = { '': 'All', failed: 'Failed', quarantined: 'Quarantined', running: 'Running', queued: 'Waiting', paused: 'Paused',
  finished: 'Finished', cancelled: 'Cancelled' };

let jobs = new Map();         // id -> what the API last said of it, in the order of the list
let counts = {};              // jobs by state
let wanted = PAGE;            // how many jobs are shown, if there are as many
let more = false;             // whether there are jobs beyond them
const picked = new Set();     // ids of the jobs whose boxes are ticked

// ---- Turns

async function refresh() {
  const { text, state, owner, root } = filters(), found = new Map(), { all, down } = columns.order(filters());
  counts = (await ask('v1/counts')).states;
  let after = null;
  do {
    const given = { text, state, owner, root, after, order: all && !down ? 'oldest' : '' };
    const query = { limit: PAGE, ...Object.fromEntries(Object.entries(given).filter(([, value]) => value)) };
    const page = await ask(`v1/jobs?${new URLSearchParams(query)}`);
    for (const job of page.jobs) found.set(job.id, job);
    after = page.next;
  } while (after && found.size < wanted);
  more = Boolean(after);
  $('more').hidden = !more;
  jobs = found;
  workers.show((await ask('v1/workers')).workers, jobs);
  show();
  await failures.show(filters(), choose);
  await compare.show(filters().compare);
}

const turn = turns(refresh, SECONDS);

function show() {
  const all = Object.values(counts).reduce((sum, number) => sum + number, 0);
  write($('about'), [['running', 'running'], ['queued', 'waiting'], ['failed', 'failed']]
    .filter(([state]) => counts[state]).map(([state, word]) => `${whole(counts[state])} ${word}`).join(' · '));
  document.title = counts.failed ? `${counts.failed} failed · Jobs · asyncpipe` : 'Jobs · asyncpipe';
  $('nothing').hidden = jobs.size > 0;
  $('list').hidden = !jobs.size;
  write($('nothing'), all ? 'No job matches.' : 'No job has been submitted yet. From a checkout of asyncpipe, submit the example: ' +
    `asyncpipe jobs submit examples/charlm/charlm.toml --url ${address('.').replace(/\/$/, '')}`);
  showFilters(all);
  showOrder();
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
  showUsers(filters().owner);
  for (const chip of $('states').children) {
    const number = chip.dataset.state ? counts[chip.dataset.state] ?? 0 : all;
    chip.hidden = !number && chip !== document.activeElement && state !== chip.dataset.state;
    chip.setAttribute('aria-pressed', state === chip.dataset.state);
    write(chip.lastElementChild, whole(number));
  }
}

// The users of whom jobs were seen, to choose one of them.
const users = new Set();
function showUsers(owner = '') {
  for (const name of [me.user, owner, ...[...jobs.values()].map(job => job.owner)]) if (name) users.add(name);
  $('owner').hidden = !users.size;
  fill($('owner'), [...users], () => [make('option', 'Everybody', { value: '' }), ...[...users].map(
    value => make('option', value === me.user ? `Mine (${value})` : value, { value }))]);
  if (document.activeElement !== $('owner')) $('owner').value = owner;
}
$('owner').addEventListener('change', event => choose({ owner: event.target.value }));

function showOrder() {
  const { all, label, down } = columns.order(filters()), way = down ? 'downwards' : 'upwards';
  if (columns.showHead(filters(), choose)) { $('jobs').replaceChildren(); rows.clear(); }
  write($('order'), more && !all ? `By ${label.toLowerCase()}, ${way}, are the newest ${whole(jobs.size)} jobs that match. By submission, all of them are in order.` : '');
}
columns.makePanel(choose);

for (const [state, label] of Object.entries(CHIPS)) {
  const chip = make('button', `${label} `, { type: 'button', 'data-state': state });
  chip.append(make('b'));
  chip.addEventListener('click', () => choose({ state: filters().state === state ? '' : state, root: '' }));
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
  columns.sorted([...jobs.values()], filters()).forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    if ($('jobs').children[index] !== row) $('jobs').insertBefore(row, $('jobs').children[index] ?? null);
    fillRow(row, job);
  });
}

function newRow(job) {
  const row = $('job').content.firstElementChild.cloneNode(true);
  row.querySelector('.name').href = `jobs/${job.id}/`;
  columns.addCells(row, filters());
  row.querySelector('.pick').addEventListener('change', event => {
    picked[event.target.checked ? 'add' : 'delete'](job.id);
    showChosen();
  });
  rows.set(job.id, row);
  return row;
}

function fillRow(row, job) {
  const part = name => row.querySelector(name);
  row.dataset.state = job.state;
  part('.pick').checked = picked.has(job.id);
  part('.pick').setAttribute('aria-label', `Choose ${job.name}`);
  write(part('.name'), job.name);
  write(part('.facts'), [
    job.entry, job.schedule, job.replicas > 1 ? count(job.replicas, 'replica') : '', job.priority_class === 'background' ? 'background' : '',
  ].filter(Boolean).join(' · '));
  columns.fillCells(row, job);
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
      const asks = able.length === 1 && ['retry', 'fork'].includes(what);
      const job = await (asks ? askForValues(what, id) : carryOut(what, id));
      if (job === undefined) return;
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
