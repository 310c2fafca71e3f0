/** A lane for each rank: when it entered the last collectives, and for how long they waited for the last rank. */
import type { Communication } from '../protocol';
import { button, make, setAttribute, setText } from './dom';
import { clock, theRanks } from './format';
import { lanes, path, reading, row, short, summary, under, WIDTH, type Bar, type Lanes } from './lanes';
import { table } from './table';
import { plural, trans } from './translate';

/** Lanes that are drawn. */
const RANKS = 64;

const TICKS = 5;

const SVG = 'http://www.w3.org/2000/svg';

export class Timeline {
  readonly element = make('div.td-part', { role: 'group', 'aria-label': trans('Collectives by rank') });
  private readonly say = make('p', { role: 'status' });
  private readonly body = make('div');
  private readonly read = make('p.td-reading');
  private readonly button: HTMLButtonElement;
  private readonly choice = make('select', { 'aria-label': trans('How many collectives are shown') });
  private told: Communication | null = null;
  private drawn: Lanes | null = null;

  /** `record`: the ranks are asked for what they record now. */
  constructor(record: () => void, signal: AbortSignal) {
    this.button = button('button.td-button', trans('Record now'), record, signal);
    for (const [count, words] of [
      [20, trans('the last 20')],
      [50, trans('the last 50')],
      [0, trans('all that are recorded')]
    ] as const) {
      this.choice.append(make('option', { value: count }, words));
    }
    this.choice.addEventListener('change', () => this.fill(), { signal });
    this.body.addEventListener('pointermove', event => this.point(event), { signal });
    const title = make('strong', {}, trans('Collectives by rank'));
    this.element.append(make('div.td-bar', {}, title, this.choice, this.button), this.say, this.body, this.read);
  }

  /** `said`: what goes on, or why nothing can be shown. `live`: the ranks can be asked. */
  draw(told: Communication | null, live: boolean, busy: boolean, said: string): void {
    setAttribute(this.button, 'hidden', !live);
    setAttribute(this.button, 'disabled', busy);
    setText(this.say, said || this.words(told, live));
    if (told !== this.told) {
      this.told = told;
      this.fill();
    }
  }

  private words(told: Communication | null, live: boolean): string {
    if (!told) {
      return '';
    }
    if (told.calls.length > 0) {
      const silent = told.silent.length > 0 && trans('Nothing is known of %1.', theRanks(told.silent));
      const when = told.time === null ? '' : trans('Recorded at %1.', clock(told.time));
      return [summary(told.calls, told.time ?? 0), silent, when].filter(Boolean).join(' ');
    }
    return live
      ? trans('Nothing is recorded yet. Each rank needs about 20 ms to write down its last collectives.')
      : trans('No collective was recorded.');
  }

  private fill(): void {
    const calls = (this.told?.calls ?? []).slice(-Number(this.choice.value));
    setAttribute(this.choice, 'hidden', calls.length === 0);
    setText(this.read, '');
    const until = this.told?.time ?? 0;
    this.drawn = calls.length > 0 ? lanes(calls, until) : null;
    if (!this.drawn) {
      this.body.replaceChildren();
      return;
    }
    const { bars, from, to } = this.drawn;
    const ranks = [...bars.keys()].sort((one, other) => one - other);
    const shown = ranks.length > RANKS ? latest(bars, ranks) : ranks;
    const hidden = ranks.length - shown.length;
    const header = [trans('Collective'), trans('First'), trans('Last'), trans('Apart'), trans('Missing')];
    this.body.replaceChildren(
      make(
        'div.td-lanes',
        { role: 'img', 'aria-label': summary(calls, until) },
        ...shown.map(rank => lane(rank, bars))
      ),
      axis(from, to),
      make('p.td-legend', {}, ...legend()),
      make(
        'details.td-fold',
        {},
        make('summary', {}, trans('As a table')),
        table(trans('Collectives'), header, calls.map(row).reverse())
      )
    );
    if (hidden > 0) {
      const words = plural('%1 rank that is seldom last', '%1 ranks that are seldom last', hidden);
      this.body.append(make('p.td-more', {}, trans('not shown: %1', words)));
    }
  }

  private point(event: PointerEvent): void {
    const svg = (event.target as Element).closest('svg');
    const rank = Number(svg?.closest<HTMLElement>('.td-lane')?.dataset['rank'] ?? NaN);
    const bars = this.drawn?.bars.get(rank);
    if (!svg || !bars) {
      return;
    }
    const { left, width } = svg.getBoundingClientRect();
    const bar = under(bars, ((event.clientX - left) / Math.max(width, 1)) * WIDTH);
    const calls = (this.told?.calls ?? []).slice(-Number(this.choice.value));
    setText(this.read, bar ? reading(calls[bar.call]!, rank) : '');
  }
}

/** The ranks that were last most often, in order. */
function latest(bars: Map<number, Bar[]>, ranks: readonly number[]): number[] {
  const count = (rank: number): number => bars.get(rank)!.filter(bar => bar.kind === 'last').length;
  const sorted = [...ranks].sort((one, other) => count(other) - count(one) || one - other);
  return sorted.slice(0, RANKS).sort((one, other) => one - other);
}

function lane(rank: number, bars: Map<number, Bar[]>): HTMLElement {
  const svg = document.createElementNS(SVG, 'svg');
  setAttribute(svg, 'viewBox', `0 0 ${WIDTH} 10`);
  setAttribute(svg, 'preserveAspectRatio', 'none');
  for (const kind of ['waits', 'open', 'last'] as const) {
    const drawing = document.createElementNS(SVG, 'path');
    setAttribute(drawing, 'd', path(bars.get(rank)!, kind));
    setAttribute(drawing, 'class', `td-lane-${kind}`);
    svg.append(drawing);
  }
  return make('div.td-lane', { 'data-rank': rank }, make('span', {}, trans('rank %1', rank)), svg);
}

/** Times since the first one. */
function axis(from: number, to: number): HTMLElement {
  const steps = Array.from({ length: TICKS }, (_, index) => (index / (TICKS - 1)) * (to - from));
  const ticks = steps.map(seconds => make('span', {}, seconds === 0 ? clock(from) : `+${short(seconds)}`));
  return make('div.td-lane.td-axis', { 'aria-hidden': 'true' }, make('span'), make('div.td-ticks', {}, ...ticks));
}

function legend(): HTMLElement[] {
  const item = (kind: Bar['kind'], words: string): HTMLElement =>
    make('span.td-legend-item', {}, make(`span.td-swatch.td-lane-${kind}`), words);
  return [
    item('waits', trans('from entering it until the last rank has')),
    item('last', trans('entered last')),
    item('open', trans('waits for long'))
  ];
}
