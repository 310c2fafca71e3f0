import { beforeEach, describe, expect, it } from 'vitest';
import { lines, lossName, RanksTab, rowsOf, straggler } from '../src/view/ranks';
import type { Gauges, RankState } from '../src/protocol';
import { aPage, aRank, anError, aState, find, hello, NOW, PLAN, played, status } from './played';

const page = aPage();
let opened: number[];

beforeEach(() => void (opened = []));

async function tab(ranks: RankState[], steps: (number | null)[] = []): Promise<void> {
  const known = Object.fromEntries(
    steps.map((step, rank) => [String(rank), { step, last: { lr: 1, loss: rank / 8 } }])
  );
  const words = status({ ranks: known, curves: { version: 1, names: ['lr', 'loss'], note: '' } });
  const { session } = await played(page.signal, hello(aState(ranks)), words);
  new RanksTab(page.root, session, page.signal, rank => opened.push(rank)).show();
}

const cells = (row: Element) => [...row.children].map(cell => cell.textContent);
const rows = () => [...page.root.querySelectorAll('tbody tr')];

describe('the grid', () => {
  it('has a line for each rank with what is known of it', async () => {
    await tab([aRank(0), aRank(1, { state: 'killed', why: 'was killed (SIGKILL)', ended: 1_767_225_610 })], [10, 11]);
    expect(cells(rows()[0]!).slice(0, 7)).toEqual(['rank 0', 'running', 'box', '100', 'GPU-a', '10', '0']);
    expect(cells(rows()[1]!)).toEqual([
      'rank 1',
      'was killed (SIGKILL)',
      'box',
      '101',
      'GPU-b',
      '11',
      '0.125',
      '10.0 s',
      '',
      '',
      '',
      ''
    ]);
    expect(page.root.querySelectorAll('tbody .td-state svg')).toHaveLength(2);
    expect(find(page.root, 'thead', 'loss')).toBeTruthy();
  });

  it('says of a rank that waits in what and for whom', async () => {
    const waiting = { operation: 'barrier', group: 'gloo:0', number: 3, since: 1, size: 0, members: [0, 1] };
    await tab([aRank(0, { waiting }), aRank(1, { entered: { 'gloo:0': 2 }, counted: 2 }), aRank(2)]);
    expect(cells(rows()[0]!)[1]).toBe('waiting in barrier #3 for rank 1');
    expect(rows()[0]!.querySelector('.td-state')!.getAttribute('data-state')).toBe('waiting');
    expect(cells(rows()[1]!)[1]).toBe('running');
  });

  it('keeps a message as text', async () => {
    await tab([aRank(0, { state: 'failed', error: anError({ message: '<script>x</script>' }) })]);
    expect(page.root.querySelector('script')).toBeNull();
    expect(cells(rows()[0]!)[1]).toBe('failed: ValueError: <script>x</script>');
  });

  it('opens the log of the rank that is clicked', async () => {
    await tab([aRank(0), aRank(1)]);
    find(page.root, 'tbody button', 'rank 1').click();
    expect(opened).toEqual([1]);
  });

  it('sorts by a column, and back', async () => {
    await tab([aRank(0), aRank(1), aRank(2)], [5, 3, 4]);
    const sorter = find(page.root, '.td-sort', 'Step');
    sorter.click();
    expect(rows().map(row => cells(row)[0])).toEqual(['rank 1', 'rank 2', 'rank 0']);
    expect(sorter.closest('th')!.getAttribute('aria-sort')).toBe('ascending');
    sorter.click();
    expect(rows().map(row => cells(row)[0])).toEqual(['rank 0', 'rank 2', 'rank 1']);
  });

  it('marks the straggler', async () => {
    await tab([aRank(0), aRank(1)], [100, 50]);
    expect(find(page.root, '.td-behind', 'behind').closest('tr')!.textContent).toContain('rank 1');
  });

  it('folds equal states above 64 ranks, and opens them', async () => {
    await tab(
      Array.from({ length: 100 }, (_, rank) => aRank(rank, rank === 7 ? { state: 'failed', error: anError() } : {}))
    );
    expect(rows().map(row => cells(row)[0])).toEqual(['rank 7', '▸ 99 ranks']);
    find(page.root, '.td-group button').click();
    expect(rows()).toHaveLength(101);
    expect(find(page.root, '.td-group button').getAttribute('aria-expanded')).toBe('true');
    find(page.root, '.td-group button').click();
    expect(rows()).toHaveLength(2);
  });

  it('says that there are none', async () => {
    await tab([]);
    expect(page.root.textContent).toContain('No rank has started yet.');
  });
});

