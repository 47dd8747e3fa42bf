// What the events told, step by step: each frame is one step with the pages that every sequence held in it.

const KEPT = 3000;

export class History {
  constructor() {
    this.frames = [];
    this.limits = { slots: 0, max_tokens: 0, page_size: 0, pages: 0 };
    this.people = new Map(); // number of a sequence → what was told when it joined
    this.tables = new Map(); // number of a sequence → its pages
    this.cached = new Uint8Array(0); // one bit a page
    this.knobs = null;
    this.status = {};
    this.lost = 0;
  }

  // A start, or a new one after steps were lost.
  begin(state) {
    this.limits = state;
    this.knobs = state.knobs;
    this.lost = state.lost;
    this.tables = new Map();
    for (const sequence of state.sequences) {
      this.people.set(sequence.id, sequence);
      if (sequence.slot >= 0) this.tables.set(sequence.id, sequence.pages);
    }
  }

  add(step) {
    for (const joined of step.joined) this.people.set(joined.id, joined);
    if (step.left.length || step.pages.length) {
      this.tables = new Map(this.tables); // frames before this one keep theirs
      for (const id of step.left) this.tables.delete(id);
      for (const [id, known, more] of step.pages) {
        this.tables.set(id, [...(this.tables.get(id) ?? []).slice(0, known), ...more]);
      }
    }
    if (step.cached_map !== undefined) {
      this.cached = Uint8Array.from(atob(step.cached_map), (character) => character.charCodeAt(0));
    }
    const budget = this.knobs?.max_num_batched_tokens.value ?? 0;
    this.frames.push({ ...step, tables: this.tables, cachedPages: this.cached, budget });
    if (this.frames.length > KEPT) this.trim();
  }

  trim() {
    this.frames.splice(0, this.frames.length - KEPT + 300);
    const oldest = Math.min(...this.frames[0].tables.keys(), ...this.tables.keys(), Infinity);
    for (const id of this.people.keys()) if (id < oldest && this.people.size > KEPT) this.people.delete(id);
  }
}

// The numbers above the pictures, as of frame `end`.
export function figures(frames, end) {
  const now = frames[end];
  let tokens = 0, asked = 0, computed = 0, begin = now.t;
  const gaps = [], firsts = [];
  for (let i = end; i >= 0 && now.t - frames[i].t < 10; i--) {
    const frame = frames[i];
    gaps.push(...frame.itl_ms);
    if (now.t - frame.t > 5) continue;
    begin = frame.t;
    if (i < end) tokens += frames[i + 1].tokens;
    asked += frame.rows.reduce((sum, row) => sum + row[3], 0);
    computed += frame.size;
  }
  for (let i = end; i >= 0 && firsts.length < 50; i--) firsts.push(...frames[i].ttft_ms);
  return {
    rate: now.t > begin ? tokens / (now.t - begin) : 0,
    ttft: percentile(firsts.map((value) => [value, 1]), 0.5),
    itl50: percentile(gaps, 0.5),
    itl95: percentile(gaps, 0.95),
    padding: computed ? 1 - asked / computed : 0,
    hits: now.queried_tokens ? now.hit_tokens / now.queried_tokens : 0,
  };
}

// Of values with weights; NaN of none.
function percentile(pairs, part) {
  const sorted = [...pairs].sort((a, b) => a[0] - b[0]);
  let left = part * sorted.reduce((sum, [, weight]) => sum + weight, 0);
  for (const [value, weight] of sorted) {
    left -= weight;
    if (left <= 0) return value;
  }
  return NaN;
}
