// The jobs of a service: asks the API that programs use, every two seconds, and shows what it says. Data goes into the
// page as text, never as markup.

import { duration, spark } from './live_draw.js';

const $ = id => document.getElementById(id);
const ACTIVE = ['running', 'queued', 'paused'], EVERY = 2000, PAUSES = [2, 4, 8, 15, 30];
const PAGE = 1000, POINTS = 400, CURVES_A_TURN = 6, MORE = 25;
const POSSIBLE = {
  running: ['pause', 'cancel'], queued: ['pause', 'cancel'], paused: ['resume', 'cancel'],
};
const jobs = new Map();    // id -> what the API last said of it
const rows = new Map();    // id -> its row on the page
const curves = new Map();  // id -> { points: [[step, loss]], asked: the step at which they were asked for }
let workers = [];          // as the API last said
let newest = null, shown = MORE, failures = 0, timer = 0, asking = false, again = false;

// ---- Asking

class Refused extends Error {}

async function ask(path, options = {}) {
  const response = await fetch(path, { cache: 'no-store', ...options });
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const problems = (body.problems ?? []).map(({ key, text }) => `${key}: ${text}`);
  throw new Refused([body.detail ?? `HTTP ${response.status}`, ...problems].join(' '));
}

async function* pages(query) {
  let after = null;
  do {
    const page = await ask(`v1/jobs?limit=${PAGE}&${query}${after ? `&after=${after}` : ''}`);
    yield page.jobs;
    after = page.next;
  } while (after);
}

// Ids sort by the time of submission, so what is new stands behind the newest that is known. Those that were active and
// are not any more have ended, and are asked for one by one.
async function refresh() {
  const before = [...jobs.values()].filter(job => ACTIVE.includes(job.state));
  const active = new Set();
  for await (const page of pages(ACTIVE.map(state => `state=${state}`).join('&'))) {
    for (const job of page) { keep(job); active.add(job.id); }
  }
  // Those that are new and have ended already; at first that is all of them.
  let after = newest;
  do {
    const page = await ask(`v1/jobs?limit=${PAGE}${after ? `&after=${after}` : ''}`);
    page.jobs.forEach(keep);
    if (page.jobs.length) newest = page.jobs.at(-1).id;
    after = page.next;
  } while (after);
  for (const { id } of before.filter(job => !active.has(job.id)).slice(0, 20)) keep(await ask(`v1/jobs/${id}`));
  ({ workers } = await ask('v1/workers'));
  await refreshCurves();
}

const keep = job => jobs.set(job.id, job);

// A curve is asked for when its job is on the page and has gone on since.
async function refreshCurves() {
  const stale = visible().filter(job => job.step > 0 && curves.get(job.id)?.asked !== job.step);
  for (const job of stale.slice(0, CURVES_A_TURN)) {
    const curve = curves.get(job.id) ?? { points: [] };
    const last = curve.points.at(-1)?.[0] ?? 0, from = Math.max(job.step - POINTS, 0);
    // A job that goes back to its snapshot does some steps again.
    const kept = last > job.step ? [] : curve.points;
    const { losses } = await ask(`v1/jobs/${job.id}/losses?limit=1000&after=${Math.max(kept.at(-1)?.[0] ?? 0, from)}`);
    curves.set(job.id, {
      points: [...kept, ...losses.map(row => [row.step, row.loss])].slice(-POINTS), asked: job.step,
    });
  }
}

// ---- Showing

const byTime = (a, b) => a.id < b.id ? 1 : -1;
const of = states => [...jobs.values()].filter(job => states.includes(job.state)).sort(byTime);
const ended = () => of(['finished', 'failed', 'cancelled']).sort((a, b) => b.updated - a.updated);
const active = () => [...of(['running']), ...of(['queued']).reverse(), ...of(['paused'])];
const visible = () => [...active(), ...ended().slice(0, shown)];

function write(element, text) {
  // A screen reader tells every change of a status, also one to the same text.
  if (element.textContent !== text) element.textContent = text;
}

function show() {
  place($('active'), active());
  place($('ended'), ended().slice(0, shown));
  showWorkers();
  const left = ended().length - shown;
  $('more').hidden = left <= 0;
  write($('more'), left > MORE ? `Show ${MORE} more of ${left}` : `Show ${left} more`);
  $('ended-empty').hidden = ended().length > 0;
  const counts = ACTIVE.map(state => [of([state]).length, state]).filter(([count]) => count);
  write($('about'), counts.map(([count, state]) => `${count} ${state}`).join(' · '));
}

// Few, and the same ones all the time: their rows stay where they are.
function showWorkers() {
  const list = $('workers');
  $('workers-section').hidden = !workers.length;
  while (list.children.length > workers.length) list.lastElementChild.remove();
  workers.forEach((worker, index) => {
    const row = list.children[index] ?? list.appendChild(newWorker());
    const part = name => row.querySelector(name), up = worker.up ? 'up' : 'down';
    row.dataset.state = worker.draining ? 'draining' : up;
    write(part('.name'), worker.name);
    write(part('.state'), worker.draining ? `${up}, draining` : up);
    const heard = worker.heartbeat_seconds, names = worker.jobs.map(id => jobs.get(id)?.name ?? id);
    write(part('.facts'), [
      worker.host === worker.name ? '' : worker.host, worker.machine, worker.pid ? `process ${worker.pid}` : '',
      heard > 2 ? `silent for ${duration(heard)}` : '', names.join(', '),
    ].filter(Boolean).join(' · '));
    for (const button of row.querySelectorAll('button')) {
      button.hidden = worker.draining !== (button.dataset.act === 'undrain');
      button.setAttribute('aria-label', `${button.textContent} ${worker.host}`);
      button.dataset.host = worker.host;
    }
  });
}