describe('what ranks take', () => {
  const GB = 1e9;
  const gauges = (more: Partial<Gauges> = {}): Gauges => ({
    cpu: 97,
    memory: 1.25 * GB,
    memory_peak: 2.5 * GB,
    gpu: null,
    gpu_memory: null,
    gpu_memory_peak: null,
    gpu_total: null,
    gpu_shared: false,
    gpu_clock: null,
    gpu_temperature: null,
    looks: null,
    waits: null,
    loads: null,
    network: null,
    gpu_slowed: '',
    gpu_errors: null,
    gpu_xid: null,
    nvlink_received: null,
    nvlink_sent: null,
    nvlink_errors: null,
    place: '',
    ...more
  });

  async function take(ranks: RankState[], told: Record<string, Gauges>, state = {}, plan = {}): Promise<void> {
    const first = hello(aState(ranks, state), { plan: { ...PLAN, ...plan } });
    const { session } = await played(page.signal, first, status({ gauges: told }));
    new RanksTab(page.root, session, page.signal, () => {}).show();
  }

  const shown = () => [...page.root.querySelectorAll('thead th')].filter(cell => !cell.hasAttribute('hidden')).length;
  const last = (row: Element) => cells(row).slice(8);
  const onCpus = { nodes: [{ ...PLAN.nodes[0]!, gpus: [] }] };

  it('stands beside each rank, and is empty where nobody looked', async () => {
    await take([aRank(0), aRank(1)], { '0': gauges() }, {}, onCpus);
    expect(last(rows()[0]!)).toEqual(['97 %', '1.25 GB', '', '']);
    expect(last(rows()[1]!)).toEqual(['', '', '', '']);
    expect(shown()).toBe(10);
    expect([...rows()[0]!.children].filter(cell => !cell.hasAttribute('hidden'))).toHaveLength(10);
    expect(find(page.root, '.td-sort', 'Memory').title).toContain('children');
  });

  it('has the GPU where there is one, and says whose memory it is', async () => {
    const own = gauges({ gpu: 88, gpu_memory: 12 * GB, gpu_memory_peak: 14 * GB, gpu_total: 80 * GB });
    await take([aRank(0), aRank(1)], { '0': own, '1': { ...own, gpu: null, gpu_memory: 5e8, gpu_shared: true } });
    expect(shown()).toBe(12);
    expect(last(rows()[0]!)).toEqual(['97 %', '1.25 GB', '88 %', '12 of 80 GB']);
    expect(last(rows()[1]!)).toEqual(['97 %', '1.25 GB', '', '500 MB of 80 GB']);
    expect(rows()[0]!.lastElementChild!.hasAttribute('title')).toBe(false);
    expect(rows()[1]!.lastElementChild!.getAttribute('title')).toContain('all processes');
  });

  it('names a GPU by what tells it apart, and in full when asked', async () => {
    const uuid = 'GPU-2c9f0a3e-11b2-4f6e-9d1e-0123456789ab';
    await take([aRank(0)], {}, {}, { nodes: [{ ...PLAN.nodes[0]!, gpus: [uuid] }] });
    expect(cells(rows()[0]!)[4]).toBe('GPU-2c9f0a3e');
    expect(rows()[0]!.children[4]!.getAttribute('title')).toBe(uuid);
  });

  it('is the most that was seen once a rank or its job has ended', async () => {
    const own = gauges({ gpu: 88, gpu_memory: 12 * GB, gpu_memory_peak: 14 * GB, gpu_total: 80 * GB });
    await take([aRank(0, { state: 'done', ended: NOW + 9 }), aRank(1)], { '0': own, '1': own });
    expect(last(rows()[0]!)).toEqual(['', 'peak 2.5 GB', '', 'peak 14 of 80 GB']);
    expect(last(rows()[1]!)[1]).toBe('1.25 GB');
    page.root.replaceChildren();
    await take([aRank(0)], { '0': own }, { state: 'lost', ended: NOW + 9 });
    expect(last(rows()[0]!)).toEqual(['', 'peak 2.5 GB', '', 'peak 14 of 80 GB']);
  });

  it('sorts as numbers, unknown ones last', async () => {
    const told = { '0': gauges({ memory: 9e8 }), '1': gauges({ memory: 2 * GB }), '2': gauges({ memory: 1.5 * GB }) };
    await take([aRank(0), aRank(1), aRank(2), aRank(3)], told);
    const sorter = find(page.root, '.td-sort', 'Memory');
    sorter.click();
    sorter.click();
    expect(rows().map(row => cells(row)[0])).toEqual(['rank 1', 'rank 2', 'rank 0', 'rank 3']);
  });
});

describe('what is told of ranks', () => {
  it('a straggler is alone behind the others by a margin', () => {
    expect(
      straggler([
        [0, 100],
        [1, 98]
      ])
    ).toBeNull();
    expect(
      straggler([
        [0, 100],
        [1, 90],
        [2, 90]
      ])
    ).toBeNull();
    expect(
      straggler([
        [0, 100],
        [1, 90],
        [2, null]
      ])
    ).toBe(1);
    expect(
      straggler([
        [0, 3],
        [1, 1]
      ])
    ).toBeNull();
    expect(straggler([[0, null]])).toBeNull();
  });

  it('the value is the loss, where there is one', () => {
    expect(lossName(['lr', 'train/Loss', 'x'])).toBe('train/Loss');
    expect(lossName(['lr'])).toBe('lr');
    expect(lossName([])).toBe('');
  });

  it('many failures fold too', () => {
    const ranks = Array.from({ length: 200 }, (_, rank) => aRank(rank, { state: 'killed' }));
    const state = aState(ranks);
    const shown = lines(rowsOf({ state, status: null, hello: null, clockSkew: 0 }, ''));
    expect(shown.length).toBeLessThan(70);
  });
});
