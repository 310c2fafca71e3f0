/** What one can say about the curves: which, how drawn, and out as a file. */
import type { JobState } from '../protocol';
import { button, make, setText } from './dom';
import { drawShape, makeShape, standingOf, standingOfSome, type Standing } from './standing';
import { trans } from './translate';

export interface Settings {
  mode: 'rank0' | 'band' | 'ranks';
  x: 'step' | 'time';
  /** 0 (none) to 0.99. */
  smoothing: number;
  log: boolean;
  /** All plots show the same range of x. */
  linked: boolean;
  filter: string;
}

export interface LegendLine {
  text: string;
  colour: string;
  standing: Standing;
}

export class CurveBar {
  readonly settings: Settings = { mode: 'band', x: 'step', smoothing: 0, log: false, linked: false, filter: '' };
  private readonly said = make('span.td-said', { role: 'status' });
  private explained = '[]';
  private readonly legend = make('div.td-legend', { hidden: true });

  /** `changed` is told which settings are new; `csv` writes all curves shown. */
  constructor(
    element: HTMLElement,
    private readonly changed: (what: keyof Settings) => void,
    csv: () => void,
    private readonly signal: AbortSignal
  ) {
    const bar = make('div.td-bar', { role: 'toolbar', 'aria-label': trans('curves') });
    bar.append(
      this.filter(),
      this.choice('mode', trans('lines'), [
        ['band', trans('mean, min–max')],
        ['rank0', trans('rank 0')],
        ['ranks', trans('every rank')]
      ]),
      this.choice('x', trans('by'), [
        ['step', trans('step')],
        ['time', trans('time')]
      ]),
      this.smoothing(),
      this.check('log', trans('log axis')),
      this.check('linked', trans('zoom together')),
      button('button.td-button', trans('CSV'), csv, signal, { title: trans('All values of the curves shown here') }),
      this.said
    );
    element.append(bar, this.legend);
  }

  say(text: string): void {
    setText(this.said, text);
  }

  /** Names with their colours, and how those stand that are named; empty: no legend. */
  explain(lines: LegendLine[]): void {
    const key = JSON.stringify(lines);
    if (key === this.explained) {
      return;
    }
    this.explained = key;
    this.legend.hidden = lines.length === 0;
    this.legend.replaceChildren(
      ...lines.map(({ text, colour, standing }) => {
        const shape = makeShape();
        drawShape(shape, standing);
        const spoken = make('span.td-spoken', {}, `: ${standing.words}`);
        return make(
          'span.td-legend-item',
          { title: `${text}: ${standing.words}` },
          swatch(colour),
          text,
          spoken,
          shape
        );
      })
    );
  }

  private set<K extends keyof Settings>(what: K, value: Settings[K]): void {
    this.settings[what] = value;
    this.changed(what);
  }

  private filter(): HTMLElement {
    const field = make('input.td-field', {
      type: 'search',
      placeholder: trans('Filter by name'),
      'aria-label': trans('Filter curves by name')
    });
    field.addEventListener('input', () => this.set('filter', field.value), { signal: this.signal });
    return field;
  }

  private choice<K extends 'mode' | 'x'>(what: K, label: string, options: [Settings[K], string][]): HTMLElement {
    const attributes = { 'aria-label': label, title: label }; // where the view is narrow, the words beside it are hidden
    const field = make(
      'select.td-field',
      attributes,
      ...options.map(([value, text]) => make('option', { value }, text))
    );
    field.value = this.settings[what];
    field.addEventListener('change', () => this.set(what, field.value as Settings[K]), { signal: this.signal });
    return make('label.td-label', {}, make('span', {}, label), field);
  }

  private check(what: 'log' | 'linked', label: string): HTMLElement {
    const field = make('input', { type: 'checkbox' });
    field.addEventListener('change', () => this.set(what, field.checked), { signal: this.signal });
    return make('label.td-label', {}, field, make('span', {}, label));
  }

  private smoothing(): HTMLElement {
    const label = trans('smoothing');
    const range = { type: 'range', min: 0, max: 0.99, step: 0.01, value: 0 };
    const field = make('input.td-slider', { ...range, 'aria-label': label, title: label });
    const shown = make('output', {}, '0');
    const change = () => {
      setText(shown, String(Number(field.value)));
      this.set('smoothing', Number(field.value));
    };
    field.addEventListener('input', change, { signal: this.signal });
    return make('label.td-label', {}, make('span', {}, label), field, shown);
  }
}

/** Which colour is whose, where ranks have lines of their own. More ranks than colours share them. */
export function legendOf(state: JobState, mode: Settings['mode'], colours: readonly string[]): LegendLine[] {
  const count = { band: 0, rank0: Math.min(state.world_size, 1), ranks: state.world_size }[mode];
  return colours.slice(0, count).map((colour, rank) => {
    const ranks = Array.from(
      { length: Math.ceil((count - rank) / colours.length) },
      (_, i) => rank + i * colours.length
    );
    const shared = count > colours.length;
    const text = shared ? trans('rank %1, %2…', rank, rank + colours.length) : trans('rank %1', rank);
    return { text, colour, standing: ranks.length > 1 ? standingOfSome(state, ranks) : standingOf(state, rank) };
  });
}

export function swatch(colour: string): HTMLElement {
  const mark = make('span.td-swatch', { 'aria-hidden': 'true' });
  mark.style.background = colour || 'transparent';
  return mark;
}
