import { beforeEach, describe, expect, it, vi } from 'vitest';
import { LoadHistory } from '../src/loadhistory';
import type { Status } from '../src/source';
import { CommunicationTab } from '../src/view/communication';
import { drawing } from '../src/view/loadcharts';
import { lanes, path, short, summary, under, WIDTH } from '../src/view/lanes';
import { clock } from '../src/view/format';
import type { Communication, Entered, Plan, RankState } from '../src/protocol';
import { aPage, aRank, aState, find, frames, hello, NOW, PLAN, played, status, type PlayedFeed } from './played';

const page = aPage();
let opened: number[];
let feed: PlayedFeed;

beforeEach(() => void (opened = []));

const NOTHING: Communication = { transports: [], calls: [], time: null, silent: [0, 1] };

function call(number: number, at: number[], more: Partial<Entered> = {}): Entered {
  const name = `all_reduce #${number} of 4 float32`;
  return { name, group: '', ranks: at.map((_, rank) => rank), at, missing: [], ended: true, ...more };
}

const late = Array.from({ length: 12 }, (_, step) => call(step + 1, [NOW + step, NOW + step + 0.25]));

interface Told {
  ranks?: RankState[];
  plan?: Partial<Plan>;
  answers?: (Partial<Communication> | { error: string })[];
  state?: string;
}

async function tab({ ranks = [aRank(0), aRank(1)], plan = {}, answers = [{}], state = 'running' }: Told = {}) {
  const said = hello(aState(ranks, { state }));
  const found = await played(page.signal, { ...said, plan: { ...PLAN, ...plan } }, status());
  feed = found.feed;
  let count = 0;
  feed.answer = () => ({ ...NOTHING, ...answers[Math.min(count++, answers.length - 1)] });
  const shown = new CommunicationTab(page.root, found.session, page.signal, rank => opened.push(rank));
  shown.show();
  await frames();
  return shown;
}

const texts = (selector: string) => [...page.root.querySelectorAll(selector)].map(each => each.textContent);

const two = PLAN.nodes.concat({ ...PLAN.nodes[0]!, name: 'other', ranks: [2, 3], gpus: [], interface: 'eth0' });

describe('the picture', () => {
  it('groups ranks by their host, each with its device and how it stands', async () => {
    await tab({ ranks: [aRank(0), aRank(1, { state: 'killed', why: 'was killed (SIGKILL)' })] });
    expect(texts('.td-host-name')).toEqual(['box127.0.0.1, lo']);
    expect(texts('.td-chip')).toEqual(['rank0GPU 4running, its log', 'rank1GPU 5was killed (SIGKILL), its log']);
    expect(find(page.root, '.td-chip', 'rank1').title).toBe('rank 1: was killed (SIGKILL)');
    expect(page.root.querySelectorAll('.td-chip svg')).toHaveLength(2);
    find(page.root, '.td-chip', 'GPU 5').click();
    expect(opened).toEqual([1]);
  });

  it('says over which interface Gloo goes', async () => {
    await tab({ plan: { nodes: two, world_size: 4 } });
    expect(texts('.td-link-words')).toEqual(['⇄ Gloo, TCP on lo', '⇄ Gloo, TCP on eth0']);
    expect(texts('.td-wire')).toEqual(['between hosts: Gloo, TCP on lo, eth0']);
  });

  it('leaves the interface to the variable that the user has set', async () => {
    await tab({ plan: { env_names: ['GLOO_SOCKET_IFNAME'] } });
    expect(texts('.td-link-words')).toEqual(['⇄ Gloo, TCP on the interface that GLOO_SOCKET_IFNAME names']);
  });

  it('says what NCCL told, and what that is', async () => {
    const transports = [
      { node: 'box', inside: ['P2P/CUMEM', 'SHM'], outside: ['NET/IB/0/GDRDMA'] },
      { node: 'other', inside: [], outside: ['NET/Socket/0'] }
    ];
    await tab({ plan: { nodes: two, world_size: 4, backend: 'nccl' }, answers: [{ transports }] });
    expect(texts('.td-link-words')).toEqual([
      '⇄ P2P/CUMEM (from GPU to GPU), SHM (through the memory of the host)',
      '⇄ not known'
    ]);
    expect(find(page.root, '.td-wire').textContent).toBe(
      'between hosts: NET/IB/0/GDRDMA (InfiniBand or RoCE, straight from the memory of the GPU), NET/Socket/0 (TCP)'
    );
    expect(page.root.querySelector('.td-command')).toBeNull();
  });

  it('has the command that makes NCCL tell', async () => {
    await tab({ plan: { backend: 'nccl' }, answers: [{ transports: [{ node: 'box', inside: [], outside: [] }] }] });
    expect(texts('.td-link-words')).toEqual(['⇄ not known']);
    expect(texts('.td-command code')).toEqual(['%dist rerun 20260101-000000-0a1b2c --env NCCL_DEBUG=INFO']);
  });

  it('counts the hosts and ranks that it does not draw', async () => {
    const node = { ...PLAN.nodes[0]!, gpus: [], ranks: Array.from({ length: 100 }, (_, rank) => rank) };
    const nodes = Array.from({ length: 60 }, (_, place) => ({ ...node, name: `host${place}` }));
    await tab({ plan: { nodes } });
    expect(page.root.querySelectorAll('.td-host')).toHaveLength(48);
    expect(page.root.querySelectorAll('.td-host')[0]!.textContent).toContain('and 36 more ranks');
    expect(page.root.querySelectorAll('.td-table tbody tr')).toHaveLength(12);
  });
});

