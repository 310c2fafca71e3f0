import { afterEach, describe, expect, it, vi } from 'vitest';
import { Header, progressText } from '../src/view/header';
import type { Progress } from '../src/protocol';
import { aPage, PLAN, aRank, aState, event, find, frames, hello, played, type PlayedFeed, status } from './played';

const page = aPage();

afterEach(() => void vi.restoreAllMocks());

async function header(...messages: Record<string, unknown>[]): Promise<PlayedFeed> {
  const { feed, session } = await played(page.signal, ...messages);
  const shown = new Header(page.root, session, { heading: true }, page.signal);
  session.onChange(() => shown.update(), page.signal);
  return feed;
}

const running = aState([aRank(0), aRank(1)]);

describe('what it says', () => {
  it('names state, place and strategy, the state with a shape', async () => {
    await header(hello(running));
    expect(find(page.root, '.td-state').textContent).toBe('running');
    expect(page.root.querySelector('.td-state svg')).not.toBeNull();
    expect(find(page.root, '.td-facts').textContent).toContain('2 ranks on box');
    expect(find(page.root, '.td-where').title).toBe('box\nbackend: gloo');
    expect(find(page.root, '.td-how').textContent).toBe('');
    expect(find(page.root, '[role=heading]').textContent).toBe('night run');
  });

  it('says while the first steps are proved', async () => {
    const feed = await header(hello(running));
    feed.say(event(1, 'rank.proving', { rank: 0, seconds: 0 }));
    await frames();
    expect(find(page.root, '.td-state').textContent).toBe('proving the first steps');
    feed.say(event(2, 'rank.proving', { rank: 0, seconds: 0.5 }));
    await frames();
    expect(find(page.root, '.td-state').textContent).toBe('running');
  });

  it('shows where the job is recorded, and makes nothing but a page a link', async () => {
    const feed = await header(hello(running), status());
    const shown = find(page.root, '.td-tracked');
    expect(shown.hidden).toBe(true);
    const link = 'http://mlflow:5000/#/experiments/0/runs/1';
    feed.say(
      status({
        tracked: [
          { tracker: 'mlflow', link, said: '' },
          { tracker: 'tensorboard', link: 'javascript:alert(1)', said: 'its disk is full' }
        ]
      })
    );
    await frames();
    expect([...shown.children].map(row => row.textContent)).toEqual([
      `mlflow: ${link}`,
      'tensorboard: javascript:alert(1) · its disk is full'
    ]);
    expect([...shown.querySelectorAll('a')].map(one => one.href)).toEqual([link]);
    feed.say(status());
    await frames();
    expect(shown.hidden).toBe(true);
  });

  it('says how the results come that no cell waits for, while the job runs and after it', async () => {
    const { feed, session } = await played(page.signal, hello(running));
    let unawaited = false;
    const shown = new Header(page.root, session, { heading: true, unawaited: () => unawaited }, page.signal);
    session.onChange(() => shown.update(), page.signal);
    const left = find(page.root, '.td-left');
    expect(left.hidden).toBe(true);
    unawaited = true;
    feed.say(event(1, 'rank.result', { rank: 0, names: ['model'] }));
    await frames();
    expect(left.textContent).toContain('When the job has ended');
    expect(find(left, 'code').textContent).toBe(`import jupyter_torchdist as td; td.attach('${session.job}').bring()`);
    feed.say(event(2, 'job.ended', { state: 'succeeded' }));
    await frames();
    expect(left.textContent).toMatch(/^No cell waited/);
    expect(left.hidden).toBe(false);
  });

  it('says nothing of results that a cell waited for, or that there are not', async () => {
    const { feed, session } = await played(page.signal, hello(running));
    let unawaited = false;
    const shown = new Header(page.root, session, { heading: true, unawaited: () => unawaited }, page.signal);
    session.onChange(() => shown.update(), page.signal);
    feed.say(event(1, 'job.ended', { state: 'succeeded' }));
    await frames();
    unawaited = true;
    shown.update();
    expect(find(page.root, '.td-left').hidden).toBe(true);
  });

  it('names the strategy, and no backend beside it', async () => {
    await header(hello(running, { plan: { ...PLAN, strategy: { ...PLAN.strategy, name: 'fsdp' } } }));
    expect(find(page.root, '.td-facts').textContent).toMatch(/^2 ranks on boxfsdp/);
  });

  it('says who waits in a collective and for whom, until it goes on', async () => {
    vi.spyOn(Date, 'now').mockReturnValue(Date.now()); // on a busy machine a second passes between two lines
    const since = Date.now() / 1000 - 12.5;
    const waiting = { operation: 'all_reduce', group: 'gloo:0', number: 17, since, size: 4, members: null };
    const [waits, behind] = [
      { waiting, entered: { 'gloo:0': 17 } },
      { entered: { 'gloo:0': 16 }, counted: since + 2 }
    ];
    const feed = await header(hello(aState([aRank(0, waits), aRank(1, waits), aRank(2, behind)])));
    expect(find(page.root, '.td-waits').textContent).toBe('ranks 0, 1 wait in all_reduce #17 for rank 2, for 12 s');
    feed.say(event(101, 'rank.resumed', { rank: 0 }));
    await frames();
    expect(find(page.root, '.td-waits').textContent).toBe('rank 1 waits in all_reduce #17 for rank 2, for 12 s');
    feed.say(event(102, 'rank.done', { rank: 1 }));
    await frames();
    expect(find(page.root, '.td-waits').textContent).toBe('');
    expect(find(page.root, '.td-waits').hidden).toBe(false); // its place is kept: nothing jumps when it comes again
    feed.say(event(103, 'job.ended', { state: 'succeeded', reason: '' }));
    await frames();
    expect(find(page.root, '.td-waits').hidden).toBe(true);
  });

  it('says who holds up the others, while no rank makes progress', async () => {
    vi.spyOn(Date, 'now').mockReturnValue(Date.now()); // on a busy machine a second passes between two lines
    const since = Date.now() / 1000 - 34.5;
    const sentence = 'rank 1 has not entered all_reduce #17; it is at Cell In[2], line 3; rank 0 waits for it';
    const finding = {
      code: 'rank-stuck',
      severity: 'warning',
      rank: 1,
      node: null,
      sentence,
      cause: '',
      remedy: '',
      evidence: []
    };
    const waiting = { operation: 'all_reduce', group: 'gloo:0', number: 17, since, size: 4, members: null };
    const feed = await header(hello(aState([aRank(0, { waiting }), aRank(1)])));
    feed.say(event(101, 'job.stalled', { since, finding, ends: false }));
    await frames();
    expect(find(page.root, '.td-waits').textContent).toBe(`stalled 34 s: ${sentence}`);
    expect(find(page.root, '.td-state').textContent).toBe('stalled');
    feed.say(event(102, 'job.resumed'));
    await frames();
    expect(find(page.root, '.td-waits').textContent).toBe('rank 0 waits in all_reduce #17, for 34 s');
    expect(find(page.root, '.td-state').textContent).toBe('running');
  });

  it('says which curves are not numbers any more, even of a job that succeeded', async () => {
    const last = (loss: number) => ({ step: 3, last: { loss, lr: 0.1 } });
    const feed = await header(hello({ ...running, state: 'succeeded' }), status({ ranks: { 0: last(1), 1: last(1) } }));
    expect(find(page.root, '.td-broken').hidden).toBe(true);
    feed.say(status({ ranks: { 0: last(1), 1: last(NaN) } }));
    await frames();
    expect(find(page.root, '.td-broken').textContent).toBe('The last value is not a number: loss on rank 1');
    feed.say(status({ ranks: { 0: last(Infinity), 1: last(NaN) } }));
    await frames();
    expect(find(page.root, '.td-broken').textContent).toBe('The last value is not a number: loss on ranks 0, 1');
  });

  it('tells no state before the feed has', async () => {
    await header();
    expect(find(page.root, '.td-state').textContent).toBe('');
  });

  it.each(['succeeded', 'failed', 'cancelled', 'timed_out', 'lost'])(
    '%s: a final time, a shape, no cancel',
    async state => {
      await header(hello({ ...running, state, ended: running.submitted + 12.34, reason: 'because' }));
      expect(find(page.root, '.td-time').textContent).toBe('12.3 s');
      expect(page.root.querySelector('.td-state svg path')!.getAttribute('d')).not.toBe('');
      expect(page.root.querySelector('.td-cancel button')).toBeNull();
      expect(find(page.root, '.td-reason').hidden).toBe(state === 'succeeded');
    }
  );

  it('says one word for a job that is being cancelled', async () => {
    await header(hello({ ...running, state: 'stopping', reason: 'cancelled' }));
    expect(find(page.root, '.td-state').textContent).toBe('stopping');
    expect(find(page.root, '.td-reason').hidden).toBe(true);
  });

  it('keeps what is text as text', async () => {
    await header(hello({ ...running, name: '<script>x</script>', notes: ['<img src=x>'] }, { notes: ['<b>'] }));
    expect(page.root.querySelector('script, img, b')).toBeNull();
    expect(find(page.root, '.td-name').textContent).toBe('<script>x</script>');
    expect(find(page.root, '.td-notes').textContent).toBe('<b><img src=x>');
  });

  it('says what to do about an orphan', async () => {
    await header(hello(running), status({ effective: 'orphaned' }));
    expect(find(page.root, '.td-state').textContent).toBe('orphaned');
    expect(find(page.root, '.td-reason').textContent).toContain('%dist attach');
  });
});

