/** All jobs that the server knows, kept up to date by its list feed. One for the whole page. */
import type { ServerConnection } from '@jupyterlab/services';

import { type JobSummary, LIST_FEED, request, ROOT, ServerError } from './api';
import { decode } from './codec';
import { FINAL_STATES } from './protocol';
import { ANSWER, LastingSocket, pause, TURN } from './server';
import { calledOf } from './view/describe';
import { trans } from './view/translate';

type ListMessage =
  | { type: 'jobs'; now: number; jobs: JobSummary[] }
  | { type: 'changes'; now: number; jobs: JobSummary[]; gone: string[] }
  | { type: 'trouble'; now: number; message: string; hint: string };

export interface ListChange {
  /** New or not as they were. */
  changed: JobSummary[];
  gone: string[];
  /** Ended while we looked on. */
  ended: JobSummary[];
}

type Callback = (change: ListChange) => void;

export function isFinal(job: JobSummary): boolean {
  return (FINAL_STATES as readonly string[]).includes(job.effective);
}

/** What a job is called: its name, else its cell. */
export function jobTitle(job: JobSummary): string {
  return calledOf(job.name || job.label || job.job, job.rerun_of);
}

/** The first of many names of curves: `loss, lr and 5 more`. */
export function named(curves: readonly string[]): string {
  const first = curves.slice(0, 3).map(name => name.slice(0, 80));
  const more = curves.length - first.length;
  return first.join(', ') + (more ? trans(' and %1 more', more) : '');
}

/** The last part of its notebook's path. */
export function notebookName(job: JobSummary): string {
  return job.notebook.split('/').pop() ?? '';
}

export class JobList {
  /** Connects at once; ends with `signal`. */
  constructor(
    private readonly settings: ServerConnection.ISettings,
    signal: AbortSignal
  ) {
    new LastingSocket(
      settings,
      LIST_FEED,
      {
        opened: () => undefined,
        slow: attempt => this.ask(attempt),
        message: text => this.take(decode(text) as ListMessage),
        closed: opened => this.lost(opened, signal)
      },
      signal
    );
    signal.addEventListener('abort', () => this.callbacks.clear(), { once: true });
  }

  /** In no order. */
  get jobs(): ReadonlyMap<string, JobSummary> {
    return this.known;
  }

  /** A sentence for the user when the list is not kept up to date now, else empty. */
  trouble = '';

  /** False until the list was there once. */
  loaded = false;

  /** Seconds: the server's clock minus the browser's. */
  clockSkew = 0;

  get running(): number {
    return this.count(job => !isFinal(job));
  }

  /** Those of which ranks wait in a collective. */
  get waiting(): number {
    return this.count(job => job.wait !== null);
  }

  /** Those of which no rank makes progress. */
  get stalled(): number {
    return this.count(job => job.stall !== null);
  }

  private count(which: (job: JobSummary) => boolean): number {
    return [...this.known.values()].filter(which).length;
  }

  onChange(callback: Callback, signal: AbortSignal): void {
    const own: Callback = change => callback(change);
    this.callbacks.add(own);
    signal.addEventListener('abort', () => this.callbacks.delete(own), { once: true });
  }

  /** The list by requests, for as long as the socket is not open. */
  private async ask(attempt: AbortSignal): Promise<void> {
    while (!attempt.aborted) {
      let list;
      try {
        list = (await request(this.settings, ROOT, { signal: attempt })) as { now: number; jobs: JobSummary[] };
      } catch {
        return; // why will be said when the socket fails, too
      }
      if (!attempt.aborted) {
        this.take({ type: 'jobs', ...list });
      }
      await pause(TURN, attempt);
    }
  }

  private take(message: ListMessage): void {
    this.clockSkew = message.now - Date.now() / 1000;
    if (message.type === 'trouble') {
      this.trouble = message.hint ? `${message.message}; ${message.hint}` : message.message;
      this.tell({ changed: [], gone: [], ended: [] });
      return;
    }
    this.trouble = '';
    const gone = message.type === 'changes' ? message.gone : this.missing(message.jobs);
    const ended = message.jobs.filter(job => this.hasEnded(job));
    for (const job of message.jobs) {
      this.known.set(job.job, job);
    }
    for (const job of gone) {
      this.known.delete(job);
    }
    this.loaded = true;
    this.tell({ changed: message.jobs, gone, ended });
  }

  private missing(jobs: JobSummary[]): string[] {
    const there = new Set(jobs.map(job => job.job));
    return [...this.known.keys()].filter(job => !there.has(job));
  }

  private hasEnded(job: JobSummary): boolean {
    const before = this.known.get(job.job);
    return before !== undefined && !isFinal(before) && isFinal(job);
  }

  private async lost(opened: boolean, signal: AbortSignal): Promise<boolean> {
    let again = true;
    let trouble = trans('The connection to the server was lost; trying again');
    if (!opened) {
      try {
        await request(this.settings, ROOT, { signal: AbortSignal.timeout(ANSWER) });
      } catch (error) {
        if (error instanceof ServerError) {
          trouble = error.message;
          again = !error.final;
        }
      }
    }
    if (!signal.aborted) {
      this.trouble = trouble;
      this.tell({ changed: [], gone: [], ended: [] });
    }
    return again;
  }

  private tell(change: ListChange): void {
    for (const callback of [...this.callbacks]) {
      callback(change);
    }
  }

  private readonly known = new Map<string, JobSummary>();
  private readonly callbacks = new Set<Callback>();
}
