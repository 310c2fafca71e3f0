/** Tracebacks in the log that stand elsewhere already: in the box of the failure, or under the cell. */
import type { Fold } from '../logview';
import type { RankState } from '../protocol';
import type { JobSession } from '../session';
import { failures } from '../state';
import { failureTitle } from './describe';

/** How many of the last lines are looked through: a traceback is among the last words of its rank. */
const LAST = 20_000;

export class LogFolds {
  /** By file. */
  readonly found = new Map<string, Fold>();

  constructor(private readonly session: JobSession) {}

  /** Looks for the traceback of the first failure, on all ranks that have the same. Returns whether one was found. */
  look(): boolean {
    const failed = failures(this.session.state);
    const text = failed[0]?.error?.text.trimEnd();
    const missing = text ? failed.filter(({ rank, error }) => error?.text.trimEnd() === text && this.misses(rank)) : [];
    return missing.map(rank => this.find(rank, text!.split('\n'))).includes(true);
  }

  /** Opens it, or folds it again. */
  turn(fold: Fold): void {
    this.found.set(fold.file, { ...fold, open: !fold.open });
  }

  private misses(rank: number): boolean {
    return !this.found.has(`${rank}.err`);
  }

  private find(rank: RankState, lines: string[]): boolean {
    const { logs } = this.session;
    const file = `${rank.rank}.err`;
    const own = logs.order
      .view()
      .slice(-LAST)
      .filter(row => logs.fileOf(row).name === file);
    for (let at = own.length - lines.length; at >= 0 && lines.length > 1; at--) {
      if (lines.every((line, index) => logs.text(own[at + index]!) === line)) {
        const { start } = logs.rows;
        const [from, to] = [start[own[at]!]!, start[own[at + lines.length - 1]!]! + 1];
        this.found.set(file, { file, from, to, lines, title: failureTitle(rank), open: false });
        return true;
      }
    }
    return false;
  }
}