describe('the clock', () => {
  it('runs by the clock of the feed, and stops at the end', async () => {
    const timers: (() => void)[] = [];
    const real = globalThis.setInterval;
    const keep = (act: () => void, wait?: number) => (wait === 1000 ? timers.push(act) : real(act, wait));
    vi.spyOn(globalThis, 'setInterval').mockImplementation(keep as typeof setInterval);
    const cleared = vi.spyOn(globalThis, 'clearInterval');
    const begun = { ...running, submitted: Date.now() / 1000 + 1000 - 30 };
    const feed = await header(hello(begun, { now: Date.now() / 1000 + 1000 }));
    expect(find(page.root, '.td-time').textContent).toBe('30 s');
    expect(timers).toHaveLength(1);
    const later = Date.now() + 10_000;
    vi.spyOn(Date, 'now').mockReturnValue(later);
    timers[0]!();
    expect(find(page.root, '.td-time').textContent).toBe('40 s');
    vi.mocked(Date.now).mockRestore();
    feed.say(event(2, 'job.ended', { state: 'succeeded', reason: '' }));
    await frames();
    expect(cleared).toHaveBeenCalledWith(1);
  });
});

describe('progress', () => {
  it('is a bar with its share, and words', async () => {
    await header(hello(running), status({ progress: { desc: 'epoch <b>1</b>', n: 320, total: 1000 } }));
    const bar = find(page.root, '[role=progressbar]');
    expect(bar.getAttribute('aria-valuenow')).toBe('32');
    expect(find(page.root, '.td-progress-text').textContent).toBe('epoch <b>1</b>: 320 of 1000 (32 %)');
  });

  it('says how fast it is, and how long it takes, until the end', async () => {
    const bar = (n: number) => status({ progress: { desc: '', n, total: 1000 }, ranks: { 0: { step: n, last: {} } } });
    const feed = await header(hello(running), bar(10));
    feed.say(bar(20));
    await frames();
    expect(find(page.root, '.td-progress-text').textContent).toMatch(/^20 of 1000 \(2 %\) · [\d.]+ it\/s · .* left$/);
    expect(find(page.root, '.td-pace').textContent).toBe('');
    feed.say(event(2, 'job.ended', { state: 'succeeded', reason: '' }));
    await frames();
    expect(find(page.root, '.td-progress-text').textContent).toMatch(/^20 of 1000 \(2 %\)$/);
  });

  it('says how many samples a second it trains with, beside the steps', async () => {
    const at = (step: number, samples: number | null, progress: Progress | null = null) =>
      status({ ranks: { 0: { step, last: {} } }, samples, progress });
    const feed = await header(hello(running), at(1, null));
    feed.say(at(2, null));
    await frames();
    expect(find(page.root, '.td-pace').textContent).toMatch(/^[\d.]+ it\/s$/);
    feed.say(at(3, 64));
    await frames();
    feed.say(at(4, 128));
    await frames();
    expect(find(page.root, '.td-pace').textContent).toMatch(/^[\d.]+ it\/s · [\d.\u202f]+ samples\/s$/);
    feed.say(at(5, 192, { desc: '', n: 2, total: null }));
    await frames();
    expect(find(page.root, '.td-progress-text').textContent).toMatch(/^2 · [\d.\u202f]+ samples\/s$/);
    feed.say(event(2, 'job.ended', { state: 'succeeded', reason: '' }));
    await frames();
    expect(find(page.root, '.td-progress-text').textContent).toBe('2');
  });

  it('is by the step of the slowest rank where the job has no bar', async () => {
    const at = (step: number) => status({ ranks: { 0: { step: 999, last: {} }, 1: { step, last: {} } } });
    const feed = await header(hello(running), at(1));
    expect(find(page.root, '.td-pace').textContent).toBe('');
    feed.say(at(2));
    await frames();
    expect(find(page.root, '.td-pace').textContent).toMatch(/^[\d.]+ it\/s$/);
  });

  it('counts where nobody knows how much there is', () => {
    expect(progressText({ desc: '', n: 7, total: null })).toBe('7');
    expect(progressText({ desc: '', n: 7, total: 0 })).toBe('7');
    expect(progressText({ desc: '', n: 12, total: 10 })).toBe('12 of 10 (100 %)');
  });
});

