/** Lines in a list with its keys and its selection: the merged log, or the column of one rank. */
import type { LogView } from '../logview';
import type { JobSession } from '../session';
import { setAttribute } from './dom';
import { LogList } from './loglist';
import { LogRowDrawer, LogSelection, type LogRowActions, type Who } from './logrow';
import type { LogSearch } from './logsearch';

export interface LogPaneActions extends LogRowActions {
  /** The reader scrolled, or went to a row. */
  moved(pane: LogPane): void;
  /** The reader wants what is older than the first row. */
  older(): void;
  /** To the search box. */
  search(): void;
}

/** A place by time: rows of one moment are counted. */
export interface Moment {
  time: number;
  past: number;
}

export class LogPane {
  readonly list: LogList;
  readonly rows: LogRowDrawer;

  private readonly selection: LogSelection;
  private edits = -1;
  private widened = 0;
  /** The row at the upper edge, by which the place is kept when rows come in front of it. */
  private firstKey = -1;
  private firstHidden = 0;

  constructor(
    private readonly session: JobSession,
    readonly view: LogView,
    search: LogSearch,
    name: string,
    who: Who,
    private readonly actions: LogPaneActions,
    signal: AbortSignal
  ) {
    this.selection = new LogSelection(view);
    this.rows = new LogRowDrawer(session, view, search, this.selection, who, actions, signal);
    this.list = new LogList(this.rows, () => this.scrolled(), signal);
    const { scroller } = this.list;
    setAttribute(scroller, 'role', 'grid');
    setAttribute(scroller, 'tabindex', 0);
    setAttribute(scroller, 'aria-label', name);
    setAttribute(scroller, 'aria-multiselectable', 'true');
    scroller.addEventListener('keydown', event => this.key(event), { signal });
    scroller.addEventListener('click', event => this.click(event), { signal });
    scroller.addEventListener('copy', event => this.copy(event), { signal });
  }

  show(): void {
    this.list.active = true;
    this.list.measure();
  }

  hide(): void {
    this.list.active = false;
  }

  /** So many characters stand in front of each row, so that all lines begin below each other. */
  widen(characters: number): void {
    if (characters !== this.widened) {
      this.widened = characters;
      this.list.scroller.style.setProperty('--td-who', String(characters));
    }
  }

  /** What the view holds now, at the place where the reader is. */
  draw(): void {
    if (this.edits !== this.view.edits) {
      this.edits = this.view.edits;
      this.keepPlace();
    }
    this.list.scroller.hidden = this.view.length === 0;
    setAttribute(this.list.scroller, 'aria-rowcount', this.view.length);
    if (this.list.active) {
      this.list.update();
      this.remember();
    }
  }

  // --- the place ---

  private remember(): void {
    const { index, hidden } = this.list.anchor;
    this.firstKey = index < this.view.length ? this.view.rows.at(index) : -1;
    this.firstHidden = hidden;
  }

  private keepPlace(): void {
    if (this.list.follows || this.firstKey < 0) {
      return;
    }
    const index = this.view.rows.indexOf(this.firstKey);
    if (index >= 0) {
      this.list.anchorAt(index, this.firstHidden);
    }
  }

  private scrolled(): void {
    this.remember();
    this.actions.moved(this);
    if (this.list.isAtTop && !this.list.follows) {
      this.actions.older();
    }
  }

  /** When what stands at the upper edge was written. */
  get moment(): Moment {
    const { index } = this.list.anchor;
    const time = this.timeAt(index);
    return { time, past: index - this.firstAt(time) };
  }

  /** At the end, which is followed, or at what was written then. */
  begin(moment: Moment | null): void {
    this.list.measure(); // a place is counted in rows of this height
    this.list.follows = moment === null;
    if (moment) {
      this.align(moment);
    }
  }

  /** Scrolls to what was written then, or after it. */
  align({ time, past }: Moment): void {
    const first = this.firstAt(time);
    const same = this.firstAt(this.timeAt(first), true) - first;
    this.list.follows = false;
    this.list.anchorAt(first + Math.max(0, Math.min(past, same - 1)), 0);
    this.draw();
  }

  private timeAt(index: number): number {
    return index < this.view.length ? this.session.logs.rows.time[this.view.rows.at(index)]! : Infinity;
  }

