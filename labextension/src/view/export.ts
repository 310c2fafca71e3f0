/** A plot as a file: CSV of its points, SVG and PNG of its picture. */
import type { Series } from '../source';
import { save } from './dom';
import { number } from './format';
import { colourOf, lineName, xName, type Look } from './plot';
import { trans } from './translate';
import { padded, unscaled, type Picture, type Values } from './series';

const EDGE = { left: 64, right: 12, top: 28, bottom: 28 };

const TICKS = 4;

/** Long form, one point a row. A number as JavaScript prints it: nothing is rounded. */
export function csvText(all: readonly Series[], x: 'step' | 'time'): string {
  const rows = [`name,rank,${x},value,low,high`];
  for (const series of all) {
    const head = `${csvField(series.name)},${series.rank ?? ''}`;
    series.x.forEach((at, index) => {
      rows.push(`${head},${at},${series.y[index]},${series.low[index]},${series.high[index]}`);
    });
  }
  return rows.join('\n') + '\n';
}

/**
 * Offers the points of these curves as one file; `points` asks for those of one. `say` tells how it goes, and at the end
 * whether something is not as it was recorded.
 */
export async function saveCsv<C extends { name: string }>(
  name: string,
  curves: readonly C[],
  points: (curve: C) => Promise<{ complete: boolean; series: Series[] }>,
  x: 'step' | 'time',
  say: (words: string) => void
): Promise<void> {
  const parts: Series[] = [];
  let complete = true;
  for (const curve of curves) {
    say(trans('reading %1…', curve.name.slice(0, 80)));
    try {
      const answer = await points(curve);
      complete &&= answer.complete;
      parts.push(...answer.series);
    } catch (error) {
      say(trans('No file was written: %1', error instanceof Error ? error.message : String(error)));
      return;
    }
  }
  save(`${name}.csv`, new Blob([csvText(parts, x)], { type: 'text/csv' }));
  say(complete ? '' : trans('written; points that were too many stand merged, with their minimum and maximum'));
}

