// A job is submitted: a form from the schema of its entry, empty or like another job (submit?like=ID).

import { ask, me, send } from './api.js';
import { Fields, nested, textOf, values } from './fields.js';
import { $, count, make, write } from './text.js';

const like = new URLSearchParams(location.search).get('like');
const [known, { schedules }, { devices, runs }, job] = await Promise.all([
  ask('v1/entries'), ask('v1/schedules'), ask('v1/devices'), like ? ask(`v1/jobs/${encodeURIComponent(like)}`).catch(() => null) : null,
]);
const document_ = job ? { ...job, code: null, ...job.document } : {};
let fields = null;

const entry = make('select', '', { id: 'entry' });
entry.append(...known.entries.map(({ name }) => make('option', name)));
entry.value = job?.entry ?? known.entries[0]?.name ?? '';
const chosen = make('div', '', { class: 'field' });
chosen.append(make('label', 'entry *', { for: 'entry' }), entry, make('p', '', { class: 'faint doc' }));

// The devices of the service, to be chosen with a click; how many jobs each has now is told.
function offerDevices(control) {
  const box = make('p', '', { class: 'states', role: 'group', 'aria-label': 'Devices' }), named = () => control.value.split(/[\s,]+/).filter(Boolean);
  for (const { name } of devices) {
    const jobs = runs.filter(run => run.ended === null && run.devices.includes(name)).length;
    const button = box.appendChild(make('button', jobs ? `${name}, ${count(jobs, 'job')}` : name, { type: 'button', 'aria-pressed': 'false' }));
    button.addEventListener('click', () => {
      const others = named().filter(one => one !== name && !/^\d+$/.test(one));
      control.value = (named().includes(name) ? others : [...others, name]).join(', ');
      control.dispatchEvent(new Event('input'));
    });
    control.addEventListener('input', () => button.setAttribute('aria-pressed', named().includes(name)));
  }
  control.after(box);
  control.dispatchEvent(new Event('input'));
}

function show(document) {
  const wanted = values(known, entry.value).map(([key, said, needed]) => [key, key === 'pipeline.schedule' ? { ...said, enum: [...schedules, 'auto'] } : said, needed]);
  const rank = ([key]) => Number(key.includes('.'));
  fields = new Fields($('fields'), wanted.toSorted((one, other) => rank(one) - rank(other)), document);
  $('fields').prepend(chosen);
  write(chosen.lastChild, known.entries.find(({ name }) => name === entry.value)?.parameters.description.replaceAll('``', '') ?? '');
  offerDevices(fields.fields.get('pipeline.devices').control);
}

entry.addEventListener('change', () => { show(nested(fields.read())); entry.focus(); });
$('submit-page').addEventListener('submit', async event => {
  event.preventDefault();
  try {
    const made = await send('v1/jobs', nested({ entry: entry.value, ...fields.read() }));
    location.assign(`jobs/${made.id}/`);
  } catch (error) {
    const rest = fields.show(error.problems ?? []), wrong = error.problems?.length;
    write($('wrong'), [wrong ? `${count(wrong, 'value')} must be changed.` : error.message, rest].filter(Boolean).join(' '));
  }
});
show(document_);
$('connection').hidden = true;
write($('about'), job ? `like ${job.name}` : '');
if (me.role === 'read') $('submit-page').querySelector('[type=submit]').disabled = true;