  /** The first row of that time or later; `after`: later only. */
  private firstAt(time: number, after = false): number {
    let [low, high] = [0, this.view.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      const is = this.timeAt(middle);
      if (is < time || (after && is === time)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // --- moving ---

  private key(event: KeyboardEvent): void {
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if (modified && event.key.toLowerCase() === 'a' && !event.altKey) {
      this.select(0, this.view.length - 1);
    } else if (modified) {
      return;
    } else if (event.key === '/') {
      this.actions.search();
    } else if (event.key === 'Escape') {
      this.clear();
    } else if (event.key === 'Enter') {
      this.openRow();
    } else if (!this.moveBy(event)) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  private moveBy(event: KeyboardEvent): boolean {
    const last = this.view.length - 1;
    const from = this.activeIndex();
    const to = {
      ArrowUp: from - 1,
      ArrowDown: from + 1,
      PageUp: from - this.list.page,
      PageDown: from + this.list.page,
      Home: 0,
      End: last
    }[event.key];
    if (to === undefined || last < 0) {
      return false;
    }
    this.goTo(Math.max(0, Math.min(to, last)), event.shiftKey);
    if (to <= from && this.list.isAtTop) {
      this.actions.older();
    }
    return true;
  }

  private activeIndex(): number {
    const index = this.selection.activeIndex;
    return index >= 0 ? index : this.list.follows ? this.view.length - 1 : this.list.anchor.index;
  }

  private goTo(index: number, extend = false, middle = false): void {
    this.selection.move(index, extend);
    this.list.follows = index === this.view.length - 1;
    this.list.reveal(index, middle);
    this.remember();
    this.actions.moved(this);
  }

  /** To a row that a search found; whether it is here. */
  goToRow(row: number): boolean {
    const index = this.view.rows.indexOf(row);
    if (index < 0) {
      return false;
    }
    this.goTo(index, false, true);
    this.list.follows = false;
    return true;
  }

  /** The lowest row of `hits` in sight, else the nearest to it, and how far it is from sight. */
  nearest(hits: ReadonlySet<number>): { row: number; far: number } | null {
    const { rows } = this.view;
    const first = this.list.anchor.index;
    const last = Math.min(first + this.list.page + 1, rows.length - 1);
    const isHit = (at: number): boolean => at >= 0 && at < rows.length && hits.has(rows.at(at));
    for (let at = last; at >= first; at--) {
      if (isHit(at)) {
        return { row: rows.at(at), far: 0 };
      }
    }
    for (let far = 1; hits.size > 0 && far <= rows.length; far++) {
      const at = [first - far, last + far].find(isHit);
      if (at !== undefined) {
        return { row: rows.at(at), far };
      }
    }
    return null;
  }

  /** What a click does with the button or the link of a row. */
  private openRow(): void {
    const { active } = this.selection;
    const element = active === null ? null : this.list.scroller.querySelector(`#${this.rows.idOf(active)}`);
    element?.querySelector<HTMLElement>('button, a')?.click();
  }

  // --- selecting and copying ---

  private click(event: MouseEvent): void {
    const target = event.target as Element;
    const row = target.closest<HTMLElement>('.td-log-row')?.dataset['row'];
    // A click into text may be the end of a selection of characters: rows are selected by their names.
    if (row === undefined || target.closest('a, button') || !(event.shiftKey || target.closest('.td-log-who'))) {
      return;
    }
    const index = this.view.rows.indexOf(Number(row));
    if (index >= 0) {
      window.getSelection()?.removeAllRanges();
      this.goTo(index, event.shiftKey);
    }
  }

  private select(from: number, to: number): void {
    if (to >= from) {
      this.selection.move(from, false);
      this.selection.move(to, true);
      this.actions.moved(this);
      this.draw();
    }
  }

  /** No row is selected. */
  clear(): void {
    this.selection.clear();
    this.draw();
  }

  /** First and last of the selected rows, where there are several. */
  get selected(): [number, number] | null {
    const { range } = this.selection;
    return range && range[0] < range[1] ? range : null;
  }

  private copy(event: ClipboardEvent): void {
    const { range } = this.selection;
    const characters = window.getSelection();
    if (range && (!characters || characters.isCollapsed) && event.clipboardData) {
      event.clipboardData.setData('text/plain', this.rows.textOf(...range));
      event.preventDefault();
    }
  }
}
