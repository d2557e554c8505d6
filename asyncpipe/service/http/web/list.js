// Rows of jobs in sections. A row is the same element as long as its job is shown, wherever it moves.

import { ask } from './api.js';
import { keepingFocus, possible, showButtons } from './actions.js';
import { extent, spark } from './charts.js';
import { choose, filter, query } from './filters.js';
import { pace } from './pace.js';
import { $, ago, count, lossText, short, whole, write } from './text.js';

const LIMIT = 100, REFRESHED = 300, POINTS = 80, CURVES_A_TURN = 8, MOST_CURVES = 400;

export const jobs = new Map();     // id -> what the API last said of it
const rows = new Map();            // id -> its row
const curves = new Map();          // id -> { points, asked: the step at which they were asked for }
const seen = new Set();            // ids of the rows on the screen
const sections = new Map();        // key -> { section, element, ids, next, shown }
export const picked = new Set();   // ids of the jobs whose boxes are ticked

const watcher = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) seen[isIntersecting ? 'add' : 'delete'](target.dataset.id);
  if (entries.some(entry => entry.isIntersecting)) loadCurves().catch(() => { /* the next turn tells */ });
}, { rootMargin: '200px' });

export const keep = job => jobs.set(job.id, job);

// ---- Asking

// Asks for the rows of a section again: page by page, as many as are shown, and of a long list only its beginning.
export async function load(section) {
  const known = sections.get(section.key) ?? newSection(section);
  const most = Math.min(known.shown, REFRESHED), ids = [];
  let after = null;
  do {
    const page = await ask(`v1/jobs?${query(section, Math.min(LIMIT, most - ids.length), after)}`);
    page.jobs.forEach(keep);
    ids.push(...page.jobs.map(job => job.id));
    after = page.next;
  } while (after && ids.length < most);
  const fresh = new Set(ids), rest = after && known.shown > REFRESHED ? known.ids.slice(most).filter(id => !fresh.has(id)) : [];
  known.ids = [...ids, ...rest];
  known.next = rest.length ? known.next : after;
}

async function loadMore(known) {
  const first = known.ids.length;
  const page = await ask(`v1/jobs?${query(known.section, first < 50 ? 25 : LIMIT, known.next)}`);
  page.jobs.forEach(keep);
  known.ids.push(...page.jobs.map(job => job.id).filter(id => !known.ids.includes(id)));
  known.shown = known.ids.length;
  known.next = page.next;
}

// A curve is asked for when its row is on the screen and its job has gone on since.
let loading = false;
async function loadCurves() {
  if (loading) return;
  loading = true;
  try {
    const stale = [...seen].map(id => jobs.get(id)).filter(job => job?.step > 0 && curves.get(job.id)?.asked !== job.step);
    for (const { id, step } of stale.slice(0, CURVES_A_TURN)) {
      const { losses } = await ask(`v1/jobs/${id}/losses?points=${POINTS}`);
      curves.delete(id);
      curves.set(id, { points: losses.map(row => [row.step, row.loss]), asked: step });
    }
    for (const id of [...curves.keys()].slice(0, Math.max(curves.size - MOST_CURVES, 0))) if (!seen.has(id)) curves.delete(id);
    if (stale.length) showCurves();
    if (stale.length > CURVES_A_TURN) setTimeout(() => loadCurves().catch(() => {}), 200);
  } finally {
    loading = false;
  }
}
export { loadCurves };

// ---- Sections

let act = () => {}, changed = () => {};
export function begin(handlers) { ({ act, changed } = handlers); }

function newSection(section) {
  const element = $('section').content.firstElementChild.cloneNode(true), heading = element.querySelector('h2');
  const known = { section, element, ids: [], next: null, shown: section.first };
  element.dataset.state = section.states?.length ? section.states[0] : '';
  heading.id = `section-${section.key}`;
  heading.tabIndex = -1;
  element.setAttribute('aria-labelledby', heading.id);
  write(element.querySelector('.label'), section.title);
  element.querySelector('.more').addEventListener('click', async event => {
    const { children } = element.querySelector('.jobs'), before = children.length;
    try {
      await loadMore(known);
      changed();
      // A button that is gone cannot keep the focus: the first of the new rows gets it.
      if (event.target.hidden) children[before]?.querySelector('.name').focus();
    } catch { /* the next turn tells */ }
  });
  element.querySelector('.all').addEventListener('click', () => act('compare', known.ids));
  sections.set(section.key, known);
  return known;
}