describe('the time line', () => {
  it('has a lane for each rank, and says who comes last', async () => {
    await tab({ answers: [{ calls: late, time: NOW + 20, silent: [] }], state: 'succeeded' });
    expect(texts('.td-lane[data-rank] > span')).toEqual(['rank 0', 'rank 1']);
    expect(find(page.root, '[aria-label="Collectives by rank"] [role=status]').textContent).toBe(
      `Rank 1 entered last in 12 of 12 collectives, most often 250 ms after the first rank. Recorded at ${clock(NOW + 20)}.`
    );
    const [waits, , last] = page.root.querySelectorAll('.td-lane[data-rank="0"] path');
    expect(waits!.getAttribute('d')!.startsWith('M0 5H')).toBe(true);
    expect(last!.getAttribute('d')).toBe('');
    expect(page.root.querySelectorAll('tbody tr')).toHaveLength(12);
    expect(find(page.root, 'button', 'Record now').hidden).toBe(true);
  });

  it('shows fewer where that is chosen', async () => {
    const calls = Array.from({ length: 60 }, (_, step) => call(step + 1, [NOW + step, NOW + step + 0.25]));
    await tab({ answers: [{ calls, time: NOW + 90, silent: [] }] });
    const choice = page.root.querySelector('select')!;
    expect(page.root.querySelectorAll('tbody tr')).toHaveLength(20);
    choice.value = '0';
    choice.dispatchEvent(new Event('change'));
    expect(page.root.querySelectorAll('tbody tr')).toHaveLength(60);
  });

  it('reads out what is under the pointer', async () => {
    await tab({ answers: [{ calls: late, time: NOW + 20, silent: [] }] });
    const svg = page.root.querySelector('.td-lane[data-rank="1"] svg')!;
    svg.dispatchEvent(new MouseEvent('pointermove', { bubbles: true, clientX: 0 }));
    expect(find(page.root, '.td-reading').textContent).toBe(
      'all_reduce #1 of 4 float32: rank 1 entered 250 ms after the first; the last was rank 1, after 250 ms'
    );
  });

  it('asks the ranks when the button is pressed, and shows what they wrote', async () => {
    const stuck = call(7, [NOW + 3], { missing: [1], ended: false });
    await tab({ answers: [{}, {}, {}, { calls: [stuck], time: NOW + 5, silent: [] }] });
    expect(page.root.textContent).toContain('Nothing is recorded yet.');
    find(page.root, 'button', 'Record now').click();
    await expect.poll(() => page.root.textContent, { timeout: 5000 }).toContain('waits for rank 1');
    expect(feed.asked('communication').map(asked => 'fresh' in asked && asked.fresh)).toEqual([
      false,
      true,
      false,
      false
    ]);
    expect(page.root.querySelector('.td-lane[data-rank="0"] path.td-lane-open')!.getAttribute('d')).not.toBe('');
  });

  it('says why a question has no answer, and can be asked again', async () => {
    await tab({ answers: [{}, { error: 'this job is not yours to ask its ranks; ask its owner' }] });
    const record = find(page.root, 'button', 'Record now') as HTMLButtonElement;
    record.click();
    await frames();
    expect(page.root.textContent).toContain('not yours to ask its ranks');
    expect(record.disabled).toBe(false);
  });

  it('keeps a name as text', async () => {
    await tab({
      answers: [{ calls: [call(1, [NOW, NOW + 1], { name: '<script>x</script>' })], time: NOW, silent: [] }]
    });
    expect(page.root.querySelector('script')).toBeNull();
  });
});

