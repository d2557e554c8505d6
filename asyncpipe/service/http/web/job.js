// What the page of a job shows beside its live view: its state and why, what can be done, and how it came there.

import { FAILED, agreed, carryOut, possible, showButtons } from './actions.js';
import { ask, keptFilters, turns } from './api.js';
import { speed } from './pace.js';
import { $, ago, lossText, size, span, whole, write } from './text.js';

const id = location.pathname.split('/').at(-2);
let job = null, told = '';

const time = at => new Date(at * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' });

async function refresh() {
  job = await ask(`v1/jobs/${id}`);
  show();
  $('kept').hidden = !job.attempts;
  await showFiles();
  // The state's history has grown only if the state or the number of attempts is another.
  const key = `${job.state} ${job.attempts} ${job.cause}`;
  if (key === told) return;
  const { transitions } = await ask(`v1/jobs/${id}/history`);
  showHistory(transitions);
  if (FAILED.includes(job.state)) await showFailedLoss();
  told = key;
}

function show() {
  document.title = `${job.name} · asyncpipe`;
  write($('job'), job.name);
  $('summary').hidden = false;
  $('summary').dataset.state = job.state;
  write($('state'), job.asked ? `${job.state}, to be ${job.asked}` : job.state);
  const failed = FAILED.includes(job.state);
  write($('waits'), failed ? '' : job.waits_for ?? (['finished', 'running'].includes(job.state) ? '' : job.cause));
  $('failure').hidden = !failed;
  write($('failure-title'), failed ? `${job.state === 'failed' ? 'Failed' : 'Quarantined'} after step ${whole(job.step)}, ${ago(job.updated)}` : '');
  write($('failure-cause'), failed ? job.cause : '');
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
    [job.state === 'running' ? 'Elapsed' : 'Trained for', job.trained_seconds > 0 ? span(job.trained_seconds) : ''],
    ['Time left', job.left_seconds ? `about ${span(job.left_seconds)}` : ''],
    ['Place in the queue', job.place ? whole(job.place) : ''],
    ['Devices', (job.devices ?? []).join(', ')],
    ['Schedule', job.schedule ?? ''],
    ['Entry', job.entry],
    ['Class', job.priority_class + (job.weight === 1 ? '' : `, weight ${job.weight}`)],
    ['Tags', (job.tags ?? []).join(', ')],
    ['Deadline', deadline ? time(deadline) : ''],
    ['Snapshot', job.snapshot ?? ''],
    ['Submitted', `${ago(job.submitted)}`],
    ['Attempts', job.attempts > 1 ? whole(job.attempts) : ''],
    ['Id', job.id],
  ].filter(([, value]) => value);
  const list = $('facts'), key = JSON.stringify(facts);
  if (list.dataset.shown === key) return;
  list.dataset.shown = key;
  list.replaceChildren(...facts.map(([name, value]) => {
    const pair = document.createElement('div'), term = document.createElement('dt'), text = document.createElement('dd');
    term.textContent = name;
    text.textContent = value;
    pair.append(term, text);
    return pair;
  }));
}

// What the loss was before it failed says more than that it failed.
async function showFailedLoss() {
  const { losses } = await ask(`v1/jobs/${id}/losses?after=${Math.max(job.step - 5, 0)}&limit=5`);
  if (!losses.length) return;
  const last = losses.map(row => lossText(row.loss)).join(', ');
  write($('failure-cause'), `${job.cause}\nThe last losses: ${last}.`);
}

function showHistory(transitions) {
  $('past').hidden = false;
  $('transitions').replaceChildren(...transitions.toReversed().map(each => {
    const item = document.createElement('li'), at = document.createElement('span'), state = document.createElement('span'), cause = document.createElement('p');
    item.dataset.state = each.to;
    at.className = 'faint';
    at.textContent = time(each.at);
    state.className = 'state';
    state.textContent = each.to;
    cause.textContent = each.cause;
    item.append(at, state, cause);
    return item;
  }));
}

// Asked for when they are looked at, and again when there is another snapshot.
async function showFiles() {
  const key = `${job.snapshot} ${job.state}`;
  if (!$('files').open || $('files').dataset.shown === key) return;
  const { artifacts } = await ask(`v1/jobs/${id}/artifacts`);
  $('files').dataset.shown = key;
  $('artifacts').replaceChildren(...artifacts.map(({ name, step, size: bytes }) => {
    const item = document.createElement('li'), link = document.createElement('a'), facts = document.createElement('span');
    const of = step === null ? '' : `of step ${whole(step)}`;
    link.href = `../../v1/jobs/${id}/artifacts/${encodeURIComponent(name)}${step === null ? '' : `?step=${step}`}`;
    link.download = '';
    link.textContent = name;
    if (of) link.setAttribute('aria-label', `${name} ${of}`);
    facts.className = 'faint';
    facts.textContent = [of, bytes === null ? '' : size(bytes)].filter(Boolean).join(' · ');
    item.append(link, facts);
    return item;
  }));
}

async function act(what) {
  if (!await agreed(what, `“${job.name}”`)) return;
  try {
    const after = await carryOut(what, id);
    if (after === null) return location.assign('../../');
    if (after.id !== id) return location.assign(`../${after.id}/`);
    job = after;
    refuse('');
    write($('said'), `${what}: ${job.state}`);
    show();
    // The button is gone: the next one takes its place, or the title.
    if (document.activeElement === document.body) ($('buttons').querySelector('button') ?? $('job')).focus();
  } catch (error) {
    refuse(error.message);
  }
  turn();
}

function refuse(text) {
  write($('refused-text'), text);
  $('refused').hidden = !text;
}

$('files').addEventListener('toggle', () => turn());
$('dismiss').addEventListener('click', () => { refuse(''); $('job').focus(); });
$('back').href = `../../${keptFilters()}`;

const turn = turns(refresh, 2, (state, text, problem) => { if (problem) refuse(problem); });
turn();
