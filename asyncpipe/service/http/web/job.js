// What the page of a job shows around its run: its state and why, what can be done, and how it came there.

import { FAILED, agreed, carryOut, complain, devicesText, possible, showButtons, speed } from './actions.js';
import { ask, me, turns } from './api.js';
import { askForValues } from './dialog.js';
import { isSame, textOf, valueOf, values } from './fields.js';
import { curve, figures, showCurve } from './live.js';
import * as log from './log.js';
import { $, ago, fill, lossText, make, size, span, whole, write } from './text.js';

const id = location.pathname.split('/').at(-2);
let job = null, known = null, rows = [], drawn = -1, told = '';

// What the rows of the job have beside what the run itself shows.
const OWN = { learning_rate: 'Learning rate', gradient_norm: 'Gradient norm' };
for (const [name, label] of Object.entries(OWN)) figures[name] = { label, points: () => rows.map(row => [row.step, row[name]]) };
showCurve();

const time = at => new Date(at * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' });

async function refresh() {
  job = await ask(`v1/jobs/${id}`);
  known ??= await ask('v1/entries');
  show();
  if (drawn !== job.step && $('curve-figure').value in OWN) {
    rows = (await ask(`v1/jobs/${id}/losses?points=600`)).losses;
    drawn = job.step;
    showCurve();
  }
  const { transitions } = await ask(`v1/jobs/${id}/history`), runs = transitions.filter(({ to }) => to === 'running');
  curve.marks = runs.map(({ step }, index) => [step, `run ${index + 1}`]).filter(([step], index) => index && step !== null);
  fill($('transitions'), transitions, () => transitions.toReversed().map(transition));
  const now = `${job.state} ${job.attempts}`, is_new = now !== told;
  told = now;
  if (is_new && job.attempts) log.show(id);
  if (FAILED.includes(job.state)) await showFailure(is_new);
  if (!$('files').open) return;
  const { artifacts } = await ask(`v1/jobs/${id}/artifacts`);
  fill($('artifacts'), artifacts, () => artifacts.map(artifact));
}

function show() {
  document.title = `${job.name} · asyncpipe`;
  write($('job'), job.name);
  for (const part of ['nav', 'summary', 'given', 'past']) $(part).hidden = false;
  $('summary').dataset.state = job.state;
  write($('state'), job.asked ? `${job.state}, to be ${job.asked}` : job.state);
  const failed = FAILED.includes(job.state);
  write($('waits'), failed ? '' : job.waits_for ?? (job.state === 'finished' || job.cause === 'it is its turn' ? '' : job.cause));
  $('failure').hidden = !failed;
  write($('failure-title'), `${job.state === 'failed' ? 'Failed' : 'Quarantined'} after step ${whole(job.step)}, ${ago(job.updated)}`);
  if (!$('failure-cause').textContent) write($('failure-cause'), job.cause);
  $('kept').hidden = !job.attempts;
  showButtons($('buttons'), possible(job), job.name, act);
  $('compare').hidden = !job.step;
  $('compare').setAttribute('aria-label', `Compare the loss of ${job.name}`);
  $('compare').href = `../../?compare=${id}`;
  $('like').href = `../../submit?like=${id}`;
  $('like').hidden = me.role === 'read';
  showFacts();
  showGiven();
}

// The values that it was submitted with: those that are not the default first.
function showGiven() {
  const document = { ...job, ...job.document }, all = values(known, job.entry).filter(([key]) => key.includes('.'));
  const line = ([key, said]) => {
    const row = make('tr'), head = row.appendChild(make('th', '', { scope: 'row', title: said.description ?? '' })), [table, name] = key.split('.');
    const value = textOf(valueOf(document, key) ?? said.default), usual = textOf(said.default);
    head.append(`${table}.`, make('wbr'), name);
    row.append(make('td', value || '–'), ...(value === usual ? [] : [make('td', usual || '–', { class: 'faint' })]));
    return row;
  };
  const isUsual = ([key, said]) => [undefined, null].includes(valueOf(document, key)) || isSame(valueOf(document, key), said.default);
  fill($('changed'), [job.document, 1], () => all.filter(leaf => !isUsual(leaf)).map(line));
  fill($('unchanged'), [job.document, 2], () => all.filter(isUsual).map(line));
}

function showFacts() {
  const { steps, step, deadline } = job;
  const facts = [
    ['Steps', steps ? `${whole(step)} of ${whole(steps)}` : whole(step)],
    ['Speed', speed(job)],
    ['Trained for', job.trained_seconds > 0 ? span(job.trained_seconds) : ''],
    ['Time left', job.left_seconds ? `about ${span(job.left_seconds)}` : ''],
    ['Place in the queue', job.place ? whole(job.place) : ''],
    ['Devices', devicesText(job)],
    ['Asked for', job.asks_for?.startsWith('any ') ? job.asks_for : ''],
    ['Owner', job.owner ?? ''],
    ['Teams', (job.teams ?? []).join(', ')],
    ['Code', job.code?.slice(0, 12) ?? ''],
    ['Schedule', job.schedule ?? ''],
    ['Entry', job.entry],
    ['Class', job.priority_class + (job.weight === 1 ? '' : `, weight ${job.weight}`) + (job.priority ? `, priority ${job.priority}` : '')],
    ['Tags', job.tags.join(', ')],
    ['Deadline', deadline ? time(deadline) : ''],
    ['Snapshot', job.snapshot ?? ''],
    ['Submitted', `${ago(job.submitted)}`],
    ['Attempts', job.attempts > 1 ? whole(job.attempts) : ''],
    ['Id', job.id],
  ].filter(([, value]) => value);
  fill($('facts'), facts, () => facts.map(([name, value]) => {
    const pair = make('div');
    pair.append(make('dt', name), make('dd', value));
    return pair;
  }));
}

// What the loss was before it failed says more than that it failed.
async function showFailure(is_new) {
  const { losses } = await ask(`v1/jobs/${id}/losses?after=${Math.max(job.step - 5, 0)}&limit=5`);
  const last = losses.map(row => lossText(row.loss)).join(', ');
  write($('failure-cause'), last ? `${job.cause}\nThe last losses: ${last}.` : job.cause);
  if (!is_new) return;
  write($('failure-lines'), await log.traceback(id));
  $('failure-trace').hidden = !$('failure-lines').textContent;
}

function transition({ to, at, cause }) {
  const item = make('li', '', { 'data-state': to });
  item.append(make('span', time(at), { class: 'faint' }), make('span', to, { class: 'state' }), make('p', cause));
  return item;
}

function artifact({ name, step, size: bytes }) {
  const item = make('li'), of = step === null ? '' : `of step ${whole(step)}`, query = step === null ? '' : `?step=${step}`;
  const href = `../../v1/jobs/${id}/artifacts/${encodeURIComponent(name)}${query}`;
  item.append(
    make('a', name, { href, download: '', 'aria-label': `${name} ${of}`.trim() }),
    make('span', [of, bytes === null ? '' : size(bytes)].filter(Boolean).join(' · '), { class: 'faint' }),
  );
  return item;
}

async function act(what) {
  if (!agreed(what, `“${job.name}”`)) return;
  try {
    const after = await (['retry', 'fork'].includes(what) ? askForValues(what, id) : carryOut(what, id));
    if (after === undefined) return;
    if (after === null) return location.assign('../../');
    if (after.id !== id) return location.assign(`../${after.id}/`);
    job = after;
    complain('');
    write($('said'), `${what}: ${job.state}`);
    show();
    // The button is gone: the next one takes its place, or the title.
    if (document.activeElement === document.body) ($('buttons').querySelector('button') ?? $('job')).focus();
  } catch (error) {
    complain(error.message);
  }
  turn();
}

$('usual').open = matchMedia('(min-width: 60rem)').matches;
$('files').addEventListener('toggle', () => turn());
$('curve-figure').addEventListener('change', () => turn());
const turn = turns(refresh, 2, false);
turn();
