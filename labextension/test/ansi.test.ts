import { describe, expect, test } from 'vitest';
import { draw, runs, SHOWN_CHARACTERS, shownText, visible } from '../src/view/ansi';

function drawn(line: string, marks: [number, number][] = []): HTMLElement {
  const element = document.createElement('div');
  element.append(draw(line, marks).element);
  return element;
}

describe('colours', () => {
  test.each([
    ['\x1b[31mx', { ink: 1 }],
    ['\x1b[1;4;3;9mx', { bold: true, underline: true, italic: true, struck: true }],
    ['\x1b[97;104mx', { ink: 15, ground: 12 }],
    ['\x1b[38;5;9mx', { ink: 9 }],
    ['\x1b[38;5;196mx', { ink: 'rgb(255, 0, 0)' }],
    ['\x1b[48;5;232mx', { ground: 'rgb(8, 8, 8)' }],
    ['\x1b[38;2;1;2;3;1mx', { ink: 'rgb(1, 2, 3)', bold: true }],
    ['\x1b[38:2::1:2:3mx', { ink: 'rgb(1, 2, 3)' }],
    ['\x1b[38;2;999;0;0mx', { ink: null }],
    ['\x1b[31m\x1b[mx', { ink: null }],
    ['\x1b[31;7m\x1b[27;39mx', { ink: null, inverse: false }],
    ['\x1b[38mx', { ink: null }]
  ])('%j', (line, look) => {
    const last = runs(line).at(-1)!;
    expect(last.text).toBe('x');
    expect(last.look).toMatchObject(look);
  });

  test('are classes and values for the style sheet, never styles of the rank’s own', () => {
    const element = drawn('\x1b[31ma\x1b[0m\x1b[38;2;1;2;3;7mb\x1b[0mc');
    expect(element.innerHTML).toBe(
      '<span class="td-ink-theme" style="--td-ink-theme: var(--td-ansi-1);">a</span>' +
        '<span class="td-ink-ground td-ground-exact" style="--td-ground-exact: rgb(1, 2, 3);">b</span>c'
    );
  });
});

describe('ink and ground of the rank’s own', () => {
  test.each([
    ['\x1b[38;2;90;0;0;48;2;0;0;0mx', false],
    ['\x1b[38;5;16;48;5;16mx', false],
    ['\x1b[38;5;255;48;5;16mx', true]
  ])('%j keeps its ink where it can be read', (line, kept) => {
    const element = drawn(line).firstElementChild!;
    expect(element.classList.contains('td-ink-exact')).toBe(kept);
    expect(element.classList.contains('td-ground-exact')).toBe(true);
  });
});

describe('bad input', () => {
  test('markup is text', () => {
    const line = '<script>alert(1)</script><img src=x onerror=alert(1)>&amp;';
    const element = drawn(line);
    expect(element.children).toHaveLength(0);
    expect(element.textContent).toBe(line);
  });

  test.each([
    ['a cursor movement', 'a\x1b[2Jb\x1b[10;10Hc\x1b[1Ad'],
    ['a title', 'a\x1b]0;owned\x07bc\x1b]2;owned\x1b\\d'],
    ['a hyperlink', 'a\x1b]8;;javascript:alert(1)\x07bc\x1b]8;;\x07d'],
    ['a device string', 'a\x1bPq#0\x1b\\b\x1b_x\x1b\\c\x1b^y\x1b\\d'],
    ['short escapes', 'a\x1b7b\x1bcc\x1b(Bd'],
    ['private modes', 'a\x1b[?25lb\x1b[?1049hc\x1b[>0cd']
  ])('%s is taken out', (_, line) => {
    const element = drawn(line);
    expect(element.textContent).toBe('abcd');
    expect(element.querySelector('a')).toBeNull();
  });

  test('an escape without its end hides nothing', () => {
    expect(drawn('a\x1b]0;hidden and more').textContent).toBe('a\\x1b]0;hidden and more');
    expect(drawn('a\x1b[31').textContent).toBe('a\\x1b[31');
  });

  test('NUL and other control characters are visible', () => {
    expect(drawn('a\0b\x07\x08\x7f\x9b\tc').textContent).toBe('a\\x00b\\x07\\x08\\x7f\\x9b\tc');
  });

  test('nothing changes the direction of a line', () => {
    expect(drawn('user\u202enimda\u2066x\u200f').textContent).toBe('user\\u202enimda\\u2066x\\u200f');
  });

  test('half a character is visible, a whole one is left alone', () => {
    expect(visible('\ud83d \ude00 😀')).toBe('\\ud83d \\ude00 😀');
  });

  test('10 MB in one line are shown cut, never inside a character', () => {
    const line = 'a' + '😀'.repeat(5_000_000);
    const { element, cut } = draw(line);
    expect(element.textContent!.length).toBeLessThanOrEqual(SHOWN_CHARACTERS);
    expect(element.textContent!.endsWith('😀')).toBe(true);
    expect(cut).toBeGreaterThan(9_990_000);
    expect(draw('short').cut).toBe(0);
    expect(draw('\x1b[0m'.repeat(1_000_000)).element.textContent).toBe('');
  });

  test('what is copied is what is seen', () => {
    expect(shownText('\x1b[31mred\x1b[0m \0 \u202e')).toBe('red \\x00 \\u202e');
  });
});

describe('links', () => {
  test('http and https become links that take nothing along', () => {
    const link = drawn('see (https://a.org/x?y=1&z=[2]), and').querySelector('a')!;
    expect(link.getAttribute('href')).toBe('https://a.org/x?y=1&z=[2]');
    expect([link.rel, link.target, link.textContent]).toEqual([
      'noopener noreferrer',
      '_blank',
      'https://a.org/x?y=1&z=[2]'
    ]);
  });

  test.each(['javascript:alert(1)', 'file:///etc/passwd', 'data:text/html,x', 'vscode://x', 'xhttp://a', 'https://'])(
    '%s does not',
    line => expect(drawn(line).querySelector('a')).toBeNull()
  );

  test('an address ends where it could deceive', () => {
    expect(drawn('http://a.org/\u202eb').querySelector('a')!.getAttribute('href')).toBe('http://a.org/');
    expect(drawn('http://a.org/"onclick=x').querySelector('a')!.getAttribute('href')).toBe('http://a.org/');
  });
});

test('what a search found is marked, across colours, links and controls', () => {
  const element = drawn('\x1b[31mlo\x1b[0mss\0 http://a.org', [
    [0, 5],
    [8, 12]
  ]);
  expect([...element.querySelectorAll('mark')].map(mark => mark.textContent)).toEqual(['lo', 'ss\\x00', 'tp:/']);
  expect(element.textContent).toBe('loss\\x00 http://a.org');
});
