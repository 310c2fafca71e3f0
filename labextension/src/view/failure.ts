/** The error of the rank that failed first, at the top of the view: the notebook's lines with their source. */
import type { ErrorRecord, JobSpec, RankState } from '../protocol';
import type { JobSession } from '../session';
import { failures, isFinal } from '../state';
import { shownLines } from './ansi';
import { failureTitle, others } from './describe';
import { button, copy, make, setText } from './dom';
import { because } from './finding';
import { firstLine, shortPath } from './format';
import { stateIcon } from './icons';
import { plural, trans } from './translate';

type Frame = ErrorRecord['frames'][number];

/** Shows a line of a cell, `Cell In[5]`. Rejects with a sentence where that cannot be. */
export type Reveal = (cell: string, line: number) => Promise<void>;

/** Lines before and after the user's innermost one; of the frames that led there each has its line alone. */
const AROUND = 2;

const MANY = 8;

const LONG = 20_000;

export class Failure {
  private readonly box: HTMLElement;
  private shown = '';

  /**
   * `toLog` brings the log of a rank to the front; `reveal` shows a line of the notebook, where one can; `told`: whether
   * the cell has the traceback.
   */
  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly toLog: (rank: number) => void,
    private readonly reveal: Reveal | null,
    private readonly told: () => boolean,
    private readonly signal: AbortSignal
  ) {
    this.box = make('section.td-failure', { hidden: true, 'aria-label': trans('what failed'), tabindex: '0' });
    element.append(this.box);
    this.update();
  }

  update(): void {
    const { state, hello } = this.session;
    const failed = failures(state);
    const first = failed[0];
    const rest = first ? others(state, first.rank) : '';
    const key = first ? [first.rank, first.state, failed.length, rest, isFinal(state), Boolean(hello)].join() : '';
    if (key === this.shown) {
      return;
    }
    this.shown = key;
    this.box.hidden = !first;
    this.box.replaceChildren(...(first ? this.draw(first, failed.slice(1), rest, hello?.spec ?? null) : []));
  }

  private draw(first: RankState, more: RankState[], rest: string, spec: JobSpec | null): HTMLElement[] {
    const said = make('span.td-said', { role: 'status' });
    const text = shownLines(first.error?.text || failureTitle(first));
    const copyText = async () => setText(said, (await copy(text)) ? trans('copied') : trans('the browser refused'));
    const tools = make(
      'span.td-actions',
      {},
      said,
      button('button.td-button', trans('Log of rank %1', first.rank), () => this.toLog(first.rank), this.signal),
      first.error && button('button.td-button', trans('Copy traceback'), () => void copyText(), this.signal)
    );
    const place = first.host ? trans('rank %1 on %2', first.rank, first.host) : trans('rank %1', first.rank);
    const told = this.told();
    const traceback = first.error ? this.traceback(first.error, spec) : [];
    const where = told ? first.error?.frames.findLast(([file]) => !isLibrary(file)) : undefined;
    const parts: HTMLElement[] = [
      make(
        'div.td-failure-head',
        {},
        stateIcon('failed'),
        make('span.td-failure-title', {}, firstLine(failureTitle(first), 1000)),
        make('span.td-failure-place', {}, place),
        where && make('span.td-frame-place', {}, this.place(where, spec)),
        tools
      )
    ];
    const { state, job } = this.session;
    parts.push(...state.findings.map(finding => because(finding, job, this.signal)));
    if (traceback.length > 0) {
      const summary = make('summary', {}, trans('Traceback'));
      parts.push(make('details.td-fold.td-traceback', { open: !told }, summary, ...traceback));
    }
    if (rest) {
      parts.push(this.others(more, rest));
    }
    return parts;
  }

  private others(more: RankState[], rest: string): HTMLElement {
    if (more.length === 0) {
      return make('p.td-failure-others', {}, rest);
    }
    const rows = more.slice(0, MANY).map(rank => {
      const show = () => this.toLog(rank.rank);
      const link = button('button.td-link', trans('rank %1', rank.rank), show, this.signal);
      return make('li', {}, stateIcon(rank.state), ' ', link, ` ${firstLine(failureTitle(rank))}`);
    });
    return make('details.td-failure-others', {}, make('summary', {}, rest), make('ul', {}, ...rows));
  }

  /** The frames in order, those of libraries folded; where there are none, the text as Python printed it. */
  private traceback(error: ErrorRecord, spec: JobSpec | null): HTMLElement[] {
    const whole = make('pre.td-code', {}, shownLines(error.text.slice(0, LONG).trimEnd()));
    if (error.frames.length === 0 || error.text.trimStart().startsWith('+ ')) {
      return error.text ? [whole] : [];
    }
    const parts: HTMLElement[] = [];
    const innermost = error.frames.findLast(([file]) => !isLibrary(file));
    for (const group of grouped(error.frames)) {
      const blocks = group.frames.map(frame => this.frame(frame, spec, frame === innermost ? AROUND : 0));
      if (group.own || error.frames.length === 1) {
        parts.push(...blocks);
      } else {
        const where = shortPath(group.frames.at(-1)![0]);
        const title = plural('%1 frame in %2', '%1 frames, to %2', blocks.length, where);
        parts.push(make('details.td-fold', {}, make('summary', {}, title), ...blocks));
      }
    }
    const lines = error.message.split('\n').slice(1);
    if (lines.length > 0) {
      parts.push(make('pre.td-code', {}, shownLines(lines.join('\n').slice(0, LONG))));
    }
    // Opened, it stands in place of the frames (failure.css): nothing is said twice.
    parts.push(make('details.td-fold.td-whole', {}, make('summary', {}, trans('Whole traceback')), whole));
    return parts;
  }

  private place([file, line]: Frame, spec: JobSpec | null): HTMLElement | string {
    const text = trans('%1, line %2', shortPath(file), line);
    return this.isOfNotebook(file, spec) ? this.link(text, file, line) : text;
  }

  private frame(frame: Frame, spec: JobSpec | null, around: number): HTMLElement {
    const [file, line, name, source] = frame;
    const place = make('div.td-frame-place', {}, this.place(frame, spec));
    if (name && name !== '<module>') {
      place.append(trans(', in '), make('code', {}, name));
    }
    const rows = sourceAround(file, line, source, spec, around).map(row =>
      make(
        row.number === line ? 'span.td-source-row.td-here' : 'span.td-source-row',
        {},
        make('span.td-source-number', {}, `${row.number === line ? '→ ' : ''}${row.number}`),
        `${row.text}\n`
      )
    );
    return make('div.td-frame', {}, place, make('pre.td-code', {}, ...rows));
  }

  private isOfNotebook(file: string, spec: JobSpec | null): boolean {
    return this.reveal !== null && spec?.kind === 'cell' && (file === spec.label || isCell(file));
  }

  private link(text: string, file: string, line: number): HTMLElement {
    const said = make('span.td-said', { role: 'status' });
    const show = async (): Promise<void> => {
      setText(said, '');
      try {
        await this.reveal!(file, line);
      } catch (error) {
        setText(said, ` ${error instanceof Error ? error.message : String(error)}`);
      }
    };
    const title = { title: trans('Show this line in the notebook') };
    return make(
      'span',
      {},
      button('button.td-link', text, () => void show(), this.signal, title),
      said
    );
  }
}

