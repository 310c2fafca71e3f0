/** Whose lines are shown: a button or an entry of a list for each rank, with how it stands. */
import type { JobState } from '../protocol';
import { failures } from '../state';
import { button, make, setAttribute, setText } from './dom';
import { drawShape, makeShape, standingOf, standingOfAll, type Standing } from './standing';
import { trans } from './translate';

/** With more ranks than this there is a list instead of a button each. */
const BUTTONS = 16;

/** Ranks side by side. */
const MOST = 4;

/** Characters of an entry of the list. */
const ENTRY = 80;

export class RankBar {
  readonly element = make('span.td-logs-group', { role: 'group', 'aria-label': trans('ranks') });

  /** Null: all. */
  private choice: ReadonlySet<number> | null = null;
  /** Once the reader chose a rank, no failure chooses another. */
  private chosen = false;
  /** While ranks are side by side: what was chosen before. */
  private before: { choice: ReadonlySet<number> | null } | null = null;
  /** How many ranks there is room for side by side. */
  private room = MOST;
  private state: JobState | null = null;
  private order: number[] = [];
  private drawn = '';
  private readonly entries = new Map<number, HTMLElement>();
  private readonly said = new Map<number, string>();
  /** In place of the buttons, with the shape of the chosen rank. */
  private list: HTMLSelectElement | null = null;
  private readonly shape = makeShape();
  private readonly note = make('span.td-logs-said', { role: 'status' });

  /** `changed` is called when other ranks are chosen. */
  constructor(
    private readonly changed: () => void,
    private readonly signal: AbortSignal
  ) {}

  /** Whose lines are shown; null: those of all. Side by side they are in the order of the columns. */
  get ranks(): ReadonlySet<number> | null {
    return this.before ? new Set([...this.choice!].slice(0, this.room)) : this.choice;
  }

  /** Those that failed come first, and the first of them is chosen. */
  update(state: JobState): void {
    this.state = state;
    const failed = failures(state).map(rank => rank.rank);
    const first = failed[0];
    if (first !== undefined && !this.chosen && this.choice === null) {
      this.choice = new Set([first]);
      this.changed();
    }
    const drawn = JSON.stringify([failed, state.world_size]);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.build(failed, state.world_size);
    }
    this.draw();
  }

  /** Chooses one rank, or all. Side by side a rank comes to the others, or the first ones are chosen again. */
  pick(rank: number | null): void {
    if (this.before) {
      this.choose(rank === null ? this.first(null) : this.withColumn(rank));
    } else {
      this.choose(rank === null ? null : new Set([rank]));
    }
  }

  /** Ranks side by side, or what was chosen before that. */
  setBeside(on: boolean): void {
    const choice = on ? this.first(this.choice) : this.before!.choice;
    this.before = on ? { choice: this.choice } : null;
    this.choose(choice);
  }

  /** How many ranks there is room for side by side. Whether other ones are shown now. */
  setRoom(count: number): boolean {
    const other = this.before !== null && count !== this.room;
    this.room = count;
    this.draw();
    return other;
  }

  private choose(ranks: ReadonlySet<number> | null): void {
    this.chosen = true;
    this.choice = ranks;
    this.draw();
    this.changed();
  }

  /** The ranks to begin with side by side: those chosen, those that failed, the first ones. */
  private first(chosen: ReadonlySet<number> | null): Set<number> {
    const order = [...this.order.filter(rank => chosen?.has(rank)), ...this.order];
    return new Set([...new Set(order)].slice(0, MOST));
  }

  /** Where there is no room for one more, it takes the last one's place. */
  private withColumn(rank: number): ReadonlySet<number> {
    const shown = this.ranks!;
    return shown.has(rank) ? this.choice! : new Set([...[...shown].slice(0, this.room - 1), rank]);
  }

  /** With Ctrl, ⌘ or Shift, and side by side, a rank comes to the others or leaves them. */
  private click(rank: number, event: MouseEvent): void {
    const { ranks } = this;
    const several = this.before !== null || event.ctrlKey || event.metaKey || event.shiftKey;
    if (!ranks || !several || (this.before && !ranks.has(rank))) {
      this.pick(rank);
      return;
    }
    const next = new Set(ranks);
    if (!next.delete(rank)) {
      next.add(rank);
    }
    if (next.size > 0 || !this.before) {
      this.choose(next.size > 0 ? next : null);
    }
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
    this.element.replaceChildren(...(asList ? this.inList(parts) : parts), this.note);
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
    const some = this.before !== null && ranks!.size < state.world_size;
    setText(this.note, some ? trans('%1 of %2 ranks: %3', ranks!.size, state.world_size, [...ranks!].join(', ')) : '');
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
