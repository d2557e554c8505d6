// What can be done to a job, by its state, and how it goes. Who did it is in the service's audit and the job's history.

import { ask, me, send } from './api.js';
import { $, make, short, span, whole, write } from './text.js';

export const FAILED = ['failed', 'quarantined'];
const ENDED = [...FAILED, 'finished', 'cancelled'];

const ACTIONS = {
  pause: { label: 'Pause', can: job => ['queued', 'running'].includes(job.state) && !job.asked },
  resume: { label: 'Resume', can: job => job.state === 'paused' || job.asked === 'paused' },
  retry: { label: 'Retry', can: job => [...FAILED, 'cancelled'].includes(job.state) },
  fork: { label: 'Fork', can: job => ENDED.includes(job.state) },
  cancel: {
    label: 'Cancel', bad: true, can: job => !ENDED.includes(job.state) && job.asked !== 'cancelled',
    question: 'What was trained since the last snapshot is lost. It can be retried from there.',
  },
  delete: {
    label: 'Delete', bad: true, can: job => ENDED.includes(job.state),
    question: 'Its snapshots, losses and log are removed from disk. This cannot be undone.',
  },
};

// Who sees a job may fork it, if jobs may be submitted at all; the rest is for its owner, teams that may, and operators.
function may(act, job) {
  if (me.role === 'operate' || job.owner === me.user) return me.role !== 'read';
  const together = me.team_access === 'change' && job.teams.some(team => me.teams.includes(team));
  return me.role === 'submit' && (act === 'fork' || (together && act !== 'delete'));
}

export const possible = job => Object.keys(ACTIONS).filter(act => ACTIONS[act].can(job) && may(act, job));

// Carries out `act`; resolves to the job as it is then, or null if it is gone.
export async function carryOut(act, id) {
  if (act !== 'delete') return send(`v1/jobs/${id}/${act}`);
  await ask(`v1/jobs/${id}`, { method: 'DELETE' });
  return null;
}

// Whether somebody agrees to `act`, if it needs that; `which` is a name in quotes, or "3 jobs".
export function agreed(act, which) {
  const { label, question } = ACTIONS[act];
  return !question || confirm(`${label} ${which}? ${question}`);
}

// Has `box` show a button for each of `acts`. Those that stay are the same elements, so they keep the focus.
export function showButtons(box, acts, named, click) {
  for (const button of [...box.children]) if (!acts.includes(button.dataset.act)) button.remove();
  acts.forEach((act, index) => {
    const button = [...box.children].find(one => one.dataset.act === act) ?? newButton(act, click);
    button.setAttribute('aria-label', `${ACTIONS[act].label} ${named}`);
    if (box.children[index] !== button) box.insertBefore(button, box.children[index] ?? null);
  });
}

function newButton(act, click) {
  const button = make('button', ACTIONS[act].label, { type: 'button', 'data-act': act, class: ACTIONS[act].bad ? 'bad' : '' });
  button.addEventListener('click', () => click(act));
  return button;
}

// Shows what went wrong, until it is dismissed or something works.
export function complain(text) {
  write($('refused-text'), text);
  $('refused').hidden = !text;
}
$('dismiss').addEventListener('click', () => { complain(''); document.querySelector('h1').focus(); });

// By replica: 'cpu:0, cpu:1 | cpu:2, cpu:3'; what it asks for, if the queue has yet to choose them: 'any 2'.
export function devicesText({ devices, replicas, state, asks_for: asked }) {
  if (asked?.startsWith('any ') && (state === 'queued' || !devices?.length)) return asked;
  return (devices ?? []).map((device, i) => (i ? i % (devices.length / (replicas ?? 1)) ? ', ' : ' | ' : '') + device).join('');
}

export function speed({ steps_per_second: steps, tokens_per_second: tokens }) {
  if (!steps) return '';
  const paced = steps >= 1 ? `${short(steps)} steps/s` : `${span(1 / steps)} a step`;
  return tokens ? `${paced}, ${short(tokens)} tokens/s` : paced;
}

// In one line: how fast a job goes, when it will be done, or where it waits.
export function pace(job) {
  if (job.state === 'queued') return job.place ? `place ${whole(job.place)} in the queue` : '';
  const took = job.trained_seconds >= 1 ? span(job.trained_seconds) : '';
  if (job.state !== 'running') return took && `trained for ${took}`;
  return [speed({ steps_per_second: job.steps_per_second }), job.left_seconds ? `${span(job.left_seconds)} left` : took].filter(Boolean).join(' · ');
}
