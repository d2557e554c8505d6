// What the page of a job shows around its run: its state and why, what can be done, and how it came there.

import { FAILED, agreed, carryOut, complain, devicesText, possible, showButtons, speed } from './actions.js';
import { ask, turns } from './api.js';
import { $, ago, fill, lossText, make, size, span, whole, write } from './text.js';

const id = location.pathname.split('/').at(-2);
let job = null;

const time = at => new Date(at * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' });

async function refresh() {
  job = await ask(`v1/jobs/${id}`);
  show();
  const { transitions } = await ask(`v1/jobs/${id}/history`);
  fill($('transitions'), transitions, () => transitions.toReversed().map(transition));
  if (FAILED.includes(job.state)) await showFailure();
  if (!$('files').open) return;
  const { artifacts } = await ask(`v1/jobs/${id}/artifacts`);
  fill($('artifacts'), artifacts, () => artifacts.map(artifact));
}

function show() {
  document.title = `${job.name} · asyncpipe`;
  write($('job'), job.name);
  for (const part of ['nav', 'summary', 'past']) $(part).hidden = false;
  $('summary').dataset.state = job.state;
  write($('state'), job.asked ? `${job.state}, to be ${job.asked}` : job.state);
  const failed = FAILED.includes(job.state);
  write($('waits'), failed ? '' : job.waits_for ?? (['finished', 'running'].includes(job.state) ? '' : job.cause));
  $('failure').hidden = !failed;
  write($('failure-title'), `${job.state === 'failed' ? 'Failed' : 'Quarantined'} after step ${whole(job.step)}, ${ago(job.updated)}`);
  if (!$('failure-cause').textContent) write($('failure-cause'), job.cause);
  $('kept').hidden = !job.attempts;
  showButtons($('buttons'), possible(job), job.name, act);
  $('compare').hidden = !job.step;
  $('compare').setAttribute('aria-label', `Compare the loss of ${job.name}`);
  $('compare').href = `../../?compare=${id}`;
  showFacts();
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
async function showFailure() {
  const { losses } = await ask(`v1/jobs/${id}/losses?after=${Math.max(job.step - 5, 0)}&limit=5`);
  const last = losses.map(row => lossText(row.loss)).join(', ');
  write($('failure-cause'), last ? `${job.cause}\nThe last losses: ${last}.` : job.cause);
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
    const after = await carryOut(what, id);
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

document.body.dataset.ended = 'not running';
$('files').addEventListener('toggle', () => turn());
const turn = turns(refresh, 2, false);
turn();
