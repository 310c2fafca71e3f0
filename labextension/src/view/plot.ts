/** One picture of uPlot: what is drawn how, and what a hand or a key does to it. */
import uPlot from 'uplot';
import { clock, number, tickTimes } from './format';
import { lastValue, nearest, padded, unscaled, type Line, type Picture } from './series';
import { trans } from './translate';

/** Colours as the theme has them at this moment; a canvas knows no CSS variables. */
export interface Theme {
  curves: string[];
  text: string;
  grid: string;
  back: string;
  font: string;
}

export interface Look {
  log: boolean;
  time: boolean;
  theme: Theme;
  width: number;
  height: number;
  /** Plots with the same key move their cursors together; null: alone. */
  together: string | null;
}

export interface Acts {
  /** A range of x was drawn with the mouse; null: all of it, please. */
  zoom(range: [number, number] | null): void;
  /** What is under the cursor, as lines of text with their colours; null: nothing. */
  hover(lines: Reading[] | null, left: number): void;
}

export interface Reading {
  text: string;
  colour: string;
}

const FALLBACK = ['#2f7ed8', '#d9822b', '#2e9e57', '#c23b70', '#7b5cd6', '#128c9c', '#9a7b1c', '#6b7280'];

/** Series above this number have no band around them: they would hide each other. */
const BANDS = 16;

const REACH = 40;

/** In pixels: how high a decade of a log axis must be for lines within it, and how far apart decades' lines are. */
const DECADE = 30;
const LINE_GAP = 14;

export const READINGS = 16;

/** The theme where `element` is. A canvas understands neither variables nor `light-dark()`, so the browser resolves them. */
export function themeOf(element: Element): Theme {
  const probe = document.createElement('span');
  probe.hidden = true;
  element.append(probe);
  const read = (name: string, fallback: string) => {
    probe.style.color = `var(${name}, ${fallback})`;
    const found = getComputedStyle(probe).color;
    return !found || found.includes('var(') ? fallback : found;
  };
  const theme = {
    curves: FALLBACK.map((fallback, index) => read(`--td-curve-${index}`, fallback)),
    text: read('--td-plot-text', '#616161'),
    grid: read('--td-plot-grid', '#e0e0e0'),
    back: read('--td-plot-back', '#ffffff'),
    font: `11px ${getComputedStyle(probe).fontFamily || 'sans-serif'}`
  };
  probe.remove();
  return theme;
}

export function colourOf(line: Line, index: number, theme: Theme): string {
  return theme.curves[(line.rank ?? index) % theme.curves.length]!;
}

/** `colour` as one that lets through what is behind it; `share` from 0 to 1. */
function faint(colour: string, share: number): string {
  return `color-mix(in srgb, ${colour} ${Math.round(share * 100)}%, transparent)`;
}

/** `loss`, or `rank 3`: what a line is called beside the others of its plot. */
export function lineName(line: Line): string {
  return line.rank === null ? trans('mean') : trans('rank %1', line.rank);
}

export function xName(value: number, time: boolean): string {
  return time ? clock(value) : trans('step %1', number(value));
}

/** What stands under the cursor at place `at`, at most `READINGS` lines of it. */
export function readings(picture: Picture, at: number, look: Pick<Look, 'time' | 'theme'>): Reading[] {
  const x = picture.x[at];
  if (x === undefined) {
    return [];
  }
  const found: Reading[] = [{ text: xName(x, look.time), colour: '' }];
  const say = (value: number | null | undefined) => unscaled(value!, picture.power);
  picture.lines.slice(0, READINGS).forEach((line, index) => {
    const place = nearest(line.y, at, REACH);
    if (place === null) {
      return;
    }
    const [low, high] = [line.low[place] ?? line.y[place], line.high[place] ?? line.y[place]];
    const smooth = line.smooth ? ` (≈ ${say(line.smooth[place])})` : '';
    const alone = picture.lines.length === 1;
    const ofRanks = picture.exact && line.rank === null;
    const name = ofRanks && low === high ? trans('all ranks') : lineName(line);
    const band = alone && low !== high ? `  ${ofRanks ? '≠ ' : ''}${say(low)} … ${say(high)}` : '';
    const text = `${name}: ${say(line.y[place])}${smooth}${band}`;
    found.push({ text, colour: colourOf(line, index, look.theme) });
  });
  if (picture.lines.length > READINGS) {
    found.push({ text: trans('and %1 more', picture.lines.length - READINGS), colour: '' });
  }
  return found;
}

/** For those who do not see the plot: the last values and the range in a sentence. */
export function summary(name: string, picture: Picture, time: boolean): string {
  const line = picture.lines[0];
  const last = line && lastValue(line);
  const end = picture.x.at(-1);
  if (!line || last === null || last === undefined || end === undefined) {
    return trans('%1: no values', name);
  }
  const all = picture.lines.flatMap(each => each.y).filter((value): value is number => typeof value === 'number');
  const [low, high] = all.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [last, last]);
  const say = (value: number) => unscaled(value, picture.power);
  return trans('%1: %2 at %3, from %4 to %5', name, say(last), xName(end, time), say(low), say(high));
}

export class Plot {
  private readonly chart: uPlot;

  constructor(
    frame: HTMLElement,
    private shown: Picture,
    private readonly look: Look,
    private readonly acts: Acts
  ) {
    this.chart = new uPlot(this.options(), columns(shown, look), frame);
  }

