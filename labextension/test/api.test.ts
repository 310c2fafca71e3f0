import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { downloadLog, JobsApi, ServerError, socketAddress } from '../src/api';
import { pathsBelowRoot } from '../src/reveal';
import { aSummary, Serving } from './serving';

let serving: Serving;
let api: JobsApi;

beforeEach(async () => {
  serving = await Serving.start();
  api = new JobsApi(serving.settings);
});

afterEach(() => serving.stop());

test('the list', async () => {
  serving.answer = () => ({ status: 200, body: { now: 1, jobs: [aSummary('a', { spark: [1, '@nan'] })] } });
  const jobs = await api.list();
  expect(jobs[0]!.spark).toEqual([1, NaN]);
  expect(serving.asked).toEqual(['GET /user/ann/torchdist/api/jobs']);
});

test('what is done with one job', async () => {
  serving.answer = (method, path) =>
    method === 'DELETE'
      ? { status: 204 }
      : {
          status: 200,
          body: path.endsWith('cancel') ? { said: 'interrupted' } : { job: 'b', command: 'torchdist rerun a' }
        };
  expect(await api.cancel('a/..', true)).toBe('interrupted');
  expect(await api.rerun('a')).toBe('b');
  expect(await api.command('a')).toBe('torchdist rerun a');
  await api.delete('a');
  expect(serving.asked).toEqual([
    'POST /user/ann/torchdist/api/jobs/a%2F../cancel',
    'POST /user/ann/torchdist/api/jobs/a/rerun',
    'GET /user/ann/torchdist/api/jobs/a',
    'DELETE /user/ann/torchdist/api/jobs/a'
  ]);
  expect(serving.bodies[0]).toBe('{"kill":true}');
});

test('a refusal is a sentence', async () => {
  serving.answer = () => ({ status: 409, body: { message: 'it runs', hint: 'cancel it first' } });
  await expect(api.delete('a')).rejects.toThrow('it runs; cancel it first');
});

test('a server without the extension says what to do', async () => {
  serving.answer = () => ({ status: 404 });
  await expect(api.list()).rejects.toThrow(/install it where JupyterLab runs/);
});

test.each([
  [404, true],
  [403, true],
  [429, false],
  [503, false]
])('%i: final %s', (status, final) => expect(new ServerError(status, '').final).toBe(final));

test('addresses', () => {
  const saved: string[] = [];
  const click = vi.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(function (this: HTMLAnchorElement) {
    saved.push(this.href, this.download);
  });
  downloadLog({ ...serving.settings, appendToken: false }, 'a', '3.out');
  click.mockRestore();
  expect(saved).toEqual([`${serving.settings.baseUrl}torchdist/api/jobs/a/files/3.out`, 'a-3.out.txt']);
  const { settings } = serving;
  expect(socketAddress({ ...settings, appendToken: false }, 'x')).toBe(`${settings.wsUrl}x`);
});

test.each([
  ['/home/ann', '/home/ann/work/a.ipynb', ['work/a.ipynb']],
  ['/home/ann/', '/home/bob/a.ipynb', []],
  ['~/work', '/home/ann/work/x/a.ipynb', ['x/a.ipynb', 'ann/work/x/a.ipynb']],
  ['~', '/home/ann/a.ipynb', ['a.ipynb', 'ann/a.ipynb']],
  ['/home/ann', 'x/a.ipynb', ['x/a.ipynb']]
])('root %s, notebook %s', (root, notebook, paths) => expect(pathsBelowRoot(notebook, root)).toEqual(paths));
