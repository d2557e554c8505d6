// What can be done to a job, by its state. Who did it and why is in the service's audit and the job's history.

import { ask, send } from './api.js';
import { $, write } from './text.js';

const ACTIVE = ['queued', 'running', 'paused'];
export const ENDED = ['finished', 'failed', 'cancelled', 'quarantined'];
export const FAILED = ['failed', 'quarantined'];

const ACTIONS = {
  pause: { label: 'Pause', can: job => ['queued', 'running'].includes(job.state) && !job.asked },
  resume: { label: 'Resume', can: job => job.state === 'paused' || job.asked === 'paused' },
  retry: { label: 'Retry', can: job => ['failed', 'cancelled', 'quarantined'].includes(job.state) },
  fork: { label: 'Fork', can: job => ENDED.includes(job.state) },
  cancel: {
    label: 'Cancel', bad: true, can: job => ACTIVE.includes(job.state) && job.asked !== 'cancelled',
    title: which => `Cancel ${which}?`, text: 'What was trained since the last snapshot is lost. It can be retried from there.',
    yes: 'Cancel', no: 'Keep it',
  },
  delete: {
    label: 'Delete', bad: true, can: job => ENDED.includes(job.state), method: 'DELETE',
    title: which => `Delete ${which}?`, text: 'Its snapshots, losses and log are removed from disk. This cannot be undone.',
    yes: 'Delete', no: 'Keep it',
  },
};

export const possible = job => Object.keys(ACTIONS).filter(act => ACTIONS[act].can(job));

// Carries out `act`; resolves to the job as it is then, or null if it is gone.
export async function carryOut(act, id) {
  const { method } = ACTIONS[act];
  if (method !== 'DELETE') return send(`v1/jobs/${id}/${act}`);
  await ask(`v1/jobs/${id}`, { method });
  return null;
}

// Whether somebody agrees to `act`, if it needs that; `which` is a name in quotes, or "3 jobs".
export function agreed(act, which) {
  const { title, text, yes, no } = ACTIONS[act], dialog = $('confirm');
  if (!title) return Promise.resolve(true);
  write($('confirm-title'), title(which));
  write($('confirm-text'), text);
  write($('confirm-yes'), `${yes} ${which}`.length > 40 ? yes : `${yes} ${which}`);
  write(dialog.querySelector('[value=no]'), no);
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise(done => dialog.addEventListener('close', () => done(dialog.returnValue === 'yes'), { once: true }));
}

// Has `box` show a button for each of `acts`. Those that stay are the same elements, so they keep the focus.
export function showButtons(box, acts, named, click) {
  const have = new Map([...box.children].map(button => [button.dataset.act, button]));
  for (const [act, button] of have) if (!acts.includes(act)) button.remove();
  acts.forEach((act, index) => {
    const button = have.get(act) ?? newButton(act, click);
    button.setAttribute('aria-label', `${ACTIONS[act].label} ${named}`);
    if (box.children[index] !== button) box.insertBefore(button, box.children[index] ?? null);
  });
}

function newButton(act, click) {
  const button = document.createElement('button');
  button.type = 'button';
  button.dataset.act = act;
  button.textContent = ACTIONS[act].label;
  button.classList.toggle('bad', ACTIONS[act].bad === true);
  button.addEventListener('click', () => click(act));
  return button;
}

// Shows what went wrong, until it is dismissed or something works.
export function complain(text) {
  write($('notice-text'), text);
  $('notice').hidden = !text;
}

// Changes the page, and gives the focus back to what had it, or to what stands nearest to it if that is gone.
export function keepingFocus(change) {
  const before = document.activeElement, row = before?.closest('[data-id]');
  const list = row?.parentElement, place = row && list ? [...list.children].indexOf(row) : -1;
  change();
  if (!row || document.activeElement === before) return;
  const neighbour = row.isConnected ? row : list?.isConnected ? list.children[Math.min(place, list.children.length - 1)] : null;
  const target = before.isConnected && !before.hidden ? before : neighbour?.querySelector('.buttons button, .name') ?? $('title');
  target?.focus({ preventScroll: true });
}