// A job whose state is another now is in another section at once, and not first when that is asked for.
function move(wanted) {
  for (const { section: { states }, ids } of [...sections.values()]) {
    for (const id of ids.filter(id => states && jobs.has(id) && !states.includes(jobs.get(id).state))) {
      const section = wanted.find(section => section.states?.includes(jobs.get(id).state));
      const known = section && (sections.get(section.key) ?? newSection(section));
      if (known && !known.ids.includes(id)) known.ids.unshift(id);
    }
  }
}

// Shows the sections that are wanted, and no others.
export function show(wanted, counts) {
  keepingFocus(() => {
    move(wanted);
    const shown = wanted.map(section => sections.get(section.key)).filter(known => known && here(known).length);
    const box = $('sections');
    for (const [key, known] of sections) if (!shown.includes(known)) {
      known.element.remove();
      if (!wanted.some(section => section.key === key)) sections.delete(key);
    }
    shown.forEach((known, index) => {
      if (box.children[index] !== known.element) box.insertBefore(known.element, box.children[index] ?? null);
      showSection(known, counts);
    });
    for (const id of [...rows.keys()]) if (!rows.get(id).isConnected) { watcher.unobserve(rows.get(id)); seen.delete(id); rows.delete(id); }
  });
  showCurves();
  return [...sections.values()].some(known => known.ids.length);
}

// The ids of a section's jobs that are in one of its states still.
function here({ section: { states }, ids }) {
  const shown = ids.filter(id => jobs.has(id) && (!states || states.includes(jobs.get(id).state)));
  const key = ORDERS[filter('sort')];
  return key ? shown.map(id => [key(jobs.get(id)), id]).sort(([a], [b]) => a < b ? -1 : a > b ? 1 : 0).map(([, id]) => id) : shown;
}

// Orders of the jobs that are shown; the API itself has the newest first, or the oldest.
const ORDERS = {
  updated: job => -job.updated, name: job => job.name.toLowerCase(), left: job => job.left_seconds ?? Infinity,
  loss: job => curves.get(job.id)?.points.at(-1)?.[1] ?? Infinity,
};

function showSection(known, counts) {
  const { section, element } = known, { states } = section, shown = here(known);
  place(element.querySelector('.jobs'), shown.map(id => jobs.get(id)));
  const more = element.querySelector('.more'), all = states && counts && !counts.narrowed ? states.reduce((sum, state) => sum + (counts[state] ?? 0), 0) : 0;
  write(element.querySelector('.many'), all > shown.length ? `${whole(shown.length)} of ${whole(all)}` : whole(shown.length));
  more.hidden = !known.next;
  write(more, `Show more ${section.title.toLowerCase()} jobs`);
  element.querySelector('.all').hidden = !filter('tag') || shown.filter(id => jobs.get(id).step > 0).length < 2;
}

function place(list, wanted) {
  const ids = new Set(wanted.map(job => job.id));
  // A section that was away may have rows that are forgotten.
  for (const row of [...list.children]) if (!ids.has(row.dataset.id) || rows.get(row.dataset.id) !== row) row.remove();
  wanted.forEach((job, index) => {
    const row = rows.get(job.id) ?? newRow(job);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
    fill(row, job);
  });
}

// ---- Rows

function newRow(job) {
  const row = $('job').content.firstElementChild.cloneNode(true);
  row.dataset.id = job.id;
  row.querySelector('.name').href = `jobs/${job.id}/`;
  row.querySelector('.pick').addEventListener('change', event => {
    picked[event.target.checked ? 'add' : 'delete'](job.id);
    changed();
  });
  rows.set(job.id, row);
  watcher.observe(row);
  return row;
}

