// What all canvases share: size, colours of the theme, patterns that are told apart without colour.

const NAMES = ["ink", "muted", "line", "panel", "sunken", "prefill", "decode", "again", "pad", "budget", "hatch"];

let colours = null;

export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    colours.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    colours.patterns = new Map();
  }
  return colours;
}

export function forgetPalette() {
  colours = null;
}

// The context of a canvas that is `height` CSS pixels high and as wide as its place, cleared.
export function begin(canvas, height) {
  const width = Math.floor(canvas.parentElement.clientWidth);
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
  return { context, width, height };
}

// A fill of parallel lines: kind "/" for one direction, "x" for both, "-" for thin ones on nothing.
export function hatched(context, base, line, kind) {
  const { patterns } = palette();
  const name = `${base}${line}${kind}`;
  if (!patterns.has(name)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    if (base) {
      pen.fillStyle = base;
      pen.fillRect(0, 0, 6, 6);
    }
    pen.strokeStyle = line;
    pen.lineWidth = kind === "-" ? 1 : 1.6;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift - 1, 7);
      pen.lineTo(shift + 7, -1);
      if (kind === "x") {
        pen.moveTo(shift - 1, -1);
        pen.lineTo(shift + 7, 7);
      }
    }
    pen.stroke();
    patterns.set(name, context.createPattern(tile, "repeat"));
  }
  return patterns.get(name);
}

// A sequence's own colour; neighbours in number differ in lightness too.
export function ownerColour(number) {
  const light = palette().isDark ? [72, 56, 64] : [42, 58, 34];
  return `hsl(${(number * 137.508) % 360} 62% ${light[number % 3]}%)`;
}
