/** Brings lines that the browser does not hold: older ones, those around a place, those of a gap. */
import type { JobSession } from '../session';
import type { Segment } from '../source';
import { trans } from './translate';

const PAGE_BYTES = 256 * 1024;

export class LogLoader {
  /** Whether something is on its way; meanwhile nothing else is asked for. */
  busy = false;

  /** `say` tells how it goes, and what went wrong; `loaded` is called when it is over. */
  constructor(
    private readonly session: JobSession,
    private readonly say: (words: string) => void,
    private readonly loaded: () => void,
    private readonly signal: AbortSignal
  ) {}

  /** A page of each of these files, in front of what is held of it. */
  async older(files: string[]): Promise<void> {
    const { logs } = this.session;
    await this.load(async () => {
      const at = logs.starts(logs.files.filter(file => files.includes(file.name)));
      return (await this.session.ask({ what: 'older', at, files, limit: PAGE_BYTES })).segments;
    });
  }

  async around(file: string, offset: number): Promise<void> {
    await this.load(async () => {
      const limit = PAGE_BYTES / 4;
      return (await this.session.ask({ what: 'around', file, offset, limit })).segments;
    });
  }

  /** The end of what was passed over: it is nearest to what is read. */
  async gap(row: number): Promise<void> {
    const { logs } = this.session;
    const { name } = logs.fileOf(row);
    const at = { [name]: logs.rows.start[row]! + logs.rows.bytes[row]! };
    await this.load(async () => {
      return (await this.session.ask({ what: 'older', at, files: [name], limit: PAGE_BYTES })).segments;
    });
  }

  private async load(ask: () => Promise<Segment[]>): Promise<void> {
    if (this.busy) {
      return;
    }
    this.busy = true;
    this.say(trans('Loading older lines…'));
    try {
      const segments = await ask();
      this.session.logs.reading = true;
      this.session.logs.insert(segments);
      this.say('');
    } catch (error) {
      this.say((error as Error).message);
    } finally {
      this.busy = false;
      if (!this.signal.aborted) {
        this.loaded();
      }
    }
  }
}
