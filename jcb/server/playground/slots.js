// The two pictures over time: which slot did what in each step, and how many tokens each step computed.

import { begin, hatched, ownerColour, palette } from "./paint.js";

const LEFT = 34;
const MIN_COLUMN = 7;

// Which frames are shown, and how wide a column is; the one at `end` is the last.
function columns(width, frames, end) {
  const step = width > 600 ? 10 : MIN_COLUMN;
  const count = Math.max(1, Math.floor((width - LEFT) / step));
  const first = Math.max(0, end - count + 1);
  return { step, first, x: (index) => width - (end - index + 1) * step };
}

export function drawSlots(canvas, history, end) {
  const { frames, limits } = history;
  const tall = Math.max(3, Math.min(18, Math.floor(250 / Math.max(limits.slots, 1))));
  const { context, width, height } = begin(canvas, limits.slots * tall + 20);
  const colours = palette();
  const bottom = height - 20;
  context.fillStyle = colours.sunken;
  context.fillRect(LEFT, 0, width - LEFT, bottom);
  drawSlotAxis(context, limits.slots, tall, width);
  if (end < 0) return;
  const { step, first, x } = columns(width, frames, end);
  const fills = [
    hatched(context, colours.prefill, colours.hatch, "/"),
    colours.decode,
    hatched(context, colours.again, colours.hatch, "x"),
  ];
  const gap = step > 8 ? 1 : 0.5;
  for (let index = first; index <= end; index++) {
    for (const [id, slot, , , kind] of frames[index].rows) {
      const top = slot * tall;
      context.fillStyle = fills[kind];
      context.fillRect(x(index), top + 0.5, step - gap, tall - 1);
      if (tall >= 9) {
        context.fillStyle = ownerColour(id);
        context.fillRect(x(index), top + tall - 3.5, step, 3);
      }
    }
  }
  drawStarts(context, history, first, end, x, tall);
  drawStepAxis(context, frames, first, end, x, bottom);
}

// Where a slot changes hands: a line in the colour of ink.
function drawStarts(context, history, first, end, x, tall) {
  context.fillStyle = palette().ink;
  const holders = new Map();
  for (let index = first; index <= end; index++) {
    for (const [id, slot] of history.frames[index].rows) {
      if (holders.has(slot) && holders.get(slot) !== id) context.fillRect(x(index) - 1, slot * tall, 1.5, tall);
      holders.set(slot, id);
    }
  }
}

function drawSlotAxis(context, slots, tall, width) {
  const colours = palette();
  const every = tall >= 11 ? 1 : Math.ceil(14 / tall);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let slot = 0; slot < slots; slot++) {
    context.fillStyle = colours.line;
    if (tall >= 9) context.fillRect(LEFT, slot * tall, width - LEFT, 0.5);
    context.fillStyle = colours.muted;
    if (slot % every === 0) context.fillText(String(slot), LEFT - 6, slot * tall + Math.max(tall / 2, 5));
  }
  context.save();
  context.translate(7, (slots * tall) / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText("slot", 0, 0);
  context.restore();
}

function drawStepAxis(context, frames, first, end, x, top) {
  const colours = palette();
  context.fillStyle = colours.muted;
  context.textBaseline = "top";
  context.textAlign = "center";
  let free = LEFT + 40;
  for (let index = first; index <= end; index++) {
    const place = x(index) + 4;
    if (frames[index].step % 10 !== 0 || place < free || place > x(end) - 30) continue;
    context.fillRect(place - 0.5, top, 1, 4);
    context.fillText(String(frames[index].step), place, top + 6);
    free = place + 64;
  }
  context.textAlign = "right";
  context.fillText(String(frames[end].step), x(end) + 8, top + 6);
  context.textAlign = "left";
  context.fillText("step", LEFT, top + 6);
}

export function drawTokens(canvas, history, end) {
  const { frames } = history;
  const { context, width, height } = begin(canvas, 92);
  const colours = palette();
  context.fillStyle = colours.sunken;
  context.fillRect(LEFT, 0, width - LEFT, height);
  if (end < 0) return;
  const { step, first, x } = columns(width, frames, end);
  let top = 8;
  for (let index = first; index <= end; index++) top = Math.max(top, frames[index].size);
  const y = (tokens) => 4 + (height - 4) * (1 - tokens / top);
  const prefill = hatched(context, colours.prefill, colours.hatch, "/");
  const again = hatched(context, colours.again, colours.hatch, "x");
  const pad = hatched(context, "", colours.pad, "-");
  for (let index = first; index <= end; index++) {
    const frame = frames[index];
    const sums = [0, 0, 0];
    for (const row of frame.rows) sums[row[4]] += row[3];
    let from = 0;
    for (const [count, fill] of [[sums[1], colours.decode], [sums[0], prefill], [sums[2], again]]) {
      context.fillStyle = fill;
      if (count) context.fillRect(x(index), y(from + count), step - 1, y(from) - y(from + count));
      from += count;
    }
    if (frame.size > from) {
      context.fillStyle = pad;
      context.fillRect(x(index), y(frame.size), step - 1, y(from) - y(frame.size));
      context.strokeStyle = colours.pad;
      context.lineWidth = 0.75;
      context.strokeRect(x(index) + 0.5, y(frame.size) + 0.5, step - 2, Math.max(y(from) - y(frame.size) - 0.5, 0));
    }
  }
  drawBudget(context, frames, first, end, x, y, step, top);
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(String(top), LEFT - 6, 2);
  context.textBaseline = "bottom";
  context.fillText("0", LEFT - 6, height);
}

function drawBudget(context, frames, first, end, x, y, step, top) {
  context.strokeStyle = palette().budget;
  context.lineWidth = 1.5;
  context.setLineDash([5, 3]);
  context.beginPath();
  for (let index = first; index <= end; index++) {
    if (!frames[index].budget || frames[index].budget > top) continue;
    context.moveTo(x(index), y(frames[index].budget));
    context.lineTo(x(index) + step, y(frames[index].budget));
  }
  context.stroke();
  context.setLineDash([]);
}
