/** One row of the log tab, and which rows are selected. */
import { CUT, GAP } from '../logrows';
import { displayIn, plain } from '../logtext';
import type { Fold, LogView } from '../logview';
import type { JobSession } from '../session';
import { isFinal } from '../state';
import { draw, SHOWN_CHARACTERS, shownText } from './ansi';
import { button, make, setAttribute } from './dom';
import { clock, firstLine, size } from './format';
import type { LogListSource } from './loglist';
import type { LogSearch } from './logsearch';
import { standingOf, standingOfAll } from './standing';
import { trans } from './translate';

export interface LogRowActions {
  loadGap(row: number): void;
  copy(text: string): void;
  /** What a line stands for is to be shown. */
  display(row: number, number: number): void;
  /** Opens lines that are folded, or folds them again. */
  turn(fold: Fold): void;
}

/** An element and what it shows: what has not changed is not drawn again. */
type Row = HTMLElement & { looks?: string; line?: string; standing?: string };

/** What stands in front of a row. */
export type Who = (session: JobSession, view: LogView, row: number) => string;

/** Who wrote it: `[rank 3]`, `[all 8 ranks]`. */
export const byRank: Who = (session, view, row) =>
  view.isOfAll(row) ? trans('[all %1 ranks]', view.ranks) : trans('[rank %1]', session.logs.fileOf(row).rank);

/** Rows before and after a line that are asked whether they are alike on all ranks: more where more ranks speak. */
const AROUND = { fewest: 8, most: 64 };

/** Characters of the longest of them. */
export function widestWho(ranks: number, folded: boolean): number {
  return Math.max(trans('[rank %1]', ranks - 1).length, folded ? trans('[all %1 ranks]', ranks).length : 0);
}

/** When it was written, for rows that are all of one rank. */
export const byTime: Who = ({ logs }, _, row) => clock(logs.rows.time[row]!);

let drawers = 0;

export class LogRowDrawer implements LogListSource {
  private readonly id = `td-log-${++drawers}`;

  constructor(
    private readonly session: JobSession,
    private readonly view: LogView,
    private readonly search: LogSearch,
    private readonly selection: LogSelection,
    private readonly who: Who,
    private readonly actions: LogRowActions,
    private readonly signal: AbortSignal
  ) {}

  get length(): number {
    return this.view.length;
  }

  get active(): number | null {
    return this.selection.active;
  }

  key(index: number): number {
    return this.view.rows.at(index);
  }

  idOf(row: number): string {
    return `${this.id}-${row}`;
  }

  /** For the clipboard: as it is shown, and who wrote each line where that is not the same for all. */
  textOf(from: number, to: number): string {
    const { logs } = this.session;
    const rows = [...this.view.rows.view().slice(from, to + 1)];
    const who = (row: number): string => byRank(this.session, this.view, row);
    const several = new Set(rows.map(who)).size > 1;
    const lines = rows.map(row => {
      const gap = logs.rows.kind[row] === GAP;
      const fold = this.view.foldAt(row);
      const text = gap ? trans('… %1 passed over', size(logs.rows.bytes[row]!)) : shownText(logs.text(row));
      const texts = [text, ...(fold && !fold.open ? fold.lines.slice(1).map(shownText) : [])];
      return several ? texts.map(text => `${who(row)} ${text}`) : texts;
    });
    return lines.flat().join('\n');
  }

  draw(index: number, before: Row | undefined): HTMLElement {
    const row = this.view.rows.at(index);
    const { logs } = this.session;
    const text = logs.text(row);
    const current = this.search.current === row;
    const who = this.who(this.session, this.view, row);
    const differs = this.differs(index);
    const { key } = this.search.pattern ?? {};
    const open = this.view.foldAt(row)?.open;
    const looks = [logs.rows.kind[row], logs.rows.bytes[row], who, differs, key, current, open].join();
    let element = before;
    if (!element || element.looks !== looks || element.line !== text) {
      element = this.newRow(row, text, current, who);
      element.classList.toggle('td-log-differs', differs);
      element.looks = looks;
      element.line = text;
    }
    this.title(element, row, differs);
    setAttribute(element, 'aria-rowindex', index + 1);
    setAttribute(element, 'aria-selected', String(this.selection.has(index)));
    element.classList.toggle('td-log-active', row === this.selection.active);
    return element;
  }

  private newRow(row: number, text: string, current: boolean, words: string): Row {
    const { logs } = this.session;
    const { stream } = logs.fileOf(row);
    const isGap = logs.rows.kind[row] === GAP;
    const cell = make('div.td-log-text', { role: 'gridcell' });
    if (isGap) {
      const words = trans('%1 passed over here', size(logs.rows.bytes[row]!));
      cell.append(
        words,
        this.small(trans('Load'), () => this.actions.loadGap(row))
      );
    } else {
      this.line(cell, row, text, current);
    }
    const attributes = { role: 'row', id: this.idOf(row), 'data-stream': stream, 'data-row': row };
    const who = make('div.td-log-who', { role: 'gridcell' }, words);
    const element = make('div.td-log-row', attributes, who, cell);
    element.classList.toggle('td-log-gap', isGap);
    return element;
  }

