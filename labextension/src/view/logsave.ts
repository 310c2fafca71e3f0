/** A whole log file by the feed's own questions: for a front end that the server's files do not reach. */
import type { JobSession } from '../session';
import type { FileOffsets } from '../source';
import { save } from './dom';
import { size, sizeOf } from './format';
import { trans } from './translate';

const PAGE_BYTES = 1024 * 1024;
/** More would keep a kernel busy for minutes. */
const MOST_BYTES = 512 * PAGE_BYTES;

/**
 * Reads `file` (`3.out`) from its end as it is now back to its begin, then offers it. `say` tells how it goes, and what
 * went wrong. Bytes that are no UTF-8 stand as `\xff`.
 */
export async function saveLog(session: JobSession, file: string, say: (words: string) => void): Promise<void> {
  const pages: string[] = [];
  let at: FileOffsets = {};
  let end: number | null = null;
  do {
    let answer;
    try {
      answer = await session.ask({ what: 'older', at, files: [file], limit: PAGE_BYTES });
    } catch (error) {
      say(trans('No file was written: %1', (error as Error).message));
      return;
    }
    end ??= answer.segments.at(-1)?.end ?? 0;
    if (end > MOST_BYTES) {
      const words = 'No file was written: %1 is too much for a browser; in a terminal, `torchdist logs %2` has it';
      say(trans(words, size(end), session.job));
      return;
    }
    pages.push(answer.segments.map(segment => segment.text).join(''));
    at = { [file]: answer.segments.length > 0 ? (answer.at[file] ?? 0) : 0 };
    say(trans('Reading %1: %2', file, sizeOf(end - at[file]!, end)));
  } while (at[file]! > 0);
  save(`${session.job}-${file}.txt`, new Blob(pages.reverse(), { type: 'text/plain;charset=utf-8' }));
  say('');
}