function newWorker() {
  const row = $('worker').content.firstElementChild.cloneNode(true);
  for (const button of row.querySelectorAll('button')) {
    button.addEventListener('click', () => actOnHost(button.dataset.act, button.dataset.host));
  }
  return row;
}

function place(list, wanted) {
  const ids = new Set(wanted.map(job => job.id));
  for (const row of [...list.children]) if (!ids.has(row.dataset.id)) { row.remove(); rows.delete(row.dataset.id); }
  wanted.forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
    fill(row, job);
  });
}

function newRow(job) {
  const row = $('job').content.firstElementChild.cloneNode(true);
  row.dataset.id = job.id;
  row.querySelector('.name').href = `jobs/${job.id}/`;
  for (const button of row.querySelectorAll('button')) {
    button.addEventListener('click', () => act(button.dataset.act, job.id));
  }
  rows.set(job.id, row);
  return row;
}

function fill(row, job) {
  const part = name => row.querySelector(name);
  row.dataset.state = job.state;
  write(part('.name'), job.name);
  const weight = job.weight === 1 ? '' : `weight ${job.weight}`;
  write(part('.facts'), [
    job.entry, job.schedule, job.priority_class === 'background' ? 'background' : '', weight, since(job.updated),
  ].filter(Boolean).join(' · '));
  write(part('.state'), job.asked ? `${job.state}, to be ${job.asked}` : job.state);
  fillSteps(part('.steps'), job);
  fillCurve(part('.curve'), job);
  write(part('.cause'), job.state === 'finished' ? '' : job.cause);
  part('.cause').hidden = job.state === 'finished' || job.cause === 'submitted';
  const possible = job.asked === 'cancelled' ? [] : POSSIBLE[job.state] ?? [];
  for (const button of row.querySelectorAll('button')) {
    button.hidden = !possible.includes(button.dataset.act);
    button.setAttribute('aria-label', `${button.textContent} ${job.name}`);
  }
}

function fillSteps(part, { step, steps }) {
  const bar = part.firstElementChild;
  bar.hidden = !steps;
  bar.setAttribute('aria-valuemax', steps ?? 0);
  bar.setAttribute('aria-valuenow', step);
  bar.firstElementChild.style.width = `${steps ? Math.min(step / steps, 1) * 100 : 0}%`;
  write(part.lastElementChild, `step ${step.toLocaleString('en')}${steps ? ` of ${steps.toLocaleString('en')}` : ''}`);
}

function fillCurve(part, job) {
  const points = curves.get(job.id)?.points ?? [], svg = part.firstElementChild;
  part.hidden = points.length < 2;
  const key = `${points.length} ${points.at(-1)?.[0]} ${svg.clientWidth}`;
  if (svg.dataset.drawn !== key) {
    spark(svg, points);
    svg.dataset.drawn = key;
  }
  const last = points.at(-1);
  write(part.lastElementChild, !last ? '' : last[1] === null ? 'not finite' : last[1].toPrecision(4));
}

function since(at) {
  const seconds = Math.max(Date.now() / 1000 - at, 0);
  if (seconds < 60) return 'just now';
  for (const [size, name] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ago`;
  }
  return duration(seconds);
}

// ---- Acting

async function act(what, id) {
  if (what === 'cancel' && !await confirmed(jobs.get(id).name)) return;
  const buttons = rows.get(id)?.querySelectorAll('button') ?? [];
  for (const button of buttons) button.disabled = true;
  try {
    keep(await ask(`v1/jobs/${id}/${what}`, {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: '{}',
    }));
    tell('');
  } catch (error) {
    tell(error.message);
  }
  for (const button of buttons) button.disabled = false;
  show();
  turn();
}

async function actOnHost(what, host) {
  try {
    await ask(`v1/workers/${encodeURIComponent(host)}/${what}`, {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: '{}',
    });
    tell('');
  } catch (error) {
    tell(error.message);
  }
  turn();
}

function confirmed(name) {
  const dialog = $('confirm');
  write($('confirm-text'), `Cancel “${name}”? A cancelled job cannot be resumed.`);
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise(done => dialog.addEventListener('close', () => done(dialog.returnValue === 'yes'), { once: true }));
}

function tell(text) {
  write($('notice-text'), text);
  $('notice').hidden = !text;
}

// ---- Turns

function connection(state, text) {
  $('connection').dataset.state = state;
  write($('connection-text'), text);
}

async function turn() {
  if (asking) { again = true; return; }
  asking = true;
  clearTimeout(timer);
  try {
    do {
      again = false;
      await refresh();
      failures = 0;
      connection('live', 'live');
      show();
    } while (again);
  } catch (error) {
    failures += 1;
    connection('lost', 'not connected');
    if (error instanceof Refused) tell(error.message);
  }
  asking = false;
  schedule();
}

function schedule() {
  clearTimeout(timer);
  const wait = failures ? PAUSES[Math.min(failures, PAUSES.length) - 1] * 1000 : EVERY;
  timer = setTimeout(() => document.hidden ? schedule() : turn(), wait);
}

$('more').addEventListener('click', () => { shown += MORE; show(); turn(); });
$('dismiss').addEventListener('click', () => tell(''));
addEventListener('resize', show);
document.addEventListener('visibilitychange', () => document.hidden || turn());
turn();