/** Quoted where it must be (RFC 4180). A spreadsheet takes what begins with one of these signs for a formula. */
export function csvField(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function escaped(text: string): string {
  // Characters that XML forbids even as references would make the file unreadable.
  const legal = text.replace(/[^\t\n\r\u{20}-\u{D7FF}\u{E000}-\u{FFFD}\u{10000}-\u{10FFFF}]/gu, '\ufffd');
  return legal.replace(/[&<>"]/g, sign => `&#${sign.charCodeAt(0)};`);
}

/** The picture with its axes in the colours of the theme, without script. */
export function svgText(name: string, picture: Picture, look: Look): string {
  const { width, height, theme } = look;
  const [left, right] = [picture.x[0] ?? 0, picture.x.at(-1) ?? 1];
  const [low, high] = extent(picture, look.log);
  const toX = (value: number) => EDGE.left + ((value - left) / (right - left || 1)) * (width - EDGE.left - EDGE.right);
  const toY = (value: number) => {
    const at = look.log ? Math.log10(value) : value;
    return height - EDGE.bottom - ((at - low) / (high - low || 1)) * (height - EDGE.top - EDGE.bottom);
  };
  const text = (x: number, y: number, anchor: string, content: string) =>
    `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" text-anchor="${anchor}" fill="${escaped(theme.text)}">${escaped(content)}</text>`;
  const parts = [text(EDGE.left, 18, 'start', name)];
  for (let tick = 0; tick <= TICKS; tick++) {
    const value = low + ((high - low) * tick) / TICKS;
    const y = toY(look.log ? 10 ** value : value);
    const label = unscaled(look.log ? 10 ** value : Number(value.toPrecision(4)), picture.power);
    const ends = `x1="${EDGE.left}" x2="${width - EDGE.right}" y1="${y.toFixed(1)}" y2="${y.toFixed(1)}"`;
    parts.push(`<line ${ends} stroke="${escaped(theme.grid)}"/>`, text(EDGE.left - 6, y + 4, 'end', label));
  }
  for (const [x, anchor] of [[left, 'start'] as const, [right, 'end'] as const]) {
    parts.push(text(toX(x), height - 8, anchor, look.time ? xName(x, true) : number(x)));
  }
  picture.lines.forEach((line, index) => {
    const colour = escaped(colourOf(line, index, theme));
    const faint = line.smooth ? ' stroke-opacity="0.3"' : '';
    parts.push(`<path d="${area(picture.x, line.low, line.high, toX, toY)}" fill="${colour}" fill-opacity="0.15"/>`);
    const title = `<title>${escaped(lineName(line))}</title>`;
    parts.push(`<path d="${path(picture.x, line.y, toX, toY)}" fill="none" stroke="${colour}"${faint}>${title}</path>`);
    if (line.smooth) {
      const d = path(picture.x, line.smooth, toX, toY);
      parts.push(`<path d="${d}" fill="none" stroke="${colour}" stroke-width="2"/>`);
    }
  });
  const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
  const back = `<rect width="100%" height="100%" fill="${escaped(theme.back)}"/>`;
  const font = 'font-family="sans-serif" font-size="11"';
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size} ${font}>${back}${parts.join('')}</svg>\n`;
}

/** The range of y, as exponents on a log axis. */
function extent(picture: Picture, log: boolean): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const line of picture.lines) {
    for (const values of [line.y, line.low, line.high]) {
      for (const value of values) {
        if (typeof value === 'number') {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
  }
  return log && low > 0 ? padded(Math.log10(low), Math.log10(high)) : padded(low, high);
}

type Scale = (value: number) => number;

/** A new stroke begins after each gap; a place without a point of this series is none. */
function path(x: number[], y: Values, toX: Scale, toY: Scale): string {
  let pen = 'M';
  const parts: string[] = [];
  y.forEach((value, at) => {
    if (value === null) {
      pen = 'M';
    } else if (value !== undefined) {
      parts.push(`${pen}${toX(x[at]!).toFixed(1)} ${toY(value).toFixed(1)}`);
      pen = 'L';
    }
  });
  return parts.join('');
}

/** The band between `low` and `high`, one closed shape for each stretch without a gap. */
function area(x: number[], low: Values, high: Values, toX: Scale, toY: Scale): string {
  const shapes: string[] = [];
  let there: string[] = [];
  let back: string[] = [];
  const close = () => {
    if (there.length > 1) {
      shapes.push(`M${there.join('L')}L${back.reverse().join('L')}Z`);
    }
    there = [];
    back = [];
  };
  x.forEach((value, at) => {
    const [bottom, top] = [low[at], high[at]];
    if (typeof bottom === 'number' && typeof top === 'number') {
      there.push(`${toX(value).toFixed(1)} ${toY(top).toFixed(1)}`);
      back.push(`${toX(value).toFixed(1)} ${toY(bottom).toFixed(1)}`);
    } else if (bottom !== undefined || top !== undefined) {
      close();
    }
  });
  close();
  return shapes.join('');
}

/** What the canvas shows, on the theme's ground and with its name; null where the browser gives none. */
export function pngOf(name: string, drawn: HTMLCanvasElement, look: Look): Promise<Blob | null> {
  const scale = drawn.width / Math.max(look.width, 1);
  const head = Math.round(EDGE.top * scale);
  const canvas = document.createElement('canvas');
  canvas.width = drawn.width;
  canvas.height = drawn.height + head;
  const context = canvas.getContext('2d');
  if (!context) {
    return Promise.resolve(null);
  }
  context.fillStyle = look.theme.back;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = look.theme.text;
  context.font = `${Math.round(13 * scale)}px sans-serif`;
  context.fillText(name.slice(0, 200), 8 * scale, head - 8 * scale);
  context.drawImage(drawn, 0, head);
  return new Promise(resolve => canvas.toBlob(resolve, 'image/png'));
}
