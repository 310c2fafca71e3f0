/** Whose lines are shown: a button or an entry of a list for each rank, with how it stands. */
import type { JobState } from '../protocol';
import { failures } from '../state';
import { button, make, setAttribute, setText } from './dom';
import { drawShape, makeShape, standingOf, standingOfAll, type Standing } from './standing';
import { trans } from './translate';

/** With more ranks than this there is a list instead of a button each. */
const BUTTONS = 16;

/** Characters of an entry of the list. */
const ENTRY = 80;

export class RankBar {
  readonly element = make('span.td-logs-group', { role: 'group', 'aria-label': trans('ranks') });
  /** Null: all. */
  ranks: ReadonlySet<number> | null = null;

  /** Once the reader chose a rank, no failure chooses another. */
  private chosen = false;
  private state: JobState | null = null;
  private order: number[] = [];
  private drawn = '';
  private readonly entries = new Map<number, HTMLElement>();
  private readonly said = new Map<number, string>();
  /** In place of the buttons, with the shape of the chosen rank. */
  private list: HTMLSelectElement | null = null;
  private readonly shape = makeShape();

  /** `changed` is called when other ranks are chosen. */
  constructor(
    private readonly changed: () => void,
    private readonly signal: AbortSignal
  ) {}

  /** Those that failed come first, and the first of them is chosen. */
  update(state: JobState): void {
    this.state = state;
    const failed = failures(state).map(rank => rank.rank);
    const first = failed[0];
    if (first !== undefined && !this.chosen && this.ranks === null) {
      this.ranks = new Set([first]);
      this.changed();
    }
    const drawn = JSON.stringify([failed, state.world_size]);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.build(failed, state.world_size);
    }
    this.draw();
  }

  /** Chooses one rank, or all. */
  pick(rank: number | null): void {
    this.choose(rank === null ? null : new Set([rank]));
  }

  private choose(ranks: ReadonlySet<number> | null): void {
    this.chosen = true;
    this.ranks = ranks;
    this.draw();
    this.changed();
  }

  /** With Ctrl, ⌘ or Shift a rank comes to the others or leaves them. */
  private click(rank: number, event: MouseEvent): void {
    const { ranks } = this;
    if (!ranks || !(event.ctrlKey || event.metaKey || event.shiftKey)) {
      this.pick(rank);
      return;
    }
    const next = new Set(ranks);
    if (!next.delete(rank)) {
      next.add(rank);
    }
    this.choose(next.size > 0 ? next : null);
  }

  // --- drawing ---

  private build(failed: number[], count: number): void {
    const isFailed = new Set(failed);
    const others = Array.from({ length: count }, (_, rank) => rank).filter(rank => !isFailed.has(rank));
    this.order = [...failed, ...others];
    this.entries.clear();
    this.said.clear();
    this.list = null;
    if (count < 2) {
      this.element.replaceChildren();
      return;
    }
    const asList = count > BUTTONS;
    this.order.forEach(rank => this.entries.set(rank, asList ? make('option', { value: rank }) : this.button(rank)));
    const entries = [...this.entries.values()];
    const all = asList ? make('option', { value: '' }, trans('all ranks')) : this.all();
    const parts = [...entries.slice(0, failed.length), all, ...entries.slice(failed.length)];
    this.element.replaceChildren(...(asList ? this.inList(parts) : parts));
  }

  private all(): HTMLElement {
    const words = trans('all ranks');
    const attributes = { 'aria-label': `${trans('All')}: ${words}`, title: words };
    return button('button', trans('All'), () => this.pick(null), this.signal, attributes);
  }

  private button(rank: number): HTMLElement {
    const element = button('button', '', event => this.click(rank, event), this.signal, { 'data-rank': rank });
    element.append(makeShape(), String(rank));
    return element;
  }

  private inList(options: HTMLElement[]): HTMLElement[] {
    const list = make('select', { 'aria-label': trans('rank') }, ...options);
    const change = (): void => this.pick(list.value === '' ? null : Number(list.value));
    list.addEventListener('change', change, { signal: this.signal });
    this.list = list;
    return [this.shape, list];
  }

  /** Which are chosen, and how all of them stand now. */
  private draw(): void {
    const { state, ranks, list } = this;
    if (!state) {
      return;
    }
    for (const [rank, entry] of this.entries) {
      this.tell(entry, rank, standingOf(state, rank));
    }
    for (const element of this.element.querySelectorAll('button')) {
      const rank = element.dataset['rank'];
      const on = rank === undefined ? ranks === null : (ranks?.has(Number(rank)) ?? false);
      setAttribute(element, 'aria-pressed', String(on));
    }
    if (list) {
      const first = ranks && [...ranks][0]!;
      list.value = first === null ? '' : String(first);
      const standing = first === null ? standingOfAll(state) : standingOf(state, first);
      drawShape(this.shape, standing);
      setAttribute(list, 'title', standing.words);
    }
  }

  private tell(entry: HTMLElement, rank: number, standing: Standing): void {
    if (this.said.get(rank) === standing.words) {
      return;
    }
    this.said.set(rank, standing.words);
    const words = trans('rank %1: %2', rank, standing.words);
    if (this.list) {
      setText(entry, words.length > ENTRY ? `${words.slice(0, ENTRY - 1)}…` : words);
    } else {
      drawShape(entry.firstElementChild!, standing);
      setAttribute(entry, 'aria-label', words);
      setAttribute(entry, 'title', words);
    }
  }
}