describe('what the lanes say', () => {
  it('lasts until the last rank, and where it has not ended until the recording', () => {
    const calls = [call(1, [0, 4]), call(2, [5], { missing: [1], ended: false })];
    const { from, to, bars } = lanes(calls, 10);
    expect([from, to]).toEqual([0, 10]);
    expect(bars.get(0)).toEqual([
      { call: 0, from: 0, to: 4000, kind: 'waits' },
      { call: 1, from: 5000, to: WIDTH, kind: 'open' }
    ]);
    expect(bars.get(1)).toEqual([{ call: 0, from: 4000, to: 4025, kind: 'last' }]);
    expect(path(bars.get(0)!, 'waits')).toBe('M0 5H4000');
    expect(under(bars.get(0)!, 6000)!.call).toBe(1);
    expect(under([], 1)).toBeNull();
  });

  it('ends with the last rank where the end was not recorded yet', () => {
    const { to, bars } = lanes([call(1, [0, 4], { ended: false })], 4.5);
    expect([to, bars.get(0)!.at(-1)!.kind, bars.get(1)!.at(-1)!.kind]).toEqual([4, 'waits', 'last']);
    expect(
      lanes([call(1, [0, 4], { ended: false })], 9)
        .bars.get(1)!
        .at(-1)!.kind
    ).toBe('open');
  });

  it('calls nothing a wait that other recorders, read a moment later, would show to go on', () => {
    const calls = [
      ...late,
      call(13, [NOW + 20], { missing: [1], ended: false }),
      call(14, [NOW, NOW], { ended: false })
    ];
    expect(summary(calls, NOW + 20.1)).toContain('Rank 1 entered last in 12 of 12');
    expect(
      lanes(calls, NOW + 20.1)
        .bars.get(0)!
        .at(-1)!.kind
    ).toBe('open');
    expect(
      lanes(calls, NOW + 20.1)
        .bars.get(0)!
        .at(-2)!.kind
    ).toBe('waits');
    expect(summary(calls, NOW + 22)).toBe('all_reduce #13 of 4 float32 waits for rank 1.');
  });

  it('blames nobody where there are few collectives, or others are last as often', () => {
    expect(summary(late.slice(0, 9), NOW + 20)).toBe('');
    const turns = late.map((one, step) => (step % 2 ? one : { ...one, at: [...one.at].reverse() }));
    expect(summary(turns, NOW + 20)).toBe('');
    const often = late.map((one, step) => (step % 3 ? one : { ...one, at: [...one.at].reverse() }));
    expect(summary(often, NOW + 20), '8 of 12 of two ranks').toBe('');
    expect(
      summary(
        often.map(one => ({ ...one, ranks: [0, 1, 2, 3], at: [NOW, ...one.at, NOW] })),
        NOW + 20
      )
    ).toContain('Rank 2 entered last in 8 of 12 collectives');
    expect(summary([], 0)).toBe('');
  });

  it.each([
    [0, '0 µs'],
    [42e-6, '42 µs'],
    [0.0123, '12.3 ms'],
    [61.5, '61.5 s']
  ])('%s s is %s', (seconds, words) => expect(short(seconds)).toBe(words));
});

