// The page of the devices, or the form for a new job: which one is the last part of its address.

import { $, write } from './text.js';

const name = location.pathname.split('/').at(-1), title = { devices: 'Devices', submit: 'Submit a job' }[name];
document.title = `${title} · asyncpipe`;
write($('title'), title);
document.querySelector(`nav [href=${name}]`).setAttribute('aria-current', 'page');
$(`${name}-page`).hidden = false;
await import(`./${name}.js`);
