/** One curve in the grid: its name and last value, the plot, what is under the cursor, out as a file. */
import type { Series } from '../source';
import { button, make, save, setAttribute, setText } from './dom';
import { pngOf, svgText } from './export';
import { Plot, summary, type Look, type Reading } from './plot';
import { swatch, type Settings } from './curvebar';
import { lastValue, notFiniteSince, picture, spreadAtEnd, unscaled, type Picture, type Spread } from './series';
import { plural, trans } from './translate';

export type Range = [number, number] | null;

export interface CardActs {
  /** The range of x that is to be shown. */
  zoom(card: CurveCard, range: Range): void;
  csv(card: CurveCard): void;
  say(text: string): void;
}

const HEIGHT = 150;

/** Characters at the end of a name that stay when there is no room for all of it. */
const TAIL = 12;

/** The values of one rank differ from no other. */
const NONE: Spread = { low: 0, high: 0, mean: 0 };

export class CurveCard {
  readonly element: HTMLElement;
  readonly frame = make('div.td-plot', { tabindex: '0', role: 'figure' });
  visible = false;
  range: Range = null;
  /** What the points on the screen were asked with, and the feed's version that they are of. */
  asked = '';
  version = 0;
  private readonly value = make('span.td-curve-value');
  private readonly differs = make('span.td-curve-differs');
  private readonly note = make('span.td-curve-note');
  private readonly tip = make('div.td-tip', { hidden: true, 'aria-hidden': 'true' });
  private readonly reset: HTMLButtonElement;
  private series: Series[] = [];
  /** Whether each point is one step of each of several ranks. */
  private exact = false;
  private failed = false;
  private picture: Picture | null = null;
  private plot: Plot | null = null;
  private look: Look | null = null;

  constructor(
    readonly name: string,
    private readonly acts: CardActs,
    signal: AbortSignal
  ) {
    this.reset = button('button.td-link', trans('all of it'), () => acts.zoom(this, null), signal, { hidden: true });
    const shown = name.slice(0, 200);
    const end = Math.max(shown.length - TAIL, 0);
    const cut = /[\udc00-\udfff]/.test(shown[end] ?? '') ? end - 1 : end;
    // Names such as train/loss and train/lr differ at their ends: room is made in the middle.
    const begin = cut > 0 ? [make('span.td-curve-begin', {}, shown.slice(0, cut))] : [];
    const title = make(
      'span.td-curve-name',
      { title: name.slice(0, 1000) },
      ...begin,
      make('span', {}, shown.slice(cut))
    );
    const head = make(
      'div.td-curve-head',
      {},
      title,
      this.value,
      this.differs,
      this.note,
      this.reset,
      this.menu(signal)
    );
    this.element = make('div.td-curve', { role: 'listitem' }, head, this.frame, this.tip);
    setAttribute(this.frame, 'aria-label', name.slice(0, 200));
    this.frame.addEventListener('keydown', event => this.key(event), { signal });
    this.frame.addEventListener('mouseleave', () => this.hover(null, 0), { signal });
  }

  take(series: Series[], version: number, exact: boolean): void {
    this.series = series;
    this.version = version;
    this.exact = exact;
    this.picture = null;
    this.failed = false;
  }

  /** The feed will not answer before `version` grows. */
  fail(why: string, version: number): void {
    this.failed = true;
    this.version = version;
    setText(this.note, why);
  }

  /** What could not be answered may be asked again. */
  retry(): void {
    if (this.failed) {
      this.asked = '';
    }
  }

  /**
   * The picture again, in a chart that stays where it can. Only while the element is on the page. `last`: how far the
   * ranks' last values are apart, where the points do not say it.
   */
  draw(settings: Settings, look: Look, last: Spread | null): void {
    setAttribute(this.reset, 'hidden', this.range === null);
    if (this.asked && !this.failed && this.series.every(series => series.x.length === 0)) {
      this.sleep();
      setText(this.value, '');
      setText(this.differs, '');
      setText(this.note, this.range ? trans('no points in this range') : trans('no points yet'));
      return;
    }
    if (this.series.length === 0 || look.width < 40) {
      return;
    }
    this.look = { ...look, height: HEIGHT };
    this.picture ??= picture(this.series, settings.smoothing, settings.log, this.exact);
    if (this.plot?.fits(this.picture, this.look)) {
      this.plot.draw(this.picture);
      this.plot.resize(look.width, HEIGHT);
    } else {
      this.plot?.destroy();
      const acts = { zoom: (range: Range) => this.acts.zoom(this, range), hover: this.hover.bind(this) };
      this.plot = new Plot(this.frame, this.picture, this.look, acts);
    }
    this.describe(this.picture, settings);
    const told = settings.mode === 'band' ? ((this.range ? null : last) ?? null) : NONE;
    const spread = told ?? spreadAtEnd(this.picture);
    tellSpread(this.differs, spread, told ? 0 : this.picture.power);
    if (told && told !== NONE) {
      // What the mean of the ranks' last values is does not depend on how wide the view is.
      setText(this.value, unscaled(told.mean, 0));
    }
    this.tellBroken(settings);
  }

