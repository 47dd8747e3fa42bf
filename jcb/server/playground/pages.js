// The pool of KV pages: a cell a page (or several, in a large pool), in the colour of the sequence that holds it.

import { begin, hatched, ownerColour, palette } from "./paint.js";

const MOST_CELLS = 2400;

// How the pages of a frame are held: page → numbers of its holders.
export function holders(frame) {
  const found = new Map();
  for (const [id, pages] of frame.tables) {
    for (const page of pages) {
      const others = found.get(page);
      if (others) others.push(id);
      else found.set(page, [id]);
    }
  }
  return found;
}

function isCached(frame, page) {
  return ((frame.cachedPages[page >> 3] ?? 0) >> (page & 7)) & 1;
}

export function pagesPerCell(count) {
  return Math.max(1, Math.ceil(count / MOST_CELLS));
}

function layout(count, width) {
  let size = 18;
  while (size > 4 && Math.ceil(count / Math.floor(width / size)) * size > 190) size--;
  const across = Math.max(1, Math.floor(width / size));
  return { size, across, height: Math.ceil(count / across) * size };
}

export function drawPages(canvas, history, frame) {
  const { pages } = history.limits;
  const each = pagesPerCell(pages);
  const count = Math.ceil(pages / each);
  const { size, across, height } = layout(count, canvas.parentElement.clientWidth);
  const { context } = begin(canvas, Math.max(height, 20));
  const colours = palette();
  const held = frame ? holders(frame) : new Map();
  const kept = hatched(context, "", colours.pad, "/");
  const gap = size > 7 ? 2 : 1;
  for (let cell = 0; cell < count; cell++) {
    const x = (cell % across) * size, y = Math.floor(cell / across) * size, side = size - gap;
    let owners = null, cached = false;
    for (let page = 1 + cell * each; page <= Math.min(pages, (cell + 1) * each); page++) {
      const here = held.get(page);
      if (here && (!owners || here.length > owners.length)) owners = here;
      cached = cached || (frame && isCached(frame, page));
    }
    if (owners) {
      drawHeld(context, owners, x, y, side);
    } else {
      context.fillStyle = cached ? kept : colours.sunken;
      context.fillRect(x, y, side, side);
      context.strokeStyle = cached ? colours.pad : colours.line;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
  }
  return summary(history, frame, held);
}

// One owner: a full cell. Several: two triangles and a ring of ink around them.
function drawHeld(context, owners, x, y, side) {
  context.fillStyle = ownerColour(owners[0]);
  context.fillRect(x, y, side, side);
  if (owners.length === 1) return;
  context.fillStyle = ownerColour(owners[1]);
  context.beginPath();
  context.moveTo(x + side, y);
  context.lineTo(x + side, y + side);
  context.lineTo(x, y + side);
  context.fill();
  const { ink, panel } = palette();
  context.lineWidth = Math.min(2, side / 4);
  context.strokeStyle = ink;
  context.strokeRect(x + context.lineWidth / 2, y + context.lineWidth / 2, side - context.lineWidth, side - context.lineWidth);
  if (side < 9) return;
  context.fillStyle = panel;
  context.beginPath();
  context.arc(x + side / 2, y + side / 2, side / 6, 0, 7);
  context.fill();
}

function summary(history, frame, held) {
  if (!frame) return "No step yet.";
  const shared = [...held.values()].filter((owners) => owners.length > 1).length;
  const free = history.limits.pages - frame.used - frame.cached;
  return `${frame.used} of ${history.limits.pages} pages held by ${frame.tables.size} sequence${frame.tables.size === 1 ? "" : "s"}, ` +
    `${shared} of them shared; ${frame.cached} kept, ${free} free.`;
}
