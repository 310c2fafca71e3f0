/** What a rank wrote, as elements: colours kept, links made, all that could deceive made visible. Text, never markup. */
import { ESCAPE, splitsPair } from '../logtext';

/** How a run of characters looks. A colour is 0 to 15 (the theme's), `rgb(…)`, or null: that of the text. */
export interface Look {
  ink: number | string | null;
  ground: number | string | null;
  bold: boolean;
  faint: boolean;
  italic: boolean;
  underline: boolean;
  struck: boolean;
  inverse: boolean;
}

export interface Run {
  text: string;
  look: Look;
}

const PLAIN: Look = {
  ink: null,
  ground: null,
  bold: false,
  faint: false,
  italic: false,
  underline: false,
  struck: false,
  inverse: false
};

/** Attributes by their codes; each of the codes 22 to 29 takes some back. */
const SETS: Record<number, Partial<Look>> = {
  1: { bold: true },
  2: { faint: true },
  3: { italic: true },
  4: { underline: true },
  7: { inverse: true },
  9: { struck: true },
  21: { underline: true },
  22: { bold: false, faint: false },
  23: { italic: false },
  24: { underline: false },
  27: { inverse: false },
  29: { struck: false },
  39: { ink: null },
  49: { ground: null }
};

const SGR = /^\x1b\[([0-9;:]*)m$/;

/** The text without its escape sequences, in runs of one look. The texts put together are `plain(text)`. */
export function runs(text: string): Run[] {
  const found: Run[] = [];
  let look = PLAIN;
  let position = 0;
  const take = (to: number): void => {
    if (to > position) {
      found.push({ text: text.slice(position, to), look });
    }
  };
  for (const match of text.matchAll(ESCAPE)) {
    take(match.index);
    position = match.index + match[0].length;
    const codes = SGR.exec(match[0]);
    look = codes ? lookAfter(look, codes[1]!) : look;
  }
  take(text.length);
  return found;
}

function lookAfter(look: Look, text: string): Look {
  // ISO 8613-6 has colons within a colour, and an empty place for its colour space.
  const codes = text
    .replace(/([34]8:2):\d*:(?=\d+:\d+:\d+)/g, '$1:')
    .split(/[;:]/)
    .map(Number);
  let next = look;
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i]!;
    if (code === 38 || code === 48) {
      const [colour, used] = colourAt(codes, i + 1);
      next = colour === null ? next : { ...next, [code === 38 ? 'ink' : 'ground']: colour };
      i += used;
    } else {
      next = code === 0 ? PLAIN : { ...next, ...(SETS[code] ?? themeColour(code)) };
    }
  }
  return next;
}

function themeColour(code: number): Partial<Look> {
  const number = code % 10;
  if (number > 7) {
    return {};
  }
  switch (Math.floor(code / 10)) {
    case 3:
      return { ink: number };
    case 4:
      return { ground: number };
    case 9:
      return { ink: number + 8 };
    case 10:
      return { ground: number + 8 };
    default:
      return {};
  }
}

/** `5;n` or `2;r;g;b` from `index` on: the colour (null: none) and how many codes it took. */
function colourAt(codes: number[], index: number): [number | string | null, number] {
  const [kind, first, second, third] = codes.slice(index, index + 4);
  const isByte = (value: number | undefined): boolean => value !== undefined && value >= 0 && value <= 255;
  if (kind === 5) {
    return [isByte(first) ? paletteColour(first!) : null, 2];
  }
  if (kind === 2) {
    return [[first, second, third].every(isByte) ? `rgb(${first}, ${second}, ${third})` : null, 4];
  }
  return [null, codes.length];
}

/** xterm's 256 colours: 16 of the theme, a cube of 6 × 6 × 6, 24 greys. */
function paletteColour(number: number): number | string {
  if (number < 16) {
    return number;
  }
  if (number > 231) {
    const grey = 8 + 10 * (number - 232);
    return `rgb(${grey}, ${grey}, ${grey})`;
  }
  const level = (step: number): number => (step === 0 ? 0 : 55 + 40 * step);
  const [red, green, blue] = [36, 6, 1].map(size => level(Math.floor((number - 16) / size) % 6));
  return `rgb(${red}, ${green}, ${blue})`;
}

/**
 * C0 but the tab, DEL, C1, what changes the direction of the text around it (Unicode's bidi controls), what breaks
 * lines, and halves of characters.
 */
