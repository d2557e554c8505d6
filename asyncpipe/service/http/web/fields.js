// Fields for what a job is submitted with, made from the JSON schemas of a submission and of its entry. Every value has a
// dotted key, as in the API's answers: training.learning_rate. A field that is left empty has its default.

import { make, set, write } from './text.js';

// What a schema says once references and a possible null are resolved.
function plain(schema, root) {
  const { $ref, anyOf, ...own } = schema, some = anyOf?.filter(one => one.type !== 'null');
  const found = $ref ? root.$defs[$ref.split('/').at(-1)] : some?.length === 1 ? plain(some[0], root) : some ? { some } : {};
  return { ...found, ...own };
}

// [key, what is said of it, whether it must be given] of every value.
function leaves(schema, root, prefix = '') {
  return Object.entries(schema.properties ?? {}).flatMap(([name, said]) => {
    const found = plain(said, root), key = prefix + name;
    return found.properties ? leaves(found, root, `${key}.`) : [[key, found, schema.required?.includes(name) ?? false]];
  });
}

// All values of a submission for an entry, from the answer of v1/entries.
export function values({ submission, entries }, entry) {
  const own = entries.find(({ name }) => name === entry)?.parameters ?? {};
  return [...leaves(own, own, 'parameters.'), ...leaves(submission, submission).filter(([key]) => !['parameters', 'entry'].includes(key))];
}

export const valueOf = (document, key) => key.split('.').reduce((table, name) => table?.[name], document);
export const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);

export function textOf(value) {
  if (value === null || value === undefined) return '';
  if (Array.isArray(value) && value.every(one => typeof one === 'string')) return value.join(', ');
  if (Array.isArray(value) && value.every(Array.isArray)) return value.map(textOf).join(' | ');
  return typeof value === 'string' ? value : JSON.stringify(value);
}

const splitted = text => text.split(/[\s,]+/).filter(Boolean);

// What a text means as a value; what cannot be read stays a text, so that the service says what is wrong with it.
function parsed(text, key, { type, some }) {
  if (type === 'string') return text;
  if (key === 'pipeline.devices' && /^[^[{]*[a-z]/i.test(text)) return text.includes('|') ? text.split('|').map(splitted) : splitted(text);
  if (key === 'tags') return splitted(text);
  const number = Number(text);
  if (text.trim() && !Number.isNaN(number)) return Number.isSafeInteger(number) || !/^\d+$/.test(text) ? number : text;
  if (['integer', 'number'].includes(type) && !some) return text;
  try { return JSON.parse(text); } catch { return text; }
}

// The fields of `wanted` values, grouped by table, in `box`; `document` has what they say at first.
export class Fields {
  constructor(box, wanted, document, open = ['parameters', 'training', 'pipeline', '']) {
    this.fields = new Map();
    const groups = Map.groupBy(wanted, ([key]) => key.split('.').slice(0, -1).join('.'));
    box.replaceChildren(...[...groups].map(([table, found]) => {
      const group = make('details', '', { class: 'group', ...(open.includes(table) && { open: '' }) }), grid = make('div', '', { class: 'fields' });
      group.append(make('summary', table || 'job'), grid);
      grid.append(...found.map(leaf => this.field(leaf, valueOf(document, leaf[0]))));
      return group;
    }));
    this.begun = this.read();
  }

  field([key, said, needed], value) {
    const field = make('div', '', { class: 'field' }), id = `field-${key}`, choices = said.type === 'boolean' ? ['true', 'false'] : said.enum;
    const usual = said.default === undefined ? '' : textOf(said.default), shown = isSame(value, said.default) ? '' : textOf(value);
    const control = make(choices ? 'select' : 'input', '', { id, 'aria-describedby': `${id}-about ${id}-wrong`, ...(needed && { required: '' }) });
    if (choices) control.append(make('option', usual || '–', { value: '' }), ...choices.map(one => make('option', one)));
    else set(control, { placeholder: usual, autocomplete: 'off', spellcheck: 'false' });
    control.value = shown;
    field.append(
      make('label', `${key.split('.').at(-1)}${needed ? ' *' : ''}`, { for: id }), control,
      make('p', said.description ?? (key.startsWith('parameters.') ? said.type ?? '' : ''), { id: `${id}-about`, class: 'faint' }), make('p', '', { id: `${id}-wrong`, class: 'wrong' }),
    );
    this.fields.set(key, { control, said, wrong: field.lastChild });
    return field;
  }

  // The values of the fields that say something, by key.
  read() {
    const said = [...this.fields].filter(([, { control }]) => control.value.trim());
    return Object.fromEntries(said.map(([key, field]) => [key, parsed(field.control.value.trim(), key, field.said)]));
  }

  // What has been changed; null brings a default back.
  changes() {
    const now = this.read(), keys = Object.keys({ ...this.begun, ...now });
    return Object.fromEntries(keys.filter(key => !isSame(now[key], this.begun[key])).map(key => [key, now[key] ?? null]));
  }

  // Shows `problems` at their fields, and has the focus at the first; the text of those that belong to none.
  show(problems) {
    const rest = [], texts = new Map();
    for (const { key, text } of problems) {
      const own = [...this.fields.keys()].filter(one => key === one || key.startsWith(`${one}.`) || key.startsWith(`${one}[`))[0];
      if (own) texts.set(own, [...(texts.get(own) ?? []), text]);
      else rest.push(key ? `${key}: ${text}` : text);
    }
    for (const [key, { control, wrong }] of this.fields) {
      write(wrong, (texts.get(key) ?? []).join(' '));
      control.toggleAttribute('aria-invalid', texts.has(key));
      if (texts.has(key)) set(control, { 'aria-invalid': 'true' });
    }
    const first = [...this.fields].find(([key]) => texts.has(key))?.[1].control;
    first?.closest('details').setAttribute('open', '');
    first?.focus();
    return rest.join(' ');
  }
}

// The document in which each value stands where its dotted key says.
export function nested(given) {
  const made = {};
  for (const [key, value] of Object.entries(given)) {
    const names = key.split('.'), last = names.pop();
    names.reduce((table, name) => (table[name] ??= {}), made)[last] = value;
  }
  return made;
}