function fill(row, job) {
  const part = name => row.querySelector(name);
  row.dataset.state = job.state;
  const pick = part('.pick');
  pick.checked = picked.has(job.id);
  pick.setAttribute('aria-label', `Choose ${job.name}`);
  write(part('.name'), job.name);
  fillTags(part('.tags'), job);
  write(part('.facts'), facts(job).join(' · '));
  fillState(part('.state'), job);
  fillSteps(part('.steps'), job);
  write(part('.cause'), reason(job));
  part('.cause').hidden = !reason(job);
  showButtons(part('.buttons'), possible(job), job.name, what => act(what, [job.id]));
}

function facts(job) {
  const weight = job.weight === 1 ? '' : `weight ${job.weight}`, places = job.devices ?? [];
  return [
    job.entry, job.schedule, places.length > 2 ? count(places.length, 'device') : places.join(', '),
    job.priority_class === 'background' ? 'background' : '', weight, ago(job.updated),
  ].filter(Boolean);
}

function fillTags(box, job) {
  const wanted = (job.tags ?? []).map(tag => ['tag', tag]);
  const key = JSON.stringify(wanted);
  if (box.dataset.shown === key) return;
  box.dataset.shown = key;
  box.replaceChildren(...wanted.map(([kind, text]) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = text;
    button.setAttribute('aria-label', `Only jobs of ${kind} ${text}`);
    button.addEventListener('click', () => { choose({ [kind]: text }); changed(true); });
    return button;
  }));
}

function fillState(part, job) {
  const asked = job.asked ? `to be ${job.asked}` : '';
  const key = `${job.state} ${asked}`;
  if (part.dataset.shown === key) return;
  part.dataset.shown = key;
  part.textContent = job.state;
  if (asked) part.appendChild(document.createElement('small')).textContent = asked;
}

function fillSteps(part, job) {
  const { step, steps } = job, bar = part.firstElementChild;
  bar.hidden = !steps;
  bar.setAttribute('aria-label', `Training steps of ${job.name}`);
  bar.setAttribute('aria-valuemax', steps ?? 0);
  bar.setAttribute('aria-valuenow', Math.min(step, steps ?? step));
  bar.firstElementChild.style.width = `${steps ? Math.min(step / steps, 1) * 100 : 0}%`;
  write(part.querySelector('.done'), `step ${whole(step)}${steps ? ` of ${whole(steps)}` : ''}`);
  write(part.querySelector('.pace'), pace(job));
}

// Why a job is in its state, where that says something.
export function reason(job) {
  if (job.state === 'queued') return job.waits_for ?? (job.cause === 'submitted' ? '' : job.cause);
  if (job.state === 'running') return job.waits_for ?? '';
  return job.state === 'finished' ? '' : job.cause;
}

// ---- Curves

// Curves of one entry have the same axes, so that they can be compared; a run that went astray does not flatten the others.
function showCurves() {
  const scales = new Map();
  for (const failed of [false, true]) {
    const groups = Map.groupBy([...rows.keys()].map(id => jobs.get(id)).filter(job => job && (job.state === 'failed') === failed), job => job.entry);
    for (const [entry, of] of groups) {
      const points = of.flatMap(job => curves.get(job.id)?.points ?? []), values = extent(points);
      if (values && !scales.has(entry)) scales.set(entry, { values, steps: [0, of.reduce((most, job) => Math.max(most, curves.get(job.id)?.points.at(-1)?.[0] ?? 0), 1)] });
    }
  }
  for (const [id, row] of rows) if (jobs.has(id)) fillCurve(row.querySelector('.curve'), jobs.get(id), scales);
}

function fillCurve(part, job, scales) {
  const points = curves.get(job.id)?.points ?? [], svg = part.querySelector('.spark'), scale = scales.get(job.entry);
  part.classList.toggle('none', points.length < 2 || !scale);
  if (points.length < 2 || !scale) return;
  const key = `${points.length} ${points.at(-1)[0]} ${svg.clientWidth} ${scale.values} ${scale.steps}`;
  if (svg.dataset.drawn !== key && svg.clientWidth) {
    spark(svg, points, scale);
    svg.dataset.drawn = key;
  }
  const [low, high] = part.querySelector('.scale').children;
  write(low, short(scale.values[1]));
  write(high, short(scale.values[0]));
  write(part.querySelector('.loss span'), lossText(points.at(-1)[1]));
}