describe('cancel', () => {
  const press = (text: string) => find(page.root, '.td-cancel button', text).click();

  it('asks first, interrupts, then offers to kill', async () => {
    const feed = await header(hello(running));
    feed.answer = asked => ({ said: 'kill' in asked && asked.kill ? 'killed' : 'every rank was interrupted' });
    press('Cancel');
    expect(feed.asked('cancel')).toHaveLength(0);
    expect(find(page.root, '.td-ask').textContent).toBe('Cancel this job?');
    press('Cancel job');
    await frames();
    expect(feed.asked('cancel').map(asked => 'kill' in asked && asked.kill)).toEqual([false]);
    expect(find(page.root, '.td-said').textContent).toBe('every rank was interrupted');
    press('Kill now');
    await frames();
    expect(feed.asked('cancel').map(asked => 'kill' in asked && asked.kill)).toEqual([false, true]);
  });

  it('can be thought better of, by a button or Escape', async () => {
    const feed = await header(hello(running));
    press('Cancel');
    press('Keep running');
    press('Cancel');
    find(page.root, '.td-cancel button').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(find(page.root, '.td-cancel button').textContent).toBe('Cancel');
    expect(feed.asked('cancel')).toHaveLength(0);
  });

  it('keeps the keyboard where it was', async () => {
    await header(hello(running));
    find(page.root, '.td-cancel button').focus();
    press('Cancel');
    expect(document.activeElement?.textContent).toBe('Cancel job');
  });

  it('takes a double click for one', async () => {
    const feed = await header(hello(running));
    feed.answer = () => ({ said: 'interrupted' });
    press('Cancel');
    press('Cancel job');
    await frames();
    find(page.root, 'button', 'Kill now').dispatchEvent(new MouseEvent('click', { bubbles: true, detail: 2 }));
    expect(feed.asked('cancel')).toHaveLength(1);
  });

  it('says why it cannot', async () => {
    const feed = await header(hello(running));
    feed.handlers.lost('the server does not answer', false);
    await frames();
    const button = find(page.root, '.td-cancel button');
    expect(button.getAttribute('aria-disabled')).toBe('true');
    expect(button.title).toBe('the server does not answer');
    button.click();
    expect(find(page.root, '.td-said').textContent).toContain('the server does not answer');
    expect(feed.asked('cancel')).toHaveLength(0);
  });

  it('shows a refusal, and can be tried again', async () => {
    const feed = await header(hello(running));
    feed.answer = () => ({ error: 'this is <i>another</i> user’s job' });
    press('Cancel');
    press('Cancel job');
    await frames();
    expect(find(page.root, '.td-said').textContent).toContain('<i>another</i>');
    expect(find(page.root, '.td-cancel button').textContent).toBe('Cancel');
  });

  it('offers to kill what someone else has interrupted', async () => {
    await header(hello({ ...running, state: 'stopping' }));
    expect(find(page.root, '.td-cancel button').textContent).toBe('Kill now');
  });
});
