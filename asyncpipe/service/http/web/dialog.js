// A job is retried or forked with other values: a dialog with a field for each, and what is wrong with them at the fields.

import { ask, send } from './api.js';
import { Fields, values } from './fields.js';
import { $, count, make, whole, write } from './text.js';

const TOLD = {
  retry: 'The job itself goes on. Its later steps and snapshots give way.',
  fork: 'A new job goes on from a copy of the snapshot; this one stays as it is.',
};

const snapshots = async id => {
  const { artifacts } = await ask(`v1/jobs/${id}/artifacts`).catch(() => ({ artifacts: [] }));
  return [...new Set(artifacts.map(({ step }) => step).filter(step => step !== null))];
};

// Asks for the values with which `act` is to go on, and carries it out; resolves to the job, or to nothing if nobody wants it.
export async function askForValues(act, id) {
  const label = act === 'fork' ? 'Fork' : 'Retry';
  const [job, known, steps] = await Promise.all([ask(`v1/jobs/${id}`), ask('v1/entries'), snapshots(id)]);
  const dialog = document.body.appendChild(make('dialog', '', { 'aria-labelledby': 'dialog-title' })), form = make('form', '', { novalidate: '' });
  const from = make('select', '', { id: 'dialog-from' }), box = make('div'), wrong = make('span', '', { class: 'wrong', role: 'alert' });
  const start = make('p', '', { class: 'field group' }), foot = make('p', '', { class: 'send' });
  const send_ = make('button', label, { type: 'submit', class: 'main' }), close = make('button', 'Close', { type: 'button' });
  from.append(make('option', job.snapshot ? `the newest snapshot, ${job.snapshot}` : 'the beginning', { value: '' }));
  from.append(...steps.map(step => make('option', `the snapshot after step ${whole(step)}`, { value: step })));
  if (job.snapshot) from.append(make('option', 'the beginning', { value: 0 }));
  start.append(make('label', 'Goes on from', { for: 'dialog-from' }), from);
  foot.append(send_, close, wrong);
  form.append(make('h2', `${label} “${job.name}”`, { id: 'dialog-title' }), make('p', TOLD[act], { class: 'faint' }), start, box, foot);
  dialog.append(form);
  const wanted = values(known, job.entry).filter(([key]) => act === 'fork' || key !== 'name');
  const fields = new Fields(box, wanted, { ...job, ...job.document }, ['parameters', 'training']);
  close.addEventListener('click', () => dialog.close());
  const done = new Promise(resolve => {
    dialog.addEventListener('close', () => { dialog.remove(); resolve(); });
    form.addEventListener('submit', async event => {
      event.preventDefault();
      const step = from.value === '' ? {} : { from_step: Number(from.value) };
      try {
        resolve(await send(`v1/jobs/${id}/${act}`, { ...step, set: fields.changes() }));
        dialog.close();
      } catch (error) {
        const rest = fields.show(error.problems ?? []), number = error.problems?.length;
        write(wrong, [number ? `${count(number, 'value')} must be changed.` : error.message, rest].filter(Boolean).join(' '));
      }
    });
  });
  dialog.showModal();
  return done;
}