  /** Stream and time, and how the rank stands now: that changes without the row being drawn again. */
  private title(element: Row, row: number, differs: boolean): void {
    const { logs, state } = this.session;
    const { rank, stream } = logs.fileOf(row);
    const ofAll = this.view.isOfAll(row);
    const { words } = ofAll ? standingOfAll(state) : standingOf(state, rank);
    if (element.standing === words) {
      return;
    }
    element.standing = words;
    const time = logs.rows.time[row]!;
    const where = [stream, time > 0 ? clock(time) : ''].filter(Boolean).join(' · ');
    const now = ofAll ? trans('the ranks now: %1', words) : trans('rank %1 now: %2', rank, words);
    const apart = differs ? trans('Not all ranks said this, unlike the lines around it.') : '';
    setAttribute(element.firstElementChild!, 'title', [where, now, apart].filter(Boolean).join('\n'));
  }

  /** Whether what is around this line is alike on all ranks, and this line is not. */
  private differs(index: number): boolean {
    const { view, session } = this;
    const row = view.rows.at(index);
    if (view.ranks < 2 || view.isOfAll(row) || session.logs.rows.kind[row] === GAP || session.logs.isOpen(row)) {
      return false;
    }
    const [before, after] = [this.alikeFrom(index, -1), this.alikeFrom(index, 1)];
    // At the end of a log that goes on the others may say it yet.
    const over = after === 'end' && isFinal(session.state);
    return (before === 'alike' && (after === 'alike' || over)) || (before === 'end' && after === 'alike');
  }

  /** What comes first in this direction: a line that is alike on all ranks, the end of the log, or neither for long. */
  private alikeFrom(index: number, step: 1 | -1): 'alike' | 'end' | 'neither' {
    const { rows, ranks } = this.view;
    const near = Math.min(Math.max(AROUND.fewest, 2 * ranks), AROUND.most);
    for (let at = index + step; Math.abs(at - index) <= near; at += step) {
      if (at < 0 || at >= rows.length) {
        return 'end';
      }
      if (this.view.isOfAll(rows.at(at))) {
        return 'alike';
      }
    }
    return 'neither';
  }

  private line(cell: HTMLElement, row: number, text: string, current: boolean): void {
    const { element, cut } = draw(text, this.marks(text), current);
    const { logs } = this.session;
    const fold = this.view.foldAt(row);
    // In front, where a narrow list shows it.
    cell.append(...this.opener(row, text, fold), element);
    if (fold && !fold.open) {
      cell.append(make('span.td-log-note', {}, ` … ${firstLine(fold.title, 200)}`));
    }
    if (cut > 0 || logs.rows.kind[row] === CUT) {
      const words = trans('… %1 in all', size(logs.rows.bytes[row]!));
      cell.append(
        make('span.td-log-note', {}, words),
        this.small(trans('Copy line'), () => this.actions.copy(text))
      );
    }
  }

  /** The button for what a line stands for: a picture, or other lines. */
  private opener(row: number, text: string, fold: Fold | null): HTMLElement[] {
    if (fold) {
      const words = fold.open ? trans('Fold') : trans('Show %1 lines', fold.lines.length);
      const turn = this.small(words, () => this.actions.turn(fold));
      setAttribute(turn, 'aria-expanded', String(fold.open));
      return [turn];
    }
    const number = displayIn(text);
    if (number === null) {
      return [];
    }
    const show = this.small(trans('Show'), () => this.actions.display(row, number));
    setAttribute(show, 'aria-label', trans('Show display %1 of rank %2', number, this.session.logs.fileOf(row).rank));
    return [show];
  }

  /** Where the search finds something in what is shown of the line. */
  private marks(text: string): [number, number][] {
    const { pattern } = this.search;
    if (!pattern) {
      return [];
    }
    const shown = plain(text.slice(0, SHOWN_CHARACTERS * 4)).slice(0, SHOWN_CHARACTERS);
    return pattern.find(shown);
  }

  private small(words: string, click: () => void): HTMLButtonElement {
    // Not a stop of the Tab key: Enter in the list does it for the active row.
    return button('button.td-log-more', words, click, this.signal, { tabindex: -1 });
  }
}

/** The rows from one to another; the keys move the active end. */
export class LogSelection {
  active: number | null = null;
  private anchor: number | null = null;
  private known = '';
  private found: [number, number] | null = null;

  constructor(private readonly view: LogView) {}

  get activeIndex(): number {
    return this.active === null ? -1 : this.view.rows.indexOf(this.active);
  }

  /** First and last index, where there is a selection. */
  get range(): [number, number] | null {
    // Every row that is drawn asks: places are looked up once for all of them.
    const known = `${this.active} ${this.anchor} ${this.view.edits}`;
    if (known !== this.known) {
      this.known = known;
      const ends = [this.active, this.anchor].map(row => (row === null ? -1 : this.view.rows.indexOf(row)));
      this.found = ends.includes(-1) ? null : [Math.min(...ends), Math.max(...ends)];
    }
    return this.found;
  }

  has(index: number): boolean {
    const { range } = this;
    return range !== null && index >= range[0] && index <= range[1];
  }

  move(index: number, extend: boolean): void {
    this.active = this.view.rows.at(index);
    this.anchor = extend ? (this.anchor ?? this.active) : this.active;
  }

  clear(): void {
    this.active = this.anchor = null;
  }
}
