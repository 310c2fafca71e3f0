import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import type { JobSession } from '../src/session';
import type { Question, Segment } from '../src/source';
import { saveLog } from '../src/view/logsave';

const asked: Question[] = [];
const said: string[] = [];
const saved: [string, Blob][] = [];
let size = 0;
let fails = '';

/** A session that knows one file, whose line `n` is `n` in ten characters; a page of it is 40 bytes. */
const session = {
  job: 'a-job',
  ask: async (question: Extract<Question, { what: 'older' }>) => {
    asked.push(question);
    if (fails && asked.length > 1) {
      throw new Error(fails);
    }
    const end = question.at['3.out'] ?? size;
    const start = Math.max(0, end - 40);
    return { segments: end > 0 ? pieces(start, end) : [], at: { '3.out': start } };
  }
} as unknown as JobSession;

function pieces(start: number, end: number): Segment[] {
  const middle = start + 10;
  const text = (from: number, to: number) =>
    Array.from({ length: (to - from) / 10 }, (_, i) => `${from / 10 + i}é`.padStart(8) + '\n').join('');
  return [
    { file: '3.out', start, end: middle, t: 1, text: text(start, middle) },
    ...(end > middle ? [{ file: '3.out', start: middle, end, t: 1, text: text(middle, end) }] : [])
  ];
}

beforeEach(() => {
  asked.length = said.length = saved.length = 0;
  fails = '';
  let blob: Blob;
  URL.createObjectURL = made => ((blob = made as Blob), 'blob:a');
  URL.revokeObjectURL = () => undefined;
  vi.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(function (this: HTMLAnchorElement) {
    expect(document.body.contains(this), 'VS Code hears clicks in its document alone').toBe(true);
    saved.push([this.download, blob]);
  });
});

afterEach(() => vi.restoreAllMocks());

const save = (): Promise<void> => saveLog(session, '3.out', words => said.push(words));

function text(blob: Blob): Promise<string> {
  return new Promise(resolve => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.readAsText(blob);
  });
}

test('a file is read back to its begin, and offered in order', async () => {
  size = 100;
  await save();
  expect(asked.map(question => 'at' in question && question.at)).toEqual([{}, { '3.out': 60 }, { '3.out': 20 }]);
  expect(saved.map(([name]) => name)).toEqual(['a-job-3.out.txt']);
  expect((await text(saved[0]![1])).split('\n').map(line => line.trim())).toEqual([
    ...Array.from({ length: 10 }, (_, i) => `${i}é`),
    ''
  ]);
  expect(said).toEqual(['Reading 3.out: 40 of 100 B', 'Reading 3.out: 80 of 100 B', 'Reading 3.out: 100 of 100 B', '']);
  expect(document.querySelector('a[download]')).toBeNull();
});

test('a file that is empty, or gone, is offered as it is', async () => {
  size = 0;
  await save();
  expect(asked).toHaveLength(1);
  expect(saved[0]![1].size).toBe(0);
});

test('what is too much for a browser is said before it is read', async () => {
  size = 600 * 1024 * 1024;
  await save();
  expect([asked.length, saved.length]).toEqual([1, 0]);
  expect(said.at(-1)).toBe(
    'No file was written: 629 MB is too much for a browser; in a terminal, `torchdist logs a-job` has it'
  );
});

test('half a file is none', async () => {
  size = 100;
  fails = 'The kernel has ended';
  await save();
  expect(saved).toEqual([]);
  expect(said.at(-1)).toBe('No file was written: The kernel has ended');
});