function grouped(frames: Frame[]): { own: boolean; frames: Frame[] }[] {
  const groups: { own: boolean; frames: Frame[] }[] = [];
  for (const frame of frames) {
    const own = !isLibrary(frame[0]);
    const last = groups.at(-1);
    if (last && last.own === own) {
      last.frames.push(frame);
    } else {
      groups.push({ own, frames: [frame] });
    }
  }
  return groups;
}

/** Of a package or of Python itself, not the user's. */
function isLibrary(file: string): boolean {
  return /[\\/](site|dist)-packages[\\/]|[\\/]lib[\\/]python\d|^<frozen /.test(file);
}

/** `Cell In[5]`: a cell of the same notebook, by the number that it ran under. */
export function isCell(file: string): boolean {
  return /^Cell In\[\d+\]$/.test(file);
}

/** The line, and so many around it where the cell's source is known, else the rank's own line alone. */
export function sourceAround(
  file: string,
  line: number,
  source: string,
  spec: JobSpec | null,
  around: number
): { number: number; text: string }[] {
  const lines = spec && spec.label === file ? spec.source.split('\n') : [];
  const at = line - (spec?.first_line ?? 1);
  if (!(at in lines) || (source && lines[at]!.trim() !== source.trim())) {
    return [{ number: line, text: source }];
  }
  let first = Math.max(at - around, 0);
  let last = Math.min(at + around, lines.length - 1);
  while (first < at && !lines[first]!.trim()) {
    first += 1;
  }
  while (last > at && !lines[last]!.trim()) {
    last -= 1;
  }
  return lines.slice(first, last + 1).map((text, index) => ({ number: line + first + index - at, text }));
}
