// What all pages use: elements, and numbers and times as text.

export const $ = id => document.getElementById(id);

// A new element with `text`, and with `attributes` if given.
export function make(name, text = '', attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  set(element, attributes);
  return element;
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

// Replaces what `list` shows by what `draw` returns, unless `data` is what it shows already.
export function fill(list, data, draw) {
  const shown = JSON.stringify(data);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...draw());
}

// Sets the text of an element. A screen reader tells every change of a status, also one to the same text.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Seconds with a unit, three digits.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${(seconds * 1e6).toPrecision(3)} µs`;
}

// Long times by their two largest units: "3 h 12 min".
export function span(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const at = units.findIndex(([size]) => whole >= size);
  const [[size, name], [next, below]] = [units[at], units[at + 1]];
  const rest = Math.floor(whole % size / next);
  return `${Math.floor(whole / size)} ${name}${rest ? ` ${rest} ${below}` : ''}`;
}

// How long ago a Unix time was, in its largest unit.
export function ago(at) {
  const seconds = Math.max(Date.now() / 1000 - at, 0);
  if (seconds < 60) return 'just now';
  const [size, name] = [[86400, 'd'], [3600, 'h'], [60, 'min']].find(([size]) => seconds >= size);
  return `${Math.floor(seconds / size)} ${name} ago`;
}

export const percent = share =>
  share === null || share === undefined ? '–' : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;

export const whole = number => number.toLocaleString('en');

// "1 step", "2 steps".
export const count = (number, thing) => `${whole(number)} ${thing}${number === 1 ? '' : 's'}`;

// At most four digits, and a letter for thousands: 12.3k.
export function short(value) {
  if (value === null || value === undefined) return '–';
  const [size, letter] = [[1e9, 'G'], [1e6, 'M'], [1e4, 'k']].find(([size]) => Math.abs(value) >= size) ?? [1, ''];
  const scaled = value / (letter === 'k' ? 1e3 : size);
  return `${Math.abs(scaled) >= 1000 ? scaled.toFixed(0) : +scaled.toPrecision(3)}${letter}`;
}

export const lossText = value =>
  value === null ? 'not finite' : Math.abs(value) >= 1e4 ? short(value) : value.toPrecision(4);

export function size(bytes) {
  if (bytes === null) return '–';
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 4);
  return `${+(bytes / 1024 ** power).toPrecision(3)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}