describe('the tab', () => {
  it('shows the plan and says what is missing and what to do', async () => {
    const { session } = await played(page.signal, hello(aState([aRank(0)]), { plan: { ...PLAN, backend: 'nccl' } }));
    new CommunicationTab(page.root, session, page.signal, () => undefined).show();
    expect(page.root.textContent).toContain('nccl');
    expect(page.root.textContent).toContain('127.0.0.1');
    expect(find(page.root, '.td-empty').textContent).toContain('%dist doctor');
  });

  it('says first for which ranks the others wait, and no more once they do not', async () => {
    const late = {
      code: 'late-by-input',
      severity: 'warning',
      rank: 1,
      node: 'box',
      sentence: 'rank 1 holds up the others for 45 % of the time: it waits for data at Cell In[1], line 3',
      cause: 'Its DataLoader is slow.',
      remedy: 'More num_workers. NCCL_P2P_DISABLE=1, then NCCL_IB_HCA=^mlx5_3; tell.',
      evidence: []
    };
    const { session, feed } = await played(page.signal, hello(aState([aRank(0), aRank(1)])), status());
    new CommunicationTab(page.root, session, page.signal, () => undefined).show();
    feed.say(status({ findings: [late] }));
    await frames();
    const [first] = page.root.querySelectorAll('.td-page > *');
    expect(first?.textContent).toContain('rank 1 holds up the others for 45 %');
    expect(first?.textContent).toContain('What to do: More num_workers.');
    expect([...(first?.querySelectorAll('code') ?? [])].map(code => code.textContent)).toEqual([
      '%dist rerun 20260101-000000-0a1b2c --env NCCL_P2P_DISABLE=1',
      '%dist rerun 20260101-000000-0a1b2c --env NCCL_IB_HCA=^mlx5_3'
    ]);
    expect(first?.querySelector('details')).toBeNull();
    feed.say(status({ findings: [] }));
    await frames();
    expect(page.root.textContent).not.toContain('holds up');
  });
});

describe('the charts', () => {
  const network = (received: number) => ({ network: { box: { eth0: { received, sent: 2_000_000 } } } });

  /** What the page saw, two seconds apart. */
  async function seen(...statuses: Partial<Status>[]): Promise<void> {
    vi.useFakeTimers({ toFake: ['Date'] });
    const { session, feed } = await played(page.signal, hello(aState([aRank(0), aRank(1)])));
    new CommunicationTab(page.root, session, page.signal, () => undefined).show();
    for (const one of statuses) {
      feed.say(status(one));
      vi.setSystemTime(Date.now() + 2500);
    }
    await frames();
    vi.useRealTimers();
  }

  it('draws what went over the network, and what GPUs did', async () => {
    const gpu = {
      gauges: { '0': { gpu: 40 }, '1': { gpu: 90, nvlink_received: 1e9, nvlink_sent: 2e9 } }
    } as unknown as Partial<Status>;
    await seen(network(1_000_000), { ...network(4_000_000), ...gpu });
    expect(texts('.td-load figcaption')).toEqual([
      'network, boxup to 4 MB/s',
      'GPU use, boxup to 100 %',
      'NVLink, boxup to 2 GB/s'
    ]);
    expect(texts('.td-load .td-legend-item')).toEqual([
      'eth0 received 4 MB/s',
      'eth0 sent 2 MB/s',
      'rank 0 40 %',
      'rank 1 90 %',
      'rank 1 received 1 GB/s',
      'rank 1 sent 2 GB/s'
    ]);
    expect(page.root.querySelector('.td-load path')!.getAttribute('d')).toBe('M0 75L1000 0');
  });

  it('has none where the network is idle and there is no GPU', async () => {
    await seen({}, {}, { network: {} });
    expect(page.root.querySelector('.td-load')).toBeNull();
    expect(page.root.textContent).not.toContain('Network and GPUs');
  });

  it('has a gap where an interface was not told, and keeps five minutes', () => {
    const history = new LoadHistory();
    const say = (more: Partial<Status>, t: number) => history.take(status(more) as unknown as Status, PLAN, t);
    say(network(10), 0);
    say(network(20), 1);
    say({}, 2);
    say(network(30), 4);
    expect(history.times).toEqual([0, 2, 4]);
    expect(history.lines[0]!.values).toEqual([20, NaN, 30]);
    expect(drawing(history.lines[0]!.values, 40)).toBe('M0 50M1000 25');
    for (let t = 6; t < 1000; t += 2) {
      say(network(30), t);
    }
    expect(history.times).toHaveLength(150);
    expect(history.lines[1]!.values).toHaveLength(150);
  });
});
