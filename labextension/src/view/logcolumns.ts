/** Ranks side by side: a column with the lines of each, which scroll together by time. */
import type { LogFilter } from '../logview';
import type { JobSession } from '../session';
import { make, setAttribute, setText } from './dom';
import { LogPane, type LogPaneActions, type Moment } from './logpane';
import { byTime } from './logrow';
import type { LogSearch } from './logsearch';
import { drawShape, standingOf } from './standing';
import { trans } from './translate';

/** Pixels that a column needs to be read, and how many columns there are in any case and at the most. */
const WIDTH = 240;
const FEWEST = 2;
const MOST = 4;

/** How many columns fit into so many pixels; 0: a page without layout (a test). */
export function fitting(width: number): number {
  return width === 0 ? MOST : Math.max(FEWEST, Math.min(Math.floor(width / WIDTH), MOST));
}

interface Column {
  rank: number;
  element: HTMLElement;
  head: HTMLElement;
  pane: LogPane;
  life: AbortController;
}

export class LogColumns {
  readonly element = make('div.td-log-columns', { hidden: true });
  private columns: Column[] = [];
  private active = false;

  constructor(
    private readonly session: JobSession,
    private readonly search: LogSearch,
    private readonly actions: LogPaneActions,
    signal: AbortSignal
  ) {
    signal.addEventListener('abort', () => this.choose([], null, null), { once: true });
  }

  get panes(): LogPane[] {
    return this.columns.map(column => column.pane);
  }

  get follows(): boolean {
    return this.panes.every(pane => pane.list.follows);
  }

  /** A column for each of these ranks, in this order. Those that stay keep their place; new ones begin at `moment`. */
  choose(ranks: readonly number[], filter: LogFilter | null, moment: Moment | null): void {
    const before = new Map(this.columns.map(column => [column.rank, column]));
    this.columns = ranks.map(rank => before.get(rank) ?? this.make(rank, filter!));
    for (const column of before.values()) {
      if (!this.columns.includes(column)) {
        column.life.abort();
      }
    }
    this.element.replaceChildren(...this.columns.map(column => column.element));
    this.element.hidden = ranks.length === 0;
    for (const { rank, pane } of this.columns) {
      if (before.has(rank)) {
        pane.view.choose({ ...filter!, ranks: new Set([rank]) });
      } else {
        if (this.active) {
          pane.show();
        }
        pane.begin(moment);
      }
    }
  }

  show(): void {
    this.active = true;
    this.panes.forEach(pane => pane.show());
  }

  hide(): void {
    this.active = false;
    this.panes.forEach(pane => pane.hide());
  }

  draw(): void {
    for (const { rank, element, head, pane } of this.columns) {
      const standing = standingOf(this.session.state, rank);
      const words = trans('rank %1: %2', rank, standing.words);
      drawShape(head, standing);
      setText(head.lastElementChild!, words);
      setAttribute(head, 'title', words);
      setAttribute(element, 'aria-label', words);
      pane.draw();
    }
  }

  follow(on: boolean): void {
    this.panes.forEach(pane => (pane.list.follows = on));
  }

  /** To the row, in the column where it is. */
  goToRow(row: number): boolean {
    return this.panes.some(pane => pane.goToRow(row));
  }

  /** The other columns go where this one went. */
  private together(moved: LogPane): void {
    const { follows } = moved.list;
    for (const pane of this.panes.filter(pane => pane !== moved)) {
      pane.clear();
      if (follows) {
        pane.list.follows = true;
        pane.draw();
      } else {
        pane.align(moved.moment);
      }
    }
    this.actions.moved(moved);
  }

  private make(rank: number, filter: LogFilter): Column {
    const life = new AbortController();
    const { signal } = life;
    const view = this.session.logs.view({ ...filter, ranks: new Set([rank]) }, signal);
    const actions = { ...this.actions, moved: (pane: LogPane) => this.together(pane) };
    const name = trans('lines of rank %1', rank);
    const pane = new LogPane(this.session, view, this.search, name, byTime, actions, signal);
    view.ready = () => pane.draw();
    const head = make('div.td-state.td-log-head', {}, make('span'));
    const element = make('div.td-log-column', { role: 'group' }, head, pane.list.scroller);
    return { rank, element, head, pane, life };
  }
}