const CONTROLS =
  /[\0-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Control characters as `\x00` and `\u202e`. */
export function visible(text: string): string {
  return text.replace(CONTROLS, character => {
    const code = character.charCodeAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, '0')}` : `\\x${code.padStart(2, '0')}`;
  });
}

/** As it is shown, without colours: for the clipboard. */
export function shownText(text: string): string {
  return visible(text.includes('\x1b') ? text.replace(ESCAPE, '') : text);
}

/** As `shownText`, line by line. */
export function shownLines(text: string): string {
  return text.split('\n').map(shownText).join('\n');
}

const LINK = /\bhttps?:\/\/[^\s<>"'`\\^{|}\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+/gi;

/** Where in `text` links are; what ends a sentence or a bracket around one is not part of it. */
function linksIn(text: string): [number, number][] {
  const found: [number, number][] = [];
  if (!text.includes('://')) {
    return found;
  }
  for (const match of text.matchAll(LINK)) {
    let address = match[0].replace(/[.,;:!?*_~]+$/, '');
    for (const [open, close] of ['()', '[]'] as const) {
      while (address.endsWith(close!) && address.split(open!).length < address.split(close!).length) {
        address = address.slice(0, -1).replace(/[.,;:!?*_~]+$/, '');
      }
    }
    if (isWeb(address)) {
      found.push([match.index, match.index + address.length]);
    }
  }
  return found;
}

function isWeb(address: string): boolean {
  try {
    return ['http:', 'https:'].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

/** Characters of a line that are put on the screen. */
export const SHOWN_CHARACTERS = 4000;

export interface Drawn {
  element: DocumentFragment;
  /** Characters of the line that are not shown. */
  cut: number;
}

/** The line as elements. `marks`: parts of the plain text, in order, that a search found; `strong` is the chosen one. */
export function draw(line: string, marks: readonly (readonly [number, number])[] = [], strong = false): Drawn {
  const element = document.createDocumentFragment();
  // Escapes take room too: a line of nothing else must not be parsed to its end.
  const raw = line.length > SHOWN_CHARACTERS * 4 ? line.slice(0, SHOWN_CHARACTERS * 4) : line;
  let position = 0;
  for (const run of runs(raw)) {
    const room = SHOWN_CHARACTERS - position;
    if (room <= 0) {
      break;
    }
    const end = run.text.length > room && splitsPair(run.text, room) ? room - 1 : room;
    const text = run.text.slice(0, end);
    element.append(drawRun(text, run.look, position, marks, strong));
    position += run.text.length;
  }
  const shown = Math.min(position, SHOWN_CHARACTERS);
  return { element, cut: line.length > raw.length || position > SHOWN_CHARACTERS ? line.length - shown : 0 };
}

function drawRun(
  text: string,
  look: Look,
  at: number,
  marks: readonly (readonly [number, number])[],
  strong: boolean
): Node {
  const parts = document.createDocumentFragment();
  const links = linksIn(text);
  const here = marks
    .map(([from, to]) => [from - at, to - at] as const)
    .filter(([from, to]) => to > 0 && from < text.length);
  let position = 0;
  const upTo = (to: number): void => {
    parts.append(...drawMarked(text, position, to, here, strong));
    position = to;
  };
  for (const [from, to] of links) {
    upTo(from);
    const link = document.createElement('a');
    link.setAttribute('href', text.slice(from, to));
    link.setAttribute('rel', 'noopener noreferrer');
    link.setAttribute('target', '_blank');
    link.append(...drawMarked(text, from, to, here, strong));
    parts.append(link);
    position = to;
  }
  upTo(text.length);
  return dressed(parts, look);
}

function drawMarked(
  text: string,
  from: number,
  to: number,
  marks: readonly (readonly [number, number])[],
  strong: boolean
): Node[] {
  const nodes: Node[] = [];
  let position = from;
  for (const [low, high] of marks) {
    const [start, stop] = [Math.max(low, position), Math.min(high, to)];
    if (start < stop) {
      nodes.push(...drawControls(text.slice(position, start)));
      const mark = document.createElement('mark');
      mark.className = strong ? 'td-hit td-hit-current' : 'td-hit';
      mark.append(...drawControls(text.slice(start, stop)));
      nodes.push(mark);
      position = stop;
    }
  }
  nodes.push(...drawControls(text.slice(position, to)));
  return nodes;
}

function drawControls(text: string): Node[] {
  const nodes: Node[] = [];
  let position = 0;
  for (const match of text.matchAll(CONTROLS)) {
    if (match.index > position) {
      nodes.push(document.createTextNode(text.slice(position, match.index)));
    }
    const control = document.createElement('span');
    control.className = 'td-control';
    control.textContent = visible(match[0]);
    nodes.push(control);
    position = match.index + 1;
  }
  if (position < text.length) {
    nodes.push(document.createTextNode(text.slice(position)));
  }
  return nodes;
}

function dressed(content: DocumentFragment, look: Look): Node {
  if (look === PLAIN) {
    return content;
  }
  const element = document.createElement('span');
  for (const name of ['bold', 'faint', 'italic', 'underline', 'struck'] as const) {
    if (look[name]) {
      element.classList.add(`td-${name}`);
    }
  }
  const [ink, ground] = look.inverse ? [look.ground ?? 'ground', look.ink ?? 'ink'] : [look.ink, look.ground];
  paint(element, 'ink', areApart(ink, ground) ? ink : null);
  paint(element, 'ground', ground);
  element.append(content);
  return element;
}

/** WCAG 2's contrast is enough for text. Of two colours of a rank's own: all others the style sheet makes so. */
function areApart(ink: Look['ink'], ground: Look['ground']): boolean {
  const [dark, light] = [ink, ground].map(brightness).sort((a, b) => a - b);
  return Number.isNaN(dark! + light!) || (light! + 0.05) / (dark! + 0.05) >= 4.5;
}

/** Relative luminance of `rgb(…)`; NaN for other colours. */
function brightness(colour: Look['ink']): number {
  const [red, green, blue] = (String(colour).match(/^rgb\((\d+), (\d+), (\d+)\)$/) ?? []).slice(1).map(part => {
    const value = Number(part) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red! + 0.7152 * green! + 0.0722 * blue!;
}

/** Colours are given to the style sheet, which keeps them readable in its theme. */
function paint(element: HTMLElement, part: 'ink' | 'ground', colour: number | string | null): void {
  if (colour === null) {
    return;
  }
  const kind = typeof colour === 'number' ? 'theme' : colour === 'ink' || colour === 'ground' ? colour : 'exact';
  element.classList.add(`td-${part}-${kind}`);
  if (kind === 'theme' || kind === 'exact') {
    element.style.setProperty(`--td-${part}-${kind}`, kind === 'theme' ? `var(--td-ansi-${colour})` : String(colour));
  }
}