  /** Whether the same chart can show `picture`: uPlot's series are fixed. */
  fits(picture: Picture, look: Look): boolean {
    const same = (key: keyof Look) => this.look[key] === look[key];
    return (
      same('log') &&
      same('time') &&
      same('theme') &&
      same('together') &&
      picture.power === this.shown.power &&
      shape(picture) === shape(this.shown)
    );
  }

  draw(picture: Picture): void {
    this.shown = picture;
    this.chart.setData(columns(picture, this.look), true);
  }

  resize(width: number, height: number): void {
    this.chart.setSize({ width, height });
  }

  get canvas(): HTMLCanvasElement {
    return this.chart.ctx.canvas;
  }

  destroy(): void {
    this.chart.destroy();
  }

  private options(): uPlot.Options {
    const { look, acts } = this;
    const { series, bands } = seriesOf(this.shown, look);
    return {
      width: look.width,
      height: look.height,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: 4 },
        points: { show: false },
        ...(look.together ? { sync: { key: look.together, setSeries: false } } : {}),
        bind: {
          dblclick: () => () => {
            acts.zoom(null);
            return null;
          }
        }
      },
      scales: {
        x: { time: look.time },
        y: look.log
          ? { distr: 3, range: (_, low, high) => (low > 0 ? uPlot.rangeLog(low, high, 10, false) : [1, 10]) }
          : { range: (_, low, high) => padded(low, high) }
      },
      axes: this.axes(),
      series,
      bands,
      hooks: { setSelect: [chart => this.selected(chart)], setCursor: [chart => this.pointed(chart)] }
    };
  }

  private axes(): uPlot.Axis[] {
    const { theme, time } = this.look;
    const common: uPlot.Axis = {
      stroke: theme.text,
      font: theme.font,
      grid: { stroke: theme.grid, width: 1 },
      ticks: { show: false }
    };
    const say = (values: readonly (number | null)[], power: number) =>
      values.map(value => (value === null ? '' : unscaled(Number(value.toPrecision(12)), power)));
    return [
      { ...common, size: 26, space: 64, values: (_, values) => (time ? tickTimes(values) : say(values, 0)) },
      {
        ...common,
        size: 62,
        space: 28,
        values: (_, values) => say(values, this.shown.power),
        ...(this.look.log ? { grid: { ...common.grid, filter: apart } } : {})
      }
    ];
  }

  private selected(chart: uPlot): void {
    const { left, width } = chart.select;
    if (width < 4) {
      return;
    }
    const range: [number, number] = [chart.posToVal(left, 'x'), chart.posToVal(left + width, 'x')];
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.acts.zoom(range);
  }

  private pointed(chart: uPlot): void {
    const { idx, left } = chart.cursor;
    const found = typeof idx === 'number' && (left ?? -1) >= 0 ? readings(this.shown, idx, this.look) : null;
    this.acts.hover(found, left ?? 0);
  }
}

/** Of a log axis's lines those that have room: all of a decade's, its first, or of every second, third, … decade. */
function apart(chart: uPlot, lines: number[]): (number | null)[] {
  const decade = Math.abs(chart.valToPos(1, 'y') - chart.valToPos(10, 'y'));
  if (decade >= DECADE) {
    return lines;
  }
  const every = Math.ceil(LINE_GAP / decade);
  return lines.map(line => {
    const power = Math.log10(line);
    return Math.abs(power - Math.round(power)) < 1e-6 && Math.round(power) % every === 0 ? line : null;
  });
}

function hasBand(picture: Picture): boolean {
  return picture.lines.length <= BANDS;
}

function shape(picture: Picture): string {
  return `${picture.lines.map(line => line.rank).join()}/${picture.lines.some(line => line.smooth)}`;
}

/** x, then of each line: low and high where it has a band, the line, the smoothed line. */
function columns(picture: Picture, look: Pick<Look, 'log'>): uPlot.AlignedData {
  const data: unknown[] = [picture.x];
  for (const line of picture.lines) {
    if (hasBand(picture)) {
      // A band needs both edges: on a log axis an edge at or below 0 is drawn where the line is.
      const edge = (values: typeof line.low) => (look.log ? values.map((value, at) => value ?? line.y[at]) : values);
      data.push(edge(line.low), edge(line.high));
    }
    data.push(line.y);
    if (line.smooth) {
      data.push(line.smooth);
    }
  }
  return data as uPlot.AlignedData;
}

function seriesOf(picture: Picture, look: Look): { series: uPlot.Series[]; bands: uPlot.Band[] } {
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  picture.lines.forEach((line, index) => {
    const colour = colourOf(line, index, look.theme);
    const points = { show: (chart: uPlot) => chart.data[0].length < 2 };
    if (hasBand(picture)) {
      const at = series.length;
      series.push(
        { stroke: 'transparent', points: { show: false } },
        { stroke: 'transparent', points: { show: false } }
      );
      bands.push({ series: [at + 1, at], fill: faint(colour, picture.lines.length > 1 ? 0.12 : 0.22) });
    }
    const soft = line.smooth !== null;
    series.push({ stroke: soft ? faint(colour, 0.3) : colour, width: soft ? 1 : 1.5, points });
    if (soft) {
      series.push({ stroke: colour, width: 2, points: { show: false } });
    }
  });
  return { series, bands };
}