  /** A value that is not a number is the last thing to be hidden. */
  private tellBroken(settings: Settings): void {
    const since = this.series.map(notFiniteSince).find(x => x !== null) ?? null;
    setAttribute(this.value, 'data-broken', since !== null);
    if (since !== null) {
      const words = settings.x === 'time' ? trans('NaN') : trans('NaN since step %1', since);
      setText(this.value, words);
    }
  }

  /** The settings changed: the points are the same, their picture is not. */
  forget(): void {
    this.picture = null;
  }

  /** Gives the chart's memory back; the points stay. */
  sleep(): void {
    this.plot?.destroy();
    this.plot = null;
    this.tip.hidden = true;
  }

  private describe(shown: Picture, settings: Settings): void {
    const line = shown.lines[0];
    const last = line ? lastValue(line) : null;
    setText(this.value, last === null ? '' : unscaled(last, shown.power));
    const holes = plural('%1 value is not finite', '%1 values are not finite', shown.holes);
    setText(this.note, shown.holes ? holes : '');
    setAttribute(this.frame, 'aria-label', summary(this.name.slice(0, 200), shown, settings.x === 'time'));
  }

  private hover(lines: Reading[] | null, left: number): void {
    this.tip.hidden = !lines?.length;
    if (lines?.length) {
      this.tip.replaceChildren(...lines.map(({ text, colour }) => make('div', {}, swatch(colour), text)));
      const right = left > (this.look?.width ?? 0) / 2 - 60;
      setAttribute(this.tip, 'data-side', right ? 'left' : 'right');
    }
  }

  private menu(signal: AbortSignal): HTMLElement {
    const list = make('div.td-menu-list');
    const menu = make(
      'details.td-menu',
      {},
      make('summary', { 'aria-label': trans('Save %1', this.name.slice(0, 80)) }, '⤓'),
      list
    );
    const item = (label: string, act: () => void) => {
      const click = () => {
        menu.open = false;
        act();
      };
      list.append(button('button.td-button', label, click, signal));
    };
    item('PNG', () => void this.png());
    item('SVG', () => this.svg());
    item('CSV', () => this.acts.csv(this));
    return menu;
  }

  private async png(): Promise<void> {
    const image = this.plot && this.look && (await pngOf(this.name, this.plot.canvas, this.look));
    if (image) {
      save(`${this.name}.png`, image);
    } else {
      this.acts.say(trans('There is no picture of %1 yet.', this.name.slice(0, 80)));
    }
  }

  private svg(): void {
    if (this.picture && this.look) {
      save(`${this.name}.svg`, new Blob([svgText(this.name, this.picture, this.look)], { type: 'image/svg+xml' }));
    }
  }

  /** + and − zoom, arrows move, Escape shows all: what the mouse does by dragging. */
  private key(event: KeyboardEvent): void {
    const x = this.picture?.x;
    const shown = this.range ?? (x && x.length > 1 ? ([x[0]!, x.at(-1)!] as [number, number]) : null);
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const next = keyRange(event.key, shown);
    if (next === undefined || (next !== null && this.range === null && event.key.startsWith('Arrow'))) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (next !== null || this.range !== null) {
      this.acts.zoom(this, next);
    }
  }
}

/** Says by how much the ranks' last values differ. Where they cannot be compared at this moment, it stays as it was. */
export function tellSpread(element: Element, spread: Spread | null, power: number): void {
  if (spread) {
    const ends = [unscaled(spread.low, power), unscaled(spread.high, power)];
    const differ = spread.low !== spread.high;
    setText(element, differ ? trans('≠ %1 … %2', ...ends) : '');
    setAttribute(element, 'title', differ && trans('The ranks differ: the last values are from %1 to %2', ...ends));
  }
}

/** The range that a key asks for; undefined: the key means nothing here. */
export function keyRange(key: string, [low, high]: [number, number]): Range | undefined {
  const quarter = (high - low) / 4;
  switch (key) {
    case '+':
    case '=':
      return [low + quarter, high - quarter];
    case '-':
      return [low - 2 * quarter, high + 2 * quarter];
    case 'ArrowLeft':
      return [low - quarter, high - quarter];
    case 'ArrowRight':
      return [low + quarter, high + quarter];
    case 'Escape':
    case '0':
      return null;
    default:
      return undefined;
  }
}
